"""What etcd, the wire or a client may do wrong, and what is then true."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import Fencepost
from fencepost.errors import (
    BadDuration,
    BadUrl,
    LeaseHeld,
    LeaseLost,
    Misuse,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnfit,
)
from fencepost.model.lease import Grant, Holder
from fencepost.model.symptom import Severity
from fencepost.stores.etcd import EtcdStore
from fencepost.stores.etcd_doctor import _of_member, revokes_early
from fencepost.stores.etcd_spares import Kept
from fencepost.stores.open import open_store
from fencepost.testing.checker import check
from fencepost.world.blocking import BlockingWorld
from fencepost.world.etcd import Effect
from fencepost.world.flow import finish
from holder import HolderProcess
from proxy import Proxy
from rivals import BadWire, recorded
from servers import Etcd, shared
from servers.etcd import TlsEtcd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.stores.api import LeaseStore

TTL = 30.0
SECRET = "hunter2-for-etcd"


def someone() -> Holder:
    return Holder(uuid.uuid4().hex, "a", 1)


@contextmanager
def opened(port: int, *, prefix: str = "", user: str = "") -> Iterator[EtcdStore]:
    url = f"etcd://{user}127.0.0.1:{port}/{prefix or uuid.uuid4().hex}"
    store = open_store(url, BlockingWorld(), namespace="default")
    assert isinstance(store, EtcdStore)
    try:
        yield store
    finally:
        finish(store.close())


def acquire(store: LeaseStore, holder: Holder, *, name: str = "x", ttl: float = TTL) -> Grant:
    return finish(store.acquire(name, holder=holder, ttl=ttl))


def renew(store: LeaseStore, holder: Holder, grant: Grant, *, ttl: float = TTL) -> Grant:
    return finish(store.renew("x", nonce=holder.nonce, token=grant.token, ttl=ttl))


def release(store: LeaseStore, holder: Holder, grant: Grant | None = None) -> None:
    finish(store.release("x", nonce=holder.nonce, token=grant.token if grant else None))


def warm(store: LeaseStore, *, ttl: float = TTL) -> None:
    """Let the store learn what it learns once."""
    holder = someone()
    release(store, holder, acquire(store, holder, ttl=ttl))


# Lost replies and lost requests.


def test_a_grant_whose_reply_is_lost_is_adopted_and_leaves_no_ghost() -> None:
    with Proxy(shared(Etcd).port) as proxy, opened(proxy.port) as store:
        warm(store)
        holder = someone()
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown):
            acquire(store, holder)
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.held
        grant = acquire(store, holder)
        assert (grant.token, grant.adopted) == (seen.token, True)
        release(store, holder, grant)
        acquire(store, someone())


def test_a_request_that_was_swallowed_granted_nothing() -> None:
    with Proxy(shared(Etcd).port) as proxy, opened(proxy.port) as store:
        warm(store, ttl=1.0)
        proxy.mode = "hole_up"
        with pytest.raises(OutcomeUnknown):
            acquire(store, someone(), ttl=1.0)
        proxy.mode = "pass"
        acquire(store, someone())


def test_a_half_open_connection_keeps_nobody_longer_than_the_timeout() -> None:
    with Proxy(shared(Etcd).port) as proxy, opened(proxy.port) as store:
        holder = someone()
        grant = acquire(store, holder, ttl=1.0)
        proxy.mode = "hole"
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown):
            renew(store, holder, grant, ttl=1.0)
        with pytest.raises(StoreUnavailable):  # it did not come to more than an etcd lease
            acquire(store, someone(), ttl=1.0)
        assert time.monotonic() - began < 3


def test_a_release_whose_reply_is_lost_is_done_and_may_be_repeated() -> None:
    with Proxy(shared(Etcd).port) as proxy, opened(proxy.port) as store:
        holder = someone()
        grant = acquire(store, holder)
        proxy.lose_replies()
        with pytest.raises(OutcomeUnknown):
            release(store, holder, grant)
        release(store, holder, grant)
        acquire(store, someone())


def test_a_server_that_is_not_there_did_nothing() -> None:
    with Proxy(shared(Etcd).port) as proxy:
        proxy.mode = "refuse"
        port = proxy.port
    with (
        opened(port, user=f"me:{SECRET}@") as store,
        pytest.raises(StoreUnavailable, match=f"etcd at 127.0.0.1:{port} cannot be reached") as no,
    ):
        acquire(store, someone())
    assert SECRET not in str(no.value)


def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    with Proxy(shared(Etcd).port) as proxy, opened(proxy.port) as store:
        holder = someone()
        grant = acquire(store, holder)
        proxy.reset()
        time.sleep(0.05)  # for the reset to travel
        renew(store, holder, grant)


# The server dies.


def test_a_hold_outlives_a_crash_of_the_server() -> None:
    with Etcd.own() as server, Fencepost(server.url()) as fp, Fencepost(server.url()) as other:
        lease = fp.lock("x", ttl="3s").acquire()
        server.restart()
        with pytest.raises(LeaseHeld):
            other.lock("x").acquire()
        lease.check()
        assert fp.lock("x").release(lease)
        with other.lock("x", wait="5s") as later:
            assert later.token > lease.token


def test_tokens_do_not_fall_if_etcd_is_set_back_to_an_older_copy() -> None:
    with Etcd.own() as server:
        with opened(server.port, prefix="p") as store:
            warm(store)
        server.kill()
        shutil.copytree(server.folder / "data", server.folder / "copy")
        server.start()
        with opened(server.port, prefix="p") as store:
            for _ in range(20):
                warm(store)
            last = acquire(store, someone())
            server.kill()
            shutil.rmtree(server.folder / "data")
            shutil.move(server.folder / "copy", server.folder / "data")
            server.start()
            assert acquire(store, someone()).token > last.token
        later = BlockingWorld()
        later.clocks.wall = lambda: time.time() + 61  # type: ignore[method-assign]
        store = open_store(f"{server.url()}/p", later, namespace="default")  # type: ignore[assignment]
        assert acquire(store, someone(), name="y").token > last.token
        finish(store.close())


def test_compaction_takes_nothing_away() -> None:
    with Etcd.own() as server, opened(server.port) as store:
        holder = someone()
        grant = acquire(store, holder)
        revision = store.door.ask("/kv/range", {"key": "eA=="}, effect=Effect.NONE)["header"]
        words = {"revision": revision["revision"], "physical": True}
        store.door.ask("/kv/compaction", words, effect=Effect.ONCE)
        renew(store, holder, grant)
        release(store, holder, grant)
        assert acquire(store, someone()).token > grant.token


# The client stops.


def test_a_holder_that_was_stopped_past_its_end_is_told_so() -> None:
    url = f"{shared(Etcd).url()}/{uuid.uuid4().hex}"
    with HolderProcess(url, "x", ttl="1s") as holder, Fencepost(url) as fp:
        assert holder.believes() == "held"
        holder.pause()
        with fp.lock("x", wait="20s") as lease:
            assert lease.token > holder.token
            holder.go_on()
            assert holder.believes().startswith("LeaseLost")


def test_a_killed_holder_keeps_its_lease_to_the_end_as_the_store_says() -> None:
    url = f"{shared(Etcd).url()}/{uuid.uuid4().hex}"
    with HolderProcess(url, "x", ttl="2s") as holder, Fencepost(url) as fp:
        holder.kill()
        killed = time.monotonic()
        with pytest.raises(LeaseHeld):
            fp.lock("x").acquire()
        assert not fp.locks()[0].alive
        with fp.lock("x", wait="20s") as lease:
            assert lease.token > holder.token
        assert time.monotonic() - killed < 4.5


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_uses_connections_of_its_own() -> None:
    with opened(shared(Etcd).port) as store:
        holder = someone()
        grant = acquire(store, holder)
        child = os.fork()
        if child == 0:
            try:
                store.forget()
                acquire(store, someone(), name="y")
                with pytest.raises(LeaseHeld):
                    acquire(store, someone())
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        renew(store, holder, grant)
        release(store, holder, grant)


# Renewals.


def test_a_keep_alive_of_a_deposed_leader_is_not_believed(monkeypatch: Any) -> None:
    with opened(shared(Etcd).port) as store:
        holder = someone()
        grant = acquire(store, holder)
        monkeypatch.setattr(store._spares, "keep_alive", lambda *_, **__: Kept(TTL, term=1))
        with pytest.raises(OutcomeUnknown, match="leader"):
            renew(store, holder, grant)


def test_a_lease_taken_from_under_a_store_is_lost_at_the_next_renewal() -> None:
    with opened(shared(Etcd).port) as store:
        holder = someone()
        grant = acquire(store, holder)
        lease = store._own[holder.nonce].spare.id
        store.door.ask("/lease/revoke", {"ID": lease}, effect=Effect.ONCE)
        with pytest.raises(LeaseLost, match="ran out"):
            renew(store, holder, grant)


def test_a_spare_that_ended_early_is_replaced() -> None:
    with opened(shared(Etcd).port) as store:
        warm(store)
        (spare,) = store._spares._idle
        store.door.ask("/lease/revoke", {"ID": spare.id}, effect=Effect.ONCE)
        grant = acquire(store, someone())
        assert grant.ttl == TTL


def test_a_spare_is_trusted_only_for_what_it_has_left() -> None:
    with opened(shared(Etcd).port) as store:
        warm(store)
        (spare,) = store._spares._idle
        store._spares._idle[:] = [spare._replace(confirmed=spare.confirmed - 2)]
        assert TTL - 2.2 < acquire(store, someone()).ttl <= TTL - 2


def test_an_old_spare_is_renewed_before_it_is_used() -> None:
    with opened(shared(Etcd).port) as store:
        warm(store)
        (spare,) = store._spares._idle
        store._spares._idle[:] = [spare._replace(confirmed=spare.confirmed - 10)]
        before = store.door.asked
        assert acquire(store, someone()).ttl == TTL
        assert store.door.asked - before == 2


# What it costs.


def test_acquire_release_and_renew_take_these_round_trips() -> None:
    with opened(shared(Etcd).port) as store:
        warm(store)
        costs = {}

        def counted(what: str, before: int) -> None:
            costs[what] = store.door.asked - before

        holder, before = someone(), store.door.asked
        grant = acquire(store, holder)
        counted("acquire", before)
        before = store.door.asked
        renew(store, holder, grant)
        counted("renew", before)
        before = store.door.asked
        with pytest.raises(LeaseHeld):
            acquire(store, someone(), ttl=TTL)
        counted("refused", before)
        before = store.door.asked
        release(store, holder, grant)
        counted("release", before)
        # A refusal by one that has no spare asks for an etcd lease first, once.
        assert costs == {"acquire": 1, "renew": 2, "refused": 3, "release": 1}


def test_whoever_is_refused_again_and_again_leaves_one_etcd_lease() -> None:
    with Etcd.own() as server, opened(server.port) as store, opened(server.port) as other:
        keys = acquire(store, someone())
        assert keys.token
        other.keys = store.keys
        for _ in range(20):
            with pytest.raises(LeaseHeld):
                acquire(other, someone())
        leases = store.door.ask("/lease/leases", {}, effect=Effect.NONE)["leases"]
        assert len(leases) == 2


def test_who_waits_is_woken_by_the_release_and_not_by_a_poll() -> None:
    url = f"{shared(Etcd).url()}/{uuid.uuid4().hex}"
    with Fencepost(url) as fp, Fencepost(url) as other:
        lease = fp.lock("x").acquire()
        got: list[float] = []

        def wait() -> None:
            with other.lock("x", wait="20s"):
                got.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)  # it has asked, was refused, and listens
        fp.lock("x").release(lease)
        released = time.monotonic()
        thread.join(20)
        assert got[0] - released < 1.0  # a nap is 2 s


# Tokens and durations.


def test_tokens_begin_at_the_wall_time_in_microseconds() -> None:
    with opened(shared(Etcd).port) as store:
        before = time.time() * 1e6
        token = acquire(store, someone()).token
        assert before - 1e6 < token < time.time() * 1e6 + 1e6
        assert token < 2**53


def test_a_base_that_is_raised_by_another_is_followed() -> None:
    prefix = uuid.uuid4().hex
    port = shared(Etcd).port
    with opened(port, prefix=prefix) as store:
        holder = someone()
        grant = acquire(store, holder)
        later = BlockingWorld()
        later.clocks.wall = lambda: time.time() + 3600  # type: ignore[method-assign]
        other = open_store(f"etcd://127.0.0.1:{port}/{prefix}", later, namespace="default")
        high = acquire(other, someone(), name="y")
        finish(other.close())
        assert high.token > grant.token + 3e9
        assert renew(store, holder, grant).token == grant.token
        release(store, holder, grant)
        assert acquire(store, someone()).token > high.token


def test_less_than_a_second_is_refused_and_fractions_are_kept_for_longer() -> None:
    with opened(shared(Etcd).port) as store:
        with pytest.raises(BadDuration):
            acquire(store, someone(), ttl=0.9)
        grant = acquire(store, someone(), ttl=1.5)
        assert grant.ttl == 1.5
        seen = finish(store.peek("x"))
        assert seen is not None
        assert seen.expires_in == 2


def test_rivals_on_a_bad_network_never_hold_it_at_once_and_tokens_grow() -> None:
    with Proxy(shared(Etcd).port) as proxy:
        url = f"etcd://127.0.0.1:{proxy.port}/{uuid.uuid4().hex}"
        history = recorded(url, BadWire(proxy, seed=11))
    assert sum(event.what == "granted" for event in history) >= 5, "they hardly got to it"
    assert check(history) == []


# Wrong addresses and wrong rights.


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("etcd://", "not an endpoint"),
        ("etcd://host:99999", "not an endpoint"),
        (f"etcd://me:{SECRET}@h:1?x=1", "unknown options x"),
        ("etcd://me@h", "user:password@"),
        ("etcds://h?ca=/nowhere.pem", "certificates"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_with_a_reason(url: str, sentence: str) -> None:
    with pytest.raises(BadUrl, match=sentence) as no:
        open_store(url, BlockingWorld(), namespace="default")
    assert SECRET not in str(no.value)


def test_something_that_is_not_etcd_is_called_so() -> None:
    with opened(shared(Etcd).peer_port) as store, pytest.raises(StoreUnfit, match="HTTP 404"):
        acquire(store, someone())


def test_wrong_passwords_and_missing_rights_are_told_in_one_sentence() -> None:
    with Etcd.own() as server:
        with opened(server.port) as admin:
            for path, body in (
                ("/auth/user/add", {"name": "root", "password": SECRET}),
                ("/auth/role/add", {"name": "root"}),
                ("/auth/user/grant", {"user": "root", "role": "root"}),
                ("/auth/user/add", {"name": "guest", "password": SECRET}),
                ("/auth/enable", {}),
            ):
                admin.door.ask(path, body, effect=Effect.ONCE)
        for user, sentence in (
            ("", "wants to know who asks"),
            ("root:wrong@", "refuses the password of user 'root'"),
            (f"guest:{SECRET}@", "does not let user 'guest' read and write"),
        ):
            with (
                opened(server.port, user=user) as store,
                pytest.raises(Misuse, match=sentence) as no,
            ):
                acquire(store, someone())
            assert SECRET not in str(no.value)
        with opened(server.port, user=f"root:{SECRET}@") as store:
            warm(store)
            codes = {symptom.code for symptom in finish(store.examine())}
            assert codes == {"etcd.members", "etcd.plain"}
        with opened(server.port, user=f"guest:{SECRET}@") as store:
            found = {symptom.code: symptom.severity for symptom in finish(store.examine())}
            assert found["etcd.rights"] is Severity.BREAKS


def test_a_full_etcd_says_what_to_do_and_the_doctor_sees_it() -> None:
    with Etcd.own() as server, opened(server.port) as store:
        status = store.door.ask("/maintenance/status", {}, effect=Effect.NONE)
        alarm = {"memberID": status["header"]["member_id"], "alarm": "NOSPACE"}
        store.door.ask("/maintenance/alarm", {"action": "ACTIVATE", **alarm}, effect=Effect.ONCE)
        with pytest.raises(StoreUnavailable, match="full and takes no writes"):
            acquire(store, someone())
        found = {symptom.code: symptom.severity for symptom in finish(store.examine())}
        assert found["etcd.alarm"] is Severity.BREAKS
        assert found["etcd.leases"] is Severity.BREAKS


def test_the_doctor_names_what_a_single_open_member_cannot_promise() -> None:
    with opened(shared(Etcd).port) as store:
        found = {symptom.code: symptom.severity for symptom in finish(store.examine())}
    assert found == {"etcd.members": Severity.RISK, "etcd.open": Severity.NOTE}


def test_over_tls_only_the_right_authority_is_believed(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is missing: no certificate can be made")
    for name in ("server", "stranger"):
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem"]
        kind = ["-newkey", "rsa:2048", "-nodes", "-days", "2"]
        words = [openssl, "req", "-x509", *kind, *subject, *files]
        subprocess.run(words, check=True, capture_output=True)
    with TlsEtcd.own_with(tmp_path / "server.pem", tmp_path / "server.key") as server:
        world, address = BlockingWorld(), f"etcds://127.0.0.1:{server.port}/p?ca={tmp_path}"
        store = open_store(f"{address}/server.pem", world, namespace="default")
        warm(store)
        finish(store.close())
        store = open_store(f"{address}/stranger.pem", world, namespace="default")
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            warm(store)
        finish(store.close())


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ({"version": "3.5.1", "leader": "1"}, "etcd.version"),
        ({"version": "3.5.3"}, "etcd.leader"),
        ({"version": "3.5.3", "leader": "1", "isLearner": True}, "etcd.learner"),
        ({"version": "3.5.3", "leader": "1", "dbSize": str(1 << 31)}, "etcd.size"),
    ],
)
def test_the_doctor_knows_a_bad_member(status: dict[str, Any], code: str) -> None:
    assert [symptom.code for symptom in _of_member(status)] == [code]


@pytest.mark.parametrize(
    ("version", "early"),
    [
        *(("3.3.27", True), ("3.4.30", True), ("3.4.31", False), ("3.4.42", False)),
        *(("3.5.0", True), ("3.5.12", True), ("3.5.13", False), ("3.5.13-rc.0", False)),
        *(("3.6.0", False), ("4.0.0", False), ("", False), ("unknown", False)),
    ],
)
def test_the_doctor_knows_who_ends_leases_early(version: str, *, early: bool) -> None:
    assert revokes_early(version) is early
