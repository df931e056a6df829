"""Threads that take work from one pile.

Work that is short shares a thread, so that threads do not fight for the interpreter. Work that is
long, or not known yet, gets one of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue
from time import perf_counter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Work of a kind that mostly takes less than this is short.
_SHORT = 0.002
# If the pile has not become smaller for so long, whoever is at it is stuck.
STUCK = 0.02


class Hands:
    """At most ``size`` threads, started when they are needed.

    Before each takes a piece of work it stands back for as long as ``stand_back`` takes.
    """

    def __init__(
        self, size: int, carry_out: Callable[[Any], None], stand_back: Callable[[], None]
    ) -> None:
        self._size, self._carry_out, self._stand_back = size, carry_out, stand_back
        self._pile: deque[tuple[str, Any]] = deque()
        self._lengths: dict[str, float] = {}  # of each kind, how long it took of late
        self._turn = threading.Lock()
        self._calls: SimpleQueue[str] = SimpleQueue()
        self._awake = 0
        self._taken = self._seen = 0
        self._seen_at = 0.0
        self.threads: list[threading.Thread] = []

    def give(self, kind: str, work: Any) -> None:
        """Put work on the pile."""
        with self._turn:
            self._pile.append((kind, work))
            alone = not self._awake
        if alone or self._lengths.get(kind, _SHORT) >= _SHORT:
            self._call()

    def waits(self) -> bool:
        """Say whether there is work that nobody has taken yet."""
        return bool(self._pile)

    def withdraw(self, is_stale: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
        """Take from the pile what nobody shall carry out any more; return it, and what is left."""
        with self._turn:
            stale = [one for one in self._pile if is_stale(one[1])]
            left = [one for one in self._pile if not is_stale(one[1])] if stale else self._pile
            self._pile = deque(left)
            return [work for _, work in stale], [work for _, work in left]

    def look(self) -> None:
        """Call another thread if nobody has taken anything for a while."""
        now = perf_counter()
        if self._taken != self._seen:
            self._seen, self._seen_at = self._taken, now
        elif self._pile and now - self._seen_at >= STUCK:
            self._seen_at = now
            self._call()

    def dismiss(self) -> None:
        """Let all threads end once the pile is gone."""
        for _ in self.threads:
            self._calls.put("")

    def _call(self) -> None:
        """Have one more thread at the pile, if there may be one more."""
        with self._turn:
            if self._awake >= self._size:
                return
            self._awake += 1
            new = self._awake > len(self.threads)
        if new and not self._hired():
            with self._turn:
                self._awake -= 1
            return
        self._calls.put("come")

    def _hired(self) -> bool:
        name = f"fencepost-worker-{len(self.threads) + 1}"
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads now: others do it, in their turn
            if not self.threads:
                raise
            return False
        self.threads.append(thread)
        return True

    def _work(self) -> None:
        while self._calls.get():
            while True:
                self._stand_back()
                with self._turn:
                    if not self._pile:
                        self._awake -= 1
                        break
                    kind, work = self._pile.popleft()
                    self._taken += 1
                began = perf_counter()
                self._carry_out(work)
                took = perf_counter() - began
                before = self._lengths.get(kind, took)
                self._lengths[kind] = before + (took - before) * 0.2
