"""Production flows and stores keep every promise, whatever the seed does to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fencepost.testing.checker import check, relevant
from fencepost.testing.history import Event, table, to_lines
from fencepost.testing.simulator import faults
from fencepost.testing.simulator.cluster import MEMORY, SQLITE, simulate

# `FENCEPOST_SEEDS=10000 pytest tests/simulation` for the long run.
SEEDS = int(os.environ.get("FENCEPOST_SEEDS", "2000"))
COMMAND = [sys.executable, "-c", "from fencepost.cli.main import main; raise SystemExit(main())"]
STORES = {"memory": MEMORY, "sqlite": SQLITE}


def explained(seed: int, history: list[Event]) -> str:
    """Say what is wrong with a history, or nothing."""
    return "".join(
        f"seed {seed}: {violation}\n{table(relevant(history, violation))}"
        for violation in check(history)[:1]
    )


@pytest.mark.parametrize(("store", "seeds"), [("memory", SEEDS), ("sqlite", SEEDS // 8)])
def test_no_seed_breaks_a_promise(store: str, seeds: int) -> None:
    run = subprocess.run(
        [*COMMAND, "simulate", "--of", "leases", "--seeds", str(seeds), "--store", store],
        capture_output=True,
        check=False,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith(f"{seeds} seeds of leases: 0 violations, ")


def test_what_is_found_does_not_depend_on_how_many_look_for_it() -> None:
    alone, together = (
        json.loads(
            subprocess.run(
                [*COMMAND, "simulate", "--seeds", "120", "--json", "--jobs", jobs],
                capture_output=True,
                check=True,
            ).stdout
        )
        for jobs in ("1", "3")
    )
    assert {**alone, "seconds": 0} == {**together, "seconds": 0}


def test_no_seed_that_once_failed_fails_again() -> None:
    for line in (Path(__file__).parent / "seeds.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            seed, store, _ = line.split(maxsplit=2)
            assert not explained(int(seed), simulate(int(seed), parts=STORES[store]))


@pytest.mark.parametrize("store", STORES)
def test_the_same_seed_gives_the_same_history_to_the_byte(store: str) -> None:
    once, again = (
        subprocess.run(
            [
                *COMMAND,
                "simulate",
                *f"--of leases --first 7 --seeds 9 --store {store} --history --json".split(),
            ],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    )
    assert once == again
    assert once.count(b"\n") > 500


def test_different_seeds_give_different_histories() -> None:
    assert len({"\n".join(to_lines(simulate(seed))) for seed in range(20)}) == 20


def test_both_stores_answer_alike_in_the_same_storm() -> None:
    # Without crashes: the store in memory notices them at once, and the other one at the end.
    quiet = faults.ALL._replace(crashes=0.0)
    for seed in range(10):
        memory, sqlite = (
            [
                (event.what, event.node, event.name)
                for event in simulate(seed, parts=parts, faults=quiet)
            ]
            for parts in STORES.values()
        )
        assert memory == sqlite


def test_every_fault_happens_and_every_kind_of_event_is_seen() -> None:
    seen = Counter(event.what for seed in range(100) for event in simulate(seed))
    usual = "granted renewed released acted admitted wanted started calm ended"
    rare = "broken deleted crashed paused away back stepped lost cancelled reclaimed refused"
    assert sorted(seen) == sorted(f"{usual} {rare}".split())
    assert min(seen.values()) >= 5


def test_without_faults_nothing_is_lost_but_what_max_hold_ends() -> None:
    for seed in range(30):
        history = simulate(seed, faults=faults.NONE)
        assert not explained(seed, history)
        lost = {event.detail for event in history if event.what == "lost"}
        assert lost <= {"max_hold is used up"}


def test_a_grant_that_nobody_waits_for_any_more_is_given_back_at_once() -> None:
    given_back = 0
    only_cancellations = faults.Faults(cancellations=0.5)
    for seed in range(50):
        held, cancelled, ghosts = set(), set(), dict[str, float]()
        for event in simulate(seed, faults=only_cancellations):
            late = [nonce for nonce, at in ghosts.items() if event.at - at > 0.2]
            assert not late, f"seed {seed}: {late} still there at {event.at}"
            if event.what == "cancelled":
                cancelled.add(event.holder)
            elif event.what == "granted":
                held.add(event.holder)
            elif event.what == "released":
                held.discard(event.holder)
                given_back += ghosts.pop(event.holder, None) is not None
            if event.holder in held & cancelled:
                ghosts.setdefault(event.holder, event.at)
    assert given_back >= 10


def test_a_crashed_holder_is_followed_before_its_lease_ends_where_deaths_are_noticed() -> None:
    early = 0
    only_crashes = faults.Faults(crashes=4.0, deaths_noticed=True)
    for seed in range(60):
        crashed, until = set(), dict[str, tuple[str, float]]()
        for event in simulate(seed, faults=only_crashes):
            if event.what == "crashed":
                crashed.add(event.node)
            elif event.what in ("granted", "renewed"):
                node, end = until.get(event.name, ("", 0.0))
                early += event.at < end and node in crashed and node != event.node
                until[event.name] = (event.node, event.until)
            elif event.what == "released":
                until.pop(event.name, None)
    assert early >= 10
