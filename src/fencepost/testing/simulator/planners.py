"""A planner behind the network: each verb is one instant, and what it changed is noted after it.

What is noted is the difference between the ledger's records before and after, not what the planner
says that it did. So one that moves a watermark and forgets the row is seen to do so.
"""

from __future__ import annotations

from fencepost.errors import RunLost
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.open import ledger_of
from fencepost.model.run import State
from fencepost.stores.memory import MemoryShelf, MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.simulator.ledgers import LedgerServer, RemoteLedger
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fencepost.ledger.api import Attempt, Ledger, Report
    from fencepost.ledger.planning import Ask, Begun, Instance, Lane, Note, Planner, Ticked
    from fencepost.model.definition import Definition, JobRecord
    from fencepost.model.lease import Grant, Holder
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import Flow, T

_ALL = 100_000


class PlannerServer(LedgerServer):
    """A production ledger and its planner, observed while they work.

    ``runs`` and ``jobs`` return all records that the ledger has now.
    """

    def __init__(
        self,
        ledger: Ledger,
        recorder: Recorder,
        world: SimulatedWorld,
        *,
        runs: Callable[[], Iterable[RunRecord]],
        jobs: Callable[[], Iterable[JobRecord]],
    ) -> None:
        super().__init__(ledger, recorder, world)
        self._planner: Planner = ledger.planner
        self.runs, self.jobs = runs, jobs
        self._stood: dict[str, JobRecord] = {}
        self._holders: dict[str, str] = {}  # of each lease: the nonce that was granted it last

    def announce(self, instance: Instance, definitions: Sequence[Definition]) -> list[Note]:
        """Ask the planner."""
        self._note("heard", instance.name, number=int(instance.version))
        return self._asked(instance.name, self._planner.announce(instance, definitions))

    def attend(self, instance: Instance) -> list[Note]:
        """Ask the planner."""
        self._note("heard", instance.name, number=int(instance.version))
        return self._asked(instance.name, self._planner.attend(instance))

    def depart(self, instance: Instance) -> None:
        """Ask the planner."""
        self._asked(instance.name, self._planner.depart(instance))

    def prune(self, most: int) -> int:
        """Ask the planner."""
        return finish(self._planner.prune(most=most))

    def tick(self, node: str, ask: Ask) -> Ticked:
        """Ask the planner, and note how attempts ended, what else became of runs, and grants."""
        ticked = finish(self._planner.tick(ask))
        for end, answer in zip(ask.ended, ticked.ended, strict=True):
            if isinstance(answer, RunLost):
                self._refused("finish", node, end.attempt)
            else:
                self._ended(node, end.attempt, answer)
        self._observe(node, ticked.begun)
        return ticked

    def beat(self, node: str, attempt: Attempt, ttl: float, report: Report) -> bool:
        """Ask the ledger, and note that the lease was renewed."""
        cancelled = super().beat(node, attempt, ttl, report)
        run = finish(self._ledger.find(attempt.key))
        assert run is not None, "what has beaten has a record"
        self._seen[run.key] = run
        return cancelled

    # What operators ask, who stand beside the server.

    def pause(self, job: str, until: float) -> None:
        """Pause a job, if the ledger knows it."""
        if finish(self._planner.job(job)) is not None:
            self._note("pausing", "operator", job, until=until)
            self._asked("operator", self._planner.pause(job, reason="olga", until=until))

    def resume(self, job: str) -> None:
        """Resume a job, if the ledger knows it."""
        if finish(self._planner.job(job)) is not None:
            self._note("resuming", "operator", job)
            self._asked("operator", self._planner.resume(job))

    def backfill(self, lane: Lane) -> None:
        """Have slots of the past made up, if the ledger knows their job."""
        if finish(self._planner.job(lane.job)) is not None:
            self._asked("operator", self._planner.backfill(lane))

    @property
    def idle(self) -> bool:
        """Whether nothing is being made up."""
        return not finish(self._planner.lanes())

    def tell_all(self) -> None:
        """Note every run, range and backfill as the ledger has them in the end."""
        super().tell_all()
        for job in sorted(job.job for job in self.jobs()):
            for record in finish(self._planner.slots(job, start=0, end=2**60)).spans:
                span = record.span
                self._note(
                    "span",
                    "",
                    job,
                    token=span.first,
                    until=float(span.last),
                    detail=span.reason,
                    run=span.into,
                    state=span.state.value,
                    number=int(record.at),
                )
        for lane in finish(self._planner.lanes(active=False)):
            self._note(
                "lane",
                "",
                lane.job,
                token=lane.start,
                until=float(lane.until),
                detail=lane.spec,
                state="stopped" if lane.stopped else "ended" if lane.ended_at else "open",
                number=lane.number,
            )

    # What is noted.

    def _asked(self, node: str, asked: Flow[T]) -> T:
        answer = finish(asked)
        self._observe(node, ())
        return answer

    def _refused(self, what: str, node: str, attempt: Attempt) -> None:
        self._note("stale", node, "", attempt.nonce, attempt.token, 0.0, what, str(attempt.key))

    def _ended(self, node: str, attempt: Attempt, run: RunRecord) -> None:
        """Note that an attempt ended, unless that had been noted before."""
        before = self._seen.get(run.key)
        if before is None or before.state is not State.RUNNING or before.token != attempt.token:
            return
        self._seen[run.key] = run
        self._of_attempt("settled", node, attempt, attempt.lease, run.state.value, run.starts)
        if self._holders.get(attempt.lease) == attempt.nonce:  # else it had run out long ago
            self._note("released", node, attempt.lease, attempt.nonce, attempt.token)

    def _observe(self, node: str, begun: Sequence[Begun]) -> None:
        """Note what is not as it was: first what became of runs, then who has which of them.

        What was begun may have become something else again within the same verb.
        """
        keys = {_run_of(one).key for one in begun}
        for run in self.runs():
            before = self._seen.get(run.key)
            if before is not run and before != run and run.key not in keys:
                self._changed(node, before, run)
        if keys:
            self._begun(node, begun, {run.key: run for run in self.runs() if run.key in keys})
        for job in self.jobs():
            if self._stood.get(job.job) is not job:
                self._stands(node, job)

    def _begun(self, node: str, begun: Sequence[Begun], now: dict[RunKey, RunRecord]) -> None:
        """Note what was begun, and what has become of it since, by the order of its tokens."""
        noted: list[RunKey] = []
        for one in (*begun, None):
            run = None if one is None else _run_of(one)
            for key in noted:
                before, after = self._seen[key], now[key]
                if before != after and (run is None or before.token < after.token < run.token):
                    self._changed(node, before, after)
            if one is not None and run is not None:
                self._claimed(node, run, one.claimed.grant)
                noted.append(run.key)

    def _count_loss(self, node: str, run: RunRecord) -> None:
        """Note that an attempt is counted as lost."""
        before = self._seen.get(run.key)
        if before is not None and run.losses > before.losses:
            lost, key = before.holder.nonce, str(run.key)
            self._note("counted_lost", node, "", lost, before.token, 0.0, "", key)

    def _changed(self, node: str, before: RunRecord | None, run: RunRecord) -> None:
        if before is None:
            self._planned(node, run)
        elif run.state is State.RUNNING and before.token != run.token:
            self._claimed(node, run, None)
        elif run.cancel_at and not before.cancel_at:
            self._note("asked", node, run=str(run.key), state=run.state.value)
        if before is not None and before.state is State.RUNNING and run.token > before.token:
            self._note("broken", node, run.lease, token=run.token, run=str(run.key))
        self._count_loss(node, run)
        self._notice(node, run)

    def _planned(self, node: str, run: RunRecord) -> None:
        key, epoch = run.key, run.epoch
        self._note("planned", node, key.job, detail=run.trigger, run=str(key), number=epoch)

    def _claimed(self, node: str, run: RunRecord, grant: Grant | None) -> None:
        if run.key not in self._seen:
            self._planned(node, run)
        self._count_loss(node, run)
        self._seen[run.key] = run
        self._holders[run.lease] = run.holder.nonce
        self._note(
            "adopted" if grant is not None and grant.adopted else "claimed",
            node,
            run.lease,
            run.holder.nonce,
            run.token,
            self._scheduler.now + (0.0 if grant is None else grant.ttl),
            "",
            str(run.key),
            run.state.value,
            run.starts,
        )

    def _stands(self, node: str, job: JobRecord) -> None:
        before, self._stood[job.job] = self._stood.get(job.job), job
        if before is None or _standing(before) != _standing(job):
            self._note(
                "stands",
                node,
                job.job,
                job.rules,
                job.epoch,
                job.effective_from,
                job.spec,
                "",
                job.retired or job.barred,
                job.watermark,
            )


