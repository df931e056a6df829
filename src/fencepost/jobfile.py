"""Jobs can be declared in a file: ``[[job]]`` tables with the words of ``@fp.job``.

Each has a ``name`` and one of ``command``, ``http`` and ``python``. The whole file is read before
any of it is declared, and what is wrong is told in one sentence: file, job, key, what to do.
"""

from __future__ import annotations

import inspect
import os
import shlex

from fencepost.declaring import Declares
from fencepost.errors import FencepostError, Misuse
from fencepost.executors.command import command_body
from fencepost.finding import did_you_mean, find
from fencepost.model.named import NamedTuple
from fencepost.model.policy import Retry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_ABOUT = {"url": "str", "namespace": "str", "job": "table"}
# Which words go with which kind of body, and of which type they are.
_KINDS: dict[str, dict[str, str]] = {
    "command": {"command": "str | Sequence[str]", "env": "texts", "cwd": "str", "shell": "bool"},
    "http": {
        "http": "str",
        "secret_env": "str",
        "method": "str",
        "headers": "texts",
        "request_timeout": "Duration",
        "callback": "str",
    },
    "python": {"python": "str"},
}
_RETRY = {
    "attempts": "int",
    "base": "Duration",
    "factor": "float",
    "ceiling": "Duration",
    "jitter": "bool",
}


class JobFile(NamedTuple):
    """A file that was read and checked: whose store it means, and what it declares."""

    url: str | None
    namespace: str | None
    jobs: tuple[Declaration, ...]


class Declaration(NamedTuple):
    """One job of a file: its body, and the words of ``@fp.job``."""

    name: str
    body: Callable[..., Any]
    words: dict[str, Any]
    where: str


def load(path: str | os.PathLike[str], fp: Declares) -> list[str]:
    """Declare the jobs of a file on a ``Fencepost``; return their names, in order."""
    read = read_file(path)
    for job in read.jobs:
        try:
            fp.job(job.name, **job.words)(job.body)
        except FencepostError as error:
            raise Misuse(_placed(job.where, str(error))) from error
    return [job.name for job in read.jobs]


