"""What the PostgreSQL store promises, costs and refuses, on the real server."""

from __future__ import annotations

import re
import threading
import time
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from postgres_kit import free, fresh, granted, pooler, somebody, store_at

from fencepost import Fencepost, LeaseHeld
from fencepost.cli.main import main
from fencepost.errors import BadUrl, Misuse, StoreUnavailable, StoreUnfit
from fencepost.model.symptom import Severity
from fencepost.world.flow import finish
from fencepost.world.postgres_session import Session, Statement
from servers import Postgres, shared
from servers.postgres import PostgresOutOfTime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.stores.postgres import PostgresStore

SECRET = "sesame-opens"


@pytest.fixture
def store() -> Iterator[PostgresStore]:
    store = store_at(shared(Postgres).url())
    yield store
    finish(store.close())


# What is wrong is said in a sentence, without secrets.


def refused(url: str, kind: type[Exception], match: str) -> None:
    store = store_at(url)
    with pytest.raises(kind, match=match) as caught:
        granted(store)
    assert SECRET not in repr(caught.value)
    finish(store.close())


def test_a_wrong_password_is_told() -> None:
    server = shared(Postgres)
    server.run("DO $$ BEGIN CREATE ROLE locked LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")
    server.run("ALTER ROLE locked PASSWORD 'right'")
    where = f"127.0.0.1:{server.port}"
    refused(
        f"postgresql://locked:{SECRET}@{where}/postgres", StoreUnfit, "does not let this user in"
    )


def test_an_unknown_database_is_told() -> None:
    url = shared(Postgres).url("nowhere").replace("postgres@", f"postgres:{SECRET}@")
    refused(url, StoreUnfit, "has no such database")


def test_an_unknown_user_is_told() -> None:
    url = shared(Postgres).url().replace("postgres@", f"nobody:{SECRET}@")
    refused(url, StoreUnfit, "knows no such user")


def test_a_server_that_is_not_there_is_told() -> None:
    refused(f"postgresql://a:{SECRET}@127.0.0.1:1/x", StoreUnavailable, "127.0.0.1:1/x cannot be")


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("?colour=red", "option 'colour'"),
        ("?advisory=maybe", "advisory='maybe'"),
        ("?schema=", "schema"),
    ],
)
def test_a_malformed_url_is_told(option: str, match: str) -> None:
    with pytest.raises(BadUrl, match=match) as caught:
        store_at(f"postgresql://a:{SECRET}@h/x{option}")
    assert SECRET not in repr(caught.value)


def test_a_malformed_escape_in_a_password_is_told_without_it() -> None:
    with pytest.raises(BadUrl, match="malformed %-escape") as caught:
        store_at(f"postgresql://a:%zz{SECRET}@h/x")
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("sign", "/?#[@,:%")
@pytest.mark.parametrize("first", ["12", "sesame"])
def test_of_a_password_that_is_not_escaped_nothing_is_shown(first: str, sign: str) -> None:
    url = f"postgresql://user:{first}{sign}xyzzy=plugh@127.0.0.1:1/x"
    with pytest.raises((BadUrl, StoreUnavailable)) as caught:
        granted(store_at(url))
    if sign in "/?@":
        assert caught.type is BadUrl
        assert "%-escaped" in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value))
    assert not re.search("sesame|xyzzy|plugh", shown)


def test_a_port_that_is_no_number_is_told() -> None:
    with pytest.raises(BadUrl, match="cannot be read"):
        store_at("postgresql://h/x?port=first")


def test_signs_that_are_escaped_may_be_part_of_a_name() -> None:
    assert store_at("postgresql://a%40b:c%2Fd@h:1,[::1]:2/x%40y").db.where == "h:1,::1:2/x@y"
    assert store_at("postgresql://h:1/x?user=a@b").db.where == "h:1/x"


