"""The checker of runs: what it accepts, and what it finds, on histories of a few lines."""

from __future__ import annotations

import pytest

from fencepost.testing.history import Event
from fencepost.testing.run_checker import check_runs

RUN = "job@2026-01-01T00:00:00Z"
ITEM = f"{RUN}/i0"
POLICY = "overlap=skip limit=2 on_loss=resume in_doubt=report attempts=2 scope=slot items=1"


def happens(at: float, what: str, token: int = 0, **more: object) -> Event:
    """Return an event of the run, by the holder that goes with the token."""
    fields = {"run": RUN, "holder": f"n{token}" if token else "", **more}
    return Event(at, what, token=token, **fields)  # type: ignore[arg-type]


def declared(words: str = POLICY) -> Event:
    return Event(0.0, "declared", name="job", detail=words)


def claimed(at: float, token: int, number: int, **more: object) -> Event:
    lease = {"name": "job", "until": at + 10, "state": "running", "node": "a.1", **more}
    return happens(at, "claimed", token, number=number, **lease)


def succeeded(at: float, token: int, number: int) -> list[Event]:
    return [
        happens(at, "left", token, detail="returned"),
        happens(at, "settled", token, state="succeeded", number=number),
        happens(at, "released", token, name="job", run=""),
    ]


def effect(at: float, token: int) -> list[Event]:
    return [
        happens(at, "item_begun", token, name=ITEM, state="first"),
        happens(at, "effect", token, name=ITEM),
        happens(at, "item_ended", token, name=ITEM, state="done"),
    ]


def row(state: str, number: int, at: float = 90.0) -> Event:
    return happens(at, "row", state=state, number=number)


DONE = happens(90.0, "item", name=ITEM, state="done")
USUAL = [
    declared(),
    happens(0.0, "due"),
    Event(0.0, "triggered", "a.1", holder="a.1/1", run=RUN),
    claimed(1.0, 5, 1),
    happens(1.1, "began", 5),
    *effect(2.0, 5),
    happens(2.5, "saved", 5, number=1),
    *succeeded(3.0, 5, 1),
    Event(3.1, "outcome", "a.1", holder="a.1/1", run=RUN, state="succeeded"),
    row("succeeded", 1),
    DONE,
]

UNASKED = [one for one in USUAL if one.what not in ("triggered", "outcome")]


def rules(history: list[Event]) -> set[str]:
    return {violation.rule for violation in check_runs(history)}


def test_a_run_as_it_should_be_breaks_nothing() -> None:
    assert check_runs(USUAL) == []


def test_a_take_over_after_the_lease_has_run_out_breaks_nothing() -> None:
    later = [claimed(12.0, 6, 2), happens(12.0, "began", 6, number=1), *succeeded(13.0, 6, 2)]
    history = [*UNASKED[:8], *later, row("succeeded", 2), DONE]
    assert rules(history) == set()


BROKEN = {
    "a terminal state changes": (
        "lives",
        [*USUAL[:-2], happens(4.0, "became", state="cancelled", number=1)],
    ),
    "the record says something else in the end": ("lives", [*USUAL[:-2], row("failed", 1), DONE]),
    "a run has two records": ("one row", [*USUAL, row("succeeded", 1)]),
    "an older token is accepted": (
        "newest wins",
        [*USUAL[:5], claimed(12.0, 6, 2), happens(13.0, "saved", 5)],
    ),
    "a rightful write is refused": (
        "newest wins",
        [*USUAL[:5], happens(2.0, "stale", 5, detail="save")],
    ),
    "a claim does not raise the token": (
        "tokens grow",
        [*USUAL[:5], claimed(12.0, 5, 2, holder="n6")],
    ),
    "two hold the lock at once": ("one holder", [*USUAL[:5], claimed(2.0, 6, 2, node="b.1")]),
    "a start was not counted": ("counted", [*USUAL[:3], claimed(1.0, 5, 0)]),
    "user code began without a claim": ("counted", [*USUAL[:3], happens(1.0, "began", 5)]),
    "one request is granted twice": (
        "counted",
        [*USUAL[:5], claimed(12.0, 6, 2, holder="n5", node="a.1")],
    ),
    "a lost run is resumed against its policy": (
        "on loss",
        [declared(POLICY.replace("resume", "fail")), *USUAL[1:5], claimed(12.0, 6, 2)],
    ),
    "who was ordered to stop is counted as lost": (
        "ordered",
        [
            *USUAL[:5],
            happens(2.0, "ordered", 5),
            happens(12.0, "counted_lost", 5),
            claimed(12.0, 6, 2),
        ],
    ),
    "there are more than the permits": ("limit", [*USUAL[:3], claimed(1.0, 5, 1, name="job#3")]),
    "it succeeded, but its body did not": (
        "true end",
        [happens(2.9, "left", 5, detail="failed") if one.what == "left" else one for one in USUAL],
    ),
    "an effect happens again": ("items", [*USUAL[:8], *effect(2.2, 5), *USUAL[8:]]),
    "what happened is not on record": ("items", USUAL[:-1]),
    "what is done never happened": ("items", [one for one in USUAL if one.what != "effect"]),
    "a checkpoint goes back": (
        "checkpoint",
        [*USUAL[:9], happens(2.6, "saved", 5, number=0), *USUAL[9:]],
    ),
    "an attempt begins before the checkpoint": (
        "checkpoint",
        [*USUAL[:9], claimed(12.0, 6, 2), happens(12.1, "began", 6, number=0)],
    ),
    "a trigger is never answered": ("answers", [one for one in USUAL if one.what != "outcome"]),
    "a trigger is answered with what is not so": (
        "answers",
        [one._replace(state="failed") if one.what == "outcome" else one for one in USUAL],
    ),
    "a slot has not ended": ("progress", [*USUAL[:-2], row("running", 1), DONE]),
    "a row is missing": (
        "rows",
        [declared(POLICY.replace("items=1", "items=2")), *USUAL[1:]],
    ),
}


@pytest.mark.parametrize(("rule", "history"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_promise_is_found(rule: str, history: list[Event]) -> None:
    assert rule in rules(history)


def test_whoever_crashed_is_owed_no_answer() -> None:
    history = [one for one in USUAL if one.what != "outcome"]
    assert rules([*history, Event(91.0, "crashed", "a.1")]) == set()


def test_an_effect_may_happen_again_where_the_policy_says_so() -> None:
    repeat = declared(POLICY.replace("report", "repeat"))
    again = [claimed(12.0, 6, 2), happens(12.0, "began", 6), *effect(12.5, 6)]
    history = [repeat, *UNASKED[1:7], *again, *succeeded(13.0, 6, 2), row("succeeded", 2), DONE]
    assert rules(history) == set()