def read_file(path: str | os.PathLike[str]) -> JobFile:
    """Read a file and check it, without declaring anything."""
    import tomllib

    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise Misuse(f"{name}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Misuse(f"{name}: is not TOML: {error}") from error
    tables = content.get("job", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise Misuse(f"{name}: 'job' must be written as [[job]], once for each job")
    _check(content, _ABOUT, name)
    jobs: list[Declaration] = []
    for number, table in enumerate(tables, 1):
        job = _declaration(table, name, number)
        if job.name in [other.name for other in jobs]:
            raise Misuse(f"{job.where}: is there twice: a job's name is its identity")
        jobs.append(job)
    return JobFile(content.get("url"), content.get("namespace"), tuple(jobs))


def _declaration(table: dict[str, Any], file: str, number: int) -> Declaration:
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise Misuse(f"{file}: job number {number}: 'name' is missing: give it a text")
    where = f"{file}: job {name!r}"
    kinds = [kind for kind in _KINDS if kind in table]
    known = {"name": "str", **_words_of_jobs()}
    if len(kinds) != 1:
        unknown = next((key for key in table if key not in known), None)
        if unknown is not None and not kinds:
            _check(table, {**known, **dict.fromkeys(_KINDS, "Any")}, where)
        which = " and ".join(repr(kind) for kind in kinds) or "nothing"
        raise Misuse(
            f"{where}: has {which} to run: give exactly one of 'command', 'http', 'python'"
        )
    kind = kinds[0]
    for other, theirs in _KINDS.items():
        misplaced = [key for key in table if key in theirs and key not in _KINDS[kind]]
        if misplaced:
            raise Misuse(f"{where}: {misplaced[0]!r} goes with {other!r}: leave it out")
    _check(table, {**known, **_KINDS[kind]}, where)
    own = {key: value for key, value in table.items() if key in _KINDS[kind]}
    words: dict[str, Any] = {key: table[key] for key in table if key in known and key != "name"}
    try:
        if isinstance(words.get("retry"), dict):
            _check(words["retry"], _RETRY, f"{where}: 'retry'")
            words["retry"] = Retry(**words["retry"])
        return Declaration(name, _BODIES[kind](own), words, where)
    except FencepostError as error:
        raise Misuse(_placed(where, str(error))) from error


def _placed(where: str, told: str) -> str:
    """Return a sentence that says where it applies, once."""
    file, _, job = where.rpartition(": ")
    if told.startswith(where):
        return told
    return f"{file}: {told}" if told.startswith(job) else f"{where}: {told}"


def _command(own: dict[str, Any]) -> Callable[..., Any]:
    command, shell = own["command"], own.get("shell", False)
    if isinstance(command, list):
        if shell:
            raise Misuse("'shell' goes with a command in one text: write it so, or leave it out")
        argv = command
    elif shell:
        argv = ["/bin/sh", "-c", command]
    else:
        try:
            argv = shlex.split(command)
        except ValueError as error:
            raise Misuse(f"'command' cannot be split into words: {error}") from error
    return command_body(argv, env=own.get("env"), cwd=own.get("cwd"))


def _http(own: dict[str, Any]) -> Callable[..., Any]:
    from fencepost.executors.http import http_body  # which needs an extra

    secret = None
    if "secret_env" in own:
        secret = os.environ.get(own["secret_env"])
        if not secret:
            raise Misuse(
                f"'secret_env' names {own['secret_env']!r}, which is not set: export it, or leave "
                "'secret_env' out"
            )
    names = ("method", "headers", "callback")
    words = {name: own[name] for name in names if name in own}
    return http_body(own["http"], secret=secret, timeout=own.get("request_timeout"), **words)


def _python(own: dict[str, Any]) -> Callable[..., Any]:
    found = find(own["python"])
    if not callable(found):
        raise Misuse(f"'python' names {own['python']!r}, which is a {type(found).__name__}")
    body: Callable[..., Any] = found
    return body


_BODIES = {"command": _command, "http": _http, "python": _python}


def _words_of_jobs() -> dict[str, str]:
    """Return the words of ``@fp.job`` and their types, as its signature has them."""
    parameters = inspect.signature(Declares.job).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    return {word.name: str(word.annotation) for word in parameters if word.kind is keyword}


def _check(table: dict[str, Any], known: dict[str, str], where: str) -> None:
    """Refuse a key that means nothing here, or a value that is of another type."""
    for key, value in table.items():
        if key not in known:
            hint = did_you_mean(key, list(known)) or f"; known: {', '.join(sorted(known))}"
            raise Misuse(f"{where}: {key!r} is unknown{hint}")
        kinds = [kind for kind in _TYPES if kind in _parts(known[key])]
        if kinds and not any(_TYPES[kind][1](value) for kind in kinds):
            wanted = " or ".join(dict.fromkeys(_TYPES[kind][0] for kind in kinds))
            # What it is, never what it says: a header or a variable may be a secret.
            raise Misuse(f"{where}: {key!r} is {_kind_of(value)}: it must be {wanted}")


def _kind_of(value: object) -> str:
    """Return what a value is, in the words of the file's format."""
    if isinstance(value, dict | list) and value:
        inner = value.values() if isinstance(value, dict) else value
        kinds = " and ".join(dict.fromkeys(_KIND.get(type(one), "instant") for one in inner))
        return f"a {_KIND[type(value)]} of {kinds}"
    return f"a {_KIND.get(type(value), 'instant')}"


_KIND: dict[type, str] = {
    str: "text",
    bool: "truth value",
    int: "whole number",
    float: "number",
    list: "list",
    dict: "table",
}


def _parts(annotation: str) -> set[str]:
    return {part.strip() for part in annotation.split("|")}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return type(value) is int


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_table_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_instant(value: object) -> bool:
    from datetime import datetime

    return isinstance(value, datetime)


_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "str": ("a text", _is_text),
    "Sequence[str]": ("a list of texts", _are_texts),
    "texts": ("a table of texts", _is_table_of_texts),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", _is_whole),
    "float": ("a number", _is_number),
    "Duration": (
        "a duration, such as '90s' or '10m'",
        lambda value: _is_text(value) or _is_number(value),
    ),
    "Retry": ("a table such as {attempts = 5}", lambda value: isinstance(value, dict)),
    "datetime": ("an instant", _is_instant),
}
