"""``fencepost up`` is a scheduler instance in this process, until a signal asks it to stop.

The first SIGTERM or Ctrl-C begins nothing more and lets what runs finish within ``--grace``; the
second one waits for nothing. Either way what has not ended goes on elsewhere.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

from fencepost.cli.declared import add_source, done, fencepost_of, scheduling_of, url_behind
from fencepost.cli.main import FINE
from fencepost.errors import Misuse
from fencepost.logs import line
from fencepost.model.event import JobEvent
from fencepost.model.plan import next_start
from fencepost.model.schedule import doubtful
from fencepost.model.slot import shown
from fencepost.scheduling import CONCURRENCY, GRACE, grace_of, size_of
from fencepost.stores.open import redacted

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from fencepost.scheduling import Scheduling

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001


def register(subparsers: Subparsers) -> None:
    """Add the verb ``up``."""
    parser = subparsers.add_parser("up", help="be a scheduler instance until stopped")
    add_source(parser)
    add = parser.add_argument
    add(
        "--concurrency",
        type=int,
        default=CONCURRENCY,
        metavar="N",
        help=f"how many attempts may run at the same time ({CONCURRENCY})",
    )
    add(
        "--grace",
        default=GRACE,
        metavar="DURATION",
        help=f"how long what runs may go on once a stop was asked for ({GRACE})",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    size_of(args.concurrency)
    grace_of(args.grace)  # a typo is told before anything is opened
    _log_to_stderr(args)
    for number in (signal.SIGTERM, signal.SIGINT):  # until the scheduler has its own
        signal.signal(number, _leave)
    fp = fencepost_of(args)
    scheduling = scheduling_of(fp)
    if not len(scheduling.working.registry):
        raise Misuse("no job is declared there: a scheduler without jobs has nothing to do")
    _tell("started", _about(scheduling, url_behind(fp)))
    for job in scheduling.working.registry:
        doubt = None if job.schedule is None else doubtful(job.schedule)
        if doubt is not None:
            _tell("doubtful", {"job": job.name, "note": doubt}, logging.WARNING)
    done(fp, lambda fp: fp.run(concurrency=args.concurrency, grace=args.grace))
    _tell("stopped", {"instance": scheduling.serving.instance.name})
    return FINE


def _leave(number: int, frame: FrameType | None) -> None:
    """End before anything has begun, or after everything has: there is nothing to wait for."""
    del number, frame
    raise SystemExit(FINE)


def _about(scheduling: Scheduling, url: str) -> dict[str, object]:
    now = time.time()
    dues = [
        next_start(job.schedule, job.rules, job.name, now)
        for job in scheduling.working.registry
        if job.schedule is not None
    ]
    due = min((due for due in dues if due is not None), default=None)
    return {
        "url": redacted(url),
        "instance": scheduling.serving.instance.name,
        "jobs": len(scheduling.working.registry),
        "next_due": "never" if due is None else shown(int(due)),
    }


def _tell(what: str, about: dict[str, object], level: int = logging.INFO) -> None:
    job = about.pop("job", "")
    event = JobEvent(what, str(job), "", 0, tuple(about.items()))
    logging.getLogger("fencepost").log(level, line(event))


def _log_to_stderr(args: argparse.Namespace) -> None:
    """Have every event written as one line on standard error."""
    if args.json:
        os.environ["FENCEPOST_LOG"] = "json"
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get("FENCEPOST_LOG") == "json"
    handler.setFormatter(_Lines("%(message)s") if as_json else _Lines(_STAMPED, "%H:%M:%S"))
    logger = logging.getLogger("fencepost")
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if args.quiet else logging.INFO)
    logger.propagate = False


_STAMPED = "%(asctime)s %(message)s"


class _Lines(logging.Formatter):
    """Lines with the time in UTC; in JSON it is a field like any other."""

    @staticmethod
    def converter(seconds: float | None) -> time.struct_time:
        """Return an instant in UTC."""
        return time.gmtime(seconds)

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        text = super().format(record)
        if not text.startswith("{"):
            return text
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return f'{{"at": "{at}", {text[1:]}'
