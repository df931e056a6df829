"""A holder of one lease that does what it is told, line by line, in either face.

``gil SECONDS`` stalls the whole process: it keeps the interpreter to itself meanwhile. ``check``
asks the lease; ``leave`` ends the block. It answers each with one line.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from typing import TYPE_CHECKING

from fencepost import AsyncFencepost, Fencepost, LeaseLost

if TYPE_CHECKING:
    from fencepost.lease import Lease
    from fencepost.model.event import JobEvent, LeaseEvent

heard: list[str] = []


def note(event: LeaseEvent | JobEvent) -> None:
    heard.append(event.what)


def say(*words: object) -> None:
    print(*words, flush=True)


def obey(lease: Lease, order: str) -> bool:
    """Do what was said; say whether the block goes on."""
    word, *values = order.split()
    if word == "gil":
        ctypes.PyDLL(None).usleep(int(float(values[0]) * 1e6))
        say("awake")
    elif word == "check":
        try:
            lease.check()
            say("kept", lease.remaining(), int(lease.lost.is_set()))
        except LeaseLost as lost:
            say("lost", lease.remaining(), int(lease.lost.is_set()), lost.reason)
    return word != "leave"


def hold(url: str, name: str, ttl: str) -> None:
    with Fencepost(url, on_event=note) as fp:
        try:
            with fp.lock(name, ttl=ttl) as lease:
                say("granted", lease.remaining(), lease.token)
                while obey(lease, sys.stdin.readline()):
                    pass
        except LeaseLost as lost:
            say("left", "LeaseLost", "lost" in heard, lost.reason)
        else:
            say("left", "well", "lost" in heard)


async def hold_in_a_task(url: str, name: str, ttl: str) -> None:
    async with AsyncFencepost(url, on_event=note) as fp:
        try:
            async with fp.lock(name, ttl=ttl) as lease:
                say("granted", lease.remaining(), lease.token)
                loop = asyncio.get_running_loop()
                while obey(lease, await loop.run_in_executor(None, sys.stdin.readline)):
                    pass
        except LeaseLost as lost:
            say("left", "LeaseLost", "lost" in heard, lost.reason)
        else:
            say("left", "well", "lost" in heard)


def main(face: str, url: str, name: str, ttl: str) -> None:
    if face == "async":
        asyncio.run(hold_in_a_task(url, name, ttl))
    else:
        hold(url, name, ttl)


if __name__ == "__main__":
    main(*sys.argv[1:])
