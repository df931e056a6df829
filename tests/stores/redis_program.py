"""A process that wants one lease again and again, and writes down what it was granted.

Arguments: URL, name, ttl, rounds (0: hold it until told otherwise). Each line is an event of a
history: the instant of a grant is its token, which is the server's time.
"""

from __future__ import annotations

import os
import sys
import time

from fencepost import Fencepost
from fencepost.testing.history import Event, to_lines


def main(url: str, name: str, ttl: str, rounds: str) -> None:
    node = str(os.getpid())
    with Fencepost(url) as fp:
        print("ready", flush=True)
        for _ in range(int(rounds) or 1):
            lock = fp.lock(name, ttl=float(ttl), wait=60)
            lease = lock.acquire()
            at = lease.token / 1e6
            say(Event(at, "granted", node, name, lease.hold.nonce, lease.token, at + float(ttl)))
            if rounds == "0":
                sys.stdin.readline()
                try:
                    lease.check()
                except Exception as error:  # noqa: BLE001 -- the test reads which
                    print(type(error).__name__, flush=True)
                else:
                    print("held", flush=True)
            else:
                time.sleep(0.002)
            # Said before: who is killed in between cannot say that it has given the lease back.
            until, at = at + float(ttl), time.time()
            say(Event(at, "releasing", node, name, lease.hold.nonce, lease.token, until))
            if lock.release(lease):  # else it was lost before, and is somebody else's by now
                say(Event(at, "released", node, name, lease.hold.nonce))


def say(event: Event) -> None:
    print(*to_lines([event]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
