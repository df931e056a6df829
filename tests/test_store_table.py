"""The table in docs/stores.md is what the stores declare; run as a program, this renews it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fencepost.errors import MissingExtra
from fencepost.model.duration import shown
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.stores.api import Capabilities

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "stores.md"
BEGIN, END = "<!-- what the stores declare -->\n", "<!-- end -->\n"

# One of each kind. Nothing is connected: what a store declares is what its kind can promise.
STORES = {
    "[SQLite](#sqlite)": "sqlite:///{folder}/x.db",
    "[PostgreSQL](stores/postgres.md)": "postgresql://user@127.0.0.1:1/x",
    "[MariaDB, MySQL](stores/mariadb.md)": "mariadb://user@127.0.0.1:1/x",
    "[Redis, Valkey](stores/redis.md)": "redis://127.0.0.1:1",
    "[etcd](stores/etcd.md)": "etcd://127.0.0.1:1",
    "[ZooKeeper](stores/zookeeper.md)": "zookeeper://127.0.0.1:1",
    "[S3](stores/objects.md)": "s3://bucket/prefix?region=eu-central-1",
    "[memory](#memory)": "memory://table",
}
HEADINGS = (
    *("store", "URL", "shared by processes", "whose clock", "survives restarts", "failover-safe"),
    *("notices deaths", "waiters in order", "ttl from"),
)


def row(title: str, url: str, can: Capabilities) -> tuple[str, ...]:
    word = {True: "yes", False: "no"}
    return (
        title,
        f"`{url.partition('://')[0]}://`",
        word[can.shared],
        "the store's" if can.keeps_time else "whoever waits watches",
        word[can.durable],
        word[can.failover_safe],
        word[can.notices_death],
        word[can.fair],
        shown(can.shortest_ttl),
    )


def rows() -> list[tuple[str, ...]]:
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for title, url in STORES.items():
            try:
                store = open_store(url.format(folder=folder), BlockingWorld(), namespace="default")
            except MissingExtra:
                continue  # not in this installation
            made.append(row(title, url, store.capabilities))
    return made


def table() -> str:
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def printed() -> str:
    _, _, rest = PAGE.read_text().partition(BEGIN)
    return rest.partition(END)[0]


def test_the_page_shows_what_the_stores_declare() -> None:
    assert printed() == table(), "run: python tests/test_store_table.py"


def test_every_kind_of_store_is_in_the_table() -> None:
    assert [cells[0] for cells in rows()] == list(STORES)


def test_every_page_that_the_table_names_is_there() -> None:
    for title in STORES:
        link = title.partition("(")[2].rstrip(")")
        if link.startswith("#"):
            assert f"## {link[1:]}".lower() in PAGE.read_text().lower()
        else:
            assert (DOCS / link).is_file(), link


def renew() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    renew()
    sys.stdout.write(table())
