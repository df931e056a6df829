"""Results, checkpoints and arguments are kept as JSON of at most a megabyte, or refused."""

from __future__ import annotations

import json

from fencepost.errors import BadValue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LARGEST = 1_000_000


def encoded(value: Any, *, what: str) -> str:
    """Return ``value`` as JSON text, or say why it cannot be kept."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise BadValue(f"the {what} cannot be kept as JSON: {error}") from error
    if size > LARGEST:
        raise BadValue(
            f"the {what} has {size:,} bytes as JSON, and {LARGEST:,} is the most: keep a reference"
        )
    if json.loads(text) != value and not _alike(value):
        raise BadValue(f"the {what} would not come back from JSON as it is: {value!r:.100}")
    return text


def _alike(value: Any) -> bool:
    """Say whether JSON changes nothing but the kind of a sequence: a tuple comes back as a list."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _alike(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_alike(inner) for inner in value)
    return value is None or isinstance(value, str | int | float | bool)
