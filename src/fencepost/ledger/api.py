"""What a flow may ask of a ledger. Every verb is one round trip and at most one transaction.

Each write of an attempt is conditional on its token: once a later attempt has claimed the run, or
it has ended, the answer is ``RunLost`` and nothing was written but the name of the stale writer.
Every verb may be repeated after ``OutcomeUnknown``: it then finds what it did.
"""

from __future__ import annotations

from fencepost.model.named import NamedTuple, Protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.ledger.planning import Planner
    from fencepost.model.claim import Claimed, Want
    from fencepost.model.definition import JobRecord
    from fencepost.model.ending import Settled
    from fencepost.model.item import Found, ItemRecord, ItemState
    from fencepost.model.run import RunEvent, RunRecord, State
    from fencepost.model.slot import RunKey
    from fencepost.stores.api import LeaseStore


class Attempt(NamedTuple):
    """Who writes: one try of a run, by one holder, under one token.

    ``run`` is its record as the claim left it, where that is known: then a ledger need not read
    all of it again.
    """

    key: RunKey
    token: int
    nonce: str
    lease: str
    holder: str = ""
    run: RunRecord | None = None


class Report(NamedTuple):
    """What an attempt has to tell along with its next write.

    Counts are this ``source``'s totals so far, not what was added: so a report may be repeated
    after a lost reply. A counter's value is the sum over all sources that ever reported it.
    """

    done: int | None = None
    total: int | None = None
    counts: tuple[tuple[str, int], ...] = ()
    source: str = ""


NOTHING = Report()


class LedgerAbilities(NamedTuple):
    """What a ledger promises. ``transactional``: user statements may join its transactions.

    ``settles`` is how soon after a claim the attempt should ask for a ``sync``; 0 if never.
    """

    durable: bool
    shared: bool
    transactional: bool
    settles: float = 0.0


class Ledger(Protocol):
    """Runs, items, events and counters of one namespace."""

    @property
    def abilities(self) -> LedgerAbilities:
        """What this ledger promises."""

    @property
    def planner(self) -> Planner:
        """What instances ask: which slots are due, and who knows which jobs."""

    @property
    def leases(self) -> LeaseStore:
        """The store whose leases are granted along with runs."""

    async def claim(self, want: Want) -> Claimed:
        """Decide who may run it, and record that; a lease is granted in the same transaction.

        Who asks for a rerun has seen that the run before it has ended. A ledger knows the live
        runs of the lock, and so only those of the slot that are under the same one.
        """

    async def beat(self, attempt: Attempt, *, ttl: float, report: Report = NOTHING) -> bool:
        """Renew the attempt's lease, take its report; say whether a cancel was asked for."""

    async def save(
        self,
        attempt: Attempt,
        *,
        checkpoint: str,
        order: int | None = None,
        report: Report = NOTHING,
    ) -> bool:
        """Keep a checkpoint (JSON text); say whether a cancel was asked for.

        A checkpoint that differs from the last one is progress: losses in a row are forgotten.
        ``order`` counts the saves of the attempt: one that arrives after a later one is a repeat
        that was long under way, and keeps nothing.
        """

    async def begin(
        self, attempt: Attempt, *, scope: str, items: Sequence[str], call: str, repeat: bool
    ) -> list[Found]:
        """Begin items, before their effects; say for each whether to have the effect."""

    async def end(
        self,
        attempt: Attempt,
        *,
        scope: str,
        items: Sequence[tuple[str, ItemState, str | None]],
        call: str | None = None,
    ) -> None:
        """End items that this attempt began: done or failed, with the error.

        With ``call`` only what that begin has begun: a repeat that was long under way must not
        end what was begun again since.
        """

    async def finish(
        self, attempt: Attempt, settled: Settled, *, report: Report = NOTHING
    ) -> RunRecord:
        """End the attempt, release its lease, and return the run as it is now."""

    async def hand_over(self, attempt: Attempt, *, ttl: float) -> None:
        """Entrust the attempt to whoever knows its token; its lease lasts ``ttl`` from now.

        From then on the death of this process frees nothing, and only this verb moves the end of
        the lease: a beat that was long under way must not shorten it. If the attempt was ended
        meanwhile, by the one to whom it was given, nothing is left to do, and that is fine.
        """

    async def order_stop(self, attempt: Attempt) -> bool:
        """Keep that the process of the attempt was ordered to stop; its lease stays as it is.

        Return whether that is on record.

        Who then finds the lease free resumes the run without counting a loss. Nothing changes for
        an attempt that has ended, is another's by now, or was handed off.
        """

    async def cancel(
        self, key: RunKey, *, force: bool, operator: str, only_waiting: bool = False
    ) -> RunRecord:
        """Cancel what does not run; ask what runs. ``force`` ends it now and takes its token.

        ``only_waiting`` leaves alone what has begun since the asker last looked.
        """

    async def sync(self) -> None:
        """Make sure that what was written so far survives a power cut."""

    async def note(self, key: RunKey, what: str, *, token: int = 0, detail: str = "") -> None:
        """Keep an event about a run."""

    async def register(self, job: str, definition: str) -> None:
        """Keep the definition of a job (JSON text), for those who list jobs."""

    async def lift(self, job: str) -> bool:
        """Release a job from quarantine; say whether it was in it."""

    async def find(self, key: RunKey) -> RunRecord | None:
        """Return a run."""

    async def runs(
        self, job: str | None = None, *, limit: int = 30, states: Sequence[State] = ()
    ) -> list[RunRecord]:
        """Return the runs of the newest slots, of one job or of all; those that live, quickly."""

    async def events(self, key: RunKey) -> list[RunEvent]:
        """Return what happened to a run, oldest first."""

    async def items(self, scope: str, *, states: Sequence[ItemState] = ()) -> list[ItemRecord]:
        """Return the items of a scope, by name."""

    async def counts(self, key: RunKey) -> dict[str, int]:
        """Return the counters of a run."""

    async def jobs(self) -> list[JobRecord]:
        """Return all jobs, by name."""

    async def now(self) -> float:
        """Return the time of the ledger's clock."""

    async def close(self) -> None:
        """Close what the ledger opened; its leases close with it."""
