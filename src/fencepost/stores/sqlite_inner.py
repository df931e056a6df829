"""What a ledger does with the leases of its file, inside of its own transaction.

The connection is the ledger's, and the write lock is held: what is read here stays true until the
commit. Only whether a holder lives is not in the file: so the proof of a death is kept until then.
"""

from __future__ import annotations

import os

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
            proof = self.pulse.claim(row.pulse, row.pulse_inode)
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

    def extend(self, db: Connection, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease; say whether it was still ours to move."""
        return self._move_end(db, name, nonce, token, ttl) == 1

    def entrust(self, db: Connection, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease, and lean on nobody's pulse any more; say whether it was ours."""
        return self._move_end(db, name, nonce, token, ttl, statement=sql.ENTRUST) == 1

    def drop(self, db: Connection, name: str, nonce: str) -> None:
        """Delete a lease of this nonce: the file remembers its token."""
        db.execute(sql.DROP, (self.namespace, name, nonce))

    def deleted(self, db: Connection) -> int:
        """Return the highest token of all that was deleted from the file."""
        found = db.execute(sql.FIND_DELETED).fetchone()
        return 0 if found is None else int(found[0])

    def sweep(self, db: Connection) -> None:
        """Remove what the dead left behind, once their leases are dropped."""
        self._sweep(db)

    def revoke(self, db: Connection, name: str, nonce: str, operator: str, reason: str) -> int:
        """Take a lease from the holder of ``nonce``; return the token from then on, or 0."""
        row = self._find(db, name)
        ours = row is not None and row.record.holder.nonce == nonce
        return self._take_away(db, name, row.record.token, reason, operator) if row and ours else 0

    def now(self) -> tuple[float, str]:
        """Return what leases are judged by: the boot clock, and which boot it is."""
        return self._now()

    def is_dead(self, pulse: str, inode: str) -> bool:
        """Say whether a holder is known to be dead; in doubt it is not."""
        proof = self.pulse.proof(pulse, inode) if self.file.path != ":memory:" else None
        if proof is not None:
            os.close(proof)
        return proof is not None

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
            self,
            db: Connection,
            name: str,
            nonce: str,
            token: int,
            ttl: float,
            *,
            statement: str = sql.RENEW,
        ) -> int: ...
        def _take_away(
            self, db: Connection, name: str, token: int, reason: str, operator: str
        ) -> int: ...
        def _wake(self, name: str) -> None: ...
        def anybody_waits(self) -> bool: ...  # noqa: D102 -- the store says it
