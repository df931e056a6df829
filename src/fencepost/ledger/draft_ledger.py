"""Runs in the database that has the leases: a claim and its lease are one transaction.

Every commit survives what the server survives. A claim is two round trips: it waits for its turn
with the lock and reads, and it writes and commits. All else that an attempt says is one. What is
said to the server is in its dialect; who writes what, and in which order: docs/decisions/0024.
"""

from __future__ import annotations

from fencepost.errors import BadName, LeaseLost, RunLost
from fencepost.ledger import draft_books as books
from fencepost.ledger.api import NOTHING, Attempt, LedgerAbilities, Report
from fencepost.ledger.draft import Draft
from fencepost.ledger.draft_bearings import Bearings, Watch
from fencepost.ledger.draft_dialect import Doors
from fencepost.ledger.draft_values import item_of, job_of, place_of, run_of, shelf_of, storable
from fencepost.model.claim import Verdict, looked_at
from fencepost.model.item import Found, ItemState, find, once_each
from fencepost.model.run import TERMINAL, RunEvent, State
from fencepost.model.slot import parsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, TypeVar

    from fencepost.ledger.draft_dialect import Dialect, Transaction
    from fencepost.ledger.draft_planner import DraftPlanner
    from fencepost.ledger.draft_testimony import Testimony
    from fencepost.ledger.planning import Ear
    from fencepost.model.claim import Claimed, Want
    from fencepost.model.definition import JobRecord
    from fencepost.model.ending import Settled
    from fencepost.model.item import ItemRecord
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

    T = TypeVar("T")

# How often a claim waits for those who may have died: who has, is known to have after one.
_MOST_WAITS = 3


