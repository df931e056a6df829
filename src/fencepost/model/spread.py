"""Jobs are kept apart by hashes of their names, the same in every process and every version.

Nothing here is random, and nothing depends on the host: whoever asks gets the same answer, so
instances that never speak to each other agree.
"""

from __future__ import annotations

import re

from fencepost.errors import BadSchedule

_H = re.compile(r"H(?:\((\d{1,4})-(\d{1,4})\))?(?:/(\d{1,4}))?", re.ASCII)
_BYTES = 8
_ALL = float(1 << 8 * _BYTES)


def delay(job: str, slot: int, *, jitter: float, next_slot: int | None) -> float:
    """Return how many seconds after ``slot`` its run is to start: some part of ``jitter``.

    It is always the same for one job and slot. The range ends 1 s before the next slot at the
    latest, and shrinks rather than being cut off: what is cut off would come all at once.
    """
    room = jitter if next_slot is None else min(jitter, next_slot - 1 - slot)
    return max(0.0, room) * (hashed(f"jitter\0{job}\0{slot}") / _ALL)


def resolved(field: str, *, name: str, spread: str | None, limits: tuple[int, int]) -> str:
    """Return a cron field with numbers for each ``H``: ``H``, ``H(0-29)``, ``H/15``, ``H(8-17)/2``.

    The number comes from ``spread``, usually the job's name, and from the name of the field: one
    job has another H in each field, and the same H wherever it appears in one.
    """
    return ",".join(
        _term(found, name=name, spread=spread, limits=limits) if found else term
        for term in field.split(",")
        for found in (_H.fullmatch(term),)
    )


def hashed(text: str) -> int:
    """Return a number of 64 bits for a text, the same for ever."""
    from hashlib import sha256  # 1 ms, for those who spread

    digest = sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:_BYTES], "big")


def _term(found: re.Match[str], *, name: str, spread: str | None, limits: tuple[int, int]) -> str:
    if not isinstance(spread, str) or not spread:
        raise BadSchedule(f"has an H for its {name}, but no name to spread by: give spread='a job'")
    low, high = (int(found[1]), int(found[2])) if found[1] else limits
    step = int(found[3] or 0)
    if not limits[0] <= low <= high <= limits[1] or (found[3] and not step):
        raise BadSchedule(
            f"has a bad {name}, {found[0]!r}: H is within {limits[0]}-{limits[1]} there"
        )
    size = high - low + 1
    first = low + hashed(f"H\0{name}\0{spread}") % (min(step, size) if step else size)
    return ",".join(map(str, range(first, high + 1, step))) if step else str(first)
