"""Trigger slots of one job for some seconds, beside other processes that do the same."""

from __future__ import annotations

import sys
import time

from fencepost import Fencepost

SECONDS = 4.0


def main(url: str, number: int) -> None:
    with Fencepost(url) as fp:
        fp.job("job")(lambda: time.sleep(0.001))
        slot, end = 1_700_000_000 + number * 1_000_000, time.monotonic() + SECONDS
        while time.monotonic() < end:
            slot += 1
            fp.trigger("job", slot)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
