"""Alarms in the database of a PostgreSQL ledger."""

from __future__ import annotations

from fencepost.ledger import postgres_alarm_rows as sql
from fencepost.ledger.draft_alarms import DraftAlarms

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.postgres import PostgresLedger
    from fencepost.world.api import World


class PostgresAlarms(DraftAlarms):
    """Alarms in the rows of one PostgreSQL database."""

    def __init__(self, world: World, ledger: PostgresLedger) -> None:
        super().__init__(world, ledger, sql)
