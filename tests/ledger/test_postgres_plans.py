"""No statement of the PostgreSQL ledger walks over all that ever happened."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import psycopg
import pytest

from fencepost.ledger import (
    postgres_alarm_rows,
    postgres_joined_rows,
    postgres_leases,
    postgres_life,
    postgres_planner_rows,
    postgres_retention_rows,
    postgres_rows,
    postgres_usual,
)
from fencepost.world.flow import finish
from fencepost.world.postgres import Statement
from pglab import QuickPostgres, opened_postgres
from servers import shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

MODULES = (
    postgres_alarm_rows,
    postgres_joined_rows,
    postgres_leases,
    postgres_life,
    postgres_planner_rows,
    postgres_retention_rows,
    postgres_rows,
    postgres_usual,
)
# What only an operator asks for, of everything there is; and what a set clock makes necessary.
ALL = {"FIND_ALL_EVENTS", "FIND_JOBS", "SET_BACK"}
HISTORY = """
INSERT INTO fencepost_run
SELECT 'default', 'job' || i % 500, i, 0, 0, 'succeeded', 'job' || i % 500, 'job' || i % 500, i, '',
       '', 1, '', '', '', 'schedule', i, i, i, 0, i, 0, 1, 0, 0, 0, 0, FALSE, NULL, NULL, NULL,
       NULL, NULL, 0, 0
  FROM generate_series(1, 50000) AS i;
INSERT INTO fencepost_run
SELECT 'default', 'job' || i, 1000000 + i, 0, 0,
       CASE WHEN i % 2 = 0 THEN 'running' ELSE 'pending' END, 'job' || i, 'job' || i, i, '', '',
       1, '', '', '', 'schedule', i, i, 0, i, i, 0, 1, 0, 0, 0, 0, FALSE, NULL, NULL, NULL, NULL,
       NULL, 0, 0
  FROM generate_series(1, 400) AS i;
INSERT INTO fencepost_job (namespace, job, next_due, watermark)
SELECT 'default', 'job' || i, 1e9 + i, i FROM generate_series(1, 10000) AS i;
INSERT INTO fencepost_lease (key, namespace, name, token, nonce, held, expires_us, ttl_us, since_us)
SELECT sha256(i::text::bytea), 'default', 'job' || i, i, '', TRUE, i, i, i
  FROM generate_series(1, 10000) AS i;
INSERT INTO fencepost_event
       (namespace, job, slot, manual, rerun, at, what, token, holder, detail)
SELECT 'default', 'job' || i % 500, i, 0, 0, i, 'seen', 0, '', ''
  FROM generate_series(1, 20000) AS i;
INSERT INTO fencepost_span
SELECT 'default', 'job' || i % 500, i, i, 'skipped', 'paused', '', i
  FROM generate_series(1, 10000) AS i
"""


def statements(module: ModuleType) -> Iterator[tuple[str, Statement]]:
    for name, found in vars(module).items():
        several = found.values() if isinstance(found, dict) else found
        for each in several if isinstance(found, dict | tuple) else (found,):
            if isinstance(each, Statement) and each.prepared:
                yield name, each


@pytest.fixture(scope="module")
def db() -> Iterator[psycopg.Connection]:
    url = shared(QuickPostgres).database("plans")
    ledger = opened_postgres(url)
    finish(ledger.jobs())
    finish(ledger.leases.views())
    finish(ledger.close())
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as db:
        db.execute("SET session_replication_role = replica")  # history is made up, not lived
        for statement in HISTORY.split(";"):
            db.execute(statement.encode())
        db.execute("VACUUM ANALYZE")
        db.execute("SET plan_cache_mode = force_generic_plan")
        db.execute("SET fencepost.now = 1000000001")  # which a tick sets for its transaction
        yield db


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_statement_walks_over_a_whole_table(db: psycopg.Connection, module: ModuleType) -> None:
    walks = []
    for name, statement in statements(module):
        text = statement.text.replace("{schema}", "public")
        nothing = ", ".join(["NULL"] * len(statement.names))
        db.execute(f"PREPARE asked AS {text}".encode())
        plan = db.execute(f"EXPLAIN EXECUTE asked {nothing and f'({nothing})'}".encode()).fetchall()
        db.execute("DEALLOCATE asked")
        tables = re.findall(r"Seq Scan on (fencepost_\w+)", "\n".join(row[0] for row in plan))
        grown = {"fencepost_run", "fencepost_job", "fencepost_lease", "fencepost_event"}
        if grown & set(tables) and name not in ALL:
            walks.append((name, tables))
    assert walks == []
