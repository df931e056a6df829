"""MariaDB: Debian's, unpacked, else what is installed."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pymysql

from servers.faketime import Steps
from servers.reach import as_nobody
from servers.running import Running, give_to_nobody
from servers.where import libraries, missing, on_path, packages, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class MariaDB(Running):
    """A server of our own, with its log flushed at each commit."""

    in_memory = True
    scheme = "mariadb"
    settings: Sequence[str] = ()
    before: Sequence[str] = ()  # words before its program: what it is run by

    def prepare(self) -> None:
        """Make the data folder."""
        self._server = unpacked("usr/sbin/mariadbd") or on_path("mariadbd")
        install = unpacked("usr/bin/mariadb-install-db") or on_path("mariadb-install-db")
        if self._server is None or install is None:
            missing("MariaDB", "mariadb-server-core")
        # Not the folder that all share: a server that starts removes what others have there.
        self.temporary.mkdir()
        give_to_nobody(self.folder)
        subprocess.run(
            as_nobody(
                [
                    *(str(install), "--no-defaults", *self._base(), f"--datadir={self.data}"),
                    *("--auth-root-authentication-method=normal", "--skip-test-db"),
                    *("--innodb-log-file-size=10M", f"--tmpdir={self.temporary}"),
                ]
            ),
            check=True,
            capture_output=True,
            cwd=self.folder,
            env={
                **libraries(),
                "PATH": f"{packages()}/usr/bin:{packages()}/usr/sbin:/usr/bin:/bin",
            },
        )

    @property
    def data(self) -> Path:
        """Where the data are."""
        return self.folder / "data"

    @property
    def temporary(self) -> Path:
        """Where it keeps tables for a moment."""
        return self.folder / "tmp"

    @property
    def socket(self) -> Path:
        """Where its administrator finds it."""
        return self.folder / "sock"

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        return as_nobody(
            [
                *(*self.before, str(self._server), "--no-defaults", *self._base()),
                *(f"--datadir={self.data}",),
                *(f"--socket={self.socket}", f"--port={self.port}", "--bind-address=127.0.0.1"),
                *(f"--pid-file={self.folder}/pid", "--innodb-log-file-size=10M"),
                *("--innodb-flush-log-at-trx-commit=1", "--max-connections=300"),
                *("--skip-name-resolve", f"--tmpdir={self.temporary}", *self.settings),
            ]
        )

    def environment(self) -> Mapping[str, str]:
        """Return where its libraries are."""
        return libraries()

    def ready(self) -> bool:
        """Say whether it takes statements; make the user that comes over loopback."""
        try:
            self.run("CREATE USER IF NOT EXISTS post@'127.0.0.1' IDENTIFIED BY 'secret'")
            self.run("GRANT ALL ON *.* TO post@'127.0.0.1' WITH GRANT OPTION")
        except (pymysql.OperationalError, OSError):
            return False
        return True

    def url(
        self, database: str = "test", *, port: int = 0, who: str = "post:secret", options: str = ""
    ) -> str:
        """Return where fencepost finds it, also behind another port, or as somebody else."""
        more = f"?{options}" if options else ""
        return f"{self.scheme}://{who}@127.0.0.1:{port or self.port}/{database}{more}"

    def run(self, statement: str, *, database: str | None = None) -> Sequence[tuple[object, ...]]:
        """Run a statement as its administrator."""
        db: Any = pymysql.Connection(
            user="root", database=database, autocommit=True, ssl_disabled=True, defer_connect=True
        )
        wire = socket.socket(socket.AF_UNIX)
        try:
            wire.connect(str(self.socket))  # the driver would leave one open that is refused
            db.connect(wire)
            with db.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            if db.open:
                db.close()
            wire.close()

    def database(self, name: str) -> str:
        """Make an empty database, unless it is there; return its URL."""
        self.run(f"CREATE DATABASE IF NOT EXISTS `{name}`")
        return self.url(name)

    def _base(self) -> list[str]:
        inside = self._server is not None and self._server.is_relative_to(packages())
        return [f"--basedir={packages()}/usr"] if inside else []


class MariaDBOutOfTime(MariaDB):
    """A server whose wall clock can be set while it runs; only where libfaketime is installed."""

    def prepare(self) -> None:
        """Make the data folder, and lay what fakes the time beside it."""
        self._clock = Steps(self.folder)
        super().prepare()
        self.before = self._clock.before

    def step(self, seconds: float) -> None:
        """Set the server's clock so many seconds apart from the machine's."""
        self._clock.step(seconds)
