"""Holds a lease with a face of its own until it is told to end; says each word on a line."""

from __future__ import annotations

import sys

from fencepost import Fencepost, FencepostError


def main(url: str, name: str, ttl: str) -> None:
    fp = Fencepost(url)
    lease = fp.lock(name, ttl=ttl, wait="20s").acquire()
    print(lease.token, flush=True)
    for _ in sys.stdin:
        try:
            lease.check()
            print("fine", flush=True)
        except FencepostError as error:
            print(type(error).__name__, flush=True)


main(*sys.argv[1:])
