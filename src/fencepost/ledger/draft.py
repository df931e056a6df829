"""What one transaction has read, and what it is going to write: decided in memory, sent at once.

A transaction is a question, a decision and an answer: rows are read in one round trip, everything
is decided on the draft, and what has changed is written together with the commit. Whatever was not
read ahead is read when it is asked for. A row that somebody else has changed since undoes all of
it, and it is done again from the start.
"""

from __future__ import annotations

from fencepost.ledger.draft_rousing import marks
from fencepost.ledger.draft_usual import Usual, ended
from fencepost.ledger.draft_values import (
    DraftLease,
    event_row,
    job_of,
    lease_of,
    lease_row,
    run_of,
    run_row,
)
from fencepost.model.claim import Standing
from fencepost.model.claimed import begun_record
from fencepost.model.lease import Grant, next_token
from fencepost.model.run import RunEvent, RunRecord, State, legal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from fencepost.ledger.api import Report
    from fencepost.ledger.draft_bearings import Bearings
    from fencepost.ledger.draft_dialect import Dialect, Step, Transaction
    from fencepost.ledger.draft_usual import Granted
    from fencepost.ledger.planning import End
    from fencepost.model.claim import Want
    from fencepost.model.definition import JobRecord
    from fencepost.model.lease import Holder
    from fencepost.model.slot import RunKey

    Slots = tuple[float, float]  # from the first to the last


