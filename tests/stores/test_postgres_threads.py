"""Threads of one process share a store, its pulse and its seats in line, and not their sessions."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest
from postgres_kit import free, granted, store_at

from fencepost.stores.postgres_rows import line_key
from fencepost.world.flow import finish
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.stores.postgres import PostgresStore
    from fencepost.stores.postgres_place import PostgresPlace


@pytest.fixture
def store() -> Iterator[PostgresStore]:
    store = store_at(shared(Postgres).url())
    yield store
    finish(store.close())


class Elsewhere(threading.Thread):
    """Work in another thread; what it raised is raised where it is waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self._work = work
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 -- told to whoever waits
            self._failure = error

    def ended(self) -> None:
        self.join(30)
        assert not self.is_alive()
        if self._failure is not None:
            raise self._failure


def first_in_line(store: PostgresStore) -> PostgresPlace:
    """Stand in line while somebody else has the lease, until the server calls; then it is free."""
    holder, grant = granted(store)
    place = finish(store.line("job"))
    assert place is not None
    while not place.in_turn:
        finish(place.turn(1.0))
    free(store, holder, grant)
    return place


def turns_kept(store: PostgresStore) -> int:
    """Return how many sessions have the turn in the line for the lease."""
    key = line_key("public", store.namespace, "job") & 0xFFFF_FFFF_FFFF_FFFF
    [(count,)] = shared(Postgres).run(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted "
        f"AND classid::bigint = {key >> 32} AND objid::bigint = {key & 0xFFFFFFFF}"
    )
    assert isinstance(count, int)
    return count


def test_threads_that_share_a_pulse_all_get_their_leases(store: PostgresStore) -> None:
    start = threading.Barrier(6)

    def work(number: int) -> None:
        start.wait()
        for _ in range(100):
            free(store, *granted(store, f"job {number}"), f"job {number}")

    for thread in [Elsewhere(partial(work, number)) for number in range(6)]:
        thread.ended()


def test_a_waiter_that_gives_up_cuts_nobody_elses_session() -> None:
    with Postgres.own() as server:
        store = store_at(server.url())
        place = first_in_line(store)
        with psycopg.connect(server.url()) as slow:
            slow.execute("SELECT * FROM fencepost_lease FOR UPDATE")
            other = Elsewhere(lambda: granted(store))
            while not server.run(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND query LIKE '%fencepost_lease%'"
            ):
                time.sleep(0.002)
            finish(place.leave(served=False))
        other.ended()
        finish(store.close())


def test_a_turn_is_kept_for_its_own_waiter_and_given_back_with_its_lease(
    store: PostgresStore,
) -> None:
    place = first_in_line(store)
    Elsewhere(lambda: free(store, *granted(store))).ended()  # another thread is quicker
    holder, grant = granted(store)
    finish(place.leave(served=True))
    assert turns_kept(store) == 1
    free(store, holder, grant)
    assert turns_kept(store) == 0
