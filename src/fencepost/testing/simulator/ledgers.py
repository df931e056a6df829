"""A ledger behind the network: each verb is carried out in one instant, and noted as it was.

What is noted is what the ledger's own records say afterwards, not what it was asked for. So a
ledger that writes what it should have refused is seen to do so.
"""

from __future__ import annotations

from fencepost.errors import Lost
from fencepost.ledger.api import NOTHING
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.open import ledger_of
from fencepost.model.claim import Verdict
from fencepost.model.run import State
from fencepost.stores.memory import MemoryShelf, MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.simulator.servers import LeaseServer, RemoteStore, instance
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fencepost.ledger.api import Attempt, Ledger, LedgerAbilities, Report
    from fencepost.model.claim import Claimed, Want
    from fencepost.model.definition import JobRecord
    from fencepost.model.ending import Settled
    from fencepost.model.item import Found, ItemRecord, ItemState
    from fencepost.model.lease import Holder
    from fencepost.model.run import RunEvent, RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.stores.api import LeaseStore
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import Flow, T

    Ends = Sequence[tuple[str, ItemState, str | None]]

_ALL = 1000


class LedgerServer(LeaseServer):
    """A production ledger and its leases, observed while they work."""

    def __init__(self, ledger: Ledger, recorder: Recorder, world: SimulatedWorld) -> None:
        super().__init__(ledger.leases, recorder, world.scheduler, delete=lambda _: False)
        self.abilities = ledger.abilities
        self._ledger = ledger
        self._seen: dict[RunKey, RunRecord] = {}
        self._scopes: dict[str, None] = {}

    def claim(self, want: Want) -> Claimed:
        """Ask the ledger, and note what became of the run and of those in its way."""
        claimed = finish(self._ledger.claim(want))
        node, run, grant = instance(want.holder), claimed.run, claimed.grant
        if claimed.verdict is not Verdict.GO or run is None or grant is None:
            if run is not None:
                self._notice(node, run)
            return claimed
        self._seen[run.key] = run
        self._note(
            "adopted" if grant.adopted else "claimed",
            node,
            run.lease,
            run.holder.nonce,
            grant.token,
            self._scheduler.now + grant.ttl,
            run=str(run.key),
            state=run.state.value,
            number=run.starts,
        )
        for key, seen in list(self._seen.items()):
            if seen.lock == run.lock and not seen.state.terminal and key != run.key:
                self._look(node, key)
        return claimed

    def beat(self, node: str, attempt: Attempt, ttl: float, report: Report) -> bool:
        """Ask the ledger, and note that the lease was renewed."""
        cancelled = self._write(
            "beat", node, attempt, self._ledger.beat(attempt, ttl=ttl, report=report)
        )
        self._note(
            "beat",
            node,
            attempt.lease,
            attempt.nonce,
            attempt.token,
            self._scheduler.now + ttl,
            run=str(attempt.key),
        )
        return cancelled

    def save(
        self, node: str, attempt: Attempt, checkpoint: str, order: int | None, report: Report
    ) -> bool:
        """Ask the ledger, and note the checkpoint that it has now."""
        asked = self._ledger.save(attempt, checkpoint=checkpoint, order=order, report=report)
        cancelled = self._write("save", node, attempt, asked)
        run = finish(self._ledger.find(attempt.key))
        assert run is not None, "what was saved has a record"
        self._of_attempt("saved", node, attempt, number=int(run.checkpoint or 0))
        return cancelled

    def begin(
        self,
        node: str,
        attempt: Attempt,
        scope: str,
        items: Sequence[str],
        call: str,
        repeat: bool,  # noqa: FBT001 -- the network carries no names
    ) -> list[Found]:
        """Ask the ledger, and note the items that are begun now."""
        asked = self._ledger.begin(attempt, scope=scope, items=items, call=call, repeat=repeat)
        found = self._write("begin", node, attempt, asked)
        self._scopes[scope] = None
        for item, what in zip(items, found, strict=True):
            if what.go:
                self._of_attempt("item_begun", node, attempt, f"{scope}/{item}", what.value)
        return found

    def end(self, node: str, attempt: Attempt, scope: str, items: Ends, call: str | None) -> None:
        """Ask the ledger, and note the items that it took for ended."""
        asked = self._ledger.end(attempt, scope=scope, items=items, call=call)
        self._write("end", node, attempt, asked)
        for item, state, _ in items:
            self._of_attempt("item_ended", node, attempt, f"{scope}/{item}", state.value)

    def finish(self, node: str, attempt: Attempt, settled: Settled, report: Report) -> RunRecord:
        """Ask the ledger, and note what the run is now, unless it had been that before."""
        before = self._seen.get(attempt.key)
        asked = self._ledger.finish(attempt, settled, report=report)
        run = self._write("finish", node, attempt, asked)
        self._seen[run.key] = run
        if before is None or before.state is State.RUNNING or before != run:
            self._of_attempt("settled", node, attempt, attempt.lease, run.state.value, run.starts)
            lease = self.peek(attempt.lease)
            if lease is not None and lease.holder.nonce == attempt.nonce and not lease.held:
                self._note("released", node, attempt.lease, attempt.nonce, attempt.token)
        return run

    def cancel(self, key: RunKey, force: bool, operator: str, only_waiting: bool) -> RunRecord:  # noqa: FBT001
        """Ask the ledger, and note what became of the run and of its lease."""
        before = finish(self._ledger.find(key))
        name = before.lease if before is not None else ""
        token = self._token(name)
        run = finish(
            self._ledger.cancel(key, force=force, operator=operator, only_waiting=only_waiting)
        )
        self._notice(operator, run)
        if run.cancel_at and before is not None and not before.cancel_at:
            self._note("asked", operator, run=str(key), state=run.state.value)
        if self._token(name) != token:
            self._note("broken", operator, name, token=self._token(name), run=str(key))
        return run

    def find(self, key: RunKey) -> RunRecord | None:
        """Ask the ledger."""
        return finish(self._ledger.find(key))

    def note(self, key: RunKey, what: str, token: int, detail: str) -> None:
        """Ask the ledger."""
        finish(self._ledger.note(key, what, token=token, detail=detail))

    def answer(self, ask: Callable[[Ledger], Flow[T]]) -> T:
        """Ask the ledger, and note nothing."""
        return finish(ask(self._ledger))

    def tell_all(self) -> None:
        """Note every run and item as the ledger has them: the checker has added them up itself."""
        for run in reversed(finish(self._ledger.runs(limit=_ALL))):
            self._note(
                "row",
                token=run.token,
                detail=run.reason,
                run=str(run.key),
                state=run.state.value,
                number=run.starts,
            )
        for scope in self._scopes:
            for item in finish(self._ledger.items(scope)):
                name = f"{scope}/{item.item}"
                self._note("item", name=name, token=item.token, run=item.run, state=item.state)

    def close(self) -> None:
        """Close the ledger."""
        finish(self._ledger.close())
        super().close()

    def _write(self, what: str, node: str, attempt: Attempt, asked: Flow[T]) -> T:
        try:
            return finish(asked)
        except Lost as lost:
            self._note("stale", node, "", attempt.nonce, attempt.token, 0.0, what, str(attempt.key))
            self._look(node, attempt.key)
            raise lost.with_traceback(None) from None

    def _of_attempt(
        self,
        what: str,
        node: str,
        attempt: Attempt,
        name: str = "",
        state: str = "",
        number: int = 0,
    ) -> None:
        run = str(attempt.key)
        self._note(what, node, name, attempt.nonce, attempt.token, 0.0, "", run, state, number)

    def _look(self, node: str, key: RunKey) -> None:
        run = finish(self._ledger.find(key))
        if run is not None:
            self._notice(node, run)

    def _notice(self, node: str, run: RunRecord) -> None:
        """Note a run that is not what it was."""
        before = self._seen.get(run.key)
        self._seen[run.key] = run
        if before is None or before.state is not run.state or before.starts != run.starts:
            self._note(
                "became",
                node,
                "",
                run.holder.nonce,
                run.token,
                0.0,
                run.reason,
                str(run.key),
                run.state.value,
                run.starts,
            )

    def _token(self, name: str) -> int:
        lease = self.peek(name) if name else None
        return 0 if lease is None else lease.token


