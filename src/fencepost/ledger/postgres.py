"""Runs in the database that has the leases: a claim and its lease are one transaction.

Every commit survives what the server survives. A claim is two round trips: it waits for its turn
with the lock and reads, and it writes and commits. All else that an attempt says is one statement.
Who writes what, in which order, and why nobody waits for nobody: docs/decisions/0024.
"""

from __future__ import annotations

from fencepost.errors import BadName, LeaseLost, RunLost
from fencepost.ledger import postgres_books as books, postgres_rows as sql
from fencepost.ledger.api import NOTHING, Attempt, LedgerAbilities, Report
from fencepost.ledger.postgres_draft import Draft
from fencepost.ledger.postgres_schema import PART, STEPS
from fencepost.model.claim import leases_of
from fencepost.model.definition import JobRecord
from fencepost.model.item import Found, ItemState, find, once_each
from fencepost.model.run import TERMINAL, RunEvent, State
from fencepost.model.slot import parsed
from fencepost.stores.postgres_schema import bring_up_to_date

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    from fencepost.ledger.postgres_planner import PostgresPlanner
    from fencepost.model.claim import Claimed, Want
    from fencepost.model.ending import Settled
    from fencepost.model.item import ItemRecord
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.stores.postgres import PostgresStore
    from fencepost.world.api import World
    from fencepost.world.postgres import Statement, Transaction

    T = TypeVar("T")

# The longest name of a job in bytes: an entry of an index has its bounds.
_LONGEST = 1200