def test_a_read_only_server_is_refused() -> None:
    server = shared(Postgres)
    role = fresh()
    server.run(f"CREATE ROLE {role} LOGIN")
    server.run(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    refused(server.url().replace("postgres@", f"{role}@"), StoreUnavailable, "is read-only")


def test_whoever_may_not_create_tables_is_told_and_may_use_those_that_are_there() -> None:
    server, role, schema = shared(Postgres), fresh(), fresh()
    server.run(f"CREATE ROLE {role} LOGIN")
    url = server.url().replace("postgres@", f"{role}@") + f"?schema={schema}"
    refused(url, Misuse, "fencepost migrate")
    assert main(["--url", f"{server.url()}?schema={schema}", "--quiet", "migrate"]) == 0
    refused(url, Misuse, "grant USAGE on the schema")
    server.run(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    server.run(f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA {schema} TO {role}")
    store = store_at(url)
    granted(store)
    finish(store.close())


def test_migrate_prints_what_an_operator_may_run_instead(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server, database = shared(Postgres), fresh()
    url = server.database(database) + "?schema=ours"
    assert main(["--url", url, "migrate", "--sql"]) == 0
    server.run(capsys.readouterr().out, database=database)
    role = fresh()
    server.run(f"CREATE ROLE {role} LOGIN")
    server.run(f"GRANT USAGE ON SCHEMA ours TO {role}", database=database)
    server.run(f"GRANT ALL ON ALL TABLES IN SCHEMA ours TO {role}", database=database)
    store = store_at(url.replace("postgres@", f"{role}@"))
    granted(store)
    finish(store.close())


def test_a_database_of_a_newer_version_is_refused() -> None:
    schema = fresh()
    url = f"{shared(Postgres).url()}?schema={schema}"
    store = store_at(url)
    granted(store)
    finish(store.close())
    shared(Postgres).run(f"UPDATE {schema}.fencepost_schema SET version = 99")
    refused(url, Misuse, "newer fencepost")


def test_tables_that_vanish_are_told() -> None:
    schema = fresh()
    store = store_at(f"{shared(Postgres).url()}?schema={schema}")
    granted(store)
    shared(Postgres).run(f"DROP TABLE {schema}.fencepost_lease")
    with pytest.raises(Misuse, match="run 'fencepost migrate'"):
        granted(store)
    finish(store.close())


def test_many_may_be_the_first_to_use_a_schema() -> None:
    url = f"{shared(Postgres).url()}?schema={fresh()}&advisory=off"
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def first() -> None:
        store = store_at(url, namespace="default")
        start.wait()
        try:
            granted(store, fresh())
        except BaseException as error:  # noqa: BLE001 -- told below
            failures.append(error)
        finish(store.close())

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_commits_wait_for_the_disk_whatever_the_default_is() -> None:
    server, role = shared(Postgres), fresh()
    server.run(f"CREATE ROLE {role} LOGIN SUPERUSER")
    server.run(f"ALTER ROLE {role} SET synchronous_commit = off")
    store = store_at(server.url().replace("postgres@", f"{role}@"))
    granted(store)
    shown = store.db.ask(Statement("SELECT current_setting('synchronous_commit')")).rows
    assert shown == [("on",)]
    finish(store.close())


def test_plans_by_key_are_never_compiled() -> None:
    server, role = shared(Postgres), fresh()
    server.run(f"CREATE ROLE {role} LOGIN SUPERUSER")
    server.run(f"ALTER ROLE {role} SET jit = on")
    store = store_at(server.url().replace("postgres@", f"{role}@"))
    granted(store)
    settings = "SELECT current_setting('enable_seqscan'), current_setting('jit')"
    assert store.db.ask(Statement(settings)).rows == [("off", "off")]
    finish(store.close())


# What an operation costs.


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is sent from now on: one item for each round trip."""
    sent: list[str] = []
    send, batch = Session.send, Session.batch

    def counting(self: Session, statement, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
        sent.append(statement.text.split()[0])
        return send(self, statement, *args, **kwargs)

    def counting_batch(self: Session, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN003, ANN202
        sent.append("batch")
        return batch(self, *args, **kwargs)

    monkeypatch.setattr(Session, "send", counting)
    monkeypatch.setattr(Session, "batch", counting_batch)
    return sent


@pytest.mark.parametrize("pooled", [False, True])
def test_each_verb_is_one_round_trip(counted: list[str], pooled: bool) -> None:  # noqa: FBT001
    store = store_at(pooler().url() if pooled else shared(Postgres).url())
    free(store, *granted(store))

    counted.clear()
    holder, grant = granted(store)
    assert len(counted) == 1, "a grant"
    counted.clear()
    with pytest.raises(LeaseHeld):
        granted(store)
    assert len(counted) == 1, "a refusal"
    for _ in range(2):
        counted.clear()
        finish(store.renew("job", nonce=holder.nonce, token=grant.token, ttl=30.0))
        assert len(counted) == 1, "a renewal"
    if not pooled:
        counted.clear()
        store.pulse_here.vouching.prove_at = 0.0
        finish(store.vouch())
        assert len(counted) == 1, "a proof"
    counted.clear()
    free(store, holder, grant)
    assert len(counted) == 1, "a release"
    counted.clear()
    finish(store.peek("job"))
    assert len(counted) == 1, "a look"
    finish(store.close())


def test_the_face_adds_no_round_trip(counted: list[str]) -> None:
    with Fencepost(shared(Postgres).url()) as fp:
        name = fresh()
        for _ in range(2):
            counted.clear()
            with fp.lock(name):
                pass
        assert len(counted) == 2


def test_a_keeper_asks_one_question_for_all_locks_at_most_five_times_a_second(
    counted: list[str],
) -> None:
    with (
        Fencepost(f"{shared(Postgres).url()}?application_name={fresh()}") as fp,
        ExitStack() as held,
    ):
        for _ in range(4):
            held.enter_context(fp.lock(fresh()))
        time.sleep(0.5)  # the keeper has opened its session
        counted.clear()
        began = time.monotonic()
        time.sleep(2.0)
        asked, seconds = len(counted), time.monotonic() - began
    assert 0 < asked <= 5 * seconds + 1


def test_who_takes_and_releases_a_lock_all_the_time_has_no_keeper_that_asks(
    counted: list[str],
) -> None:
    with Fencepost(f"{shared(Postgres).url()}?application_name={fresh()}") as fp:
        with fp.lock(name := fresh()):
            pass
        counted.clear()
        for _ in range(200):
            with fp.lock(name):
                time.sleep(0.002)
        assert len(counted) == 400


def test_who_is_refused_and_who_proves_its_pulse_writes_nothing() -> None:
    with Postgres.own() as server:
        server.run("ALTER SYSTEM SET autovacuum = off")
        server.run("SELECT pg_reload_conf()")
        store = store_at(server.url())
        store.pulse_here.heed(5.0, now=store.boottime())  # a busy machine does not ask for more
        granted(store)

        def ask() -> None:
            with pytest.raises(LeaseHeld):
                granted(store)
            store.pulse_here.vouching.prove_at = 0.0
            finish(store.vouch())

        ask()  # the first to read a row takes note in its page that it was committed
        server.run("CHECKPOINT")
        before = server.run("SELECT pg_current_wal_insert_lsn()")
        for _ in range(20):
            ask()
        assert server.run("SELECT pg_current_wal_insert_lsn()") == before
        finish(store.close())


def test_a_break_leaves_a_record(store: PostgresStore) -> None:
    _, grant = granted(store)
    fresh_token = finish(store.break_("job", token=grant.token, reason="it hangs", operator="ops"))
    rows = shared(Postgres).run(
        "SELECT name, token, new_token, holder, operator, reason FROM fencepost_break "
        f"WHERE namespace = '{store.namespace}'"
    )
    assert rows == [("job", grant.token, fresh_token, "a pid 1", "ops", "it hangs")]


def test_tokens_grow_though_a_row_was_deleted_by_hand(store: PostgresStore) -> None:
    _, grant = granted(store)
    shared(Postgres).run(f"DELETE FROM fencepost_lease WHERE namespace = '{store.namespace}'")
    _, later = granted(store)
    assert later.token > grant.token


# What it claims, and what it disclaims.


def test_behind_a_pooler_it_says_that_it_notices_no_deaths_and_has_no_line() -> None:
    store = store_at(pooler().url())
    holder, grant = granted(store)
    able = store.capabilities
    assert (able.notices_death, able.fair) == (False, False)
    assert finish(store.line("job")) is None
    view = finish(store.peek("job"))
    assert view is not None
    assert view.alive is None
    assert grant.ttl == 30.0
    free(store, holder, grant)
    finish(store.close())


def test_whoever_insists_on_a_pulse_is_refused_behind_a_pooler() -> None:
    refused(pooler().url() + "?advisory=on", Misuse, "there is a pooler in between")
    store = store_at(shared(Postgres).url() + "?advisory=on")
    assert granted(store)[1].token > 0
    finish(store.close())


def test_a_crashed_holder_without_a_pulse_is_followed_only_at_the_end_of_its_ttl() -> None:
    first = store_at(shared(Postgres).url() + "?advisory=off")
    granted(first, ttl=1.0)
    finish(first.close())
    second = store_at(shared(Postgres).url(), namespace=first.namespace)
    began = time.monotonic()
    while True:
        try:
            granted(second)
            break
        except LeaseHeld:
            time.sleep(0.01)
    assert 0.7 < time.monotonic() - began < 2.0
    finish(second.close())


# The line.


def waiting(name: str) -> int:
    """Return how many stand in the line for a lease of the default namespace."""
    from fencepost.stores.postgres_rows import line_key

    key = line_key("public", "default", name) & 0xFFFF_FFFF_FFFF_FFFF
    [(count,)] = shared(Postgres).run(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted "
        f"AND classid::bigint = {key >> 32} AND objid::bigint = {key & 0xFFFFFFFF}"
    )
    assert isinstance(count, int)
    return count


def test_those_who_wait_are_served_in_the_order_in_which_they_came() -> None:
    name, order = fresh(), list[int]()
    url = shared(Postgres).url()
    with ExitStack() as stack:
        faces = [stack.enter_context(Fencepost(url)) for _ in range(5)]

        def wait(number: int) -> None:
            with faces[number].lock(name, wait="30s"):
                order.append(number)

        with faces[0].lock(name, wait="5s"):
            threads = []
            for number in range(1, 5):
                thread = threading.Thread(target=wait, args=(number,))
                thread.start()
                threads.append(thread)
                while waiting(name) < number:
                    time.sleep(0.002)
        for thread in threads:
            thread.join()
    assert order == [1, 2, 3, 4]


def test_whoever_gives_up_leaves_the_line() -> None:
    name = fresh()
    with Fencepost(shared(Postgres).url()) as fp, fp.lock(name, wait="1s"):
        with Fencepost(shared(Postgres).url()) as other, pytest.raises(LeaseHeld):
            other.lock(name, wait="0.1s").acquire()
        assert waiting(name) == 0


def test_a_first_in_line_that_does_nothing_holds_nobody_up() -> None:
    """As if it was stopped just when the server called it."""
    store = store_at(shared(Postgres).url(), namespace="default")
    name = fresh()
    place = finish(store.line(name))
    assert place is not None
    assert finish(place.turn(5.0))
    began = time.monotonic()
    with Fencepost(shared(Postgres).url()) as fp, fp.lock(name, wait="20s"):
        assert time.monotonic() - began < 2.0
    finish(place.leave(served=False))
    finish(store.close())


def test_those_in_line_follow_a_holder_that_never_stood_in_it() -> None:
    name = fresh()
    with Fencepost(shared(Postgres).url()) as fp, Fencepost(shared(Postgres).url()) as other:
        lock = fp.lock(name)
        lease = lock.acquire()
        letting_go = threading.Timer(0.3, lock.release, [lease])
        letting_go.start()
        with other.lock(name, wait="20s") as later:
            assert later.token > lease.token
        letting_go.join()


def test_sessions_that_wait_are_used_again() -> None:
    name = fresh()
    with Postgres.own() as server, Fencepost(server.url()) as fp:
        for _ in range(20):
            with fp.lock(name, wait="1s"):
                pass
        [(count,)] = server.run(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'fencepost'"
        )
    assert isinstance(count, int)
    assert count <= 4


# The doctor.


def found(store: PostgresStore) -> dict[str, Severity]:
    return {symptom.code: symptom.severity for symptom in finish(store.examine())}


def test_the_doctor_finds_nothing_on_a_healthy_server(store: PostgresStore) -> None:
    assert found(store) == {}


def test_the_doctor_finds_the_pooler() -> None:
    store = store_at(pooler().url())
    assert found(store) == {"postgres.pooler": Severity.NOTE}
    finish(store.close())


class Careless(Postgres):
    settings = {  # noqa: RUF012 -- as its parent has it
        "fsync": "off",
        "synchronous_commit": "off",
        "idle_session_timeout": "60000",
        "max_connections": "13",
    }


def test_the_doctor_finds_what_a_careless_server_would_lose() -> None:
    with Careless.own() as server:
        role = fresh()
        server.run(f"CREATE ROLE {role} LOGIN")
        store = store_at(server.url())
        granted(store)
        assert found(store) == {
            "postgres.fsync": Severity.BREAKS,
            "postgres.synchronous_commit": Severity.RISK,
            "postgres.idle_session_timeout": Severity.NOTE,
            "postgres.connections": Severity.RISK,
        }
        server.run(f"GRANT SELECT ON fencepost_schema TO {role}")
        other = store_at(server.url().replace("postgres@", f"{role}@"))
        assert found(other)["postgres.privileges"] is Severity.BREAKS
        finish(other.close())
        finish(store.close())


@pytest.mark.parametrize("step", [60.0, -60.0])
def test_the_doctor_compares_clocks(step: float) -> None:
    with PostgresOutOfTime.own() as server:
        server.step(step)
        store = store_at(server.url())
        assert found(store) == {"postgres.clock": Severity.NOTE}
        finish(store.close())


def test_the_doctor_says_why_nothing_works() -> None:
    store = store_at("postgresql://127.0.0.1:1/x")
    assert found(store) == {"postgres.unusable": Severity.BREAKS}


def test_a_lost_reply_to_the_same_nonce_is_adopted_with_its_pulse(store: PostgresStore) -> None:
    holder = somebody()
    first = finish(store.acquire("job", holder=holder, ttl=30.0))
    again = finish(store.acquire("job", holder=holder, ttl=30.0))
    assert (again.token, again.adopted) == (first.token, True)
    assert again.lean is not None
    assert (again.ttl, again.lean) == (30.0, first.lean)
