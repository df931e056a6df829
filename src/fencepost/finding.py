"""``module:name`` names something in a program of yours: it is imported, or it is said why not.

Modules are looked for in the current folder first, as ``python -m`` does it.
"""

from __future__ import annotations

import importlib
import os
import sys

from fencepost.aio import AsyncFencepost
from fencepost.blocking import Fencepost
from fencepost.errors import Misuse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any


def find_fencepost(reference: str) -> Fencepost | AsyncFencepost:
    """Return the ``Fencepost`` or ``AsyncFencepost`` that ``module:name`` names."""
    found = find(reference)
    if isinstance(found, Fencepost | AsyncFencepost):
        return found
    raise Misuse(
        f"{reference!r} is a {type(found).__name__}: give the name of a Fencepost or an "
        "AsyncFencepost, such as myapp.jobs:fp"
    )


def find(reference: str) -> Any:
    """Return what ``module:name`` names."""
    module, colon, name = reference.partition(":")
    if not (module and colon and name) or module.endswith(".py") or "/" in module:
        hint = ""
        if module.endswith(".py"):
            hint = f"; {module!r} as a module is {module[:-3].strip('./').replace('/', '.')!r}"
        raise Misuse(f"{reference!r} is not module:name, such as myapp.jobs:fp{hint}")
    found: Any = _imported(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise Misuse(f"module {module!r} has no {name!r}{_instead(part, found)}")
        found = getattr(found, part)
    return found


def did_you_mean(word: str, known: list[str]) -> str:
    """Return a question for who may have mistyped a word; nothing if no known one is like it."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _imported(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise Misuse(
                f"there is no module {missing!r} in {here!r}, and none is installed: start where "
                "your program is, or install it"
            ) from error
        raise Misuse(f"module {name!r} needs {missing!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise Misuse(
            f"module {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _instead(part: str, found: object) -> str:
    public = [name for name in dir(found) if not name.startswith("_")]
    return did_you_mean(part, public)
