"""What a ledger does with the leases of its file, inside of its own transaction.

The connection is the ledger's, and the write lock is held: what is read here stays true until the
commit. Only whether a holder lives is not in the file: so the proof of a death is kept until then.
"""

from __future__ import annotations

from fencepost.model.lease import Grant, left, view
from fencepost.stores import sqlite_rows as sql

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sqlite3 import Connection
    from typing import Any

    from fencepost.model.lease import Holder, Record, View
    from fencepost.model.watch import Watch
    from fencepost.stores.sqlite_reserve import TokenReserve
    from fencepost.world.pulse import Pulse
    from fencepost.world.sqlite import SqliteFile

    # The token of a lease, whether it is held, and its beat; None if there is no such row.
    Seen = tuple[int, int, int] | None


class SqliteInner:
    """The verbs of a store for those who have a transaction open already."""

    namespace: str
    file: SqliteFile
    pulse: Pulse
    reserve: TokenReserve
    _watch: Watch

    def look(self, db: Connection, name: str, *, proofs: list[int]) -> tuple[Record, View] | None:
        """Return a lease as it is written, and as it stands: the dead hold nothing.

        The proof of a death is added to ``proofs``, for the caller to close after its commit:
        until then nobody can come to life who was handed the lease.
        """
        row = self._find(db, name)
        if row is None:
            return None
        now, era = self._now()
        record = row.record
        remains = left(record, now=now, era=era)
        held = record.held and remains > 0
        held = held and not self._watch.long_enough(record, now=now, era=era)
        if held and self.file.path != ":memory:":
            proof = self.pulse.proof(row.pulse, row.pulse_inode)
            if proof is not None:
                proofs.append(proof)
                held = False
        return record, view(record, held=held, expires_in=remains, alive=None)

    def give(
        self, db: Connection, name: str, holder: Holder, ttl: float, *, seen: Seen, above: int
    ) -> Grant:
        """Grant a lease that was ``seen`` to be free, with a token that is higher than ``above``.

        A run that goes on under another permit of its lock must not find its token fallen.
        """
        wanted: dict[str, Any] = dict(
            zip(sql.NUMBERED, self._wished(name, holder, ttl), strict=True)
        )
        wanted["since_us"] = max(wanted["since_us"], above + 1)  # if the clock was set back
        token, wanted["seen_held"], wanted["seen_beat"] = seen or (0, 0, 0)
        if seen is None:
            grant = self._grant_first(db, wanted, ttl)
        else:
            grant = self._grant(db, sql.GRANT_AGAIN, wanted, ttl, highest=token)
        assert grant is not None, "nobody else can write while we do"
        if wanted["seen_held"]:
            self._sweep(db)
        return grant

    def wish(self, name: str, holder: Holder, ttl: float) -> tuple[Any, ...]:
        """Return a lease as it would be if it were free; its token would be the first of it."""
        return self._wished(name, holder, ttl)

    def take_free(self, db: Connection, wish: tuple[Any, ...]) -> bool:
        """Grant what was wished for, if it is free and its last token is lower."""
        return db.execute(sql.GRANT_FREE, wish).rowcount == 1

    def extend(self, db: Connection, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease; say whether it was still ours to move."""
        return self._move_end(db, name, nonce, token, ttl) == 1

    def revoke(self, db: Connection, name: str, nonce: str, operator: str, reason: str) -> int:
        """Take a lease from the holder of ``nonce``; return the token from then on, or 0."""
        row = self._find(db, name)
        ours = row is not None and row.record.holder.nonce == nonce
        return self._take_away(db, name, row.record.token, reason, operator) if row and ours else 0

    def gave(self, name: str, nonce: str, *, wake: bool) -> None:
        """Need our pulse no more for this nonce; wake who waits for a lease that is free now."""
        self.pulse.leases.discard(nonce)
        if wake:
            self._wake(name)

    if TYPE_CHECKING:  # what the store itself brings along

        def _find(self, db: Connection, name: str) -> sql.Row | None: ...
        def _now(self) -> tuple[float, str]: ...
        def _wished(self, name: str, holder: Holder, ttl: float) -> tuple[Any, ...]: ...
        def _grant_first(
            self, db: Connection, wanted: dict[str, Any], ttl: float
        ) -> Grant | None: ...
        def _grant(
            self,
            db: Connection,
            statement: str,
            wanted: dict[str, Any],
            ttl: float,
            *,
            highest: int,
        ) -> Grant | None: ...
        def _sweep(self, db: Connection) -> None: ...
        def _move_end(
            self, db: Connection, name: str, nonce: str, token: int, ttl: float
        ) -> int: ...
        def _take_away(
            self, db: Connection, name: str, token: int, reason: str, operator: str
        ) -> int: ...
        def _wake(self, name: str) -> None: ...
