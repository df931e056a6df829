"""A body can have a process of its own only if that process can import it, by its name.

A script that was started as ``__main__`` is imported under another name, ``__mp_main__``, as
``multiprocessing`` does it: what stands under ``if __name__ == "__main__":`` is not run again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from fencepost.errors import Misuse
from fencepost.model.named import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_MAIN = ("__main__", "__mp_main__")
_loading: list[str] = []
_imported_main: list[tuple[str, str]] = []  # how, in a process that was started for a body


class Reference(NamedTuple):
    """Where another process finds a function."""

    module: str
    qualname: str
    file: str | None = None  # of a module that is on nobody's path
    main: tuple[str, str] | None = None  # how to import what was started as __main__


def why_not(function: Any, *, bound: bool) -> str | None:
    """Say why another process could not import a function; None if it can.

    Before its name is ``bound``, while it is being decorated, only some reasons can be seen.
    """
    module, name = _names(function)
    if not module or not name:
        return "it has no name by which it could be imported"
    if "<lambda>" in name:
        return "a lambda has no name by which it could be imported"
    if "<locals>" in name:
        return f"{name.replace('.<locals>', '')!r} is defined inside of a function"
    if module in _MAIN and _main() is None:
        return "what was typed into an interpreter is in no file"
    if bound and _found(module, name) is not function:
        return f"{module}.{name} is not, or not only, that function: a decorator may have hidden it"
    return None


def reference_of(function: Any) -> Reference:
    """Return where another process finds a function that can be imported."""
    module, name = _names(function)
    if module in _MAIN:
        return Reference("__main__", name, main=_main())
    return Reference(module, name, getattr(sys.modules.get(module), "__file__", None))


def load(reference: Reference) -> Any:
    """Import a function, in the process that is to run it."""
    _loading.append(f"{reference.module}.{reference.qualname}")
    try:
        if reference.main is not None:
            _load_main(*reference.main)
        else:
            _load_module(reference.module, reference.file)
    finally:
        _loading.pop()
    found = _found(reference.module, reference.qualname)
    if found is None:
        raise Misuse(
            f"{reference.module}.{reference.qualname} is not there when its module is imported anew"
        )
    return found


def refuse_while_loading(job: object) -> None:
    """Raise if a module that is only imported for its functions starts to work by itself."""
    if _loading:
        raise Misuse(
            f"{job!r} was triggered while the module of {_loading[-1]} was imported for a process "
            'of its own: put what the script does under `if __name__ == "__main__":`'
        )


def _names(function: Any) -> tuple[str, str]:
    return getattr(function, "__module__", None) or "", getattr(
        function, "__qualname__", None
    ) or ""


def _found(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get("__main__" if module in _MAIN else module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _main() -> tuple[str, str] | None:
    """Return how the program itself can be imported: as a module, or from a file."""
    if _imported_main:
        return _imported_main[0]
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in _MAIN:
        return "module", spec.name
    file = getattr(main, "__file__", None)
    return ("file", os.path.abspath(file)) if file and os.path.isfile(file) else None


def _load_main(kind: str, where: str) -> None:
    import runpy
    import types

    _imported_main.append((kind, where))
    run = runpy.run_path if kind == "file" else runpy.run_module
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(run(where, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _load_module(name: str, file: str | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name or file is None:
            raise
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a file that was a module there is one here"
    assert spec.loader is not None, "and can be loaded"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
