"""Who knows which jobs: edits, cohorts, orphans, names that are gone, and the past."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ledgerlab import StillClocks, attempt_of, opened, wanted

from fencepost.errors import Misuse, UnknownJob
from fencepost.ledger.api import NOTHING
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.planning import TROUBLE, Ask, Asked, End, Instance, Lane
from fencepost.ledger.retention import KEPT_FOR, KEPT_RUNS
from fencepost.model.claim import Verdict, Want
from fencepost.model.cohort import GONE_AFTER, ORPHAN_AFTER
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.lease import Holder
from fencepost.model.plan import starts_at
from fencepost.model.policy import Overlap, Policy
from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.run import State
from fencepost.model.schedule import At, Every, EveryAfter, schedule_from, spec_of
from fencepost.model.slot import RunKey
from fencepost.stores.memory import MemoryStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.ledger.api import Ledger
    from fencepost.ledger.planning import Note
    from fencepost.model.claim import Claimed
    from fencepost.model.definition import JobRecord

# The clock begins 20 s after a full minute.
MINUTE = 1_699_999_980
A, B, C = (Instance(name, "here", 1, "1") for name in "abc")
MINUTELY, HALF_PAST = Every(60), Every(60, phase=30)
TWICE = Every(30)
ALL, LATEST = Rules(CatchUp.ALL), Rules()
PATIENT = Policy(lease=300.0)


def bills(
    every: Every | EveryAfter = MINUTELY, rules: Rules = LATEST, **more: object
) -> Definition:
    words = {"job": "bills", "spec": spec_of(every), "rules": text_of(rules), **more}
    return Definition(**words)  # type: ignore[arg-type]  # each its own


class Town:
    """A ledger, its clock, and short ways to be its instances."""

    def __init__(self, ledger: Ledger, clocks: StillClocks) -> None:
        self.ledger, self.clocks = ledger, clocks
        self.planner = ledger.planner
        self.policy = PATIENT
        self._asks = 0

    def announce(self, instance: Instance | None, *definitions: Definition) -> list[str]:
        return [note.what for note in finish(self.planner.announce(instance, definitions))]

    def attend(self, *instances: Instance) -> list[str]:
        return [note.what for one in instances for note in self.notes(one)]

    def notes(self, instance: Instance) -> list[Note]:
        return [note for note in finish(self.planner.attend(instance)) if note.what != "clock"]

    def pass_time(self, seconds: float, *present: Instance) -> None:
        """Let time pass, while some instances say that they live."""
        while seconds > 0:
            self.clocks.advance(min(seconds, 5.0))
            seconds -= 5.0
            self.attend(*present)

    def knowing(self, *names: str) -> Callable[[Asked], Want | None]:
        """What an instance asks for that knows some jobs."""

        def want(asked: Asked) -> Want | None:
            if asked.template not in names:
                return None
            holder, trigger = Holder(asked.nonce, "here", 1), asked.trigger
            return Want(asked.key, holder, self.policy, asked.key.job, trigger, epoch=asked.epoch)

        return want

    def tick(self, *, room: int = 9, knows: tuple[str, ...] = ("bills",)) -> list[Claimed]:
        """Begin what is due."""
        self._asks += 1
        ask = Ask(self.knowing(*knows), f"ask {self._asks:03} ", room, sweep=True)
        return [begun.claimed for begun in finish(self.planner.tick(ask)).begun]

    def work(self, **how: object) -> list[int]:
        """Begin what is due and end it well; return its slots, counted from the first minute."""
        done = self.tick(**how)  # type: ignore[arg-type]  # as given
        for claimed in done:
            finish(self.ledger.finish(attempt_of(claimed), Settled(State.SUCCEEDED)))
        return [claimed.run.key.slot - MINUTE for claimed in done if claimed.run]

    def job(self, name: str = "bills") -> JobRecord:
        job = finish(self.planner.job(name))
        assert job is not None
        return job

    def spans(self, name: str = "bills") -> list[tuple[int, int, str, str]]:
        found = finish(self.planner.slots(name, start=0, end=2**60)).spans
        return [
            (span.first - MINUTE, span.last - MINUTE, span.state.value, span.reason)
            for span in (record.span for record in found)
        ]

    def runs(self, name: str = "bills") -> list[tuple[int, str, str]]:
        found = finish(self.planner.slots(name, start=0, end=2**60)).runs
        return [(run.key.slot - MINUTE, run.state.value, run.reason) for run in found]


@pytest.fixture(params=["memory", "sqlite"])
def town(request: pytest.FixtureRequest) -> Iterator[Town]:
    clocks = StillClocks()
    world = BlockingWorld(clocks=clocks)
    ledger: Ledger
    if request.param == "memory":
        ledger = MemoryLedger(world, MemoryStore(world))
    else:
        ledger = opened(":memory:", clocks)
    yield Town(ledger, clocks)
    finish(ledger.close())


# New jobs.


def test_a_new_job_never_fires_for_the_past(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    assert town.work() == []
    town.clocks.advance(41)
    assert town.work() == [60]


def test_a_job_that_is_announced_again_as_it_is_stays_as_it_stands(town: Town) -> None:
    town.announce(A, bills())
    before = town.job()
    town.clocks.advance(41)
    assert town.announce(A, bills()) == town.announce(B, bills()) == []
    assert town.job() == before
    assert town.work() == [60]


def test_a_job_that_is_known_from_its_triggers_only_owes_nothing_either(town: Town) -> None:
    finish(town.ledger.register("bills", "{}"))
    town.clocks.advance(600)
    town.announce(A, bills(rules=ALL))
    assert town.work() == []
    assert town.job().epoch == 1


# Edits.


def test_an_edit_never_fires_for_a_slot_of_the_past(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(41)
    assert town.work() == [60]
    town.clocks.advance(40)  # half past has gone by
    assert town.announce(A, bills(HALF_PAST, ALL)) == ["edited"]
    assert town.work() == []
    town.clocks.advance(50)
    assert town.work() == [150]
    assert town.spans() == []


def test_what_was_due_under_the_old_schedule_only_is_skipped_and_on_record(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(141)  # and nobody has looked at two minutes
    assert town.announce(A, bills(HALF_PAST, ALL)) == ["skipped", "edited"]
    assert town.spans() == [(60, 120, "skipped", "schedule_changed")]
    assert town.work() == []
    town.clocks.advance(50)
    assert town.work() == [210]


def test_a_slot_that_both_schedules_have_stays_due(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(101)
    town.announce(A, bills(TWICE, ALL))
    assert town.spans() == []
    assert town.work() == [60]
    town.clocks.advance(1)  # one at a time: the end of the first is seen with the next look
    assert town.work() == [120]
    town.clocks.advance(29)
    assert town.work() == [150]


def test_a_slot_that_waits_for_its_jitter_stays_due_if_both_schedules_have_it(town: Town) -> None:
    slow = Rules(jitter=50.0)
    slot = MINUTE + 60
    begins = starts_at(MINUTELY, slow, "bills", slot)
    town.announce(A, bills(rules=slow))
    town.clocks.advance(41)
    assert begins > MINUTE + 61
    town.announce(A, bills(TWICE, slow))
    due = starts_at(TWICE, slow, "bills", slot)
    town.clocks.advance(due - (MINUTE + 61) + 1)
    assert town.work() == [60]


def test_a_slot_that_waits_for_its_jitter_is_on_record_if_the_edit_ends_it(town: Town) -> None:
    town.announce(A, bills(rules=Rules(jitter=50.0)))
    town.clocks.advance(41)
    town.announce(A, bills(HALF_PAST))
    assert town.spans() == [(60, 60, "skipped", "schedule_changed")]


def test_a_run_that_waits_is_skipped_by_an_edit_that_has_no_such_slot(town: Town) -> None:
    town.policy = PATIENT._replace(overlap=Overlap.RESCHEDULE)
    town.announce(A, bills(TWICE))
    town.clocks.advance(11)
    (running,) = town.tick()
    town.clocks.advance(30)
    assert town.tick() == []
    town.clocks.advance(1)
    town.announce(A, bills(HALF_PAST))
    assert town.runs() == [(30, "running", ""), (60, "skipped", "schedule_changed")]
    finish(town.ledger.finish(attempt_of(running), Settled(State.SUCCEEDED)))
    town.clocks.advance(28)
    assert town.work() == [90]


def test_a_run_that_waits_stays_if_the_edited_schedule_has_its_slot_too(town: Town) -> None:
    town.policy = PATIENT._replace(overlap=Overlap.RESCHEDULE)
    town.announce(A, bills(TWICE))
    town.clocks.advance(11)
    (running,) = town.tick()
    town.clocks.advance(30)
    assert town.tick() == []
    town.announce(A, bills())
    finish(town.ledger.finish(attempt_of(running), Settled(State.SUCCEEDED)))
    town.clocks.advance(5)
    assert town.work() == [60]


def test_what_runs_when_its_job_is_edited_ends_under_its_own_epoch(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(41)
    (running,) = town.tick()
    town.announce(A, bills(HALF_PAST))
    run = finish(town.ledger.finish(attempt_of(running), Settled(State.SUCCEEDED)))
    assert (run.state, run.epoch, town.job().epoch) == (State.SUCCEEDED, 1, 2)


def test_a_slot_that_ran_is_not_run_again_by_a_schedule_that_has_it_too(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(41)
    assert town.work() == [60]
    town.announce(A, bills(TWICE, ALL))
    assert town.work() == []


def test_an_edit_to_another_kind_of_schedule_begins_now(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(101)
    town.announce(A, bills(EveryAfter(45)))
    assert town.spans() == [(60, 120, "skipped", "schedule_changed")]
    town.clocks.advance(44)
    assert town.work() == []
    town.clocks.advance(1)
    assert town.work() == [166]


# Cohorts.


def test_the_youngest_cohort_wins_and_an_old_instance_that_restarts_changes_nothing(
    town: Town,
) -> None:
    town.announce(A, bills())
    town.clocks.advance(1)
    assert town.announce(B, bills(TWICE)) == ["edited"]
    town.clocks.advance(1)
    assert town.announce(A, bills()) == town.announce(C, bills()) == []
    assert town.job().spec == spec_of(TWICE)


def test_after_a_rollback_the_older_definition_wins_once_the_newer_cohort_is_gone(
    town: Town,
) -> None:
    town.announce(A, bills())
    town.clocks.advance(1)
    town.announce(B, bills(TWICE))
    town.pass_time(GONE_AFTER - 5, A)
    assert town.job().spec == spec_of(TWICE)
    town.pass_time(10, A)
    assert (town.job().spec, town.job().epoch) == (spec_of(MINUTELY), 3)


def test_a_build_number_goes_before_age(town: Town) -> None:
    town.announce(A, bills(TWICE, build=7))
    town.clocks.advance(1)
    assert town.announce(B, bills(build=6)) == []
    assert town.announce(C, bills(HALF_PAST, build=8)) == ["edited"]


def test_a_cohort_that_comes_back_after_it_died_out_is_young_again(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(1)
    town.announce(B, bills(TWICE))
    town.pass_time(ORPHAN_AFTER + GONE_AFTER, B)
    assert "edited" in town.announce(A, bills())
    assert town.job().spec == spec_of(MINUTELY)


def test_an_instance_that_others_took_for_gone_is_told_to_announce_itself(town: Town) -> None:
    town.announce(A, bills())
    town.announce(B, bills())
    town.pass_time(GONE_AFTER + 5, A)
    assert town.attend(B) == ["unknown_instance"]
    assert town.announce(B, bills()) == []
    assert town.attend(B) == []


def test_an_outage_of_the_store_counts_against_no_version(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(1)
    town.announce(B, bills(TWICE))
    town.pass_time(30, A, B)
    town.clocks.advance(10 * ORPHAN_AFTER)  # in which nobody was heard
    assert town.attend(A) == []
    town.clocks.advance(1)
    assert town.announce(C, bills()) == []
    town.clocks.advance(1)
    assert town.attend(B) == []
    assert (town.job().spec, town.job().epoch) == (spec_of(TWICE), 2)


def test_a_new_instance_that_is_first_after_an_outage_does_not_bring_its_version_back(
    town: Town,
) -> None:
    town.announce(A, bills())
    town.clocks.advance(1)
    town.announce(B, bills(TWICE))
    town.pass_time(30, A, B)
    town.clocks.advance(2 * ORPHAN_AFTER)
    assert town.announce(C, bills()) == []
    town.pass_time(GONE_AFTER + 5, C, B)
    assert town.job().epoch == 2


def test_instances_that_stay_silent_after_an_outage_are_gone(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(1)
    town.announce(B, bills(TWICE))
    town.clocks.advance(ORPHAN_AFTER)
    town.pass_time(GONE_AFTER + 5, A)
    assert town.job().spec == spec_of(MINUTELY)


def test_instances_that_each_come_once_do_not_pile_up(town: Town) -> None:
    for number in range(40):
        instance = Instance(f"once {number}", "here", number, "1")
        town.announce(instance, bills())
        town.attend(instance)
        town.clocks.advance(GONE_AFTER / 2)
    assert len(finish(town.planner.instances())) <= 4


# Orphans.


def test_a_job_that_nobody_knows_any_more_becomes_an_orphan_and_is_told_of(town: Town) -> None:
    town.announce(A, bills())
    town.announce(B, Definition("mail"))
    town.pass_time(ORPHAN_AFTER - 10, B)
    assert not town.job().orphaned_at
    notes: list[Note] = []
    for _ in range(4):
        town.clocks.advance(5)
        notes += town.notes(B)
    (note,) = notes
    assert (note.what, note.job) == ("orphaned", "bills")
    assert town.work(knows=()) == []
    (span,) = town.spans()
    assert span[2:] == ("missed", "orphaned")


def test_an_orphan_that_is_known_again_runs_from_then_on(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.announce(B, Definition("mail"))
    town.pass_time(ORPHAN_AFTER + 10, B)
    assert town.announce(C, bills(rules=ALL)) == ["known_again"]
    assert town.work() == []
    (span,) = town.spans()
    assert span[2:] == ("missed", "orphaned")
    town.clocks.advance(60)
    assert len(town.work()) == 1


def test_a_job_whose_instances_are_away_for_less_is_caught_up(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.announce(B, Definition("mail"))
    town.pass_time(ORPHAN_AFTER - 300, B)
    town.announce(C, bills(rules=ALL))
    assert town.work() == [60]
    assert town.spans() == []


def test_an_outage_of_the_store_makes_no_orphans(town: Town) -> None:
    town.announce(A, bills())
    town.announce(B, Definition("mail"))
    town.clocks.advance(2 * ORPHAN_AFTER)
    assert town.attend(B) == town.attend(A) == []
    assert len(town.work()) == 1  # the newest slot, as its catchup has it
    assert [span[3] for span in town.spans()] == ["coalesced"]


# Names that are gone.


def test_a_job_that_was_retired_cannot_be_brought_back_by_a_stray_instance(town: Town) -> None:
    town.announce(A, bills())
    finish(town.planner.retire("bills", reason="no more"))
    town.clocks.advance(41)
    assert town.announce(B, bills(TWICE)) == ["retired"]
    assert town.work() == []
    assert town.job().retired == "no more"


def test_what_waits_of_a_job_that_is_retired_is_skipped(town: Town) -> None:
    town.policy = PATIENT._replace(overlap=Overlap.RESCHEDULE)
    town.announce(A, bills(TWICE))
    town.clocks.advance(11)
    town.tick()
    town.clocks.advance(30)
    town.tick()
    finish(town.planner.retire("bills", reason=""))
    assert town.runs() == [(30, "running", ""), (60, "skipped", "retired")]


def test_a_job_that_is_stored_again_after_it_was_retired_remembers_what_it_forgot(
    town: Town,
) -> None:
    finish(town.planner.store([bills()]))
    pruned = forget_one(town)
    finish(town.planner.retire("bills", reason=""))
    assert finish(town.planner.store([bills()])) == 1
    assert (town.job().retired, town.job().pruned) == ("", pruned)
    assert town.job().epoch == 2


def test_a_job_with_another_name_goes_on_where_the_old_one_stood(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(101)
    renamed = bills(rules=ALL, job="invoices", aliases=("bills",))
    assert town.announce(B, renamed) == ["renamed"]
    assert town.job().retired == "renamed to invoices"
    assert town.work(knows=("bills", "invoices")) == [60]
    assert town.runs() == []


def test_another_name_and_another_schedule_at_once_fire_nothing_of_the_past(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(101)
    town.announce(B, bills(HALF_PAST, ALL, job="invoices", aliases=("bills",)))
    assert town.work(knows=("bills", "invoices")) == []
    assert town.spans("invoices") == [(60, 120, "skipped", "schedule_changed")]


# Operators.


def test_slots_of_a_pause_are_one_range_and_nothing_fires_afterwards(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    finish(town.planner.pause("bills", reason="holidays"))
    for _ in range(4):
        town.clocks.advance(60)
        assert town.work() == []
    finish(town.planner.resume("bills"))
    assert town.work() == []
    assert town.spans() == [(60, 240, "skipped", "paused")]
    town.clocks.advance(60)
    assert town.work() == [300]


def test_a_pause_that_ends_by_itself_fires_nothing_though_nobody_looked(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    finish(town.planner.pause("bills", reason="holidays", until=MINUTE + 200.0))
    town.clocks.advance(230)
    assert town.work() == [240]
    assert town.spans() == [(60, 180, "skipped", "paused")]
    assert not town.job().paused


def test_a_trigger_after_a_pause_that_ended_by_itself_is_not_skipped(town: Town) -> None:
    town.announce(A, Definition("bills"))  # without a schedule nothing ever looks at it
    finish(town.planner.pause("bills", reason="holidays", until=MINUTE + 200.0))
    key = RunKey("bills", MINUTE)
    town.clocks.advance(179)
    assert finish(town.ledger.claim(wanted(key, "early"))).verdict is Verdict.ENDED
    town.clocks.advance(1)
    later = finish(town.ledger.claim(wanted(key._replace(slot=MINUTE + 60), "late")))
    assert later.verdict is Verdict.GO


def test_a_backfill_goes_on_as_soon_as_a_pause_has_ended_by_itself(town: Town) -> None:
    town.announce(A, bills(Every(3600)))
    finish(town.planner.pause("bills", reason="holidays", until=MINUTE + 100.0))
    finish(town.planner.backfill(Lane(0, "bills", MINUTE - 3600, MINUTE + 1, MINUTE - 3600)))
    town.clocks.advance(70)
    assert town.work() == []
    town.clocks.advance(20)
    assert len(town.work()) == 1


def test_a_job_that_is_not_there_can_be_asked_nothing(town: Town) -> None:
    with pytest.raises(UnknownJob):
        finish(town.planner.pause("bills", reason=""))
    with pytest.raises(UnknownJob):
        finish(town.planner.backfill(Lane(0, "bills", 0, 10, 0)))


# The past.


def lane(*, existing: str) -> Lane:
    return Lane(0, "bills", MINUTE - 120, MINUTE + 1, MINUTE - 120, existing)


def made_up(town: Town) -> list[int]:
    done = []
    for _ in range(9):
        done += [slot for slot in town.work() if slot <= 0]
        town.clocks.advance(1)
    return done


def test_a_backfill_runs_what_never_ran_oldest_first(town: Town) -> None:
    town.announce(A, bills())
    asked = finish(town.planner.backfill(lane(existing="skip")))
    assert finish(town.planner.backfill(lane(existing="skip"))) == asked
    assert made_up(town) == [-120, -60, 0]
    assert finish(town.planner.lanes()) == []
    assert {run.trigger for run in finish(town.ledger.runs("bills"))} == {"backfill"}


def test_a_backfill_repeats_what_it_was_told_to_and_nothing_else(town: Town) -> None:
    town.announce(A, bills())
    for existing, expected in (("skip", 3), ("skip", 0), ("failed", 0), ("all", 3), ("all", 3)):
        finish(town.planner.backfill(lane(existing=existing)))
        assert len(made_up(town)) == expected
    runs = finish(town.ledger.runs("bills"))
    keys = [str(run.key).partition("Z")[2] for run in runs if run.trigger == "backfill"]
    assert sorted(keys) == ["", "", "", "~1", "~1", "~1", "~2", "~2", "~2"]


def test_a_slot_is_not_repeated_while_it_runs(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(41)
    (running,) = town.tick()
    later = Lane(0, "bills", MINUTE + 60, MINUTE + 61, MINUTE + 60, "all")
    finish(town.planner.backfill(later))
    town.clocks.advance(2)
    assert town.tick() == []
    finish(town.ledger.finish(attempt_of(running), Settled(State.SUCCEEDED)))
    assert len(finish(town.ledger.runs("bills", states=(State.RUNNING,)))) == 0


def test_a_pause_between_what_is_made_up_is_kept_also_when_a_run_ends(town: Town) -> None:
    town.announce(A, bills(rules=Rules(CatchUp.ALL, pause=10.0)))
    town.clocks.advance(161)
    (first,) = town.tick()
    town.clocks.advance(1)
    end = End(attempt_of(first), Settled(State.SUCCEEDED), NOTHING)
    ask = Ask(
        lambda asked: wanted(asked.key, asked.nonce), "n", 9, [end], stirs=frozenset({"bills"})
    )
    assert finish(town.planner.tick(ask)).begun == []
    town.clocks.advance(9)
    assert town.work() == [120]


# Retention.


def forget_one(town: Town) -> int:
    """Run so many slots that the oldest is forgotten; return which that is."""
    first = None
    while not finish(town.planner.prune(most=1)):
        schedule = schedule_from(town.job().spec)
        following = schedule.after(town.clocks.wall())
        assert following is not None
        town.clocks.advance(following - town.clocks.wall() + KEPT_FOR / (KEPT_RUNS - 2))
        town.work()
        first = first or town.job().watermark
    assert first is not None
    return first


def test_what_retention_forgets_is_never_made_again(town: Town) -> None:
    town.announce(A, bills(rules=ALL._replace(limit=1)))
    first = forget_one(town)
    assert town.job().pruned == first
    before = finish(town.ledger.runs("bills", limit=1_000))
    assert first not in {run.key.slot for run in before}
    assert town.work() == []
    assert finish(town.ledger.runs("bills", limit=1_000)) == before


def test_a_trigger_for_a_slot_that_was_forgotten_finds_it_done(town: Town) -> None:
    town.announce(A, bills(rules=ALL._replace(limit=1)))
    key = RunKey("bills", forget_one(town))
    claimed = finish(town.ledger.claim(wanted(key, "trigger")))
    assert (claimed.verdict, claimed.run) == (Verdict.ENDED, None)


@pytest.mark.parametrize("existing", ["skip", "failed"])
def test_a_backfill_takes_what_was_forgotten_for_done(town: Town, existing: str) -> None:
    town.announce(A, bills(rules=ALL._replace(limit=1)))
    first = forget_one(town)
    finish(town.planner.backfill(Lane(0, "bills", first, first + 1, first, existing)))
    assert town.work() == []


def test_what_was_forgotten_is_repeated_under_a_key_that_it_never_had(town: Town) -> None:
    town.announce(A, bills(rules=ALL._replace(limit=1)))
    first = forget_one(town)
    lane = Lane(0, "bills", first, first + 1, first, "all", trigger="backfill_all")
    finish(town.planner.backfill(lane))
    (again,) = town.tick()
    assert again.run is not None
    assert again.run.key == RunKey("bills", first, rerun=int(town.clocks.wall()))


def test_a_backfill_of_failures_leaves_a_cancelled_slot_alone(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(41)
    (begun,) = town.tick()
    finish(town.ledger.finish(attempt_of(begun), Settled(State.CANCELLED, "cancelled")))
    slot = MINUTE + 60
    finish(town.planner.backfill(Lane(0, "bills", slot, slot + 1, slot, "failed")))
    assert town.work() == []


def test_a_backfill_under_way_grows_when_more_is_asked_for(town: Town) -> None:
    town.announce(A, bills())
    first = finish(town.planner.backfill(Lane(0, "bills", MINUTE - 300, MINUTE, MINUTE - 300)))
    longer = Lane(0, "bills", MINUTE - 300, MINUTE + 1, MINUTE - 300)
    second = finish(town.planner.backfill(longer))
    assert (second.number, second.until) == (first.number, MINUTE + 1)
    assert finish(town.planner.lanes()) == [second]


def test_a_backfill_from_the_newest_on_gets_a_second_one_for_what_is_newer(town: Town) -> None:
    town.announce(A, bills())
    start = MINUTE - 300

    def asked(until: int) -> Lane:
        lane = Lane(0, "bills", start, until, until - 1, newest_first=True)
        return finish(town.planner.backfill(lane))

    assert asked(MINUTE - 119).number == asked(MINUTE - 90).number == 1  # no slot lies between
    newer = asked(MINUTE + 1)
    assert (newer.number, newer.start, newer.until) == (2, MINUTE - 119, MINUTE + 1)
    assert asked(MINUTE + 1) == newer
    done = []
    for _ in range(9):
        done += town.work()
        town.clocks.advance(1)
    assert sorted(done) == [-300, -240, -180, -120, -60, 0]


# Ends.


def test_a_retired_job_cannot_be_resumed(town: Town) -> None:
    town.announce(A, bills())
    finish(town.planner.pause("bills", reason="olga"))
    finish(town.planner.retire("bills", reason="over"))
    with pytest.raises(Misuse, match="retired"):
        finish(town.planner.resume("bills"))
    town.clocks.advance(120)
    assert town.work() == []


def test_a_retired_job_has_no_new_runs(town: Town) -> None:
    town.announce(A, bills())
    finish(town.planner.retire("bills", reason="over"))
    slot = RunKey("bills", MINUTE)
    want = Want(slot, Holder("n", "here", 1), PATIENT, "bills")
    answer = finish(town.ledger.claim(want))
    assert answer.verdict is Verdict.ENDED
    assert town.runs() == [(0, "skipped", "retired")]


def test_what_waits_of_a_retired_job_ends_and_what_runs_may_finish(town: Town) -> None:
    again = Settled(State.WAITING_RETRY, "error", 20.0, error="Oops")
    town.announce(A, bills(), bills(job="mail"))
    town.clocks.advance(41)
    bill, mail = town.tick(knows=("bills", "mail"))
    finish(town.ledger.finish(attempt_of(bill), again))
    for job in ("bills", "mail"):
        finish(town.planner.retire(job, reason="over"))
    assert town.runs() == [(60, "cancelled", "retired")]
    finish(town.ledger.finish(attempt_of(mail), again))
    town.clocks.advance(30)
    assert town.tick(knows=()) == []  # also if nobody knows it any more
    assert town.runs("mail") == [(60, "cancelled", "retired")]


def test_slots_that_nobody_decided_are_on_record_when_their_job_is_retired(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(161)
    finish(town.planner.retire("bills", reason="over"))
    assert town.spans() == [(60, 180, "skipped", "retired")]


def test_an_edit_of_rules_alone_drops_nothing_that_is_owed(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(161)
    town.announce(A, bills(rules=ALL._replace(limit=500)))
    assert [town.work() for _ in range(4)] == [[60], [120], [180], []]
    assert town.spans() == []


def test_a_pause_that_ended_by_itself_is_not_made_longer_by_a_resume(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    finish(town.planner.pause("bills", reason="olga", until=MINUTE + 130.0))
    town.clocks.advance(221)
    finish(town.planner.resume("bills"))
    assert [town.work() for _ in range(3)] == [[180], [240], []]
    assert town.spans() == [(60, 120, "skipped", "paused")]


def test_what_waits_of_an_orphan_was_missed(town: Town) -> None:
    town.policy = PATIENT._replace(overlap=Overlap.RESCHEDULE)
    town.announce(A, bills())
    town.announce(B)
    town.clocks.advance(41)
    town.tick()
    town.clocks.advance(60)
    town.tick()
    assert town.runs() == [(60, "running", ""), (120, "pending", "lock_held")]
    town.pass_time(ORPHAN_AFTER + 2 * GONE_AFTER, B)
    assert town.job().orphaned_at
    assert town.runs()[1] == (120, "missed", "orphaned")


def test_two_old_names_with_undecided_slots_leave_one_range(town: Town) -> None:
    town.announce(A, bills(), bills(job="mail"))
    town.clocks.advance(161)
    both = ("bills", "mail")
    notes = town.announce(B, bills(HALF_PAST, job="invoices", aliases=both))
    assert notes == ["renamed", "renamed", "skipped"]
    assert town.spans("invoices") == [(60, 180, "skipped", "schedule_changed")]


def test_only_an_instance_renames_a_job(town: Town) -> None:
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(101)
    renamed = bills(rules=ALL, job="invoices", aliases=("bills",))
    assert town.announce(None, renamed) == []
    assert not town.job().retired
    assert town.announce(B, renamed) == ["renamed"]
    assert town.work(knows=("invoices",)) == [60]


def test_a_schedule_that_was_over_before_it_began_is_told_of_once(town: Town) -> None:
    over = Definition("bills", spec_of(At(MINUTE)))
    assert town.announce(A, over) == ["missed"]
    assert town.announce(A, over) == []
    assert town.job().next_due is None


# Ticks.


def test_an_answer_that_was_lost_is_found_without_any_room(town: Town) -> None:
    names = tuple(f"job {number}" for number in range(40))
    town.announce(A, *(bills(job=name) for name in names))
    town.clocks.advance(41)
    knows = town.knowing(*names)
    begun = finish(town.planner.tick(Ask(knows, "ask ", 40))).begun
    again = finish(town.planner.tick(Ask(knows, "ask ", 0, again=1))).begun
    assert len(begun) == len(again) == 40


def test_what_is_due_and_unknown_is_looked_at_in_parts_and_starves_nobody(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.ledger.ticking._MOST_UNKNOWN", 10)
    strangers = tuple(f"a {number:02}" for number in range(25))
    town.announce(A, *(bills(job=name) for name in (*strangers, "bills")))
    town.clocks.advance(41)
    since, begun, ticks = None, 0, 0
    while not begun:
        ask = Ask(town.knowing("bills"), f"ask {ticks} ", 5, since=since)
        ticked = finish(town.planner.tick(ask))
        since, begun, ticks = ticked.left, len(ticked.begun), ticks + 1
    assert ticks == 3


def test_a_waiting_run_is_found_behind_all_those_that_nobody_here_knows(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fencepost.ledger.ticking._MOST_UNKNOWN", 10)
    strangers = tuple(f"a {number:02}" for number in range(15))
    town.announce(A, *(bills(job=name) for name in (*strangers, "bills")))
    town.clocks.advance(41)
    for claimed in town.tick(room=99, knows=(*strangers, "bills")):
        again = Settled(State.WAITING_RETRY, "error", 5.0, error="Oops")
        finish(town.ledger.finish(attempt_of(claimed), again))
    town.clocks.advance(6)
    since, begun = None, []
    for number in range(2):
        ask = Ask(town.knowing("bills"), f"more {number} ", 5, most=4, since=since)
        ticked = finish(town.planner.tick(ask))
        since = ticked.left
        begun += [one.claimed.run.key.job for one in ticked.begun if one.claimed.run]
    assert begun == ["bills"]


def test_a_lane_that_cannot_be_read_is_tried_again_later_and_told_of(town: Town) -> None:
    town.announce(A, bills())
    lane = Lane(0, "bills", MINUTE - 60, MINUTE, MINUTE - 60, spec='{"lunar":1}')
    finish(town.planner.backfill(lane))
    ticked = finish(town.planner.tick(Ask(town.knowing("bills"), "ask ", 5)))
    assert [note.what for note in ticked.notes] == ["trouble"]
    (kept,) = finish(town.planner.lanes())
    assert kept.not_before == town.clocks.wall() + TROUBLE


def test_trouble_with_a_waiting_run_is_told_now_and_then_and_without_secrets(town: Town) -> None:
    town.announce(A, bills())
    town.clocks.advance(41)
    (begun,) = town.tick()
    again = Settled(State.WAITING_RETRY, "error", 5.0, error="Oops")
    finish(town.ledger.finish(attempt_of(begun), again))

    def want(asked: Asked) -> Want | None:
        raise RuntimeError(f"postgresql://u:hunter22@h is away, {asked.template}")

    told = []
    for number in range(10):
        town.clocks.advance(5)
        told += finish(town.planner.tick(Ask(want, f"bad {number} ", 5))).notes
    assert [note.what for note in told] == ["trouble"]
    assert "hunter22" not in str(told)


def test_what_is_made_up_runs_one_at_a_time_also_where_runs_may_overlap(town: Town) -> None:
    town.policy = PATIENT._replace(overlap=Overlap.ALLOW)
    town.announce(A, bills(rules=ALL))
    town.clocks.advance(161)
    for slot in (60, 120, 180):
        (begun,) = town.tick()
        town.clocks.advance(2)
        assert town.tick() == []
        assert begun.run is not None
        assert begun.run.key.slot == MINUTE + slot
        finish(town.ledger.finish(attempt_of(begun), Settled(State.SUCCEEDED)))
        town.clocks.advance(1)
    town.clocks.advance(60)
    assert len(town.tick()) == 1
    town.clocks.advance(60)
    assert len(town.tick()) == 1  # the live ones still overlap


def test_the_time_to_start_is_counted_from_when_jitter_lets_a_slot_start(town: Town) -> None:
    town.policy = PATIENT._replace(overlap=Overlap.RESCHEDULE, start_deadline=20.0)
    slow = Rules(jitter=50.0)
    begins = starts_at(MINUTELY, slow, "bills", MINUTE + 60)
    assert begins > MINUTE + 60 + 21
    town.announce(A, bills(rules=slow))
    town.clocks.advance(begins - MINUTE - 19)
    other = wanted(RunKey("other", MINUTE), "other", lock="bills")
    blocking = finish(town.ledger.claim(other))
    assert town.tick() == []
    finish(town.ledger.finish(attempt_of(blocking), Settled(State.SUCCEEDED)))
    town.clocks.advance(2)
    assert town.work() == [60]
