"""A simulator that finds nothing proves nothing: here is what it must find, and how soon."""

from __future__ import annotations

import pytest
from planted import PLANTED
from planted_clusters import PLANTED as PLANTED_IN_CLUSTERS
from planted_runs import PLANTED as PLANTED_IN_RUNS, BelievesCallers, served_by

from fencepost.flows import keep
from fencepost.ledger import registering
from fencepost.model import lease
from fencepost.testing.checker import check
from fencepost.testing.cluster_checker import check_cluster
from fencepost.testing.run_checker import check_runs
from fencepost.testing.simulator.cluster import Parts, simulate
from fencepost.testing.simulator.deploys import simulate_deploys
from fencepost.testing.simulator.runs import (
    RunParts,
    simulate_callers,
    simulate_race,
    simulate_runs,
)
from fencepost.testing.simulator.serving import ServingParts, simulate_clusters

WITHIN = 1000


@pytest.mark.parametrize(("rule", "parts"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_bug_is_caught(rule: str, parts: Parts) -> None:
    assert caught(rule, parts) is not None


@pytest.mark.parametrize(("rule", "parts"), PLANTED_IN_RUNS.values(), ids=PLANTED_IN_RUNS.keys())
def test_a_bug_that_is_planted_in_a_ledger_is_caught(rule: str, parts: RunParts) -> None:
    assert any(
        violation.rule == rule
        for seed in range(WITHIN)
        for violation in check_runs(simulate_runs(seed, parts=parts))
    )


@pytest.mark.parametrize(
    ("rule", "parts"), PLANTED_IN_CLUSTERS.values(), ids=PLANTED_IN_CLUSTERS.keys()
)
def test_a_bug_that_is_planted_in_a_planner_is_caught(rule: str, parts: ServingParts) -> None:
    assert any(
        violation.rule == rule
        for seed in range(WITHIN)
        for violation in check_cluster(simulate_clusters(seed, parts=parts))
    )


def test_a_cluster_that_takes_an_outage_for_the_end_of_a_version_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registering, "_QUIET", float("inf"))
    assert any(
        violation.rule == "one version"
        for seed in range(WITHIN)
        for violation in check_cluster(simulate_deploys(seed))
    )


def test_a_success_that_overwrites_cancelled_is_caught_where_both_race() -> None:
    _, parts = PLANTED_IN_RUNS["a late success overwrites cancelled"]
    assert any(
        violation.rule == "lives"
        for seed in range(WITHIN)
        for violation in check_runs(simulate_race(seed, parts=parts))
    )


def test_a_ledger_that_believes_the_clock_of_a_caller_is_caught() -> None:
    assert any(
        violation.rule == "due"
        for seed in range(WITHIN)
        for violation in check_runs(simulate_callers(seed, parts=served_by(BelievesCallers)))
    )


@pytest.mark.parametrize("constant", ["MARGIN", "DRIFT"])
def test_a_holder_that_allows_for_nothing_is_caught(
    constant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, constant, 0.0)
    assert caught("proof", Parts()) is not None


def test_a_holder_that_counts_from_the_reply_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    confirm = keep.Hold.confirm

    def confirm_late(hold: keep.Hold, sent: float, *, ttl: float) -> None:
        confirm(hold, sent + 0.1, ttl=ttl)  # about as long as a slow reply takes

    monkeypatch.setattr(keep.Hold, "confirm", confirm_late)
    assert caught("proof", Parts()) is not None


def caught(rule: str, parts: Parts) -> int | None:
    """Return the first seed that breaks the promise."""
    for seed in range(WITHIN):
        if any(violation.rule == rule for violation in check(simulate(seed, parts=parts))):
            return seed
    return None
