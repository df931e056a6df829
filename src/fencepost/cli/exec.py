"""``fencepost exec NAME -- command`` runs a command only while it holds a lease.

With a slot it is the run of a job, once per slot and on record: see ``exec_job.py``.

The exit code is the command's own, or 128 + n if signal n ended it. If it was not run: 75 because
the lease is held, 69 because the store cannot be reached, 127 and 126 as in a shell. The command
finds its fencing token in $FENCEPOST_TOKEN. It has no controlling terminal: it runs in a session of
its own, so that no key press can end it before its wrapper knows.
"""

from __future__ import annotations

import os
import signal
import time

from fencepost.cli.asking import asked, opened
from fencepost.cli.main import WRONG, say
from fencepost.errors import BadDuration, FencepostError, LeaseHeld, Misuse, OutcomeUnknown
from fencepost.flows.acquire import acquire
from fencepost.flows.command import oversee
from fencepost.flows.keep import Hold
from fencepost.flows.release import release
from fencepost.model.command import (
    SHORTEST_TTL,
    code_of_failure,
    must_end,
    notice_of,
    still_at,
)
from fencepost.model.duration import positive, seconds, shown
from fencepost.model.lease import Holder, checked_ttl
from fencepost.model.name import checked, permits
from fencepost.model.named import NamedTuple
from fencepost.version import VERSION
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.guardian import FORWARDED, marked, start

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from fencepost.model.event import LeaseEvent
    from fencepost.stores.api import LeaseStore
    from fencepost.world.guardian import Guarded

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

HELD, NO_STORE = 75, 69


