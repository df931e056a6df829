"""Every error says what is true now; the first level of the tree is the answer to that question.

FencepostError
├── Refused            nothing changed         LeaseHeld  TokenStale  TokenRegressed
│                                                  LedgerDoubtful  AlarmChanged
├── Lost               it was ours, no more    LeaseLost  RunLost  RunCrashed
├── Stopped            it is ours: end it now  RunCancelled  RunTimedOut
├── OutcomeUnknown     it may have happened    ask again with the same nonce
├── StoreUnavailable   it did not happen       worth asking again: NoThread
├── Said               a body's own word       GiveUp  RetryAfter  InDoubt
└── Misuse             your code or config     BadName  BadDuration  BadUrl  BadSlot
                                                   BadSchedule  BadValue  UnknownJob  UnknownRun
                                                   MissingExtra  FenceMisused  StoreUnfit
"""

from __future__ import annotations


class FencepostError(Exception):
    """The root of all that fencepost raises on purpose."""


class Refused(FencepostError):
    """Nothing was changed. Asking again can only succeed once others have moved on."""


class Lost(FencepostError):
    """It was ours and is no more. Stop; whatever comes next belongs to somebody else."""


class Stopped(FencepostError):
    """The run is still ours but is asked to end. Clean up and let this pass through."""


class Said(FencepostError):
    """What a job's body raises to say how the attempt ended; for user code to raise."""


class OutcomeUnknown(FencepostError):
    """The request may have been carried out, or not. Asking again with the same nonce tells."""


class StoreUnavailable(FencepostError):
    """The store did not do it. Nothing changed; asking again later may succeed."""


class NoThread(StoreUnavailable, RuntimeError):
    """The system has no thread for it now. Nothing of it was begun; later there may be one."""


class Misuse(FencepostError):
    """The calling code or configuration is wrong. Asking again cannot help."""


class LeaseHeld(Refused):
    """Another holder has the lease. Nothing was changed; ask again after ``expires_in``."""

    def __init__(
        self, name: str, *, holder: str, token: int, expires_in: float, since: float | None = None
    ) -> None:
        super().__init__(
            f"lease {name!r} is held by {holder} for another {expires_in:.1f} s (token {token})"
        )
        self.name, self.holder, self.token = name, holder, token
        self.expires_in, self.since = expires_in, since


class TokenStale(Refused):
    """A newer token has been seen. The write was not admitted; roll back and stop."""

    def __init__(self, resource: str, *, token: int, highest: int) -> None:
        super().__init__(
            f"token {token} for {resource!r} is stale: {highest} has been seen, "
            "so a later holder is at work; roll back and stop"
        )
        self.resource, self.token, self.highest = resource, token, highest


class TokenRegressed(Refused):
    """The store granted a token that is not above one already seen. The grant was given back."""

    def __init__(self, name: str, *, token: int, highest: int) -> None:
        super().__init__(
            f"the store granted token {token} for {name!r} though {highest} was seen before: "
            "was it restored from a backup, or its clock set back?"
        )
        self.name, self.token, self.highest = name, token, highest


class AlarmChanged(Refused):
    """The alarm is not of the generation that was expected. Nothing was changed."""

    def __init__(self, kind: str, key: str, *, expected: int, current: int) -> None:
        found = f"its generation is {current}" if current else "there is none"
        wanted = f"generation {expected}" if expected else "no alarm"
        super().__init__(
            f"alarm {kind!r} of {key!r} was not changed: {wanted} was expected, and {found}"
        )
        self.kind, self.key, self.expected, self.current = kind, key, expected, current


class LeaseLost(Lost):
    """The lease is not ours any more, or cannot be proven to be. Stop before the next effect."""

    def __init__(self, name: str, *, token: int, reason: str) -> None:
        super().__init__(f"lease {name!r} (token {token}) is lost: {reason}")
        self.name, self.token, self.reason = name, token, reason


class RunLost(Lost):
    """A later attempt has the run, or it has ended. What was to be written was not."""

    def __init__(self, run: str, *, token: int, reason: str) -> None:
        super().__init__(f"run {run!r} (token {token}) is lost: {reason}")
        self.run, self.token, self.reason = run, token, reason


class RunCrashed(Lost):
    """The process of an isolated body died without a word. The attempt counts as a loss."""

    def __init__(self, run: str, *, token: int, reason: str) -> None:
        super().__init__(f"run {run!r} (token {token}) has crashed: {reason}")
        self.run, self.token, self.reason = run, token, reason


class RunCancelled(Stopped):
    """Somebody asked for this run to be cancelled."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run!r} is to be cancelled: somebody asked for it")
        self.run = run


class RunTimedOut(Stopped):
    """The attempt has used up its time."""

    def __init__(self, run: str, *, timeout: float) -> None:
        super().__init__(f"run {run!r} has used up its timeout of {timeout:g} s")
        self.run, self.timeout = run, timeout


class RunRecalled(Stopped):
    """The instance ends, or its time is used up: the run goes on elsewhere, from its checkpoint."""

    def __init__(self, run: str) -> None:
        super().__init__(f"run {run} is given back: it goes on from its checkpoint, elsewhere")
        self.run = run


class GiveUp(Said):
    """Raise it to fail the run for good, whatever its retry policy allows."""


class RetryAfter(Said):
    """Raise it to fail the attempt and have the next one no sooner than ``seconds`` from now."""

    def __init__(self, seconds: float, message: str = "") -> None:
        super().__init__(message or f"try again after {seconds:g} s")
        self.seconds = seconds


class InDoubt(Said):
    """Raise it inside of ``once`` if you cannot know whether the effect happened."""


class LedgerDoubtful(Refused):
    """The ledger may be an older copy of itself. Nothing runs until an operator says so."""


class BadName(Misuse):
    """A lease or namespace has a name that cannot be used."""


class BadDuration(Misuse):
    """A duration is malformed, or outside of what the store can keep."""


class BadUrl(Misuse):
    """A store URL is malformed or names something that cannot be a store."""


class StoreUnfit(Misuse):
    """The store is there, but cannot be used as it is: a password, a right, a table, a setting."""


class BadSlot(Misuse):
    """A slot is malformed, or not one that the job's schedule produces."""


class BadSchedule(Misuse):
    """A schedule is malformed, or can never be due."""


class BadValue(Misuse):
    """A result, checkpoint or argument cannot be kept: not JSON, or too large."""


class UnknownJob(Misuse):
    """No job has that name here."""

    def __init__(self, job: str, *, known: list[str]) -> None:
        names = ", ".join(repr(name) for name in sorted(known)[:10]) or "none"
        super().__init__(f"no job is called {job!r}; known here: {names}")
        self.job = job


class UnknownRun(Misuse):
    """The ledger has no such run."""

    def __init__(self, run: str) -> None:
        super().__init__(f"the ledger has no run {run!r}: `fencepost runs` lists those it has")
        self.run = run


class FenceMisused(Misuse):
    """``fence`` was called where it could not protect anything."""


class MissingExtra(Misuse):
    """A store needs a client library that is not installed."""

    def __init__(self, what: str, *, extra: str) -> None:
        super().__init__(f"{what} needs an extra: pip install 'fencepost[{extra}]'")
        self.what, self.extra = what, extra
