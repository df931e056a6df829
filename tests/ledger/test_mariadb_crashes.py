"""What a server has after it was killed among commits of user code."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pymysql
import pytest
from ledgerlab import claimed

from fencepost.errors import FencepostError, OutcomeUnknown
from fencepost.ledger.api import NOTHING
from fencepost.model.policy import Policy
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from joinlab import until
from marialab import opened_mariadb
from mariaplace import LoggedMariaDB, LoggedMySQL
from servers import MariaDB

if TYPE_CHECKING:
    from fencepost.ledger.api import Attempt


class OnDisk(LoggedMariaDB):
    """One that takes its time to write two logs: that is when it matters which was first."""

    in_memory = False


@pytest.mark.parametrize("kind", [MariaDB, OnDisk, LoggedMySQL])
def test_a_killed_server_has_what_it_acknowledged_and_nothing_that_it_did_not(
    kind: type[MariaDB],
) -> None:
    with kind.own() as server:
        ledger = opened_mariadb(server.database("test") + "?timeout=2")
        server.run("CREATE TABLE effect (name VARCHAR(64) PRIMARY KEY)", database="test")
        policy = Policy(lease=600.0)
        attempts = [claimed(ledger, RunKey(f"job{n}", 1), f"n{n}", policy) for n in range(4)]
        stop, told = threading.Event(), dict[str, str]()

        def work(attempt: Attempt) -> None:
            for number in range(10_000):
                name, joined = f"{attempt.key.job} {number}", ledger.join(attempt)
                try:
                    joined.begin(idle=10.0, longest=0.0)
                    joined.execute("INSERT INTO effect VALUES (%s)", (name,))
                    joined.commit(None, NOTHING)
                    told[name] = "done"
                except OutcomeUnknown:
                    told[name] = "unknown"
                except (FencepostError, pymysql.Error):
                    told[name] = "not done"
                    joined.roll_back()
                if stop.is_set():
                    return

        threads = [threading.Thread(target=work, args=(attempt,)) for attempt in attempts]
        for thread in threads:
            thread.start()
        until(lambda: len(told) > 100)
        server.kill()
        stop.set()
        for thread in threads:
            thread.join()
        server.start()
        assert server.run("XA RECOVER") == [], "it was never prepared"
        there = {str(name) for (name,) in server.run("SELECT name FROM effect", database="test")}
        assert {name for name, fate in told.items() if fate == "done"} <= there
        assert there.isdisjoint(name for name, fate in told.items() if fate == "not done")
        finish(ledger.close())
