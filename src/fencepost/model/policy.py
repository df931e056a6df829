"""What a job wants to happen when things do not go as planned, checked when it is declared."""

from __future__ import annotations

import enum

from fencepost.errors import GiveUp, Misuse, RetryAfter
from fencepost.model.duration import positive, seconds
from fencepost.model.lease import checked_ttl
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.duration import Duration


class Overlap(enum.StrEnum):
    """What a slot does that finds another run of its lock active."""

    SKIP = "skip"
    RESCHEDULE = "reschedule"
    FAIL = "fail"
    REPLACE = "replace"
    ALLOW = "allow"


class OnLoss(enum.StrEnum):
    """What happens to a run whose attempt vanished."""

    RESUME = "resume"  # another attempt, from the checkpoint, under a higher token
    FAIL = "fail"  # at most once: never try again


class RetryUntil(enum.StrEnum):
    """How long a failing slot may go on trying."""

    NEXT_SLOT = "next_slot"  # a newer slot supersedes it
    EXHAUSTED = "exhausted"  # newer slots wait, or are skipped


class InDoubtPolicy(enum.StrEnum):
    """What ``once`` does with an item that was begun and never ended."""

    REPORT = "report"  # do not repeat it; say so
    REPEAT = "repeat"  # repeat it, with the same idempotency key


class Retry:
    """Try again after an error: ``attempts`` in all, each pause longer than the one before.

    The pause before attempt n + 1 is ``base`` times ``factor`` to the n - 1, at most ``ceiling``,
    and with ``jitter`` a random part of that. ``on`` names the errors worth another try, ``never``
    those that are not.
    """

    __slots__ = ("attempts", "base", "ceiling", "factor", "jitter", "never", "on")

    def __init__(
        self,
        attempts: int = 5,
        *,
        base: Duration = "10s",
        factor: float = 2.0,
        ceiling: Duration = "10m",
        jitter: bool = True,
        on: type[BaseException] | tuple[type[BaseException], ...] = Exception,
        never: type[BaseException] | tuple[type[BaseException], ...] = (),
    ) -> None:
        if type(attempts) is not int or attempts < 1:
            raise Misuse(f"retry attempts is {attempts!r}: it must be a whole number from 1 on")
        if not 1 <= factor < float("inf"):
            raise Misuse(f"retry factor is {factor!r}: it must be 1 or more")
        self.attempts, self.factor, self.jitter = attempts, float(factor), jitter
        self.base = positive(base, what="retry base")
        self.ceiling = positive(ceiling, what="retry ceiling")
        self.on, self.never = _kinds(on, "retry on"), _kinds(never, "retry never")

    def __repr__(self) -> str:
        return (
            f"Retry({self.attempts}, base={self.base:g}, factor={self.factor:g}, "
            f"ceiling={self.ceiling:g}, jitter={self.jitter})"
        )

    def worth(self, error: BaseException) -> bool:
        """Say whether another try could help."""
        if isinstance(error, (GiveUp, self.never)):
            return False
        return isinstance(error, (RetryAfter, self.on))

    def pause(self, attempt: int, *, dice: float) -> float:
        """Return how long to wait after attempt number ``attempt`` failed."""
        try:
            full = min(self.ceiling, self.base * self.factor ** (attempt - 1))
        except OverflowError:
            full = self.ceiling
        return full * dice if self.jitter else full


def _kinds(
    kinds: type[BaseException] | tuple[type[BaseException], ...], what: str
) -> tuple[type[BaseException], ...]:
    """Return kinds of errors as a tuple; what is none would only be noticed by the first error."""
    several: tuple[Any, ...] = kinds if isinstance(kinds, tuple) else (kinds,)
    for kind in several:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise Misuse(f"{what} has {kind!r}: give an exception class, or a tuple of them")
    return several


NEVER_AGAIN = Retry(1)


class Policy(NamedTuple):
    """A job's policies, in seconds and words that were checked."""

    overlap: Overlap = Overlap.SKIP
    max_concurrent: int = 16
    max_waiting: int | None = 1
    retry: Retry = NEVER_AGAIN
    retry_until: RetryUntil = RetryUntil.NEXT_SLOT
    timeout: float | None = 3600.0
    cancel_grace: float = 30.0
    lease: float = 30.0
    on_loss: OnLoss = OnLoss.RESUME
    max_losses: int = 5
    loss_pause: float = 1.0
    start_deadline: float | None = None
    in_doubt: InDoubtPolicy = InDoubtPolicy.REPORT
    handoff_beat: float | None = None  # how often a handed-off run is to be heard of
    leave_children: bool = False  # whether processes may outlive the command that started them


LONGEST_LOSS_PAUSE = 300.0


def loss_pause(policy: Policy, *, streak: int) -> float:
    """Return how long a run waits after that many losses in a row; after the first, not at all."""
    if streak <= 1:
        return 0.0
    return min(policy.loss_pause * 2.0 ** min(streak - 2, 32), LONGEST_LOSS_PAUSE)


def checked_policy(  # noqa: PLR0913 -- one for each word that a job may say
    *,
    overlap: str = "skip",
    max_concurrent: int = 16,
    max_waiting: int | None = 1,
    retry: Retry | int | None = None,
    retry_until: str = "next_slot",
    timeout: Duration | None = "1h",
    cancel_grace: Duration = "30s",
    lease: float = 30.0,
    on_loss: str = "resume",
    max_losses: int = 5,
    loss_pause: Duration = "1s",
    start_deadline: Duration | None = None,
    in_doubt: str = "report",
    handoff_beat: Duration | None = None,
    leave_children: bool = False,
) -> Policy:
    """Return the policy that was asked for, or say which part of it cannot be."""
    if isinstance(retry, int) and not isinstance(retry, bool):
        retry = Retry(retry)
    if retry is not None and not isinstance(retry, Retry):
        raise Misuse(f"retry is {retry!r}: give Retry(…), a number of attempts, or None")
    if not isinstance(leave_children, bool):
        raise Misuse(f"leave_children is {leave_children!r}: give True or False")
    grace = seconds(cancel_grace, what="cancel_grace")
    if grace < 0:
        raise Misuse(f"cancel_grace is {cancel_grace!r}: it must not be negative")
    return Policy(
        overlap=_word(Overlap, overlap, "overlap"),
        max_concurrent=_count(max_concurrent, "max_concurrent"),
        max_waiting=None if max_waiting is None else _count(max_waiting, "max_waiting"),
        retry=retry or NEVER_AGAIN,
        retry_until=_word(RetryUntil, retry_until, "retry_until"),
        timeout=None if timeout is None else positive(timeout, what="timeout"),
        cancel_grace=grace,
        lease=lease,
        on_loss=_word(OnLoss, on_loss, "on_loss"),
        max_losses=_count(max_losses, "max_losses"),
        loss_pause=positive(loss_pause, what="loss_pause"),
        start_deadline=(
            None if start_deadline is None else positive(start_deadline, what="start_deadline")
        ),
        in_doubt=_word(InDoubtPolicy, in_doubt, "in_doubt"),
        handoff_beat=None if handoff_beat is None else checked_ttl(handoff_beat),
        leave_children=leave_children,
    )


if TYPE_CHECKING:
    from typing import TypeVar

    W = TypeVar("W", bound=enum.StrEnum)


def _word(kind: type[W], value: str, what: str) -> W:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(word.value) for word in kind)
        raise Misuse(f"{what} is {value!r}: it must be one of {known}") from None


def _count(value: int, what: str) -> int:
    if type(value) is not int or value < 1:
        raise Misuse(f"{what} is {value!r}: it must be a whole number from 1 on")
    return value
