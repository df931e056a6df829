"""Wall clocks that are wrong, and step: libfaketime, from its wheel, preloaded into one program.

Only the wall clock is faked. What a program measures with its monotonic and boot-time clocks stays
true, as it does on a machine whose administrator, or NTP, sets the time.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from servers.where import in_wheel, missing

if TYPE_CHECKING:
    from pathlib import Path


def library() -> Path:
    """Return what is to be preloaded."""
    found = in_wheel("libfaketime", "vendor/libfaketime/src/libfaketime.so.1")
    if found is None:
        missing("libfaketime", "libfaketime")
    return found


def wrong_by(seconds: float) -> dict[str, str]:
    """Return the environment of a program whose wall clock is wrong by so much, all the time."""
    preloaded = {"LD_PRELOAD": str(library()), "DONT_FAKE_MONOTONIC": "1"}
    return {**preloaded, "FAKETIME": f"{seconds:+.0f}"}


class Steps:
    """The wall clock of one program: a file says how far it is off, and may say so anew."""

    def __init__(self, folder: Path) -> None:
        self._library, self._file = folder / "faketime.so", folder / "faketime.rc"
        # Beside the program's data, where the user that runs it can read it.
        shutil.copy(library(), self._library)
        self._library.chmod(0o755)
        self.step(0)

    def step(self, seconds: float) -> None:
        """Set the clock so many seconds apart from the machine's, at once."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+.0f}\n")
        new.chmod(0o644)
        new.replace(self._file)  # whoever reads it meanwhile must not find half of it

    @property
    def before(self) -> list[str]:
        """The words before the program. Whoever becomes another user must not be preloaded."""
        return [
            "env",
            f"LD_PRELOAD={self._library}",
            "DONT_FAKE_MONOTONIC=1",
            f"FAKETIME_TIMESTAMP_FILE={self._file}",
            "FAKETIME_NO_CACHE=1",
        ]
