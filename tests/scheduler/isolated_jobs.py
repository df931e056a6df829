"""A program whose bodies have processes of their own: python isolated_jobs.py URL FOLDER."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fencepost import Fencepost

if TYPE_CHECKING:
    from fencepost import Run

URL, FOLDER = sys.argv[1], Path(sys.argv[2])
fp = Fencepost(URL)


@fp.job("template", isolation="process", lease="6s")
def template(run: Run) -> None:
    (FOLDER / "payload").write_text(json.dumps([run.job, run.payload]))
    while True:
        run.check()
        time.sleep(0.02)


if __name__ == "__main__":
    with fp:
        fp.store(template, [{"name": "stored", "every": "1s", "payload": {"tenant": 7}}])
        fp.run(grace="200ms")
