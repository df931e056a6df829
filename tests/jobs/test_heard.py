"""What goes well is told to whoever asked for it, and costs nothing where nobody did."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fencepost import Fencepost
from fencepost.logs import is_heard

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_log_that_wants_what_goes_well_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Fencepost(f"sqlite:///{tmp_path}/jobs.db") as fp:
        fp.job("job")(lambda: None)
        with caplog.at_level(logging.INFO, logger="fencepost"):
            assert is_heard()
            fp.trigger("job", manual=True)
    assert any(record.message.startswith("completed job=job") for record in caplog.records)


def test_a_log_that_is_set_up_later_hears_how_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def set_up() -> None:
        caplog.set_level(logging.INFO, logger="fencepost")

    with Fencepost(f"sqlite:///{tmp_path}/jobs.db") as fp:
        fp.job("job")(set_up)
        caplog.set_level(logging.WARNING, logger="fencepost")
        fp.trigger("job", manual=True)
        caplog.set_level(logging.WARNING, logger="fencepost")
        with fp.lock("x"):
            set_up()
        caplog.set_level(logging.WARNING, logger="fencepost")
        with fp.lock("y"):
            pass
    told = [record.message.split(" token=")[0] for record in caplog.records]
    assert [line.split(" run_id=")[0] for line in told] == [
        "completed job=job",
        "lock_released name=x",
    ]


def test_nobody_hears_of_what_goes_well_where_only_warnings_are_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="fencepost"):
        assert not is_heard()
