"""``fencepost simulate``: what it prints, and what its exit code says."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import planted_runs
import pytest
from planted import CHECK_THEN_SET

from fencepost.cli import simulate as command
from fencepost.cli.main import main
from fencepost.testing.history import Event, from_lines
from fencepost.testing.simulator import runs
from fencepost.testing.simulator.cluster import simulate

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, str], list[Event]]:
    def history(of: str, seed: int, _store: str) -> list[Event]:
        return simulate(seed, parts=CHECK_THEN_SET) if of == "leases" else []

    monkeypatch.setattr(command, "_history", history)
    return history


def test_clean_seeds_end_with_one_line_and_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "5", "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"5 seeds of {', '.join(command.SIMULATIONS)}: 0 violations, ")
    assert out.count("\n") == 1
    assert err == ""


def test_quiet_and_clean_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "3", "--jobs", "1", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("planted")
def test_a_violation_is_explained_and_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--first", "3", "--seeds", "5", "--jobs", "1"]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith("seed 3 of leases: one holder: ")
    assert "granted" in out
    assert "replay: fencepost simulate --of leases --first 3 --seeds 1 --store memory" in out
    assert "also violated by: " in out
    assert out.splitlines()[-1].startswith("5 seeds of ")


@pytest.mark.usefixtures("planted")
def test_json_tells_the_seed_and_the_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "1", "--jobs", "1", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    found = [(one["of"], one["seed"], one["rule"]) for one in answer["violations"]]
    assert found == [("leases", 0, "one holder")]


def test_a_history_can_be_read_back_from_what_was_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["simulate", "--of", "leases", "--first", "2", "--seeds", "1", "--history", "--json"])
        == 0
    )
    assert from_lines(capsys.readouterr().out.splitlines()) == simulate(2)


@pytest.mark.usefixtures("planted")
def test_a_replay_shows_the_whole_history_and_every_violation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "--seeds", "1", "--history"]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith("seed 0 of leases\n")
    assert "ended" in out
    assert "seed 0 of leases: one holder: " in out


@pytest.mark.parametrize("flag", ["--seeds", "--jobs"])
def test_less_than_one_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["simulate", flag, "0"])
    assert refused.value.code == 2
    assert "at least 1" in capsys.readouterr().err


def test_a_simulation_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--of", "races", "--seeds", "5", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.startswith("5 seeds of races: 0 violations, ")


def test_a_broken_promise_about_a_run_is_explained_with_what_happened_to_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, parts = planted_runs.PLANTED["a take-over keeps the token"]
    monkeypatch.setattr(runs, "MEMORY", parts)
    assert main(["simulate", "--of", "runs", "--seeds", "20", "--jobs", "1"]) == 1
    out, _ = capsys.readouterr()
    assert re.search(r"seed \d+ of runs: (tokens grow|newest wins): '?job\d[@#]", out)
    assert "claimed" in out
    assert "replay: fencepost simulate --of runs --first " in out
