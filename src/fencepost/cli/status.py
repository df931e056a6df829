"""``fencepost status`` says on one screen how the jobs are, and in its exit code if all is well.

Something is wrong with a job that is in quarantine, that no instance knows any more, that did not
succeed the last time it was tried to the end, or whose running attempt has vanished. A slot that
was skipped on purpose, or cancelled by somebody, says nothing about the job's health.
"""

from __future__ import annotations

import time

from fencepost.cli.asking import asked
from fencepost.cli.jobs import described, next_due, paused
from fencepost.cli.main import FINE, WRONG
from fencepost.cli.reading import job_called, ledger_at, say_there_is_none
from fencepost.cli.runs import why
from fencepost.cli.showing import away, bold, brief, plain, print_json, print_table, when
from fencepost.model.duration import shown
from fencepost.model.named import NamedTuple
from fencepost.model.run import State, public

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

    from fencepost.ledger.api import Ledger
    from fencepost.model.definition import JobRecord
    from fencepost.model.run import RunRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_HEADINGS = ("JOB", "LAST RUN", "STATE", "WHY", "LAST SUCCESS", "NEXT DUE", "STANDS")
_TRIED = (State.SUCCEEDED, State.FAILED, State.TIMED_OUT, State.MISSED)
_LIVE = tuple(state for state in State if not state.terminal)
# More than a screen could show.
_MOST_LIVE = 1000


