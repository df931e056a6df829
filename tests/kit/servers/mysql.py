"""MySQL: Debian's, unpacked, with all libraries of its own, down to that of C."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pymysql

from servers.mariadb import MariaDB
from servers.reach import as_nobody
from servers.running import give_to_nobody
from servers.where import missing, packages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class MySQL(MariaDB):
    """A server of our own, with its log flushed at each commit."""

    scheme = "mysql"
    encrypts = True

    def prepare(self) -> None:
        """Copy the data folder that every server begins with."""
        home = _home()
        if not (home / "usr/sbin/mysqld").exists():
            missing("MySQL", "mysql-server-core")
        made = home / "made"  # the data that every server begins with: made once, and copied
        if not made.exists():
            _make(made)
        self.temporary.mkdir()
        shutil.copytree(made, self.data)
        give_to_nobody(self.folder)

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        return as_nobody(
            [
                *(*self.before, *_program(self.data)),
                *(f"--socket={self.socket}", f"--port={self.port}", "--bind-address=127.0.0.1"),
                *(f"--pid-file={self.folder}/pid", f"--tmpdir={self.temporary}"),
                *("--innodb-flush-log-at-trx-commit=1", "--max-connections=300"),
                *("--skip-name-resolve", "--secure-file-priv=NULL", "--mysqlx=OFF"),
                *("--innodb-buffer-pool-size=64M", "--performance-schema=OFF"),
                *("--disable-log-bin", *self.settings),
            ]
        )

    def environment(self) -> Mapping[str, str]:
        """Return nothing: its loader is told where its libraries are."""
        return {}

    def ready(self) -> bool:
        """Say whether it takes statements; have it know the password of who comes over loopback.

        Whom it has seen once, over an encrypted connection, it knows by a digest from then on.
        """
        if not super().ready():
            return False
        if self.encrypts:
            who = pymysql.Connection(
                host="127.0.0.1", port=self.port, user="post", password="secret", ssl={"ssl": True}
            )
            who.close()
        return True


def _home() -> Path:
    return packages() / "mysql"


def _program(data: Path) -> list[str]:
    home = _home()
    [loader] = home.glob("usr/lib/*-linux-gnu/ld-linux*.so.*")
    return [
        *(str(loader), "--library-path", str(loader.parent), f"{home}/usr/sbin/mysqld"),
        *("--no-defaults", f"--basedir={home}/usr", f"--lc-messages-dir={home}/usr/share/mysql"),
        *(f"--datadir={data}", "--innodb-redo-log-capacity=16M"),
    ]


def _make(made: Path) -> None:
    """Make the data of a new server; of processes that do so at once the first one wins."""
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        os.chmod(folder, 0o711)
        data = Path(folder) / "data"
        data.mkdir()
        give_to_nobody(data)
        words = [*_program(data), "--initialize-insecure", "--innodb-buffer-pool-size=64M"]
        subprocess.run(as_nobody(words), check=True, capture_output=True, cwd=data)
        (data / "auto.cnf").unlink()  # each is another server
        try:
            data.rename(made)
        except OSError:
            if not made.exists():
                raise
