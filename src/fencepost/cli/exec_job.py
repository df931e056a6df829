"""``fencepost exec JOB --cron … -- command`` is the run of a job: once per slot, and on record.

The slot is claimed in the ledger, and a claim that others were quicker with is answered with who
they are. A run that failed is tried again as ``--retry`` says, and one whose process vanished is
taken over at once. Whoever stops this program with a signal stops the command and gives the run
back: the next one resumes it, unless ``--on-loss fail`` forbids that.
"""

from __future__ import annotations

import contextlib
import os
import signal

from fencepost.caller import Asked, CallersClock
from fencepost.cli.asking import opened
from fencepost.cli.exec import NO_STORE, Interrupted
from fencepost.cli.exec_attempt import CommandAttempt
from fencepost.cli.exec_lines import event_of, log_line, why_not_run
from fencepost.cli.main import WRONG, code_of, say
from fencepost.errors import BadSlot, FencepostError, Misuse
from fencepost.flows.course import Doors
from fencepost.flows.keep import LONGEST_SILENCE
from fencepost.flows.trigger import Errand, trigger
from fencepost.jobs import Declared, Words, declare
from fencepost.ledger.open import ledger_of
from fencepost.model.claim import Want
from fencepost.model.lease import Holder
from fencepost.model.meant import Meant
from fencepost.model.policy import Retry
from fencepost.model.slot import RunKey, parsed
from fencepost.model.tier import Tier
from fencepost.version import VERSION
from fencepost.world.blocking import BlockingWorld
from fencepost.world.exited import known_secrets
from fencepost.world.flow import finish
from fencepost.world.guardian import FORWARDED

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from fencepost.cli.exec import Wanted
    from fencepost.jobs import Job
    from fencepost.ledger.api import Ledger
    from fencepost.model.claim import Claimed
    from fencepost.model.event import JobEvent, LeaseEvent
    from fencepost.model.outcome import Outcome
    from fencepost.model.run import RunRecord
    from fencepost.world.guardian import Guarded
    from fencepost.world.output import Tee

    Emit = Callable[[LeaseEvent | JobEvent], None]

# What means: end. The other signals that are forwarded are the command's own business.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A command that is to give way hears of it with a beat, and takes a moment to vanish.
_HEARING = 2 * LONGEST_SILENCE
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


def run_job(args: argparse.Namespace, wanted: Wanted) -> int:
    """Run the command as the run of a job, and return the exit code."""
    job = _declared(args, wanted)
    world = Waiting()
    asked = Asked(job, args.slot, args.manual)
    asked.meant(now=world.clocks.wall())  # what cannot be is said before all else
    store = opened(args, world)
    emit = log_line if args.verbose or os.environ.get("FENCEPOST_LOG") else _say_nothing
    errand = JobErrand(world, ledger_of(world, store), asked, wanted, emit)
    errand.listen()
    try:
        outcome = finish(errand.carry_out())
        code = errand.answer(outcome, quiet=args.quiet)
    except Interrupted as interrupted:
        code = 128 + interrupted.signum
    except FencepostError as error:
        if args.debug:
            raise
        code = errand.without_run(error)
    with contextlib.suppress(FencepostError):  # whatever was to be said has been said by now
        finish(store.close())
    return code


class Waiting(BlockingWorld):
    """A world in which a signal ends a wait, and nothing else: what was begun is finished."""

    def __init__(self) -> None:
        super().__init__()
        self.asleep = False
        self.early: list[int] = []  # signals that came when there was nobody to forward them to

    async def sleep(self, seconds: float) -> None:
        """Block this thread, unless a signal came or comes."""
        self.asleep = True
        try:
            if self.early:
                raise Interrupted(self.early[0])
            await super().sleep(seconds)
        finally:
            self.asleep = False


