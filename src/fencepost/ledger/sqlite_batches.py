"""What many attempts of a tick have in common is said once: one statement claims or ends them.

SQLite works while other threads have the interpreter, but each statement waits for it afterwards.
So it is not the rows that are dear but the statements. Whatever is not as usual is left out by the
triggers of the file, and answered by None: the caller decides about it as about a single one.
"""

from __future__ import annotations

from fencepost.model.claim import Claimed, Verdict
from fencepost.model.claimed import begun_record
from fencepost.model.ending import ended_record
from fencepost.model.lease import Grant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from sqlite3 import Connection
    from typing import Any, TypeVar

    from fencepost.ledger.planning import Due, End
    from fencepost.ledger.sqlite_clock import FileClock
    from fencepost.model.run import RunRecord
    from fencepost.stores.sqlite import SqliteStore

    T = TypeVar("T")

# How many rows a statement has. A few sizes only: each is compiled once and kept.
_SIZES = (200, 50, 10, 1)
# What the file counts for each that is claimed, the run, its lease and its job; and for each that
# is ended, the run and its lease.
_CLAIM_CHANGES, _END_CHANGES = 3, 2


def _many(into: str, row: str, *, shared: int, own: int) -> dict[int, str]:
    """Return for each size the statement that puts so many rows; ``{}`` is a value of their own."""

    def numbered(first: int) -> str:
        return row.format(*(f"?{first + number}" for number in range(own)))

    return {
        size: f"INSERT INTO {into} VALUES\n"
        + ",\n".join(numbered(shared + 1 + own * number) for number in range(size))
        for size in _SIZES
    }


# Slots that are due, of one holder and from one instant on.
_CLAIM = _many(
    "fencepost_slot",
    "(?1, {}, {}, 0, 0, {}, {}, {}, ?2, ?3, ?4, {}, ?5, ?6, {}, {}, ?7, ?8, {}, {}, {}, {})",
    shared=8,
    own=12,
)

_END = _many(
    "fencepost_end",
    "(?1, {}, {}, {}, {}, {}, {}, {}, {}, ?2, {}, {})",
    shared=2,
    own=10,
)

_KEY = "namespace = ? AND job = ? AND slot = ? AND manual = ? AND rerun = ?"

WAS_CLAIMED = f"""
SELECT 1 FROM fencepost_run
 WHERE {_KEY} AND state = 'running' AND token = ? AND nonce = ?"""

WAS_ENDED = f"""
SELECT 1 FROM fencepost_run
 WHERE {_KEY} AND state = ? AND token = ? AND nonce = ? AND ended_at = ?"""


class SqliteBatches:
    """Claims and ends by the batch, inside of an open write transaction."""

    def __init__(self, leases: SqliteStore, clock: FileClock) -> None:
        self._clock, self._leases, self._namespace = clock, leases, leases.namespace

    def claim(self, db: Connection, slots: Sequence[Due]) -> list[Claimed | None]:
        """Claim slots against which nothing speaks, and let their jobs pass them."""
        claimed: list[Claimed | None] = []
        for chunk in _chunks(slots):
            claimed += self._claim(db, chunk)
        return claimed

    def _claim(self, db: Connection, slots: Sequence[Due]) -> list[Claimed | None]:
        now, (nonce, *who) = self._clock.now(db), slots[0].want.holder
        newest, boot, now_us, _, *pulse = self._leases.terms(nonce, 0.0)
        # Each has a token of its own, and none is from later than now.
        first = newest - len(slots) + 1
        values: list[Any] = [self._namespace, *who, now, boot, *pulse]
        for token, due in enumerate(slots, first):
            want = due.want
            ttl_us = int(want.policy.lease * 1e6)
            values += (want.key.job, want.key.slot, want.lock, token, want.holder.nonce)
            values += (want.trigger, now_us + ttl_us, ttl_us, want.epoch)
            values += (due.planned.watermark, due.planned.next_due, due.planned.owed)
        before = db.total_changes  # which counts what triggers do, as a row count does not
        db.execute(_CLAIM[len(slots)], values)
        all_of_them = db.total_changes - before == _CLAIM_CHANGES * len(slots)
        claimed: list[Claimed | None] = []
        for token, (want, *_) in enumerate(slots, first):
            ours = (self._namespace, *want.key, token, want.holder.nonce)
            if all_of_them or db.execute(WAS_CLAIMED, ours).fetchone() is not None:
                run = begun_record(want, token=token, now=now)
                grant = Grant(token, want.policy.lease)
                claimed.append(Claimed(Verdict.GO, run, grant, now=now))
            else:
                claimed.append(None)
        return claimed

    def finish(
        self, db: Connection, ends: Sequence[tuple[End, RunRecord]]
    ) -> list[RunRecord | None]:
        """End attempts for good, each as its claim has left it."""
        ended: list[RunRecord | None] = []
        for chunk in _chunks(ends):
            ended += self._finish(db, chunk)
        return ended

    def _finish(
        self, db: Connection, ends: Sequence[tuple[End, RunRecord]]
    ) -> list[RunRecord | None]:
        now = self._clock.now(db)
        values: list[Any] = [self._namespace, now]
        for (attempt, settled, _), _ in ends:
            values += (*attempt.key, attempt.token, attempt.nonce, settled.state.value)
            values += (settled.reason, settled.result, settled.error)
        before = db.total_changes
        db.execute(_END[len(ends)], values)
        all_of_them = db.total_changes - before == _END_CHANGES * len(ends)
        ended: list[RunRecord | None] = []
        for (attempt, settled, _), begun in ends:
            ours = (settled.state.value, attempt.token, attempt.nonce, now)
            key = (self._namespace, *attempt.key)
            if all_of_them or db.execute(WAS_ENDED, (*key, *ours)).fetchone() is not None:
                ended.append(ended_record(begun, settled, now=now))
            else:
                ended.append(None)
        return ended


def _chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Cut a sequence into pieces for which there is a statement, the largest first."""
    start = 0
    for size in _SIZES:
        while len(items) - start >= size:
            yield items[start : start + size]
            start += size
