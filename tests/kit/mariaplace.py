"""A database of its own for a test, on MariaDB and on MySQL: what is true of both."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from servers import MariaDB, MySQL, shared

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = {"mariadb": MariaDB, "mysql": MySQL}


class LoggedMariaDB(MariaDB):
    """A server that writes a binary log as well, and flushes it at each commit."""

    settings = ("--log-bin=log", "--server-id=1", "--sync-binlog=1")


class LoggedMySQL(MySQL):
    """The same of the other one, which does so unless it is told not to."""

    settings = LoggedMariaDB.settings


LOGGED = {"mariadb": LoggedMariaDB, "mysql": LoggedMySQL}


class Place(NamedTuple):
    """A database of one of the servers; as text it is its name."""

    server: MariaDB
    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def port(self) -> int:
        """Where its server listens."""
        return self.server.port

    def url(self, *, port: int = 0, who: str = "post:secret", options: str = "") -> str:
        """Return where fencepost finds it."""
        return self.server.url(self.name, port=port, who=who, options=options)

    def run(self, statement: str) -> Sequence[tuple[object, ...]]:
        """Run a statement in it, as the administrator of its server."""
        return self.server.run(statement, database=self.name)


def emptied(kind: str, title: str) -> Place:
    """Return an empty database whose name says no more than for which test it is."""
    place = Place(shared(KINDS[kind]), "t" + hashlib.sha256(title.encode()).hexdigest()[:16])
    place.server.run(f"DROP DATABASE IF EXISTS `{place}`")
    place.server.database(place.name)
    return place