class JobErrand:
    """One command as the run of a job, through all of its attempts."""

    def __init__(
        self, waiting: Waiting, ledger: Ledger, asked: Asked, wanted: Wanted, emit: Emit
    ) -> None:
        self._waiting, self._asked = waiting, asked
        self._key = RunKey(asked.job.name, 0)  # which run is ours, from when it was chosen on
        self.world, self.ledger = BlockingWorld(), ledger  # in which no signal cuts anything short
        self.job, self.wanted, self.emit = asked.job, wanted, emit
        self._clock = CallersClock(waiting.clocks, self._tell_clock, host=os.uname().nodename)
        self.secrets = known_secrets(os.environ)
        self.told_to_end = 0  # the signal by which somebody stopped this program
        self._codes: dict[RunKey, int] = {}  # of the last attempt that was made here
        self._why_lost = ""
        self._command: Guarded | None = None

    def listen(self) -> None:
        """Forward signals to the command; without one they end a wait."""
        for signum in FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as nohup would have it
                signal.signal(signum, self._receive)

    async def carry_out(self) -> Outcome:
        """Claim the run that is meant, see it through, and say what became of it."""
        clocks, asked = self._waiting.clocks, self._asked
        give_up, pause = clocks.boottime() + self.wanted.wait, _FIRST_PAUSE
        await self._register()
        meant = asked.meant(now=clocks.wall()) or await asked.meant_there(self.ledger, self._clock)
        self._key = meant.key
        # Without patience of our own it is the policy that says how long to wait for others.
        patience, compare = self.wanted.wait or None, self._clock.compare
        errand = Errand(
            self._want, self._attempt, self._give_back, patience, self._meant_at, compare
        )
        while True:
            outcome = await trigger(Doors(self._waiting, self.ledger), errand, meant)
            if outcome.reason == "taken":  # the number is: the next one may be free
                self._key = self._key._replace(manual=self._key.manual + 1)
                meant = Meant(self._key)
                continue
            meant = Meant(self._key)
            left = give_up - clocks.boottime()
            if left <= 0 or not await self._is_with_others(outcome):
                return outcome
            await self._waiting.sleep(min(left, pause))
            pause = min(pause * 1.6, _LONGEST_PAUSE)

    def answer(self, outcome: Outcome, *, quiet: bool) -> int:
        """Say what became of the run, if the command cannot; return the exit code."""
        key, name = parsed(outcome.run_id), f"run {outcome.run_id!r}"
        if key in self._codes and outcome.status != "already_done":
            if outcome.status == "lost":
                say(f"{name} was lost: {self._why_lost}")
            elif outcome.status in ("timed_out", "cancelled"):
                say(f"{name} is {outcome.status}: {outcome.error}")
            # Whatever the command says of itself: only what succeeded may look like it.
            return self._codes[key] or (0 if outcome.status == "succeeded" else WRONG)
        event = event_of(outcome)
        if event is not None:
            self.emit(event)
        failed = outcome.status == "failed" and outcome.reason in ("lost", "poison")
        if failed or not quiet:
            run = finish(self.ledger.find(key))
            say(why_not_run(outcome, run, now=self._clock.now()))
        return WRONG if failed else self.wanted.held_exit

    def without_run(self, error: FencepostError) -> int:
        """Say that the ledger could not be asked, or has no such run; return the exit code."""
        if self._codes:
            *_, code = self._codes.values()
            say(f"{error}; the command was run, and what became of the run is not known here")
            return code or WRONG
        say(f"{error}; the command was not run")
        return code_of(error) if isinstance(error, BadSlot) else NO_STORE

    # What an attempt tells its errand.

    def began(self, command: Guarded) -> None:
        """Forward signals to a command from now on, and those that came before it was there."""
        self.told_to_end, self._command = 0, command
        early, self._waiting.early = self._waiting.early, []
        for signum in early:
            self._receive(signum, None)

    def ended(self, key: RunKey, *, code: int) -> None:
        """Take note that nothing of the command is left."""
        self._command = None
        self._codes[key] = code

    def lost(self, why: str) -> None:
        """Take note that the run is not ours any more."""
        self._why_lost = why

    def drain(self, tee: Tee) -> None:
        """Wait for those who read what the command said, as any program would; a signal ends it."""
        self._waiting.asleep = True
        try:
            tee.close(patience=None)
        except Interrupted as interrupted:
            self._waiting.early.append(interrupted.signum)
        finally:
            self._waiting.asleep = False

    # What the flow of a trigger asks for.

    def _meant_at(self, now: float) -> RunKey:
        self._key = self._asked.meant_at(now)
        return self._key

    def _tell_clock(self, event: JobEvent) -> None:
        """Say once that this machine's clock is wrong: the slot went by the ledger's."""
        self.emit(event)
        if event.what == "clock_disagrees":
            off = float(str(dict(event.more)["off"]).removesuffix("s"))
            stands = "ahead of" if off > 0 else "behind"
            say(
                f"the clock of this machine is {abs(off):.1f} s {stands} the ledger's, and slots "
                "go by the ledger's: set this one right"
            )

    def _want(self, meant: Meant) -> Want:
        key, since, until = meant
        holder = Holder(self.world.nonce(), os.uname().nodename, os.getpid(), VERSION)
        return Want(
            key,
            holder,
            self.job.policy,
            self.job.lock_of(key.slot),
            "manual" if key.manual else "exec",
            can_be_alone=True,
            new=key.manual > 0 and key == self._key,
            since=since,
            until=until,
        )

    async def _attempt(self, claimed: Claimed, sent: float) -> RunRecord | None:
        assert claimed.run is not None, "what was claimed has a record"
        record = await CommandAttempt(self, claimed, sent).see_through()
        if self.told_to_end and claimed.run.key != self._key:
            raise Interrupted(self.told_to_end)  # our own run was not begun, and shall not be
        return record

    def _give_back(self, name: str, nonce: str) -> None:
        with contextlib.suppress(FencepostError):  # never granted, or it will run out
            finish(self.ledger.leases.release(name, nonce=nonce))

    async def _is_with_others(self, outcome: Outcome) -> bool:
        """Say whether the run is not over, but in somebody else's hands."""
        if outcome.status != "skipped" or self._key in self._codes:
            return False
        run = await self.ledger.find(self._key)
        return run is not None and not run.state.terminal

    async def _register(self) -> None:
        """Have the job listed. Who gives no schedule does not overwrite the one that is known."""
        job = self.job
        if job.schedule is None:
            known = await self.ledger.jobs()
            if any(other.job == job.name for other in known):
                return
        await self.ledger.register(job.name, job.definition())

    def _receive(self, signum: int, _frame: object) -> None:
        if self._command is not None:
            if signum in _ENDING:
                self.told_to_end = signum
            self._command.forward(signum)
        elif self._waiting.asleep:
            raise Interrupted(signum)
        else:
            self._waiting.early.append(signum)


