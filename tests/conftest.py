"""What holds for every test."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
from typing import TYPE_CHECKING

from hypothesis import settings

from servers.reach import share_copies

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["fence_fixtures"]

# A busy machine is no counter-example.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# What a host remembers of ledgers is not for the host that tests them.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="fencepost-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Servers are killed here, never machines: what they have written need not be on a disk, and a disk
# has them wait for each commit. Where there is memory for it, and programs may be run from it.
_MEMORY, _ENOUGH = "/dev/shm", 6 << 30
if os.path.isdir(_MEMORY):
    _room = os.statvfs(_MEMORY)
    if _room.f_bavail * _room.f_frsize >= _ENOUGH and not _room.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("FENCEPOST_SERVERS", _MEMORY)

# One copy of each server's programs is enough for all workers of a run.
share_copies()

# Who is started in the background ignores these, and so do its children; our tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for _number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a newer Python. Nothing is skipped: a skip is for what is missing."""
    too_new = [
        item
        for item in items
        if (mark := item.get_closest_marker("since")) and sys.version_info < mark.args
    ]
    if too_new:
        config.hook.pytest_deselected(items=too_new)
        items[:] = [item for item in items if item not in too_new]
