"""One of a crowd that wants one lease: it says what it believes, and writes behind a fence.

Arguments: URL, ttl, the file of its history, the SQLite file that all of them write to.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import time

from fencepost import Fencepost, FencepostError, Lease
from fencepost.isolated import believed_until
from fencepost.testing.history import Event, to_lines
from fencepost.world.clocks import SystemClocks

boottime = SystemClocks().boottime
NAME = "wanted"


def main(url: str, ttl: str, path: str, effects: str) -> None:
    history = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(event: Event) -> None:
        os.write(history, "".join(f"{line}\n" for line in to_lines([event])).encode())

    with (
        Fencepost(url, on_event=None) as fp,
        sqlite3.connect(effects, timeout=30, isolation_level=None) as db,
    ):
        print("ready", flush=True)
        while True:
            lock = fp.lock(NAME, ttl=ttl, wait="2s")
            try:
                lease = lock.acquire()
            except FencepostError:
                continue
            said = Event(0, "", str(os.getpid()), NAME, lease.hold.nonce, lease.token)
            what = "granted"
            while True:
                # Read before the clock: a renewal or proof in between only makes it longer.
                until = min(lease.hold.trust.until, believed_until(lease.hold.lean))
                at = boottime()
                if at >= until or lease.remaining() <= 0:
                    break  # it ends by itself: nobody who was stopped so long says more about it
                if what == "renewed" and random.random() < 0.1:
                    say(said._replace(at=at, what="released"))
                    break
                say(said._replace(at=at, what=what, until=until))
                say(said._replace(at=at, what="acted"))
                what = "renewed"
                try:
                    write(db, lease)
                except FencepostError:
                    break
                time.sleep(random.random() * 0.05)
            lock.release(lease)


def write(db: sqlite3.Connection, lease: Lease) -> None:
    """Write as a careful program does: only behind the fence is it certain who is late."""
    try:
        db.execute("BEGIN IMMEDIATE")
        lease.fence(db)
        db.execute("INSERT INTO effect (at, token) VALUES (?, ?)", (boottime(), lease.token))
        db.commit()
    finally:
        db.rollback()


if __name__ == "__main__":
    main(*sys.argv[1:])
