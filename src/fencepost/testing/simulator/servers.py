"""Servers do what they are asked in one instant, and it is they who write the history.

So a grant that no client ever heard of is in it, and one that a client only dreamt of is not.
"""

from __future__ import annotations

from fencepost.model.lease import admits
from fencepost.stores.memory import MemoryShelf, MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.history import Event
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.model.lease import Grant, Holder, View
    from fencepost.stores.api import Capabilities, LeaseStore
    from fencepost.testing.simulator.network import Network
    from fencepost.testing.simulator.scheduler import Scheduler
    from fencepost.testing.simulator.world import SimulatedWorld
    from fencepost.world.api import Flow


class Recorder:
    """Writes down what happens, with the store's time: virtual time is the store's."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.history: list[Event] = []

    def note(  # noqa: PLR0913, PLR0917 -- as many as an event has fields
        self,
        what: str,
        node: str = "",
        name: str = "",
        holder: str = "",
        token: int = 0,
        until: float = 0.0,
        detail: str = "",
        run: str = "",
        state: str = "",
        number: int = 0,
    ) -> None:
        """Add one event, now."""
        now = self._scheduler.now
        self.history.append(
            Event(now, what, node, name, holder, token, until, detail, run, state, number)
        )


class LeaseServer:
    """A production store behind the network, observed while it works."""

    def __init__(
        self,
        store: LeaseStore,
        recorder: Recorder,
        scheduler: Scheduler,
        *,
        delete: Callable[[str], bool],
    ) -> None:
        self.away = ""
        self.capabilities = store.capabilities
        self._store, self._note, self._scheduler = store, recorder.note, scheduler
        self._delete = delete

    def acquire(self, name: str, holder: Holder, ttl: float) -> Grant:
        """Ask the store, and note what it grants."""
        grant = finish(self._store.acquire(name, holder=holder, ttl=ttl))
        self._note(
            "renewed" if grant.adopted else "granted",
            instance(holder),
            name,
            holder.nonce,
            grant.token,
            self._scheduler.now + grant.ttl,
            "adopted" if grant.adopted else "",
        )
        return grant

    def renew(self, node: str, name: str, nonce: str, token: int, ttl: float) -> Grant:
        """Ask the store, and note what it renews."""
        grant = finish(self._store.renew(name, nonce=nonce, token=token, ttl=ttl))
        self._note("renewed", node, name, nonce, token, self._scheduler.now + grant.ttl)
        return grant

    def release(self, node: str, name: str, nonce: str, token: int | None) -> None:
        """Ask the store, and note what it takes back."""
        finish(self._store.release(name, nonce=nonce, token=token))
        self._note("released", node, name, nonce, token or 0)

    def peek(self, name: str) -> View | None:
        """Ask the store."""
        return finish(self._store.peek(name))

    def break_(self, name: str) -> None:
        """Be the operator who takes a lease away from whoever has it."""
        view = self.peek(name)
        if view is not None and view.held:
            token = finish(
                self._store.break_(name, token=view.token, reason="it hangs", operator="operator")
            )
            self._note("broken", "operator", name, "", token, 0.0, f"was {view.token}")

    def delete(self, name: str) -> None:
        """Be the person who deletes a row by hand."""
        if self._delete(name):
            self._note("deleted", "operator", name)

    def close(self) -> None:
        """Close the store."""
        finish(self._store.close())


class RemoteStore:
    """A lease store as a client has it: every verb is a request over the network."""

    def __init__(self, world: SimulatedWorld, network: Network, server: LeaseServer) -> None:
        self._world, self._network, self._server = world, network, server
        self.capabilities: Capabilities = server.capabilities

    # Plain functions that return the request's own coroutine: one frame less on each resumption.

    def acquire(self, name: str, *, holder: Holder, ttl: float) -> Flow[Grant]:
        """Ask for a lease."""
        server = self._server
        return self._network.ask(self._world, server, server.acquire, name, holder, ttl)

    def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Flow[Grant]:
        """Ask for more time."""
        server, node = self._server, self._world.instance
        return self._network.ask(self._world, server, server.renew, node, name, nonce, token, ttl)

    def release(self, name: str, *, nonce: str, token: int | None = None) -> Flow[None]:
        """Give a lease back."""
        server, node = self._server, self._world.instance
        return self._network.ask(self._world, server, server.release, node, name, nonce, token)

    def peek(self, name: str) -> Flow[View | None]:
        """Ask who has it."""
        return self._network.ask(self._world, self._server, self._server.peek, name)

    async def views(self) -> list[View]:
        """List nothing: no simulated client asks for it."""
        return []

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Break nothing: the operator stands beside the server."""
        raise NotImplementedError(f"{operator} breaks {name!r} ({token}, {reason}) at the server")

    async def line(self, name: str) -> None:
        """Have no line."""

    def forget(self) -> None:
        """Have nothing to forget."""

    async def close(self) -> None:
        """Have nothing to close."""


class Resource:
    """What leases protect: it remembers the highest token, and admits none below."""

    def __init__(self, recorder: Recorder) -> None:
        self.away = ""
        self._note = recorder.note
        self._highest: dict[str, int] = {}

    def write(self, node: str, name: str, token: int) -> bool:
        """Carry out a write, or refuse it."""
        admitted = self.admits(self._highest.get(name, 0), token)
        if admitted:
            self._highest[name] = token
        self._note("admitted" if admitted else "refused", node, name, "", token)
        return admitted

    def admits(self, highest_seen: int, token: int) -> bool:
        """Compare as production code does."""
        return admits(highest_seen, token)


def memory_server(
    world: SimulatedWorld, recorder: Recorder, stopped: Callable[[Holder], bool]
) -> LeaseServer:
    """Serve the reference store."""
    shelf = MemoryShelf(world)
    store = MemoryStore(world, shelf=shelf, stopped=stopped)

    def delete(name: str) -> bool:
        return shelf.records.pop(("default", name), None) is not None

    return LeaseServer(store, recorder, world.scheduler, delete=delete)


def sqlite_server(
    world: SimulatedWorld, recorder: Recorder, _stopped: Callable[[Holder], bool]
) -> LeaseServer:
    """Serve the production SQL, on a database in memory. It notices no deaths."""
    store = SqliteStore(world, ":memory:")
    file = store._file  # noqa: SLF001 -- whoever deletes a row by hand does not ask the store

    def delete(name: str) -> bool:
        statement = "DELETE FROM fencepost_lease WHERE name = ?"
        return file.write_one(lambda db: db.execute(statement, (name,)).rowcount) > 0

    return LeaseServer(store, recorder, world.scheduler, delete=delete)


def instance(holder: Holder) -> str:
    """Return the process that a holder lives in: a restarted one is another."""
    return f"{holder.host}.{holder.pid}"
