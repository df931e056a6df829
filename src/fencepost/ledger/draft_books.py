"""What a ledger decides on a draft: who may run, how an attempt ended, what to cancel.

Nothing here asks the server for anything but what a draft lacks, and nothing is raised that must
not undo what was decided: the answer to a stale writer is returned, so that the record of it stays.
"""

from __future__ import annotations

from fencepost.errors import RunLost, UnknownRun
from fencepost.ledger.draft_rousing import rouse
from fencepost.ledger.planning import cancel_word
from fencepost.model.claim import Claimed, Facts, Verdict, decide, looked_at, mark_of, passed_on
from fencepost.model.claimed import changed_record, claimed_record, left_behind
from fencepost.model.definition import JobRecord
from fencepost.model.divided import MARK_TTL
from fencepost.model.ending import UNFINISHED, Settled, ended_record, in_view_of, recorded
from fencepost.model.fenced import LEASE_CHANGED, moved_from
from fencepost.model.lease import Grant
from fencepost.model.run import LAPSED, RunEvent, State, why_lost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.ledger.api import Attempt, Report
    from fencepost.ledger.draft import Draft
    from fencepost.model.claim import Change, Decision, Want
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey


def claim(draft: Draft, want: Want) -> Claimed:
    """Decide who may run it, and put that into the draft."""
    facts = _facts(draft, want)
    decision = decide(want, facts, now=draft.now)
    for other in facts.others:
        if other.key in decision.superseded:
            settled = Settled(State.FAILED, "superseded", error=other.error)
            ended = ended_record(other, settled, now=draft.now)
            draft.put(ended._replace(blocker=str(want.key)))
    if decision.verdict is Verdict.GO:
        return _go(draft, want, facts, decision)
    run = facts.own
    if decision.verdict in (Verdict.LATER, Verdict.REPLACE) and decision.blocker is not None:
        draft.awaited.add(decision.blocker.key)
    if decision.change is not None:
        run = _change(draft, want, facts.own, decision.change)
    return Claimed(
        decision.verdict,
        run,
        blocker=decision.blocker,
        holder=decision.holder,
        pause=max(0.0, decision.at - draft.now),
        fresh=decision.change is not None,
        now=draft.now,
    )


def finish(draft: Draft, attempt: Attempt, settled: Settled, report: Report) -> RunRecord | RunLost:
    """End an attempt; its lease is released along with that."""
    run = draft.run(attempt.key)
    if run is not None and recorded(run, settled, token=attempt.token, nonce=attempt.nonce):
        return run
    if run is None or not is_by(run, attempt):
        return stale(draft, attempt, "finish")
    draft.count(run.key, report)
    if report.done is not None:
        run = run._replace(done=report.done)
    if report.total is not None:
        run = run._replace(total=report.total)
    settled = in_view_of(run, settled)
    if settled.state in UNFINISHED:
        _tell(draft, run, UNFINISHED[settled.state], settled.error or "")
    return draft.put(ended_record(run, settled, now=draft.now))


def cancel(
    draft: Draft, key: RunKey, operator: str, *, force: bool, only_waiting: bool = False
) -> RunRecord:
    """Cancel what does not run; ask what runs, or take it away."""
    run = draft.run(key)
    if run is None:
        raise UnknownRun(str(key))
    if run.state.terminal or (only_waiting and not run.fresh):
        return run
    run = run._replace(cancel_at=run.cancel_at or draft.now)
    if run.state is State.RUNNING:
        rouse(draft, cancel_word(run.holder.nonce))
    if run.state is State.RUNNING and not force:
        _tell(draft, run, "cancel_requested", operator)
        return draft.put(run)
    if run.state is State.RUNNING:
        why = f"run {key} was cancelled"
        token = draft.revoke(run.lease, run.holder.nonce, operator, why)
        _tell(draft, run, "cancel_forced", operator)
        run = run._replace(token=max(run.token, token))
    settled = Settled(State.CANCELLED, "cancelled", error=run.error)
    return draft.put(ended_record(run, settled, now=draft.now))