class PostgresLedger:
    """Runs in the rows of one database."""

    abilities = LedgerAbilities(durable=True, shared=True, transactional=False)

    def __init__(self, world: World, leases: PostgresStore) -> None:
        self._world, self.leases = world, leases
        self.namespace = leases.namespace
        self._door = leases.db
        self._ready = False
        self._planner: PostgresPlanner | None = None

    async def claim(self, want: Want) -> Claimed:
        """Decide, and carry the decision out."""
        return await self._world.call(self._claim, want)

    async def beat(self, attempt: Attempt, *, ttl: float, report: Report = NOTHING) -> bool:
        """Renew the lease and take the report."""
        return await self._world.call(self._beat, attempt, ttl, report)

    async def save(
        self,
        attempt: Attempt,
        *,
        checkpoint: str,
        order: int | None = None,
        report: Report = NOTHING,
    ) -> bool:
        """Keep a checkpoint."""
        values = {**self._own(attempt, report), "checkpoint": checkpoint, "order": order}
        rows = await self._world.call(self.changed, sql.SAVE, values)
        if not rows:
            await self._world.call(self._refuse, attempt, "save")
        return bool(rows[0][0])

    async def begin(
        self, attempt: Attempt, *, scope: str, items: Sequence[str], call: str, repeat: bool
    ) -> list[Found]:
        """Begin items."""
        return await self._world.call(self._begin, attempt, scope, items, call, repeat)

    async def end(
        self,
        attempt: Attempt,
        *,
        scope: str,
        items: Sequence[tuple[str, ItemState, str | None]],
        call: str | None = None,
    ) -> None:
        """End items that this attempt began."""
        once = {item: (state, error) for item, state, error in reversed(items)}
        values = {
            **self._own(attempt),
            "places": [sql.place_of(scope, item) for item in once],
            "states": [state.value for state, _ in once.values()],
            "errors": [error and sql.storable(error) for _, error in once.values()],
            "run": str(attempt.key),
            "call": call,
        }
        if not await self._world.call(self.changed, sql.END, values):
            await self._world.call(self._refuse, attempt, "end")

    async def finish(
        self, attempt: Attempt, settled: Settled, *, report: Report = NOTHING
    ) -> RunRecord:
        """End the attempt and release its lease."""
        return await self._world.call(self._finish, attempt, settled, report)

    async def hand_over(self, attempt: Attempt, *, ttl: float) -> None:
        """Entrust the attempt to whoever knows its token."""
        await self._world.call(self._hand_over, attempt, ttl)

    async def cancel(
        self, key: RunKey, *, force: bool, operator: str, only_waiting: bool = False
    ) -> RunRecord:
        """Cancel what does not run; ask what runs, or take it away."""

        def work(draft: Draft) -> RunRecord:
            draft.took_runs(*draft.begin(read=[draft.runs_by([key], alone=True)]), keys=[key])
            return books.cancel(draft, key, operator, force=force, only_waiting=only_waiting)

        return await self._world.call(self.drafted, work)

    async def sync(self) -> None:
        """Have nothing to wait for: every commit was synced."""

    async def note(self, key: RunKey, what: str, *, token: int = 0, detail: str = "") -> None:
        """Keep an event about a run."""
        values = {**self._key(key), "what": what, "token": token, "detail": sql.storable(detail)}
        await self._world.call(self.changed, sql.TELL, values)

    async def register(self, job: str, definition: str) -> None:
        """Keep the definition of a job."""
        values = {"namespace": self.namespace, "job": fitting(job), "definition": definition}
        await self._world.call(self.changed, sql.DEFINE, values)

    async def lift(self, job: str) -> bool:
        """Release a job from quarantine."""
        values = {"namespace": self.namespace, "job": job}
        return bool(await self._world.call(self.changed, sql.LIFT, values))

    async def find(self, key: RunKey) -> RunRecord | None:
        """Return a run."""
        rows = await self._world.call(self.read, sql.FIND, self._key(key))
        return sql.run_of(rows[0]) if rows else None

    async def runs(
        self, job: str | None = None, *, limit: int = 30, states: Sequence[State] = ()
    ) -> list[RunRecord]:
        """Return the newest runs, by slot."""
        values: dict[str, Any] = {"namespace": self.namespace, "limit": limit, "job": job}
        values["states"] = [state.value for state in states]
        live = bool(states) and TERMINAL.isdisjoint(states)
        statement = sql.listing(of_job=job is not None, live=live, chosen=bool(states))
        rows = await self._world.call(self.read, statement, values)
        return [sql.run_of(row) for row in rows]

    async def events(self, key: RunKey) -> list[RunEvent]:
        """Return what happened to a run."""
        rows = await self._world.call(self.read, sql.FIND_EVENTS, self._key(key))
        return [RunEvent(key, *row) for row in rows]

    async def items(self, scope: str, *, states: Sequence[ItemState] = ()) -> list[ItemRecord]:
        """Return the items of a scope."""
        values = {"namespace": self.namespace, "shelf": sql.shelf_of(scope), "scope": scope}
        rows = await self._world.call(self.read, sql.FIND_ITEMS, values)
        items = map(sql.item_of, rows)
        return [item for item in items if not states or item.state in states]

    async def counts(self, key: RunKey) -> dict[str, int]:
        """Return the counters of a run."""
        return dict(await self._world.call(self.read, sql.FIND_COUNTS, self._key(key)))

    async def jobs(self) -> list[JobRecord]:
        """Return all jobs."""
        values = {"namespace": self.namespace}
        rows = await self._world.call(self.read, sql.FIND_JOBS, values)
        return [JobRecord(*row) for row in rows]

    async def close(self) -> None:
        """Close the sessions, and with them the leases."""
        await self.leases.close()

    @property
    def planner(self) -> PostgresPlanner:
        """What instances ask."""
        if self._planner is None:
            from fencepost.ledger.postgres_planner import PostgresPlanner  # not for a lone trigger

            self._planner = PostgresPlanner(self._world, self)
        return self._planner

    # What runs behind the door.

    def read(self, statement: Statement, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that changes nothing."""
        self.prepared()
        return self._door.ask(statement, values, changes=False).rows

    def changed(self, statement: Statement, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that changes something, all or nothing."""
        self.prepared()
        return self._door.ask(statement, values).rows

    def drafted(self, work: Callable[[Draft], T]) -> T:
        """Decide on a draft and commit it; again, if somebody else was faster."""

        def inside(transaction: Transaction) -> T:
            draft = Draft(transaction, self.namespace)
            result = work(draft)
            if not draft.committed:
                draft.commit()
            return result

        self.prepared()
        return self._door.transaction(inside)

    def prepared(self) -> None:
        """Have the tables of this ledger, up to date."""
        if not self._ready:
            with self._door.session(changes=False) as session:
                bring_up_to_date(session, self._door.address.schema, PART, STEPS)
            self._ready = True

    def _claim(self, want: Want) -> Claimed:
        key, lock, names = want.key, want.lock, leases_of(want)
        fitting(key.job)

        def work(draft: Draft) -> Claimed:
            run, live, held, job = draft.begin(
                (sql.TURN, {"namespace": self.namespace, "lock": lock}),
                read=[
                    draft.runs_by([key], alone=True),
                    draft.live_of([lock]),
                    draft.leases_by(names, locks=[lock], jobs=[]),
                    draft.jobs_by([key.job]),
                ],
            )
            draft.took_runs(run, keys=[key])
            others = draft.took_runs(live, locks=[lock])
            draft.took_leases(held, names=[*names, *(other.lease for other in others)])
            draft.took_jobs(job, names=[key.job])
            return books.claim(draft, want)

        return self.drafted(work)

    def _beat(self, attempt: Attempt, ttl: float, report: Report) -> bool:
        values = {**self._own(attempt, report), "lease": attempt.lease, "ttl": ttl}
        rows = self.changed(sql.BEAT, values)
        if not rows:
            self._refuse(attempt, "beat")
        cancel_at, renewed = rows[0]
        if not renewed:
            raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
        return bool(cancel_at)

    def _finish(self, attempt: Attempt, settled: Settled, report: Report) -> RunRecord:
        state, error = settled.state, settled.error
        values = {
            **self._own(attempt, report),
            "state": state.value,
            "reason": sql.storable(settled.reason),
            "pause": 0.0 if state.terminal else settled.pause,
            "terminal": state.terminal,
            "again": state in (State.WAITING_RETRY, State.PENDING),
            "result": settled.result,
            "error": None if error is None else sql.storable(error),
        }
        rows = self.changed(sql.FINISH, values)
        if rows:
            return sql.run_of(rows[0])

        def work(draft: Draft) -> RunRecord | RunLost:
            read = [draft.runs_by([attempt.key], alone=True)]
            draft.took_runs(*draft.begin(read=read), keys=[attempt.key])
            return books.finish(draft, attempt, settled, report)

        ended = self.drafted(work)
        if isinstance(ended, RunLost):
            raise ended
        return ended

    def _hand_over(self, attempt: Attempt, ttl: float) -> None:
        values = {**self._own(attempt), "lease": attempt.lease, "ttl": ttl}
        rows = self.changed(sql.HAND_OVER, values)
        if rows and not rows[0][0]:
            raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
        if not rows:
            self._refuse(attempt, "hand_over")

    def _refuse(self, attempt: Attempt, what: str) -> None:
        """Record a write that came too late, and raise; but fine is who handed over what ended."""

        def work(draft: Draft) -> RunLost | None:
            read = [draft.runs_by([attempt.key], alone=True)]
            draft.took_runs(*draft.begin(read=read), keys=[attempt.key])
            run = draft.run(attempt.key)
            ended = run is not None and run.was_ended_by(attempt.token, attempt.nonce)
            return None if ended and what == "hand_over" else books.stale(draft, attempt, what)

        lost = self.drafted(work)
        if lost is not None:
            raise lost

    # Items.

    def _begin(
        self,
        attempt: Attempt,
        scope: str,
        items: Sequence[str],
        call: str,
        repeat: bool,  # noqa: FBT001 -- a door takes arguments by position
    ) -> list[Found]:
        wanted = {item: sql.place_of(scope, item) for item in items}
        values = {
            **self._own(attempt),
            "shelf": sql.shelf_of(scope),
            "scope": scope,
            "run": str(attempt.key),
            "call": call,
            "places": list(wanted.values()),
            "items": list(wanted),
        }
        rows = self.changed(sql.BEGIN_FIRST, values)
        if not any(row[0] == "ours" for row in rows):
            self._refuse(attempt, "begin")
        found = {row[2]: Found.FIRST for row in rows if row[0] == "begun"}
        for known in (sql.item_of(row[1:]) for row in rows if row[0] == "known"):
            seen = find(known, token=attempt.token, call=call, begun_by_living=False, repeat=repeat)
            # Whether who began it lives matters only where it is in doubt.
            if seen in (Found.DONE, Found.OPEN):
                found[known.item] = seen
        rest = {item: place for item, place in wanted.items() if item not in found}
        if rest:
            found |= self._begin_again(attempt, rest, values, repeat=repeat)
        return once_each(items, found)

    def _begin_again(
        self, attempt: Attempt, wanted: dict[str, str], values: dict[str, Any], *, repeat: bool
    ) -> dict[str, Found]:
        """Begin items that were begun before."""
        values = {**values, "places": list(wanted.values())}

        def work(draft: Draft) -> dict[str, Found] | None:
            ours, rows = draft.begin(read=[(sql.HAS_ALONE, values), (sql.FIND_SOME_ITEMS, values)])
            if not ours:
                return None
            items = [sql.item_of(row) for row in rows]
            makers = {parsed(item.run) for item in items}
            draft.took_runs(*draft.ask([draft.runs_by(makers)]), keys=makers)
            found = {}
            for item in items:
                run = draft.run(parsed(item.run))
                living = run is not None and run.state is State.RUNNING and run.token == item.token
                found[item.item] = find(
                    item,
                    token=attempt.token,
                    call=values["call"],
                    begun_by_living=living,
                    repeat=repeat,
                )
            places = [wanted[item] for item, seen in found.items() if seen.go]
            if places:
                draft.commit((sql.BEGIN_AGAIN, {**values, "places": places}))
            return found

        found = self.drafted(work)
        if found is None:
            self._refuse(attempt, "begin")
            raise AssertionError("a refusal is raised")
        return found

    # Values.

    def _key(self, key: RunKey) -> dict[str, Any]:
        return {"namespace": self.namespace, **key._asdict()}

    def _own(self, attempt: Attempt, report: Report = NOTHING) -> dict[str, Any]:
        """Return what finds the run of an attempt as long as it has it, and its report."""
        return {
            **self._key(attempt.key),
            "token": attempt.token,
            "nonce": attempt.nonce,
            "holder": attempt.holder,
            "done": report.done,
            "total": report.total,
            "source": report.source,
            "names": [name for name, _ in report.counts],
            "values": [value for _, value in report.counts],
        }


def fitting(name: str) -> str:
    """Return a name that an index can bear, or refuse it."""
    if len(name) * 4 > _LONGEST and len(name.encode()) > _LONGEST:
        raise BadName(
            f"{name[:40]!r}… has {len(name.encode())} bytes as UTF-8: a job in a PostgreSQL "
            f"ledger has at most {_LONGEST}"
        )
    return name
