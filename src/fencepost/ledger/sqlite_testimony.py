"""Whether this file is the ledger that was here before, or an older copy of it.

Two things are compared with what the witness beside the file remembers: which ledger it is (a
random name that it got when it was made) and the highest token in it, which only grows. A copy of
yesterday has yesterday's. Then nothing may be claimed: what ran since would run again.
"""

from __future__ import annotations

from fencepost.errors import LedgerDoubtful
from fencepost.world.witness import Seen, Witness

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection

CREATE_LIFE = """
CREATE TABLE IF NOT EXISTS fencepost_life (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    incarnation TEXT    NOT NULL
)"""

BEGIN_LIFE = """
INSERT OR IGNORE INTO fencepost_life (id, incarnation) VALUES (1, lower(hex(randomblob(16))))"""

_FIND_LIFE = "SELECT incarnation FROM fencepost_life WHERE id = 1"

# Leases are few, one for each name: this is read once for each connection.
_FIND_HIGHEST = """
SELECT max(coalesce((SELECT max(token) FROM fencepost_lease), 0),
           coalesce((SELECT token FROM fencepost_file WHERE id = 1), 0))"""

_OFTEN_US = 1_000_000

_ANY_RUN = """
SELECT EXISTS (SELECT 1 FROM fencepost_run) OR EXISTS (SELECT 1 FROM fencepost_alarm)"""


class Testimony:
    """What the witness of one file says about it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._witness = None if path == ":memory:" else Witness(path + "-live")
        self._incarnation = ""
        self._doubt = ""
        self._issued = self._told = 0

    @property
    def doubtful(self) -> bool:
        """Whether the file may be an older copy of the ledger, as far as was seen."""
        return bool(self._doubt)

    def hear(self, db: Connection) -> None:
        """Compare the file with what was seen of it. Asked once for each connection."""
        if self._witness is None:
            return
        (self._incarnation,) = db.execute(_FIND_LIFE).fetchone()
        (token,) = db.execute(_FIND_HIGHEST).fetchone()
        (any_run,) = db.execute(_ANY_RUN).fetchone()
        seen = self._witness.asked()
        self._doubt = doubt(seen, Seen(self._incarnation, token), empty=not any_run)
        if not self._doubt and seen is not None and seen.incarnation != self._incarnation:
            # Begun anew: from here on it is this one, and the next who looks must know.
            self._told = token
            self._witness.tell(Seen(self._incarnation, token))

    def refuse_doubtful(self, db: Connection) -> None:
        """Raise if the file may be an older copy of the ledger."""
        if self._doubt:
            self.hear(db)  # an operator may have said so since
        if self._doubt:
            raise LedgerDoubtful(
                f"the ledger {self._path!r} {self._doubt}; what ran since may run again, so "
                "nothing runs until somebody has looked and says: fencepost migrate --accept-copy"
            )

    def tell(self, token: int) -> None:
        """Have a token remembered that was issued just now; at once, or when a second has passed.

        Tokens are microseconds: to remember each of a thousand would tell no more than the last.
        """
        self._issued = token
        if self._witness is not None and token >= self._told + _OFTEN_US:
            self._told = token
            self._witness.tell(Seen(self._incarnation, token))

    def accept(self, db: Connection) -> None:
        """Take the file for the ledger from now on, by an operator's word."""
        if self._witness is not None:
            (self._incarnation,) = db.execute(_FIND_LIFE).fetchone()
            (token,) = db.execute(_FIND_HIGHEST).fetchone()
            self._witness.tell(Seen(self._incarnation, token))

    def close(self) -> None:
        """Let the witness go; it has heard everything."""
        if self._witness is not None:
            if self._issued > self._told:
                self._witness.tell(Seen(self._incarnation, self._issued))
                self._told = self._issued
            self._witness.close()


def doubt(seen: Seen | None, found: Seen, *, empty: bool) -> str:
    """Say why a ledger may be an older copy; nothing if there is no reason to think so.

    A ledger without any run or alarm is one that somebody began anew, not a copy of yesterday's.
    """
    if seen is None:
        return ""
    if seen.incarnation != found.incarnation:
        return "" if empty else "is not the one that was here before"
    if found.token < seen.token:
        return (
            f"is older than what was seen of it (token {found.token}, and {seen.token} was issued "
            "already): it looks like a restored copy"
        )
    return ""
