"""Lost replies, swallowed requests, holes, crashes and clocks that step: on the real server."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import psycopg
import pytest
from postgres_kit import free, fresh, granted, somebody, store_at

from fencepost import Fencepost, FencepostError, LeaseHeld, LeaseLost, OutcomeUnknown
from fencepost.errors import StoreUnavailable
from fencepost.testing.checker import check
from fencepost.testing.history import Event
from fencepost.world.flow import finish
from proxy import Proxy
from servers import Postgres, shared
from servers.postgres import PostgresOutOfTime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.stores.postgres import PostgresStore

OPTIONS = ["?advisory=auto", "?advisory=off"]


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy(shared(Postgres).port) as proxy:
        yield proxy


def through(proxy: Proxy, option: str = "") -> str:
    server = shared(Postgres)
    return server.url().replace(str(server.port), str(proxy.port)) + option


@pytest.fixture
def store(proxy: Proxy) -> Iterator[PostgresStore]:
    store = store_at(through(proxy, "?advisory=off"))
    for _ in range(2):  # until everything is prepared
        free(store, *granted(store, "before"), "before")
    holder, grant = granted(store, "before")
    finish(store.renew("before", nonce=holder.nonce, token=grant.token, ttl=30.0))
    yield store
    proxy.mode = "pass"
    finish(store.close())


# Replies and requests.


@pytest.mark.parametrize("option", OPTIONS)
def test_a_grant_whose_reply_was_cut_is_adopted(proxy: Proxy, option: str) -> None:
    with Fencepost(through(proxy, option)) as fp:
        name = fresh()
        for _ in range(2):  # until everything is prepared
            with fp.lock(name):
                pass
        proxy.lose_replies()
        with fp.lock(name) as lease:
            assert lease.token > 0
        with fp.lock(name) as again:
            assert again.token > lease.token


def test_a_cut_reply_says_that_nobody_knows_and_asking_again_tells(
    store: PostgresStore, proxy: Proxy
) -> None:
    holder = somebody()
    proxy.lose_replies()
    with pytest.raises(OutcomeUnknown):
        finish(store.acquire("job", holder=holder, ttl=30.0))
    assert finish(store.acquire("job", holder=holder, ttl=30.0)).adopted


def test_a_renewal_whose_reply_was_cut_has_happened(store: PostgresStore, proxy: Proxy) -> None:
    holder, grant = granted(store, ttl=1.0)
    proxy.lose_replies()
    with pytest.raises(OutcomeUnknown):
        finish(store.renew("job", nonce=holder.nonce, token=grant.token, ttl=30.0))
    view = finish(store.peek("job"))
    assert view is not None
    assert view.expires_in > 20


def test_a_release_whose_reply_was_cut_can_be_repeated(store: PostgresStore, proxy: Proxy) -> None:
    holder, grant = granted(store)
    proxy.lose_replies()
    with pytest.raises(OutcomeUnknown):
        free(store, holder, grant)
    free(store, holder, grant)
    granted(store)


def test_a_session_that_ended_while_idle_is_replaced_before_anything_is_sent(
    store: PostgresStore, proxy: Proxy
) -> None:
    holder, grant = granted(store)
    proxy.reset()
    while not all(session.is_stale() for session in store.db.idle):
        time.sleep(0.001)  # until the news is here
    free(store, holder, grant)


@pytest.mark.parametrize("mode", ["hole", "hole_up", "hole_down"])
def test_a_hole_ends_in_time_and_says_that_nobody_knows(
    store: PostgresStore, proxy: Proxy, mode: str
) -> None:
    holder, grant = granted(store, ttl=6.0)
    proxy.mode = mode
    for most in (1.0, 0.5):  # once in doubt, no try takes longer than a holder can afford
        began = time.monotonic()
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            finish(store.renew("job", nonce=holder.nonce, token=grant.token, ttl=6.0))
        assert time.monotonic() - began < most + 0.3
    proxy.mode = "pass"
    proxy.reset()
    again = finish(store.renew("job", nonce=holder.nonce, token=grant.token, ttl=6.0))
    assert again.token == grant.token


def test_whoever_was_never_reached_is_known_not_to_have_been_asked(proxy: Proxy) -> None:
    proxy.mode = "refuse"
    store = store_at(through(proxy))
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        granted(store)
    proxy.mode = "pass"
    granted(store)
    finish(store.close())


def test_an_acquire_that_nobody_waits_for_any_more_leaves_no_ghost(proxy: Proxy) -> None:
    """Its request arrives and its reply does not; then its caller gives up."""
    url, name = through(proxy, "?advisory=off"), fresh()
    with Fencepost(url) as fp, Fencepost(shared(Postgres).url()) as other:
        for _ in range(2):  # until everything is prepared
            with fp.lock(name):
                pass
        proxy.mode = "hole_down"
        giving_up = threading.Thread(target=_ask_in_vain, args=(fp, name))
        giving_up.start()
        giving_up.join()
        proxy.mode = "pass"
        proxy.reset()
        with other.lock(name, wait="10s"):
            pass


def _ask_in_vain(fp: Fencepost, name: str) -> None:
    with pytest.raises(OutcomeUnknown):
        fp.lock(name, ttl="0.3s").acquire()


# Crashes.


@pytest.mark.parametrize("option", OPTIONS)
def test_leases_and_tokens_survive_a_crash_of_the_server(option: str) -> None:
    with Postgres.own() as server:
        store = store_at(server.url() + option)
        holder, grant = granted(store, ttl=30.0)
        server.restart()
        with pytest.raises(LeaseHeld):
            granted(store)
        again = finish(store.renew("job", nonce=holder.nonce, token=grant.token, ttl=30.0))
        assert again.token == grant.token
        free(store, holder, grant)
        _, later = granted(store)
        assert later.token > grant.token
        finish(store.close())


def test_a_lease_is_kept_through_a_crash_of_the_server_that_is_shorter_than_its_ttl() -> None:
    with (
        Postgres.own() as server,
        Fencepost(server.url() + "?advisory=off") as fp,
        fp.lock("job", ttl="4s") as lease,
    ):
        time.sleep(1.3)  # until about the first renewal
        server.restart()
        time.sleep(4.0)
        lease.check()


def test_a_fork_leaves_the_parents_sessions_alone() -> None:
    with Fencepost(shared(Postgres).url()) as fp:
        name = fresh()
        with fp.lock(name) as lease:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    with pytest.raises(LeaseHeld):
                        fp.lock(name).acquire()
                    with fp.lock(name + " of the child"):
                        code = 0
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            lease.check()
        with fp.lock(name):
            pass


# Clocks.


def test_tokens_grow_though_the_server_is_set_back_by_an_hour() -> None:
    with PostgresOutOfTime.own() as server:
        store = store_at(server.url())
        tokens = []
        for step in (0, -3600, 1800, -7200):
            server.step(step)
            holder, grant = granted(store)
            tokens.append(grant.token)
            free(store, holder, grant)
        assert tokens == sorted(set(tokens))
        finish(store.close())


# Fail-over.


def test_a_standby_is_refused_and_what_follows_its_promotion_is_as_declared() -> None:
    with Postgres.own() as primary, ExitStack() as stack:
        store = store_at(primary.url())
        holder, grant = granted(store, ttl=60.0)
        standby = primary.standby()
        stack.callback(standby.end)
        with pytest.raises(StoreUnavailable, match="is read-only"):
            granted(store_at(standby.url()))
        codes = {symptom.code for symptom in finish(store.examine())}
        assert codes == {"postgres.asynchronous_standby"}
        finish(store.close())

        both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
        store = store_at(both, namespace=store.namespace)
        assert finish(store.peek("job")) is not None, "the one that can write is found"
        primary.kill()
        standby.promote()
        # The lock that vouched for its holder is gone, and says nothing here about a death.
        with pytest.raises(LeaseHeld):
            granted(store)
        again = finish(store.renew("job", nonce=holder.nonce, token=grant.token, ttl=60.0))
        assert again.token == grant.token
        free(store, holder, grant)
        assert granted(store)[1].token > grant.token
        finish(store.close())


# All at once.

_RECORD = """
CREATE TABLE seen (id bigserial, at double precision, name text, nonce text, token bigint,
                   held boolean, until double precision);
