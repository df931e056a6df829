"""The examples in the README and the docs run as they stand."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fencepost.model.run import diagram

ROOT = Path(__file__).parent.parent


def examples(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/testing.md",
        "docs/jobs.md",
        "docs/scheduler.md",
        "docs/effects.md",
        "docs/executors.md",
        "docs/alarms.md",
    ],
)
def test_the_examples_run(page: str, tmp_path: Path) -> None:
    found = examples(page)
    assert found, f"{page} has no example"
    for example in found:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_readme_example_sends_each_invoice_once(tmp_path: Path) -> None:
    example = examples("README.md")[0]
    for _ in range(2):
        subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True)
    with contextlib.closing(sqlite3.connect(tmp_path / "fencepost.db")) as ledger:
        assert ledger.execute("SELECT number FROM sent").fetchall() == [(0,), (1,), (2,)]
        assert ledger.execute("SELECT starts FROM fencepost_run").fetchall() == [(1,)]


def test_every_page_that_is_linked_to_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_two_commands_are_on_the_first_screen() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[:45]
    assert any("make demo" in line for line in first)
    assert any("make test" in line for line in first)


def test_the_diagram_of_a_runs_lives_is_made_from_the_table() -> None:
    (shown,) = re.findall(r"```mermaid\n(.*?)\n```", (ROOT / "docs/jobs.md").read_text(), re.DOTALL)
    assert shown == diagram()
