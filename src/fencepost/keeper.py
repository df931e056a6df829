"""The keeper is one OS thread with its own store connection, which no event loop can starve."""

from __future__ import annotations

import threading

from fencepost.flows.keep import Charges, keep
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.flows.keep import Hold
    from fencepost.model.event import LeaseEvent
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import Clocks, World


class Keeper:
    """Starts when there is something to keep, and starts again should its thread have died."""

    def __init__(
        self,
        open_store: Callable[[World], LeaseStore],
        *,
        clocks: Clocks,
        emit: Callable[[LeaseEvent], None],
    ) -> None:
        self._open, self._emit = open_store, emit
        self.world = BlockingWorld(clocks=clocks)
        self._start_turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self.charges = Charges(self.world)

    def add(self, hold: Hold) -> None:
        """Keep this lease from now on."""
        self.charges.add(hold)
        if self._thread is None:
            self._wake()

    def abandon(self, name: str, nonce: str) -> None:
        """Give back whatever that nonce may have been granted."""
        self.charges.abandon(name, nonce)
        self._wake()

    def stop(self) -> None:
        """End the thread and wait until it has ended."""
        self.charges.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _wake(self) -> None:
        if self._thread is not None:
            return
        with self._start_turn:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fencepost-keeper", daemon=True)
                self._thread = thread
                started = False
                try:
                    thread.start()
                    started = True
                finally:
                    if not started:  # the system has no more threads now, but may have later
                        self._thread = None

    def _run(self) -> None:
        try:
            store = self._open(self.world)
            try:
                finish(keep(self.world, store, self.charges, emit=self._emit))
            finally:
                finish(store.close())
        finally:
            self._thread = None  # whatever ended this one: the next lease starts another
