"""The run as user code sees it: ``Run`` for ``def`` bodies, ``AsyncRun`` for ``async def``.

Both are thin over the same flows. What a body writes is guarded by its token: a body that woke up
after its run was taken over can neither save, nor mark an item, nor finish.
"""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime

from fencepost.effects import AsyncBatch, AsyncOnce, Batch, InOther, Once
from fencepost.errors import LeaseLost, Misuse
from fencepost.flows.attempt import NothingToDo
from fencepost.flows.course import LARGEST, save
from fencepost.flows.handoff import hand_over
from fencepost.flows.keep import LOOP_PATIENCE
from fencepost.model.item import named
from fencepost.model.kept import encoded
from fencepost.transaction import AsyncTransaction, transaction_of
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Iterable
    from typing import Any

    from fencepost.flows.course import Course, Doors
    from fencepost.lease import Lease, LostSignal
    from fencepost.transaction import Transaction

IDEMPOTENCY_KEY = "Idempotency-Key"


class Facts:
    """What both colours of a run have in common: who they are, and what costs no round trip."""

    _patience = float("inf")  # how long it can wait to be told whether the run is still ours

    def __init__(
        self,
        doors: Doors,
        course: Course,
        lease: Lease,
        *,
        window: tuple[int, int] | None = None,
        scope: str = "slot",
    ) -> None:
        self._doors, self._course, self._lease = doors, course, lease
        self._window, self._scope, self._pid = window, scope, os.getpid()
        course.hold.patience = self._patience

    @property
    def id(self) -> str:
        """The run key, such as ``billing@2026-01-20T02:00:00Z``: one per slot, for ever."""
        return str(self._course.run.key)

    @property
    def job(self) -> str:
        """The name of the job."""
        return self._course.run.key.job

    @property
    def slot(self) -> datetime:
        """The instant this run is for, which may be earlier than now."""
        return datetime.fromtimestamp(self._course.run.key.slot, UTC)

    @property
    def window(self) -> tuple[datetime, datetime] | None:
        """What this run covers: from the slot before it up to its own; None without a schedule."""
        if self._window is None:
            return None
        start, end = (datetime.fromtimestamp(edge, UTC) for edge in self._window)
        return start, end

    @property
    def attempt(self) -> int:
        """Which try this is, from 1 on. Attempts that vanished do not count."""
        return self._course.run.attempt

    @property
    def token(self) -> int:
        """The fencing token of this attempt, higher than that of every earlier one."""
        return self._course.attempt.token

    @property
    def checkpoint(self) -> Any:
        """What was saved last, by this attempt or an earlier one; None at the very beginning."""
        return None if self._course.checkpoint is None else json.loads(self._course.checkpoint)

    @property
    def payload(self) -> Any:
        """What a job that lives in the ledger was given there; None for one that was declared."""
        return None if self._course.payload is None else json.loads(self._course.payload)

    @property
    def lost(self) -> LostSignal:
        """An event that is set once the run is no longer ours."""
        return self._lease.lost

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that puts the job and the run id on every line."""
        from fencepost.logs import logger_of

        return logger_of(self.job, self.id)

    def check(self) -> None:
        """Return if the body may go on; raise if the run was lost, cancelled, or is out of time."""
        self._refuse_forks()
        self._course.check()

    def progress(self, done: int, total: int | None = None) -> None:
        """Tell how far it is; those who look see it with the next beat."""
        of = None if total is None else whole(total, "total")
        self._course.progress(whole(done, "done"), of)

    def count(self, name: str, more: int = 1) -> None:
        """Add to a counter of this run, such as ``emails_sent``; safe from many threads."""
        self._course.count(named(name), whole(more, "more"))

    def skip(self, reason: str = "nothing to do") -> None:
        """Leave the body: there was nothing to do, and the run is recorded as skipped."""
        if not isinstance(reason, str):
            raise Misuse(f"reason is {reason!r}: say in words why there was nothing to do")
        raise NothingToDo(reason)

    def headers(self, item: str | int | None = None) -> dict[str, str]:
        """Return headers for another service: the fencing token, and a key that repeats do not."""
        return {**self._lease.headers(), IDEMPOTENCY_KEY: self.key_of(item)}

    def key_of(self, item: str | int | None = None) -> str:
        """Return the idempotency key of this run, or of one of its items: the same in each try."""
        return self._course.items if item is None else f"{self._scope_of(None)}/{named(item)}"

    def fence(self, conn: object, *, resource: str | None = None) -> Any:
        """Guard the open transaction of another database; raises ``TokenStale`` for a zombie.

        On an async connection, of psycopg, aiomysql or asyncmy, it must be awaited.
        """
        return self._lease.fence(conn, resource=resource)

    def _transaction(self) -> Transaction:
        self.check()
        scope, ledger = self._scope_of(None), self._doors.ledger
        return transaction_of(ledger, self._course, scope=scope, owner=self._here())

    if TYPE_CHECKING:

        def _here(self) -> object:
            """Return who must not wait for itself: the thread, or the task."""

    def _refuse_forks(self) -> None:
        if self._pid != os.getpid():
            reason = "it belongs to the parent process, and a fork does not share it"
            raise LeaseLost(self._lease.name, token=self.token, reason=reason)

    def _outside(self) -> None:
        """Refuse what would wait for our own transaction for ever."""
        if self._here() in self._course.transacting:
            raise Misuse(
                "a transaction of this run is open right here: use tx.once(…) and tx.save(…), "
                "which commit with it"
            )

    def _scope_of(self, scope: str | None) -> str:
        """Return under which name items are known: this run's, or the whole job's.

        What repeats a run that failed goes on with its items: what was done is not done again.
        """
        chosen = scope or self._scope
        if chosen not in ("slot", "job"):
            raise Misuse(f"scope is {scope!r}: it must be 'slot' or 'job'")
        return self.job if chosen == "job" else self._course.items

    def __repr__(self) -> str:
        return f"<Run {self.id} attempt={self.attempt} token={self.token}>"

    def __reduce__(self) -> str:
        raise TypeError("a run cannot be pickled: pass what its work needs instead")


class Run(Facts):
    """A run of a ``def`` body."""

    def save(self, checkpoint: Any) -> None:
        """Keep where to resume. Raises if the run was lost, cancelled, or is out of time."""
        self._refuse_forks()
        self._outside()
        finish(save(self._doors, self._course, encoded(checkpoint, what="checkpoint")))

    def once(
        self, item: str | int, *, conn: object = None, scope: str | None = None
    ) -> Once | InOther:
        """Have an effect once: ``with run.once(id) as first: if first: …``.

        With ``conn`` the item is kept in that database, in your own open transaction.
        """
        where, name = self._scope_of(scope), named(item)
        if conn is not None:
            return InOther(self._lease, conn, where, name)
        self.check()
        self._outside()
        return Once(self._doors, self._course, where, name)

    def batch(self, items: Iterable[str | int], *, scope: str | None = None) -> Batch:
        """Have many effects once each, with one round trip before and one after them all."""
        self.check()
        self._outside()
        return Batch(self._doors, self._course, self._scope_of(scope), [named(i) for i in items])

    def transaction(self) -> Transaction:
        """Open a transaction of the ledger's database: effect, items and checkpoint are one."""
        return self._transaction()

    def hand_over(self) -> None:
        """Leave the run to whoever was given its id and token, and return from the body.

        The run goes on without this process: ``fp.complete(run_id, token=…)`` ends it, from
        anywhere, and ``fp.beat(…)`` keeps it. Should the body raise after this, the attempt has
        failed, and the other side is refused.
        """
        self._outside()
        finish(hand_over(self._doors, self._course))

    def _here(self) -> object:
        return threading.get_ident()


