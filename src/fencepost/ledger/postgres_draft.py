"""What one transaction has read, and what it is going to write: decided in memory, sent at once.

A transaction is a question, a decision and an answer: rows are read in one round trip, everything
is decided on the draft, and what has changed is written together with the commit. Whatever was not
read ahead is read when it is asked for. A row that somebody else has changed since undoes all of
it, and it is done again from the start.
"""

from __future__ import annotations

from fencepost.ledger import postgres_leases as leases, postgres_rows as sql
from fencepost.ledger.postgres_leases import DraftLease
from fencepost.model.claim import Standing
from fencepost.model.definition import JobRecord
from fencepost.model.lease import Grant, next_token
from fencepost.model.run import RunEvent, RunRecord, State, legal
from fencepost.stores.postgres_rows import lease_key

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from fencepost.ledger.api import Report
    from fencepost.model.lease import Holder
    from fencepost.model.slot import RunKey
    from fencepost.world.postgres import Statement, Transaction

    Step = tuple[Statement, dict[str, Any]]
    Slots = tuple[float, float, bool]  # from the first to the last; or only those of the schedule


class Draft:
    """The runs, leases, jobs and events of one namespace, as one transaction leaves them."""

    def __init__(self, transaction: Transaction, namespace: str) -> None:
        self._transaction, self._namespace = transaction, namespace
        self.now = 0.0
        self.committed = False
        self._runs: dict[RunKey, RunRecord | None] = {}
        self._read: dict[RunKey, tuple[RunRecord, str]] = {}  # as they were, and which version
        self._by_lock: dict[str, set[RunKey]] = {}
        self._by_job: dict[str, set[RunKey]] = {}
        self._whole_locks: set[str] = set()  # of which every live run is here
        self._whole_jobs: set[str] = set()
        self._whole_slots: dict[str, list[Slots]] = {}
        self._leases: dict[str, DraftLease | None] = {}
        self._leases_read: dict[str, DraftLease] = {}
        self._leases_changed: dict[str, None] = {}
        self._broken: list[dict[str, Any]] = []
        self._dropped: list[dict[str, Any]] = []
        self._freed: dict[str, RunKey] = {}  # which run has left a lease
        self._jobs: dict[str, JobRecord | None] = {}
        self._jobs_read: dict[str, tuple[JobRecord, str]] = {}
        self._events: list[RunEvent] = []
        self._counts: dict[tuple[RunKey, str, str], int] = {}
        self.also: list[Callable[[], list[Step]]] = []  # what writes what others keep beside it

    # Reading.

    def begin(self, *before: Step, read: Sequence[Step] = ()) -> list[list[tuple[Any, ...]]]:
        """Begin with statements that wait for their turn; return what was read after them."""
        return self.ask_now([*before, *read])[len(before) :]

    def ask(self, steps: Sequence[Step]) -> list[list[tuple[Any, ...]]]:
        """Return what several statements answer, in one round trip."""
        return [answer.rows for answer in self._transaction.batch(steps)] if steps else []

    def ask_now(self, steps: Sequence[Step]) -> list[list[tuple[Any, ...]]]:
        """Return the same, and go by the time that it is once they are answered.

        Who finds a lease free must not be on record as having had it before it was.
        """
        *answers, clock = self.ask([*steps, (sql.CLOCK, {})])
        self.now = max(self.now, clock[0][0])
        return answers

    def runs_by(self, keys: Iterable[RunKey], *, alone: bool = False) -> Step:
        """Return what reads some runs; ``alone`` keeps others from writing them meanwhile."""
        statement = sql.FIND_SOME_ALONE if alone else sql.FIND_SOME
        return statement, {"namespace": self._namespace, **sql.keys_of(keys)}

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
            run = sql.run_of(row)
            before, _ = self._read.get(run.key, (None, ""))
            if self._runs.get(run.key) == before:  # nothing was decided about it yet
                self._read[run.key] = (run, row[-1])
                self._keep(run)
            found.append(run)
        for key in keys:
            self._runs.setdefault(key, None)
        self._whole_locks.update(locks)
        self._whole_jobs.update(jobs)
        return found

    def live_of(self, locks: Iterable[str]) -> Step:
        """Return what reads every live run of some locks."""
        return sql.FIND_LIVE, {"namespace": self._namespace, "locks": list(locks)}

    def live_of_jobs(self, jobs: Iterable[str]) -> Step:
        """Return what reads every live run of some jobs."""
        return sql.FIND_LIVE_OF, {"namespace": self._namespace, "jobs": list(jobs)}

    def leases_by(self, names: Iterable[str], *, locks: Iterable[str], jobs: Iterable[str]) -> Step:
        """Return what reads some leases, and those of the live runs of some locks and jobs."""
        values = {"names": list(names), "locks": list(locks), "jobs": list(jobs)}
        return leases.FIND_SOME, {"namespace": self._namespace, **values}

    def took_leases(self, rows: Iterable[tuple[Any, ...]], *, names: Iterable[str]) -> None:
        """Keep leases that were read; those of ``names`` that are not among them are not there."""
        for row in rows:
            name, lease = leases.lease_of(row, now=self.now)
            if self._leases.get(name) == self._leases_read.get(name):
                self._leases[name] = self._leases_read[name] = lease
        for name in names:
            self._leases.setdefault(name, None)

    def jobs_by(self, names: Iterable[str]) -> Step:
        """Return what reads some jobs."""
        return sql.FIND_SOME_JOBS, {"namespace": self._namespace, "jobs": list(names)}

    def took_jobs(self, rows: Iterable[tuple[Any, ...]], *, names: Iterable[str]) -> None:
        """Keep jobs that were read."""
        for row in rows:
            job = JobRecord(*row[:-1])
            before, _ = self._jobs_read.get(job.job, (None, ""))
            if self._jobs.get(job.job) == before:
                self._jobs_read[job.job] = (job, row[-1])
                self._jobs[job.job] = job
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
        return any(
            first <= key.slot <= last and not (scheduled and key.manual)
            for first, last, scheduled in self._whole_slots.get(key.job, ())
        )

    def took_slots(self, job: str, first: float, last: float, *, scheduled: bool = False) -> None:
        """Keep in mind that all runs of these slots are here, or all of the schedule's."""
        self._whole_slots.setdefault(job, []).append((first, last, scheduled))

    def of_job(self, job: str) -> list[RunRecord]:
        """Return all runs of a job that are here, by key."""
        runs = (self._runs[key] for key in sorted(self._by_job.get(job, ())))
        return [run for run in runs if run is not None]

    def here(self) -> list[RunRecord]:
        """Return all runs that are here."""
        return [run for run in self._runs.values() if run is not None]

    def live(self, lock: str) -> list[RunRecord]:
        """Return every live run of a lock."""
        if lock not in self._whole_locks:
            (rows,) = self.ask([self.live_of([lock])])
            self.took_runs(rows, locks=[lock])
        return self._alive(self._by_lock.get(lock, ()), lambda run: run.lock == lock)

    def live_of_job(self, job: str) -> list[RunRecord]:
        """Return every live run of a job, by key."""
        if job not in self._whole_jobs:
            (rows,) = self.ask([self.live_of_jobs([job])])
            self.took_runs(rows, jobs=[job])
        return self._alive(self._by_job.get(job, ()), lambda _: True)

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

    def standing(self, name: str) -> Standing:
        """Return how a lease stands."""
        found = self.lease(name)
        if found is None or not found.stands:
            return Standing(name)
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

    def _keep(self, run: RunRecord) -> None:
        assert not self.committed, "nothing is decided after the commit"
        self._runs[run.key] = run
        self._by_lock.setdefault(run.lock, set()).add(run.key)
        self._by_job.setdefault(run.key.job, set()).add(run.key)

    def put_job(self, job: JobRecord) -> None:
        """Keep a job as it is now."""
        before = self.job(job.job)
        assert before is None or job.watermark >= before.watermark, "a watermark never falls"
        self._jobs[job.job] = job

    def tell(self, event: RunEvent) -> None:
        """Keep an event."""
        self._events.append(event)

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

    def extend(self, name: str, nonce: str, token: int, ttl: float) -> bool:
        """Move the end of a lease; say whether it was still ours to move."""
        known = self.lease(name)
        if known is None or not known.stands or (known.holder.nonce, known.token) != (nonce, token):
            return False
        self._change(name, known._replace(left=ttl, ttl=ttl))
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
        """Forget a lease of this nonce, if it has it."""
        known = self.lease(name)
        if known is not None and known.holder.nonce == nonce:
            key = "\\x" + lease_key(self._namespace, name).hex()
            self._dropped.append({"key": key, "nonce": nonce})
            self._leases[name] = None
            self._leases_read.pop(name, None)
            self._leases_changed.pop(name, None)

    def _end(self, name: str, nonce: str) -> None:
        known = self.lease(name)
        if known is not None and known.holder.nonce == nonce and known.held:
            self._leases[name] = known._replace(held=False, ended="it was released")

    def _change(self, name: str, lease: DraftLease) -> None:
        self._leases[name] = lease
        self._leases_changed[name] = None

    # Sending.

    def commit(self, *after: Step) -> list[list[tuple[Any, ...]]]:
        """Write what has changed and commit, in one round trip; return what ``after`` answers."""
        steps = self._steps()
        self.committed = True
        answers = self._transaction.batch([*steps, *after], last=True) if steps or after else []
        return [answer.rows for answer in answers[len(steps) :]]

    def _steps(self) -> list[Step]:
        """Return what writes all that has changed: runs before leases, as every verb does it."""
        steps = [*self._run_steps(), *self._lease_steps(), *self._job_steps(), *self._told_steps()]
        return steps + [step for others in self.also for step in others()]

    def _run_steps(self) -> list[Step]:
        made, moved = [], []
        for key in sorted(key for key, run in self._runs.items() if run is not None):
            run, before = self._runs[key], self._read.get(key)
            assert run is not None, "just seen"
            if before is None:
                made.append(sql.row_of(run))
            elif run != before[0]:
                moved.append((sql.row_of(run), before[1]))
        return [*self.moved(sql.UPDATE, moved), *self.rows(sql.INSERT, made)]

    def _lease_steps(self) -> list[Step]:
        made, moved = [], []
        for name, left_by in self._freed.items():
            run = self._runs[left_by]
            if run is not None and run.state is State.RUNNING and name in self._leases_read:
                self._leases_changed[name] = None
        for name in sorted(self._leases_changed):
            lease, before = self._leases[name], self._leases_read.get(name)
            assert lease is not None, "what has changed is there"
            key = lease_key(self._namespace, name)
            row = leases.row_of(key, name, lease, now=self.now)
            if before is None:
                made.append(row)
            else:
                moved.append({**row, "seen_token": before.token, "seen_beat": before.beat})
        return [
            *self.rows(leases.DROP, self._dropped),
            *self.rows(leases.UPDATE, moved),
            *self.rows(leases.INSERT, made),
            *self.rows(leases.TELL_BREAKS, self._broken),
        ]

    def _job_steps(self) -> list[Step]:
        made, moved = [], []
        for name in sorted(self._jobs):
            job, before = self._jobs[name], self._jobs_read.get(name)
            if job is None or (before is not None and job == before[0]):
                continue
            if before is None:
                made.append(job._asdict())
            else:
                moved.append((job._asdict(), before[1]))
        return [*self.moved(sql.UPDATE_JOBS, moved), *self.rows(sql.INSERT_JOBS, made)]

    def _told_steps(self) -> list[Step]:
        counts = [
            {**key._asdict(), "name": name, "source": source, "value": value}
            for (key, name, source), value in self._counts.items()
        ]
        told = [sql.event_row(event) for event in self._events]
        return [*self.rows(sql.COUNT_ALL, counts), *self.rows(sql.TELL_ALL, told)]

    def rows(self, statement: Statement, rows: list[dict[str, Any]]) -> list[Step]:
        """Return what writes some rows of a kind, if there are any."""
        if not rows:
            return []
        values = {"namespace": self._namespace, "rows": sql.packed(rows), "count": len(rows)}
        return [(statement, values)]

    def moved(self, statement: Statement, rows: list[tuple[dict[str, Any], str]]) -> list[Step]:
        """Return what changes some rows of a kind, each if it is of that version still."""
        versions = [version for _, version in rows]
        steps = self.rows(statement, [row for row, _ in rows])
        return [(known, {**values, "versions": versions}) for known, values in steps]
