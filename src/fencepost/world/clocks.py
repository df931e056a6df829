"""The machine's three clocks. A wall clock that steps must free nothing and block nothing."""

from __future__ import annotations

import os
import time
from functools import partial

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TIME_NAMESPACE = "/proc/self/ns/time"


class SystemClocks:
    """The clocks of this machine. Only Linux offers all three; see docs/platforms.md."""

    def __init__(self) -> None:
        self._era: str | None = None
        self._asked = False

    # Not functions of ours that call these: every lease reads its clocks while others wait.
    wall = staticmethod(time.time)  # seconds since 1970
    if hasattr(time, "CLOCK_BOOTTIME"):
        boottime = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))  # sleep included
    else:
        boottime = staticmethod(time.monotonic)  # the nearest thing

    def era(self) -> str | None:
        """Return the kernel's boot id, or None where two processes' instants cannot be compared."""
        if not self._asked:
            self._era = _boot_id() if hasattr(time, "CLOCK_BOOTTIME") else None
            self._asked = True
        return self._era

    def namespace(self) -> str:
        """Return the identity of the time namespace, or nothing on a kernel without them."""
        try:
            return os.readlink(_TIME_NAMESPACE)
        except OSError:
            return ""


def _boot_id() -> str | None:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip() or None
    except OSError:
        return None
