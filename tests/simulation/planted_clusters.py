"""Planners with one bug each, the kind that real schedulers ship. The simulator must find them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.memory_planner import MemoryPlanner, _MemoryDesk
from fencepost.ledger.ticking import tick
from fencepost.model.claim import Claimed, Standing, Verdict, Want
from fencepost.model.plan import Past, Span, next_start
from fencepost.model.run import RunRecord, State
from fencepost.testing.simulator.planners import memory_planner
from fencepost.testing.simulator.serving import ServingParts

if TYPE_CHECKING:
    from fencepost.ledger.api import Attempt
    from fencepost.ledger.planning import Ask, Ticked
    from fencepost.model.cohort import Cohort
    from fencepost.model.definition import Definition, JobRecord


def planned_on(kind: type[_MemoryDesk]) -> ServingParts:
    """Serve a planner that works on a broken relative of the memory desk."""

    class Planner(MemoryPlanner):
        def _desk(self) -> _MemoryDesk:
            return kind(self._ledger, self._world.clocks.wall())

    return planned_by(Planner)


def planned_by(kind: type[MemoryPlanner]) -> ServingParts:
    """Serve a broken relative of the memory planner."""

    class Ledger(MemoryLedger):
        @property
        def planner(self) -> MemoryPlanner:
            return kind(self._world, self)

    return served_by(Ledger)


def served_by(kind: type[MemoryLedger]) -> ServingParts:
    """Serve a broken relative of the memory ledger."""
    return ServingParts(server=partial(memory_planner, kind=kind))


# 1. "schedule.last_run_at = now; schedule.save(); queue.put(job)", and the queue is gone.


class AdvancesFirst(_MemoryDesk):
    def claim(self, want: Want) -> Claimed:
        lost = want.trigger == "schedule" and want.key.slot % 7 == 0
        if lost and self.run(want.key) is None:
            return Claimed(Verdict.ENDED, None)
        return super().claim(want)


# 2. "job_store.add_job(job, replace_existing=True)", each time a process starts.


class LastWriterWins(_MemoryDesk):
    def join(self, instance: str, definition: Definition, cohort: Cohort) -> None:
        super().join(instance, definition, cohort._replace(since=self.now))


# 3. What was granted by an answer that got lost stays granted, to nobody.


class NeverAdopts(_MemoryDesk):
    def granted(self, nonce: str) -> list[Claimed]:
        return []


# 4. And the opposite: whoever asks again is given all that its process ever was.


class AdoptsTooMuch(_MemoryDesk):
    def granted(self, nonce: str) -> list[Claimed]:
        return super().granted(nonce.partition("-")[0])


# 5. "DELETE FROM locks WHERE created_at < now() - interval '5 seconds'"


class IgnoresRenewals(MemoryLedger):
    def standing(self, name: str) -> Standing:
        standing = super().standing(name)
        old = standing.held and self._world.clocks.wall() - standing.since > 5.0
        return Standing(name) if old else standing


# 6. The cron expression is edited, and everything since the last run is due under it.


class KeepsTheWatermark(_MemoryDesk):
    def put_job(self, job: JobRecord) -> None:
        before = self.job(job.job)
        schedule = job.schedule
        if before is not None and job.epoch > before.epoch and schedule is not None:
            due = next_start(schedule, job.catching_up, job.job, before.watermark)
            job = job._replace(watermark=before.watermark, next_due=due)
        super().put_job(job)


# 7. What nobody ran is no news.


class RecordsNoRanges(_MemoryDesk):
    def span(self, job: str, span: Span, *, apart: bool = False) -> None:
        del job, span, apart


# 8. "if datetime.now() >= job.next_run", on whichever machine that is.


class PlansByItsOwnClock(MemoryPlanner):
    async def tick(self, ask: Ask) -> Ticked:
        off = 40.0 * (ord(ask.nonce[0]) - ord("b"))
        return tick(_MemoryDesk(self._ledger, self._world.clocks.wall() + off), ask)


# 9. "INSERT INTO runs …" without a unique key: the slot that another instance has is made again.


class ForgetsWhatRuns(_MemoryDesk):
    def newest_rerun(self, key: object) -> RunRecord | None:
        found = super().newest_rerun(key)  # type: ignore[arg-type]  # whatever is asked
        if found is not None and not found.state.terminal:
            return found._replace(state=State.FAILED)
        return found

    def claim(self, want: Want) -> Claimed:
        if want.trigger == "backfill" and want.key.rerun:
            want = want._replace(lock=f"{want.lock} again")
        return super().claim(want)


# 10. "while True: run(); sleep(interval)", in each process of its own.


class NeverWaits(_MemoryDesk):
    def past(self, job: str) -> Past:
        return super().past(job)._replace(live=False, ended_at=0.0)


# 11. A take-over while the edit is under way: the watermark falls to what the editor had read.


class WritesWhatItRead(_MemoryDesk):
    def put_job(self, job: JobRecord) -> None:
        self._books.jobs[job.job] = job

    def move_job(self, job: JobRecord) -> None:
        stale = job.watermark % 5 == 0 and job.epoch > 1
        self.put_job(job._replace(watermark=job.watermark - 60) if stale else job)


# 12. A stop is a stop: who needs it on record?


class KeepsNoOrders(MemoryLedger):
    async def order_stop(self, attempt: Attempt) -> bool:
        del attempt
        return True


# 13. "on SIGTERM: release everything", while the thread is still at it.


class ReleasesAtOnce(MemoryLedger):
    async def order_stop(self, attempt: Attempt) -> bool:
        ordered = await super().order_stop(attempt)
        with self.leases.turn:
            self.leases.end(attempt.lease, attempt.nonce)
        return ordered


# Each bug, and the promise that it breaks.
PLANTED = {
    "the watermark moves before the run is there": ("covered", planned_on(AdvancesFirst)),
    "the last process that starts says what a job is": ("one version", planned_on(LastWriterWins)),
    "whoever asks again is given too much": ("counted", planned_on(AdoptsTooMuch)),
    "a lease counts from its grant, whatever was renewed": (
        "one holder",
        served_by(IgnoresRenewals),
    ),
    "an edit keeps the old watermark": ("belongs", planned_on(KeepsTheWatermark)),
    "ranges are not recorded": ("covered", planned_on(RecordsNoRanges)),
    "each instance plans by its own clock": ("belongs", planned_by(PlansByItsOwnClock)),
    "a slot that runs is made again": ("one row", planned_on(ForgetsWhatRuns)),
    "a delay after completion counts from the slot": ("belongs", planned_on(NeverWaits)),
    "an order to stop is not kept": ("ordered", served_by(KeepsNoOrders)),
    "who is ordered to stop loses its lease at once": ("one holder", served_by(ReleasesAtOnce)),
    "a watermark falls": ("watermark", planned_on(WritesWhatItRead)),
}
UNADOPTED = planned_on(NeverAdopts)
