"""A command that beats until it is killed, by itself or as a chain that forks on and on.

Each process of the chain lives for a moment only, in a session of its own, with its descriptors
closed. Each beat is an instant of the boot-time clock, in a line of a file.
"""

import os
import signal
import sys
import time

# What a broken program does not kill ends by itself, long after any test has looked.
LONGEST = 20.0


def beat(path: str) -> None:
    beats = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(beats, f"{time.clock_gettime(time.CLOCK_BOOTTIME)}\n".encode())
    os.close(beats)
    time.sleep(0.002)


def main(path: str, kind: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    give_up = time.monotonic() + LONGEST
    if kind == "chain" and os.fork() == 0:
        os.setsid()
        os.closerange(0, 1000)
        while time.monotonic() < give_up:
            if os.fork():
                os._exit(0)
            os.setsid()
            beat(path)
        os._exit(0)
    while time.monotonic() < give_up:
        if kind == "chain":
            time.sleep(0.1)
        else:
            beat(path)


main(*sys.argv[1:])
