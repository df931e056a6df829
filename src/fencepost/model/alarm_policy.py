"""What a kind of alarm wants to happen when things do not go as planned, checked when declared."""

from __future__ import annotations

from datetime import UTC, datetime

from fencepost.errors import BadName, BadSlot, Misuse
from fencepost.model.duration import positive, seconds
from fencepost.model.fault import FAULTS, grown, pause_after
from fencepost.model.name import LONGEST, well_formed
from fencepost.model.named import NamedTuple
from fencepost.model.policy import LONGEST_LOSS_PAUSE, Retry
from fencepost.model.slot import checked_job, instant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.duration import Duration

    Moment = datetime | str | float

# The sixth error is the last; the pauses between them go up to the ceiling.
USUAL_RETRY = Retry(6, base="10s", ceiling="17m")
# How long a cleared alarm is remembered at the least: a late set must find that it is late.
TOMBSTONE = 86_400.0
_EARLIEST, _LATEST = 0.0, 253_402_300_799.0
_PREFIX = "alarm:"


class Budget(NamedTuple):
    """How often one alarm may fire: ``fires`` in each ``window`` of seconds."""

    fires: int = 100
    window: float = 60.0


class Reschedule(NamedTuple):
    """After an error try again at a fixed pace, for ever: see ``reschedule``."""

    pace: float


def reschedule(pace: Duration) -> Reschedule:
    """Return what ``on_error=`` takes: record the error, and have the alarm again after ``pace``.

    Such an alarm never dies of errors. Its budget still ends it if it fires far too often.
    """
    return Reschedule(positive(pace, what="reschedule"))


class AlarmPolicy(NamedTuple):
    """The policies of one kind of alarm, in seconds and words that were checked."""

    retry: Retry = USUAL_RETRY
    on_error: Reschedule | None = None
    faults: tuple[type[BaseException], ...] = FAULTS
    timeout: float | None = 3600.0
    cancel_grace: float = 30.0
    lease: float = 30.0
    max_losses: int = 5
    loss_pause: float = 1.0
    grace: float = 60.0
    budget: Budget = Budget()
    every: float | None = None

    def pause(self, errors: int, *, dice: float) -> float:
        """Return how long to wait after that many errors: the next pause, and up to 25 % more."""
        if self.on_error is not None:
            return self.on_error.pace
        retry = self.retry
        return grown(retry.base, retry.factor, retry.ceiling, errors, dice * retry.jitter)

    def fault_pause(self, faults: int, *, dice: float) -> float:
        """Return how long to wait after that many faults in a row, which use up no tries."""
        return pause_after(faults, dice=dice)

    def pause_after_loss(self, streak: int) -> float:
        """Return how long to wait after that many losses in a row; after the first, not at all."""
        if streak <= 1:
            return 0.0
        return min(self.loss_pause * 2.0 ** min(streak - 2, 32), LONGEST_LOSS_PAUSE)

    @property
    def horizon(self) -> float:
        """How long it may take from the first error to the last try."""
        retry = self.retry
        tries = (self.timeout or 0.0) * retry.attempts
        return tries + sum(self.pause(n, dice=1.0) for n in range(1, min(retry.attempts, 1000)))


def checked_alarm_policy(  # noqa: PLR0913 -- one for each word that a kind of alarm may say
    *,
    retry: Retry | int | None,
    on_error: Reschedule | None,
    faults: tuple[type[BaseException], ...],
    timeout: Duration | None,
    cancel_grace: Duration,
    lease: float,
    max_losses: int,
    grace: Duration,
    budget: int | tuple[int, Duration],
    every: Duration | None,
) -> AlarmPolicy:
    """Return the policy that was asked for, or say which part of it cannot be."""
    if isinstance(retry, int) and not isinstance(retry, bool):
        retry = Retry(retry, base=USUAL_RETRY.base, ceiling=USUAL_RETRY.ceiling)
    if retry is not None and not isinstance(retry, Retry):
        raise Misuse(f"retry is {retry!r}: give Retry(…), a number of tries, or None")
    if on_error is not None and not isinstance(on_error, Reschedule):
        raise Misuse(f"on_error is {on_error!r}: give reschedule('60s'), or None for retries")
    for kind in faults:
        given: object = kind  # as it is written, which may be anything
        if not (isinstance(given, type) and issubclass(given, BaseException)):
            raise Misuse(f"faults has {kind!r}: give exception classes")
    if type(max_losses) is not int or max_losses < 1:
        raise Misuse(f"max_losses is {max_losses!r}: it must be a whole number from 1 on")
    policy = AlarmPolicy(
        retry=retry or USUAL_RETRY,
        on_error=on_error,
        faults=(*AlarmPolicy().faults, *faults),
        timeout=None if timeout is None else positive(timeout, what="timeout"),
        cancel_grace=max(0.0, seconds(cancel_grace, what="cancel_grace")),
        lease=lease,
        max_losses=max_losses,
        grace=max(0.0, seconds(grace, what="grace")),
        budget=_budget(budget),
        every=None if every is None else positive(every, what="every"),
    )
    return _within_budget(policy)


def _budget(budget: int | tuple[int, Duration]) -> Budget:
    fires, window = budget if isinstance(budget, tuple) else (budget, "1m")
    if type(fires) is not int or fires < 1:
        raise Misuse(f"budget is {budget!r}: give a number of fires per minute, or (100, '1m')")
    return Budget(fires, positive(window, what="budget"))


def _within_budget(policy: AlarmPolicy) -> AlarmPolicy:
    fires, window = policy.budget
    paces = {"every": policy.every, "on_error": policy.on_error and policy.on_error.pace}
    for what, pace in paces.items():
        if pace is not None and pace * fires < window:
            raise Misuse(
                f"{what} is {pace:g} s, and a budget of {fires} fires in {window:g} s would end "
                "that: give budget=(fires, window) as well"
            )
    return policy


def checked_kind(kind: object) -> str:
    """Return the canonical name of a kind of alarm, or refuse it."""
    name = checked_job(kind)
    if "/" in name:
        raise BadName(f"alarm kind {kind!r} contains '/', which stands between a kind and a key")
    if len(name) > LONGEST // 4:
        raise BadName(f"alarm kind {name[:40]!r}… has more than {LONGEST // 4} characters")
    return name


def checked_key(key: object) -> str:
    """Return the canonical form of an alarm's key, or refuse it."""
    name = well_formed(key)
    if len(name) > LONGEST // 2:
        raise BadName(f"alarm key {name[:40]!r}… has more than {LONGEST // 2} characters")
    return name


def lease_of(kind: str, key: str) -> str:
    """Return the name of the lease that whoever fires an alarm has."""
    return f"{_PREFIX}{kind}/{key}"


def moment(value: Moment, *, what: str = "at") -> float:
    """Return the instant that ``value`` names, in seconds since 1970. It must know its zone."""
    if isinstance(value, str):
        return float(instant(value))
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise BadSlot(f"{what} is {value.isoformat()} without a time zone: say which")
        number = value.astimezone(UTC).timestamp()
    else:
        if type(value) not in (int, float):
            raise BadSlot(f"{what} is {value!r}: give a datetime with a time zone")
        number = float(value)
    if not _EARLIEST <= number <= _LATEST:
        raise BadSlot(f"{what} is {value!r}: it must lie between the years 1970 and 9999")
    return number