class Draft:
    """The runs, leases, jobs and events of one namespace, as one transaction leaves them."""

    def __init__(
        self, transaction: Transaction, namespace: str, dialect: Dialect, bearings: Bearings
    ) -> None:
        self.bearings = bearings
        self._transaction, self._namespace, self.dialect = transaction, namespace, dialect
        self._sql, self._lease_sql = dialect.runs, dialect.leases
        self.usual = Usual(dialect.usual, namespace)
        self.now = 0.0
        self.committed = False
        self._runs: dict[RunKey, RunRecord | None] = {}
        self._read: dict[RunKey, RunRecord] = {}  # as they were
        self._versions: dict[RunKey, str] = {}
        self._by_name: dict[str, set[RunKey]] = {}  # of a job, and of a lock: mostly named alike
        self._whole_locks: set[str] = set()  # of which every live run is here
        self._whole_jobs: set[str] = set()
        self._whole_slots: dict[str, list[Slots]] = {}
        self._whole_from: dict[str, int] = {}  # after which slot all of a job's schedule is here
        self._leases: dict[str, DraftLease | None] = {}
        self._leases_read: dict[str, DraftLease] = {}
        self._leases_changed: dict[str, None] = {}
        self._set_back: set[str] = set()  # those that are to end sooner than they say
        self._broken: list[dict[str, Any]] = []
        self._dropped: list[dict[str, Any]] = []
        self._freed: dict[str, RunKey] = {}  # which run has left a lease
        self._left: dict[str, str] = {}  # and by which nonce it was held
        self._jobs: dict[str, JobRecord | None] = {}
        self._jobs_read: dict[str, JobRecord] = {}
        self._job_versions: dict[str, str] = {}
        self.told: list[RunEvent] = []  # by this transaction
        self.awaited: set[RunKey] = set()  # runs that something begins to wait for
        self._counts: dict[tuple[RunKey, str, str], int] = {}
        self._along: list[tuple[Step, Callable[[Sequence[tuple[Any, ...]]], None]]] = []
        self.also: list[Callable[[], list[Step]]] = []  # what writes what others keep beside it

    # Reading.

    def begin(self, *before: Step, read: Sequence[Step] = ()) -> list[Sequence[tuple[Any, ...]]]:
        """Begin with statements that wait for their turn; return what was read after them."""
        return self.ask_now([*before, *read])[len(before) :]

    def ask(self, steps: Sequence[Step]) -> list[Sequence[tuple[Any, ...]]]:
        """Return what several statements answer, in one round trip."""
        if not steps:
            return []
        along, self._along = self._along, []
        answers = self._transaction.batch([*steps, *(step for step, _ in along)])
        rows = [answer.rows for answer in answers]
        for (_, heard), answer in zip(along, rows[len(steps) :], strict=True):
            heard(answer)
        return rows[: len(steps)]

    def along(self, step: Step, heard: Callable[[Sequence[tuple[Any, ...]]], None]) -> None:
        """Have something asked along with the next question, and heard before that is."""
        self._along.append((step, heard))

    def ask_now(self, steps: Sequence[Step]) -> list[Sequence[tuple[Any, ...]]]:
        """Return the same, and go by the time that it is once they are answered.

        Who finds a lease free must not be on record as having had it before it was.
        """
        *answers, clock = self.ask([*steps, (self._sql.CLOCK, {})])
        self.now = max(self.now, clock[0][0])
        return answers

    def runs_by(self, keys: Iterable[RunKey], *, alone: bool = False) -> Step:
        """Return what reads some runs; ``alone`` keeps others from writing them meanwhile."""
        statement = self._sql.FIND_SOME_ALONE if alone else self._sql.FIND_SOME
        return statement, {"namespace": self._namespace, **self._sql.keys_of(keys)}

    def took_runs(
        self,
        rows: Iterable[tuple[Any, ...]],
        *,
        keys: Iterable[RunKey] = (),
        locks: Iterable[str] = (),
        jobs: Iterable[str] = (),
    ) -> list[RunRecord]:
        """Keep runs that were read; those of ``keys`` that are not among them are not there."""
        found = []
        for row in rows:
            run = run_of(row)
            if self._runs.get(run.key) == self._read.get(run.key):  # nothing was decided yet
                self._read[run.key], self._versions[run.key] = run, row[-1]
                self._keep(run)
            found.append(run)
        for key in keys:
            self._runs.setdefault(key, None)
        self._whole_locks.update(locks)
        self._whole_jobs.update(jobs)
        return found

    def took_ends(self, ending: Sequence[End], rows: Iterable[tuple[Any, ...]]) -> None:
        """Keep the runs of those attempts that were ended, each known by its number."""
        for number, *facts in rows:
            attempt, settled, _ = ending[number - 1]
            run = ended(attempt, settled, *facts)
            # What is over is never written again, and what asks for it by its lock or job reads it.
            self._runs[run.key] = self._read[run.key] = run

    def live_of(self, locks: Iterable[str]) -> Step:
        """Return what reads every live run of some locks."""
        return self._sql.FIND_LIVE, {"namespace": self._namespace, "locks": list(locks)}

    def live_of_jobs(self, jobs: Iterable[str]) -> Step:
        """Return what reads every live run of some jobs."""
        return self._sql.FIND_LIVE_OF, {"namespace": self._namespace, "jobs": list(jobs)}

    def events_of(self, key: RunKey) -> Step:
        """Return what reads the events of a run."""
        return self._sql.FIND_EVENTS, {"namespace": self._namespace, **key._asdict()}

    def leases_by(self, names: Iterable[str], *, locks: Iterable[str], jobs: Iterable[str]) -> Step:
        """Return what reads some leases, and those of the live runs of some locks and jobs."""
        values = {"names": list(names), "locks": list(locks), "jobs": list(jobs)}
        return self._lease_sql.FIND_SOME, {"namespace": self._namespace, **values}

    def took_leases(self, rows: Iterable[tuple[Any, ...]], *, names: Iterable[str]) -> None:
        """Keep leases that were read; those of ``names`` that are not among them are not there."""
        for row in rows:
            name, lease = lease_of(row, now=self.now)
            lease = self.bearings.judged(name, lease, row)
            if lease.set_back:
                self._set_back.add(name)
            if self._leases.get(name) == self._leases_read.get(name):
                self._leases[name] = self._leases_read[name] = lease
                if name in self._left:
                    self._end(name, self._left[name])
        for name in names:
            self._leases.setdefault(name, None)

    def jobs_by(self, names: Iterable[str]) -> Step:
        """Return what reads some jobs."""
        return self._sql.FIND_SOME_JOBS, {"namespace": self._namespace, "jobs": list(names)}

    def took_jobs(self, rows: Iterable[tuple[Any, ...]], *, names: Iterable[str]) -> None:
        """Keep jobs that were read."""
        for row in rows:
            job = job_of(row)
            name = job.job
            if self._jobs.get(name) == self._jobs_read.get(name):
                self._jobs[name] = self._jobs_read[name] = job
                self._job_versions[name] = row[-1]
        for name in names:
            self._jobs.setdefault(name, None)

    # What is known.

    def run(self, key: RunKey) -> RunRecord | None:
        """Return a run."""
        if key not in self._runs and not self.has_slot(key):
            (rows,) = self.ask([self.runs_by([key])])
            self.took_runs(rows, keys=[key])
        return self._runs.get(key)

    def has_slot(self, key: RunKey) -> bool:
        """Say whether all runs of a slot are here, if there are any."""
        mark = self._whole_from.get(key.job)
        if mark is not None and key.slot > mark and not key.manual:
            return True
        return self.has_between(key)

    def has_between(self, key: RunKey) -> bool:
        """Say whether all runs of a slot are here because those around it were read."""
        several = self._whole_slots.get(key.job)
        return several is not None and any(first <= key.slot <= last for first, last in several)

    def took_slots(self, job: str, first: float, last: float) -> None:
        """Keep in mind that all runs of these slots are here."""
        self._whole_slots.setdefault(job, []).append((first, last))

    def took_beyond(self, job: str, mark: int) -> None:
        """Keep in mind that all runs of its schedule are here after the slot ``mark``."""
        self._whole_from[job] = min(mark, self._whole_from.get(job, mark))

    def of_job(self, job: str) -> list[RunRecord]:
        """Return all runs of a job that are here, by key."""
        runs = (self._runs[key] for key in sorted(self._by_name.get(job, ())) if key.job == job)
        return [run for run in runs if run is not None]

    def here(self) -> list[RunRecord]:
        """Return all runs that are here."""
        return [run for run in self._runs.values() if run is not None]

    def live(self, lock: str) -> list[RunRecord]:
        """Return every live run of a lock."""
        if lock not in self._whole_locks:
            (rows,) = self.ask([self.live_of([lock])])
            self.took_runs(rows, locks=[lock])
        here = self._by_name.get(lock)
        return self._alive(here, lambda run: run.lock == lock) if here else []

    def live_of_job(self, job: str) -> list[RunRecord]:
        """Return every live run of a job, by key."""
        if job not in self._whole_jobs:
            (rows,) = self.ask([self.live_of_jobs([job])])
            self.took_runs(rows, jobs=[job])
        return self._alive(self._by_name.get(job, ()), lambda run: run.key.job == job)

    def knows_job(self, name: str) -> bool:
        """Say whether a job was read, or looked for in vain."""
        return name in self._jobs

    def jobs_here(self) -> list[JobRecord]:
        """Return all jobs that are here."""
        return [job for job in self._jobs.values() if job is not None]

    def _alive(self, keys: Iterable[RunKey], chosen: Any) -> list[RunRecord]:
        runs = (self._runs[key] for key in sorted(keys))
        return [run for run in runs if run and not run.state.terminal and chosen(run)]

    def lease(self, name: str) -> DraftLease | None:
        """Return a lease."""
        if name not in self._leases:
            self.missing_leases([name])
        return self._leases[name]

    def missing_leases(self, names: Iterable[str]) -> None:
        """Read those of some leases that were not read yet, all at once."""
        unknown = sorted(set(names) - set(self._leases))
        if unknown:
            (rows,) = self.ask_now([self.leases_by(unknown, locks=[], jobs=[])])
            self.took_leases(rows, names=unknown)

    def is_free(self, key: RunKey, lock: str) -> bool:
        """Say whether there is no such run, no live run of its lock, and nobody has the lock."""
        if self.run(key) is not None or self.live(lock):
            return False
        lease = self.lease(lock)
        return lease is None or not lease.held

    def standing(self, name: str) -> Standing:
        """Return how a lease stands."""
        found = self.lease(name)
        if found is None or not found.stands:
            return Standing(name, token=0 if found is None else found.token)
        return Standing(name, True, found.holder, found.token, found.since, found.left)  # noqa: FBT003

    def job(self, name: str) -> JobRecord | None:
        """Return a job."""
        if name not in self._jobs:
            (rows,) = self.ask([self.jobs_by([name])])
            self.took_jobs(rows, names=[name])
        return self._jobs[name]

    # Writing.

    def put(self, run: RunRecord) -> RunRecord:
        """Keep a run as it is now, if it may become that."""
        before = self.run(run.key)
        assert legal(before and before.state, run.state), f"{before} cannot become {run}"
        if before and before.state is State.RUNNING and run.state is not State.RUNNING:
            # A run that no longer runs holds no lease: the server frees it in the same commit,
            # unless by then it runs again.
            self._end(before.lease, before.holder.nonce)
            self._freed[before.lease] = run.key
        self._keep(run)
        return run

    def begin_run(self, want: Want) -> tuple[RunRecord, Grant]:
        """Have a run begin that is not there yet, under the lease of its lock, which is free."""
        grant = self.give(want.lock, want.holder, want.policy.lease)
        run = begun_record(want, token=grant.token, now=self.now)
        self._keep(run)
        lease = self._leases[want.lock]
        assert lease is not None, "just given"
        self.usual.begins(run, lease)
        return run, grant

    def _keep(self, run: RunRecord) -> None:
        assert not self.committed, "nothing is decided after the commit"
        key = run.key
        self._runs[key] = run
        for name in (key.job,) if key.job == run.lock else (key.job, run.lock):
            here = self._by_name.get(name)
            if here is None:
                self._by_name[name] = {key}
            else:
                here.add(key)

    def put_job(self, job: JobRecord) -> None:
        """Keep a job as it is now."""
        before = self.job(job.job)
        assert before is None or job.watermark >= before.watermark, "a watermark never falls"
        self._jobs[job.job] = job

    def tell(self, event: RunEvent) -> None:
        """Keep an event."""
        self.told.append(event)

    def count(self, key: RunKey, report: Report) -> None:
        """Keep what a source has counted."""
        for name, value in report.counts:
            self._counts[key, name, report.source] = value

    def give(self, name: str, holder: Holder, ttl: float, *, above: int = 0) -> Grant:
        """Grant a lease that was seen to be free, with a token that is higher than ``above``."""
        known = self.lease(name)
        highest = max(above, 0 if known is None else known.token)
        token = next_token(highest, store_us=int(self.now * 1e6))
        beat = 0 if known is None else known.beat
        self._change(name, DraftLease(token, holder, True, ttl, ttl, self.now, beat))  # noqa: FBT003
        return Grant(token, ttl)

    def extend(self, name: str, nonce: str, token: int, ttl: float | None) -> bool:
        """Write a lease anew, with another end unless it keeps its own; say whether it was ours."""
        known = self.lease(name)
        if known is None or not known.stands or (known.holder.nonce, known.token) != (nonce, token):
            return False
        self._change(name, known if ttl is None else known._replace(left=ttl, ttl=ttl))
        return True

    def revoke(self, name: str, nonce: str, operator: str, reason: str) -> int:
        """Take a lease from the holder of ``nonce``; return the token from then on, or 0."""
        known = self.lease(name)
        if known is None or known.holder.nonce != nonce:
            return 0
        fresh = next_token(known.token, store_us=int(self.now * 1e6))
        nobody, ended = known.holder._replace(nonce=""), f"it was broken by {operator}: {reason}"
        self._change(name, known._replace(token=fresh, holder=nobody, held=False, ended=ended))
        broken = {"name": name, "token": known.token, "new_token": fresh}
        self._broken.append(
            {**broken, "holder": str(known.holder), "operator": operator, "reason": reason}
        )
        return fresh

    def drop(self, name: str, nonce: str) -> None:
        """Forget a lease of this nonce, if it has it, and has not renewed it since it was read."""
        known = self.lease(name)
        if known is not None and known.holder.nonce == nonce:
            key = self._lease_sql.key_of(self._namespace, name)
            self._dropped.append({"key": key, "seen_token": known.token, "seen_beat": known.beat})
            self._leases[name] = None
            self._leases_read.pop(name, None)
            self._leases_changed.pop(name, None)

    def _end(self, name: str, nonce: str) -> None:
        """Have a lease released by its run, as far as it is here: the server sees to it anyway."""
        self._left[name] = nonce
        known = self._leases.get(name)
        if known is not None and known.holder.nonce == nonce and known.held:
            self._leases[name] = known._replace(held=False, ended="it was released")

    def _change(self, name: str, lease: DraftLease) -> None:
        self._leases[name] = lease
        self._leases_changed[name] = None

    # Sending.

    def commit(self, *after: Step) -> list[Sequence[tuple[Any, ...]]]:
        """Write what has changed and commit, in one round trip; return what ``after`` answers."""
        steps = self._steps()
        self.committed = True
        answers = self._transaction.batch([*steps, *after], last=True) if steps or after else []
        granting = (self._lease_sql.INSERT, self._lease_sql.UPDATE, *self.usual.granting)
        for (statement, _), answer in zip(steps, answers, strict=False):
            if statement in granting:
                for row in answer.rows:
                    self.bearings.granted(row)
        return [answer.rows for answer in answers[len(steps) :]]

    def _steps(self) -> list[Step]:
        """Return what writes all that has changed: runs before leases, as every verb does it."""
        steps = [*self._run_steps(), *marks(self), *self._lease_steps(), *self._job_steps()]
        return [*steps, *self._told_steps(), *(step for more in self.also for step in more())]

    def _run_steps(self) -> list[Step]:
        begun: list[RunRecord] = []
        made: list[RunRecord] = []
        moved = []
        for key in sorted(key for key, run in self._runs.items() if run is not self._read.get(key)):
            run, before = self._runs[key], self._read.get(key)
            assert run is not None, "what is here once is not forgotten"
            if before is None:
                (begun if self.usual.has_begun(run) else made).append(run)
            elif run != before:
                moved.append((run_row(run), self._versions[key]))
        return [
            *self.moved(self._sql.UPDATE, moved),
            *self.rows(self._sql.INSERT, [run_row(run) for run in made]),
            *self.usual.begun(begun),
        ]

    def _lease_steps(self) -> list[Step]:
        made, moved = [], []
        granted: list[Granted] = []
        for name, left_by in self._freed.items():
            run = self._runs[left_by]
            # Who was taken for dead may have shown since that it lives, by the lease alone.
            told = name in self.bearings.presumed or (run and run.state is State.RUNNING)
            if told and name in self._leases_read:
                self._leases_changed[name] = None
        for name in sorted(self._leases_changed):
            lease, before = self._leases[name], self._leases_read.get(name)
            assert lease is not None, "what has changed is there"
            if self.usual.is_granted(name, lease):
                granted.append((name, lease, before))
                continue
            row = lease_row(name, lease, now=self.now)
            row["key"] = self._lease_sql.key_of(self._namespace, name)
            if before is None:
                made.append(row)
            else:
                moved.append({**row, "seen_token": before.token, "seen_beat": before.beat})
        key_of = self._lease_sql.key_of
        clamped = [{"key": key_of(self._namespace, name)} for name in sorted(self._set_back)]
        return [
            *self.rows(self._lease_sql.CLAMP, clamped),
            *self.rows(self._lease_sql.DROP, self._dropped),
            *self.rows(self._lease_sql.UPDATE, moved, **self.bearings.terms),
            *self.rows(self._lease_sql.INSERT, made, **self.bearings.terms),
            *self.usual.granted(granted, now=self.now, terms=self.bearings.terms),
            *self.rows(self._lease_sql.TELL_BREAKS, self._broken),
        ]

    def _job_steps(self) -> list[Step]:
        made, moved, passed = [], [], []
        for name in sorted(self._jobs):
            job, before = self._jobs[name], self._jobs_read.get(name)
            if job is None or job is before or job == before:
                continue
            if before is None:
                made.append(job._asdict())
            elif self.usual.has_passed(job, before):
                passed.append((job, self._job_versions[name]))
            else:
                moved.append((job._asdict(), self._job_versions[name]))
        return [
            *self.usual.passed(passed),
            *self.moved(self._sql.UPDATE_JOBS, moved),
            *self.rows(self._sql.INSERT_JOBS, made),
        ]

    def _told_steps(self) -> list[Step]:
        counts = [
            {**key._asdict(), "name": name, "source": source, "value": value}
            for (key, name, source), value in self._counts.items()
        ]
        told = [event_row(event) for event in self.told]
        return [*self.rows(self._sql.COUNT_ALL, counts), *self.rows(self._sql.TELL_ALL, told)]

    def rows(self, statement: Any, rows: list[dict[str, Any]], **more: object) -> list[Step]:
        """Return what writes some rows of a kind, if there are any."""
        if not rows:
            return []
        values = {"namespace": self._namespace, "count": len(rows), **more}
        values["rows"] = self.dialect.packed(rows)
        return [(statement, values)]

    def moved(self, statement: Any, rows: list[tuple[dict[str, Any], Any]]) -> list[Step]:
        """Return what changes some rows of a kind, each if it is of that version still."""
        versions = [version for _, version in rows]
        steps = self.rows(statement, [{**row, "seen": version} for row, version in rows])
        return [(known, {**values, "versions": versions}) for known, values in steps]
