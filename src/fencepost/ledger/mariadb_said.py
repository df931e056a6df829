"""How the MariaDB ledger's statements are written.

Rows come back as one column of JSON each. Text that is compared is kept as bytes, so that it is
compared byte by byte, as Python does it.
"""

from __future__ import annotations

from fencepost.stores.mariadb_rows import NOW_US
from fencepost.world.mariadb_batch import PACKED, Part, Statement, each_of, one_by_one, said

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "NOW",
    "NOW_US",
    "PACKED",
    "Statement",
    "assigned",
    "digest",
    "each_of",
    "inserted",
    "listed",
    "moved",
    "one_by_one",
    "packed_row",
    "said",
]

NOW = f"({NOW_US} / 1e6)"


def listed(names: Iterable[str], *, of: str = "") -> str:
    """Return columns as a list; some have names that are words of SQL."""
    return ", ".join(f"{of}.`{name}`" if of else f"`{name}`" for name in names)


def packed_row(columns: Mapping[str, str], names: Iterable[str], *, of: str) -> str:
    """Return columns as one of JSON, which the door takes apart."""
    several = tuple(names)
    fields = (
        f"CONVERT({of}.`{name}` USING utf8mb4)" if "BINARY" in columns[name] else f"{of}.`{name}`"
        for name in several
    )
    floats = "".join(f" {place}" for place, name in enumerate(several) if "DOUBLE" in columns[name])
    return f"JSON_ARRAY({', '.join(fields)}) AS `{PACKED}{floats}`"


def inserted(
    table: str,
    names: Iterable[str],
    *,
    more: Mapping[str, str] | None = None,
    updates: Iterable[str] = (),
) -> Part:
    """Return what inserts rows, or changes some columns of those that are there."""
    several, given = tuple(names), more or {}
    values = ", ".join([":namespace", *(f":{name}" for name in several), *given.values()])
    text = f"INSERT INTO {table} (namespace, {listed((*several, *given))}) VALUES {{each}}"
    changed = ", ".join(f"`{name}` = VALUES(`{name}`)" for name in updates)
    if changed:
        text += f" ON DUPLICATE KEY UPDATE {changed}"
    return each_of(text, f"({values})", ", ", rows="rows")


def assigned(names: Iterable[str]) -> str:
    """Return what sets columns to the values of a row."""
    return ", ".join(f"`{name}` = :{name}" for name in names)


def moved(text: str) -> Part:
    """Return what changes each of some rows, and undoes the transaction if it is not as it was."""
    return one_by_one(text, "SET @fencepost_insists = EXP(710 * (ROW_COUNT() <> 1))")


def digest(text: str) -> str:
    """Return, as an expression, what a text of any length is found by: as stores do it."""
    return f"CONVERT(SHA2({text}, 256) USING ascii)"
