"""One of a crowd that wants one lease: while it believes to have it, it writes down its token."""

from __future__ import annotations

import os
import sys
import time

from fencepost import Fencepost, FencepostError
from fencepost.world.clocks import SystemClocks


def main(url: str, name: str, path: str, ttl: str = "20s") -> None:
    boottime = SystemClocks().boottime
    acts = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Fencepost(url) as fp:
        print("ready", flush=True)
        while True:
            try:
                with fp.lock(name, ttl=ttl, wait="10s") as lease:
                    for _ in range(30):
                        now = boottime()  # before it is asked: what is believed then is true at it
                        lease.check()
                        os.write(acts, f"{now!r} {lease.token}\n".encode())
                        time.sleep(0.005)
            except FencepostError:
                continue


if __name__ == "__main__":
    main(*sys.argv[1:])
