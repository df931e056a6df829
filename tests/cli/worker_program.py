"""A command with a child in its process group and a daemon that left it, all hard at work.

Each holds a shared lock of its own on one file, so that a successor can tell whether it is alone.
"""

import fcntl
import os
import signal
import sys
import time


def work(kind: str, folder: str, place: str) -> None:
    lock = os.open(os.path.join(folder, "at-work"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_SH)
    beats = os.open(os.path.join(place, "beats"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with open(os.path.join(place, kind + ".new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(place, kind + ".new"), os.path.join(place, kind))
    while True:
        os.write(beats, f"{time.time()}\n".encode())
        time.sleep(0.02)


def main(folder: str, place: str, *options: str) -> None:
    if "stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "daemon" in options:
        work("daemon", folder, place)
    if os.fork() == 0:
        work("child", folder, place)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        if "aloof" in options:  # as proper daemons do
            os.closerange(0, 1000)
        if "masked" in options:
            again = [sys.executable, __file__, folder, place, "daemon", *options]
            os.execve(sys.executable, again, {})
        work("daemon", folder, place)
    if "brief" in options:
        while not all(os.path.exists(os.path.join(place, kind)) for kind in ("child", "daemon")):
            time.sleep(0.01)
        with open(os.path.join(place, "itself"), "w") as file:
            file.write(str(os.getpid()))
        sys.exit(3)
    work("itself", folder, place)


main(*sys.argv[1:])
