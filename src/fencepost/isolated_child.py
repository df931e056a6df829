"""The process of an isolated body: it imports the body, calls it with its run, and tells its end.

The lease is the parent's, who renews it, and whose word about it arrives through a pipe. What is
written to the ledger from here is guarded by the attempt's token, as it always is.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import sys
import threading

from fencepost.bodies import kept_result, on_a_loop
from fencepost.carried import Became, packed, write
from fencepost.errors import LeaseLost, Stopped
from fencepost.flows.acquire import Granted
from fencepost.flows.course import Course, Doors
from fencepost.flows.keep import Hold
from fencepost.importing import load
from fencepost.ledger.api import NOTHING
from fencepost.ledger.open import ledger_of
from fencepost.lent import lend
from fencepost.model.lease import Grant, Trust
from fencepost.running import AsyncRun, Run
from fencepost.stores.open import open_store
from fencepost.world.apart import opened
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.wire import Inbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.carried import Task, Told
    from fencepost.ledger.api import Report
    from fencepost.model.event import LeaseEvent
    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World

# How often to tell the parent of progress, and to look at the clock for a body that does not.
_PAUSE = 0.2


def main(fd: int) -> None:
    """Do the task that was left for this process."""
    task: Task = pickle.loads(opened(fd))  # noqa: S301 -- written by our own code
    for ours in (task.news, task.word, task.outcome):
        os.set_inheritable(ours, False)  # noqa: FBT003 -- the standard library's way
    sys.path[:], sys.argv[:] = task.path, task.argv
    _Child(task).live()


class _Interrupted(BaseException):
    """We were asked to stop. Like an interrupt it may come at any moment, also within an effect."""


class _Afar(Course):
    """A course whose reports are the parent's to write: told by two, they would contradict."""

    hands_over = False

    def report(self) -> Report:
        """Return nothing: see ``told``."""
        return NOTHING


class _Child:
    def __init__(self, task: Task) -> None:
        self._task = task
        run, ttl = task.run, task.policy.lease
        granted = Granted(run.lease, Grant(run.token, ttl), task.trust.confirmed)
        self._hold = Hold(
            granted, nonce=run.holder.nonce, ttl=ttl, max_hold=None, emit=_nobody, chatty=False
        )
        self._hold.trust = task.trust
        self._lean = None if task.believed is None else _Hearsay(task.believed)
        self._hold.lean = self._lean
        self._world = BlockingWorld()
        self._course = _Afar(self._world, run, self._hold, task.policy)
        self._course.deadline, self._course.payload = task.deadline, task.payload
        self._course.rerun, self._course.formers = task.rerun, task.formers
        self._interrupted = self._over = False

    def live(self) -> None:
        """Carry the body out and tell what became of it."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        threading.Thread(target=self._listen, name="fencepost-news", daemon=True).start()
        became = self._carried_out()
        self._hold.released = True
        course = self._course
        became = became._replace(
            told=course.told(), doubts=list(course.doubts), checkpoint=course.checkpoint
        )
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        write(self._task.outcome, became)

    def _carried_out(self) -> Became:
        try:
            try:
                return Became(result=kept_result(self._call(load(self._task.function))))
            finally:
                self._over = True  # from here on there is nothing left to stop
        except _Interrupted:
            return Became(stopped=True)
        except BaseException as error:  # noqa: BLE001 -- it is passed on
            # The parent knows best why we were asked: a signal does not say.
            if self._interrupted and isinstance(error, Stopped | LeaseLost):
                return Became(stopped=True)
            return Became(raised=packed(error), fault=self._course.is_fault(error))

    def _call(self, function: Callable[..., Any]) -> Any:
        if self._task.is_async:
            return on_a_loop(self._course, lambda: self._awaited(function))
        store = self._store(self._world)
        try:
            doors = Doors(self._world, ledger_of(self._world, store))
            result = function(*self._given(Run, doors))
            self._over = True  # what is done is not to be undone by a late signal
            return result
        finally:
            finish(store.close())

    async def _awaited(self, function: Callable[..., Any]) -> Any:
        from fencepost.world.aio import AioWorld

        world = AioWorld()
        store = self._store(world)
        try:
            doors = Doors(world, ledger_of(world, store))
            result = await function(*self._given(AsyncRun, doors))
            self._over = True
            return result
        finally:
            await store.close()
            world.close()

    def _given(self, colour: type[Run | AsyncRun], doors: Doors) -> list[Run | AsyncRun]:
        """Return what the body is called with: its run, if it wants it."""
        task = self._task
        if not task.takes_run:
            return []
        boottime = doors.world.clocks.boottime
        lease = lend(self._course, namespace=task.namespace, boottime=boottime)
        return [colour(doors, self._course, lease, window=task.window, scope=task.scope)]

    def _store(self, world: World) -> LeaseStore:
        task = self._task
        source = pickle.loads(task.store)  # noqa: S301 -- written by our own code
        if callable(source):
            store: LeaseStore = source(world, task.namespace)
            return store
        return open_store(source, world, namespace=task.namespace)

    def _stop(self, *_: object) -> None:
        """Stop the body: a coroutine is cancelled, a function interrupted."""
        if self._over:
            return
        self._interrupted = True
        if not self._course.on_stop:
            raise _Interrupted
        for tell in self._course.on_stop:
            tell()

    def _listen(self) -> None:
        """Hear how the lease stands, tell how far the body is; for as long as the parent lives."""
        task, hold, inbox = self._task, self._hold, Inbox(self._task.news)
        poll = select.poll()
        poll.register(inbox.fd, select.POLLIN)
        told = self._course.told()
        while not inbox.closed:
            poll.poll(_PAUSE * 1000)
            for line in inbox.lines():
                confirmed, ttl, until, cancelled, believed = map(float, line)
                if self._lean is not None:
                    self._lean.hear(believed)
                if confirmed > hold.trust.confirmed:  # our own transactions renew it, too
                    hold.trust = Trust(confirmed, ttl, until)
                self._course.hear(cancelled=bool(cancelled))
            hold.phase(self._world.clocks.boottime())  # who is lost by now is told so
            if (news := self._course.told()) != told:
                told = news
                try:
                    os.write(task.word, _line(told))
                except OSError:
                    break  # nobody there any more
        hold.lose("the process that holds it is gone")


class _Hearsay:
    """What the lease leans on, as the parent tells of it: only the parent can prove it."""

    next_try = float("inf")

    def __init__(self, until: float) -> None:
        self._until, self._heard = until, threading.Condition()

    def until(self) -> float:
        """Return until when the last proof lets us believe."""
        return self._until

    def hear(self, until: float) -> None:
        """Take note of a proof."""
        with self._heard:
            self._until = until
            self._heard.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for the next proof, at most so long."""
        with self._heard:
            self._heard.wait(max(0.0, min(seconds, _PAUSE)))

    async def prove(self, store: object) -> None:
        """Leave it to the parent."""

    def end(self) -> None:
        """Leave it to the parent."""


def _line(told: Told) -> bytes:
    """Return a line of one word: a space within a counter's name is written as JSON can."""
    return json.dumps(told, separators=(",", ":")).replace(" ", "\\u0020").encode() + b"\n"


def _nobody(_: LeaseEvent) -> None:
    """Tell nobody: the parent has a hold of its own, and tells of that."""
