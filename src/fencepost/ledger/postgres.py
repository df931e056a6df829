"""The ledger of a PostgreSQL database: how it is asked, and what makes its tables."""

from __future__ import annotations

from fencepost.ledger import (
    postgres_leases as leases_sql,
    postgres_life,
    postgres_planner_rows as plans_sql,
    postgres_retention_rows,
    postgres_rousing as rousing,
    postgres_rows as runs_sql,
    postgres_usual as usual,
)
from fencepost.ledger.api import NOTHING, LedgerAbilities
from fencepost.ledger.draft_dialect import Dialect
from fencepost.ledger.draft_ledger import DraftLedger
from fencepost.ledger.draft_testimony import Testimony
from fencepost.ledger.draft_usual import Words, ended
from fencepost.ledger.draft_values import packed
from fencepost.ledger.postgres_bearings import PostgresBearings, PostgresWatch
from fencepost.ledger.postgres_schema import PART, STEPS
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.claimed import begun_record
from fencepost.model.lease import Grant
from fencepost.stores.postgres_schema import bring_up_to_date
from fencepost.world.postgres_ear import Ear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, TypeVar

    from fencepost.ledger.api import Attempt, Report
    from fencepost.ledger.draft_dialect import Transaction
    from fencepost.ledger.postgres_joined import PostgresJoined
    from fencepost.model.claim import Want
    from fencepost.model.ending import Settled
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.stores.postgres import PostgresStore
    from fencepost.world.api import World
    from fencepost.world.postgres import Session, Statement

    T = TypeVar("T")

DIALECT = Dialect(
    "PostgreSQL",
    runs_sql,
    leases_sql,
    plans_sql,
    postgres_retention_rows,
    longest=1200,
    packed=packed,
    usual=Words(
        usual.END_ALL, usual.PASS_ALL, usual.BEGIN_ALL, usual.GRANT_FIRST, usual.GRANT_AGAIN
    ),
    rouse=rousing.ROUSE,
    mark_awaited=rousing.MARK_AWAITED,
)

# How many runs are kept in mind that were asked for: who asks again finds something unusual.
_MOST_ASKED = 1000


class PostgresLedger(DraftLedger):
    """Runs in the rows of one PostgreSQL database."""

    leases: PostgresStore
    abilities = LedgerAbilities(durable=True, shared=True, transactional=True)

    def __init__(self, world: World, leases: PostgresStore) -> None:
        self._door, space = leases.db, leases.namespace
        channel = rousing.channel_of(self._door.address.schema, space)
        dialect = DIALECT._replace(channel=channel)
        super().__init__(world, leases, namespace=space, dialect=dialect)
        self._ready = False
        where = f"PostgreSQL at {self._door.where}"
        self._testimony = self.testimony = Testimony(self, postgres_life, where=where)
        self.spare: list[Session] = []  # for transactions of user code, and nothing else
        self._asked: set[RunKey] = set()

    async def close(self) -> None:
        """Close the sessions, and with them the leases."""
        while self.spare:
            session = self.spare.pop()
            if not session.broken:  # else it is a parent's, whose copy a fork has dropped
                session.close()
        await super().close()

    def join(self, attempt: Attempt) -> PostgresJoined:
        """Return a transaction that statements of user code may join."""
        from fencepost.ledger.postgres_joined import PostgresJoined  # not for a lone trigger

        return PostgresJoined(self, attempt)

    def read(self, statement: Statement, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that changes nothing."""
        self.prepared()
        return self._door.ask(statement, values, changes=False).rows

    def changed(self, statement: Statement, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that changes something, all or nothing."""
        self.prepared()
        return self._door.ask(statement, values).rows

    def transacted(self, work: Callable[[Transaction], T]) -> T:
        """Run ``work`` in one transaction, and again if it lost against another one."""
        self.prepared()
        return self._door.transaction(work)

    def bearings(self, *, leans: bool) -> PostgresBearings:
        """Return what a transaction can know of who lives: what their pulses tell."""
        return PostgresBearings(self.leases, leans=leans)

    def ended(self, attempts: Iterable[Attempt]) -> None:
        """Vouch no more for attempts that have ended."""
        leans = self.leases.pulse_here.vouching.leans
        for attempt in attempts:
            leans.pop(attempt.nonce, None)

    def listen(self, heard: Callable[[str], None]) -> Ear | None:
        """Have what is said to instances heard, by a session of its own."""
        try:
            return Ear(self._door, self.dialect.channel, heard)
        except RuntimeError:  # the system has no more threads: to look is enough
            return None

    def watch(self) -> PostgresWatch:
        """Return how those who schedule find out who has died."""
        return PostgresWatch(self.leases)

    def prepared(self) -> None:
        """Have the tables of this ledger, up to date."""
        if not self._ready:
            with self._door.session(changes=False) as session:
                bring_up_to_date(session, self._door.address.schema, PART, STEPS)
            self._ready = True

    # What is usual is one statement; all else is decided on a draft.

    def _claim(self, want: Want, sure: bool) -> Claimed | float:  # noqa: FBT001 -- a door
        self.fitting(want.key.job)
        claimed = self._claim_free(want) if usual.is_usual(want) else None
        return super()._claim(want, sure) if claimed is None else claimed

    def _claim_free(self, want: Want) -> Claimed | None:
        """Claim in one round trip what nothing speaks against; None elsewhere."""
        seen = self._testimony.as_seen()
        if seen is None or want.key in self._asked:
            return None
        if len(self._asked) >= _MOST_ASKED:
            self._asked.clear()
        self._asked.add(want.key)
        self.prepared()
        bearings = self.bearings(leans=True)
        values = {**usual.claim_of(want, namespace=self.namespace), **bearings.terms, **seen}
        _, granted = self._door.batch([(runs_sql.TURN, values), (usual.CLAIM_FREE, values)])
        if not granted.rows:
            return None
        token, now, *answer = granted.rows[0]
        bearings.granted(answer)
        run = begun_record(want, token=token, now=now)
        self.testify(run)
        grant = Grant(token, want.policy.lease)
        return bearings.leaning(Claimed(Verdict.GO, run, grant, now=now))

    def _finish(self, attempt: Attempt, settled: Settled, report: Report) -> RunRecord:
        if settled.state.terminal and report == NOTHING and attempt.run is not None:
            end = usual.end_of(attempt, settled, namespace=self.namespace)
            rows = self.changed(usual.FINISH_FOR_GOOD, end)
            if rows:
                run = ended(attempt, settled, *rows[0])
                self.testify(run, ended=True)
                return run
        return super()._finish(attempt, settled, report)
