"""What about an SQLite file, where it lies, would break the promises of a lease."""

from __future__ import annotations

import os
import sqlite3

from fencepost.errors import StoreUnavailable
from fencepost.model.symptom import Severity, Symptom
from fencepost.world.disk import LOCAL, file_system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.stores.api import Capabilities
    from fencepost.world.api import Clocks
    from fencepost.world.sqlite import SqliteFile

# Below this a commit may fail for want of room, and a lease that cannot be renewed is lost.
_LITTLE_ROOM = 64 * 2**20
# Before this, two checkpoints and a commit within microseconds may damage a file: "WAL-reset".
_MENDED = (3, 51, 3)

_MEMORY = frozenset({"tmpfs", "ramfs"})


def examined(file: SqliteFile, promises: Capabilities, clocks: Clocks) -> list[Symptom]:
    """Look at the file and its disk. A file that is not there is not made."""
    folder = os.path.dirname(file.path)
    if not os.path.isdir(folder):
        raise StoreUnavailable(f"{file.path!r} cannot be opened: does its folder exist?")
    disk = list(_disk(file.path, file_system(folder)))
    if any(symptom.severity is Severity.BREAKS for symptom in disk):
        return disk  # and nothing is opened there
    problems: list[str] = file.read(_problems) if os.path.exists(file.path) else []
    return [
        *disk,
        *_health(file.path, problems),
        *_room(file.path),
        *_library(sqlite3.sqlite_version_info),
        *_pulse(promises, clocks),
    ]


def _problems(db: sqlite3.Connection) -> list[str]:
    found = [str(row[0]) for row in db.execute("PRAGMA quick_check(3)").fetchall()]
    return [line for line in found if line != "ok"]


def _health(path: str, problems: list[str]) -> Iterator[Symptom]:
    if problems:
        yield Symptom(
            "sqlite.damaged",
            Severity.BREAKS,
            f"{path!r} is damaged: {problems[0]}",
            "restore it from a backup, then run 'fencepost migrate --accept-copy'",
        )


def _disk(path: str, kind: str | None) -> Iterator[Symptom]:
    if kind in _MEMORY:
        yield Symptom(
            "sqlite.memory",
            Severity.RISK,
            f"{path!r} is on {kind}: all of it is gone after a restart of the machine",
            "keep the file on a disk",
        )
    elif kind is not None and kind not in LOCAL:
        yield Symptom(
            "sqlite.filesystem",
            Severity.BREAKS,
            f"{path!r} is on {kind}, which other machines may write to: their locks, clocks and "
            "boot ids are not ours",
            "keep the file on a local disk, or use a database server",
        )


def _room(path: str) -> Iterator[Symptom]:
    disk = os.statvfs(os.path.dirname(path))
    room = disk.f_bavail * disk.f_frsize
    if room < _LITTLE_ROOM:
        yield Symptom(
            "sqlite.room",
            Severity.RISK,
            f"the disk of {path!r} has {room // 2**20} MiB left: leases that cannot be renewed are "
            "lost",
            "free some space",
        )


def _library(found: tuple[int, ...]) -> Iterator[Symptom]:
    if found < _MENDED:
        yield Symptom(
            "sqlite.version",
            Severity.RISK,
            f"SQLite {'.'.join(map(str, found))} can, very rarely, damage a file that several "
            "processes write to (its WAL-reset bug), unless your distributor has mended it",
            "use a Python that is built with SQLite 3.51.3 or newer, and keep backups",
        )


def _pulse(promises: Capabilities, clocks: Clocks) -> Iterator[Symptom]:
    if clocks.era() is None:
        yield Symptom(
            "sqlite.boot_id",
            Severity.NOTE,
            "this machine does not tell one boot from another: a lease of the last boot is waited "
            "for, and a lapsed one is watched for its whole ttl before it is taken",
            "nothing, if that is quick enough",
        )
    elif not promises.notices_death:
        yield Symptom(
            "sqlite.deaths",
            Severity.NOTE,
            "deaths of holders are not noticed here: their leases are waited for",
            "nothing, if ttls are short enough",
        )
