"""Whether a file has the newest commit that a process made in it, or is an older copy.

Commits are lost from the end only: a restored copy lacks the newest ones. So a process remembers
outside of the file what its newest commit left in it for good, and a file without that is older.
What is remembered here stays true whatever is committed later: so a crash gives no false alarm.
"""

from __future__ import annotations

import json

from fencepost.model.named import NamedTuple
from fencepost.model.run import State
from fencepost.model.slot import RunKey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.run import RunRecord


# A commit as a line: namespace, job, slot, manual, rerun, token, over, saves.
_RUN = "%s\t%s\t%d\t%d\t%d\t%d\t%d\t%d"


class Commit(NamedTuple):
    """What a commit about a run left in the file for good.

    The run has this token or a higher one. If it is ``over``, that attempt no longer runs; it has
    saved ``saves`` times at least; and it began ``item`` of ``scope``, which, if there is a
    ``call``, that call has ended.
    """

    namespace: str
    key: RunKey
    token: int
    over: bool = False
    saves: int = 0
    scope: str = ""
    call: str = ""
    item: str | None = None


class Told(NamedTuple):
    """The newest that a process knows of a file: how far it had counted, and its last commit."""

    counted: int = 0
    commit: Commit | None = None


class Cell(NamedTuple):
    """What one process has told of a file.

    ``last`` counts in the boot in which it was told: a power cut may have taken it from the file.
    ``synced`` was on the disk before it was told.
    """

    boot: str
    incarnation: str
    last: Told
    synced: Told

    def in_boot(self, boot: str) -> Told:
        """Return what the file must have, now that the machine is in this boot."""
        return self.last if boot == self.boot else self.synced


class Found(NamedTuple):
    """What a file has of a commit, of its run and of its item.

    ``forgotten`` says that history as old as this may be gone.
    """

    run: tuple[str, int, int] | None  # state, token, saves
    item: tuple[str, int, str] | None = None  # state, token, call
    forgotten: bool = False


def has(commit: Commit, found: Found) -> bool:
    """Say whether a file has a commit, as far as can be seen."""
    if found.run is None:
        return found.forgotten
    state, token, saves = found.run
    if token != commit.token:
        return token > commit.token
    if saves < commit.saves or (commit.over and state == "running"):
        return False
    return commit.item is None or _has_item(commit, found)


def _has_item(commit: Commit, found: Found) -> bool:
    if found.item is None:
        return found.forgotten
    state, token, call = found.item
    if token != commit.token:
        return True  # another attempt began it, perhaps on another lock: tokens do not compare
    return not commit.call or call != commit.call or state != "begun"


def commit_line(commit: Commit) -> str:
    """Return a commit as a line, for those who come later."""
    namespace, key, token, over, saves, scope, call, item = commit
    line = _RUN % (namespace, *key, token, over, saves)
    return line if item is None else f"{line}\t{json.dumps((scope, call, item))}"


def run_line(namespace: str, run: RunRecord) -> str:
    """Return a commit that left a run like this as a line; the short way to it."""
    job, slot, manual, rerun = run.key
    over = 0 if run.state is State.RUNNING else 1
    return f"{namespace}\t{job}\t{slot}\t{manual}\t{rerun}\t{run.token}\t{over}\t{run.saves}"


def cell_from(text: str) -> Cell | None:
    """Return what a process told; None if that cannot be read."""
    lines = text.split("\n")
    if len(lines) != 6:
        return None
    try:
        return Cell(lines[0], lines[1], _told(lines[2:4]), _told(lines[4:6]))
    except (ValueError, TypeError):
        return None


def _told(lines: list[str]) -> Told:
    count, line = lines
    if not line:
        return Told(int(count))
    namespace, job, *words = line.split("\t")
    slot, manual, rerun, token, over, saves = map(int, words[:6])
    rest = json.loads(words[6]) if len(words) > 6 else ()
    return Told(
        int(count),
        Commit(namespace, RunKey(job, slot, manual, rerun), token, bool(over), saves, *rest),
    )
