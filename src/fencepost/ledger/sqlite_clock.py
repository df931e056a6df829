"""Whose wall clock the file goes by: that of those who agree, for as long as they say so.

On SQLite every process is the store's clock. All of one machine read the same one, unless somebody
tampered with it: so whoever's wall clock stands otherwise to the boot clock than the file has on
record decides no slots, and what it writes has the time of the others, until these have been silent
for a while.
"""

from __future__ import annotations

from fencepost.model.meant import SLACK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection

    from fencepost.ledger.sqlite_touches import Touches
    from fencepost.world.api import Clocks

# How long those who agreed must have been silent to be overruled, and how often one of them says
# that it still agrees.
SILENCE, CONFIRMS = 15.0, 5.0
_NEVER = float("-inf")

FIND_CLOCK = "SELECT era, ahead, confirmed_at FROM fencepost_clock WHERE id = 1"

PUT_CLOCK = (
    "INSERT OR REPLACE INTO fencepost_clock (id, era, ahead, confirmed_at) VALUES (1, ?, ?, ?)"
)

# SQL functions of a connection. The token is asked for first: that reads the clock.
CLAIM_TOKEN, CLAIM_AT = "fencepost_claim_token", "fencepost_claim_at"


class FileClock:
    """The time of a file, as one process knows it: its own wall clock, less what that is off.

    The record is read again after a few seconds, and at once if our own wall clock was set. Until
    then nobody can have overruled what it said: that takes a longer silence.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._off = 0.0
        self._ahead = 0.0  # of our wall clock, when the record was read
        self._read_at = _NEVER
        self._since, self._until = 0.0, 0.0  # at which times a claim may be made
        self.claimed = (0, 0.0)  # the token and the time of the last claim
        self._touches: Touches

    def known(self) -> float | None:
        """Return the time of the file; None if the record must be read again first."""
        clocks = self._clocks
        boot, wall = clocks.boottime(), clocks.wall()
        recent = 0.0 <= boot - self._read_at < CONFIRMS
        if recent and -SLACK <= wall - boot - self._ahead <= SLACK:
            return wall - self._off
        return None

    def now(self, db: Connection) -> float:
        """Return the time of the file."""
        known = self.known()
        if known is not None:
            return known
        self._keep(_seen(db, self._clocks)[0])
        return self._clocks.wall() - self._off

    def confirmed(self, db: Connection) -> float:
        """Return the time of the file, and say in it now and then that we agree, if we do.

        For those who write in any case, and are perhaps the only ones who do.
        """
        known = self.known()
        if known is not None:
            return known
        if not self.look(db) and _seen(db, self._clocks)[2] >= CONFIRMS:
            confirm(db, self._clocks)
        return self._clocks.wall() - self._off

    def lend(self, db: Connection, touches: Touches) -> None:
        """Let statements on a connection read this clock, and so after they have the file.

        A claim is refused where somebody may have written over the file. The connection keeps the
        clock, but nothing by which the clock would keep the connection.
        """
        self._touches = touches
        db.create_function(CLAIM_TOKEN, 0, self._claim_token)
        db.create_function(CLAIM_AT, 0, lambda: self.claimed[1])

    def expect_claim(self, since: float, until: float) -> None:
        """Let the next claim be made at ``since`` or later, and before ``until``."""
        self._since, self._until = since, until

    def _claim_token(self) -> int | None:
        """Return the token of a claim that is made now, and keep its time; None refuses it."""
        known = self.known()
        if known is None or not self._since <= known < self._until:
            return None
        if not self._touches.untouched():
            return None
        token = int((known + self._off) * 1e6)
        self.claimed = token, known
        return token

    def look(self, db: Connection) -> float:
        """Return how far our wall clock is off; where nobody disagrees it is on record from now."""
        off, known, _ = _seen(db, self._clocks)
        if not known:
            confirm(db, self._clocks)
        self._keep(off)
        return off

    def _keep(self, off: float) -> None:
        boot = self._clocks.boottime()
        self._off, self._ahead, self._read_at = off, self._clocks.wall() - boot, boot


def off_by(db: Connection, clocks: Clocks) -> float:
    """Return how far our wall clock is from the one on record, if too far; 0 if it is not."""
    return _seen(db, clocks)[0]


def confirm(db: Connection, clocks: Clocks) -> None:
    """Keep that somebody still agrees with the clock on record."""
    boot = clocks.boottime()
    db.execute(PUT_CLOCK, (clocks.era() or "", clocks.wall() - boot, boot))


def _seen(db: Connection, clocks: Clocks) -> tuple[float, bool, float]:
    """Return how far ours is off, whether the clock on record is one to go by, and its silence."""
    boot = clocks.boottime()
    row = db.execute(FIND_CLOCK).fetchone()
    if row is None or row[0] != (clocks.era() or ""):
        return 0.0, False, 0.0
    off: float = clocks.wall() - boot - row[1]
    silent: float = boot - row[2]
    if abs(off) <= SLACK:
        return 0.0, True, silent
    if silent < SILENCE:
        return off, True, silent
    return 0.0, False, silent
