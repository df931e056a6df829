"""How leases in a bucket end, what their tokens are, and who may use them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

import obstore.store
import pytest
from objects_lab import KEY, SECRET, TTL, lease, opened, ready, take
from objects_stub import StubS3

from fencepost import AsyncFencepost, Fencepost
from fencepost.errors import (
    LeaseHeld,
    LeaseLost,
    Misuse,
    TokenStale,
)
from fencepost.model.symptom import Severity
from fencepost.stores import objects
from fencepost.stores.objects import ObjectStore, open_az, open_gs, open_s3
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.objects import Bucket

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setattr(objects, "_proven", set())


@pytest.fixture
def server() -> Iterator[StubS3]:
    with StubS3() as stub:
        yield stub


# The end of a lease.


def aged(server: StubS3, *, by: float, written_by: float | None = None) -> None:
    """Make the lease look as if it had been written so long ago, by stamp and by its writer."""
    body = lease(server)
    body["written_at"] -= by if written_by is None else written_by
    kept = server.put(KEY, json.dumps(body).encode())
    server.objects[KEY] = kept._replace(modified=kept.modified - by)


def test_a_process_that_has_never_seen_it_frees_what_the_stamps_say_is_over(
    server: StubS3,
) -> None:
    token = take(ready(server))
    aged(server, by=60.0)
    seen = finish(opened(server).peek("job"))
    assert seen is not None
    assert not seen.held
    assert take(opened(server), nonce="n2") > token


def test_without_reason_nobody_asks_for_the_time(server: StubS3) -> None:
    store = ready(server)
    take(store)
    aged(server, by=20.0)
    server.asked.clear()
    with pytest.raises(LeaseHeld):
        take(store, nonce="n2")
    assert server.asked == [f"GET {KEY}"]


def test_a_holder_whose_clock_was_wrong_is_watched_for_a_whole_ttl(server: StubS3) -> None:
    take(ready(server))
    aged(server, by=600.0, written_by=0.0)
    clocks = SettableClocks()
    store = opened(server, clocks=clocks)
    with pytest.raises(LeaseHeld):
        take(store, nonce="n2")
    clocks.advance(TTL * 1.011)
    take(store, nonce="n2")


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_server_or_a_reader_with_a_wrong_clock_frees_nothing(server: StubS3, step: float) -> None:
    take(ready(server))
    aged(server, by=60.0)
    server.skew = step
    with pytest.raises(LeaseHeld):
        take(opened(server), nonce="n2")
    server.skew = 0.0
    clocks = SettableClocks()
    clocks.step_wall(step)
    with pytest.raises(LeaseHeld):
        take(opened(server, clocks=clocks), nonce="n2")


def test_who_may_only_read_can_still_watch(server: StubS3) -> None:
    take(ready(server))
    aged(server, by=60.0)
    server.fail("PUT", status=403, code="AccessDenied")
    seen = finish(opened(server).peek("job"))
    assert seen is not None
    assert seen.held, "it was seen for the first time"


def test_the_store_keeps_no_time_and_says_so(server: StubS3) -> None:
    """A stranger with a clock of its own cannot tell: it has to watch."""
    assert not opened(server).capabilities.keeps_time
    clocks = SettableClocks()
    take(ready(server), ttl=5.0)
    clocks.advance(3600.0)  # for it, and not for the server
    store = opened(server, clocks=clocks)
    with pytest.raises(LeaseHeld) as caught:
        take(store, nonce="n2")
    assert 0 < caught.value.expires_in <= 5.0
    clocks.advance(5.1)
    take(store, nonce="n2")


def test_a_holder_that_renews_is_never_taken_for_gone(server: StubS3) -> None:
    clocks = SettableClocks()
    store, watcher = ready(server), opened(server, clocks=clocks)
    token = take(store)
    for _ in range(5):
        finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
        with pytest.raises(LeaseHeld):
            take(watcher, nonce="n2")
        clocks.advance(TTL * 0.9)


def test_a_takeover_that_meets_a_late_renewal_is_refused(
    server: StubS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watcher has decided; then the holder's renewal arrives, and its own write does not."""
    clocks = SettableClocks()
    store, watcher = ready(server), opened(server, clocks=clocks)
    token = take(store)
    with pytest.raises(LeaseHeld):
        take(watcher, nonce="n2")
    clocks.advance(TTL * 2)
    write, renewed = watcher._bucket.replace, list[bool]()

    def late(*args: Any) -> Any:
        if not renewed:
            renewed.append(True)
            finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
        return write(*args)

    monkeypatch.setattr(watcher._bucket, "replace", late)
    with pytest.raises(LeaseHeld):
        take(watcher, nonce="n2")
    assert (lease(server)["nonce"], renewed) == ("n1", [True])


# Tokens and the record.


def test_tokens_follow_the_clock_of_the_server_and_not_ours(server: StubS3) -> None:
    clocks = SettableClocks()
    clocks.step_wall(-10 * 365 * 86_400.0)
    token = take(opened(server, clocks=clocks))
    assert abs(token / 1e6 - time.time()) < 5.0


def test_a_token_does_not_fall_when_the_object_was_deleted(server: StubS3) -> None:
    token = take(ready(server))
    del server.objects[KEY]
    server.skew = 1.5  # that much later: stamps are whole seconds
    assert take(opened(server), nonce="n2") > token


def test_a_holder_whose_object_was_deleted_has_lost_it(server: StubS3) -> None:
    store = ready(server)
    token = take(store)
    del server.objects[KEY]
    with pytest.raises(LeaseLost, match="its record is gone"):
        finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
    assert KEY not in server.objects, "a renewal must not bring it back"


