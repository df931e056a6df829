"""Tests start servers from any checkout, also below a folder that other users may not enter."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from servers.reach import as_nobody, reachable

if TYPE_CHECKING:
    from pathlib import Path


def test_a_program_below_a_closed_folder_is_run_by_the_user_that_servers_have(
    tmp_path: Path,
) -> None:
    closed = tmp_path / "closed"
    programs = closed / ".programs"
    programs.mkdir(parents=True)
    program = programs / "says-hello"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o700)
    closed.chmod(0o700)
    words = as_nobody([str(reachable(programs) / "says-hello")])
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"hello\n"
