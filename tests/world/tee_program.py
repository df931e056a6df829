"""Runs a command under guard and through a tee, as ``fencepost exec`` does, and reports on it.

Its arguments are a file for the report, and the command.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import uuid

from fencepost.model.output import Excerpt
from fencepost.world.clocks import SystemClocks
from fencepost.world.guardian import start
from fencepost.world.output import Tee


def main(place: str, *argv: str) -> None:
    excerpt = Excerpt()
    tee = Tee(excerpt)
    now = SystemClocks().boottime()
    nonce = uuid.uuid4().hex
    command = start(
        argv,
        environment={**os.environ, "FENCEPOST_NONCE": nonce},
        nonce=nonce,
        lifeline=None,
        until=(now + 60, now + 60),
        grace=0.2,
        stdout=tee.stdout,
        stderr=tee.stderr,
    )
    tee.begin()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while not command.gone:
        poll = select.poll()
        poll.register(command.report, select.POLLIN)
        poll.poll()
        command.listen()
        assert not command.orphaned
    tee.finish()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {
        "code": command.code,
        "failed": command.failed,
        "total": excerpt.total,
        "text": excerpt.text(),
        "grown_kb": after - before,
    }
    command.close()
    report["passed_on"] = tee.close(patience=0.2)
    report["open"] = len(os.listdir("/proc/self/fd")) - 1
    with open(place + ".part", "w") as file:
        json.dump(report, file)
    os.rename(place + ".part", place)


if __name__ == "__main__":
    main(*sys.argv[1:])
