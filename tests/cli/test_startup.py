"""A command that is put behind ``fencepost exec`` does not wait for what it does not need."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Of the standard library, these and what they import themselves.
STANDARD = [
    "__future__",
    "argparse",
    "atexit",
    "collections",
    "contextlib",
    "encodings.ascii",
    "encodings.unicode_escape",
    "enum",
    "errno",
    "fcntl",
    "functools",
    "importlib",
    "locale",
    "math",
    "mmap",
    "os",
    "re",
    "select",
    "signal",
    "sqlite3",
    "sys",
    "threading",
    "time",
    "warnings",
    "weakref",
    "zlib",
]

# What costs milliseconds, and only other verbs or an error may need.
DEAR = {
    "asyncio",
    "dataclasses",
    "inspect",
    "json",
    "logging",
    "pathlib",
    "random",
    "shutil",
    "socket",
    "subprocess",
    "typing",
    "urllib",
}

OURS = {
    "fencepost",
    "fencepost.cli",
    "fencepost.cli.asking",
    "fencepost.cli.exec",
    "fencepost.cli.main",
    "fencepost.errors",
    "fencepost.flows",
    "fencepost.flows.acquire",
    "fencepost.flows.command",
    "fencepost.flows.divide",
    "fencepost.flows.keep",
    "fencepost.flows.release",
    "fencepost.model",
    "fencepost.model.command",
    "fencepost.model.divided",
    "fencepost.model.duration",
    "fencepost.model.event",
    "fencepost.model.lease",
    "fencepost.model.name",
    "fencepost.model.named",
    "fencepost.model.watch",
    "fencepost.stores",
    "fencepost.stores.api",
    "fencepost.stores.open",
    "fencepost.stores.sqlite",
    "fencepost.stores.sqlite_handover",
    "fencepost.stores.sqlite_inner",
    "fencepost.stores.sqlite_reserve",
    "fencepost.stores.sqlite_rows",
    "fencepost.stores.sqlite_schema",
    "fencepost.version",
    "fencepost.world",
    "fencepost.world.blocking",
    "fencepost.world.board",
    "fencepost.world.clocks",
    "fencepost.world.disk",
    "fencepost.world.flow",
    "fencepost.world.guardian",
    "fencepost.world.guards",
    "fencepost.world.line",
    "fencepost.world.pulse",
    "fencepost.world.seat",
    "fencepost.world.sentinel",
    "fencepost.world.sqlite",
    "fencepost.world.strays",
    "fencepost.world.wire",
}

RUNNER = """
import sys
from fencepost.cli.main import main
code = main(["exec", "job", "--", "true"])
print(*sys.modules)
sys.exit(code)
"""


def modules_after(program: str, folder: Path) -> set[str]:
    """Return what a program has imported at its end."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "FENCEPOST_URL": f"sqlite:///{folder}/leases.db"},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_exec_imports_only_what_is_listed_here(tmp_path: Path) -> None:
    alone = modules_after(f"import {', '.join(STANDARD)}; print(*sys.modules)", tmp_path)
    assert not alone & DEAR, "the standard library has changed: the list must shrink"
    used = modules_after(RUNNER, tmp_path)
    assert {name for name in used if name.startswith("fencepost")} == OURS
    assert used - alone - OURS == set()