def stale(draft: Draft, attempt: Attempt, what: str) -> RunLost:
    """Record a write that came too late; return what to tell its writer."""
    run = draft.run(attempt.key)
    if run is None:
        reason = "the ledger has no record"
        return RunLost(str(attempt.key), token=attempt.token, reason=reason)
    if not (what == "beat" and run.was_ended_by(attempt.token, attempt.nonce)):
        told = ("stale_write", attempt.token, attempt.holder, what)
        draft.tell(RunEvent(attempt.key, draft.now, *told))
    return RunLost(str(attempt.key), token=attempt.token, reason=why_lost(run))


def is_by(run: RunRecord, attempt: Attempt) -> bool:
    """Say whether the attempt still has the run."""
    ours = (run.token, run.holder.nonce) == (attempt.token, attempt.nonce)
    return ours and run.state is State.RUNNING


def _facts(draft: Draft, want: Want) -> Facts:
    own = draft.run(want.key)
    others = [run for run in draft.live(want.lock) if run.key != want.key]
    others.sort(key=lambda run: (run.key.slot, run.key))
    names = {*looked_at(want), *(run.lease for run in (*others, own) if run and run.lease)}
    draft.missing_leases(names)
    job = draft.job(want.key.job)
    return Facts(
        own,
        others,
        {name: draft.standing(name) for name in names},
        quarantined=bool(job and job.quarantined),
        paused=job is not None and job.pauses(draft.now),
        retired=bool(job and job.retired),
        pruned=job is not None and want.key.slot <= job.pruned,
    )


def _go(draft: Draft, want: Want, facts: Facts, decision: Decision) -> Claimed:
    own, change, lease, ttl = facts.own, decision.change, decision.lease, want.policy.lease
    if decision.adopted:
        assert own is not None, "only a run that is there can be adopted"
        extended = draft.extend(lease, want.holder.nonce, own.token, ttl)
        assert extended, "an attempt that is alive holds its lease"
        return Claimed(Verdict.GO, own, Grant(own.token, ttl, adopted=True), now=draft.now)
    assert change is not None, "whoever may go has something to change"
    _tell_left(draft, own, change)
    if own is not None and moved_from(own, lease):
        _tell(draft, own, LEASE_CHANGED, own.lease)
    for other in _untold(draft, list(passed_on(facts, lease)), LAPSED):
        _tell(draft, other, LAPSED, str(want.key))
    if lease != want.lock:
        draft.give(want.lock, mark_of(want, facts), MARK_TTL)
    grant = draft.give(lease, want.holder, ttl, above=0 if own is None else own.token)
    run = claimed_record(want, own, change, lease=lease, token=grant.token, now=draft.now)
    return Claimed(Verdict.GO, draft.put(run), grant, now=draft.now)


def _change(draft: Draft, want: Want, own: RunRecord | None, change: Change) -> RunRecord:
    _tell_left(draft, own, change)
    if change.quarantine:
        known = draft.job(want.key.job) or JobRecord(want.key.job)
        draft.put_job(known._replace(quarantined=str(want.key)))
    return draft.put(changed_record(want, own, change, now=draft.now))


def _tell_left(draft: Draft, own: RunRecord | None, change: Change) -> None:
    left = left_behind(own, change)
    if own is not None and left is not None:
        _tell(draft, own, *left)


def _untold(draft: Draft, runs: list[RunRecord], what: str) -> list[RunRecord]:
    """Return the runs of whose attempts this was not told yet."""
    written = draft.ask([draft.events_of(run.key) for run in runs])
    told = {(event.key, event.what, event.token) for event in draft.told}
    for run, rows in zip(runs, written, strict=True):
        told.update((run.key, kind, token) for _, kind, token, *_ in rows)
    return [run for run in runs if (run.key, what, run.token) not in told]


def _tell(draft: Draft, run: RunRecord, what: str, detail: str = "") -> None:
    draft.tell(RunEvent(run.key, draft.now, what, run.token, str(run.holder), detail))
