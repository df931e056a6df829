"""``fencepost logs RUN`` shows all that the ledger has about one run."""

from __future__ import annotations

import json
import time

from fencepost.cli.asking import asked
from fencepost.cli.main import FINE
from fencepost.cli.reading import ledger_at
from fencepost.cli.showing import block, bold, plain, print_json, when
from fencepost.errors import UnknownRun
from fencepost.model.duration import shown
from fencepost.model.item import ItemState
from fencepost.model.named import NamedTuple
from fencepost.model.output import OUTPUT
from fencepost.model.run import State, public
from fencepost.model.slot import parsed

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from fencepost.ledger.api import Ledger
    from fencepost.model.item import ItemRecord
    from fencepost.model.run import RunEvent, RunRecord
    from fencepost.model.slot import RunKey

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_ENDS = {
    "attempt_failed": "failed",
    "attempt_released": "given back",
    "attempt_lost": "lost",
    "cancel_forced": "cancelled by force",
}


def register(subparsers: Subparsers) -> None:
    """Add the verb ``logs``."""
    parser = subparsers.add_parser("logs", help="show all that is on record about a run")
    parser.add_argument("id", metavar="RUN", help="such as billing@2026-01-20T02:00:00Z")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the record of a run, its attempts, events, counters, items and output."""
    key = parsed(args.id)
    with ledger_at(args) as ledger:
        record = None if ledger is None else asked(ledger.find(key))
        if ledger is None or record is None:
            raise UnknownRun(str(key))
        story = Story(
            record,
            asked(ledger.events(key)),
            asked(ledger.counts(key)),
            _items(ledger, key),
        )
    if args.json:
        print_json(_document(story))
    else:
        _print(story, args, now=time.time())
    return FINE


class Story(NamedTuple):
    """All that the ledger has about a run."""

    run: RunRecord
    events: list[RunEvent]
    counts: dict[str, int]
    items: list[ItemRecord]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """The tries in order, as far as they are on record: how each ended, and under which token.

        Only the last one's beginning is known; earlier ones are known by their ends.
        """
        run = self.run
        told = [
            {
                "token": event.token,
                "holder": event.holder or None,
                "ended_at": event.at,
                "ended": _ENDS[event.what],
                "error": event.detail or None,
                "output": self._outputs.get(event.token),
            }
            for event in self.events
            if event.what in _ENDS
        ]
        forced = any(event.what == "cancel_forced" for event in self.events)  # has a new token
        if run.starts and not forced and run.token not in {each["token"] for each in told}:
            result = _command_result(run.result)
            last = {
                "token": run.token,
                "holder": str(run.holder) if run.holder.host else None,
                "ended_at": run.ended_at or None,
                "ended": run.state.value if run.state.terminal else None,
                "error": run.error,
                "output": self._outputs.get(run.token) if result is None else result["output"],
            }
            told.append(last)
        return told

    @property
    def doubtful(self) -> list[str]:
        """The items that were begun by an attempt which will never end them."""
        current = self.run.token if self.run.state is State.RUNNING else None
        begun = (item for item in self.items if item.state is ItemState.BEGUN)
        return [item.item for item in begun if item.token != current]

    @property
    def _outputs(self) -> dict[int, str]:
        results = {
            event.token: _command_result(event.detail)
            for event in self.events
            if event.what == OUTPUT
        }
        return {token: result["output"] for token, result in results.items() if result is not None}


def _items(ledger: Ledger, key: RunKey) -> list[ItemRecord]:
    """Return what the run began, under its own name and under its job's."""
    shared = [item for item in asked(ledger.items(key.job)) if item.run == str(key)]
    return [*asked(ledger.items(str(key))), *shared]


def _command_result(text: str | None) -> dict[str, Any] | None:
    """Return the result of a run if it is that of a command, which has said something."""
    result = None if text is None else json.loads(text)
    if isinstance(result, dict) and "exit_code" in result and isinstance(result["output"], str):
        return result
    return None


def _document(story: Story) -> dict[str, Any]:
    return public(story.run) | {
        "attempts": story.attempts,
        "events": [
            {
                "at": event.at,
                "what": event.what,
                "token": event.token or None,
                "holder": event.holder or None,
                "detail": event.detail or None,
            }
            for event in story.events
            if event.what != OUTPUT
        ],
        "counts": story.counts,
        "items": _by_state(story),
        "in_doubt": story.doubtful,
    }


def _by_state(story: Story) -> dict[str, int]:
    return {state.value: sum(item.state is state for item in story.items) for state in ItemState}


def _print(story: Story, args: argparse.Namespace, *, now: float) -> None:
    for name, value in _facts(story, now=now):
        if value:
            print(f"{name:<12}{plain(value)}")
    attempts = story.attempts
    events = [event for event in story.events if event.what != OUTPUT]
    for title, lines in (
        ("attempts", [_attempt(number, each) for number, each in enumerate(attempts, 1)]),
        ("events", [_event(event) for event in events]),
        ("in doubt", [f"{item}: begun, and nobody knows if done" for item in story.doubtful]),
    ):
        if lines:
            print("\n" + bold(f"{title}:", args))
        for line in lines:
            print(f"  {plain(line)}")
    several = len(attempts) > 1
    for number, attempt in enumerate(attempts, 1):
        if attempt["output"]:
            of_attempt = f" of attempt {number}" if several else ""
            print("\n" + bold(f"output{of_attempt}:", args))
            print(block(attempt["output"]))


def _facts(story: Story, *, now: float) -> list[tuple[str, str]]:
    run = story.run
    because = f" ({run.reason})" if run.reason else ""
    progress = "" if run.done is None else str(run.done)
    if run.done is not None and run.total is not None:
        progress += f" of {run.total}"
    result = None if _command_result(run.result) else run.result
    took = shown(max(0.0, (run.ended_at or now) - run.started_at)) if run.started_at else ""
    items = ", ".join(f"{count} {state}" for state, count in _by_state(story).items() if count)
    return [
        ("run", str(run.key)),
        ("state", run.state.value + because),
        ("error", run.error or ""),
        ("blocked by", run.blocker),
        ("trigger", run.trigger),
        ("created", when(run.created_at, now=now)),
        ("started", when(run.started_at, now=now)),
        ("ended", when(run.ended_at, now=now)),
        ("took", took),
        ("next try", when(run.not_before, now=now)),
        ("cancel", when(run.cancel_at, now=now)),
        ("attempt", _tries(run) if run.starts else ""),
        ("holder", str(run.holder) if run.holder.host else ""),
        ("token", str(run.token) if run.token else ""),
        ("progress", progress),
        ("checkpoint", run.checkpoint or ""),
        ("result", result or ""),
        ("counts", ", ".join(f"{name}={count}" for name, count in story.counts.items())),
        ("items", items),
    ]


def _tries(run: RunRecord) -> str:
    losses = f", {run.losses} lost" if run.losses else ""
    releases = f", {run.releases} given back" if run.releases else ""
    return f"{run.attempt} ({run.starts} started{losses}{releases})"


def _attempt(number: int, attempt: dict[str, Any]) -> str:
    how = attempt["ended"] or "under way"
    by = f" by {attempt['holder']}" if attempt["holder"] else ""
    error = f": {attempt['error']}" if attempt["error"] else ""
    return f"{number}. token {attempt['token']}{by}, {how}{error}"


def _event(event: RunEvent) -> str:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event.at))
    token = f" token={event.token}" if event.token else ""
    holder = f" holder={event.holder!r}" if event.holder else ""
    return f"{at} {event.what}{token}{holder} {event.detail}"
