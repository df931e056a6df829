"""Whether this file is the ledger that was here before, or an older copy of it.

The file is compared with what the witness beside it remembers: which ledger it is (a random name
that it got when it was made), the highest token that was synced, and the newest commit of each
process. A copy of yesterday lacks that. Then nothing may be claimed: what ran since would run
again.

A commit about a run is remembered by the run's row, which it writes anyway. Any other commit counts
one up in the file. See docs/decisions/0043-a-witness-of-each-commit.md.
"""

from __future__ import annotations

import os
import weakref

from fencepost.errors import LedgerDoubtful
from fencepost.ledger.retention import KEPT_FOR
from fencepost.model.slot import RunKey
from fencepost.model.witnessed import Commit, Found, cell_from, has, run_line
from fencepost.world.witness import Cells, Seen, Witness, Wrote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection

    from fencepost.model.run import RunRecord
    from fencepost.model.witnessed import Cell
    from fencepost.world.api import World
    from fencepost.world.sqlite import Place, SqliteFile

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

_ANY_RUN = """
SELECT EXISTS (SELECT 1 FROM fencepost_run) OR EXISTS (SELECT 1 FROM fencepost_alarm)"""

# What all tokens must be above only grows, and in one boot by commits of the ledger alone. Tokens
# are microseconds: nobody misses those that are counted away.
_COUNT_UP = """
UPDATE fencepost_file SET token = token + 1 WHERE id = 1
RETURNING token, (SELECT incarnation FROM fencepost_life WHERE id = 1)"""

_FIND_COUNT = "SELECT token FROM fencepost_file WHERE id = 1"

_FIND_RUN = """
SELECT state, token, saves FROM fencepost_run
 WHERE namespace = ? AND job = ? AND slot = ? AND manual = ? AND rerun = ?"""

_FIND_ITEM = """
SELECT state, token, call FROM fencepost_item WHERE namespace = ? AND scope = ? AND item = ?"""

_FIND_PRUNED = "SELECT pruned FROM fencepost_job WHERE namespace = ? AND job = ?"

# The line is told so often at most; tokens are microseconds.
_OFTEN_US = 1_000_000
_DAY = 86400.0

# What a process has told: how far the file had counted, its last commit as a line, and the token;
# and how often it had begun anew by then.
Telling = tuple[int, str, int, int]
NOTHING: Telling = (0, "", 0, 0)

# How far a file has counted, and which ledger it is.
Counted = tuple[int, str]

# What stands for a commit that nobody need remember.
UNTOLD = Commit("", RunKey("", 0), 0)


