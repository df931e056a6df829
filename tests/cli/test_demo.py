"""The demo is a real run: its processes are killed and paused, and it counts what became of it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from exec_kit import PATIENCE, Kit, kit_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with kit_in(tmp_path) as kit:
        yield kit


def test_a_lock_changes_hands_and_the_fence_keeps_the_zombie_out(kit: Kit) -> None:
    done = kit.fencepost("demo", "--act", "1", TMPDIR=str(kit.folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"behind the fence +3 +0\n +without a fence +4 +1\n", done.stdout)
    assert "TokenStale" in done.stdout


def test_a_cluster_runs_each_slot_once_where_a_plain_lock_does_not(kit: Kit) -> None:
    process = kit.start("demo", "--act", "2", TMPDIR=str(kit.folder))
    out, err = process.communicate(timeout=2 * PATIENCE)
    assert process.returncode == 0, out + err
    for event in ("is killed with -9", "is paused in the middle", "goes on", "takes over"):
        assert event in out, out
    rows = {
        row[1]: [int(number) for number in row[2].split()]
        for row in re.finditer(r"^  (fencepost|plain lock) +([\d ]+)$", out, re.MULTILINE)
    }
    slots, lines, twice, never = rows["fencepost"]
    assert (lines, twice, never) == (slots, 0, 0)
    assert slots >= 15
    # Nothing is rigged: the plain lock had the same processes, the same kill and the same pause.
    assert rows["plain lock"][0] == slots
    assert sum(rows["plain lock"][2:]) > 0
    assert "every promise is proven" in out
    assert list(kit.folder.iterdir()) == []
