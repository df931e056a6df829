"""Clocks that a test can set: time passes by itself, and jumps when it is told to."""

from __future__ import annotations

from fencepost.world.clocks import SystemClocks


class SettableClocks:
    """The machine's clocks, moved by hand. Give one object to all worlds that share a machine.

    ``Fencepost(url, clocks=SettableClocks())`` lets a test pass an hour in no time.
    """

    def __init__(self) -> None:
        self._system = SystemClocks()
        self._wall_offset = 0.0
        self._boot_offset = 0.0
        self._reboots = 0
        self._knows_era = True
        self._time_namespace = ""

    def wall(self) -> float:
        """Return seconds since 1970, as far as this test is concerned."""
        return self._system.wall() + self._wall_offset

    def boottime(self) -> float:
        """Return seconds since boot."""
        return self._system.boottime() + self._boot_offset

    def era(self) -> str | None:
        """Return the boot id, another one after each reboot."""
        return f"boot-{self._reboots}" if self._knows_era else None

    def namespace(self) -> str:
        """Return the time namespace."""
        return self._time_namespace

    def advance(self, seconds: float) -> None:
        """Let time pass on all clocks, as it would."""
        self._wall_offset += seconds
        self._boot_offset += seconds

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as NTP and operators do."""
        self._wall_offset += seconds

    def reboot(self) -> None:
        """Restart the machine: a new boot id, and a boot-time clock that begins near zero."""
        self._reboots += 1
        self._boot_offset = -self._system.boottime()

    def hide_era(self) -> None:
        """Be a machine that does not tell its boot id."""
        self._knows_era = False

    def enter_namespace(self, name: str, *, offset: float) -> None:
        """Move to another time namespace, whose boot-time clock is off by ``offset``."""
        self._time_namespace = name
        self._boot_offset += offset
