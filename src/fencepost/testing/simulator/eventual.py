"""The lock at the edge, in a storm: two parts of a cluster that differ in one condition.

``EVENTUAL`` looks and then writes, on edges that hear of each other later: the checker finds two
holders at once, without any other fault. ``COMPARED`` writes on a condition: it finds nothing.
"""

from __future__ import annotations

from fencepost.testing.eventual import EventualKv, EventualStore
from fencepost.testing.simulator.cluster import Parts
from fencepost.testing.simulator.servers import instance

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.model.lease import Holder, Record
    from fencepost.testing.eventual import Seen
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.servers import Recorder
    from fencepost.testing.simulator.world import SimulatedWorld

_DELAY = 1.0  # seconds until every edge has heard of a write
_OPERATOR = "operator"


class EdgeServer:
    """All edges behind the network: it knows what happened where, and writes it down."""

    capabilities = EventualStore.capabilities

    def __init__(
        self, world: SimulatedWorld, recorder: Recorder, _stopped: Callable[[Holder], bool]
    ) -> None:
        self.away = ""
        self.kv = EventualKv(world, delay=_DELAY)
        self._note = recorder.note

    def get(self, edge: str, key: tuple[str, str]) -> Seen:
        """Answer from what this edge has heard of."""
        return self.kv.get(edge, key)

    def latest(self, key: tuple[str, str]) -> Seen:
        """Answer from the one place that has it."""
        return self.kv.latest(key)

    def put(self, edge: str, key: tuple[str, str], record: Record, what: str) -> None:
        """Write, and note what was meant by it."""
        self._happened(what, record, self.kv.put(edge, key, record))

    def swap(self, edge: str, key: tuple[str, str], record: Record, write: int, what: str) -> bool:
        """Write if nobody has since, and note what was meant by it."""
        ends = self.kv.swap(edge, key, record, write)
        if ends is not None:
            self._happened(what, record, ends)
        return ends is not None

    def break_(self, name: str) -> None:
        """Be the operator who takes a lease away from whoever has it."""
        key = ("default", name)
        seen = self.kv.latest(key)
        record = seen.record
        if record is not None and record.held and record.expires > seen.now:
            broken = record._replace(
                token=record.token + 1,
                holder=record.holder._replace(nonce=""),
                held=False,
                ended="it was broken by operator: it hangs",
            )
            self.kv.put(_OPERATOR, key, broken)
            self._note("broken", _OPERATOR, name, "", broken.token, 0.0, f"was {record.token}")

    def delete(self, name: str) -> None:
        """Be the person who deletes a key by hand."""
        if self.kv.delete(("default", name)):
            self._note("deleted", _OPERATOR, name)

    def close(self) -> None:
        """Have nothing to close."""

    def _happened(self, what: str, record: Record, ends: float) -> None:
        holder = record.holder
        ends = 0.0 if what == "released" else ends
        self._note(what, instance(holder), record.name, holder.nonce, record.token, ends)


class EdgeStore(EventualStore):
    """The lock as a process has it that is near one edge: each look and each write is a request."""

    def __init__(self, world: SimulatedWorld, network: Network, server: EdgeServer) -> None:
        super().__init__(world, server.kv, edge=world.clocks.name)
        self._near, self._network, self._server = world, network, server

    async def _read(self, key: tuple[str, str]) -> Seen:
        server = self._server
        return await self._network.ask(self._near, server, server.get, self._edge, key)

    async def _write(self, key: tuple[str, str], seen: Seen, record: Record, *, what: str) -> bool:
        del seen
        server, edge = self._server, self._edge
        await self._network.ask(self._near, server, server.put, edge, key, record, what)
        return True


class ComparedStore(EdgeStore):
    """The same, but for the condition."""

    async def _read(self, key: tuple[str, str]) -> Seen:
        return await self._network.ask(self._near, self._server, self._server.latest, key)

    async def _write(self, key: tuple[str, str], seen: Seen, record: Record, *, what: str) -> bool:
        server, edge = self._server, self._edge
        return await self._network.ask(
            self._near, server, server.swap, edge, key, record, seen.write, what
        )


EVENTUAL = Parts(server=EdgeServer, store=EdgeStore)
COMPARED = Parts(server=EdgeServer, store=ComparedStore)
