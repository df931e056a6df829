"""A schedule edit keeps every undecided slot that both schedules have, on every ledger."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from every_ledger import LEDGERS, clients

from fencepost.cli.verify import gathered
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.planning import Ask, Asked, End, Instance
from fencepost.model.claim import Want
from fencepost.model.definition import Definition
from fencepost.model.edited import common
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.policy import Policy
from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.run import State
from fencepost.model.schedule import Cron, Every, Schedule, spec_of
from fencepost.testing.ledger_checker import prove
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fencepost.ledger.api import Ledger
    from fencepost.ledger.planning import Begun

NOW = 1_700_000_000  # when the clocks begin
ALL, LATEST, NONE = Rules(CatchUp.ALL), Rules(), Rules(CatchUp.NONE)
EDITS = {
    "2s to 4s": (Every(2), Every(4)),
    "4s to 2s": (Every(4), Every(2)),
    "6s to 10s": (Every(6), Every(10)),
    "a phase": (Every(4), Every(4, phase=1)),
    "cron": (Cron("* * * * *", second=30), Cron("*/2 * * * *", second=30)),
    "tz": (Cron("*/15 * * * *"), Cron("*/20 * * * *", tz="Asia/Kathmandu")),
}


class Owner:
    """One instance, and which slots of its job it began."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self._asks = ledger, 0
        self._instance = Instance("i", "here", 1, "1.0")
        self.ran: list[int] = []

    def declare(self, schedule: Schedule, rules: Rules) -> None:
        definition = Definition("bills", spec_of(schedule), text_of(rules), "bills")
        finish(self.ledger.planner.announce(self._instance, [definition]))

    def work(self, *, most: int = 9) -> None:
        """Run what is due until nothing is."""
        ended: Sequence[Begun] = ()
        while True:
            self._asks += 1
            ends = [End(_attempt(one), Settled(State.SUCCEEDED), NOTHING) for one in ended]
            ask = Ask(self._want, f"ask {self._asks:04x} ", most, ends, stirs=frozenset({"bills"}))
            ended = finish(self.ledger.planner.tick(ask)).begun
            if not (ended or ends):
                return
            self.ran += [_attempt(one).key.slot for one in ended]

    def passed(self, job: str = "bills") -> set[tuple[int, int, str]]:
        spans = finish(self.ledger.planner.slots(job, start=0, end=2**60)).spans
        return {(one.span.first, one.span.last, one.span.reason) for one in spans}

    def _want(self, asked: Asked) -> Want:
        holder = Holder(asked.nonce, "here", 1)
        return Want(
            asked.key, holder, Policy(), "bills", asked.trigger, patient=asked.patient, epoch=1
        )


