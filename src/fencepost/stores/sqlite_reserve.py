"""Tokens are reserved a minute at a time, so that a grant need not wait for the disk.

A token that was used must never be issued again, not even if a power cut has forgotten its grant
and the clock comes up behind. The disk knows up to where tokens may have been used; a file that is
opened in another boot goes on above that. See docs/decisions/0004-durability.md.
"""

from __future__ import annotations

import os

from fencepost.stores.sqlite_rows import RESERVE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import Clocks
    from fencepost.world.sqlite import SqliteFile

# Tokens are microseconds. Those of this long are reserved at a time, and some time before they
# are used up, because a grant takes a moment too.
_AT_A_TIME_US, _BEFORE_US = 60_000_000, 10_000_000


class TokenReserve:
    """Which tokens this process knows to be reserved, on the disk, in one file."""

    def __init__(self, file: SqliteFile, clocks: Clocks) -> None:
        self._file, self._clocks = file, clocks
        self._ceiling = self._generation = 0
        # Without a boot id nobody could tell that there was a power cut.
        self.possible = file.path != ":memory:" and bool(clocks.era()) and hasattr(os, "fdatasync")

    def ahead(self) -> None:
        """Make sure that the tokens of now are reserved: mostly they are already."""
        now_us = int(self._clocks.wall() * 1e6)
        if self.possible and not self.covers(now_us + _BEFORE_US):
            ceiling = now_us + _AT_A_TIME_US
            self._file.write_one(lambda db: db.execute(RESERVE, (ceiling,)).rowcount, durable=True)
            self._ceiling, self._generation = ceiling, self._file.generation

    def covers(self, token: int) -> bool:
        """Say whether a grant with that token need not be on the disk before it is used."""
        # What is reserved in a file says nothing about the one that took its place.
        here = self._generation == self._file.generation
        return self.possible and here and token < self._ceiling