def register(subparsers: Subparsers) -> None:
    """Add the verb ``exec``."""
    parser = subparsers.add_parser(
        "exec",
        help="run a command while holding a lease",
        usage="fencepost exec NAME [options] -- command …",
    )
    # A group spares argparse from building a help formatter for each option.
    add = parser.add_argument_group("the command and its lease").add_argument
    add("name", metavar="NAME", help="the lease that the command needs")
    add("--ttl", default="30s", help="how long others wait after this machine vanished (30s)")
    add("--wait", default="0s", help="how long to wait for the lease if it is held (0s)")
    add("--max-hold", help="end the command after this long")
    add("--limit", type=int, metavar="N", help="let N commands of this name run at once")
    add("--held-exit", type=int, default=HELD, metavar="CODE", help="exit code if held (75)")
    add("--grace", default="5s", help="from SIGTERM to SIGKILL for what outlives the command (5s)")
    add("--leave-children", action="store_true", help="leave what outlives the command alone")
    add = parser.add_argument_group("as the run of a job, once per slot and on record").add_argument
    add("--slot", metavar="INSTANT", help="run this slot, such as 2026-01-20T02:00:00Z")
    add("--cron", metavar="EXPR", help="run the newest slot that is due by a cron expression")
    add("--tz", metavar="ZONE", help="whose clocks the cron expression means (UTC)")
    add("--every", metavar="DURATION", help="run the newest slot that is due each 15m, 1h, …")
    add("--manual", action="store_true", help="a run of its own, besides all slots")
    add("--overlap", metavar="WORD", help="if another run is active: skip, reschedule, fail, …")
    add("--retry", metavar="N", help="try N times in all (1)")
    add("--retry-pause", metavar="DURATION", help="before the second try; then it doubles (10s)")
    add("--timeout", metavar="DURATION", help="end an attempt after this long, or 'none' (1h)")
    add("--on-loss", metavar="WORD", help="if an attempt vanished: resume (default), or fail")
    add(
        "--verbose", action="store_true", help="log lines on standard error; so does $FENCEPOST_LOG"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command under its lease and return the exit code."""
    wanted = _wanted(args)
    if not os.path.exists("/proc/self/stat"):
        raise Misuse("exec needs Linux's /proc, by which it finds what a command has started")
    _open_standard_streams()
    if args.manual or not args.slot is args.cron is args.every is None:
        from fencepost.cli.exec_job import run_job  # a ledger and schedules: only if asked for

        return run_job(args, wanted)
    _refuse_words_of_jobs(args)
    world = BlockingWorld()
    store = opened(args, world)
    errand = _Errand(world, store, wanted)
    try:
        hold = errand.acquire()
    except LeaseHeld as held:
        if not args.quiet:
            say(_who_has_it(held, now=world.clocks.wall()))
        return wanted.held_exit
    except Interrupted as interrupted:
        return 128 + interrupted.signum
    except FencepostError as error:
        if args.debug:
            raise
        say(f"{error}; the command was not run")
        return NO_STORE
    return errand.carry_out(hold)


class Wanted(NamedTuple):
    """A checked request to run a command."""

    command: list[str]
    name: str
    names: list[str]
    ttl: float
    wait: float
    max_hold: float | None
    grace: float
    held_exit: int
    leave_children: bool


class Interrupted(BaseException):
    """A signal came while there was no command yet to forward it to; like KeyboardInterrupt."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class _Errand:
    """One command and its lease, from the first request to the release."""

    def __init__(self, world: BlockingWorld, store: LeaseStore, wanted: Wanted) -> None:
        self._world, self._store, self._wanted = world, store, wanted
        self._holder = Holder(world.nonce(), os.uname().nodename, os.getpid(), VERSION)
        self._granted = False
        self._early: list[int] = []
        self._command: Guarded | None = None

    def acquire(self) -> Hold:
        """Acquire the lease. A signal ends the wait, and gives back what was granted meanwhile."""
        for signum in FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup would have it
                signal.signal(signum, self._receive)
        wanted = self._wanted
        try:
            # Nothing is handed to us: the guardians share the pulse of this process, and no seat.
            flow = acquire(
                self._world,
                self._store,
                wanted.names,
                holder=self._holder,
                ttl=wanted.ttl,
                wait=wanted.wait,
                abandon=_leave_it,
            )
            granted = asked(flow)
            self._granted = True
        except (Interrupted, OutcomeUnknown):
            self._granted = True  # from here on signals only pile up
            self._give_back()
            raise
        return Hold(
            granted,
            nonce=self._holder.nonce,
            ttl=wanted.ttl,
            max_hold=wanted.max_hold,
            emit=_say_nothing,
        )

    def carry_out(self, hold: Hold) -> int:
        """Run the command to its end, release the lease, and return the exit code."""
        wanted = self._wanted
        notice = notice_of(wanted.grace, max_hold=wanted.max_hold)
        try:
            command = self._command = start(
                wanted.command,
                environment=marked(name=hold.name, token=hold.token, nonce=hold.nonce),
                nonce=hold.nonce,
                lifeline=getattr(self._store, "lifeline", _none)(),
                until=must_end(hold.trust, ends=hold.ends, notice=notice),
                grace=wanted.grace,
                still_at=still_at(hold.lean),
                leave_children=wanted.leave_children,
            )
        except OSError as error:
            self._release(hold)
            say(f"{wanted.command[0]!r} was not run: {error.strerror}")
            return WRONG
        for signum in self._early:
            command.forward(signum)
        ended = finish(oversee(self._world, self._store, hold, command, notice=notice))
        kept = self._release(hold)
        self._command = None
        command.close()  # only now: the guardian takes a moment to vanish, and others wait
        if command.failed:
            say(f"{wanted.command[0]!r} was not run: {os.strerror(command.failed)}")
            return code_of_failure(command.failed)
        told = []
        if ended.why is not None:
            what = "lost" if hold.why_lost is not None else "in danger"
            end = "was stopped" if ended.stopped else "had ended by itself"
            told.append(f"lease {hold.name!r} was {what}: {ended.why}; the command {end}")
        elif not kept:
            told.append(
                f"lease {hold.name!r} was lost before the command ended; look for a later holder"
            )
        if command.children is not None:
            left = command.children
            told.append(f"processes that the command left behind were {left.told_fate}: {left}")
        if told:
            say("; ".join(told))
        return ended.code

    def _receive(self, signum: int, _frame: object) -> None:
        if self._command is not None:
            self._command.forward(signum)
        elif self._granted:
            self._early.append(signum)
        else:
            raise Interrupted(signum)

    def _release(self, hold: Hold) -> bool:
        kept = finish(release(self._world, self._store, hold, abandon=_leave_it))
        finish(self._store.close())
        return kept

    def _give_back(self) -> None:
        for name in self._wanted.names:
            try:
                finish(self._store.release(name, nonce=self._holder.nonce))
            except FencepostError:
                continue  # never granted, or it will run out


def _wanted(args: argparse.Namespace) -> Wanted:
    """Check a command line before anything is asked of the store."""
    if not args.command:
        raise Misuse("exec needs a command: fencepost exec NAME -- command …")
    ttl = checked_ttl(args.ttl)
    if ttl < SHORTEST_TTL:
        raise BadDuration(
            f"ttl is {args.ttl!r}: exec needs at least {shown(SHORTEST_TTL)}, so that a command "
            "can be stopped before others may start; it is renewed while the command runs"
        )
    if args.limit is not None and args.limit < 1:
        raise Misuse(f"limit is {args.limit}: it must be at least 1")
    if not 0 <= args.held_exit <= 255:
        raise Misuse(f"held-exit is {args.held_exit}: an exit code is a number from 0 to 255")
    name = checked(args.name)
    return Wanted(
        command=args.command,
        name=name,
        names=[name] if args.limit is None else permits(name, limit=args.limit),
        ttl=ttl,
        wait=seconds(args.wait, what="wait"),
        max_hold=None if args.max_hold is None else positive(args.max_hold, what="max-hold"),
        grace=seconds(args.grace, what="grace"),
        held_exit=args.held_exit,
        leave_children=args.leave_children,
    )


def _refuse_words_of_jobs(args: argparse.Namespace) -> None:
    """Refuse words that would be without effect, rather than let them be believed in."""
    words = ("tz", "overlap", "retry", "retry_pause", "timeout", "on_loss")
    given = next((word for word in words if getattr(args, word) is not None), None)
    if args.verbose:
        given = "verbose"
    if given is not None:
        raise Misuse(
            f"--{given.replace('_', '-')} is for the run of a job: say which slot with --slot, "
            "--cron, --every or --manual"
        )


def _who_has_it(held: LeaseHeld, *, now: float) -> str:
    since = ""
    if held.since is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held.since))
        since = f" since {at} ({shown(max(0.0, now - held.since))})"
    return (
        f"lease {held.name!r} is held by {held.holder}{since} and for another "
        f"{shown(held.expires_in)} unless renewed; the command was not run"
    )


def _open_standard_streams() -> None:
    """Make sure that no lock file becomes the command's standard output."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003


def _none() -> None:
    """Stand in for a store that cannot see who lives."""


def _say_nothing(event: LeaseEvent) -> None:
    """Leave it to the last line to say what happened to the lease."""


def _leave_it(name: str, nonce: str) -> None:
    """Do nothing: this process is about to end, and its pulse with it."""
