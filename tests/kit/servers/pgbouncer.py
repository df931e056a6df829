"""PgBouncer in transaction mode: Debian's, unpacked, else what is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from servers.reach import as_nobody
from servers.running import Running, give_to_nobody
from servers.where import libraries, missing, on_path, unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SETTINGS = """\
[databases]
* = host=127.0.0.1 port={server} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = 10
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
"""


class PgBouncer(Running):
    """A pooler in front of a PostgreSQL; say which with ``before`` ahead of ``begun``."""

    server_port = 0
    mode = "transaction"

    @classmethod
    def before(cls, server_port: int, *, mode: str = "transaction") -> type[PgBouncer]:
        """Return the pooler of one server."""
        return type("PgBouncer", (cls,), {"server_port": server_port, "mode": mode})

    def prepare(self) -> None:
        """Write its settings."""
        self._program = unpacked("usr/sbin/pgbouncer") or on_path("pgbouncer")
        if self._program is None:
            missing("PgBouncer", "pgbouncer")
        text = _SETTINGS.format(server=self.server_port, port=self.port, mode=self.mode)
        (self.folder / "settings.ini").write_text(text)
        give_to_nobody(self.folder)

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        return as_nobody([str(self._program), str(self.folder / "settings.ini")])

    def environment(self) -> Mapping[str, str]:
        """Return where its libraries are."""
        return libraries()

    def url(self, database: str = "postgres") -> str:
        """Return where fencepost finds the server behind it."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"