class AsyncRun(Facts):
    """A run of an ``async def`` body; the same names, awaited."""

    _patience = LOOP_PATIENCE

    async def save(self, checkpoint: Any) -> None:
        """Keep where to resume. Raises if the run was lost, cancelled, or is out of time."""
        self._refuse_forks()
        self._outside()
        await save(self._doors, self._course, encoded(checkpoint, what="checkpoint"))

    def once(
        self, item: str | int, *, conn: object = None, scope: str | None = None
    ) -> AsyncOnce | InOther:
        """Have an effect once: ``async with run.once(id) as first: if first: …``.

        With ``conn`` the item is kept in that database, in your own open transaction.
        """
        where, name = self._scope_of(scope), named(item)
        if conn is not None:
            return InOther(self._lease, conn, where, name)
        self.check()
        self._outside()
        return AsyncOnce(self._doors, self._course, where, name)

    def batch(self, items: Iterable[str | int], *, scope: str | None = None) -> AsyncBatch:
        """Have many effects once each, with one round trip before and one after them all."""
        self.check()
        self._outside()
        names = [named(item) for item in items]
        return AsyncBatch(self._doors, self._course, self._scope_of(scope), names)

    def transaction(self) -> AsyncTransaction:
        """Open a transaction of the ledger's database: effect, items and checkpoint are one."""
        return AsyncTransaction(self._doors.world, self._transaction())

    async def hand_over(self) -> None:
        """Leave the run to whoever was given its id and token, and return from the body.

        The run goes on without this process: ``fp.complete(run_id, token=…)`` ends it, from
        anywhere, and ``fp.beat(…)`` keeps it. Should the body raise after this, the attempt has
        failed, and the other side is refused.
        """
        self._outside()
        await hand_over(self._doors, self._course)

    def _here(self) -> object:
        import asyncio

        return asyncio.current_task()


def inside(run: Facts) -> tuple[Doors, Course]:
    """Return what is behind a run, for bodies that are fencepost's own."""
    return run._doors, run._course  # noqa: SLF001 -- that is the point


def whole(value: object, what: str) -> int:
    """Return a count that every ledger can keep, or refuse it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise Misuse(f"{what} is {value!r}: it must be a whole number")
    if abs(value) > LARGEST:
        raise Misuse(f"{what} is a number of {value.bit_length()} bits: no ledger keeps that")
    return value
