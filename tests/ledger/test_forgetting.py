"""What goes with an old run, what stays for ever, and that neither brings an effect back."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from ledgerlab import DONE, StillClocks, attempt_of, claimed, opened, run_through, wanted
from oldlab import FIRST, PLACES, Place, locked, pruned, tick, waits

from fencepost.cli.verify import gathered
from fencepost.errors import StoreUnavailable
from fencepost.ledger import draft_retention, sqlite_planner
from fencepost.ledger.draft_desk import DraftDesk
from fencepost.ledger.planning import Ask, Lane
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS, at_once, forgotten
from fencepost.model.claim import Verdict
from fencepost.model.ending import Settled
from fencepost.model.item import Found, ItemState
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish
from joinlab import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fencepost.ledger.api import Attempt, Ledger
    from fencepost.ledger.planning import Asked
    from fencepost.model.claim import Want

FAILED = Settled(State.FAILED, "error", error="Oops")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = PLACES[request.param](tmp_path)
    with closing(place):
        yield place


def have(ledger: Ledger, attempt: Attempt, scope: str, *items: str) -> None:
    """Have effects, each recorded as done."""
    begun = finish(ledger.begin(attempt, scope=scope, items=items, call="c", repeat=False))
    assert all(found is Found.FIRST for found in begun), begun
    ends = [(item, ItemState.DONE, None) for item in items]
    finish(ledger.end(attempt, scope=scope, items=ends, call="c"))


def items(ledger: Ledger, scope: str) -> list[tuple[str, ItemState]]:
    return [(item.item, item.state) for item in finish(ledger.items(scope))]


def made_up(ledger: Ledger, lane: Lane) -> list[tuple[RunKey, int]]:
    """Make a lane up; return the runs that it began, and by which run their items are known."""
    finish(ledger.planner.backfill(lane))

    def want(asked: Asked) -> Want:
        return wanted(asked.key, asked.nonce)._replace(trigger=asked.trigger, patient=True)

    runs: list[tuple[RunKey, int]] = []
    while finish(ledger.planner.lanes()):
        ask = Ask(want, f"ask {len(runs)}", 10, sweep=True, only="old")
        for begun in finish(ledger.planner.tick(ask)).begun:
            run = finish(ledger.finish(attempt_of(begun.claimed), DONE))
            if lane.start <= run.key.slot < lane.until:
                runs.append((run.key, begun.rerun))
    return runs


# Items.


def test_items_of_a_slot_go_with_its_runs_but_not_those_of_the_job_nor_what_is_in_doubt(
    place: Place,
) -> None:
    place.announce()
    key = RunKey("old", FIRST)
    attempt = claimed(place.ledger, key, "first")
    have(place.ledger, attempt, str(key), "mail", "bill")
    have(place.ledger, attempt, "old", "welcome")
    finish(place.ledger.begin(attempt, scope=str(key), items=["doubt"], call="c", repeat=False))
    finish(place.ledger.finish(attempt, DONE))
    young = RunKey("old", FIRST + 60 * KEPT_RUNS)
    place.age(after=FIRST)
    another = claimed(place.ledger, young._replace(manual=1), "young")
    have(place.ledger, another, str(another.key), "mail")
    finish(place.ledger.finish(another, DONE))
    pruned(place.ledger)
    assert finish(place.ledger.find(key)) is None
    assert items(place.ledger, str(key)) == [("doubt", ItemState.BEGUN)]
    assert items(place.ledger, "old") == [("welcome", ItemState.DONE)]
    assert items(place.ledger, str(another.key)) == [("mail", ItemState.DONE)]


def test_a_slot_that_has_more_items_than_go_at_once_loses_them_in_parts(place: Place) -> None:
    place.announce()
    keys = [RunKey("old", FIRST), RunKey("old", FIRST + 60)]
    for key in keys:
        attempt = claimed(place.ledger, key, str(key))
        have(place.ledger, attempt, str(key), *(f"{number:02}" for number in range(25)))
        finish(place.ledger.finish(attempt, DONE))
    place.age(after=FIRST + 60)
    assert finish(place.ledger.planner.prune(most=10)) >= 10
    assert finish(place.ledger.find(keys[0])) is None
    assert finish(place.ledger.find(keys[1])) is not None
    assert len(items(place.ledger, str(keys[1]))) == 25
    for _ in range(10):
        finish(place.ledger.planner.prune(most=10))
    assert finish(place.ledger.planner.prune(most=10)) == 0
    assert [items(place.ledger, str(key)) for key in keys] == [[], []]


def much_long_ago(place: Place) -> RunKey:
    """Have a slot that has more items than one prune deletes become old."""
    place.announce()
    key = RunKey("old", FIRST)
    attempt = claimed(place.ledger, key, "first")
    have(place.ledger, attempt, str(key), *(f"{number:02}" for number in range(25)))
    finish(place.ledger.finish(attempt, DONE))
    place.age(after=FIRST)
    return key


def test_another_process_deletes_the_items_that_the_first_had_yet_to_delete(place: Place) -> None:
    key = much_long_ago(place)
    finish(place.ledger.planner.prune(most=10))
    assert finish(place.ledger.find(key)) is None
    other = place.another()
    pruned(other, most=10)
    assert items(other, str(key)) == items(other, "") == []


def test_items_of_a_run_that_is_there_again_stay_until_that_is_forgotten(place: Place) -> None:
    """A run of its own may have the number, and so the items, of one that was forgotten."""
    place.announce()
    key = RunKey("old", FIRST, manual=1)
    first = claimed(place.ledger, key, "first")
    have(place.ledger, first, str(key), *(f"{number:02}" for number in range(25)))
    finish(place.ledger.finish(first, DONE))
    place.age(after=FIRST)
    finish(place.ledger.planner.prune(most=10))
    again = claimed(place.ledger, key, "again")
    have(place.ledger, again, str(key), "new")
    pruned(place.ledger, most=10)
    assert ("new", ItemState.DONE) in items(place.ledger, str(key))
    finish(place.ledger.finish(again, DONE))
    place.clocks.advance(2 * KEPT_FOR)
    pruned(place.ledger, most=10)
    assert items(place.ledger, str(key)) == items(place.ledger, "") == []


@pytest.mark.parametrize("kind", ["postgres", "mariadb", "mysql"])
def test_a_prune_whose_commit_failed_is_made_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreUnavailable("the ledger is away")

    with closing(PLACES[kind](tmp_path)) as place:
        key = much_long_ago(place)
        with monkeypatch.context() as patch:
            patch.setattr(type(place.ledger), "transacted", away)
            with pytest.raises(StoreUnavailable):
                finish(place.ledger.planner.prune(most=10))
        pruned(place.ledger, most=10)
        assert finish(place.ledger.find(key)) is None
        assert items(place.ledger, str(key)) == []


def test_a_run_that_failed_stays_as_long_as_it_may_be_repeated_and_so_do_its_items(
    place: Place,
) -> None:
    place.announce()
    key = RunKey("old", FIRST)
    attempt = claimed(place.ledger, key, "first")
    have(place.ledger, attempt, str(key), "mail")
    finish(place.ledger.finish(attempt, FAILED))
    run_through(place.ledger, RunKey("old", FIRST + 60), "later")
    place.age(after=FIRST + 60)
    assert pruned(place.ledger) == 1  # the later one, whose slot is above
    assert items(place.ledger, str(key)) == [("mail", ItemState.DONE)]
    repeats = made_up(place.ledger, Lane(0, "old", FIRST, FIRST + 120, FIRST, "failed"))
    assert repeats == [(key._replace(rerun=1), 0)]  # with the items of the one that failed


# Slots that ran more than once.


def test_the_runs_of_a_slot_go_together(place: Place) -> None:
    """Else the one that failed would be there alone, and a backfill would repeat it again."""
    place.announce()
    key = RunKey("old", FIRST)
    attempt = claimed(place.ledger, key, "first")
    have(place.ledger, attempt, str(key), "mail")
    finish(place.ledger.finish(attempt, FAILED))
    lane = Lane(0, "old", FIRST, FIRST + 60, FIRST, "failed")
    assert made_up(place.ledger, lane) == [(key._replace(rerun=1), 0)]
    place.age(after=FIRST)
    assert pruned(place.ledger) == 0
    assert made_up(place.ledger, lane) == []
    place.age(after=FIRST + 60 * KEPT_RUNS, times=2)
    pruned(place.ledger)
    assert [run for run in (key, key._replace(rerun=1)) if finish(place.ledger.find(run))] == []
    assert items(place.ledger, str(key)) == []
    assert made_up(place.ledger, lane) == []
    assert finish(place.ledger.claim(wanted(key, "again"))).verdict is Verdict.ENDED


def test_what_an_operator_wants_repeated_is_even_if_it_was_forgotten(place: Place) -> None:
    """With effects of its own, and once."""
    (slot,) = place.history(1)
    pruned(place.ledger)
    lane = Lane(0, "old", slot, slot + 60, slot, "all", trigger="backfill_all")
    ((key, rerun),) = made_up(place.ledger, lane)
    assert key == RunKey("old", slot, rerun=rerun)
    assert rerun > 10**9  # a number that none of the forgotten runs can have had
    for existing in ("skip", "failed"):
        assert made_up(place.ledger, lane._replace(existing=existing, trigger="backfill")) == []
    assert finish(place.ledger.claim(wanted(RunKey("old", slot), "again"))).verdict is Verdict.ENDED


# Races with a repeat.


def failed_long_ago(place: Place) -> RunKey:
    """Have a slot with an item fail, and become so old that it may be forgotten."""
    place.announce()
    key = RunKey("old", FIRST)
    attempt = claimed(place.ledger, key, "first")
    have(place.ledger, attempt, str(key), "mail")
    finish(place.ledger.finish(attempt, FAILED))
    place.age(after=FIRST, times=2)
    tick(place.ledger, "what is due", newest=0)
    return key


def repeated(ledger: Ledger) -> list[RunKey]:
    """Have the slot that failed repeated; leave what began running."""
    finish(ledger.planner.backfill(Lane(0, "old", FIRST, FIRST + 60, FIRST, "failed")))

    def want(asked: Asked) -> Want:
        return wanted(asked.key, asked.nonce)._replace(trigger=asked.trigger, patient=True)

    ticked = finish(ledger.planner.tick(Ask(want, "repeat", 10, only="old")))
    return [begun.claimed.run.key for begun in ticked.begun if begun.claimed.run is not None]


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "mariadb", "mysql"])
def test_a_slot_that_is_repeated_since_it_was_found_to_be_old_is_not_forgotten(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = sqlite_planner if kind == "sqlite" else draft_retention
    began: list[RunKey] = []

    def then_repeated(old: Sequence[RunKey], **rest: Any) -> tuple[list[RunKey], bool]:
        """Have a repeat begin after it was found what is old, and before that is deleted."""
        began.extend(repeated(other))
        return at_once(old, **rest)

    with closing(PLACES[kind](tmp_path)) as place:
        key, other = failed_long_ago(place), place.another()
        monkeypatch.setattr(planner, "at_once", then_repeated)
        finish(place.ledger.planner.prune(most=2))
        again = key._replace(rerun=1)
        assert began == [again]
        assert all(finish(other.find(run)) is not None for run in (key, again))
        assert items(other, str(key)) == [("mail", ItemState.DONE)]


@pytest.mark.parametrize("kind", ["postgres", "mariadb", "mysql"])
def test_a_run_that_is_pruned_since_it_was_read_is_not_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = DraftDesk.newest_rerun
    with closing(PLACES[kind](tmp_path)) as place, ThreadPoolExecutor(1) as pool:
        key, other = failed_long_ago(place), place.another()
        with locked(place, "fencepost_job WHERE job = 'old'") as let_go:
            pruning = pool.submit(finish, place.ledger.planner.prune(most=2))
            until(lambda: waits(place, "SET pruned"))

            def then_pruned(desk: DraftDesk, what: RunKey) -> RunRecord | None:
                """Have the prune commit after the tick has read the run, before it repeats it."""
                run = newest(desk, what)
                assert run is not None
                let_go()
                pruning.result()
                return run

            monkeypatch.setattr(DraftDesk, "newest_rerun", then_pruned)
            assert repeated(other) == []
        assert finish(other.find(key)) is None
        assert items(other, str(key)) == []


# What is being made up.


@pytest.mark.parametrize("trigger", ["owed", "backfill"])
def test_nothing_is_forgotten_of_what_is_being_made_up_nor_after_it(
    place: Place, trigger: str
) -> None:
    """A slot that was never begun stays different from one that was, and is forgotten."""
    slots = place.history(4)
    lane = Lane(0, "old", slots[2], slots[3] + 60, slots[2], trigger=trigger)
    lane = finish(place.ledger.planner.backfill(lane))
    assert pruned(place.ledger) == 2
    finish(place.ledger.planner.stop_lane(lane.number, reason="enough"))
    assert pruned(place.ledger) == 2


# Ranges.


def test_ranges_go_once_the_mark_has_passed_them_and_the_proof_holds(place: Place) -> None:
    place.announce()
    planner = place.ledger.planner
    times = 0
    while not (finish(planner.job("old")) or pytest.fail("there is a job")).pruned > 0:
        place.clocks.advance(KEPT_FOR / 50)  # one run for the newest slot, a range for the others
        assert tick(place.ledger, f"tick {times}", newest=0) == []
        finish(planner.prune(most=50))
        times += 1
    mark = finish(planner.job("old"))
    assert mark is not None
    spans = finish(planner.slots("old", start=0, end=2**60)).spans
    assert any(span.span.last <= mark.pruned for span in spans)
    finish(planner.prune(most=50))
    left = finish(planner.slots("old", start=0, end=2**60)).spans
    assert left == [span for span in spans if span.span.last > mark.pruned]
    assert len(left) > 10
    assert prove(finish(gathered(place.ledger))).findings == ()


# Leases.


def test_a_lock_for_each_slot_leaves_no_lease_behind_in_a_file_and_no_token_falls(
    tmp_path: Path,
) -> None:
    clocks = StillClocks()
    with closing(Place(clocks, lambda: opened(tmp_path / "ledger.db", clocks))) as place:
        place.announce()
        tokens = []
        for number in range(3):
            key = RunKey("old", FIRST + 60 * number)
            attempt = attempt_of(
                finish(place.ledger.claim(wanted(key, f"n{number}", lock=f"old/{number}")))
            )
            tokens.append(attempt.token)
            finish(place.ledger.finish(attempt, DONE))
            clocks.advance(1)
        place.age(after=FIRST + 120)
        used = finish(place.ledger.leases.acquire("old/2", holder=_holder("plain"), ttl=30.0))
        assert pruned(place.ledger) == 3
        names = {view.name for view in finish(place.ledger.leases.views())}
        assert names == {"old", "old/2"}
        clocks.step_wall(-20 * KEPT_FOR)  # before any of the tokens
        again = finish(place.ledger.leases.acquire("old/0", holder=_holder("a"), ttl=30.0))
        claim = finish(place.ledger.claim(wanted(RunKey("new", 60), "b", lock="old/1")))
        assert claim.grant is not None
        assert min(again.token, claim.grant.token) > max(tokens[:2])
        assert used.token > tokens[2]


def _holder(nonce: str) -> Any:
    return wanted(RunKey("old", FIRST), nonce).holder


# The rule itself.


@pytest.mark.parametrize("seed", range(2))
def test_every_ledger_forgets_just_what_the_rule_says(place: Place, seed: int) -> None:
    """Runs that ended in one way or another, were repeated, or are runs of their own."""
    place.announce()
    dice, ledger = random.Random(seed), place.ledger
    ends = [DONE, DONE, FAILED, Settled(State.TIMED_OUT, "timeout"), Settled(State.CANCELLED, "no")]
    for number in range(2 * KEPT_RUNS + 60):
        slot = int(place.clocks.wall()) // 60 * 60
        for rerun in range(dice.choice((1, 1, 1, 2, 3))):
            key = RunKey("old", slot, dice.choice((0, 0, 0, 1)), rerun)
            run = claimed(ledger, key, f"{number} {rerun}")
            finish(ledger.finish(run, dice.choice(ends)))
            if dice.random() < 0.1:
                place.clocks.advance(KEPT_FOR / 10)
        place.clocks.advance(60 + dice.random() * KEPT_FOR / 50)
    for _ in range(3):
        while True:
            runs = finish(ledger.runs("old", limit=10_000))
            gone = {run.key for run in forgotten(runs, now=place.clocks.wall())}
            finish(ledger.planner.prune(most=dice.choice((1, 7, 500))))
            left = {run.key for run in finish(ledger.runs("old", limit=10_000))}
            assert {run.key for run in runs} - gone <= left
            if not gone:
                break
            assert len(left) < len(runs)
        assert left == {run.key for run in runs}
        place.clocks.advance(KEPT_FOR / 2)


def old_run(rerun: int, state: State, *, ended: float = 0.0, manual: int = 0) -> RunRecord:
    return RunRecord(RunKey("a", 1000, manual, rerun), state, "a", ended_at=ended or 1000.0)


def newer(count: int) -> list[RunRecord]:
    return [
        RunRecord(RunKey("a", 10_000 + n), State.SUCCEEDED, "a", ended_at=10_000.0 + n)
        for n in range(count)
    ]


def test_of_one_slot_all_runs_are_let_go_or_none() -> None:
    runs = [old_run(0, State.FAILED), old_run(1, State.SUCCEEDED)]
    few, many = [*runs, *newer(KEPT_RUNS)], [*runs, *newer(2 * KEPT_RUNS)]

    def gone(some: list[RunRecord], now: float) -> list[RunRecord]:
        return [run for run in forgotten(some, now=now) if run.key.slot == 1000]

    assert gone(few, 1.5 * KEPT_FOR) == gone(few, 3 * KEPT_FOR) == []
    assert gone(many, 1.5 * KEPT_FOR) == []
    assert gone(many, 3 * KEPT_FOR) == runs
    assert gone([*many, old_run(2, State.RUNNING)], 3 * KEPT_FOR) == []
    own = old_run(0, State.SUCCEEDED, manual=1)  # which is no repeat of the slot
    assert gone([own, *many], 1.5 * KEPT_FOR) == [own]


def test_a_slot_is_never_forgotten_in_parts() -> None:
    keys = [RunKey("a", slot, rerun=rerun) for slot in (1, 2, 3) for rerun in (0, 1)]
    none: dict[Any, int] = {}
    assert at_once(keys, items=lambda slot: none.get(slot, 0), most=4) == (keys[:4], False)
    assert at_once(keys, items=lambda slot: none.get(slot, 0), most=5) == (keys[:4], False)
    assert at_once(keys, items=lambda _: 2, most=8) == (keys[:4], False)
    assert at_once(keys, items=lambda _: 100, most=50) == (keys[:2], True)
    assert at_once(keys, items=lambda _: 0, most=1) == (keys[:2], True)
    assert at_once([], items=lambda _: 0, most=1) == ([], False)
