"""Leader election by ``attempt()``: one leads, a crashed leader is followed within a second."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack

from postgres_kit import fresh, pooler

from fencepost import AsyncFencepost, Fencepost
from fencepost.leader import AsyncLeader, Leader
from servers import Postgres, shared

PROGRAM = textwrap.dedent("""
    import sys, time
    from fencepost import Fencepost
    from fencepost.leader import Leader

    leader = Leader(Fencepost(sys.argv[1]), sys.argv[2], ttl="10m")
    print(leader.attempt(), flush=True)
    time.sleep(600)
""")


USURPER = textwrap.dedent("""
    import sys, time
    import psycopg
    from fencepost import Fencepost

    url, name = sys.argv[1:]
    time.sleep(0.5)
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
    print(Fencepost(url).lock(name, wait="20s").acquire().token, flush=True)
    time.sleep(600)
""")


def a_pulse_of_its_own() -> str:
    """Return a URL whose pulse no other test has made late."""
    return f"{shared(Postgres).url()}?application_name={fresh()}"


def stall(seconds: float) -> None:
    """Keep the interpreter, as an extension may that does not let go of it."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_leader_that_stalled_leads_on_with_its_token() -> None:
    with Fencepost(a_pulse_of_its_own()) as fp:
        leader = Leader(fp, fresh())
        assert leader.attempt()
        token = token_of(leader)
        stall(1.5)
        assert leader.attempt()
        assert token_of(leader) == token
        leader.resign()


def test_an_async_leader_that_stalled_leads_on_with_its_token() -> None:
    async def elect() -> None:
        async with AsyncFencepost(a_pulse_of_its_own()) as fp:
            leader = AsyncLeader(fp, fresh())
            assert await leader.attempt()
            before = leader.lease
            stall(1.5)
            assert await leader.attempt()
            assert before is leader.lease is not None
            await leader.resign()

    asyncio.run(elect())


def test_a_leader_that_was_followed_during_a_stall_does_not_say_that_it_leads() -> None:
    with Postgres.own() as server, Fencepost(server.url()) as fp:
        leader = Leader(fp, name := fresh())
        assert leader.attempt()
        program = [sys.executable, "-c", USURPER, server.url(), name]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            stall(8.0)
            leads = leader.lease is not None
            assert process.stdout is not None
            assert int(process.stdout.readline()) > 0
            assert not leads
            assert not leader.attempt()
            process.kill()


def token_of(leader: Leader) -> int:
    """Return the token that somebody leads with; 0 if it does not lead."""
    return 0 if leader.lease is None else leader.lease.token


def test_attempt_is_true_for_the_first_and_for_nobody_else() -> None:
    for url in (shared(Postgres).url(), pooler().url()):
        name = fresh()
        with ExitStack() as stack:
            faces = [stack.enter_context(Fencepost(url)) for _ in range(4)]
            leaders = [Leader(fp, name) for fp in faces]
            assert [leader.attempt() for leader in leaders] == [True, False, False, False]
            assert [leader.attempt() for leader in leaders] == [True, False, False, False]
            assert token_of(leaders[0]) > 0
            leaders[0].resign()
            assert token_of(leaders[0]) == 0
            assert [leader.attempt() for leader in reversed(leaders)] == [True, False, False, False]
            leaders[3].resign()


def test_a_crashed_leader_is_followed_within_a_second() -> None:
    url, name = shared(Postgres).url(), fresh()
    program = [sys.executable, "-c", PROGRAM, url, name]
    with (
        Fencepost(url) as fp,
        subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        leader = Leader(fp, name)
        assert not leader.attempt()
        process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        while not leader.attempt():
            assert time.monotonic() - began < 5
        assert time.monotonic() - began < 2.0
        leader.resign()


def test_a_leader_that_could_not_prove_itself_leads_again_with_a_higher_token() -> None:
    with Fencepost(shared(Postgres).url()) as fp:
        leader = Leader(fp, fresh())
        assert leader.attempt()
        lease = leader.lease
        assert lease is not None
        lease.hold.lose("it stood still")
        assert token_of(leader) == 0
        assert leader.attempt()
        assert token_of(leader) > lease.token
        leader.resign()


def test_the_async_leader_is_the_same() -> None:
    async def elect() -> None:
        name = fresh()
        async with AsyncFencepost(shared(Postgres).url()) as fp:
            first, second = AsyncLeader(fp, name), AsyncLeader(fp, name)
            assert await first.attempt()
            assert await first.attempt()
            assert not await second.attempt()
            assert second.lease is None
            await first.resign()
            assert await second.attempt()
            await second.resign()

    asyncio.run(elect())
