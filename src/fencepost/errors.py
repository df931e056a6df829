"""Every error says what is true now; the first level of the tree is the answer to that question.

FencepostError
├── Refused            nothing changed         LeaseHeld  TokenStale  TokenRegressed
├── Lost               it was ours, no more    LeaseLost
├── OutcomeUnknown     it may have happened    ask again with the same nonce
├── StoreUnavailable   it did not happen       worth asking again
└── Misuse             your code or config     BadName  BadDuration  BadUrl
                                                   MissingExtra  FenceMisused
"""

from __future__ import annotations


class FencepostError(Exception):
    """The root of all that fencepost raises on purpose."""


class Refused(FencepostError):
    """Nothing was changed. Asking again can only succeed once others have moved on."""


class Lost(FencepostError):
    """It was ours and is no more. Stop; whatever comes next belongs to somebody else."""


class OutcomeUnknown(FencepostError):
    """The request may have been carried out, or not. Asking again with the same nonce tells."""


class StoreUnavailable(FencepostError):
    """The store did not do it. Nothing changed; asking again later may succeed."""


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


class LeaseLost(Lost):
    """The lease is not ours any more, or cannot be proven to be. Stop before the next effect."""

    def __init__(self, name: str, *, token: int, reason: str) -> None:
        super().__init__(f"lease {name!r} (token {token}) is lost: {reason}")
        self.name, self.token, self.reason = name, token, reason


class BadName(Misuse):
    """A lease or namespace has a name that cannot be used."""


class BadDuration(Misuse):
    """A duration is malformed, or outside of what the store can keep."""


class BadUrl(Misuse):
    """A store URL is malformed or names something that cannot be a store."""


class FenceMisused(Misuse):
    """``fence`` was called where it could not protect anything."""


class MissingExtra(Misuse):
    """A store needs a client library that is not installed."""

    def __init__(self, what: str, *, extra: str) -> None:
        super().__init__(f"{what} needs an extra: pip install 'fencepost[{extra}]'")
        self.what, self.extra = what, extra
