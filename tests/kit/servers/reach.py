"""Programs at a place that the user who runs them may enter.

PostgreSQL, MariaDB, MySQL and PgBouncer refuse to be run by root, so the tests of root run them as
nobody. Where the checkout lies below a folder that nobody may not enter, as ``/root`` is in most
containers, the tests run copies of these programs from a temporary folder.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NOBODY = 65534
# The folder of the copies. All processes of one test run share it; the first process removes it.
_COPIES = "FENCEPOST_PROGRAMS"


def as_nobody(words: Sequence[str]) -> list[str]:
    """Return the words that run a program which refuses to be run by root."""
    if os.getuid() != 0:
        return list(words)
    user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    return ["setpriv", *user, "--pdeathsig", "KILL", *words]


def share_copies() -> None:
    """Have this process and those that it starts keep their copies in one folder."""
    if _COPIES not in os.environ:
        folder = tempfile.mkdtemp(prefix="fencepost-programs-")
        os.chmod(folder, 0o755)
        os.environ[_COPIES] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


@functools.cache
def reachable(folder: Path) -> Path:
    """Return the folder, or a copy of it if the user that runs its programs may not enter it."""
    if os.getuid() != 0 or not folder.exists() or _may_enter(folder):
        return folder
    share_copies()
    copy = Path(os.environ[_COPIES]) / folder.name.lstrip(".")
    if not copy.exists():
        _copy(folder, copy)
    return copy


def _may_enter(folder: Path) -> bool:
    words = as_nobody(["test", "-r", str(folder), "-a", "-x", str(folder)])
    return subprocess.run(words, check=False).returncode == 0


def _copy(folder: Path, copy: Path) -> None:
    """Make the copy; several processes may do so at once, and the first one to finish wins."""
    making = Path(tempfile.mkdtemp(dir=copy.parent))
    shutil.copytree(folder, making / "whole", symlinks=True)
    for path in (making / "whole", *(making / "whole").rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (mode & 0o500) >> 3 | (mode & 0o500) >> 6)
    try:
        (making / "whole").rename(copy)
    except OSError:
        if not copy.exists():
            raise
    shutil.rmtree(making)
