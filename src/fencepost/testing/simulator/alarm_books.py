"""A book of alarms over the network: production code answers, and what it does is written down."""

from __future__ import annotations

from fencepost.model.alarm import AlarmState, Became
from fencepost.testing.simulator.servers import LeaseServer, instance
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from fencepost.ledger.alarm_api import AlarmBook
    from fencepost.model.alarm import (
        AlarmEnd,
        AlarmRecord,
        AlarmWant,
        Batch,
        Failure,
        Firing,
        NextDue,
        Rearm,
        Setting,
    )
    from fencepost.stores.api import LeaseStore
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import Flow

KIND = "k"


class AlarmServer(LeaseServer):
    """A production book and its leases, observed while they work."""

    def __init__(
        self, book: AlarmBook, leases: LeaseStore, recorder: Recorder, world: SimulatedWorld
    ) -> None:
        super().__init__(leases, recorder, world.scheduler, delete=lambda _: False)
        self._book = book

    def set(self, node: str, setting: Setting) -> AlarmRecord:
        """Ask the book, and note the generation that is there now."""
        record = finish(self._book.set(setting))
        self._of("set", record, node, record.generation)
        return record

    def clear(self, node: str, key: str) -> AlarmRecord | None:
        """Ask the book, and note the tombstone."""
        record = finish(self._book.clear(KIND, key))
        if record is not None:
            self._of("cleared", record, node, record.generation)
        return record

    def claim_due(self, want: AlarmWant) -> Batch:
        """Ask the book, and note what it lets go."""
        batch = finish(self._book.claim_due(want))
        for record in batch.dead:
            self._of("died", record, instance(want.holder), record.generation, record.reason)
        for one in batch.claimed:
            what = "adopted" if one.adopted else "claimed"
            self._of(what, one.record, instance(want.holder), one.record.fired)
        return batch

    def beat(self, firing: Firing, ttl: float) -> bool:
        """Ask the book."""
        return finish(self._book.beat(firing, ttl=ttl))

    def finish(self, node: str, firing: Firing, rearm: Rearm | None) -> AlarmEnd:
        """Ask the book, and note a commit if its own records say that there was one."""
        before = self._seen(firing.key)
        end = finish(self._book.finish(firing, rearm))
        if end.became is Became.DONE and before != self._seen(firing.key):
            assert before is not None, "what was committed was there"
            by = before._replace(token=firing.token)  # as the one says who wanted it
            self._of("committed", by, node, firing.generation)
            if end.record is not None:
                self._of("set", end.record, node, end.record.generation, "rearmed")
        return end

    def fail(self, node: str, firing: Firing, failure: Failure) -> AlarmEnd:
        """Ask the book, and note what became of the alarm."""
        end = finish(self._book.fail(firing, failure))
        if end.record is not None:
            self._of(f"failed {end.became}", end.record, node, firing.generation, failure.counted)
        return end

    def next_due(self, kinds: Sequence[str]) -> NextDue:
        """Ask the book."""
        return finish(self._book.next_due(kinds))

    def prune(self) -> int:
        """Ask the book."""
        return finish(self._book.prune())

    def tell_all(self) -> None:
        """Note every alarm as the book has it."""
        for record in finish(self._book.listed(KIND)):
            ends = record.errors + record.faults + record.losses + record.releases
            detail = "" if record.starts == ends else f"{record.starts} starts, {ends} ends"
            self._of("row", record, "", record.generation, detail)

    def left(self) -> bool:
        """Say whether anything is still to be done."""
        states = (AlarmState.ARMED, AlarmState.FIRING)
        return bool(finish(self._book.listed(KIND, states=states)))

    def _seen(self, key: str) -> AlarmRecord | None:
        return finish(self._book.get(KIND, key))

    def _of(
        self, what: str, record: AlarmRecord, node: str, generation: int, detail: str = ""
    ) -> None:
        self._note(
            what,
            node,
            record.key,
            record.holder.nonce,
            record.token,
            0.0,
            detail,
            "",
            record.state.value,
            generation,
        )


class RemoteAlarms:
    """A book of alarms as a process has it: every verb is a request over the network."""

    def __init__(self, world: SimulatedWorld, network: Network, server: AlarmServer) -> None:
        self._world, self._network, self._server = world, network, server

    def set(self, setting: Setting) -> Flow[AlarmRecord]:
        """Set an alarm."""
        return self._ask(self._server.set, self._world.instance, setting)

    def clear(
        self, kind: str, key: str, *, keep: float = 0.0, if_generation: int | None = None
    ) -> Flow[AlarmRecord | None]:
        """Clear an alarm."""
        assert (kind, keep, if_generation) == (KIND, 0.0, None), "nobody here asks for more"
        return self._ask(self._server.clear, self._world.instance, key)

    def claim_due(self, want: AlarmWant) -> Flow[Batch]:
        """Ask for what is due."""
        return self._ask(self._server.claim_due, want)

    def beat(self, firing: Firing, *, ttl: float) -> Flow[bool]:
        """Ask for more time."""
        return self._ask(self._server.beat, firing, ttl)

    def finish(self, firing: Firing, rearm: Rearm | None = None) -> Flow[AlarmEnd]:
        """Commit a success."""
        return self._ask(self._server.finish, self._world.instance, firing, rearm)

    def fail(self, firing: Firing, failure: Failure) -> Flow[AlarmEnd]:
        """Record a failure."""
        return self._ask(self._server.fail, self._world.instance, firing, failure)

    def next_due(self, kinds: Sequence[str]) -> Flow[NextDue]:
        """Ask when to look again."""
        return self._ask(self._server.next_due, kinds)

    def prune(self, *, limit: int = 1000) -> Flow[int]:
        """Ask for old tombstones to go."""
        assert limit > 0, "as the port has it"
        return self._ask(self._server.prune)

    async def get(self, kind: str, key: str) -> AlarmRecord | None:
        """Look at nothing: no simulated process asks for it."""
        raise NotImplementedError(f"{kind}/{key}")

    async def listed(
        self, kind: str | None = None, *, states: Sequence[AlarmState] = (), limit: int = 100
    ) -> list[AlarmRecord]:
        """List nothing: no simulated process asks for it."""
        raise NotImplementedError(f"{kind} {states} {limit}")

    def _ask(self, verb: Callable[..., Any], *args: object) -> Flow[Any]:
        return self._network.ask(self._world, self._server, verb, *args)
