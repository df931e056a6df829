"""A process that takes one lease, says so, and says what it believes whenever it is asked."""

from __future__ import annotations

import sys

from fencepost import Fencepost, FencepostError

url, name, ttl = sys.argv[1:]
with Fencepost(url) as fp:
    lease = fp.lock(name, ttl=ttl).acquire()
    print(lease.token, flush=True)
    for _ in sys.stdin:
        try:
            lease.check()
            print("held", flush=True)
        except FencepostError as error:
            print(type(error).__name__, error, flush=True)
