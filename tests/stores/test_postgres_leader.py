"""Leader election by ``attempt()``: one leads, a crashed leader is followed within a second."""

from __future__ import annotations

import asyncio
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
