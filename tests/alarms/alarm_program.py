"""A process that fires alarms, for the fault tests.

python alarm_program.py URL FOLDER     fire what is due until there is a file "stop" in FOLDER
python alarm_program.py URL FOLDER 2s  the same, under leases of two seconds

Each start of a handler is a line in FOLDER/starts: the key and the generation.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING

from fencepost import Fencepost, Retry
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from fencepost import Alarm

NAP = 0.02


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    logging.getLogger("fencepost").setLevel(logging.CRITICAL)
    url, folder, *leases = sys.argv[1:]
    (lease,) = leases or ("30s",)
    again = Retry(9, base="10ms", factor=1)
    starts = os.open(f"{folder}/starts", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Fencepost(url) as fp:

        @fp.alarm("k", max_losses=1000, budget=100_000, retry=again, lease=lease)
        def handle(alarm: Alarm) -> None:
            os.write(starts, f"{alarm.key} {alarm.generation}\n".encode())
            number, more = int(alarm.key), alarm.payload
            if more:
                alarm.set(in_=0, payload=more - 1)
            if number < 0:
                say("inside")
                time.sleep(60)
            if number % 10 == 0 and alarm.attempt == 1:
                raise RuntimeError("the first try of every tenth")
            if number % 3 == 0:
                time.sleep(0.02)

        say("ready")
        while not os.path.exists(f"{folder}/stop"):
            if not fp.alarms.run_due("1s"):
                due_in = finish(fp._alarming.due_in())
                time.sleep(NAP if due_in is None else min(due_in, NAP))


if __name__ == "__main__":
    main()
