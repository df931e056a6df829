"""Runs that hold a lease in another store beside the one in their ledger."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from fencepost import AsyncFencepost, AsyncRun, Fencepost, Lease, Retry, Run
from fencepost.errors import LeaseLost, Misuse, StoreUnfit, TokenStale
from fencepost.fence import CREATE_GUARD
from fencepost.model.run import State
from fencepost.testing.eventual import EventualKv, EventualStore
from holder import until
from proxy import Proxy
from servers import Etcd, MariaDB, Postgres, Seaweed, Valkey, ZooKeeper, shared
from servers.objects import KEY, SECRET

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def space(tmp_path: Path) -> str:
    """A namespace of this test's own, on a server that it shares with others."""
    return tmp_path.name


@pytest.fixture
def elsewhere() -> str:
    return shared(Valkey).url()


def test_a_run_has_its_lease_elsewhere_for_as_long_as_it_runs(
    ledger: str, elsewhere: str, space: str
) -> None:
    with Fencepost(ledger, leases=elsewhere, namespace=space) as fp:
        seen: list[list[str]] = []

        @fp.job("nightly")
        def nightly() -> None:
            seen.append([view.name for view in fp.locks()])

        assert fp.trigger("nightly", manual=True).status == "succeeded"
        assert seen == [["nightly"]]
        assert fp.locks() == []


def test_who_has_the_lock_elsewhere_keeps_runs_out(ledger: str, elsewhere: str, space: str) -> None:
    done: list[str] = []
    with (
        Fencepost(elsewhere, namespace=space) as other,
        Fencepost(ledger, leases=elsewhere, namespace=space) as fp,
    ):
        fp.job("skips", overlap="skip", lock="shared")(lambda: done.append("skips"))
        fp.job("fails", overlap="fail", lock="shared")(lambda: done.append("fails"))
        with other.lock("shared"):
            skipped = fp.trigger("skips", manual=True)
            failed = fp.trigger("fails", manual=True)
        assert (skipped.status, skipped.reason) == ("skipped", "lock_held")
        assert failed.status == "failed"
        assert "is held by" in str(failed.error)
        assert done == []
        assert fp.trigger("skips", manual=True).status == "succeeded"


@contextmanager
def running(fp: Fencepost) -> Iterator[None]:
    """An instance in another thread, which ends with the block."""
    instance = threading.Thread(target=lambda: fp.run(signals=False))
    instance.start()
    try:
        yield
    finally:
        fp.stop()
        instance.join(30)
        assert not instance.is_alive()


@pytest.mark.parametrize("overlap", ["skip", "fail", "allow"])
def test_each_slot_of_a_job_that_catches_all_up_waits_for_the_lock_elsewhere(
    ledger: str, elsewhere: str, space: str, overlap: str
) -> None:
    with (
        Fencepost(elsewhere, namespace=space) as other,
        Fencepost(ledger, leases=elsewhere, namespace=space) as fp,
    ):
        fp.job("every", every="1s", catchup="all", overlap=overlap, max_concurrent=1)(lambda: None)
        held = other.lock("every", limit=1 if overlap == "allow" else None)
        with running(fp):
            with held:
                until(lambda: any(run.state is State.RUNNING for run in fp.runs("every")))
                began = time.monotonic()
                until(lambda: time.monotonic() - began > 3)
                assert len(fp.runs("every")) == 1, "the others wait behind the first"
            until(lambda: sum(run.state is State.SUCCEEDED for run in fp.runs("every")) >= 8)
        runs = fp.runs("every")
        assert {run.state for run in runs} == {State.SUCCEEDED}
        slots = sorted(run.key.slot for run in runs)
        assert slots == list(range(slots[0], slots[-1] + 1)), "not one slot is missing"