class Testimony:
    """What the witness of one file says about it.

    Files are compared on the ledger's own connection, by one thread at a time. But transactions of
    user code have connections of their own, and any thread tells what is synced: so what is told,
    and the cell, change in turn only. No statement is run in that turn.
    """

    def __init__(self, world: World, file: SqliteFile) -> None:
        self._world, self._file = world, file
        self._boot = world.clocks.era() or ""
        in_memory = file.path == ":memory:"
        self._witness = None if in_memory else Witness(file.path + "-live")
        self._cells = None if in_memory else Cells(file.path + "-live")
        self._incarnation = self._head = ""  # of the ledger that was believed last
        self._doubt = ""
        self.place: Place | None = None  # of the file that was compared last
        self._synced_token = self._told_token = 0
        self._last = self._synced = NOTHING
        self._read: dict[str, str] = {}  # cells of others of which this file has all
        self._turn = world.mutex()
        _testimonies.add(self)

    @property
    def doubtful(self) -> bool:
        """Whether the file may be an older copy of the ledger, as far as was seen."""
        return bool(self._doubt)

    def hear(self, db: Connection) -> None:
        """Compare the file with what was seen of it, inside of a write transaction.

        Asked for each connection, and whenever somebody may have put a copy into the file.
        """
        place = self._file.place
        if self._witness is None or self._cells is None:
            self.place = place
            return
        found = self._seen_in(db)
        (any_run,) = db.execute(_ANY_RUN).fetchone()
        seen, texts = self._witness.asked(), self._cells.read()
        cells = [cell for cell in map(cell_from, texts.values()) if cell is not None]
        if seen is None and cells:
            seen = Seen(cells[0].incarnation, 0)
        why = doubt(seen, found, empty=not any_run) or self._lacks(db, cells, found.incarnation)
        with self._turn:
            self.place, self._doubt = place, why
            if why:
                return
            self._identify(found.incarnation)
            if self._cells.own not in texts:  # an operator has removed it, or there is none yet
                self._forget()
            self._read = texts
            if seen is not None and seen.incarnation != found.incarnation:
                # Begun anew: from here on it is this one, and the next who looks must know.
                self._take(found)

    def refuse_doubtful(self, db: Connection) -> None:
        """Raise if the file may be an older copy of the ledger."""
        if self._doubt:
            self.hear(db)  # an operator may have said so since
        if self._doubt:
            raise LedgerDoubtful(
                f"the ledger {self._file.path!r} {self._doubt}; what ran since may run again, so "
                "nothing runs until somebody has looked and says: fencepost migrate --accept-copy"
            )

    def count(self, db: Connection) -> Counted | None:
        """Count a commit in the file, inside of its transaction; None where nobody would look.

        Not in a file that is doubted: it would come to look like the one that it was copied from.
        """
        if self._cells is None or self._doubt:
            return None
        counted: Counted = db.execute(_COUNT_UP).fetchone()
        return counted

    def tell(self, line: str = "", token: int = 0, *, counted: Counted | None = None) -> Telling:
        """Have a commit remembered that is in the file by now, before anybody acts on it.

        Commits are told in their order, each as a line. What was counted may be told in any, even
        when the file was replaced since: it is missed there, unless that is another ledger.
        Returned is what is on the disk once this commit is.
        """
        with self._turn:
            last = self._last
            if self._doubt:
                line, token = "", 0  # it is in a copy; only what was counted came before that
            count = counted[0] if counted and counted[1] == self._incarnation else 0
            told = (max(last[0], count), line or last[1], token or last[2], last[3])
            self._last = told
            if self._boot:  # else a power cut cannot be told from a pause: only what is synced
                self._write(told)
            # Another connection may have told by now what it committed later, and did not sync.
            return told if line else (count, *self._synced[1:])

    def tell_run(self, namespace: str, run: RunRecord) -> Telling:
        """Have a commit remembered that left a run like this: ``tell``, for every usual run."""
        with self._turn:
            if self._doubt:
                return NOTHING
            count, _, _, anew = self._last
            told = self._last = (count, run_line(namespace, run), run.token, anew)
            if self._boot:
                self._write(told)
        return told

    def synced(self, told: Telling) -> None:
        """Have it remembered that what was told is on the disk: along with the next commit."""
        with self._turn:
            if self._doubt or told[3] != self._last[3]:
                return  # it was about another file
            if told[0] >= self._synced[0]:  # one that came before it changes little
                self._synced = told
            if not self._boot:
                self._write(told)
            token = told[2]
            if token > self._synced_token:
                self._synced_token = token
                if token >= self._told_token + _OFTEN_US:
                    self._tell_line()

    def accept(self, db: Connection) -> None:
        """Take the file for the ledger from now on, by an operator's word."""
        if self._witness is not None:
            found = self._seen_in(db)
            with self._turn:
                self._identify(found.incarnation)
                self._take(found)

    def leave_to_parent(self) -> None:
        """Begin a cell of our own in a fork's child; the lock that it copied may be taken."""
        self._turn = self._world.mutex()
        if self._cells is not None:
            self._cells.close()

    def close(self) -> None:
        """Let the witness go; it has heard everything."""
        if self._witness is not None and self._cells is not None:
            with self._turn:
                if self._synced_token > self._told_token:
                    self._tell_line()
                self._witness.close()
                self._cells.close()

    # Beneath: what asks the file, and then what is done in turn.

    def _seen_in(self, db: Connection) -> Seen:
        (incarnation,) = db.execute(_FIND_LIFE).fetchone()
        (token,) = db.execute(_FIND_HIGHEST).fetchone()
        return Seen(incarnation, token)

    def _lacks(self, db: Connection, cells: list[Cell], incarnation: str) -> str:
        """Say what a process has told that is not in the file; nothing if all is."""
        (count,) = db.execute(_FIND_COUNT).fetchone()
        for cell in cells:
            told = cell.in_boot(self._boot)
            if cell.incarnation != incarnation:
                continue  # of a ledger that was here before this one
            if told.commit is not None and not has(told.commit, self._found(db, told.commit)):
                about = f"what was recorded of run {told.commit.key} under token"
                return _older(f"{about} {told.commit.token} is not in it")
            if told.counted > count:
                return _older(f"it has counted to {count}, and was at {told.counted} already")
        return ""

    def _found(self, db: Connection, commit: Commit) -> Found:
        """Return what the file has of a commit."""
        space, key = commit.namespace, commit.key
        run = db.execute(_FIND_RUN, (space, *key)).fetchone()
        item = None
        if commit.item is not None:
            item = db.execute(_FIND_ITEM, (space, commit.scope, commit.item)).fetchone()
        if run is not None and (commit.item is None or item is not None):
            return Found(run, item)
        job = db.execute(_FIND_PRUNED, (space, key.job)).fetchone()
        old = job is not None and key.slot <= job[0]
        if job is not None and not key.manual and not (old and key.rerun):
            return Found(run, item, forgotten=old)
        # How far retention came is on record by slot. Of a run that repeats a slot which was
        # forgotten, or that has none of its own, only its age tells.
        return Found(
            run, item, forgotten=commit.token / 1e6 < self._world.clocks.wall() - KEPT_FOR + _DAY
        )

    def _identify(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._head = f"{self._boot}\n{incarnation}\n"  # what each cell of ours begins with

    def _write(self, told: Telling) -> None:
        """Write our own cell."""
        if self._cells is None or self._doubt:
            return
        synced = self._synced
        wrote = self._cells.write(f"{self._head}{told[0]}\n{told[1]}\n{synced[0]}\n{synced[1]}")
        if wrote is Wrote.REMOVED:  # an operator has spoken, and perhaps of another file
            self._forget()
            self.place = None
        elif wrote is Wrote.NEW:
            # All that these have told is in the file, and older than what we have told now.
            self._cells.remove(self._read, dead=True)

    def _tell_line(self) -> None:
        self._told_token = self._synced_token
        if self._witness is not None:
            self._witness.tell(Seen(self._incarnation, self._synced_token))

    def _take(self, found: Seen) -> None:
        """Believe this file, and nothing that was told of another."""
        assert self._witness is not None, "who believes has a witness"
        assert self._cells is not None, "and cells"
        self._witness.tell(found, anew=True)
        self._cells.remove(self._cells.read(), dead=False)
        self._forget()
        self._synced_token = self._told_token = found.token

    def _forget(self) -> None:
        """Begin another cell: what we have told so far was about another file."""
        assert self._cells is not None, "who forgets had cells"
        self._last = self._synced = (*NOTHING[:3], self._last[3] + 1)
        self._synced_token = self._told_token = 0
        self._cells.close()


# Every testimony of this process. In the child of a fork each has another cell.
_testimonies: weakref.WeakSet[Testimony] = weakref.WeakSet()


def _after_fork() -> None:
    for testimony in list(_testimonies):
        testimony.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def doubt(seen: Seen | None, found: Seen, *, empty: bool) -> str:
    """Say why a ledger may be an older copy; nothing if there is no reason to think so.

    A ledger without any run or alarm is one that somebody began anew, not a copy of yesterday's.
    """
    if seen is None:
        return ""
    if seen.incarnation != found.incarnation:
        return "" if empty else "is not the one that was here before"
    if found.token < seen.token:
        return _older(f"token {found.token}, and {seen.token} was issued already")
    return ""


def untold(_: object) -> Commit:
    """Vouch for nothing, as for a beat: without it nothing runs twice."""
    return UNTOLD


def _older(why: str) -> str:
    return f"is older than what was seen of it ({why}): it looks like a restored copy"
