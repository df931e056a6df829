"""Run every experiment, one after the other: together they would measure each other.

``--quick`` gives a first look in less than a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys

EXPERIMENTS = ("uncontended", "contended", "guarded", "startup")


def main() -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    codes = [
        subprocess.call([sys.executable, os.path.join(here, name + ".py"), *sys.argv[1:]])
        for name in EXPERIMENTS
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