def test_a_backfill_waits_for_the_lock_elsewhere(ledger: str, elsewhere: str, space: str) -> None:
    with (
        Fencepost(elsewhere, namespace=space) as other,
        Fencepost(ledger, leases=elsewhere, namespace=space) as fp,
    ):
        fp.job("hourly", every="1h", overlap="skip")(lambda: None)
        hours = ("2026-01-05T00:00Z", "2026-01-05T03:00Z")
        thread = threading.Thread(target=lambda: fp.backfill("hourly", *hours))
        with other.lock("hourly"):
            thread.start()
            until(lambda: any(run.state is State.RUNNING for run in fp.runs("hourly")))
            thread.join(1.5)
            assert [run.state for run in fp.runs("hourly")] == [State.RUNNING]
        thread.join(30)
        assert [run.state for run in fp.runs("hourly")] == [State.SUCCEEDED] * 3


def test_a_trigger_of_a_job_that_catches_all_up_is_skipped_as_in_the_ledger(
    ledger: str, elsewhere: str, space: str
) -> None:
    with (
        Fencepost(elsewhere, namespace=space) as other,
        Fencepost(ledger, leases=elsewhere, namespace=space) as fp,
    ):
        fp.job("hourly", every="1h", catchup="all")(lambda: None)
        with other.lock("hourly"):
            outcome = fp.trigger("hourly")
    assert (outcome.status, outcome.reason) == ("skipped", "lock_held")


def test_who_reschedules_waits_for_the_lock_elsewhere(
    ledger: str, elsewhere: str, space: str
) -> None:
    entered = threading.Event()
    with (
        Fencepost(elsewhere, namespace=space) as other,
        Fencepost(ledger, leases=elsewhere, namespace=space) as fp,
    ):
        fp.job("waits", overlap="reschedule")(entered.set)
        with other.lock("waits"):
            trigger = threading.Thread(target=lambda: fp.trigger("waits", manual=True))
            trigger.start()
            assert not entered.wait(0.3)
        trigger.join(30)
        assert entered.is_set()


def test_a_run_that_was_begun_before_waits_in_any_case(
    ledger: str, elsewhere: str, space: str
) -> None:
    tries: list[int] = []
    with (
        Fencepost(elsewhere, namespace=space) as other,
        Fencepost(ledger, leases=elsewhere, namespace=space) as fp,
    ):
        rival = other.lock("nightly", wait="30s")
        inside, enough = threading.Event(), threading.Event()

        def hold() -> None:
            with rival:
                inside.set()
                enough.wait(30)

        holder = threading.Thread(target=hold)

        @fp.job("nightly", overlap="skip", retry=Retry(3, base="10ms"))
        def nightly(run: Run) -> None:
            tries.append(run.token)
            if len(tries) == 1:
                holder.start()
                raise RuntimeError("try again")

        def free_it() -> None:
            assert inside.wait(30)
            threading.Timer(0.5, enough.set).start()

        threading.Thread(target=free_it).start()
        outcome = fp.trigger("nightly", manual=True, wait="30s")
        holder.join(30)
        assert (outcome.status, len(tries)) == ("succeeded", 2)


def test_waiting_for_the_lease_elsewhere_is_not_time_of_the_body(
    ledger: str, elsewhere: str, space: str
) -> None:
    found: list[str] = []
    with (
        Fencepost(elsewhere, namespace=space) as other,
        Fencepost(ledger, leases=elsewhere, namespace=space) as fp,
    ):
        fp.job("short", timeout="500ms", overlap="reschedule")(lambda: None)
        with other.lock("short"):
            thread = threading.Thread(
                target=lambda: found.append(fp.trigger("short", manual=True).status)
            )
            thread.start()
            thread.join(1.2)
        thread.join(30)
    assert found == ["succeeded"]


