"""A process that triggers a job and is killed while it runs. Started by tests."""

from __future__ import annotations

import sys
import time

from executor_kit import SLOT

from fencepost import Fencepost


def main(url: str, kind: str, what: str) -> None:
    fp = Fencepost(url)
    if kind == "command":
        fp.command("job", [sys.executable, "-c", what])
    else:
        fp.http("job", what, timeout="5m")
    print(fp.trigger("job", SLOT).status, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