def _attempt(begun: Begun) -> Attempt:
    run = begun.claimed.run
    assert run is not None
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder), run)


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("rules", [ALL, LATEST, NONE], ids=lambda rules: rules.catchup.value)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_keeps_what_both_schedules_have(
    kind: str, rules: Rules, edit: str, tmp_path: Path
) -> None:
    old, new = EDITS[edit]
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(old, rules)
        outage = 11 if isinstance(old, Every) else 3600 + 11
        clocks.advance(outage)
        edited_at = NOW + outage
        owner.declare(new, rules)
        both = [slot for slot in old.between(NOW + 1, edited_at + 1) if new.contains(slot)]
        if rules is NONE:
            both = [slot for slot in both if slot >= edited_at - 60]
        owner.work()
        assert owner.ran == (both if rules is ALL else both[-1:])
        for slot in old.between(NOW + 1, edited_at + 1):
            covered = [span for span in owner.passed() if span[0] <= slot <= span[1]]
            assert (slot in owner.ran) != bool(covered), (slot, owner.passed())
        kept, more = set(owner.ran), 60 if isinstance(old, Every) else 3600
        clocks.advance(more)
        owner.work()
        later = [slot for slot in owner.ran if slot not in kept]
        expected = list(new.between(edited_at + 1, edited_at + more + 1))
        assert later == (expected if rules is ALL else expected[-1:] if rules is LATEST else later)
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_second_edit_keeps_what_all_three_schedules_have(kind: str, tmp_path: Path) -> None:
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(4), ALL)
        clocks.advance(25)
        owner.declare(Every(2), ALL)
        clocks.advance(10)
        owner.declare(Every(3), ALL)
        owner.work()
        first = [slot for slot in range(NOW + 1, NOW + 26) if slot % 12 == 0]
        second = [slot for slot in range(NOW + 26, NOW + 36) if slot % 6 == 0]
        assert owner.ran == first + second
        clocks.advance(9)
        owner.work()
        assert owner.ran[len(first + second) :] == [
            slot for slot in range(NOW + 36, NOW + 45) if slot % 3 == 0
        ]
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
def test_an_edit_keeps_what_is_owed_behind_the_live_slots(kind: str, tmp_path: Path) -> None:
    rules = Rules(CatchUp.ALL, live_first=True)
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(2), rules)
        clocks.advance(21)
        ask = Ask(owner._want, "only one ", 1)
        (live,) = finish(ledger.planner.tick(ask)).begun
        assert _attempt(live).key.slot == NOW + 20
        finish(ledger.finish(_attempt(live), Settled(State.SUCCEEDED)))
        owner.declare(Every(4), rules)
        for _ in range(9):
            clocks.advance(1)
            owner.work()
        owed = [slot for slot in range(NOW + 2, NOW + 20) if slot % 4 == 0]
        assert [slot for slot in owner.ran if slot < NOW + 20] == owed
        skipped = {slot for first, last, why in owner.passed() for slot in range(first, last + 1)}
        assert skipped.isdisjoint(owed)
        assert {slot for slot in range(NOW + 1, NOW + 20) if slot % 4 == 2} <= skipped
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_rename_takes_along_what_an_edit_has_left(kind: str, tmp_path: Path) -> None:
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(4), ALL)
        clocks.advance(11)
        owner.declare(Every(2), ALL)
        named = Definition("invoices", spec_of(Every(2)), text_of(ALL), "bills", aliases=("bills",))
        finish(ledger.planner.announce(Instance("i", "here", 1, "1.0"), [named]))
        owner.work()
        assert owner.ran == [slot for slot in range(NOW + 1, NOW + 12) if slot % 4 == 0]


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("rules", [ALL, LATEST, NONE], ids=lambda rules: rules.catchup.value)
@pytest.mark.parametrize("edit", EDITS)
def test_a_rename_with_another_schedule_keeps_what_an_edit_keeps(
    kind: str, rules: Rules, edit: str, tmp_path: Path
) -> None:
    old, new = EDITS[edit]
    both: list[tuple[list[int], set[tuple[int, int, str]]]] = []
    for name in ("bills", "invoices"):
        (tmp_path / name).mkdir()
        with clients(kind, tmp_path / name) as (clocks, (ledger,)):
            owner = Owner(ledger)
            owner.declare(old, rules)
            clocks.advance(11 if isinstance(old, Every) else 3600 + 11)
            aliases = () if name == "bills" else ("bills",)
            named = Definition(name, spec_of(new), text_of(rules), "bills", aliases=aliases)
            finish(ledger.planner.announce(Instance("i", "here", 1, "1.0"), [named]))
            owner.work()
            clocks.advance(60)
            owner.work()
            both.append((owner.ran, owner.passed(name)))
            assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []
    assert both[0] == both[1]


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_rename_keeps_that_an_outage_is_being_made_up(kind: str, tmp_path: Path) -> None:
    """Else the slots of it that are older than the window by then would be missed."""
    rules = Rules(CatchUp.ALL, window=20.0)
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(2), rules)
        clocks.advance(19)
        (one,) = finish(ledger.planner.tick(Ask(owner._want, "only one ", 1))).begun
        finish(ledger.finish(_attempt(one), Settled(State.SUCCEEDED)))
        clocks.advance(10)
        named = Definition(
            "invoices", spec_of(Every(2)), text_of(rules), "bills", aliases=("bills",)
        )
        finish(ledger.planner.announce(Instance("i", "here", 1, "1.0"), [named]))
        owner.work()
        assert owner.ran == list(range(NOW + 4, NOW + 30, 2))


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("rules", [ALL, LATEST], ids=lambda rules: rules.catchup.value)
@pytest.mark.parametrize("edit", EDITS)
def test_an_older_version_can_read_what_an_edit_leaves(
    kind: str, rules: Rules, edit: str, tmp_path: Path
) -> None:
    """Else it would leave the job alone for a minute each time that it looks."""
    old, new = EDITS[edit]
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(old, rules)
        clocks.advance(11 if isinstance(old, Every) else 3600 + 11)
        owner.declare(new, rules)
        job = finish(ledger.planner.job("bills"))
        assert job is not None
        assert (job.spec, job.epoch) == (spec_of(new), 2)
        for lane in finish(ledger.planner.lanes()):
            assert set(json.loads(lane.spec)) <= {"every", "offset"} or lane.spec == spec_of(new)