def test_a_lease_that_cannot_be_given_back_does_not_undo_what_was_done(
    ledger: str, elsewhere: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fencepost(ledger, leases=elsewhere, namespace=space) as fp:

        async def unfit(*_: object, **__: object) -> None:
            raise StoreUnfit("the server refuses it")

        @fp.job("nightly")
        def nightly() -> None:
            monkeypatch.setattr(fp._locks.store, "release", unfit)

        assert fp.trigger("nightly", manual=True).status == "succeeded"
        monkeypatch.undo()


def test_a_lease_that_was_lost_before_the_body_began_keeps_it_from_beginning(
    ledger: str, elsewhere: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[None] = []
    with Fencepost(ledger, leases=elsewhere, namespace=space) as fp:
        granted = fp._locks.acquire

        async def lost_at_once(*args: Any, **words: Any) -> Lease:
            lease = await granted(*args, **words)
            lease.hold.lose("a moment ago")
            return lease

        monkeypatch.setattr(fp._locks, "acquire", lost_at_once)

        @fp.job("nightly")
        def nightly(run: Run) -> None:
            run.check()
            done.append(None)

        assert fp.trigger("nightly", manual=True).status == "lost"
    assert done == []


def test_permits_elsewhere_are_any_that_is_free(
    ledger: str, elsewhere: str, space: str, tmp_path: Path
) -> None:
    other = f"sqlite:///{tmp_path}/other.db"
    with (
        Fencepost(ledger, leases=elsewhere, namespace=space) as one,
        Fencepost(other, leases=elsewhere, namespace=space) as two,
    ):
        two.job("shares", overlap="allow", max_concurrent=2)(lambda: None)

        @one.job("shares", overlap="allow", max_concurrent=2)
        def shares() -> None:
            assert two.trigger("shares", manual=True).status == "succeeded"

        assert one.trigger("shares", manual=True).status == "succeeded"


def test_what_leases_elsewhere_cannot_guard_is_refused(
    ledger: str, elsewhere: str, space: str
) -> None:
    with Fencepost(ledger, leases=elsewhere, namespace=space) as fp:
        with pytest.raises(Misuse, match="a process of its own beside leases elsewhere"):
            fp.job("apart", isolation="process")(isolated)

        @fp.job("hands")
        def hands(run: Run) -> None:
            run.hand_over()

        assert "beside leases elsewhere" in str(fp.trigger("hands", manual=True).error)
    with pytest.raises(Misuse, match="names the ledger's own store"):
        Fencepost(ledger, leases=f"{ledger}?trust_filesystem=1")


def isolated() -> None:
    """Be importable."""


def test_who_loses_the_lease_elsewhere_has_lost_the_run(
    ledger: str, elsewhere: str, space: str
) -> None:
    found: list[BaseException] = []
    with Fencepost(ledger, leases=elsewhere, namespace=space) as fp:

        @fp.job("broken", lease="1s")
        def broken(run: Run) -> None:
            (view,) = fp.locks()
            fp.break_lock("broken", token=view.token, reason="it hangs")
            assert run.lost.wait(30)
            try:
                run.check()
            except LeaseLost as lost:
                found.append(lost)
                raise

        outcome = fp.trigger("broken", manual=True)
        assert outcome.status == "lost"
        assert "its lease elsewhere is lost" in str(found[0])
        assert "it hangs" in str(found[0])


def test_the_asyncio_face_does_the_same(ledger: str, elsewhere: str, space: str) -> None:
    async def main() -> None:
        async with (
            AsyncFencepost(elsewhere, namespace=space) as other,
            AsyncFencepost(ledger, leases=elsewhere, namespace=space) as fp,
        ):
            seen: list[list[str]] = []

            @fp.job("nightly")
            async def nightly(run: AsyncRun) -> None:
                seen.append([view.name for view in await fp.locks()])

            assert (await fp.trigger("nightly", manual=True)).status == "succeeded"
            assert seen == [["nightly"]]
            async with other.lock("nightly"):
                outcome = await fp.trigger("nightly", manual=True)
            assert (outcome.status, outcome.reason) == ("skipped", "lock_held")

    asyncio.run(main())


def test_jobs_that_must_not_overlap_are_refused_where_leases_may(ledger: str) -> None:
    def leases(world: World, namespace: str) -> LeaseStore:
        kv = EventualKv(world, delay=60.0)
        return EventualStore(world, kv, edge="ams", namespace=namespace)

    with Fencepost(ledger, leases=leases) as fp:
        with pytest.raises(Misuse, match="needs T1"):
            fp.job("charges")(lambda: None)
        fp.job("refreshes", idempotent=True)(lambda: None)
        assert fp.trigger("refreshes", manual=True).status == "succeeded"


def test_moving_the_leases_of_live_jobs_never_makes_a_token_fall(
    ledger: str, tmp_path: Path, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each move is made while a run is at work under a lease of the old store."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    moves = [
        f"sqlite:///{tmp_path}/leases.db",
        shared(Valkey).url(),
        shared(Etcd).url(),
        shared(Postgres).database("moves"),
        shared(MariaDB).database("moves"),
        f"{shared(ZooKeeper).url()}/moves",
        shared(Seaweed).url(shared(Seaweed).bucket("moves")),
    ]
    leases, runs = list[int](), list[int]()

    def live(run: Run, fp: Fencepost, later: Sequence[str]) -> None:
        (view,) = fp.locks()
        leases.append(view.token)
        runs.append(run.token)
        if later:  # somebody is deployed with the next store, while this run goes on
            with Fencepost(ledger, leases=later[0], namespace=space) as moved:
                moved.job("live")(lambda: None)
                outcome = moved.trigger("live", manual=True)
                assert (outcome.status, outcome.reason) == ("skipped", "lock_held")
        run.save(view.token)

    chain = (*moves, *moves[:4])  # and back again
    for number, url in enumerate(chain):
        if url.startswith("s3://"):  # whose clock shows whole seconds: it counts on from there
            until(lambda: int(time.time()) > leases[-1] / 1e6)
        with Fencepost(ledger, leases=url, namespace=space) as fp:
            later = chain[number + 1 : number + 2]
            fp.job("live")(partial(live, fp=fp, later=later))
            assert fp.trigger("live", manual=True).status == "succeeded"
    assert len(leases) == len(chain)
    assert leases == sorted(set(leases))
    assert runs == sorted(set(runs))


def test_a_redis_that_forgets_a_lease_in_a_failover_lets_no_late_run_write(
    ledger: str, tmp_path: Path
) -> None:
    """Both believe in their leases; the ledger records one of them, and the fence admits one."""
    database = tmp_path / "effects.db"
    with sqlite3.connect(database) as db:
        db.execute(CREATE_GUARD)
    with Valkey.own() as primary, Proxy(primary.port) as wire:

        class Replica(Valkey):
            replica_of = wire.port

        with Replica.own() as replica, replica.client() as promoted:
            until(lambda: promoted.info("replication")["master_link_status"] == "up")
            wire.mode = "hole"  # replication is asynchronous: the primary goes on alone
            with (
                Fencepost(f"sqlite:///{tmp_path}/other.db", leases=replica.url()) as after,
                Fencepost(ledger, leases=primary.url()) as before,
                Fencepost(ledger, leases=replica.url()) as same,
                sqlite3.connect(database, isolation_level=None) as db,
            ):
                leases: list[int] = []

                @after.job("nightly")
                def later(run: Run) -> None:
                    leases.extend(view.token for view in after.locks())
                    with after.lock("effects") as lease:
                        fenced(db, lease)

                same.job("nightly")(lambda: leases.append(0))

                @before.job("nightly")
                def first(run: Run) -> None:
                    leases.extend(view.token for view in before.locks())
                    with before.lock("effects") as lease:
                        promoted.replicaof("NO", "ONE")
                        assert after.trigger("nightly", manual=True).status == "succeeded"
                        lease.check()  # its own server still knows it
                        with pytest.raises(TokenStale):
                            fenced(db, lease)
                    # Whoever shares the ledger is kept out by it, whatever Redis has forgotten.
                    outcome = same.trigger("nightly", manual=True)
                    assert (outcome.status, outcome.reason) == ("skipped", "lock_held")

                assert before.trigger("nightly", manual=True).status == "succeeded"
            wire.mode = "pass"
    assert len(leases) == 2
    assert leases[0] < leases[1], "the floor of tokens holds where the lease was forgotten"


def fenced(db: sqlite3.Connection, lease: Lease) -> None:
    try:
        db.execute("BEGIN IMMEDIATE")
        lease.fence(db)
        db.commit()
    finally:
        db.rollback()
