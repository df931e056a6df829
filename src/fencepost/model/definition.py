"""A definition is a job as a ledger can keep it: text that any instance reads alike."""

from __future__ import annotations

import hashlib

from fencepost.model.named import NamedTuple
from fencepost.model.plan import Agenda, starts_at
from fencepost.model.rules import rules_from
from fencepost.model.schedule import EveryAfter, schedule_from

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.model.rules import Rules
    from fencepost.model.schedule import Schedule
    from fencepost.model.slot import RunKey


class Definition(NamedTuple):
    """What a job is to be.

    ``template`` is the declared job that runs it, mostly itself. ``facts`` are JSON for those who
    list jobs. A ``build`` number says which of two versions is newer, where time alone cannot.
    """

    job: str
    spec: str = ""
    rules: str = ""
    template: str = ""
    facts: str = "{}"
    payload: str | None = None
    aliases: tuple[str, ...] = ()
    build: int = 0

    @property
    def digest(self) -> str:
        """What two definitions share if they say the same."""
        said = "\x00".join((self.spec, self.rules, self.template, self.facts, self.payload or ""))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


class JobRecord(NamedTuple):
    """A job as the ledger knows it: its definition in force, and where it stands.

    ``watermark`` is the instant up to which every slot is decided, ``next_due`` when to look
    again. ``retired`` says why it is gone for good. ``unknown_since`` is when the last instance was
    heard of that knows it, once all of them are gone; from ``orphaned_at`` on it is an orphan.
    ``pruned`` is the newest slot whose history is gone. A ``stored`` job lives in the ledger only.
    """

    job: str
    definition: str = "{}"
    quarantined: str = ""  # why, if it is
    paused: str = ""
    spec: str = ""
    rules: str = ""
    template: str = ""
    payload: str | None = None
    digest: str = ""
    build: int = 0
    epoch: int = 0
    effective_from: float = 0.0
    watermark: int = 0
    next_due: float | None = None
    owed: int = 0
    paused_until: float = 0.0
    retired: str = ""
    orphaned_at: float = 0.0
    unknown_since: float = 0.0
    pruned: int = -1
    stored: bool = False

    def is_due(self, now: float) -> bool:
        """Say whether the job is to be looked at."""
        return self.next_due is not None and self.next_due <= now

    @property
    def schedule(self) -> Schedule | None:
        """Return its schedule, if it has one."""
        return schedule_from(self.spec) if self.spec else None

    @property
    def made_up_to(self) -> int:
        """Return up to which slot ranges of the past go before the live slots; 0 if none do.

        An outage that is being made up reaches beyond the watermark; such ranges lie below it.
        """
        return self.owed if self.owed <= self.watermark else 0

    def planned_start(self, key: RunKey) -> float:
        """Return when a slot was to start, if the job has jitter and nothing else says so."""
        if "jitter" not in self.rules or key.manual:
            return 0.0
        try:
            schedule = self.schedule
        except Exception:  # noqa: BLE001 -- whoever plans it tells of that
            return 0.0
        if schedule is None or isinstance(schedule, EveryAfter):
            return 0.0
        return starts_at(schedule, self.catching_up, self.job, key.slot)

    @property
    def catching_up(self) -> Rules:
        """Return what it wants to happen with slots whose time has passed."""
        return rules_from(self.rules)

    def pauses(self, now: float) -> bool:
        """Say whether it is paused, and not only not looked at since its pause was over."""
        return bool(self.paused) and not 0.0 < self.paused_until <= now

    @property
    def barred(self) -> str:
        """Return why none of its slots may run, if so."""
        if self.orphaned_at:
            return "orphaned"
        if self.quarantined:
            return "quarantined"
        return "paused" if self.paused else ""

    def passed(self, watermark: int, next_due: float | None, owed: int) -> JobRecord:
        """Return the job once slots have passed. By position: every slot of every job passes."""
        fields: tuple[Any, ...] = (*self[:_MARK], watermark, next_due, owed, *self[_MARK + 3 :])
        return JobRecord(*fields)

    def has_only_passed(self, before: JobRecord) -> bool:
        """Say whether it differs from what it was in no other way than that slots have passed."""
        return self[:_MARK] == before[:_MARK] and self[_MARK + 3 :] == before[_MARK + 3 :]

    @property
    def agenda(self) -> Agenda:
        """Return where it stands, for a plan."""
        return Agenda(self.job, self.watermark, self.owed, self.barred)


# Where ``watermark``, ``next_due`` and ``owed`` are, side by side.
_MARK = JobRecord._fields.index("watermark")
