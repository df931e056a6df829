"""What tests of retention share: every ledger with a history, and the time that makes it old."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql
from ledgerlab import DONE, StillClocks, attempt_of, opened, run_through, wanted

from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.planning import Ask
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS
from fencepost.model.definition import Definition
from fencepost.model.schedule import Every, spec_of
from fencepost.model.slot import RunKey
from fencepost.stores.memory import MemoryStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from marialab import MariaClocks, MySQLClocks
from pglab import ServerClocks, fresh_namespace, opened_postgres
from servers import shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fencepost.ledger.api import Ledger
    from fencepost.ledger.planning import Asked
    from fencepost.model.claim import Want
    from fencepost.testing.clock import SettableClocks

FIRST = 1_700_000_000 // 60 * 60


class Place:
    """A ledger with a history that is about to be forgotten, and the way to another door of it."""

    def __init__(
        self,
        clocks: SettableClocks,
        opener: Callable[[], Ledger],
        raw: Callable[[], Any] | None = None,
    ) -> None:
        self.clocks, self._opener = clocks, opener
        self.ledger = opener()
        self.raw = raw
        self._others: list[Ledger] = []
        self.namespace = ""

    def another(self) -> Ledger:
        """Return the ledger as another process has it."""
        self._others.append(self._opener())
        return self._others[-1]

    def announce(self) -> None:
        """Have the ledger know the job."""
        finish(self.ledger.planner.announce(None, [Definition("old", spec_of(Every(60)))]))

    def history(self, count: int) -> list[int]:
        """Have so many slots succeed, and let them become old; return them."""
        self.announce()
        slots = [FIRST + 60 * number for number in range(count)]
        for slot in slots:
            run_through(self.ledger, RunKey("old", slot), f"then {slot}")
        self.age(after=slots[-1])
        return slots

    def age(self, *, after: int, times: int = 1) -> None:
        """Have so many newer slots succeed, and so much time pass, that all before them is old."""
        for number in range(1, KEPT_RUNS * times + 1):
            run_through(self.ledger, RunKey("old", after + 60 * number), f"kept {after} {number}")
        self.clocks.advance(max(0.0, after - self.clocks.wall()) + KEPT_FOR * times + 86_400)

    def close(self) -> None:
        for ledger in (self.ledger, *self._others):
            finish(ledger.close())
        if isinstance(self.clocks, ServerClocks):
            self.clocks.close()


def _sqlite(path: Path) -> Place:
    clocks = StillClocks()
    return Place(clocks, lambda: opened(path / "ledger.db", clocks))


def _memory(_: Path) -> Place:
    clocks = StillClocks()
    world = BlockingWorld(clocks=clocks)
    ledger = MemoryLedger(world, MemoryStore(world))
    return Place(clocks, lambda: ledger)


def _postgres(_: Path) -> Place:
    clocks = ServerClocks()
    space = f"{fresh_namespace()}-{os.getpid()}-old"
    place = Place(
        clocks,
        lambda: opened_postgres(clocks.url, namespace=space),
        lambda: psycopg.connect(clocks.url.partition("?")[0]),
    )
    place.namespace = space
    return place


def _maria(clocks: MariaClocks) -> Place:
    space = f"{fresh_namespace()}-{os.getpid()}-old"
    server = shared(clocks.kind)

    def raw() -> Any:
        return pymysql.connect(unix_socket=str(server.socket), user="root", database="still")

    place = Place(clocks, lambda: clocks.opened(space), raw)
    place.namespace = space
    return place


PLACES: dict[str, Callable[[Path], Place]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgres": _postgres,
    "mariadb": lambda _: _maria(MariaClocks()),
    "mysql": lambda _: _maria(MySQLClocks()),
}


def tick(ledger: Ledger, nonce: str, *, newest: int) -> list[RunKey]:
    """Make up what is to be made up; return which runs of slots up to ``newest`` have run."""

    def want(asked: Asked) -> Want:
        return wanted(asked.key, asked.nonce)._replace(trigger=asked.trigger, patient=True)

    ticked = finish(ledger.planner.tick(Ask(want, nonce, 10, sweep=True, only="old")))
    runs = [finish(ledger.finish(attempt_of(begun.claimed), DONE)) for begun in ticked.begun]
    return [run.key for run in runs if run.key.slot <= newest]


def pruned(ledger: Ledger, *, most: int = 20) -> int:
    """Prune until nothing is left to be forgotten; return how many runs were."""
    gone = 0
    while count := finish(ledger.planner.prune(most=most)):
        gone += count
    return gone


@contextmanager
def locked(place: Place, row: str) -> Iterator[Callable[[], None]]:
    """Keep a prune from committing: somebody else has locked a row that it has to change.

    Yields what lets it go on.
    """
    assert place.raw is not None
    with closing(place.raw()) as db, closing(db.cursor()) as cursor:
        cursor.execute(f"SELECT 1 FROM {row} AND namespace = %s FOR UPDATE", (place.namespace,))
        assert cursor.fetchall()
        yield db.rollback
        db.rollback()


def waits(place: Place, statement: str) -> bool:
    """Say whether a session waits for another one with such a statement."""
    assert place.raw is not None
    with closing(place.raw()) as db, closing(db.cursor()) as cursor:
        if isinstance(db, psycopg.Connection):
            cursor.execute(
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
                "AND position(%s IN query) > 0 AND pid <> pg_backend_pid()",
                (statement,),
            )
        else:
            cursor.execute(
                "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT' "
                "AND INSTR(trx_query, %s) > 0",
                (statement,),
            )
        return bool(cursor.fetchall())
