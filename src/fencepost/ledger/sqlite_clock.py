"""Whose wall clock the file goes by: that of those who agree, for as long as they say so.

On SQLite every process is the store's clock. All of one machine read the same one, unless somebody
tampered with it: so whoever's wall clock stands otherwise to the boot clock than the file has on
record decides nothing, until the others have been silent for a while.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection

    from fencepost.world.api import Clocks

# How far a clock may be off, and how long those who agreed must have been silent to be overruled.
SLACK, SILENCE = 2.0, 15.0

FIND_CLOCK = "SELECT era, ahead, confirmed_at FROM fencepost_clock WHERE id = 1"

PUT_CLOCK = (
    "INSERT OR REPLACE INTO fencepost_clock (id, era, ahead, confirmed_at) VALUES (1, ?, ?, ?)"
)


def off_by(db: Connection, clocks: Clocks) -> float:
    """Return how far our wall clock is from the one on record, if too far; 0 if it is not."""
    return _seen(db, clocks)[0]


def agreed(db: Connection, clocks: Clocks) -> float:
    """Return the same; where nobody is there to disagree, ours is on record from now on."""
    off, known = _seen(db, clocks)
    if not known:
        confirm(db, clocks)
    return off


def confirm(db: Connection, clocks: Clocks) -> None:
    """Keep that somebody still agrees with the clock on record."""
    boot = clocks.boottime()
    db.execute(PUT_CLOCK, (clocks.era() or "", clocks.wall() - boot, boot))


def _seen(db: Connection, clocks: Clocks) -> tuple[float, bool]:
    """Return how far ours is off, and whether the clock on record is one to go by."""
    boot = clocks.boottime()
    row = db.execute(FIND_CLOCK).fetchone()
    if row is None or row[0] != (clocks.era() or ""):
        return 0.0, False
    off: float = clocks.wall() - boot - row[1]
    if abs(off) <= SLACK:
        return 0.0, True
    if boot - row[2] < SILENCE:
        return off, True
    return 0.0, False
