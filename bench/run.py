"""Run every experiment, one after the other: together they would measure each other.

``--quick`` gives a first look in a few minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys

EXPERIMENTS = (
    *("uncontended", "contended", "guarded", "startup"),
    *("scheduler_scale", "scheduler_registration", "scheduler_herd", "scheduler_throughput"),
    "scheduler_memory",
    *("redis_uncontended", "redis_contended", "postgres_uncontended", "postgres_contended"),
    *("postgres_runs", "mariadb_uncontended", "etcd_uncontended"),
)


def main() -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    codes = [
        subprocess.call([sys.executable, os.path.join(here, name + ".py"), *sys.argv[1:]])
        for name in EXPERIMENTS
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
