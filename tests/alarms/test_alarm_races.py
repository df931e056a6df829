"""Who lives, where a sign of life and a claim of what was lost meet on an SQL server."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from alarmlab import Opened, firing_of, mariadb_book, postgres_book

from fencepost.model.alarm import Became
from fencepost.model.alarm_policy import AlarmPolicy
from fencepost.world.flow import finish
from joinlab import HOMES, Home, MariaHome, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.model.alarm import Batch

DATABASE = "alarm_races"


@pytest.fixture(params=HOMES, ids=str)
def home(request: pytest.FixtureRequest) -> Home:
    home: Home = request.param
    return home


@pytest.fixture
def opened(home: Home) -> Iterator[Opened]:
    make = mariadb_book if isinstance(home, MariaHome) else postgres_book
    book = make(home.database(DATABASE) + home.options, namespace=f"n{time.time_ns()}")
    finish(book.book.listed())  # which makes the tables
    yield book
    book.close()


def test_a_beat_that_is_being_committed_while_another_looks_for_lost_ones_is_believed(
    home: Home, opened: Opened
) -> None:
    """The claim reads the lease as it was before, and finds at its commit that it was renewed."""
    opened.set("a")
    (living,) = opened.claim(AlarmPolicy(lease=0.5)).claimed
    lease = living.record.lease
    raw = home.connected(home.database(DATABASE))
    with raw.cursor() as cursor:  # a beat, but for its commit
        cursor.execute(
            "UPDATE fencepost_lease SET beat = beat + 1, expires_us = expires_us + 60000000"
            " WHERE namespace = %s AND name = %s",
            (opened.ledger.namespace, lease),  # type: ignore[union-attr]
        )
        assert cursor.rowcount == 1
    until(lambda: not finish(opened.leases.peek(lease)).held)  # type: ignore[union-attr]
    batches: list[Batch] = []
    looking = threading.Thread(target=lambda: batches.append(opened.claim()))
    looking.start()
    until(lambda: home.waits(DATABASE) or not looking.is_alive())
    raw.commit()
    raw.close()
    looking.join()
    assert [(batch.claimed, batch.lost) for batch in batches] == [((), 0)]
    assert not finish(opened.book.beat(firing_of(living), ttl=30.0))
    assert finish(opened.book.finish(firing_of(living))).became is Became.DONE
