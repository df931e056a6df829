"""What the object store asks of a server, and what it makes of every answer."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from objects_lab import KEY, SECRET, TTL, holder, lease, opened, ready, take
from objects_stub import StubS3

from fencepost.errors import (
    BadDuration,
    LeaseHeld,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnfit,
)
from fencepost.flows.acquire import acquire
from fencepost.stores import objects
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

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


# Conditions that are not kept.


def test_a_store_that_ignores_conditions_is_refused_before_it_grants_anything() -> None:
    with StubS3(honest=False) as server:
        store = opened(server)
        for _ in range(2):  # again as well: nothing is remembered in its favour
            with pytest.raises(StoreUnfit, match=r"ignores conditions on writes .*created twice"):
                take(store)
        assert KEY not in server.objects


@pytest.mark.parametrize(
    ("key", "says"),
    [("probe.json", "created twice"), ("probe-", r"did not exist was replaced")],
)
def test_a_store_that_ignores_some_conditions_is_refused(
    server: StubS3, key: str, says: str
) -> None:
    server.forgets_conditions_on = lambda asked, _body: asked.startswith(key)
    with pytest.raises(StoreUnfit, match=says):
        take(opened(server))


def test_a_store_that_ignores_etags_only_is_refused(server: StubS3) -> None:
    take(opened(server))
    objects._proven.clear()
    server.forgets_conditions_on = lambda key, _body: server.asked.count(f"PUT {key}") % 2 == 0
    with pytest.raises(StoreUnfit, match="its etag did not match"):
        take(opened(server))


def test_a_store_that_lets_two_create_at_once_is_refused(server: StubS3) -> None:
    def racy(key: str, _body: bytes) -> bool:
        return key.startswith("probe-") and server.asked.count(f"PUT {key}") > 1

    server.forgets_conditions_on = racy
    with pytest.raises(StoreUnfit, match=r"3 of 3 created the same object at once"):
        take(opened(server))


def test_a_bucket_is_probed_once_by_a_process_and_then_costs_two_requests(server: StubS3) -> None:
    take(opened(server), "a")
    assert server.count("PUT probe") == 7
    server.asked.clear()
    take(opened(server), "b")
    assert server.count("PUT probe") == 0
    objects._proven.clear()  # as in another process
    take(opened(server), "c")
    assert [asked for asked in server.asked if "probe" in asked] == ["PUT probe.json"] * 2


def test_who_only_looks_writes_nothing(server: StubS3) -> None:
    store = opened(server)
    assert finish(store.peek("job")) is None
    assert finish(store.views()) == []
    assert server.objects == {}


def test_a_probe_without_an_outcome_is_no_unknown_grant(server: StubS3) -> None:
    server.fail("PUT", status=500, carried_out=True)
    with pytest.raises(StoreUnavailable):
        take(opened(server))
    take(opened(server))


# What it costs.


def test_each_verb_has_its_price(server: StubS3) -> None:
    store = ready(server)

    def price(flow: Any) -> str:
        server.asked.clear()
        finish(flow)
        return " ".join(asked.split()[0] for asked in server.asked)

    token = take(store)
    assert price(store.renew("job", nonce="n1", token=token, ttl=TTL)) == "PUT"
    assert price(store.release("job", nonce="n1", token=token)) == "PUT"
    assert price(store.acquire("job", holder=holder("n2"), ttl=TTL)) == "GET PUT"
    assert price(store.acquire("new", holder=holder(), ttl=TTL)) == "GET PUT"
    assert price(store.peek("job")) == "GET"
    assert price(store.views()) == "GET GET GET"  # the list, and what we wrote but did not read
    assert price(store.views()) == "GET"


def test_a_first_lease_asks_for_the_time_once(server: StubS3) -> None:
    store = ready(server)
    fresh = opened(server)
    take(fresh)
    assert [asked.split()[0] for asked in server.asked] == ["GET", "PUT", "HEAD", "PUT"]
    finish(store.close())


def test_a_keeper_with_a_store_of_its_own_reads_once(server: StubS3) -> None:
    store, keeper = ready(server), opened(server)
    token = take(store)
    server.asked.clear()
    for _ in range(3):
        finish(keeper.renew("job", nonce="n1", token=token, ttl=TTL))
    assert [asked.split()[0] for asked in server.asked] == ["GET", "PUT", "PUT", "PUT"]
    server.asked.clear()
    finish(store.release("job", nonce="n1", token=token))  # it knows an older etag
    assert [asked.split()[0] for asked in server.asked] == ["PUT", "GET", "PUT"]


def test_who_waits_looks_at_most_some_times_a_second(server: StubS3) -> None:
    store = ready(server)
    take(store)
    server.asked.clear()
    with pytest.raises(LeaseHeld):
        finish(
            acquire(
                BlockingWorld(),
                store,
                ["job"],
                holder=holder("n2"),
                ttl=TTL,
                wait=1.5,
                abandon=lambda *_: None,
            )
        )
    assert 3 <= len(server.asked) <= 12
    assert server.count("PUT") == 0


def test_nobody_stands_in_line_and_nobody_claims_to(server: StubS3) -> None:
    store = ready(server)
    assert not store.capabilities.fair
    first, second = finish(store.line("job")), finish(store.line("job"))
    assert finish(first.first())
    assert finish(second.first())
    assert server.asked == []


def test_a_death_is_not_noticed_and_nobody_claims_it_is(server: StubS3) -> None:
    assert not opened(server).capabilities.notices_death
    take(ready(server))  # by a process of which nothing is left but this
    seen = finish(opened(server).peek("job"))
    assert seen is not None
    assert (seen.held, seen.alive) == (True, None)


# Answers in doubt.


@pytest.mark.parametrize("carried_out", [True, False])
@pytest.mark.parametrize("status", [408, 500, 502, 503, 0])
def test_a_grant_in_doubt_is_asked_for_again_and_adopted(
    server: StubS3, status: int, *, carried_out: bool
) -> None:
    store = ready(server)
    server.fail("PUT", status=status, carried_out=carried_out)
    with pytest.raises(OutcomeUnknown):
        take(store)
    assert server.count("PUT") == 1, "the client must not try again by itself"
    before = lease(server)["token"] if carried_out else None
    granted = finish(store.acquire("job", holder=holder(), ttl=TTL))
    assert granted.adopted is carried_out
    assert before in (None, granted.token)
    with pytest.raises(LeaseHeld):
        take(store, nonce="n2")


def test_the_flow_sees_a_grant_in_doubt_through(server: StubS3) -> None:
    store, abandoned = ready(server), list[object]()
    server.fail("PUT", status=500, carried_out=True)
    server.fail("PUT", status=0, carried_out=True)
    granted = finish(
        acquire(
            BlockingWorld(),
            store,
            ["job"],
            holder=holder(),
            ttl=TTL,
            wait=0.0,
            abandon=lambda *ghost: abandoned.append(ghost),
        )
    )
    assert granted.grant.adopted
    assert (lease(server)["nonce"], lease(server)["beat"]) == ("n1", 3)
    assert abandoned == []


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_renewal_in_doubt_is_no_loss(server: StubS3, *, carried_out: bool) -> None:
    store = ready(server)
    token = take(store)
    server.fail("PUT", status=500, carried_out=carried_out)
    with pytest.raises(OutcomeUnknown):
        finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
    finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
    assert lease(server)["token"] == token


@pytest.mark.parametrize("carried_out", [True, False])
def test_a_release_in_doubt_is_done_again(server: StubS3, *, carried_out: bool) -> None:
    store = ready(server)
    token = take(store)
    server.fail("PUT", status=500, carried_out=carried_out)
    with pytest.raises(OutcomeUnknown):
        finish(store.release("job", nonce="n1", token=token))
    finish(store.release("job", nonce="n1", token=token))
    assert not lease(server)["held"]


def test_a_conflict_is_tried_again_and_is_not_taken_for_a_no(server: StubS3) -> None:
    store = ready(server)
    for _ in range(3):
        server.fail("PUT", status=409, code="ConditionalRequestConflict")
    token = take(store)
    for _ in range(2):
        server.fail("PUT", status=409, code="ConditionalRequestConflict")
    finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
    server.fail("PUT", status=409, code="ConditionalRequestConflict")
    finish(store.release("job", nonce="n1", token=token))
    assert take(store, nonce="n2") > token


def test_a_412_to_our_own_write_is_recognised(server: StubS3) -> None:
    """Something between us and the server sent it twice: the first was carried out."""
    store = ready(server)
    server.fail("PUT", status=412, code="PreconditionFailed", carried_out=True)
    granted = finish(store.acquire("job", holder=holder(), ttl=TTL))
    assert granted.adopted
    assert lease(server)["token"] == granted.token


def test_endless_conflicts_come_to_an_end(server: StubS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_MOST_RACES", 4)
    store = ready(server)
    for _ in range(4):
        server.fail("PUT", status=409, code="ConditionalRequestConflict")
    with pytest.raises(StoreUnavailable, match="changed hands too often"):
        take(store)


def test_a_throttled_write_did_not_happen(server: StubS3) -> None:
    store = ready(server)
    for status, code in ((503, "SlowDown"), (429, "TooManyRequests"), (503, "ServerBusy")):
        server.fail("PUT", status=status, code=code)
        with pytest.raises(StoreUnavailable, match="asks for fewer requests"):
            take(store)


def test_a_read_that_fails_changed_nothing(server: StubS3) -> None:
    store = ready(server)
    for status in (500, 0):
        server.fail("GET", status=status)
        with pytest.raises(StoreUnavailable, match="did not read an object"):
            take(store)
        server.fail("GET", status=status)
        with pytest.raises(StoreUnavailable, match="did not list"):
            finish(store.views())


def test_silence_ends_with_the_timeout(server: StubS3) -> None:
    store = ready(server, options="&timeout=300ms")
    server.fail("PUT", delay=1.0, carried_out=True)
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown, match="no answer came in time"):
        take(store)
    assert time.monotonic() - began < 0.9
    assert finish(store.acquire("job", holder=holder(), ttl=TTL)).adopted


# What people get wrong.

_ECHO = f"<Error><Code>InvalidToken</Code><Token-0>{SECRET}</Token-0></Error>"


@pytest.mark.parametrize(
    ("how", "error", "sentence"),
    [
        ({"status": 403, "code": "AccessDenied"}, StoreUnfit, "may not write objects"),
        ({"status": 403, "code": "SignatureDoesNotMatch"}, StoreUnfit, "were refused"),
        ({"status": 403, "code": "RequestTimeTooSkewed"}, StoreUnfit, "set the time"),
        ({"status": 401, "code": "Unauthorized"}, StoreUnfit, "check AWS_ACCESS_KEY_ID"),
        ({"status": 400, "body": _ECHO}, StoreUnfit, "were refused (InvalidToken)"),
        ({"status": 404, "code": "NoSuchBucket"}, StoreUnfit, "does not exist: create the bucket"),
        ({"status": 301, "code": "PermanentRedirect"}, StoreUnfit, "say which with region"),
        ({"status": 501, "code": "NotImplemented"}, StoreUnfit, "does not know conditional writes"),
        (
            {"status": 405, "code": "MethodNotAllowed"},
            StoreUnfit,
            "refused to write an object (405",
        ),
    ],
)
def test_what_is_set_up_wrongly_is_one_sentence(
    server: StubS3, how: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    server.fail("PUT", **how)
    with pytest.raises(error) as caught:
        take(opened(server))
    said = str(caught.value)
    assert sentence in said
    assert "s3://bucket at 127.0.0.1:" in said
    assert "\n" not in said
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert caught.value.__cause__ is not None
    assert server.objects == {}


def test_a_missing_bucket_is_named_by_every_verb(server: StubS3) -> None:
    store = ready(server)
    token = take(store)
    server.missing_bucket = True
    for flow in (
        store.acquire("job", holder=holder("n2"), ttl=TTL),
        store.renew("job", nonce="n1", token=token, ttl=TTL),
        store.release("job", nonce="n1"),
        store.peek("job"),
        store.views(),
    ):
        with pytest.raises(StoreUnfit, match="does not exist: create the bucket first"):
            finish(flow)


def test_a_server_that_nobody_runs_cannot_be_reached() -> None:
    with StubS3() as gone:
        url = gone.url()
    store = open_store(url, BlockingWorld(), namespace="default")
    for flow in (store.peek("job"), store.acquire("job", holder=holder(), ttl=TTL)):
        with pytest.raises(StoreUnavailable, match=r"s3://bucket at 127.0.0.1:\d+ cannot be re"):
            finish(flow)


def test_no_credentials_is_a_sentence_that_names_the_variables(
    server: StubS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # Where instances of a cloud ask for them. Somebody answers there, or nobody does.
    for place, error in ((server.endpoint, StoreUnfit), ("http://127.0.0.1:9", StoreUnavailable)):
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"{place}/169.254.169.254")
        with pytest.raises(error, match=r"no credentials for s3://bucket .*AWS_ACCESS_KEY_ID"):
            finish(opened(server).peek("job"))


def test_an_object_of_somebody_else_is_not_overwritten(server: StubS3) -> None:
    store = ready(server)
    server.put(KEY, b"my holiday photos")
    with pytest.raises(StoreUnfit, match="is not a lease: somebody else writes there"):
        take(store)
    assert server.objects[KEY].body == b"my holiday photos"


def test_a_short_ttl_is_refused_unless_the_url_allows_it(server: StubS3) -> None:
    url = server.url().replace("&shortest_ttl=0.2", "")
    store = open_store(url, BlockingWorld(), namespace="default")
    assert store.capabilities.shortest_ttl == 15.0
    with pytest.raises(BadDuration, match=r"less than the 15 s"):
        finish(store.acquire("job", holder=holder(), ttl=5.0))
    token = finish(store.acquire("job", holder=holder(), ttl=15.0)).token
    finish(store.renew("job", nonce="n1", token=token, ttl=1.0))  # the rest of a max_hold
