"""The object store keeps every promise of safety in storms, where all clocks are in play."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from fencepost.stores import objects, objects_expiry
from fencepost.testing.checker import check, relevant
from fencepost.testing.history import Event, table
from fencepost.testing.simulator import faults
from fencepost.testing.simulator.buckets import BUCKET
from fencepost.testing.simulator.cluster import simulate

SEEDS = int(os.environ.get("FENCEPOST_SEEDS", "2000")) // 8
# Wall clocks that almost agree: where stamps are believed, and where it is a near thing.
ALMOST = faults.ALL._replace(skew_hours=0.0012, wall_steps=4.0, crashes=4.0)
CLOCKS = {"far apart": faults.ALL, "almost right": ALMOST}


def unsafe(history: list[Event]) -> str:
    """Say which promise is broken, but for progress: who waits here looks once a second."""
    return "".join(
        f"{broken}\n{table(relevant(history, broken))}"
        for broken in [found for found in check(history) if found.rule != "progress"][:1]
    )


@pytest.mark.parametrize("clocks", CLOCKS)
def test_no_seed_breaks_a_promise(clocks: str) -> None:
    for seed in range(SEEDS):
        found = unsafe(simulate(seed, parts=BUCKET, faults=CLOCKS[clocks]))
        assert not found, f"seed {seed}: {found}"


def test_without_faults_everybody_is_served() -> None:
    for seed in range(50):
        assert not check(simulate(seed, parts=BUCKET, faults=faults.NONE))


def test_every_kind_of_event_is_seen() -> None:
    seen = Counter(event.what for seed in range(100) for event in simulate(seed, parts=BUCKET))
    assert {"granted", "renewed", "released", "broken", "acted", "lost", "refused"} <= set(seen)


def taken_by_stamps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    believed: list[bool] = []

    def noted(*args: object, **kwargs: object) -> bool:
        over = objects_expiry.over_by_stamps(*args, **kwargs)  # type: ignore[arg-type]
        believed.append(over)
        return over

    monkeypatch.setattr(objects, "over_by_stamps", noted)
    return believed


def test_stamps_are_believed_in_some_storms_and_denied_in_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    believed = taken_by_stamps(monkeypatch)
    for seed in range(SEEDS):
        simulate(seed, parts=BUCKET, faults=ALMOST)
    assert sum(believed) >= 3
    assert believed.count(False) >= 3


@pytest.mark.parametrize(
    ("part", "replacement"),
    [
        ("patience", lambda ttl: ttl * 0.8),
        ("over_by_stamps", lambda *_, **__: True),
    ],
)
def test_a_watcher_in_a_hurry_is_caught(
    part: str, replacement: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, part, replacement)
    monkeypatch.setattr(objects, "worth_a_stamp", lambda *_, **__: part == "over_by_stamps")
    assert any(
        broken.rule == "one holder"
        for seed in range(200)
        for broken in check(simulate(seed, parts=BUCKET))
    )