@pytest.mark.parametrize("kind", LEDGERS)
def test_what_an_edit_keeps_runs_before_slots_of_the_new_schedule(
    kind: str, tmp_path: Path
) -> None:
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(4), ALL)
        clocks.advance(21)
        owner.declare(Every(2), ALL)
        clocks.advance(7)  # slots of the new schedule are due as well
        for _ in range(30):
            owner.work(most=1)
            clocks.advance(0.5)
        kept = [slot for slot in range(NOW + 1, NOW + 22) if slot % 4 == 0]
        assert owner.ran[: len(kept)] == kept
        assert owner.ran == sorted(owner.ran)
        assert set(range(NOW + 22, NOW + 41, 2)) <= set(owner.ran)
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("rules", [LATEST, NONE], ids=lambda rules: rules.catchup.value)
def test_the_newest_slot_is_given_up_once_a_newer_one_is_due(
    kind: str, rules: Rules, tmp_path: Path
) -> None:
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(20), rules)
        clocks.advance(27)
        owner.declare(Every(5), rules)  # 1_700_000_025 is a slot of it that never fires
        clocks.advance(10)
        owner.work()
        assert owner.ran == [NOW + 35]
        reason = "coalesced" if rules is LATEST else "start_deadline"
        assert (NOW + 20, NOW + 20, reason) in owner.passed()
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
def test_what_an_edit_keeps_is_not_begun_beyond_its_deadline(kind: str, tmp_path: Path) -> None:
    rules = Rules(start_deadline=120.0)
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Cron("15 * * * *"), rules)  # in 100 s
        clocks.advance(170)
        owner.declare(Cron("15,16 * * * *"), rules)
        clocks.advance(60)
        owner.work()
        assert owner.ran == []
        assert owner.passed() == {(NOW + 100, NOW + 100, "start_deadline")}
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
def test_what_an_edit_keeps_rests_between_two_slots(kind: str, tmp_path: Path) -> None:
    rules = Rules(CatchUp.ALL, pause=10.0)
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(4), rules)
        clocks.advance(13)
        owner.declare(Every(2), rules)
        began = list[tuple[int, float]]()
        for second in range(40):
            before = len(owner.ran)
            owner.work()
            began += [(slot, second) for slot in owner.ran[before:]]
            clocks.advance(1)
        assert [slot for slot, _ in began[:3]] == [NOW + 4, NOW + 8, NOW + 12]
        assert all(after - before >= 10 for (_, before), (_, after) in pairwise(began))