def _run_of(begun: Begun) -> RunRecord:
    assert begun.claimed.run is not None, "what was begun has a record"
    return begun.claimed.run


def _standing(job: JobRecord) -> tuple[object, ...]:
    return job.epoch, job.watermark, job.barred, job.retired


class ServedLedger(RemoteLedger):
    """A ledger as an instance has it, and its planner."""

    def __init__(self, world: SimulatedWorld, network: Network, server: PlannerServer) -> None:
        super().__init__(world, network, server)
        self.planner = RemotePlanner(world, network, server)


class RemotePlanner:
    """A planner as an instance has it: every verb is a request over the network."""

    def __init__(self, world: SimulatedWorld, network: Network, server: PlannerServer) -> None:
        self._world, self._network, self._server = world, network, server

    def announce(self, instance: Instance, definitions: Sequence[Definition]) -> Flow[list[Note]]:
        """Make jobs known."""
        return self._ask(self._server.announce, instance, definitions)

    def attend(self, instance: Instance) -> Flow[list[Note]]:
        """Say that an instance lives."""
        return self._ask(self._server.attend, instance)

    def depart(self, instance: Instance) -> Flow[None]:
        """Say that an instance has ended."""
        return self._ask(self._server.depart, instance)

    def prune(self, *, most: int) -> Flow[int]:
        """Forget old runs."""
        return self._ask(self._server.prune, most)

    def tick(self, ask: Ask) -> Flow[Ticked]:
        """Tell what has ended, and ask what is due."""
        return self._ask(self._server.tick, self._world.instance, ask)

    def _ask(self, verb: Callable[..., T], *args: object) -> Flow[T]:
        return self._network.ask(self._world, self._server, verb, *args)


def memory_planner(
    world: SimulatedWorld,
    recorder: Recorder,
    stopped: Callable[[Holder], bool],
    kind: type[MemoryLedger] = MemoryLedger,
) -> PlannerServer:
    """Serve the reference planner."""
    store = MemoryStore(world, shelf=MemoryShelf(world), stopped=stopped)
    ledger = kind(world, store)
    books = ledger.books
    return PlannerServer(ledger, recorder, world, runs=books.runs.values, jobs=books.jobs.values)


def sqlite_planner(
    world: SimulatedWorld, recorder: Recorder, _stopped: Callable[[Holder], bool]
) -> PlannerServer:
    """Serve the production SQL, on a database in memory. It notices no deaths."""
    ledger = ledger_of(world, SqliteStore(world, ":memory:"))
    return PlannerServer(
        ledger,
        recorder,
        world,
        runs=lambda: reversed(finish(ledger.runs(limit=_ALL))),
        jobs=lambda: finish(ledger.jobs()),
    )
