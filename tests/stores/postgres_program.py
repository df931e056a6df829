"""A holder of one lease, in a process of its own: it says until when it believed in it."""

from __future__ import annotations

import sys
import time

from fencepost import Fencepost, LeaseLost
from fencepost.world.clocks import SystemClocks


def main(url: str, name: str, ttl: str) -> None:
    boottime = SystemClocks().boottime
    with Fencepost(url) as fp:
        lease = fp.lock(name, ttl=ttl).acquire()
        believed = boottime()  # before anybody, told of the grant, can stop us
        print(f"granted {lease.token}", flush=True)
        while True:
            now = boottime()  # before it is asked: what is believed after this is believed at it
            try:
                lease.check()
            except LeaseLost as lost:
                print(f"lost {believed!r} {lost.reason}", flush=True)
                return
            believed = now
            time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
