"""On a server, too, a proof finds what contradicts the ledger's own rules."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from fencepost import Fencepost
from fencepost.cli.verify import gathered
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish
from marialab import opened_mariadb
from pglab import opened_postgres
from servers import MariaDB, Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.ledger.draft_ledger import DraftLedger

OPENED: dict[type[Postgres | MariaDB], Callable[[str], DraftLedger]] = {
    Postgres: opened_postgres,
    MariaDB: opened_mariadb,
}
OLDEST = "(SELECT slot FROM (SELECT min(slot) AS slot FROM fencepost_run) AS oldest)"
TAMPERINGS = [
    ("UPDATE fencepost_run SET origin = 'backfill'", "says that a backfill asked for it"),
    (f"UPDATE fencepost_job SET watermark = {OLDEST}", "is above that"),
    (
        "UPDATE fencepost_job SET spec = '{\"every\":86400}', watermark = watermark",
        "is no slot of",
    ),
    (
        f"UPDATE fencepost_run SET state = 'running', ended_at = 0 WHERE slot = {OLDEST}",
        "still runs, and",
    ),
    ("DELETE FROM fencepost_job", "and it is not on record"),
    ("UPDATE fencepost_job SET effective_from = watermark", "is before that"),
]


@pytest.mark.parametrize("kind", OPENED)
def test_each_tampering_is_named_on_a_server(kind: type[Postgres | MariaDB]) -> None:
    for number, (statement, says) in enumerate(TAMPERINGS):
        database = f"tampered_{number}"
        server = shared(kind)
        url = server.database(database)
        with Fencepost(url) as fp:
            fp.job("bills", every="1s")(lambda: None)
            end = time.monotonic() + 30
            while len(fp.runs("bills")) < 3 and time.monotonic() < end:
                fp.tick()
                time.sleep(0.05)
        ledger = OPENED[kind](url)
        assert prove(finish(gathered(ledger))).findings == ()
        for name in _triggers(server, database):
            server.run(name, database=database)
        server.run(statement, database=database)
        found = [finding.says for finding in prove(finish(gathered(ledger))).findings]
        assert any(says in one for one in found), (statement, found)
        finish(ledger.close())


def _triggers(server: Postgres | MariaDB, database: str) -> list[str]:
    """Return what puts the triggers out of the way that would refuse to be tampered with."""
    if isinstance(server, Postgres):
        return [f"ALTER TABLE fencepost_{table} DISABLE TRIGGER USER" for table in ("run", "job")]
    rows = server.run(
        f"SELECT trigger_name FROM information_schema.triggers WHERE trigger_schema = '{database}'",
        database=database,
    )
    return [f"DROP TRIGGER {name}" for (name,) in rows]
