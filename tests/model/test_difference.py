"""What registering definitions would change is told as it would happen."""

from __future__ import annotations

from fencepost.model.definition import Definition, JobRecord
from fencepost.model.difference import difference
from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.run import RunRecord, State
from fencepost.model.schedule import Cron, Every, spec_of
from fencepost.model.slot import RunKey

NOW = 1_700_000_020.0  # 40 s before a full minute
MINUTE, HOUR = 60, 3600


def defined(job: str = "bills", every: Every | Cron | None = None, **words: object) -> Definition:
    rules = words.pop("rules", Rules())
    assert isinstance(rules, Rules)
    spec = spec_of(every or Every(MINUTE))
    return Definition(job, spec, text_of(rules), job, **words)  # type: ignore[arg-type]


def known(definition: Definition, **words: object) -> JobRecord:
    record = JobRecord(
        definition.job,
        definition.facts,
        spec=definition.spec,
        rules=definition.rules,
        template=definition.template,
        digest=definition.digest,
        epoch=1,
        watermark=int(NOW),
    )
    return record._replace(**words)  # type: ignore[arg-type]


def test_a_job_that_nobody_knows_is_new_and_owes_nothing() -> None:
    found = difference([], [defined()], now=NOW)
    (new,) = found.new
    assert new.schedule.startswith("every 1 min")
    assert new.next == (1_700_000_040.0, 1_700_000_100.0, 1_700_000_160.0)
    assert not found.empty


def test_a_job_that_is_known_from_triggers_only_is_new_too() -> None:
    assert difference([JobRecord("bills")], [defined()], now=NOW).new


def test_the_same_definition_changes_nothing() -> None:
    found = difference([known(defined())], [defined()], now=NOW)
    assert (found.unchanged, found.empty) == (("bills",), True)


def test_an_edit_says_each_word_before_and_after() -> None:
    edited = defined(every=Every(HOUR), rules=Rules(CatchUp.ALL), facts='{"overlap": "allow"}')
    record = known(defined(facts='{"overlap": "skip"}'))
    (changed,) = difference([record], [edited], now=NOW).changed
    said = {word.name: (word.was, word.now) for word in changed.words}
    assert said["overlap"] == ("skip", "allow")
    assert said["catchup"] == ("latest", "all")
    assert [text.partition(":")[0] for text in said["schedule"]] == ["every 1 min", "every 1 h"]
    assert changed.before[0] == 1_700_000_040.0
    assert changed.after[0] == 1_700_002_800.0


def test_slots_that_are_due_under_the_old_schedule_only_would_be_skipped() -> None:
    record = known(defined(), watermark=int(NOW) - 3 * MINUTE)
    (changed,) = difference([record], [defined(every=Every(HOUR))], now=NOW).changed
    assert len(changed.skipped) == 3
    assert changed.skipped[-1] == 1_699_999_980


def test_a_due_slot_stays_if_both_schedules_have_it() -> None:
    record = known(defined(), watermark=int(NOW) - 3 * MINUTE)
    (changed,) = difference([record], [defined(every=Every(30))], now=NOW).changed
    assert changed.skipped == (1_699_999_860, 1_699_999_920), "only the newest would be caught up"
    edited = defined(every=Every(30), rules=Rules(CatchUp.ALL))
    (changed,) = difference([record], [edited], now=NOW).changed
    assert changed.skipped == ()
    (changed,) = difference([record], [defined(rules=Rules(CatchUp.ALL))], now=NOW).changed
    assert changed.skipped == ()


def test_a_run_that_waits_stays_only_if_the_new_schedule_has_its_slot() -> None:
    on_the_hour, off = 1_699_999_200, 1_699_999_260
    waiting = [
        RunRecord(RunKey("bills", slot), State.PENDING, "bills", trigger="schedule")
        for slot in (on_the_hour, off)
    ]
    assert Every(HOUR).contains(on_the_hour)
    edited = [defined(every=Every(HOUR))]
    (changed,) = difference([known(defined())], edited, now=NOW, waiting=waiting).changed
    assert changed.skipped == (off,)


def test_an_edit_that_leaves_time_alone_skips_nothing() -> None:
    record = known(defined(), watermark=int(NOW) - 3 * MINUTE)
    (changed,) = difference([record], [defined(facts='{"timeout": 5}')], now=NOW).changed
    assert changed.skipped == ()
    assert [word.name for word in changed.words] == ["timeout"]


def test_a_job_that_is_declared_nowhere_is_missing_unless_it_lives_in_the_ledger() -> None:
    records = [
        known(defined("gone")),
        known(defined("stored"), stored=True),
        known(defined("over"), retired="replaced"),
        JobRecord("triggered"),
    ]
    found = difference(records, [], now=NOW)
    assert (found.missing, found.empty) == (("gone",), True)


def test_a_name_that_was_retired_is_not_brought_back() -> None:
    found = difference([known(defined(), retired="replaced")], [defined()], now=NOW)
    assert (found.retired, found.new) == ((("bills", "replaced"),), ())


def test_a_job_with_another_name_is_renamed_and_the_old_one_is_not_missing() -> None:
    found = difference([known(defined("old"))], [defined(aliases=("old",))], now=NOW)
    assert (found.new[0].was, found.missing) == ("old", ())


def test_a_schedule_that_may_not_be_meant_is_told() -> None:
    found = difference([], [defined(every=Cron("* 5 * * *"))], now=NOW)
    assert [job for job, _ in found.doubts] == ["bills"]
