"""A disk with little room under a server's folder, that a test fills up and clears again.

It is a tmpfs in a mount namespace of its own, which no other process sees. It ends with its keeper.
"""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from servers import Etcd, MariaDB, Postgres, Seaweed, Valkey, ZooKeeper
from servers.running import give_to_nobody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers.running import Running

_CHUNK = 2**16
# An ordinary user may mount in a user namespace of its own, in which it stays the user that it is.
_AS_USER = [] if os.getuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]

# The disk takes the place of the folder, and gets its files, with their owners.
_KEEPER = """
cp -a "$1" "$1.kept" && mount -t tmpfs -o "size=$2m,mode=0711" tmpfs "$1" &&
cp -a "$1.kept/." "$1/" && chown --reference="$1.kept" "$1" && chmod --reference="$1.kept" "$1" &&
rm -rf "$1.kept" && echo ready && exec sleep infinity
"""


class SmallDisk:
    """A disk of some megabytes in the place of a folder, for those who enter its namespace."""

    def __init__(self, folder: Path, *, megabytes: int) -> None:
        unshared = ["unshare", *_AS_USER, "--mount", "--propagation", "private"]
        self._keeper = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", *unshared),
                *("sh", "-c", _KEEPER, "sh", str(folder), str(megabytes)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stderr is not None
        if self._keeper.stdout.readline() != b"ready\n":
            why = self._keeper.communicate()[1].decode()
            if _AS_USER:
                pytest.skip(f"NOT TESTED: this user may not mount a small disk here: {why}")
            raise RuntimeError(f"no small disk: {why}")
        self._inside = Path(f"/proc/{self._keeper.pid}/root{folder}")

    @property
    def entering(self) -> list[str]:
        """Return the words before a program that is to see the disk."""
        spaces = f"/proc/{self._keeper.pid}/ns"
        user = [f"--user={spaces}/user", "--preserve-credentials"] if _AS_USER else []
        return ["nsenter", *user, f"--mount={spaces}/mnt", "--"]

    def fill(self, *, but: int = 0) -> None:
        """Leave no room at all, or so many bytes."""
        for size in (_CHUNK, 1):
            with (self._inside / "ballast").open("ab", buffering=0) as file:
                try:
                    while file.write(b"x" * size):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        if but:
            os.truncate(self._inside / "ballast", (self._inside / "ballast").stat().st_size - but)

    def clear(self) -> None:
        """Make room again."""
        (self._inside / "ballast").unlink()

    def close(self) -> None:
        """Let it vanish, once nobody is inside any more."""
        self._keeper.kill()
        self._keeper.communicate()


if TYPE_CHECKING:
    _Kind = Running
else:
    _Kind = object


class OnSmallDisk(_Kind):
    """What makes a server keep its data on such a disk."""

    megabytes = 64
    disk: SmallDisk

    def prepare(self) -> None:
        """Lay the disk under what was prepared."""
        super().prepare()
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        self.disk = SmallDisk(data, megabytes=self.megabytes)

    def command(self) -> Sequence[str]:
        """Return the words that start it there."""
        return [*self.disk.entering, *super().command()]

    def end(self) -> None:
        """End it, and the disk."""
        super().end()
        if hasattr(self, "disk"):
            self.disk.close()


class SmallPostgres(OnSmallDisk, Postgres):
    """PostgreSQL with 24 MB beside what it begins with."""

    megabytes = 80


class SmallMariaDB(OnSmallDisk, MariaDB):
    """MariaDB that has little more than it begins with."""

    megabytes = 160


class SmallBinlog(MariaDB):
    """MariaDB with all the room it needs, but for its binary log."""

    disk: SmallDisk

    def prepare(self) -> None:
        """Lay a disk under the log alone."""
        super().prepare()
        logs = self.folder / "logs"
        logs.mkdir()
        give_to_nobody(logs)
        self.disk = SmallDisk(logs, megabytes=2)
        self.settings = ("--server-id=1", "--binlog-format=MIXED", f"--log-bin={logs}/log")

    def command(self) -> Sequence[str]:
        """Return the words that start it there."""
        return [*self.disk.entering, *super().command()]

    def end(self) -> None:
        """End it, and the disk."""
        super().end()
        if hasattr(self, "disk"):
            self.disk.close()


class SmallValkey(OnSmallDisk, Valkey):
    """Valkey that logs to a small disk."""

    megabytes = 8

    def command(self) -> Sequence[str]:
        """Return the words that start it there."""
        return [*super().command(), "--dir", str(self.folder / "data")]


class SmallEtcd(OnSmallDisk, Etcd):
    """etcd whose log lies on a small disk."""

    megabytes = 160


class SmallZooKeeper(OnSmallDisk, ZooKeeper):
    """ZooKeeper whose log lies on a small disk."""

    megabytes = 80


class SmallSeaweed(OnSmallDisk, Seaweed):
    """An S3 server with a small disk."""

    megabytes = 128
