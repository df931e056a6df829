"""What a store can promise a job has a name: T0 to T3. A job is refused where it needs more."""

from __future__ import annotations

import enum

from fencepost.errors import Misuse


class Tier(enum.StrEnum):
    """A guarantee; each includes those before it."""

    T0 = "T0"  # advisory: two may run at once
    T1 = "T1"  # exclusive: a lease by atomic compare-and-set, ended by the store's own clock
    T2 = "T2"  # fenced: everything that is recorded is guarded by the token
    T3 = "T3"  # transactional: the effect can commit together with its record

    @property
    def words(self) -> str:
        """What it means, in a word."""
        return {"T0": "advisory", "T1": "exclusive", "T2": "fenced", "T3": "transactional"}[self]


def tier_of(*, exclusive: bool, transactional: bool) -> Tier:
    """Return what a store with a ledger can promise."""
    if not exclusive:
        return Tier.T0
    return Tier.T3 if transactional else Tier.T2


def refuse_less(job: str, *, needs: str | None, idempotent: bool, offered: Tier) -> Tier:
    """Return what a job needs, or refuse it where that is more than is offered.

    A job that was not declared ``idempotent`` must not run where two may run at once.
    """
    wanted = needs or ("T0" if idempotent else "T1")
    try:
        needed = Tier(wanted)
    except ValueError:
        known = ", ".join(tier.value for tier in Tier)
        raise Misuse(f"job {job!r} needs {needs!r}: it must be one of {known}") from None
    if needed > offered:
        hint = "" if needed > Tier.T1 else "; declare it idempotent=True if two runs do no harm"
        raise Misuse(
            f"job {job!r} needs {needed.value} ({needed.words}), and its store offers "
            f"{offered.value} ({offered.words}) only: use another store{hint}"
        )
    return needed