class DraftLedger(Doors):
    """Runs in the rows of one database. Who knows the server brings the doors to it."""

    leases: LeaseStore
    abilities = LedgerAbilities(durable=True, shared=True, transactional=False)

    def __init__(
        self, world: World, leases: LeaseStore, *, namespace: str, dialect: Dialect
    ) -> None:
        self._world, self.namespace, self.dialect = world, namespace, dialect
        self.leases, self._sql = leases, dialect.runs
        self._planner: DraftPlanner | None = None
        self.nonce, self.boottime = world.nonce, world.clocks.boottime
        self.testimony: Testimony | None = None  # where an older copy can be told

    async def claim(self, want: Want) -> Claimed:
        """Decide, and carry the decision out.

        Where that depends on somebody who may have died, it waits for as long as they could still
        believe in what they had, and decides then.
        """
        waited = 0.0
        for tries in range(_MOST_WAITS + 1):
            # Who comes and goes lives, as far as we know.
            claimed = await self._world.call(self._claim, want, tries == _MOST_WAITS)
            if not isinstance(claimed, float):
                break
            await self._world.sleep(claimed)
            waited += claimed
        assert not isinstance(claimed, float), "it was decided"
        if claimed.grant is None or not waited:
            return claimed
        # The caller counts from before.
        return claimed._replace(grant=claimed.grant._replace(ttl=claimed.grant.ttl + waited))

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
        values = {**self.own(attempt, report), "checkpoint": checkpoint, "order": order}
        rows = await self._world.call(self.changed, self._sql.SAVE, values)
        if not rows:
            await self._world.call(self.refuse, attempt, "save")
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
            **self.own(attempt),
            "places": [place_of(scope, item) for item in once],
            "states": [state.value for state, _ in once.values()],
            "errors": [error and storable(error) for _, error in once.values()],
            "run": str(attempt.key),
            "call": call,
        }
        if not await self._world.call(self.changed, self._sql.END, values):
            await self._world.call(self.refuse, attempt, "end")

    async def finish(
        self, attempt: Attempt, settled: Settled, *, report: Report = NOTHING
    ) -> RunRecord:
        """End the attempt and release its lease."""
        run = await self._world.call(self._finish, attempt, settled, report)
        self.ended([attempt])
        return run

    async def hand_over(self, attempt: Attempt, *, ttl: float) -> None:
        """Entrust the attempt to whoever knows its token."""
        await self._world.call(self._hand_over, attempt, ttl)

    async def order_stop(self, attempt: Attempt) -> bool:
        """Keep that the process of the attempt was ordered to stop."""
        values = self.own(attempt)
        return bool(await self._world.call(self.changed, self._sql.ORDER_STOP, values))

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
        values = {**self._key(key), "what": what, "token": token, "detail": storable(detail)}
        await self._world.call(self.changed, self._sql.TELL, values)

    async def register(self, job: str, definition: str) -> None:
        """Keep the definition of a job."""
        values = {"namespace": self.namespace, "job": self.fitting(job), "definition": definition}
        await self._world.call(self.changed, self._sql.DEFINE, values)

    async def lift(self, job: str) -> bool:
        """Release a job from quarantine."""
        values = {"namespace": self.namespace, "job": job}
        return bool(await self._world.call(self.changed, self._sql.LIFT, values))

    async def find(self, key: RunKey) -> RunRecord | None:
        """Return a run."""
        rows = await self._world.call(self.read, self._sql.FIND, self._key(key))
        return run_of(rows[0]) if rows else None

    async def runs(
        self, job: str | None = None, *, limit: int = 30, states: Sequence[State] = ()
    ) -> list[RunRecord]:
        """Return the newest runs, by slot."""
        values: dict[str, Any] = {"namespace": self.namespace, "limit": limit, "job": job}
        values["states"] = [state.value for state in states]
        live = bool(states) and TERMINAL.isdisjoint(states)
        statement = self._sql.listing(of_job=job is not None, live=live, chosen=bool(states))
        rows = await self._world.call(self.read, statement, values)
        return [run_of(row) for row in rows]

    async def events(self, key: RunKey) -> list[RunEvent]:
        """Return what happened to a run."""
        rows = await self._world.call(self.read, self._sql.FIND_EVENTS, self._key(key))
        return [RunEvent(key, *row) for row in rows]

    async def items(self, scope: str, *, states: Sequence[ItemState] = ()) -> list[ItemRecord]:
        """Return the items of a scope."""
        values = {"namespace": self.namespace, "shelf": shelf_of(scope), "scope": scope}
        rows = await self._world.call(self.read, self._sql.FIND_ITEMS, values)
        items = map(item_of, rows)
        return [item for item in items if not states or item.state in states]

    async def counts(self, key: RunKey) -> dict[str, int]:
        """Return the counters of a run."""
        return dict(await self._world.call(self.read, self._sql.FIND_COUNTS, self._key(key)))

    async def jobs(self) -> list[JobRecord]:
        """Return all jobs."""
        values = {"namespace": self.namespace}
        rows = await self._world.call(self.read, self._sql.FIND_JOBS, values)
        return [job_of(row) for row in rows]

    async def now(self) -> float:
        """Return the time of the server's clock."""
        rows = await self._world.call(self.read, self._sql.FIND_NOW, {})
        return float(rows[0][0])

    async def accept_copy(self) -> None:
        """Take this for the ledger, though it may be an older copy; an operator says so."""
        if self.testimony is not None:
            await self._world.call(self.testimony.accept)

    async def close(self) -> None:
        """Close the sessions, and with them the leases."""
        if self.testimony is not None:
            self.testimony.close()
        await self.leases.close()

    @property
    def planner(self) -> DraftPlanner:
        """What instances ask."""
        if self._planner is None:
            from fencepost.ledger.draft_planner import DraftPlanner  # not for a lone trigger

            self._planner = DraftPlanner(self._world, self)
        return self._planner

    # What runs behind the door.

    def bearings(self, *, leans: bool) -> Bearings:
        """Return what a transaction can know of who lives; who ``leans`` may be granted leases."""
        del leans
        return Bearings()

    def ended(self, attempts: Iterable[Attempt]) -> None:
        """Vouch no more for attempts that have ended."""

    def listen(self, heard: Callable[[str], None]) -> Ear | None:
        """Have what is said to instances heard, where the server carries words."""
        del heard
        return None

    def watch(self) -> Watch:
        """Return how those who schedule find out who has died."""
        return Watch()

    def drafted(
        self, work: Callable[[Draft], T], *, then: Callable[[T, Bearings], T] | None = None
    ) -> T:
        """Decide on a draft and commit it; again, if somebody else was faster.

        ``then`` has the last word about what was granted, and is given by those who may be.
        """

        def inside(transaction: Transaction) -> T:
            bearings = self.bearings(leans=then is not None)
            draft = Draft(transaction, self.namespace, self.dialect, bearings)
            try:
                result = work(draft)
                if not draft.committed:
                    draft.commit()
            finally:
                draft.also.clear()  # else it and who writes beside it keep all that was read alive
            return result if then is None else then(result, bearings)

        return self.transacted(inside)

    def refuse_doubtful(self, draft: Draft) -> None:
        """Have a draft raise, with its first question, if this may be an older copy."""
        if self.testimony is not None:
            self.testimony.ask_along(draft)

    def testify(self, run: RunRecord | None, *, ended: bool = False) -> None:
        """Keep outside of the database what was committed to it."""
        if self.testimony is not None and run is not None:
            self.testimony.tell(run, ended=ended)

    def _claim(self, want: Want, sure: bool) -> Claimed | float:  # noqa: FBT001 -- a door
        """Claim; or return how long to wait until it is known whether somebody lives."""
        key, lock, names = want.key, want.lock, looked_at(want)
        self.fitting(key.job)

        def work(draft: Draft) -> Claimed | float:
            self.refuse_doubtful(draft)
            run, live, held, job = draft.begin(
                (self._sql.TURN, {"namespace": self.namespace, "lock": lock}),
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
            claimed = books.claim(draft, want)
            doubt = 0.0 if sure else max(draft.bearings.hushed.values(), default=0.0)
            if doubt and claimed.verdict is not Verdict.GO:
                draft.committed = True  # nothing of it is to be
                return doubt
            return claimed

        def then(claimed: Claimed | float, bearings: Bearings) -> Claimed | float:
            return claimed if isinstance(claimed, float) else bearings.leaning(claimed)

        claimed = self.drafted(work, then=then)
        if not isinstance(claimed, float) and claimed.grant is not None:
            self.testify(claimed.run)
        return claimed

    def _beat(self, attempt: Attempt, ttl: float, report: Report) -> bool:
        values = {**self.own(attempt, report), "lease": attempt.lease, "ttl": ttl}
        rows = self.changed(self._sql.BEAT, values)
        if not rows:
            self.refuse(attempt, "beat")
        cancel_at, renewed = rows[0]
        if not renewed:
            raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
        return bool(cancel_at)

    def _finish(self, attempt: Attempt, settled: Settled, report: Report) -> RunRecord:
        state, error = settled.state, settled.error
        values = {
            **self.own(attempt, report),
            "state": state.value,
            "reason": storable(settled.reason),
            "pause": 0.0 if state.terminal else settled.pause,
            "terminal": state.terminal,
            "again": state in (State.WAITING_RETRY, State.PENDING),
            "result": settled.result,
            "error": None if error is None else storable(error),
        }
        rows = self.changed(self._sql.FINISH, values)
        if rows:
            run = run_of(rows[0])
            self.testify(run, ended=True)
            return run

        def work(draft: Draft) -> RunRecord | RunLost:
            read = [draft.runs_by([attempt.key], alone=True)]
            draft.took_runs(*draft.begin(read=read), keys=[attempt.key])
            return books.finish(draft, attempt, settled, report)

        ended = self.drafted(work)
        if isinstance(ended, RunLost):
            raise ended
        return ended

    def _hand_over(self, attempt: Attempt, ttl: float) -> None:
        values = {**self.own(attempt), "lease": attempt.lease, "ttl": ttl}
        rows = self.changed(self._sql.HAND_OVER, values)
        if rows and not rows[0][0]:
            raise LeaseLost(attempt.lease, token=attempt.token, reason="it ran out")
        if not rows:
            self.refuse(attempt, "hand_over")

    def refuse(self, attempt: Attempt, what: str) -> None:
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
        wanted = {item: place_of(scope, item) for item in items}
        values = {
            **self.own(attempt),
            "shelf": shelf_of(scope),
            "scope": scope,
            "run": str(attempt.key),
            "call": call,
            "places": list(wanted.values()),
            "items": list(wanted),
        }
        rows = self.changed(self._sql.BEGIN_FIRST, values)
        if not any(row[0] == "ours" for row in rows):
            self.refuse(attempt, "begin")
        found = {row[2]: Found.FIRST for row in rows if row[0] == "begun"}
        for known in (item_of(row[1:]) for row in rows if row[0] == "known"):
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
            ours, rows = draft.begin(
                read=[(self._sql.HAS_ALONE, values), (self._sql.FIND_SOME_ITEMS, values)]
            )
            if not ours:
                return None
            items = [item_of(row) for row in rows]
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
                draft.commit((self._sql.BEGIN_AGAIN, {**values, "places": places}))
            return found

        found = self.drafted(work)
        if found is None:
            self.refuse(attempt, "begin")
            raise AssertionError("a refusal is raised")
        return found

    # Values.

    def fitting(self, name: str) -> str:
        """Return a name of a job that an index can bear, or refuse it."""
        kind, longest = self.dialect.kind, self.dialect.longest
        if len(name) * 4 > longest and len(name.encode()) > longest:
            raise BadName(
                f"{name[:40]!r}… has {len(name.encode())} bytes as UTF-8: a job in a {kind} "
                f"ledger has at most {longest}"
            )
        return name

    def _key(self, key: RunKey) -> dict[str, Any]:
        return {"namespace": self.namespace, **key._asdict()}

    def own(self, attempt: Attempt, report: Report = NOTHING) -> dict[str, Any]:
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
