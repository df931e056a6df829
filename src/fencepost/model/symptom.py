"""A symptom is what would break a promise on this very set-up, with what to do about it."""

from __future__ import annotations

import enum

from fencepost.model.named import NamedTuple


class Severity(enum.IntEnum):
    """How bad it is; the doctor's exit code follows the worst."""

    NOTE = 0  # good to know; no promise depends on it
    RISK = 1  # a promise is broken if something else happens as well
    BREAKS = 2  # a promise that fencepost makes does not hold here


class Symptom(NamedTuple):
    """One finding. ``code`` is short and stable, for machines: ``redis.eviction``."""

    code: str
    severity: Severity
    what: str  # one sentence, with the value that was found
    remedy: str  # what to do
