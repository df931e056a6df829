"""A transaction of a server's ledger for user code.

It keeps nobody out while it is open, and its lease is renewed meanwhile as ever. Whether the run is
still ours is seen by the commit itself: see ``ledger.draft_joined``.
"""

from __future__ import annotations

import os

from fencepost.errors import Misuse
from fencepost.transaction import ENDED_OTHERWISE, Transaction

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, TypeVar

    from fencepost.flows.course import Course
    from fencepost.ledger.draft_joined import Joined
    from fencepost.ledger.draft_ledger import DraftLedger
    from fencepost.model.item import Found

    T = TypeVar("T")

# Whoever is stopped inside of a transaction keeps what it has locked from its successor until the
# server ends it. There is no successor before the lease ends, and so no hurry until then.
_LEAST_IDLE = 10.0


class ServerTransaction(Transaction):
    """One open transaction, from its guard to its commit; its methods block."""

    def __init__(self, ledger: DraftLedger, course: Course, *, scope: str, owner: object) -> None:
        super().__init__(course, scope=scope, owner=owner)
        self._ledger, self._pid = ledger, os.getpid()
        self._joined: Joined | None = None
        self._idle = max(course.policy.lease, _LEAST_IDLE)
        self._asked_at = ledger.boottime()

    @property
    def connection(self) -> Any:
        """The driver's connection. Leave begin and commit alone; savepoints are welcome."""
        connection = self._inside().connection
        if connection is None:  # each statement would begin a transaction that nobody guards
            raise Misuse(ENDED_OTHERWISE)
        return connection

    def _execute(self, sql: str, parameters: Any) -> Any:
        _ = self.connection
        return self._inside().execute(sql, parameters)

    def _executemany(self, sql: str, parameters: Iterable[Any]) -> Any:
        _ = self.connection
        return self._inside().executemany(sql, parameters)

    def _watched(self, work: Callable[[], T]) -> T:
        self._has_idled()
        try:
            return super()._watched(work)
        finally:
            self._asked_at = self._ledger.boottime()

    def _is_of_driver(self, error: BaseException, *, ours: bool) -> bool:
        joined = self._joined  # which knows what came by way of it
        fault = joined is not None and joined.is_fault(error)
        return fault and not (self._idled if ours else self._has_idled())

    def _has_idled(self) -> bool:
        """Say whether the block was quiet for so long that the server ends its transaction."""
        quiet = self._ledger.boottime() - self._asked_at
        self._idled = self._idled or (self._joined is not None and quiet >= self._idle)
        return self._idled

    def open(self) -> None:
        """Begin, and see that the run is ours."""
        self._refuse_nesting()
        course = self._course
        course.check()
        joined = self._ledger.join(course.attempt)
        begun = False
        try:
            cancelled = joined.begin(idle=self._idle, longest=course.left() or 0.0)
            course.hear(cancelled=cancelled)
            course.check()
            self._joined = joined
            self._joins()
            begun = True
        finally:
            if not begun:
                self._joined = None
                joined.roll_back()

    def close(self, *, commit: bool) -> None:
        """See that the run is still ours and commit, or roll everything back."""
        joined, course = self._joined, self._course
        if joined is None:
            return
        if self._pid != os.getpid():
            raise Misuse("this transaction belongs to another process")
        try:
            if commit:
                _ = self.connection  # raises if somebody else has ended it
                course.check_held()
                cancelled = joined.commit(self._checkpoint, course.report())
                if self._checkpoint is not None:
                    course.checkpoint = self._checkpoint
                course.hear(cancelled=cancelled)
        finally:
            joined.roll_back()
            self._joined = None
            self._leaves()

    def _done(self, scope: str, item: str, *, repeat: bool) -> Found:
        _ = self.connection
        call = self._ledger.nonce()
        return self._inside().once(scope, item, call=call, repeat=repeat)

    def _keep(self, checkpoint: str) -> None:
        """Leave it to the commit: a run whose row is locked could not be kept alive meanwhile."""
        del checkpoint
        _ = self.connection

    def _inside(self) -> Joined:
        if self._joined is None or self._pid != os.getpid():
            raise Misuse("this transaction is over, or belongs to another process")
        return self._joined
