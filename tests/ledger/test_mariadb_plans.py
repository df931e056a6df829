"""No statement of the MariaDB ledger walks over all that ever happened."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pymysql
import pytest

from fencepost.ledger import (
    mariadb_leases,
    mariadb_planner_rows,
    mariadb_retention_rows,
    mariadb_rows,
)
from fencepost.world.flow import finish
from fencepost.world.mariadb_batch import Statement, rendered
from marialab import QUICK, numbers, opened_mariadb
from servers import shared

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

MODULES = (mariadb_leases, mariadb_planner_rows, mariadb_retention_rows, mariadb_rows)
# What only an operator asks for, of everything there is.
ALL = {"FIND_ALL_EVENTS", "FIND_JOBS", "FIND_COUNTS"}
GROWN = {"run", "known", "lease", "event", "fencepost_run", "fencepost_job", "fencepost_lease"}
GROWN |= {"fencepost_event", "fencepost_span"}
_RUN = """
INSERT INTO fencepost_run (namespace, job, slot, `manual`, rerun, state, `lock`, lease, token,
    nonce, host, pid, version, reason, blocker, origin, created_at, started_at, ended_at,
    not_before, beat_at, cancel_at, starts, losses, releases, streak, strikes, solitary, saves,
    epoch)
SELECT 'default', {job}, {slot}, 0, 0, {state}, {job}, {job}, seq, '', '', 1, '', '', '',
       'schedule', seq, seq, {ended}, seq, seq, 0, 1, 0, 0, 0, 0, 0, 0, 0
  FROM {many}"""
HISTORY = (
    _RUN.format(
        job="CONCAT('job', seq % 500)",
        slot="seq",
        state="'pending'",
        ended="0",
        many=numbers(20_000),
    ),
    "UPDATE fencepost_run SET state = 'cancelled', ended_at = slot",
    _RUN.format(
        job="CONCAT('job', seq)",
        slot="1000000 + seq",
        state="IF(seq % 2, 'running', 'pending')",
        ended="0",
        many=numbers(400),
    ),
    f"""
INSERT INTO fencepost_job (namespace, job, definition, quarantined, paused, spec, rules, template,
    retired, next_due, watermark)
SELECT 'default', CONCAT('job', seq), '{{}}', '', '', '', '', '', '', 1e9 + seq, seq
  FROM {numbers(5_000)}""",
    f"""
INSERT INTO fencepost_lease (namespace, digest, name, token, nonce, held, expires_us, ttl_us, beat,
    since_us, host, pid, version, ended)
SELECT 'default', SHA2(seq, 256), seq, 1, '', 1, 1, 1, 0, 1, '', 1, '', ''
  FROM {numbers(5_000)}""",
    f"""
INSERT INTO fencepost_event (namespace, job, slot, `manual`, rerun, `at`, what, token, holder,
    detail)
SELECT 'default', CONCAT('job', seq % 500), seq, 0, 0, 1, 'seen', 1, '', ''
  FROM {numbers(10_000)}""",
)
# What keeps an answer on the server cannot be explained.
INTO = re.compile(r"INTO (@fencepost_\w+[, ]*)+")
TABLES = ("run", "job", "lease", "event")


def statements(module: ModuleType) -> Iterator[tuple[str, Statement]]:
    for name, found in vars(module).items():
        several = found.values() if isinstance(found, dict) else found
        for each in several if type(found) in (dict, tuple) else (found,):
            if isinstance(each, Statement):
                yield name, each


@pytest.fixture(scope="module", params=QUICK)
def db(request: pytest.FixtureRequest) -> Iterator[pymysql.Connection[Any]]:
    server = shared(QUICK[request.param])
    ledger = opened_mariadb(server.database("plans"))
    finish(ledger.jobs())
    finish(ledger.close())
    with pymysql.connect(
        unix_socket=str(server.socket), user="root", database="plans", autocommit=True
    ) as db:
        asked(db, "SET @fencepost_now = 1000000001, @fencepost_ours = 1, @fencepost_at = 1")
        asked(db, "SET @fencepost_was = '' /*!80032 , explain_format = 'TRADITIONAL' */")
        for statement in HISTORY:
            asked(db, statement)
        asked(db, f"ANALYZE TABLE {', '.join(f'fencepost_{name}' for name in TABLES)}")
        yield db


def asked(db: pymysql.Connection[Any], text: str) -> Any:
    with db.cursor(pymysql.cursors.DictCursor) as cursor:
        cursor.execute(text)
        return cursor.fetchall()


def values_for(statement: Statement) -> dict[str, Any]:
    """Return a value for every name in a statement."""
    texts = [text for part in statement.parts for text in (part.text, *part.inner)]
    row: dict[str, Any] = dict.fromkeys(re.findall(r"%\(\[?#?(\w+)\]?\)s", " ".join(texts)), 1)
    names = ("job", "lock", "lease", "nonce", "key", "scope", "item", "place", "shelf", "state")
    row.update(dict.fromkeys(names, "job1"), namespace="default", only=None)
    lists = [*("jobs", "locks", "names", "places", "items", "pruned_jobs", "states", "errors")]
    lists += ["shelves", "scopes", "of_jobs", "span_jobs"]
    texts_of = {name: ["job1", "job2"] for name in lists}
    numbers = {name: [10, 20] for name in ("marks", "values", "pruned_slots", "firsts")}
    numbers |= {name: [10, 20] for name in ("of_slots", "of_manuals")}
    keys = [("job1", 1, 0, 0), ("job2", 2, 0, 0)]
    return {**row, **texts_of, **numbers, "keys": keys, "rows": [row]}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_statement_walks_over_a_whole_table(
    db: pymysql.Connection[Any], module: ModuleType
) -> None:
    walks = []
    looked = 0
    for name, statement in statements(module):
        for text in rendered(db, statement, values_for(statement)):
            if text.lstrip(" \n(").startswith("SET"):
                continue
            looked += 1
            plan = asked(db, f"EXPLAIN {INTO.sub('', text)}")
            tables = [
                row["table"]
                for row in plan
                if row["type"] in ("ALL", "index") and row["select_type"] != "INSERT"
            ]
            if GROWN & set(tables) and name not in ALL:
                walks.append((name, plan))
    assert looked > 4
    assert walks == []
