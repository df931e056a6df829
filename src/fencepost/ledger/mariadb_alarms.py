"""Alarms in the database of a MariaDB ledger."""

from __future__ import annotations

from fencepost.ledger import mariadb_alarm_rows as sql
from fencepost.ledger.draft_alarms import DraftAlarms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.mariadb import MariaLedger
    from fencepost.world.api import World


class MariaAlarms(DraftAlarms):
    """Alarms in the rows of one MariaDB database."""

    def __init__(self, world: World, ledger: MariaLedger) -> None:
        super().__init__(world, ledger, sql)
