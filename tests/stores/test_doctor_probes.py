"""Whatever the doctor does to see whether there is room leaves nothing, however often it looks."""

from __future__ import annotations

import secrets

import pytest

from fencepost.model.symptom import Severity
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from servers import MariaDB, MySQL, Postgres, shared

_MEBIBYTE = 2**20


def fresh() -> str:
    return f"p{secrets.token_hex(6)}"


def found(url: str) -> dict[str, Severity]:
    store = open_store(url, BlockingWorld(), namespace="default")
    finish(store.views())  # so that its tables are there
    examine = getattr(store, "examine")  # noqa: B009 -- not every kind of store has it
    seen = {symptom.code: symptom.severity for symptom in finish(examine())}
    finish(store.close())
    return seen


def test_postgres_keeps_neither_a_table_nor_its_room() -> None:
    server, name = shared(Postgres), fresh()
    url = server.database(name)

    def relations() -> list[tuple[object, ...]]:
        return list(server.run("SELECT relname FROM pg_class ORDER BY 1", database=name))

    def size() -> int:
        [(size,)] = server.run(f"SELECT pg_database_size('{name}')")
        assert isinstance(size, int)
        return size

    found(url)
    before, small = relations(), size()
    for _ in range(4):
        assert found(url) == {}
    assert relations() == before
    assert size() < small + _MEBIBYTE  # four probes of that size have been


def test_a_user_who_may_not_try_is_told_so() -> None:
    server, name = shared(Postgres), fresh()
    url = server.database(name)
    found(url)
    server.run(f"CREATE ROLE {name} LOGIN", database=name)
    server.run(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}", database=name)
    server.run(f"REVOKE TEMPORARY ON DATABASE {name} FROM PUBLIC", database=name)
    theirs = url.replace("postgres@", f"{name}@")
    assert found(theirs) == {"postgres.untried": Severity.NOTE}


@pytest.mark.parametrize("kind", [MariaDB, MySQL])
def test_mariadb_and_mysql_are_not_written_to(kind: type[MariaDB]) -> None:
    server, name = shared(kind), fresh()
    url = server.database(name)
    found(url)
    file = server.data / name / "fencepost_lease.ibd"
    before = file.stat().st_size
    assert found(url) == {}
    assert file.stat().st_size == before
    assert server.run("SELECT * FROM fencepost_lease", database=name) == []
