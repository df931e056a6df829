"""Ledgers with one bug each, the kind that real projects ship. The simulator must find them all."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fencepost.ledger.api import NOTHING
from fencepost.ledger.memory import MemoryLedger
from fencepost.model.claim import FOREVER, Change, Claimed, Decision, Facts, Verdict, Want
from fencepost.model.run import RunRecord, State
from fencepost.stores.memory import MemoryShelf, MemoryStore
from fencepost.testing.simulator.ledgers import LedgerServer, memory_ledger
from fencepost.testing.simulator.runs import RunParts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.ledger.api import Attempt, Report
    from fencepost.model.ending import Settled
    from fencepost.model.item import ItemState
    from fencepost.model.lease import Grant, Holder
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld


def served_by(kind: type[MemoryLedger]) -> RunParts:
    """Serve a broken relative of the memory ledger."""
    return RunParts(server=partial(memory_ledger, kind=kind))


# 1. "UPDATE runs SET state = 'succeeded' WHERE id = :id AND state = 'running'"


class FinishesForAnybody(MemoryLedger):
    def _ours(self, attempt: Attempt, what: str) -> RunRecord:
        run = self.books.runs[attempt.key]
        if what == "finish" and run.state is State.RUNNING:
            return run
        return super()._ours(attempt, what)


# "slot = schedule.newest(time.time())", in the caller, and nobody asks again.


class BelievesCallers(MemoryLedger):
    def claim_now(self, want: Want) -> Claimed:
        return super().claim_now(want._replace(since=0.0, until=FOREVER))


# 2. "run.attempts += 1; run.save()", in the line after the job was called.


class CountsAfterwards(MemoryLedger):
    def _go(self, want: Want, facts: Facts, decision: Decision, *, now: float) -> Claimed:
        claimed = super()._go(want, facts, decision, now=now)
        assert claimed.run is not None
        if decision.adopted:
            return claimed
        run = self.put(claimed.run._replace(starts=claimed.run.starts - 1))
        return claimed._replace(run=run)

    async def finish(self, attempt: Attempt, settled: Settled, **report: Report) -> RunRecord:
        run = await super().finish(attempt, settled, **report)
        return run if run.state.terminal else self.put(run._replace(starts=run.starts + 1))


# 3. "UPDATE runs SET cursor = :cursor WHERE id = :id"


class SavesForAnybody(MemoryLedger):
    def _ours(self, attempt: Attempt, what: str) -> RunRecord:
        run = self.books.runs[attempt.key]
        if what == "save" and not run.state.terminal:
            return run
        return super()._ours(attempt, what)


# 4. Whoever finishes last is right: also about what an operator ended long ago.


class LastWordWins(MemoryLedger):
    def _ours(self, attempt: Attempt, what: str) -> RunRecord:
        run = self.books.runs[attempt.key]
        if what == "finish" and run.state is State.CANCELLED:
            return run
        return super()._ours(attempt, what)

    def put(self, run: RunRecord) -> RunRecord:
        before = self.books.runs.get(run.key)
        if before is None or before.state is not State.CANCELLED:
            return super().put(run)
        self.books.runs[run.key] = run
        return run


# 5. "UPDATE items SET state = 'done' WHERE id = :id"


class EndsForAnybody(MemoryLedger):
    async def end(
        self,
        attempt: Attempt,
        *,
        scope: str,
        items: Sequence[tuple[str, ItemState, str | None]],
        call: str | None = None,
    ) -> None:
        for item, state, error in items:
            known = self.books.items.get((scope, item))
            if known is not None:
                self.books.items[scope, item] = known._replace(state=state, error=error)


# 6. A take-over renews the lease that was there, token and all.


class KeepsTheToken(MemoryStore):
    def give(self, name: str, holder: Holder, ttl: float, *, above: int = 0) -> Grant:
        before = self._shelf.records.get(self._key(name))
        grant = super().give(name, holder, ttl, above=above)
        if before is None or not before.held:
            return grant
        record = self._shelf.records[self._key(name)]
        self._shelf.records[self._key(name)] = record._replace(token=before.token)
        return grant._replace(token=before.token)


def _keeps_the_token(
    world: SimulatedWorld, recorder: Recorder, stopped: Callable[[Holder], bool]
) -> LedgerServer:
    store = KeepsTheToken(world, shelf=MemoryShelf(world), stopped=stopped)
    return LedgerServer(MemoryLedger(world, store), recorder, world)


# 7. "if run.checkpoint: log.info('starting over')": a new attempt that forgets the old ones'.


class StartsOver(MemoryLedger):
    def _go(self, want: Want, facts: Facts, decision: Decision, *, now: float) -> Claimed:
        claimed = super()._go(want, facts, decision, now=now)
        assert claimed.run is not None
        if decision.adopted:
            return claimed
        return claimed._replace(run=self.put(claimed.run._replace(checkpoint=None)))


# 8. A lost attempt is a failed one, and failed ones are tried again: "at most once", twice.


class TriesAgainAfterALoss(MemoryLedger):
    async def claim(self, want: Want) -> Claimed:
        claimed = await super().claim(want)
        run = claimed.run
        if claimed.verdict is not Verdict.ENDED or run is None or run.reason != "lost":
            return claimed
        self.books.runs[run.key] = run._replace(state=State.PENDING, reason="", ended_at=0.0)
        facts = self._facts(want)
        if facts.standings[run.lease].held:
            return claimed
        decision = Decision(Verdict.GO, lease=run.lease, change=Change(State.RUNNING))
        return self._go(want, facts, decision, now=self._world.clocks.wall())


# 9. A repeated request is welcome whenever it comes: what it says was true once.


class KeepsWhatComesLate(MemoryLedger):
    async def save(
        self,
        attempt: Attempt,
        *,
        checkpoint: str,
        order: int | None = None,
        report: Report = NOTHING,
    ) -> bool:
        return await super().save(attempt, checkpoint=checkpoint, report=report)


# Each bug, and the promise that it breaks.
PLANTED = {
    "an end is taken from anybody": ("newest wins", served_by(FinishesForAnybody)),
    "attempts are counted afterwards": ("counted", served_by(CountsAfterwards)),
    "a checkpoint is taken from anybody": ("newest wins", served_by(SavesForAnybody)),
    "a late success overwrites cancelled": ("lives", served_by(LastWordWins)),
    "an item is ended by anybody": ("newest wins", served_by(EndsForAnybody)),
    "a take-over keeps the token": ("tokens grow", RunParts(server=_keeps_the_token)),
    "an attempt forgets the checkpoint": ("checkpoint", served_by(StartsOver)),
    "a lost run is tried again, whatever its policy": (
        "on loss",
        served_by(TriesAgainAfterALoss),
    ),
    "a late repeat takes the checkpoint back": ("checkpoint", served_by(KeepsWhatComesLate)),
}