class RemoteLedger:
    """A ledger as a process has it: every verb is a request over the network."""

    def __init__(self, world: SimulatedWorld, network: Network, server: LedgerServer) -> None:
        self._world, self._network, self._server = world, network, server
        self._node = world.instance
        self.abilities: LedgerAbilities = server.abilities
        self.leases: LeaseStore = RemoteStore(world, network, server)

    # Plain functions that return the request's own coroutine: one frame less on each resumption.

    def claim(self, want: Want) -> Flow[Claimed]:
        """Ask for a run."""
        return self._network.ask(self._world, self._server, self._server.claim, want)

    def beat(self, attempt: Attempt, *, ttl: float, report: Report = NOTHING) -> Flow[bool]:
        """Ask for more time."""
        return self._ask(self._server.beat, attempt, ttl, report)

    def save(
        self,
        attempt: Attempt,
        *,
        checkpoint: str,
        order: int | None = None,
        report: Report = NOTHING,
    ) -> Flow[bool]:
        """Send a checkpoint."""
        return self._ask(self._server.save, attempt, checkpoint, order, report)

    def begin(
        self, attempt: Attempt, *, scope: str, items: Sequence[str], call: str, repeat: bool
    ) -> Flow[list[Found]]:
        """Begin items."""
        return self._ask(self._server.begin, attempt, scope, items, call, repeat)

    def end(
        self, attempt: Attempt, *, scope: str, items: Ends, call: str | None = None
    ) -> Flow[None]:
        """End items."""
        return self._ask(self._server.end, attempt, scope, items, call)

    def finish(
        self, attempt: Attempt, settled: Settled, *, report: Report = NOTHING
    ) -> Flow[RunRecord]:
        """End the attempt."""
        return self._ask(self._server.finish, attempt, settled, report)

    def hand_over(self, attempt: Attempt, *, ttl: float) -> Flow[None]:
        """Entrust the attempt to somebody else."""
        return self._plainly(lambda ledger: ledger.hand_over(attempt, ttl=ttl))

    def order_stop(self, attempt: Attempt) -> Flow[bool]:
        """Say that the process is to stop."""
        return self._plainly(lambda ledger: ledger.order_stop(attempt))

    def cancel(
        self, key: RunKey, *, force: bool, operator: str, only_waiting: bool = False
    ) -> Flow[RunRecord]:
        """Ask for an end."""
        return self._network.ask(
            self._world, self._server, self._server.cancel, key, force, operator, only_waiting
        )

    def note(self, key: RunKey, what: str, *, token: int = 0, detail: str = "") -> Flow[None]:
        """Send an event."""
        server = self._server
        return self._network.ask(self._world, server, server.note, key, what, token, detail)

    def find(self, key: RunKey) -> Flow[RunRecord | None]:
        """Ask for a run."""
        return self._network.ask(self._world, self._server, self._server.find, key)

    def register(self, job: str, definition: str) -> Flow[None]:
        """Send a definition."""
        return self._plainly(lambda ledger: ledger.register(job, definition))

    def lift(self, job: str) -> Flow[bool]:
        """Ask for the end of a quarantine."""
        return self._plainly(lambda ledger: ledger.lift(job))

    def runs(
        self, job: str | None = None, *, limit: int = 30, states: Sequence[State] = ()
    ) -> Flow[list[RunRecord]]:
        """Ask for the newest runs."""
        return self._plainly(lambda ledger: ledger.runs(job, limit=limit, states=states))

    def events(self, key: RunKey) -> Flow[list[RunEvent]]:
        """Ask what happened to a run."""
        return self._plainly(lambda ledger: ledger.events(key))

    def items(self, scope: str, *, states: Sequence[ItemState] = ()) -> Flow[list[ItemRecord]]:
        """Ask for items."""
        return self._plainly(lambda ledger: ledger.items(scope, states=states))

    def counts(self, key: RunKey) -> Flow[dict[str, int]]:
        """Ask for counters."""
        return self._plainly(lambda ledger: ledger.counts(key))

    def jobs(self) -> Flow[list[JobRecord]]:
        """Ask for all jobs."""
        return self._plainly(lambda ledger: ledger.jobs())

    def now(self) -> Flow[float]:
        """Ask for the time of the ledger's clock."""
        return self._plainly(lambda ledger: ledger.now())

    def sync(self) -> Flow[None]:
        """Ask for what was written to survive a power cut."""
        return self._plainly(lambda ledger: ledger.sync())

    def _plainly(self, ask: Callable[[Ledger], Flow[T]]) -> Flow[T]:
        """Ask for something that the history does not tell of."""
        return self._network.ask(self._world, self._server, self._server.answer, ask)

    async def close(self) -> None:
        """Have nothing to close."""

    def _ask(self, verb: Callable[..., T], *args: object) -> Flow[T]:
        return self._network.ask(self._world, self._server, verb, self._node, *args)


def memory_ledger(
    world: SimulatedWorld,
    recorder: Recorder,
    stopped: Callable[[Holder], bool],
    kind: type[MemoryLedger] = MemoryLedger,
) -> LedgerServer:
    """Serve the reference ledger."""
    store = MemoryStore(world, shelf=MemoryShelf(world), stopped=stopped)
    return LedgerServer(kind(world, store), recorder, world)


def sqlite_ledger(
    world: SimulatedWorld, recorder: Recorder, _stopped: Callable[[Holder], bool]
) -> LedgerServer:
    """Serve the production SQL, on a database in memory. It notices no deaths."""
    return LedgerServer(ledger_of(world, SqliteStore(world, ":memory:")), recorder, world)