@pytest.mark.parametrize("kind", LEDGERS)
def test_what_is_kept_in_several_stretches_keeps_its_order_and_its_rests(
    kind: str, tmp_path: Path
) -> None:
    rules = Rules(CatchUp.ALL, pause=10.0)
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Cron("20-22,30-31 * * * *"), rules)
        clocks.advance(1200)
        owner.declare(Every(30), rules)
        assert len(finish(ledger.planner.lanes())) == 2
        ran = list[list[int]]()
        for _ in range(60):
            before = len(owner.ran)
            owner.work()
            ran.append(owner.ran[before:])
            clocks.advance(1)
        first = NOW + 400  # 22:20:00
        kept = [first, first + 60, first + 120, first + 600, first + 660]
        assert owner.ran[:5] == kept
        seconds = [second for second, slots in enumerate(ran) if slots]
        assert all(len(slots) <= 1 for slots in ran)
        assert all(after - before >= 10 for before, after in pairwise(seconds))


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("rules", [ALL, LATEST], ids=lambda rules: rules.catchup.value)
@pytest.mark.parametrize("then", ["an edit", "an outage", "a pause"])
def test_no_two_ranges_have_a_slot_in_common_after_an_edit(
    kind: str, rules: Rules, then: str, tmp_path: Path
) -> None:
    """Those that the edit has recorded lie between slots that are still undecided."""
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(60), rules)
        clocks.advance(520)
        owner.declare(Every(120), rules)
        if then == "an edit":
            owner.declare(Every(7 * 60), rules)
        elif then == "an outage":
            clocks.advance(500_000 if rules is LATEST else 700_000)
        else:
            finish(ledger.planner.pause("bills", reason="later"))
            clocks.advance(300)
            owner.work()
            finish(ledger.planner.resume("bills"))
        for _ in range(20):
            owner.work()
            clocks.advance(1)
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_pause_keeps_the_order_of_what_an_edit_keeps(kind: str, tmp_path: Path) -> None:
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(4), ALL)
        clocks.advance(13)
        owner.declare(Every(2), ALL)
        finish(ledger.planner.pause("bills", reason="later"))
        clocks.advance(10)
        owner.work()
        finish(ledger.planner.resume("bills"))
        clocks.advance(4)
        for _ in range(12):
            owner.work(most=1)
            clocks.advance(0.5)
        assert owner.ran[:3] == [NOW + 4, NOW + 8, NOW + 12]
        assert owner.ran == sorted(owner.ran)
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("name", ["bills", "invoices"])
@pytest.mark.parametrize("rules", [ALL, LATEST], ids=lambda rules: rules.catchup.value)
def test_what_came_due_after_a_pause_was_over_is_kept(
    kind: str, name: str, rules: Rules, tmp_path: Path
) -> None:
    """Nobody was there to end the pause when its time was over."""
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        owner.declare(Every(10), rules)
        finish(ledger.planner.pause("bills", reason="later", until=NOW + 35.0))
        clocks.advance(85)
        aliases = () if name == "bills" else ("bills",)
        named = Definition(name, spec_of(Every(20)), text_of(rules), "bills", aliases=aliases)
        finish(ledger.planner.announce(Instance("i", "here", 1, "1.0"), [named]))
        owner.work()
        assert owner.ran == ([NOW + 40, NOW + 60, NOW + 80] if rules is ALL else [NOW + 80])
        assert (NOW + 10, NOW + 30, "paused") in owner.passed()  # by the name that it had then
        assert [str(one) for one in prove(finish(gathered(ledger))).findings] == []


@pytest.mark.parametrize("kind", LEDGERS)
@pytest.mark.parametrize("live_first", [True, False])
def test_an_edit_of_the_rules_alone_decides_whether_what_is_owed_goes_first(
    kind: str,
    live_first: bool,  # noqa: FBT001 -- a case
    tmp_path: Path,
) -> None:
    with clients(kind, tmp_path) as (clocks, (ledger,)):
        owner = Owner(ledger)
        before, after = Rules(CatchUp.ALL, live_first=not live_first), ALL
        if live_first:
            after = Rules(CatchUp.ALL, live_first=True)
        owner.declare(Every(20), before)
        clocks.advance(110)
        owner.declare(Every(10), before)
        clocks.advance(1)
        owner.declare(Every(10), after)
        clocks.advance(9)  # a live slot is due beside what is owed
        owner.work(most=1)
        assert owner.ran[0] == (NOW + 120 if live_first else NOW + 20)


def test_no_slot_within_the_window_is_overlooked_by_an_edit() -> None:
    week = 7 * 86400
    kept = common(Every(21), Every(22), NOW - week, NOW, most=10**6)
    assert kept == [slot for slot in range(NOW - week, NOW + 1) if slot % (21 * 22) == 0]
