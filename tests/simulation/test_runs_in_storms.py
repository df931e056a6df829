"""Production flows and ledgers keep every promise about runs, whatever the seed does to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fencepost.testing.checker import relevant
from fencepost.testing.history import Event, from_lines, table, to_lines
from fencepost.testing.run_checker import check_runs
from fencepost.testing.simulator import faults, runs
from fencepost.testing.simulator.runs import simulate_callers, simulate_race, simulate_runs

if TYPE_CHECKING:
    from collections.abc import Callable

# `FENCEPOST_SEEDS=10000 pytest tests/simulation` for the long run.
SEEDS = int(os.environ.get("FENCEPOST_SEEDS", "2000"))
COMMAND = [sys.executable, "-c", "from fencepost.cli.main import main; raise SystemExit(main())"]
LEDGERS = {"memory": runs.MEMORY, "sqlite": runs.SQLITE}
SIMULATIONS: dict[str, Callable[..., list[Event]]] = {
    "runs": simulate_runs,
    "races": simulate_race,
    "callers": simulate_callers,
}


def explained(seed: int, history: list[Event]) -> str:
    """Say what is wrong with a history, or nothing."""
    return "".join(
        f"seed {seed}: {violation}\n{table(relevant(history, violation))}"
        for violation in check_runs(history)[:1]
    )


@pytest.mark.parametrize(
    ("of", "store", "seeds"),
    [
        ("runs", "memory", SEEDS // 4),
        ("runs", "sqlite", SEEDS // 40),
        ("races", "memory", SEEDS // 4),
        ("races", "sqlite", SEEDS // 40),
        ("callers", "memory", SEEDS // 4),
        ("callers", "sqlite", SEEDS // 40),
    ],
)
def test_no_seed_breaks_a_promise_about_a_run(of: str, store: str, seeds: int) -> None:
    run = subprocess.run(
        [*COMMAND, "simulate", "--of", of, "--seeds", str(seeds), "--store", store],
        capture_output=True,
        check=False,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(f"{seeds} seeds of {of}: 0 violations, ")


def test_no_seed_of_runs_that_once_failed_fails_again() -> None:
    for line in (Path(__file__).parent / "seeds_of_runs.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            seed, of, store, _ = line.split(maxsplit=3)
            history = SIMULATIONS[of](int(seed), parts=LEDGERS[store])
            assert not explained(int(seed), history)


@pytest.mark.parametrize("of", SIMULATIONS)
@pytest.mark.parametrize("store", LEDGERS)
def test_the_same_seed_gives_the_same_runs_to_the_byte(of: str, store: str) -> None:
    words = f"simulate --of {of} --first 7 --seeds 9 --store {store} --history --json"
    once, again = (
        subprocess.run(
            [*COMMAND, *words.split()],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    )
    assert once == again
    assert once.count(b"\n") > 200


def test_different_seeds_give_different_runs() -> None:
    assert len({"\n".join(to_lines(simulate_runs(seed))) for seed in range(20)}) == 20


def test_both_ledgers_answer_alike_in_the_same_storm() -> None:
    # Without crashes: the store in memory notices them at once, and the other one at the end.
    # Without steps of the clock: only one of them has its tokens from a count alone, and the other
    # one believes a step only after a silence.
    quiet = runs.FAULTS._replace(crashes=0.0, wall_steps=0.0)
    for seed in range(10):
        memory, sqlite = (
            [
                (event.what, event.node, event.run, event.state, event.number)
                for event in simulate_runs(seed, parts=parts, faults=quiet)
            ]
            for parts in LEDGERS.values()
        )
        assert memory == sqlite


def test_a_history_of_runs_can_be_read_back_and_checked_again() -> None:
    history = simulate_runs(3)
    assert from_lines(to_lines(history)) == history


def test_everything_that_can_happen_to_a_run_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(250):
        for event in simulate_runs(seed):
            known = event.what in ("became", "settled", "outcome")
            seen[f"{event.what} {event.state}" if known else event.what] += 1
    wanted = """
        adopted asked beat began broken claimed crashed effect item_begun item_ended left
        lost paused reclaimed refused released saved stale stepped wrote
        became-cancelled became-failed became-missed became-pending became-skipped
        settled-cancelled settled-failed settled-pending settled-skipped settled-succeeded
        settled-timed_out settled-waiting_retry
        outcome-OutcomeUnknown outcome-StoreUnavailable outcome-already_done outcome-cancelled
        outcome-failed outcome-interrupted outcome-lost outcome-skipped outcome-succeeded
        outcome-timed_out
    """
    assert {what for what in wanted.split() if not seen[what.replace("-", " ")]} == set()


def test_a_run_that_is_cancelled_while_it_succeeds_ends_both_ways() -> None:
    ends = Counter(
        event.state for seed in range(300) for event in simulate_race(seed) if event.what == "row"
    )
    assert min(ends["cancelled"], ends["succeeded"]) >= 30


def test_without_faults_no_attempt_is_lost_unless_an_operator_takes_it() -> None:
    for seed in range(60):
        history = simulate_runs(seed, faults=faults.NONE)
        assert not explained(seed, history)
        broken = {event.name for event in history if event.what == "broken"}
        assert {event.name for event in history if event.what == "lost"} <= broken


def test_what_the_clocks_of_processes_show_changes_nothing() -> None:
    # The same storm, with clocks that are right and with clocks that are hours off.
    right = faults.Faults(lost_replies=0.05, delays=0.05)
    wrong = right._replace(skew_hours=4.0)
    for seed in range(40):
        one, other = (simulate_runs(seed, faults=knobs) for knobs in (right, wrong))
        assert [event[1:] for event in one] == [event[1:] for event in other]
