"""What happened to a lease or a run, as values. Flows emit these; one subscriber writes them."""

from __future__ import annotations

from fencepost.model.named import NamedTuple


class LeaseEvent(NamedTuple):
    """One thing that happened to one lease.

    ``what`` is one of: acquired, adopted, renewed, unconfirmed, danger, suspect, lost, released,
    reclaimed (a grant nobody waited for any more was given back), broken.
    """

    what: str
    name: str
    token: int = 0
    detail: str = ""


class JobEvent(NamedTuple):
    """One thing that happened to one run of a job.

    ``what`` is one of: lock_acquired, resumed, skipped, completed, failed, timed_out, cancelled,
    lost, stuck, in_doubt, quarantined, slow_transaction, children_stopped, children_left. ``more``
    are pairs that belong to it.

    Alarms tell of themselves in the same way, ``job`` being their kind and ``run_id`` the
    generation: alarm_fired, alarm_failed, alarm_dead, alarm_late, alarm_stale, alarm_stuck,
    alarm_cut, alarm_unrecorded.
    """

    what: str
    job: str
    run_id: str
    token: int = 0
    more: tuple[tuple[str, object], ...] = ()
