"""Jobs that share a lock, of both kinds, with runs that stay at work until they are told to end."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from fencepost import Fencepost
from holder import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


REFUSED = ("skipped", "lock_held")
# How often each kind is to be at work while the others ask.
ENOUGH = 10


class Work:
    """Jobs of which each run stays in its body until it is told to leave."""

    def __init__(self, fp: Fencepost) -> None:
        self._fp, self._stack = fp, ExitStack()
        self.at_work: list[str] = []

        def body(name: str) -> Callable[[], None]:
            def work() -> None:
                leave = threading.Event()
                self._leave[name].append(leave)
                self.at_work.append(name)
                assert leave.wait(30)
                self.at_work.remove(name)

            return work

        self._leave: dict[str, list[threading.Event]] = {"alone": [], "beside": []}
        fp.job("alone", lock="shared")(body("alone"))
        fp.job("beside", lock="shared", overlap="allow", max_concurrent=2)(body("beside"))
        self._threads: list[threading.Thread] = []

    def begin(self, job: str) -> None:
        """Have a run at work."""
        count = len(self.at_work)
        thread = threading.Thread(target=lambda: self._fp.trigger(job, manual=True))
        self._threads.append(thread)
        thread.start()
        until(lambda: len(self.at_work) > count)

    def ask(self, job: str) -> tuple[str, str]:
        """Say what becomes of another run, which is not to begin."""
        outcome = self._fp.trigger(job, manual=True)
        return outcome.status, outcome.reason

    def end(self) -> None:
        """Have all runs end."""
        for leave in itertools.chain(*self._leave.values()):
            leave.set()
        for thread in self._threads:
            thread.join(30)


@contextmanager
def working(url: str, **settings: Any) -> Iterator[tuple[Fencepost, Work]]:
    with Fencepost(url, **settings) as fp:
        work = Work(fp)
        try:
            yield fp, work
        finally:
            work.end()
