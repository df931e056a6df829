"""The alarm as its handler sees it. What it sets is committed with its success, or not at all."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime

from fencepost.errors import LeaseLost, Misuse
from fencepost.model.alarm import Rearm
from fencepost.model.alarm_policy import moment
from fencepost.model.duration import seconds
from fencepost.model.kept import encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

    from fencepost.flows.alarm import AlarmCourse
    from fencepost.lease import Lease, LostSignal
    from fencepost.model.alarm_policy import Moment
    from fencepost.model.duration import Duration

_SAME = object()
IDEMPOTENCY_KEY = "Idempotency-Key"


class Alarm:
    """An alarm that fires now; the same for ``def`` and ``async def`` handlers."""

    def __init__(self, course: AlarmCourse, lease: Lease) -> None:
        self._course, self._lease, self._pid = course, lease, os.getpid()

    @property
    def id(self) -> str:
        """``kind/key#generation``: the same in each try, and never used again."""
        return self._course.alarm.id

    @property
    def kind(self) -> str:
        """What kind of alarm this is."""
        return self._course.alarm.kind

    @property
    def key(self) -> str:
        """Whose alarm this is."""
        return self._course.alarm.key

    @property
    def payload(self) -> Any:
        """What was given along when it was set."""
        text = self._course.alarm.payload
        return None if text is None else json.loads(text)

    @property
    def generation(self) -> int:
        """Which setting of the alarm fires; it commits at most once."""
        return self._course.firing.generation

    @property
    def attempt(self) -> int:
        """Which try this is, from 1 on. Handlers that vanished do not count."""
        return self._course.alarm.attempt

    @property
    def token(self) -> int:
        """The fencing token of this handler, higher than that of every earlier one."""
        return self._course.firing.token

    @property
    def due(self) -> datetime:
        """The instant that it was set to."""
        return datetime.fromtimestamp(self._course.alarm.due_at, UTC)

    @property
    def late(self) -> float:
        """How many seconds later than it should have it was claimed."""
        return self._course.claimed.late

    @property
    def superseded(self) -> bool:
        """Whether somebody is known to have set or cleared it meanwhile: theirs will stay."""
        return self._course.superseded

    @property
    def lost(self) -> LostSignal:
        """An event that is set once the alarm is no longer ours."""
        return self._lease.lost

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that puts the kind and the alarm's id on every line."""
        from fencepost.logs import logger_of

        return logger_of(self.kind, self.id)

    def check(self) -> None:
        """Return if the handler may go on; raise if the alarm was lost or is out of time."""
        if self._pid != os.getpid():
            reason = "it belongs to the parent process, and a fork does not share it"
            raise LeaseLost(self._lease.name, token=self.token, reason=reason)
        self._course.check()

    def set(
        self, at: Moment | None = None, payload: Any = _SAME, *, in_: Duration | None = None
    ) -> None:
        """Have this alarm again, if the handler succeeds and nobody has set it meanwhile.

        Without a payload it keeps the one that it has. The last call counts.
        """
        text = self._course.alarm.payload
        if payload is not _SAME:
            text = None if payload is None else encoded(payload, what="payload")
        self._course.rearm = Rearm(text, *when(at, in_))

    def stop(self) -> None:
        """Have this alarm no more, even if it is one that comes every so often."""
        self._course.rearm = None

    def fence(self, conn: object, *, resource: str | None = None) -> Any:
        """Guard the open transaction of another database; raises ``TokenStale`` for a zombie.

        On psycopg's ``AsyncConnection`` it must be awaited.
        """
        return self._lease.fence(conn, resource=resource)

    def headers(self) -> dict[str, str]:
        """Return headers for another service: the fencing token, and a key that repeats do not."""
        return {**self._lease.headers(), IDEMPOTENCY_KEY: self.id}

    def __repr__(self) -> str:
        return f"<Alarm {self.id!r} attempt={self.attempt}>"


def when(at: Moment | None, in_: Duration | None) -> tuple[float | None, float]:
    """Return an instant, or None and how long from now; exactly one must be given."""
    if (at is None) == (in_ is None):
        raise Misuse("say when: either at=… (an instant) or in_=… (such as '10m')")
    if in_ is None:
        assert at is not None, "one of the two was given"
        return moment(at), 0.0
    after = seconds(in_, what="in_")
    if after < 0:
        raise Misuse(f"in_ is {in_!r}: it must not be negative")
    return None, after