def test_a_token_far_ahead_of_all_clocks_still_grows(server: StubS3) -> None:
    store = ready(server)
    take(store)
    body = lease(server) | {"token": 2**52, "held": False, "nonce": "old"}
    server.put(KEY, json.dumps(body).encode())
    assert take(store) == 2**52 + 1


def test_a_break_is_recorded_in_the_object(server: StubS3) -> None:
    store = ready(server)
    token = take(store)
    server.fail("PUT", status=409, code="ConditionalRequestConflict")
    fresh = finish(store.break_("job", token=token, reason="it hangs", operator="ops"))
    with pytest.raises(TokenStale):
        finish(store.break_("job", token=token, reason="again", operator="ops"))
    take(store, nonce="n2")
    audit = lease(server)["breaks"]
    assert [(one["token"], one["new_token"], one["operator"]) for one in audit] == [
        (token, fresh, "ops")
    ]
    assert audit[0]["reason"] == "it hangs"


def test_no_two_contents_of_an_object_are_equal(server: StubS3) -> None:
    store, tags = ready(server), list[str]()
    for nonce in ("n1", "n2"):
        token = take(store, nonce=nonce)
        tags.append(server.objects[KEY].e_tag)
        for _ in range(3):
            finish(store.renew("job", nonce=nonce, token=token, ttl=TTL))
            tags.append(server.objects[KEY].e_tag)
        finish(store.release("job", nonce=nonce, token=token))
        tags.append(server.objects[KEY].e_tag)
    assert len(set(tags)) == len(tags)


def test_objects_beside_the_leases_are_not_listed(server: StubS3) -> None:
    store = ready(server)
    server.put("leases.default2/x.json", b"another namespace")
    server.put("leases.default/notes.txt", b"somebody's notes")
    assert [view.name for view in finish(store.views())] == ["warm"]


# The doctor.


def codes(store: ObjectStore) -> list[tuple[str, Severity]]:
    return [(symptom.code, symptom.severity) for symptom in finish(store.examine())]


def test_the_doctor_finds_nothing_where_nothing_is_wrong(server: StubS3) -> None:
    assert codes(opened(server)) == []


def test_the_doctor_finds_ignored_conditions_although_the_bucket_was_sound_before(
    server: StubS3,
) -> None:
    store = ready(server)
    server.forgets_conditions_on = lambda _key, _body: True
    assert codes(store) == [("objects.conditions", Severity.BREAKS)]


def test_the_doctor_finds_credentials_that_may_not_write(server: StubS3) -> None:
    server.fail("PUT", status=403, code="AccessDenied")
    assert codes(opened(server)) == [("objects.access", Severity.BREAKS)]


def test_the_doctor_finds_clocks_that_differ_and_old_versions() -> None:
    with StubS3(versioned=True) as server:
        server.skew = 90.0
        found = finish(opened(server).examine())
    assert [symptom.code for symptom in found] == ["objects.clock", "objects.versions"]
    assert re.search(r"differ by (89|90) s", found[0].what)


# Other clouds, other faces, other processes.


def test_what_is_promised_depends_on_whose_server_it_is(
    server: StubS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = BlockingWorld()
    assert open_s3(world, "b?region=x", namespace="default").capabilities.failover_safe
    assert not opened(server).capabilities.failover_safe
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert not open_s3(world, "b?region=x", namespace="default").capabilities.failover_safe


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_other_clouds_are_asked_under_their_own_conditions(
    kind: str, server: StubS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the stub: it shows which conditions are sent, and not what a cloud makes of them."""
    options = f"bucket?endpoint={server.endpoint}&allow_http=true&shortest_ttl=1"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aHVudGVyMi1zZWNyZXQ=")
    account = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    opener = {"gs": open_gs, "az": open_az}[kind]
    store = opener(BlockingWorld(), options, namespace="default")
    token = take(store)
    with pytest.raises(LeaseHeld):
        take(store, nonce="n2")
    finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
    finish(store.release("job", nonce="n1", token=token))
    assert take(store, nonce="n2") > token


def test_a_lock_in_a_bucket_works_through_the_face(server: StubS3) -> None:
    with Fencepost(server.url()) as fp:
        with fp.lock("job", ttl=TTL) as held:
            held.check()
            assert [view.name for view in fp.locks()] == ["job"]
            with pytest.raises(LeaseHeld), fp.lock("job", ttl=TTL):
                raise AssertionError("two at once")
        assert fp.locks() == []


def test_the_asyncio_face_too(server: StubS3) -> None:
    async def hold() -> None:
        async with AsyncFencepost(server.url()) as fp, fp.lock("job", ttl=TTL) as held:
            held.check()

    asyncio.run(hold())
    assert not lease(server)["held"]


def test_jobs_need_a_ledger_that_a_bucket_is_not(server: StubS3) -> None:
    with Fencepost(server.url()) as fp, pytest.raises(Misuse, match="keeps leases only"):
        fp.job("billing")(lambda: None)


def in_a_child(store: ObjectStore) -> str:
    """Fork, ask for a lease there, and return what came of it."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            take(store, "other")
            said = "granted"
        except BaseException as error:  # noqa: BLE001 -- told to the parent
            said = f"{type(error).__name__}: {error}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    said = os.read(readable, 10_000).decode()
    os.close(readable)
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_is_told_instead_of_left_waiting(server: StubS3) -> None:
    assert in_a_child(ready(server)).startswith("Misuse: s3://bucket at 127.0.0.1:")
    assert "start processes with 'spawn'" in in_a_child(opened(server))


def test_a_bucket_in_memory_is_no_connection() -> None:
    bucket = Bucket(obstore.store.MemoryStore(), kind="s3", where="memory", alone=True)
    store = ObjectStore(BlockingWorld(), bucket, shortest_ttl=1.0)
    assert in_a_child(store) == "granted"