def register(subparsers: Subparsers) -> None:
    """Add the verb ``status``."""
    parser = subparsers.add_parser("status", help="show how the jobs are; exit code 1 if not well")
    parser.add_argument("job", metavar="JOB", nargs="?")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print how the jobs are; return 1 if something is wrong with one of them."""
    with ledger_at(args) as ledger:
        if ledger is None and args.job is None:
            say_there_is_none(args, document={"ok": True, "jobs": []})
            return FINE
        known = [job_called(args.job, ledger)] if args.job else None
        assert ledger is not None, "where there is a job there is a ledger"
        states = _states(ledger, asked(ledger.jobs()) if known is None else known)
    now = time.time()
    wrong = any(state.problems for state in states)
    if args.json:
        jobs = [_document(state, now=now) for state in states]
        print_json({"ok": not wrong, "jobs": jobs})
    elif args.quiet:
        _print_section("", [line for state in states for line in state.problems], args)
    elif states:
        _print_all(states, args, now=now)
    else:
        print("the ledger knows no job yet")
    return WRONG if wrong else FINE


class Live(NamedTuple):
    """A run that has not ended, and whether somebody is still at it."""

    run: RunRecord
    alive: bool


class JobState(NamedTuple):
    """How one job is."""

    job: JobRecord
    last: RunRecord | None  # the newest, whatever became of it
    tried: RunRecord | None  # the newest that tells of the job's health
    success: RunRecord | None
    live: list[Live]

    @property
    def problems(self) -> list[str]:
        """What is wrong, one sentence each."""
        name, tried = self.job.job, self.tried
        found = []
        if self.job.quarantined:
            found.append(
                f"{name} is in quarantine because of {self.job.quarantined}: "
                f"`fencepost resume {name}` releases it"
            )
        if self.job.orphaned_at and not self.job.retired:
            found.append(
                f"{name} is an orphan: no instance knows it any more, and its slots are missed; "
                f"start one that does, or `fencepost retire {name} --reason …`"
            )
        if self.job.retired:
            return []  # whatever became of it, it is over
        if tried is not None and tried.state is not State.SUCCEEDED:
            found.append(
                f"{tried.key} is {tried.state.value}: {brief(tried.error or tried.reason)}"
            )
        found += [
            f"{run.key} was lost: {run.holder} vanished; whoever triggers the job next resumes it"
            for run, alive in self.live
            if run.state is State.RUNNING and not alive and not run.ordered_to_stop
        ]
        return found


def _states(ledger: Ledger, jobs: Sequence[JobRecord]) -> list[JobState]:
    only = jobs[0].job if len(jobs) == 1 else None
    live: dict[str, list[Live]] = {}
    for run in asked(ledger.runs(only, states=_LIVE, limit=_MOST_LIVE)):
        live.setdefault(run.key.job, []).append(Live(run, _is_alive(ledger, run)))

    def newest(job: str, states: Sequence[State] = ()) -> RunRecord | None:
        return next(iter(asked(ledger.runs(job, limit=1, states=states))), None)

    return [
        JobState(
            job,
            newest(job.job),
            newest(job.job, _TRIED),
            newest(job.job, (State.SUCCEEDED,)),
            live.get(job.job, []),
        )
        for job in jobs
    ]


def _is_alive(ledger: Ledger, run: RunRecord) -> bool:
    """Say whether the attempt that has a run still has its lease, as far as anybody can know."""
    if run.state is not State.RUNNING:
        return False
    view = asked(ledger.leases.peek(run.lease))
    ours = view is not None and view.holder.nonce == run.holder.nonce
    return view is not None and ours and view.held and view.alive is not False


def _document(state: JobState, *, now: float) -> dict[str, Any]:
    success = state.success

    def told(run: RunRecord | None) -> dict[str, Any] | None:
        return None if run is None else public(run)

    return described(state.job) | {
        "ok": not state.problems,
        "problems": state.problems,
        "last_run": told(state.last),
        "last_success": told(success),
        "last_success_age": None if success is None else round(now - success.ended_at, 3),
        "running": [
            public(run) | {"alive": alive, "age": round(now - run.started_at, 3)}
            for run, alive in state.live
            if run.state is State.RUNNING
        ],
        "waiting": [public(run) for run, _ in state.live if run.state is not State.RUNNING],
    }


def _print_all(states: list[JobState], args: argparse.Namespace, *, now: float) -> None:
    print_table(_HEADINGS, [_row(state, now=now) for state in states], args)
    live = [each for state in states for each in state.live]
    sections = {
        "running now": [_running(run, now=now) for run, alive in live if alive],
        "waiting": [_waiting(run, now=now) for run, _ in live if run.state is not State.RUNNING],
        "wrong": [line for state in states for line in state.problems],
    }
    for title, lines in sections.items():
        if lines:
            print()
            _print_section(title, lines, args)


def _print_section(title: str, lines: list[str], args: argparse.Namespace) -> None:
    if title:
        print(bold(f"{title}:", args))
    for line in lines:
        print(f"  {plain(line)}" if title else plain(line))


def _row(state: JobState, *, now: float) -> tuple[str, ...]:
    last, success = state.last, state.success
    return (
        state.job.job,
        "never" if last is None else when(last.started_at or last.created_at, now=now),
        "" if last is None else last.state.value,
        "" if last is None else why(last),
        "never" if success is None else when(success.ended_at, now=now),
        next_due(state.job, now=now),
        _stands(state.job),
    )


def _stands(job: JobRecord) -> str:
    """Say why nothing of a job begins, if so."""
    if job.retired:
        return "retired"
    if job.paused:
        return f"paused: {paused(job)}"
    return job.barred


def _running(run: RunRecord, *, now: float) -> str:
    words = [f"{run.key} by {run.holder} for {shown(max(0.0, now - run.started_at))}"]
    words.append(f"attempt {run.attempt}")
    if run.done is not None:
        words.append(f"{run.done} done" if run.total is None else f"{run.done} of {run.total} done")
    if run.cancel_at:
        words.append(f"asked to end {away(run.cancel_at, now=now)}")
    return ", ".join(words)


def _waiting(run: RunRecord, *, now: float) -> str:
    if run.state is State.WAITING_RETRY:
        until = when(run.not_before, now=now)
        return f"{run.key} for a retry {until}; attempt {run.attempt} failed: {brief(run.error)}"
    until = f" until {when(run.not_before, now=now)}" if run.not_before > now else ""
    blocked = f", blocked by {run.blocker}" if run.blocker else ""
    reason = f" ({run.reason}{blocked})" if run.reason else ""
    return f"{run.key} for its turn{until}{reason}"
