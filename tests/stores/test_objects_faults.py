"""Leases on a real S3 server through lost replies, holes, kills and stops."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import Fencepost
from fencepost.errors import (
    FencepostError,
    LeaseHeld,
    LeaseLost,
    OutcomeUnknown,
    StoreUnavailable,
)
from fencepost.flows.acquire import acquire
from fencepost.flows.keep import Hold, renew
from fencepost.flows.release import release
from fencepost.model.lease import Holder, Phase
from fencepost.stores.objects import ObjectStore
from fencepost.stores.open import open_store
from fencepost.testing.checker import check
from fencepost.testing.history import Event, table
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from proxy import Proxy
from servers import Seaweed, shared
from servers.objects import KEY, SECRET

if TYPE_CHECKING:
    from collections.abc import Iterator

TTL = 30.0


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def server() -> Seaweed:
    seaweed = shared(Seaweed)
    seaweed.bucket("faults")
    return seaweed


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[Proxy]:
    with Proxy(server.port) as between:
        yield between


def opened(server: Seaweed, proxy: Proxy | None = None, *, timeout: str = "10s") -> ObjectStore:
    """Open a namespace that is the test's own."""
    name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].partition(" ")[0]
    url = server.url("faults", port=proxy.port if proxy else None).replace(
        "timeout=30", f"timeout={timeout}"
    )
    namespace = "".join(filter(str.isalnum, name))[:90]
    store = open_store(url, BlockingWorld(), namespace=namespace)
    assert isinstance(store, ObjectStore)
    return store


def holder(nonce: str = "n1") -> Holder:
    return Holder(nonce, "host", 1)


def take(store: ObjectStore, *, nonce: str = "n1", ttl: float = TTL) -> int:
    return finish(store.acquire("job", holder=holder(nonce), ttl=ttl)).token


def arm(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, verb: str, trouble: Any) -> None:
    """Have the trouble begin when the next write is about to be sent."""
    write = getattr(store._bucket, verb)

    def troubled(*args: object) -> object:
        monkeypatch.setattr(store._bucket, verb, write)
        trouble()
        return write(*args)

    monkeypatch.setattr(store._bucket, verb, troubled)


def test_a_grant_whose_reply_was_cut_is_adopted(
    server: Seaweed, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server, proxy)
    finish(store.release("job", nonce="n0", token=take(store, nonce="n0")))
    arm(monkeypatch, store, "replace", proxy.lose_replies)
    with pytest.raises(OutcomeUnknown):
        take(store)
    seen = finish(opened(server).peek("job"))
    assert seen is not None
    assert (seen.held, seen.holder.nonce) == (True, "n1")
    granted = finish(store.acquire("job", holder=holder(), ttl=TTL))
    assert (granted.adopted, granted.token) == (True, seen.token)


