"""What a transaction on PostgreSQL knows about pulses: its own, and those that it finds silent.

A claim is granted a lease that leans on this process's pulse. A lease whose pulse is silent is
nobody's once its grace has passed since this process first saw that; until then whoever wants it
neither has it nor is refused: it asks again.
"""

from __future__ import annotations

import json

from fencepost.ledger.draft_bearings import Bearings, Watch
from fencepost.ledger.draft_values import LEASE_FIELDS
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.lease import Grant
from fencepost.stores.postgres_rows import lease_key, us
from fencepost.world.postgres_lean import RunLean
from fencepost.world.postgres_pulse import GRACE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.draft_values import DraftLease
    from fencepost.stores.postgres import PostgresStore

# Longer than what ends so soon by itself that it need not lean on a pulse.
_LONG = 2.0


class PostgresBearings(Bearings):
    """The pulses that one transaction has to do with. Who ``leans`` may be granted leases."""

    def __init__(self, store: PostgresStore, *, leans: bool) -> None:
        super().__init__()
        self._store = store
        self._asked = store.boottime()  # before anything was
        self._pulse = store.beat(_LONG) if leans else 0
        self._grace = store.pulse_here.grace
        self._on = 0

    @property
    def terms(self) -> dict[str, object]:
        """What the leases that are granted lean on."""
        return {"pulse": self._pulse, "grace_us": us(self._grace)}

    def judged(self, name: str, lease: DraftLease, row: Sequence[Any]) -> DraftLease:
        """Return a lease as it stands: the dead hold nothing."""
        pulse, grace_us, silent = row[len(LEASE_FIELDS) :]
        if not silent or not lease.stands:
            return lease
        silences, grace = self._store.pulse_here.silences, grace_us / 1e6
        left = silences.left(pulse, grace=grace, asked=self._asked)
        silences.note(pulse, grace=grace, now=self._store.boottime())
        if left > 0:
            self.hushed[name] = left
            return lease
        self.presumed.add(name)
        return lease._replace(left=0.0)

    def granted(self, answer: Sequence[Any]) -> None:
        """Take note that what was granted leans on our pulse, or on none."""
        _, on = answer
        self._on = on or self._on

    def leaning(self, claimed: Claimed) -> Claimed:
        """Return what was claimed, and what its holder has to prove from now on."""
        run, grant = claimed.run, claimed.grant
        if claimed.verdict is not Verdict.GO or not self._on or run is None or grant is None:
            return claimed
        vouching = self._store.pulse_here.vouching
        lean = RunLean(
            vouching,
            lease=lease_key(self._store.namespace, run.lease),
            nonce=run.holder.nonce,
            token=grant.token,
            on=self._on,
            grace=us(self._grace) / 1e6,
            sent=self._asked,
        )
        vouching.lean(lean)
        # Made anew, for less than it costs to replace: there may be many.
        granted = Grant(grant.token, grant.ttl, grant.adopted, lean)
        return Claimed(claimed.verdict, run, granted, *claimed[3:])


class PostgresWatch(Watch):
    """How an instance finds out that others have died whose runs it may take over.

    At each sweep it learns on which pulses all that runs leans, and at each look in between it asks
    for those: that costs as much as there are processes, however many runs they have.
    """

    def __init__(self, store: PostgresStore) -> None:
        self._here, self._boottime = store.pulse_here, store.boottime

    def is_ripe(self) -> bool:
        """Say whether some may be taken over by now that were seen to be silent before."""
        silences = self._here.silences
        ripe = self._boottime() >= silences.sweep_at
        if ripe:
            silences.sweep_at = float("inf")
        return ripe

    def idle(self, plans: ModuleType, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return what asks whether there is anything to do, and who may have died."""
        return plans.IDLE_AND_WATCH, {**values, **self._known()}

    def lost(self, plans: ModuleType, values: dict[str, Any]) -> list[Step]:
        """Return what finds lost runs, and those of the dead; and who else has runs."""
        looked = {**values, **self._known(), "sweep": True}
        return [(plans.FIND_LOST_OR_SILENT, looked), (plans.WATCH, looked)]

    def saw(self, seen: Sequence[Any], *, sweep: bool) -> None:
        """Take note of pulses that have fallen silent, and at a sweep of all that runs lean on."""
        silent, pulses = (json.loads(text or "[]") for text in seen)
        silences, now = self._here.silences, self._boottime()
        for pulse in silent:
            silences.note(pulse, grace=GRACE, now=now)
        if sweep:
            silences.watched = [pulse for pulse in pulses if pulse != self._here.key]

    def soon(self) -> float:
        """Return how soon to look again at the latest."""
        return self._here.silences.soon(now=self._boottime())

    def _known(self) -> dict[str, Any]:
        silences = self._here.silences
        return {"watched": silences.unheard(), "silent": silences.silent()}
