"""Scheduled jobs that run once. Not twice, not never.

The public names, each imported when it is first asked for: a program pays for what it uses.
"""

from __future__ import annotations

import importlib

from fencepost.version import VERSION as __version__  # noqa: N811 -- the name tools look for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.aio import AsyncFencepost as AsyncFencepost
    from fencepost.alarm_ringing import Alarm as Alarm
    from fencepost.blocking import Fencepost as Fencepost
    from fencepost.errors import (
        AlarmChanged as AlarmChanged,
        BadDuration as BadDuration,
        BadName as BadName,
        BadSchedule as BadSchedule,
        BadSlot as BadSlot,
        BadUrl as BadUrl,
        BadValue as BadValue,
        FenceMisused as FenceMisused,
        FencepostError as FencepostError,
        GiveUp as GiveUp,
        InDoubt as InDoubt,
        LeaseHeld as LeaseHeld,
        LeaseLost as LeaseLost,
        LedgerDoubtful as LedgerDoubtful,
        Lost as Lost,
        MissingExtra as MissingExtra,
        Misuse as Misuse,
        OutcomeUnknown as OutcomeUnknown,
        Refused as Refused,
        RetryAfter as RetryAfter,
        RunCancelled as RunCancelled,
        RunCrashed as RunCrashed,
        RunLost as RunLost,
        RunTimedOut as RunTimedOut,
        Said as Said,
        Stopped as Stopped,
        StoreUnavailable as StoreUnavailable,
        StoreUnfit as StoreUnfit,
        TokenRegressed as TokenRegressed,
        TokenStale as TokenStale,
        UnknownJob as UnknownJob,
        UnknownRun as UnknownRun,
    )
    from fencepost.lease import Lease as Lease
    from fencepost.model.alarm_policy import reschedule as reschedule
    from fencepost.model.lease import admits as admits
    from fencepost.model.outcome import Outcome as Outcome
    from fencepost.model.policy import Retry as Retry
    from fencepost.model.schedule import (
        At as At,
        Cron as Cron,
        Every as Every,
        EveryAfter as EveryAfter,
    )
    from fencepost.running import AsyncRun as AsyncRun, Run as Run
    from fencepost.stores.open import register_store as register_store

_WHERE = {
    "Fencepost": "fencepost.blocking",
    "AsyncFencepost": "fencepost.aio",
    "Alarm": "fencepost.alarm_ringing",
    "reschedule": "fencepost.model.alarm_policy",
    "Lease": "fencepost.lease",
    "admits": "fencepost.model.lease",
    "Outcome": "fencepost.model.outcome",
    "Retry": "fencepost.model.policy",
    "Run": "fencepost.running",
    "AsyncRun": "fencepost.running",
    **dict.fromkeys(("At", "Cron", "Every", "EveryAfter"), "fencepost.model.schedule"),
    "register_store": "fencepost.stores.open",
    **dict.fromkeys(
        (
            "AlarmChanged",
            "BadDuration",
            "BadName",
            "BadSchedule",
            "BadSlot",
            "BadUrl",
            "BadValue",
            "FenceMisused",
            "FencepostError",
            "GiveUp",
            "InDoubt",
            "LeaseHeld",
            "LeaseLost",
            "LedgerDoubtful",
            "Lost",
            "MissingExtra",
            "Misuse",
            "OutcomeUnknown",
            "Refused",
            "RetryAfter",
            "RunCancelled",
            "RunCrashed",
            "RunLost",
            "RunTimedOut",
            "Said",
            "Stopped",
            "StoreUnavailable",
            "StoreUnfit",
            "TokenRegressed",
            "TokenStale",
            "UnknownJob",
            "UnknownRun",
        ),
        "fencepost.errors",
    ),
}

__all__ = ["__version__", *_WHERE]  # noqa: PLE0604 -- strings all


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'fencepost' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
