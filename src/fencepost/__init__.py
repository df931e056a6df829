"""Scheduled jobs that run once. Not twice, not never.

The public names, each imported when it is first asked for: a program pays for what it uses.
"""

from __future__ import annotations

import importlib

from fencepost.version import VERSION as __version__  # noqa: N811 -- the name tools look for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.aio import AsyncFencepost as AsyncFencepost
    from fencepost.blocking import Fencepost as Fencepost
    from fencepost.errors import (
        BadDuration as BadDuration,
        BadName as BadName,
        BadUrl as BadUrl,
        FenceMisused as FenceMisused,
        FencepostError as FencepostError,
        LeaseHeld as LeaseHeld,
        LeaseLost as LeaseLost,
        Lost as Lost,
        MissingExtra as MissingExtra,
        Misuse as Misuse,
        OutcomeUnknown as OutcomeUnknown,
        Refused as Refused,
        StoreUnavailable as StoreUnavailable,
        TokenRegressed as TokenRegressed,
        TokenStale as TokenStale,
    )
    from fencepost.lease import Lease as Lease
    from fencepost.model.lease import admits as admits
    from fencepost.stores.open import register_store as register_store

_WHERE = {
    "Fencepost": "fencepost.blocking",
    "AsyncFencepost": "fencepost.aio",
    "Lease": "fencepost.lease",
    "admits": "fencepost.model.lease",
    "register_store": "fencepost.stores.open",
    **dict.fromkeys(
        (
            "BadDuration",
            "BadName",
            "BadUrl",
            "FenceMisused",
            "FencepostError",
            "LeaseHeld",
            "LeaseLost",
            "Lost",
            "MissingExtra",
            "Misuse",
            "OutcomeUnknown",
            "Refused",
            "StoreUnavailable",
            "TokenRegressed",
            "TokenStale",
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
