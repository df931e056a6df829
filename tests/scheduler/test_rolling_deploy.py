"""While two versions of a program are up, the newer one says what its jobs are, and only it."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from schedlab import (
    Heard,
    Member,
    books_of,
    effects,
    members,
    repeated,
    told,
    unproven,
    until,
    url_of,
)

from fencepost import Fencepost, Misuse
from fencepost.testing.clock import SettableClocks

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

GONE, ORPHAN = 3.0, 4.0


def member(folder: Path, version: str) -> Member:
    every = {"A": "1s", "B": "2s"}[version]
    return Member(
        folder, "deploy", version=version, every=every, gone_after=GONE, orphan_after=ORPHAN
    )


def edits(folder: Path) -> list[str]:
    return [event["now"] for event in told(folder) if event["what"] == "edited"]


def test_a_rolling_deploy_changes_the_schedule_once_and_makes_no_orphan_in_silence(
    tmp_path: Path,
) -> None:
    dice = random.Random(7)
    with members() as fleet:
        old = [member(tmp_path, "A") for _ in range(2)]
        fleet.extend(old)
        until(lambda: len(effects(tmp_path)) >= 4)
        new = [member(tmp_path, "B") for _ in range(2)]
        fleet.extend(new)
        until(lambda: edits(tmp_path))
        changed_at = time.time()
        for _ in range(4):  # both restart at random, at times by accident
            group, version = dice.choice([(old, "A"), (new, "B")])
            victim = group.pop(dice.randrange(2))
            if dice.random() < 0.5:
                victim.kill()
            else:
                victim.ask_to_stop()
            group.append(member(tmp_path, version))
            fleet.append(group[-1])
            time.sleep(0.7)
        for one in old:
            one.ask_to_stop()
            assert one.ended() == 0
        until(lambda: "orphaned" in [event["what"] for event in told(tmp_path)])
        seen = len(effects(tmp_path))
        until(lambda: len(effects(tmp_path)) > seen)
        for one in new:
            one.ask_to_stop()
            assert one.ended() == 0
    books, done = books_of(tmp_path), effects(tmp_path)
    assert len(edits(tmp_path)) == 1  # no flip-flop
    assert repeated(books, done) == []
    assert unproven(tmp_path) == []
    kept = next(job for job in books.jobs if job.job == "kept")
    assert kept.epoch == 2
    # From the change on only slots of the new schedule run, and none of before it, whoever runs it.
    later = [effect for effect in done if effect.job == "kept" and effect.slot > changed_at + 1]
    assert later
    assert all(effect.slot % 2 == 0 for effect in later)
    for run in books.runs:
        assert run.started_at == 0 or run.key.slot >= run.started_at - 3, run
    (orphan,) = [event for event in told(tmp_path) if event["what"] == "orphaned"]
    assert orphan["job"] == "removed"
    removed = next(job for job in books.jobs if job.job == "removed")
    assert removed.barred == "orphaned"


class Versions:
    """Two versions on one machine whose clock is ours."""

    def __init__(self, folder: Path) -> None:
        self.clocks, self.heard, self.folder = SettableClocks(), Heard(), folder
        self.open: list[Fencepost] = []

    def up(self, every: str, *, version: int = 0, name: str = "job", **words: object) -> Fencepost:
        fp = Fencepost(
            url_of(self.folder), clocks=self.clocks, on_event=self.heard, version=version
        )
        fp.job(name, every=every, **words)(lambda: None)  # type: ignore[arg-type]
        fp.tick()
        self.open.append(fp)
        return fp

    def spec(self, name: str = "job") -> str:
        return next(job.spec for job in books_of(self.open[0]).jobs if job.job == name)

    def passes(self, seconds: float, *alive: Fencepost) -> None:
        """Let time pass in which only those are heard of."""
        for _ in range(int(seconds // 20)):
            self.clocks.advance(20)
            for fp in alive:
                fp.tick()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fp in self.open:
            fp.close()


def test_an_old_instance_that_restarts_does_not_bring_the_old_schedule_back(tmp_path: Path) -> None:
    with Versions(tmp_path) as versions:
        old = versions.up("10m")
        versions.clocks.advance(1)
        new = versions.up("20m")
        assert "1200" in versions.spec()
        versions.clocks.advance(1)
        again = versions.up("10m")
        versions.passes(120, old, new, again)
        assert "1200" in versions.spec()
        # A rollback: the newer ones are gone, and the older definition is in force again.
        versions.passes(120, old, again)
        assert "600" in versions.spec()
        assert versions.heard.names().count("edited") == 2


def test_a_version_number_goes_before_age(tmp_path: Path) -> None:
    with Versions(tmp_path) as versions:
        versions.up("20m", version=2)
        versions.clocks.advance(1)
        versions.up("10m", version=1)
        assert "1200" in versions.spec()


def test_a_version_that_is_no_number_and_a_time_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="version is 'B'"):
        Fencepost(url_of(tmp_path), version="B")  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="orphan_after"):
        Fencepost(url_of(tmp_path), orphan_after=0)


def test_a_job_that_is_known_again_owes_nothing_of_the_time_it_was_an_orphan(
    tmp_path: Path,
) -> None:
    with Versions(tmp_path) as versions:
        versions.up("1m", name="lost")
        other = versions.up("1m", name="other")
        versions.passes(1200, other)
        assert "orphaned" in versions.heard.names()
        spans = other.slots("lost").spans
        assert [record.span.reason for record in spans][-1] == "orphaned"
        back = versions.up("1m", name="lost")
        assert "known_again" in versions.heard.names()
        assert back.tick() == []
        versions.clocks.advance(60)
        assert [outcome.status for outcome in back.tick() if "lost" in outcome.run_id] == [
            "succeeded"
        ]


def test_a_job_with_a_new_name_stands_where_it_stood_under_the_old_one(tmp_path: Path) -> None:
    with Versions(tmp_path) as versions:
        old = versions.up("1m", name="before")
        versions.clocks.advance(60)
        assert len(old.tick()) == 1
        new = versions.up("1m", name="after", aliases=["before"])
        assert "renamed" in versions.heard.names()
        assert new.tick() == []  # the slot ran already, under its old name
        versions.clocks.advance(60)
        assert [outcome.run_id.split("@")[0] for outcome in new.tick()] == ["after"]
        assert old.tick() == []


def test_a_retired_job_stays_retired_whoever_declares_it(tmp_path: Path) -> None:
    with Versions(tmp_path) as versions:
        fp = versions.up("1m")
        fp.retire("job", reason="gone for good")
        stray = versions.up("1m")
        versions.clocks.advance(60)
        assert fp.tick() == stray.tick() == []
        assert "retired" in versions.heard.names()
        (job,) = books_of(fp).jobs
        assert job.retired == "gone for good"
