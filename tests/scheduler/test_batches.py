"""What a tick claims and ends by the batch: the usual all at once, the others as ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from schedlab import Noon, url_of

from fencepost import Fencepost
from fencepost.errors import RunLost
from fencepost.ledger.api import NOTHING, Attempt, Report
from fencepost.ledger.planning import Ask, Begun, End, Ticked
from fencepost.model.ending import Settled
from fencepost.model.run import RunRecord, State
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from fencepost.ledger.api import Ledger

DONE = Settled(State.SUCCEEDED, result='"é\\n"')


class Lab:
    """An instance with many jobs that are due in an hour, all under one clock."""

    def __init__(self, folder: Path, *, jobs: int = 30, **words: Any) -> None:
        self.clocks = Noon()
        self.fp = Fencepost(url_of(folder), clocks=self.clocks)
        self.fp.job("template", every="1d", lease="1d", **words)(lambda run: None)
        self.fp.tick()
        self.fp.store("template", ({"name": f"job-{n:03}", "every": "1h"} for n in range(jobs)))
        self.ledger: Ledger = self.fp._working.ledger
        self.sent: list[str] = []
        file = self.fp._holding.store.file  # type: ignore[attr-defined]
        file._connection.set_trace_callback(self.sent.append)
        self.number = 0

    def tick(self, room: int, ended: Sequence[End] = ()) -> Ticked:
        self.number += 1
        ask = Ask(self.fp._scheduling.serving.want, f"n{self.number}-", room, ended)
        return finish(self.ledger.planner.tick(ask))

    def puts(self, view: str) -> int:
        """Return how many statements have put something into a view."""
        return len({sent for sent in self.sent if sent.startswith(f"INSERT INTO {view} ")})

    def begun(self, room: int) -> list[Begun]:
        self.clocks.advance(3600)
        return self.tick(room).begun

    def run(self, job: str) -> RunRecord:
        (run,) = finish(self.ledger.runs(job))
        return run


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.fp.close()


def attempt_of(begun: Begun) -> Attempt:
    run = begun.claimed.run
    assert run is not None
    return Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))


def ends_of(begun: Sequence[Begun], *, report: Report = NOTHING) -> list[End]:
    return [End(attempt_of(one), DONE, report) for one in begun]


def test_thirty_that_are_due_are_claimed_by_three_statements(lab: Lab) -> None:
    begun = lab.begun(30)
    assert len(begun) == 30
    assert lab.puts("fencepost_slot") == 3


def test_thirty_that_have_ended_are_ended_by_three_statements(lab: Lab) -> None:
    begun = lab.begun(30)
    answers = lab.tick(0, ends_of(begun)).ended
    ended = [run for run in answers if isinstance(run, RunRecord)]
    assert [run.state for run in ended] == [State.SUCCEEDED] * 30
    assert lab.puts("fencepost_end") == 3
    written = finish(lab.ledger.runs(limit=100))
    assert sorted(written) == sorted(ended)  # as it answers, so it is written


def test_each_that_is_claimed_has_a_token_of_its_own_that_was_issued_by_now(lab: Lab) -> None:
    begun = lab.begun(30)
    tokens = [attempt_of(one).token for one in begun]
    assert len(set(tokens)) == 30
    assert max(tokens) <= lab.clocks.wall() * 1e6
    for one in begun:
        assert one.claimed.run == lab.run(attempt_of(one).key.job)


def test_what_the_batch_cannot_have_is_decided_and_the_others_have_it(lab: Lab) -> None:
    held = lab.begun(1)
    lab.clocks.advance(3600)
    begun = lab.tick(40).begun
    assert attempt_of(held[0]).key.job == "job-000"
    # Of the first hour all others, of the second one all but the one that still runs.
    assert {attempt_of(one).key.job for one in begun} == {f"job-{n:03}" for n in range(1, 30)}
    skipped, running = finish(lab.ledger.runs("job-000"))
    assert (skipped.state, skipped.reason) == (State.SKIPPED, "lock_held")
    assert running.state is State.RUNNING
    job = finish(lab.ledger.planner.job("job-000"))
    assert job is not None
    assert job.watermark == skipped.key.slot


def test_a_place_that_one_of_the_batch_cannot_use_goes_to_the_next(lab: Lab) -> None:
    lab.begun(1)
    lab.clocks.advance(3600)
    assert len(lab.tick(5).begun) == 5


def test_jobs_of_one_lock_that_are_due_together_run_one_at_a_time(tmp_path: Path) -> None:
    lab = Lab(tmp_path, jobs=12, lock="one", overlap="reschedule")
    begun = lab.begun(12)
    assert len(begun) == 1
    again = lab.tick(12, ends_of(begun)).begun
    assert len(again) <= 1
    lab.fp.close()


@pytest.mark.parametrize("room", [1, 10])
def test_a_live_slot_has_its_turn_before_a_later_one_of_its_lock_that_is_made_up(
    tmp_path: Path, room: int
) -> None:
    clocks = Noon()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        fp.job("a", every="1h", lock="one", lease="1d", overlap="skip")(lambda: None)
        fp.job("b", every="1h", lock="one", lease="1d", catchup="all")(lambda: None)
        fp.tick()
        clocks.advance(3600)
        ask = Ask(fp._scheduling.serving.want, "n1-", room, ())
        ticked = finish(fp._working.ledger.planner.tick(ask))
        assert [attempt_of(one).key.job for one in ticked.begun] == ["a"]
        assert [note.what for note in ticked.notes] == []


def test_what_is_remembered_of_another_attempt_is_not_the_answer_to_an_end(lab: Lab) -> None:
    begun = lab.begun(10)
    books = lab.ledger.books  # type: ignore[attr-defined]
    for one in begun:
        attempt = attempt_of(one)
        books._begun[attempt.nonce] = lab.run(attempt.key.job)._replace(token=1, starts=7)
    alone = finish(lab.ledger.finish(attempt_of(begun[0]), DONE))
    answers = lab.tick(0, ends_of(begun[1:])).ended
    assert [alone, *answers] == [lab.run(attempt_of(each).key.job) for each in begun]


def test_an_end_that_nobody_expected_is_answered_beside_the_usual_ones(lab: Lab) -> None:
    begun = lab.begun(12)
    saved, cancelled, lost, *_ = map(attempt_of, begun)
    finish(lab.ledger.save(saved, checkpoint="7", order=1))
    finish(lab.ledger.cancel(cancelled.key, force=False, operator="olga"))
    finish(lab.ledger.cancel(lost.key, force=True, operator="olga"))
    answers = lab.tick(0, ends_of(begun)).ended
    of_saved, of_cancelled, of_lost, *usual = answers
    assert isinstance(of_lost, RunLost)
    assert [run for run in answers if isinstance(run, RunRecord)] == [
        lab.run(attempt_of(one).key.job) for one in begun if attempt_of(one) != lost
    ]
    assert isinstance(of_saved, RunRecord)
    assert of_saved.checkpoint == "7"
    assert isinstance(of_cancelled, RunRecord)
    assert of_cancelled.cancel_at
    assert len(usual) == 9


def test_ends_are_told_again_after_a_lost_reply_and_found_as_they_are(lab: Lab) -> None:
    begun = lab.begun(12)
    first = lab.tick(0, ends_of(begun)).ended
    lab.clocks.advance(1)
    assert lab.tick(0, ends_of(begun)).ended == first


def test_what_was_reported_along_with_an_end_is_kept(lab: Lab) -> None:
    begun = lab.begun(10)
    ended = lab.tick(0, ends_of(begun, report=Report(3, 4))).ended
    assert {(run.done, run.total) for run in ended if isinstance(run, RunRecord)} == {(3, 4)}


def test_an_ended_attempt_frees_its_lease_by_the_batch_too(lab: Lab) -> None:
    lab.tick(0, ends_of(lab.begun(30)))
    assert finish(lab.fp._holding.locks()) == []


def test_of_two_ends_of_one_attempt_the_first_word_counts(lab: Lab) -> None:
    one, *_ = lab.begun(10)
    again = End(attempt_of(one), Settled(State.WAITING_RETRY, "error", 20.0, error="Oops"), NOTHING)
    first, second = lab.tick(0, [again, *ends_of([one])]).ended
    assert isinstance(first, RunRecord)
    assert first.state is State.WAITING_RETRY
    assert isinstance(second, RunLost)
