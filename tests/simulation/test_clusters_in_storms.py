"""Production instances keep every promise about schedules, whatever the seed does to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from planted_clusters import UNADOPTED

from fencepost.testing.checker import relevant
from fencepost.testing.cluster_checker import check_cluster
from fencepost.testing.history import Event, from_lines, table, to_lines
from fencepost.testing.simulator import serving
from fencepost.testing.simulator.deploys import simulate_deploys
from fencepost.testing.simulator.faults import NONE, Faults
from fencepost.testing.simulator.serving import STOPPED, simulate_clusters

if TYPE_CHECKING:
    from collections.abc import Callable

# `FENCEPOST_SEEDS=10000 pytest tests/simulation` for the long run.
SEEDS = int(os.environ.get("FENCEPOST_SEEDS", "2000"))
COMMAND = [sys.executable, "-c", "from fencepost.cli.main import main; raise SystemExit(main())"]
PLANNERS = {"memory": serving.MEMORY, "sqlite": serving.SQLITE}
SIMULATIONS: dict[str, Callable[..., list[Event]]] = {
    "clusters": simulate_clusters,
    "deploys": simulate_deploys,
}
# Nothing but replies that never come: every request has been carried out.
UNHEARD = Faults(lost_replies=0.03)


def explained(seed: int, history: list[Event]) -> str:
    """Say what is wrong with a history, or nothing."""
    return "".join(
        f"seed {seed}: {violation}\n{table(relevant(history, violation))}"
        for violation in check_cluster(history)[:1]
    )


@pytest.mark.parametrize(
    ("of", "store", "seeds"),
    [
        ("clusters", "memory", SEEDS // 8),
        ("clusters", "sqlite", SEEDS // 100),
        ("deploys", "memory", SEEDS // 8),
        ("deploys", "sqlite", SEEDS // 100),
    ],
)
def test_no_seed_breaks_a_promise_about_a_schedule(of: str, store: str, seeds: int) -> None:
    run = subprocess.run(
        [*COMMAND, "simulate", "--of", of, "--seeds", str(seeds), "--store", store],
        capture_output=True,
        check=False,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(f"{seeds} seeds of {of}: 0 violations, ")


@pytest.mark.parametrize("of", SIMULATIONS)
@pytest.mark.parametrize("store", PLANNERS)
def test_the_same_seed_gives_the_same_cluster_to_the_byte(of: str, store: str) -> None:
    words = f"simulate --of {of} --first 7 --seeds 3 --store {store} --history --json"
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


@pytest.mark.parametrize("of", SIMULATIONS)
def test_different_seeds_give_different_clusters(of: str) -> None:
    assert len({"\n".join(to_lines(SIMULATIONS[of](seed))) for seed in range(20)}) == 20


def test_a_history_of_a_cluster_can_be_read_back_and_checked_again() -> None:
    history = simulate_clusters(3)
    assert from_lines(to_lines(history)) == history


def test_everything_that_can_happen_to_a_cluster_happens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(150):
        for event in simulate_clusters(seed):
            seen[event.what] += 1
            if event.what in ("settled", "became", "span"):
                seen[f"{event.what} {event.state}"] += 1
            if event.what == "planned":
                seen[f"planned {event.detail}"] += 1
            if event.what == "span":
                seen[event.detail] += 1
    wanted = """
        adopted asked away back beat calm claimed counted_lost crashed deployed heard lane ordered
        paused pausing
        released resuming stale started stepped stopping
        planned-schedule planned-catchup planned-owed planned-backfill
        settled-succeeded settled-failed settled-waiting_retry settled-pending settled-cancelled
        became-pending became-failed became-skipped became-missed
        coalesced limit window start_deadline paused schedule_changed
    """
    assert {what for what in wanted.split() if not seen[what.replace("-", " ")]} == set()


def test_without_faults_no_attempt_is_lost_that_was_not_killed() -> None:
    for seed in range(40):
        history = simulate_clusters(seed, faults=NONE)
        assert not explained(seed, history)
        assert unbegun(history) == []


def test_what_was_granted_by_an_answer_that_got_lost_is_begun_all_the_same() -> None:
    for seed in range(100):
        assert unbegun(simulate_clusters(seed, faults=UNHEARD)) == [], seed


def test_a_planner_that_never_adopts_what_it_granted_is_caught() -> None:
    assert any(
        unbegun(simulate_clusters(seed, parts=UNADOPTED, faults=UNHEARD)) for seed in range(100)
    )


def unbegun(history: list[Event]) -> list[Event]:
    """Return the claims that nobody began, though their process was not killed."""
    killed = {
        event.node
        for event in history
        if (event.what == "crashed" and event.detail != STOPPED) or event.what == "gave up"
    }
    began = {event.token for event in history if event.what == "began"}
    return [
        event
        for event in history
        if event.what == "claimed" and event.token not in began and event.node not in killed
    ]


def test_what_the_clocks_of_instances_show_changes_nothing() -> None:
    # The same storm, with clocks that are right and with clocks that are minutes off.
    right = Faults(lost_replies=0.05, delays=0.05, pauses=1.0)
    wrong = right._replace(skew_hours=1 / 6, wall_steps=2.0)
    for seed in range(20):
        one, other = (
            [event for event in simulate_clusters(seed, faults=knobs) if event.what != "stepped"]
            for knobs in (right, wrong._replace(wall_steps=0.0))
        )
        assert one == other
        assert not explained(seed, simulate_clusters(seed, faults=wrong))


def test_both_planners_do_the_same_in_the_same_storm() -> None:
    # Without crashes: the store in memory notices them at once, and the other one at the end.
    quiet = serving.FAULTS._replace(crashes=0.0, deaths_noticed=False)
    for seed in range(6):
        memory, sqlite = (
            [
                (event.what, event.node, event.name, event.run, event.state)
                for event in simulate_clusters(seed, parts=parts, faults=quiet)
                if event.what in ("planned", "span", "row")
            ]
            for parts in PLANNERS.values()
        )
        assert memory == sqlite


def test_a_run_that_waited_when_its_job_became_an_orphan_was_missed_for_that() -> None:
    for seed in (1957, 2351):
        assert not explained(seed, simulate_clusters(seed))
