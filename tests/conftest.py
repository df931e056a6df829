"""What holds for every test."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["fence_fixtures"]

# A busy machine is no counter-example.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

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
