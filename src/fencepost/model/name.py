"""Names: what may be one, and what the permits of a semaphore are called."""

from __future__ import annotations

import re

from fencepost.errors import BadName

LONGEST = 1000
_PERMIT = re.compile(r"#\d+\Z")
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


def checked(name: object) -> str:
    """Return the name in its one canonical form (NFC), or refuse it with the reason.

    Any printable text of 1 to 1,000 characters will do. A trailing ``#3`` is reserved: it is how
    the permits of a semaphore are told apart.
    """
    canonical = well_formed(name)
    if _PERMIT.search(canonical):
        raise BadName(f"lease name {name!r} ends in '#' and a number, which is kept for semaphores")
    return canonical


def well_formed(name: object) -> str:
    """Return the canonical form of any name a store may be asked for, permits included."""
    if type(name) is str and name.isascii() and name.isprintable() and 0 < len(name) <= LONGEST:
        return name  # as most are
    if not isinstance(name, str):
        raise BadName(f"lease name {name!r} is not text")
    if not name.isascii():
        import unicodedata  # a megabyte of tables that most programs never need

        name = unicodedata.normalize("NFC", name)
    if not name:
        raise BadName("a lease name must not be empty")
    if len(name) > LONGEST:
        raise BadName(
            f"lease name {name[:40]!r}… has {len(name)} characters; {LONGEST} is the most"
        )
    if not name.isprintable():
        raise BadName(f"lease name {name!r} contains a control or unprintable character")
    return name


def checked_namespace(namespace: object) -> str:
    """Return the namespace, or refuse it: letters, digits, dot, dash and underscore only."""
    if not isinstance(namespace, str) or not _NAMESPACE.match(namespace):
        raise BadName(
            f"namespace {namespace!r} must be 1 to 100 letters, digits, dots, dashes or underscores"
        )
    return namespace


def permits(name: str, *, limit: int) -> list[str]:
    """Return the lease names of a semaphore's permits, each with tokens of its own."""
    return [f"{name}#{number}" for number in range(1, limit + 1)]


def base(name: str) -> str:
    """Return the name users know: that of the semaphore for a permit, else the name itself."""
    return _PERMIT.sub("", name)


def resource(namespace: str, *, name: str) -> str:
    """Return what a lease's fence guards unless the caller names something else."""
    return f"{namespace}/{name}"
