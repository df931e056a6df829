"""A Celery application with one task that is given runs. For workers, and for the tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from celery import Celery  # type: ignore[import-untyped]
from executor_kit import SLOT

from fencepost import Fencepost, Retry
from fencepost.executors.celery import celery_body, fencepost_task

if TYPE_CHECKING:
    from fencepost import Run

FOLDER = Path(os.environ["CELERY_FOLDER"])
app = Celery("celery_program", broker=os.environ["CELERY_BROKER"])
app.conf.update(
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    task_acks_late=os.environ.get("CELERY_LATE") == "1",
    broker_transport_options={"visibility_timeout": 2, "socket_connect_timeout": 2},
)
fp = Fencepost(f"sqlite:///{FOLDER}/fp.db")


def declare(to: Fencepost) -> None:
    retry = Retry(3, base="10ms")
    body = celery_body(app, "tests.work")
    to.job("job", timeout="1m", lease="2s", handoff_beat="20s", retry=retry)(body)


@fencepost_task(app, fp, name="tests.work")
def work(run: Run) -> str:
    with open(FOLDER / "began", "a") as file:
        file.write(f"{run.token} {os.getpid()}\n")
    while (FOLDER / "wait").exists():
        time.sleep(0.02)
        run.check()
    if (FOLDER / "fail").exists():
        (FOLDER / "fail").unlink()
        raise ValueError("no rows today")
    run.progress(3, 3)
    return f"attempt {run.attempt}"


class SendsAndStands(Celery):  # type: ignore[misc]
    """Sends a message, and is stopped before it can hand anything over."""

    def send_task(self, *args: object, **words: object) -> None:
        super().send_task(*args, **words)
        (FOLDER / "sent").touch()
        time.sleep(600)


if __name__ == "__main__":
    app = SendsAndStands("celery_program", broker=os.environ["CELERY_BROKER"])
    declare(fp)
    fp.trigger("job", SLOT)