def test_a_cut_reply_leaves_no_ghost_behind_the_flows(
    server: Seaweed, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, world, abandoned = opened(server, proxy), BlockingWorld(), list[object]()
    take(store, nonce="n0", ttl=1.0)
    finish(store.release("job", nonce="n0"))
    arm(monkeypatch, store, "replace", proxy.lose_replies)
    granted = finish(
        acquire(
            world,
            store,
            ["job"],
            holder=holder(),
            ttl=TTL,
            wait=0.0,
            abandon=lambda *ghost: abandoned.append(ghost),
        )
    )
    hold = Hold(granted, nonce="n1", ttl=TTL, max_hold=None, emit=lambda _: None)
    arm(monkeypatch, store, "replace", proxy.lose_replies)
    finish(renew(world, store, hold))
    assert hold.phase(world.clocks.boottime()) is Phase.HELD
    arm(monkeypatch, store, "replace", proxy.lose_replies)
    assert finish(release(world, store, hold, abandon=lambda *ghost: abandoned.append(ghost)))
    assert abandoned == []
    assert take(opened(server), nonce="n2") > granted.grant.token


def test_a_request_that_was_swallowed_did_not_happen_and_nobody_claims_it_did(
    server: Seaweed, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(server, proxy, timeout="1s")
    take(store, nonce="n0", ttl=1.0)
    finish(store.release("job", nonce="n0"))

    def swallow() -> None:
        proxy.mode = "hole_up"

    arm(monkeypatch, store, "replace", swallow)
    with pytest.raises(OutcomeUnknown, match="no answer came in time"):
        take(store)
    proxy.mode = "pass"
    seen = finish(opened(server).peek("job"))
    assert seen is not None
    assert not seen.held


def test_a_connection_that_goes_nowhere_ends_with_the_timeout(
    server: Seaweed, proxy: Proxy
) -> None:
    store = opened(server, proxy, timeout="3s")
    token = take(store)
    proxy.mode = "hole"
    began = time.monotonic()
    with pytest.raises(OutcomeUnknown):
        finish(store.renew("job", nonce="n1", token=token, ttl=TTL))
    with pytest.raises(StoreUnavailable):
        finish(store.peek("job"))
    assert time.monotonic() - began < 12.0
    proxy.mode = "pass"
    proxy.reset()
    finish(store.renew("job", nonce="n1", token=token, ttl=TTL))


def test_a_refused_connection_did_nothing(server: Seaweed, proxy: Proxy) -> None:
    store = opened(server, proxy, timeout="2s")
    take(store)
    proxy.mode = "refuse"
    proxy.reset()
    with pytest.raises(StoreUnavailable):
        finish(store.peek("job"))


def test_leases_and_tokens_survive_a_kill_of_the_server() -> None:
    with Seaweed.own() as server:
        server.bucket("faults")
        store = opened(server)
        token = take(store)
        server.restart()
        eventually(lambda: finish(store.renew("job", nonce="n1", token=token, ttl=TTL)))
        with pytest.raises(LeaseHeld):
            take(opened(server), nonce="n2")
        finish(store.release("job", nonce="n1", token=token))
        assert take(store, nonce="n2") > token


def eventually(ask: Any) -> None:
    """Ask until the server is up again: it answers before it can write."""
    end = time.monotonic() + 40
    while True:
        try:
            ask()
        except (OutcomeUnknown, StoreUnavailable):
            assert time.monotonic() < end
            time.sleep(0.1)
        else:
            return


STOPPED = """
import sys, time
from fencepost import Fencepost
from fencepost.errors import LeaseLost
with Fencepost(sys.argv[1], namespace=sys.argv[2]) as fp:
    held = fp.lock("job", ttl=1.5)
    lease = held.acquire()
    print(lease.token, flush=True)
    sys.stdin.readline()
    try:
        lease.check()
        print("still mine", flush=True)
    except LeaseLost as lost:
        print("lost", lost.reason, flush=True)
"""


def test_a_holder_that_was_stopped_past_its_ttl_knows_it_when_it_goes_on(
    server: Seaweed, tmp_path: object
) -> None:
    url, space = server.url("faults"), f"stopped{time.time_ns()}"
    program = subprocess.Popen(
        [sys.executable, "-c", STOPPED, url, space],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        token = int(program.stdout.readline())
        time.sleep(2.0)  # renewed meanwhile: it outlives its first ttl
        with Fencepost(url, namespace=space) as fp:
            with pytest.raises(LeaseHeld), fp.lock("job", ttl=1.5):
                raise AssertionError("two at once")
            program.send_signal(signal.SIGSTOP)
            with fp.lock("job", ttl=1.5, wait=20) as mine:
                assert mine.token > token
                program.send_signal(signal.SIGCONT)
                program.stdin.write("\n")
                program.stdin.flush()
                assert program.stdout.readline().startswith("lost")
                mine.check()
    finally:
        program.kill()
        program.wait(10)
        program.stdin.close()
        program.stdout.close()


class Rival(threading.Thread):
    """A client behind a proxy of its own that competes, acts while it may, and writes it down."""

    def __init__(self, number: int, server: Seaweed, proxy: Proxy, history: list[Event]) -> None:
        super().__init__(name=f"rival-{number}")
        self.world, self.store = BlockingWorld(), opened(server, proxy, timeout="700ms")
        self.history, self.proxy = history, proxy
        self.dice = random.Random(number)
        self.ends = time.monotonic() + 12.0
        self.error: BaseException | None = None
        self.granted = 0

    def run(self) -> None:
        try:
            while time.monotonic() < self.ends:
                self.compete()
        except BaseException as error:  # noqa: BLE001 -- raised again by the test
            self.error = error

    def compete(self) -> None:
        self.stir()
        asked = Holder(self.world.nonce(), "host", self.dice.randrange(9))
        try:
            granted = finish(
                acquire(
                    self.world,
                    self.store,
                    ["job"],
                    holder=asked,
                    ttl=1.5,
                    wait=0.5,
                    abandon=lambda *_: None,
                )
            )
        except (LeaseHeld, LeaseLost, OutcomeUnknown, StoreUnavailable):
            return
        self.granted += 1
        hold = Hold(granted, nonce=asked.nonce, ttl=1.5, max_hold=None, emit=lambda _: None)
        self.note("granted", hold)
        for _ in range(self.dice.randrange(4)):
            self.stir()
            finish(self.world.sleep(self.dice.random() * 0.8))
            finish(renew(self.world, self.store, hold))
            if hold.phase(self.world.clocks.boottime()) is Phase.LOST:
                return
            self.note("renewed", hold)
            self.note("acted", hold)
        if self.dice.random() < 0.7:
            self.note("released", hold)  # before it is: nobody may act from here on
            finish(release(self.world, self.store, hold, abandon=lambda *_: None))

    def stir(self) -> None:
        if self.dice.random() < 0.3:
            self.proxy.mode = self.dice.choice(["hole_down", "hole_up", "pass"])
        else:
            self.proxy.mode = "pass"
        if self.dice.random() < 0.2:
            self.proxy.lose_replies()

    def note(self, what: str, hold: Hold) -> None:
        now = self.world.clocks.boottime()
        self.history.append(
            Event(now, what, self.name, "job", hold.nonce, hold.token, hold.trust.until)
        )


def test_rivals_with_bad_connections_never_hold_it_at_once(server: Seaweed) -> None:
    """All on one machine, so by one clock: what a holder trusts in must not overlap."""
    history: list[Event] = []
    with Proxy(server.port) as one, Proxy(server.port) as two:
        rivals = [Rival(n, server, proxy, history) for n, proxy in enumerate((one, two))]
        for rival in rivals:
            rival.start()
        for rival in rivals:
            rival.join(60)
    for rival in rivals:
        if rival.error is not None:
            raise rival.error
    broken = check(history)
    assert not broken, f"{broken[0]}\n{table(history)}"
    assert min(rival.granted for rival in rivals) >= 1
    assert sum(rival.granted for rival in rivals) >= 4


def test_wrong_credentials_are_one_sentence_without_the_secret(
    server: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, secret in (("NOBODY", SECRET), (KEY, "hunter2")):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        with pytest.raises(FencepostError, match=r"credentials for s3://faults at .* were refused"):
            finish(opened(server).peek("job"))


def test_the_doctor_finds_nothing_wrong_with_it(server: Seaweed) -> None:
    assert finish(opened(server).examine()) == []
