"""A command, or a body, that leaves a daemon behind in a session of its own and ends as it is told.

The daemon writes the time of every beat to a file. It needs neither its parents, nor a descriptor,
nor its environment.
"""

import os
import signal
import subprocess
import sys
import time

# A daemon that a broken program does not stop ends by itself, long after any test.
LONGEST = 120.0


def beat(place: str, manner: str) -> None:
    if manner == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    beats = os.open(os.path.join(place, "beats"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    give_up = time.monotonic() + LONGEST
    while time.monotonic() < give_up:
        os.write(beats, f"{time.time()}\n".encode())
        time.sleep(0.005)
    os._exit(0)


def popen(again: list[str]) -> None:
    subprocess.Popen(again, start_new_session=True)


def fork_twice(again: list[str]) -> None:
    if not _left_parents():
        os.closerange(0, 1000)
        beat(*again[-2:])


def nohup(again: list[str]) -> None:
    script = 'setsid nohup "$@" > /dev/null 2>&1 < /dev/null &'
    subprocess.run(["/bin/sh", "-c", script, "sh", *again], check=True)


def daemon(again: list[str]) -> None:
    """Do as daemons are told to, and begin with an empty environment besides."""
    if not _left_parents():
        os.chdir("/")
        os.closerange(0, 1000)
        os.execve(again[0], again, {})


def _left_parents() -> bool:
    """Fork twice, with a session in between; say whether this is the process that forked."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return True
    os.setsid()
    if os.fork():
        os._exit(0)
    return False


KINDS = {"popen": popen, "forks": fork_twice, "nohup": nohup, "daemon": daemon}


def leave(place: str, kind: str, end: str, manner: str) -> None:
    """Leave a daemon behind, and return if the body is to end well once it may ``go``."""
    # A daemon has the folder as an argument, so that a test can clean up after a broken program.
    KINDS[kind]([sys.executable, __file__, place, "beat", place, manner])
    while not os.path.exists(os.path.join(place, "beats")):
        time.sleep(0.005)
    while end == "times out" or not os.path.exists(os.path.join(place, "go")):
        time.sleep(0.005)
    if end == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "fails":
        sys.exit(3)


def body() -> None:
    """Do so as the body of a job, in a process of its own."""
    leave(*os.environ["LEAVING"].split("|"))


def leave_a_sleeper() -> int:
    """Leave a process behind that does nothing, and return its number."""
    return subprocess.Popen(["sleep", "600"], start_new_session=True).pid


if __name__ == "__main__":
    if sys.argv[2] == "beat":
        beat(*sys.argv[3:])
    else:
        leave(*sys.argv[1:])
