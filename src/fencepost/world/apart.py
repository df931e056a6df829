"""Guards that begin as a program of their own, for a wrapper with threads.

A fork copies locks that other threads hold just then, and the guards are Python code, which would
wait for those locks for ever. So here nothing is forked but to become a fresh interpreter at once,
small and with one thread, and that one becomes the guards.
"""

from __future__ import annotations

import marshal
import os
import sys

from fencepost.world.guardian import Guarded, above_streams, encoded, ignored_here, lay_lines
from fencepost.world.guards import Orders, Posts, be_guards
from fencepost.world.strays import Trail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

# Where the package is found, also by an interpreter that knows no site-packages.
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BEGIN = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from fencepost.world.apart import main; main(int(sys.argv[2]))"
)


def start_apart(  # noqa: PLR0913 -- one for each thing that a command inherits
    argv: Sequence[str],
    *,
    environment: dict[str, str],
    nonce: str,
    lifeline: int | None,
    until: tuple[float, float],
    grace: float,
    still_at: float = float("inf"),
    passed: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
    cwd: str | None = None,
    leave_children: bool = False,
) -> Guarded:
    """Start a command under guard, from any thread of any process.

    As ``guardian.start``; the descriptors ``passed`` are the command's too, under their numbers.
    It begins in the folder ``cwd``, or in ours.
    """
    import subprocess  # dear, and never needed by the guards themselves

    streams = {fd for fd in (stdout, stderr) if fd is not None}
    started, theirs, mine = False, [*streams], []
    try:
        lines = lay_lines()
        mine += [lines.to_guardian, lines.to_sentinel, lines.report]
        theirs += lines.theirs
        if lifeline is not None:
            lifeline = os.dup(lifeline)  # the store may close its own at any time
            theirs.append(lifeline)
        words, variables = encoded(argv, environment)
        orders = Orders(
            argv=words,
            environment=variables,
            nonce=nonce,
            pledge=lines.pledge,
            pledge_name=lines.pledge_name,
            lifeline=lifeline,
            ask_at=until[0],
            kill_at=until[1],
            still_at=still_at,
            grace=grace,
            ignored=frozenset(map(int, ignored_here())),
            mask=set(),  # whichever thread it is that starts them
            stdout=stdout,
            stderr=stderr,
            leave_children=leave_children,
        )
        theirs.append(letter(marshal.dumps((tuple(orders), tuple(lines.posts)))))
        process = subprocess.Popen(  # noqa: S603 -- our own interpreter, with our own words
            [sys.executable, "-I", "-S", "-c", _BEGIN, ROOT, str(theirs[-1])],
            stdin=subprocess.DEVNULL,
            pass_fds=(*theirs, *passed),
            start_new_session=True,
            cwd=cwd,
        )
        started = True
    finally:
        for fd in theirs if started else theirs + mine:
            os.close(fd)
    pid = process.pid
    trail = Trail(session=pid, root=pid, nonce=nonce, pledge=lines.pledge_name)
    return Guarded(trail, lines, kill_at=until[1], still_at=still_at, bury=process.wait)


def main(fd: int) -> NoReturn:
    """Read the orders and be the guards, to the end of this process."""
    words, posts = marshal.loads(opened(fd))  # noqa: S302 -- our own
    orders = Orders(*words)
    # The command must not have these, or its end would not be theirs; its streams are given to it.
    for post in (*posts, *(fd for fd in (orders.stdout, orders.stderr) if fd is not None)):
        os.set_inheritable(post, False)  # noqa: FBT003 -- the standard library's way
    be_guards(orders, Posts(*posts))


def letter(content: bytes) -> int:
    """Return a descriptor of something written, that is in no folder and has no size limit."""
    fd = above_streams(os.memfd_create("fencepost"))
    done = 0
    while done < len(content):
        done += os.write(fd, content[done:])
    return fd


def opened(fd: int) -> bytes:
    """Return what was written in a letter, and throw it away."""
    size = os.fstat(fd).st_size
    content = b""
    while len(content) < size:
        content += os.pread(fd, size - len(content), len(content))
    os.close(fd)
    return content