CREATE FUNCTION remember() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
INSERT INTO seen (at, name, nonce, token, held, until)
VALUES (date_part('epoch', clock_timestamp()), NEW.name, NEW.nonce, NEW.token, NEW.held,
        NEW.expires_us / 1e6);
RETURN NULL; END $$;
CREATE TRIGGER remember AFTER INSERT OR UPDATE ON fencepost_lease
   FOR EACH ROW EXECUTE FUNCTION remember()"""


def test_a_history_of_cut_connections_breaks_no_promise() -> None:
    """What the server granted is recorded by a trigger; what holders believed, by themselves."""
    server = shared(Postgres)
    database = server.database(fresh())
    setting_up = store_at(database, namespace="default")
    finish(setting_up.views())
    acts: list[Event] = []
    with psycopg.connect(database, autocommit=True) as db, Proxy(server.port) as proxy:
        db.execute(_RECORD)
        url = database.replace(str(server.port), str(proxy.port)) + "?advisory=off"
        end = time.monotonic() + 6.0
        with ExitStack() as stack:
            faces = [stack.enter_context(Fencepost(url)) for _ in range(4)]
            threads = [threading.Thread(target=_work, args=(fp, end, acts)) for fp in faces]
            for thread in threads:
                thread.start()
            dice = random.Random(7)
            while time.monotonic() < end:
                time.sleep(dice.uniform(0.05, 0.3))
                dice.choice([proxy.reset, proxy.lose_replies])()
                proxy.mode = "pass" if dice.random() < 0.7 else proxy.mode
            proxy.mode = "pass"
            for thread in threads:
                thread.join()
        rows = db.execute(
            "SELECT at, name, nonce, token, held, until FROM seen ORDER BY id"
        ).fetchall()
    finish(setting_up.close())
    history = list(acts)
    owner: dict[str, tuple[str, int]] = {}
    for at, name, nonce, token, held, until in rows:
        if not held:
            history.append(Event(at, "released", name=name, holder=nonce))
            continue
        what = "renewed" if owner.get(name) == (nonce, token) else "granted"
        owner[name] = (nonce, token)
        history.append(Event(at, what, name=name, holder=nonce, token=token, until=until))
    assert check(history) == []
    assert sum(event.what == "granted" for event in history) > 10
    assert len(acts) > 20


def _work(fp: Fencepost, end: float, acts: list[Event]) -> None:
    while time.monotonic() < end:
        with suppress(FencepostError), fp.lock("shared", ttl="0.6s", wait="0.5s") as lease:
            until = time.monotonic() + random.uniform(0.0, 0.3)
            while time.monotonic() < until:
                at = time.time()
                lease.check()
                nonce = lease.hold.nonce
                acts.append(Event(at, "acted", name="shared", holder=nonce, token=lease.token))
                time.sleep(0.01)


def test_a_lapsed_lease_cannot_be_renewed_though_nobody_came() -> None:
    store = store_at(shared(Postgres).url())
    holder, grant = granted(store, ttl=0.3)
    time.sleep(0.4)
    with pytest.raises(LeaseLost, match="ran out"):
        finish(store.renew("job", nonce=holder.nonce, token=grant.token, ttl=30.0))
    finish(store.close())
