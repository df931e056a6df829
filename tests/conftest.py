"""What all tests share: which of them this Python can run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


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
