"""Peers live in environments of their own, made once, outside of the checkout.

They are in ``$XDG_CACHE_HOME/fencepost-bench`` (``~/.cache`` without that variable), one for each
set that cannot share one. Where they cannot be installed, what is compared with them is measured
alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from typing import Any

SCHEDULERS = ("APScheduler==3.11.3", "SQLAlchemy==2.1.8", "huey==3.5.4")
QUEUES = ("pgqueuer==1.6.0", "procrastinate==3.10.0", "asyncpg==0.32.0", "psycopg[binary]==3.3.8")
LOCKS = (
    *("redis==8.1.0", "hiredis==3.5.0", "python-redis-lock==4.0.1", "pottery==3.0.1"),
    *("sherlock==0.4.1", "tooz==9.1.0", "psycopg2-binary==2.9.13", "etcd3gw==2.7.0"),
)
# Its generated code needs an old protobuf.
ETCD3 = ("etcd3==0.12.0", "protobuf<4")


def interpreter(*requirements: str) -> str | None:
    """Return the Python that has the peers; None, and why is printed, if there is none."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    version = ".".join(map(str, sys.version_info[:2]))
    digest = hashlib.sha256(" ".join((version, *requirements)).encode()).hexdigest()[:8]
    folder = os.path.join(cache, "fencepost-bench", f"peers-{digest}")
    python, ready = os.path.join(folder, "bin", "python"), os.path.join(folder, "ready")
    if not os.path.exists(ready):
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        try:
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([*install, *requirements], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
            print(f"\nno peers to compare with: {' '.join(requirements)} not installed: {why}")
            return None
        with open(ready, "w", encoding="utf-8"):
            pass
    return python


def answer(python: str, program: str, *arguments: object) -> dict[str, Any]:
    """Run a program of a peer to its end; return what it printed, as JSON."""
    words = [python, "-c", program, *map(str, arguments)]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    said: dict[str, Any] = json.loads(done.stdout)
    return said
