"""A worker that is stopped in the middle of its body, and then tries to write in every way."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from fencepost import Fencepost
from fencepost.errors import FencepostError
from fencepost.flows.course import begin, end, save
from fencepost.model.item import ItemState

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost import Run


def stopped_inside(run: Run) -> None:
    """Be stopped inside of a transaction that has everything but its commit."""
    with run.transaction() as tx:
        tx.once("x")
        tx.execute("INSERT INTO effect VALUES ('zombie')")
        tx.save("zombie")
        sys.stdout.write(f"{run.token}\n")
        sys.stdout.flush()
        sys.stdin.readline()


def main() -> None:
    url, folder, *mode_given = sys.argv[1:]
    mode = mode_given[0] if mode_given else ""
    said: dict[str, str] = {}

    def tried(what: str, write: Callable[[], object]) -> None:
        try:
            write()
        except FencepostError as error:
            said[what] = type(error).__name__
        else:
            said[what] = "DONE"

    with Fencepost(url) as fp:

        @fp.job("work", lease="600ms")
        def work(run: Run) -> None:
            if mode == "inside":
                stopped_inside(run)
                return
            sys.stdout.write(f"{run.token}\n")
            sys.stdout.flush()
            sys.stdin.readline()
            tried("check", run.check)
            # Past its own check, to the ledger itself: a zombie may have been stopped after it.
            doors, course = run._doors, run._course
            course.hold.why_lost = None
            course.hold.pinned = 1.0
            from fencepost.world.flow import finish

            tried("save", lambda: finish(save(doors, course, '"late"')))
            tried("once", lambda: finish(begin(doors, course, run.id, ["x"])))
            ended = [("x", ItemState.DONE, None)]
            tried("batch", lambda: finish(end(doors, course, run.id, ended)))
            tried("transaction", lambda: run.transaction().open())
            with closing(sqlite3.connect(f"{folder}/other.db", isolation_level=None)) as conn:
                conn.execute("BEGIN IMMEDIATE")
                tried("fence", lambda: run.fence(conn))
                tried("other", lambda: run.once("x", conn=conn).__enter__())
                conn.execute("ROLLBACK")

        said["end"] = fp.trigger("work", "2026-01-20T02:00:00Z").status
    print(json.dumps(said), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