def _declared(args: argparse.Namespace, wanted: Wanted) -> Job:
    """Return the job that the command line describes, or say which of its words cannot be."""
    if args.manual and args.slot is not None:
        raise Misuse("a manual run is its own: give either --slot or --manual")
    if args.max_hold is not None:
        raise Misuse("--max-hold is for a lock: the run of a job has a --timeout")
    if args.tz is not None and args.cron is None:
        raise Misuse("--tz says whose clocks --cron means: give both, or neither")
    # Who waits for others does not want to be skipped because of them.
    overlap = args.overlap or ("reschedule" if wanted.wait > 0 else "skip")
    if args.limit is not None and overlap != "allow":
        raise Misuse("--limit says how many may run at once: give --overlap allow with it")
    policy = {
        "overlap": overlap,
        "max_concurrent": 16 if args.limit is None else args.limit,
        "retry": _retry(args),
        "retry_until": None,
        "timeout": None if args.timeout == "none" else args.timeout or "1h",
        "cancel_grace": wanted.grace + _HEARING,
        "lease": wanted.ttl,
        "on_loss": args.on_loss or "resume",
        "leave_children": wanted.leave_children,
    }
    schedule = {"cron": args.cron, "every": args.every, "tz": args.tz or "UTC"}
    declared = Declared(None, "process", "slot", Tier.T1, idempotent=False)
    rules = {"catchup": "latest", "start_deadline": None}
    return declare(wanted.name, _command, Words(declared, schedule, rules, policy))


def _retry(args: argparse.Namespace) -> Retry | None:
    if args.retry is None:
        if args.retry_pause is not None:
            raise Misuse("--retry-pause is without effect unless --retry says how often to try")
        return None
    if not args.retry.isdecimal():
        raise Misuse(f"retry is {args.retry!r}: it must be a whole number from 1 on")
    return Retry(int(args.retry), base=args.retry_pause or "10s")


def _command() -> None:
    """Stand for the command, where a job has a function."""


def _say_nothing(event: LeaseEvent | JobEvent) -> None:
    """Leave standard error to the command."""
