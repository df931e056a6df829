"""What ``fencepost next`` answers, with and without a ledger."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from seeing_kit import SLOT, Desk, nothing

from fencepost import Cron, EveryAfter, Fencepost
from fencepost.ledger.open import ledger_of
from fencepost.model.schedule import spec_of
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path

BERLIN = ("--tz", "Europe/Berlin")
NIGHTLY = ("next", "--cron", "30 2 * * *", *BERLIN, "--from", "2026-03-27T12:00:00Z")


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


def declared(desk: Desk, definition: str, *, name: str = "job") -> None:
    """Have a job on record, as some version may have written it."""
    world = BlockingWorld()
    ledger = ledger_of(world, open_store(desk.url, world, namespace="default"))
    finish(ledger.register(name, definition))
    finish(ledger.close())


# An expression.


def test_an_expression_needs_no_store(desk: Desk) -> None:
    answer = desk.ask(*NIGHTLY, "-n", "3")
    assert (answer.code, answer.err) == (0, "")
    assert os.listdir(desk.path.parent) == []
    said, headings, *rows = answer.lines
    assert said == "cron '30 2 * * *' in Europe/Berlin: at 02:30 every day, Berlin time"
    assert headings.split("  ")[0] == "SLOT (Europe/Berlin)"
    cells = [re.split(r" {2,}", row) for row in rows]
    assert [(row[0], row[1], row[3]) for row in cells] == [
        ("Sat 2026-03-28 02:30:00+01:00", "2026-03-28T01:30:00Z", "-"),
        (
            "Sun 2026-03-29 03:00:00+02:00",
            "2026-03-29T01:00:00Z",
            "clocks go forward: 02:30 does not exist, runs at 03:00",
        ),
        ("Mon 2026-03-30 02:30:00+02:00", "2026-03-30T00:30:00Z", "-"),
    ]


def test_without_a_number_there_are_five_from_now_on(desk: Desk) -> None:
    answer = desk.ask("next", "--cron", "*/15 * * * *")
    assert len(answer.lines) == 7
    assert answer.lines[0].endswith(": every 15 minutes at :00, :15, :30 and :45, UTC")
    assert answer.lines[1].split() == ["SLOT", "(UTC)", "DUE"]
    assert re.search(r"  in [\d.]+ (s|min)$", answer.lines[2])


def test_quiet_says_the_slots_alone(desk: Desk) -> None:
    assert len(desk.ask("next", "--every", "15m", "--quiet").lines) == 5


def test_programs_get_all_of_it(desk: Desk) -> None:
    document = desk.ask(*NIGHTLY, "-n", "2", "--json").json
    for slot in document["slots"]:
        assert slot.pop("in") == pytest.approx(0, abs=1e10)
    assert document == {
        "job": None,
        "schedule": "cron '30 2 * * *' in Europe/Berlin",
        "described": "at 02:30 every day, Berlin time",
        "spec": '{"cron":"30 2 * * *","tz":"Europe/Berlin"}',
        "tz": "Europe/Berlin",
        "doubt": None,
        "after": "2026-03-27T12:00:00Z",
        "slots": [
            {"slot": "2026-03-28T01:30:00Z", "local": "2026-03-28T02:30:00+01:00", "note": None},
            {
                "slot": "2026-03-29T01:00:00Z",
                "local": "2026-03-29T03:00:00+02:00",
                "note": "clocks go forward: 02:30 does not exist, runs at 03:00",
            },
        ],
    }


def test_a_doubt_is_a_warning(desk: Desk) -> None:
    answer = desk.ask("next", "--cron", "* 9 * * *")
    assert answer.code == 0
    assert answer.err.startswith("fencepost: warning: cron '* 9 * * *' in UTC is due in every")
    assert len(answer.err.splitlines()) == 1
    document = desk.ask("next", "--cron", "* 9 * * *", "--json")
    assert "did you mean '0 9 * * *'?" in document.json["doubt"]
    assert document.err == ""


def test_the_words_of_cron_can_be_tried(desk: Desk) -> None:
    words = ("--second", "5", "--day-match", "and", "--dst-gap", "skip", "--dst-fold", "both")
    answer = desk.ask("next", "--cron", "H 2 13 * FRI", *BERLIN, *words, "billing", "--json")
    expected = Cron(
        "H 2 13 * FRI",
        "Europe/Berlin",
        spread="billing",
        second=5,
        day_match="and",
        dst_gap="skip",
        dst_fold="both",
    )
    assert answer.json["spec"] == spec_of(expected)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "give a JOB that the ledger knows, or --cron"),
        (("--tz", "Asia/Tokyo"), "--tz belongs to --cron"),
        (("job", "--dst-gap", "skip"), "--dst-gap belongs to --cron"),
        (("--cron", "0 2 * *"), "cron '0 2 * *' has 4 fields"),
        (("--cron", "H 2 * * *"), "no name to spread by"),
        (("--cron", "0 2 * * *", "--every", "5m"), "choose one"),
        (("--every", "5m", "--tz", "Asia/Tokyo"), "would not follow"),
        (("--every", "5m", "-n", "0"), "-n is 0: it must be between 1 and 1000"),
        (("--every", "5m", "-n", "1001"), "-n is 1001"),
        (("--every", "5m", "--from", "noon"), "--from is 'noon': write an instant and its zone"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence_with_2(
    desk: Desk, words: tuple[str, ...], sentence: str
) -> None:
    answer = desk.ask("next", *words)
    assert (answer.code, answer.out) == (2, "")
    assert sentence in answer.err
    assert len(answer.err.splitlines()) == 1


def test_to_try_an_expression_does_not_import_a_store() -> None:
    program = (
        "import sys; from fencepost.cli.main import main\n"
        "main(['next', '--cron', '0 2 * * *', '--quiet'])\n"
        "sys.exit('sqlite3' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# A job.


def test_a_job_is_looked_up_in_the_ledger(desk: Desk) -> None:
    declared(desk, '{"schedule": "every 1 h", "spec": "{\\"every\\":3600}"}')
    answer = desk.ask("next", "job", "-n", "2", "--from", SLOT)
    assert (answer.code, answer.err) == (0, "")
    assert answer.lines[0] == "every 1 h: every hour at :00"
    assert [line[:29] for line in answer.lines[2:]] == [
        "Tue 2026-01-20 03:00:00+00:00",
        "Tue 2026-01-20 04:00:00+00:00",
    ]
    assert desk.ask("next", "job", "--json").json["job"] == "job"


def test_what_a_program_declares_can_be_asked_for(desk: Desk) -> None:
    desk.ran(nothing, SLOT)
    assert desk.ask("next", "job").lines[0] == "every 1 h: every hour at :00"


def test_a_job_that_runs_after_itself_counts_from_its_last_run(desk: Desk) -> None:
    with Fencepost(desk.url) as fp:
        fp.job("job", every=EveryAfter("15m"))(nothing)
        fp.trigger("job", SLOT)
    answer = desk.ask("next", "job")
    assert answer.lines[0].endswith("15 minutes after the last run has ended")
    assert answer.lines[1].startswith("if the last run ended at ")
    assert len(answer.lines) == 4
    assert re.search(r"in 1[45] min$", answer.lines[3])


def test_an_unknown_job_is_one_sentence_with_2(desk: Desk) -> None:
    answer = desk.ask("next", "nope")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "fencepost: no job is called 'nope'; known here: none\n"
    assert os.listdir(desk.path.parent) == []


@pytest.mark.parametrize(
    ("definition", "sentence"),
    [
        ('{"schedule": null}', "job 'job' has no schedule: whoever triggers it gives its slots"),
        ('{"schedule": "every 1 h"}', "has job 'job' as 'every 1 h', in words only"),
        ('{"schedule": "full moon", "spec": "{\\"moon\\":1}"}', "by a newer version of fencepost"),
    ],
)
def test_a_job_whose_slots_cannot_be_known_is_one_sentence_with_2(
    desk: Desk, definition: str, sentence: str
) -> None:
    declared(desk, definition)
    answer = desk.ask("next", "job")
    assert (answer.code, answer.out) == (2, "")
    assert sentence in answer.err


def test_a_job_that_was_due_once_is_due_no_more(desk: Desk) -> None:
    declared(desk, '{"schedule": "once at …", "spec": "{\\"at\\":1768874400}"}')
    answer = desk.ask("next", "job", "--from", SLOT)
    assert answer.lines == [
        "once at 2026-01-20T02:00:00Z: once, at 2026-01-20T02:00:00Z",
        "there is no slot after 2026-01-20T02:00:00Z",
    ]
    assert desk.ask("next", "job", "--from", SLOT, "--json").json["slots"] == []
