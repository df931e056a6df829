"""A holder that stalled is unsure, not lost: it asks its session, and goes on if that lives."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from postgres_kit import Believer, boottime, fresh

from fencepost import Fencepost, LeaseHeld, Run
from proxy import Proxy
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).with_name("postgres_stall_program.py")
CROWD = Path(__file__).with_name("postgres_crowd_program.py")
WAYS = [(face, way) for face in ("sync", "async") for way in ("stop", "gil")]


class Holder:
    """A process that holds one lease and obeys."""

    def __init__(self, face: str, url: str, name: str, *, ttl: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), face, url, name, ttl],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.granted = self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def answer(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def ask(self, order: str) -> list[str]:
        self.tell(order)
        return self.answer()

    def stall(self, way: str, seconds: float) -> None:
        """Begin to stall; ``wake`` ends it."""
        if way == "gil":
            self.tell(f"gil {seconds}")
        else:
            self.process.send_signal(signal.SIGSTOP)

    def wake(self, way: str) -> None:
        if way == "gil":
            assert self.answer() == ["awake"]
        else:
            self.process.send_signal(signal.SIGCONT)


def stalled(url: str, *, ttl: str, seconds: float) -> Iterator[tuple[str, Holder]]:
    """Let one holder of each face stall in each way, all at once; nobody else may have theirs."""
    with ExitStack() as stack:
        fp = stack.enter_context(Fencepost(url))
        holders = [
            (way, name, stack.enter_context(Holder(face, url, name, ttl=ttl)))
            for face, way in WAYS
            for name in [fresh()]
        ]
        for way, _, holder in holders:
            holder.stall(way, seconds)
        time.sleep(seconds - 0.5)
        for _, name, _ in holders if seconds < float(ttl.rstrip("s")) else []:
            with pytest.raises(LeaseHeld):
                fp.lock(name).acquire()
        time.sleep(0.5)
        for way, _, holder in holders:
            holder.wake(way)
            yield way, holder


def test_five_seconds_of_a_stall_lose_no_lease_of_thirty() -> None:
    for _, holder in stalled(shared(Postgres).url(), ttl="30s", seconds=5.0):
        assert float(holder.granted[1]) > 25
        word, remaining, is_lost, *_ = holder.ask("check")
        assert (word, is_lost) == ("kept", "0")
        assert 10 < float(remaining) < 30
        assert holder.ask("leave")[1:] == ["well", "False"]


def test_a_block_that_never_asks_ends_well_after_a_stall() -> None:
    for _, holder in stalled(shared(Postgres).url(), ttl="30s", seconds=1.5):
        assert holder.ask("leave")[1:] == ["well", "False"]


def test_a_stall_that_is_longer_than_the_ttl_loses_the_lease() -> None:
    for way, holder in stalled(shared(Postgres).url(), ttl="3s", seconds=4.0):
        if way == "gil" and holder.process.args[2] == "sync":  # type: ignore[index]
            word, remaining, is_lost, *_ = holder.ask("check")
            assert (word, remaining, is_lost) == ("lost", "0.0", "1")
        assert holder.ask("leave")[1:3] == ["LeaseLost", "True"]


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_holder_whose_session_ended_during_a_stall_is_lost_once_it_was_followed(
    face: str,
) -> None:
    with Postgres.own() as server, ExitStack() as stack:
        name = fresh()
        holder = stack.enter_context(Holder(face, server.url(), name, ttl="30s"))
        fp = stack.enter_context(Fencepost(server.url() + "?application_name=other"))
        with pytest.raises(LeaseHeld):
            fp.lock(name).acquire()
        holder.stall("stop", 0)
        assert server.terminate() >= 2
        with fp.lock(name, wait="20s") as lease:
            assert lease.token > int(holder.granted[2])
            holder.wake("stop")
            if face == "sync":
                word, _, is_lost, *why = holder.ask("check")
                assert (word, is_lost) == ("lost", "1")
                assert "has it now" in " ".join(why)
                holder.tell("leave")
            assert holder.answer()[1:3] == ["LeaseLost", "True"]  # a task is cancelled


def test_a_holder_whose_session_ended_and_whom_nobody_followed_goes_on() -> None:
    with Postgres.own() as server, ExitStack() as stack:
        holder = stack.enter_context(Holder("sync", server.url(), fresh(), ttl="30s"))
        holder.stall("stop", 0)
        assert server.terminate() >= 2
        time.sleep(1.0)
        holder.wake("stop")
        assert holder.ask("check")[0] == "kept"
        assert holder.ask("leave")[1:] == ["well", "False"]


@pytest.mark.parametrize("face", ["sync", "async"])
def test_a_hole_that_is_shorter_than_the_ttl_loses_nothing(face: str) -> None:
    """Nothing is answered for three seconds: check() waits, or says that nobody can tell."""
    server = shared(Postgres)
    with Proxy(server.port) as proxy, ExitStack() as stack:
        through = server.url().replace(str(server.port), str(proxy.port))
        holder = stack.enter_context(Holder(face, through, fresh(), ttl="30s"))
        proxy.mode = "hole"
        time.sleep(1.5)
        began = time.monotonic()
        holder.tell("check")
        if face == "async":  # its whole loop would wait
            word, _, is_lost, *why = holder.answer()
            assert (word, is_lost) == ("lost", "0")
            assert "nobody could tell" in " ".join(why)
            assert time.monotonic() - began < 3.0  # check() and remaining() wait a second each
        time.sleep(1.5)
        proxy.reset()
        proxy.mode = "pass"
        if face == "sync":
            assert holder.answer()[0] == "kept"
        else:
            give_up = time.monotonic() + 20
            while holder.ask("check")[0] != "kept":
                assert time.monotonic() < give_up
        assert holder.ask("leave")[1:] == ["well", "False"]


def test_a_server_that_stands_still_loses_nothing_either() -> None:
    with Postgres.own() as server, Holder("sync", server.url(), fresh(), ttl="30s") as holder:
        backends = [int(str(pid)) for [pid] in server.run("SELECT pid FROM pg_stat_activity")]
        for pid in backends:
            signal_if_there(pid, signal.SIGSTOP)
        time.sleep(1.5)
        holder.tell("check")
        time.sleep(1.5)
        for pid in backends:
            signal_if_there(pid, signal.SIGCONT)
        assert holder.answer()[0] == "kept"
        assert holder.ask("leave")[1:] == ["well", "False"]


def signal_if_there(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):  # a backend may have ended
        os.kill(pid, signum)


def test_a_run_whose_lease_elsewhere_is_late_goes_on(tmp_path: Path) -> None:
    with Fencepost(f"sqlite:///{tmp_path}/ledger.db", leases=shared(Postgres).url()) as fp:

        @fp.job(name=fresh(), every="1h")
        def body(run: Run) -> None:
            ctypes.PyDLL(None).usleep(1_500_000)
            run.check()

        assert fp.trigger(body, manual=True).status == "succeeded"


STALLS, MEMBERS, NAMES, TTL = 200, 16, 5, 3.0


def test_in_two_hundred_stalls_nobody_believes_beside_a_successor(tmp_path: Path) -> None:
    """Each member writes down when check() said yes, the first time right after its grant."""
    dice = random.Random(7)
    with Postgres.own() as server, ExitStack() as stack:
        crowd = []
        for number in range(MEMBERS):
            name = f"wanted{number % NAMES}"
            path = tmp_path / f"{name}-{number}"
            program = [sys.executable, str(CROWD), server.url(), name, str(path), f"{TTL}s"]
            member = stack.enter_context(subprocess.Popen(program, stdout=subprocess.PIPE))
            stack.callback(member.kill)
            assert member.stdout is not None
            assert member.stdout.readline() == b"ready\n"
            crowd.append((member, random.Random(dice.random())))

        def trouble(member: subprocess.Popen[bytes], dice: random.Random, stalls: int) -> None:
            for _ in range(stalls):
                time.sleep(dice.uniform(0.05, 0.3))
                member.send_signal(signal.SIGSTOP)
                time.sleep(dice.uniform(0.1, 1.3 * TTL))
                if dice.random() < 0.2:
                    server.terminate()
                    time.sleep(dice.uniform(0.0, 1.5))
                member.send_signal(signal.SIGCONT)

        share = -(-STALLS // MEMBERS)
        threads = [threading.Thread(target=trouble, args=(*one, share)) for one in crowd]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(NAMES):
        paths = tmp_path.glob(f"wanted{number}-*")
        lines = [line for path in paths for line in path.read_text().splitlines()]
        acts = sorted((float(at), int(token)) for at, token in map(str.split, lines))
        tokens = [token for _, token in acts]
        assert tokens == sorted(tokens)
        assert len(set(tokens)) > 3


def test_a_believer_that_is_stopped_beside_one_who_asks_all_the_time_goes_on() -> None:
    url, name = shared(Postgres).url(), fresh()
    with Fencepost(url) as fp, Believer(url, name, ttl="6s") as holder:
        for _ in range(3):
            holder.pause()
            end = boottime() + 2.0
            while boottime() < end:
                with pytest.raises(LeaseHeld):
                    fp.lock(name).acquire()
                time.sleep(0.05)
            holder.go_on()
            time.sleep(0.3)
        assert holder.process.poll() is None
