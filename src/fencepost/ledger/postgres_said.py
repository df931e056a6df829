"""How the ledger's statements are written: its tables are found in the schema of the URL."""

from __future__ import annotations

import re

from fencepost.world.postgres import Statement

_OURS = re.compile(r"\bfencepost_\w+")
# What is made in the schema of its table, and must not be told which.
_NAMED_AFTER = re.compile(r"(INDEX IF NOT EXISTS|TRIGGER IF EXISTS|TRIGGER) \{schema\}\.")

NOW = "extract(epoch FROM clock_timestamp())::double precision"
# Whoever is stopped in the middle of a transaction has its locks until somebody notices. Nobody
# thinks for that long between a question and its answer.
NO_LOITERING = "set_config('idle_in_transaction_session_timeout', '3s', TRUE)"


def new(table: str) -> str:
    """Return, as a query, rows that are to change, with which one was seen, and where.

    A row is found by its place alone: however little the planner knows of a table, it then has no
    other way but to go there. What was changed meanwhile is somewhere else, and is not found.
    """
    return f"""
    SELECT new.*, new.unnest AS seen_row, (split_part(new.unnest, ')', 1) || ')')::tid AS seen_tid
      FROM ROWS FROM (json_populate_recordset(NULL::{table}, :rows::json),
                      unnest(:versions::text[])) AS new"""


def at_place(table: str) -> str:
    """Return the condition that a row is where it was, and what it was."""
    return f"{table}.ctid = new.seen_tid AND {version(table)} = new.seen_row"


def version(table: str = "") -> str:
    """Return, as an expression, where a row is and who wrote it: another one after every change."""
    prefix = f"{table}." if table else ""
    return f"{prefix}ctid::text || {prefix}xmin::text"


def said(text: str) -> Statement:
    """Return a statement about our tables."""
    return Statement(_OURS.sub(r"{schema}.\g<0>", text))


def made(text: str) -> str:
    """Return a statement that makes one of our tables, or what belongs to it."""
    return _NAMED_AFTER.sub(r"\1 ", _OURS.sub(r"{schema}.\g<0>", text))


def lease_key(namespace: str, name: str) -> str:
    """Return, as an expression, what the store finds a lease by."""
    space, own = (f"convert_to({part}, 'UTF8')" for part in (namespace, name))
    return f"substring(sha256({space} || '\\x00'::bytea || {own}) FROM 1 FOR 20)"
