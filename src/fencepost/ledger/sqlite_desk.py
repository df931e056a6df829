"""What a tick and a registration may do inside of one write transaction on SQLite."""

from __future__ import annotations

from fencepost.ledger import sqlite_planner_rows as sql
from fencepost.ledger.planning import PAGE
from fencepost.ledger.sqlite_books import Ended
from fencepost.ledger.sqlite_rows import COLUMNS, job_of, run_of
from fencepost.model.claim import Claimed, Verdict
from fencepost.model.cohort import Cohort
from fencepost.model.lease import Grant
from fencepost.model.plan import Past, goes_on
from fencepost.model.policy import OnLoss, Overlap
from fencepost.model.turns import NEWEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from sqlite3 import Connection
    from typing import Any

    from fencepost.errors import RunLost
    from fencepost.ledger.planning import Due, End, InstanceRecord, JobPlace, Lane, RunPlace
    from fencepost.ledger.sqlite_books import SqliteBooks
    from fencepost.model.claim import Want
    from fencepost.model.definition import Definition, JobRecord
    from fencepost.model.plan import Span
    from fencepost.model.run import RunRecord
    from fencepost.model.slot import RunKey
    from fencepost.stores.sqlite import SqliteStore


# Where in a row of what runs its run begins, and two columns of that.
_RUN = 6
_JOB, _NONCE = (_RUN + COLUMNS.split(", ").index(name) for name in ("job", "nonce"))


def _flat(place: RunPlace) -> tuple[Any, ...]:
    due, key = place
    return (due, *key)


class SqliteDesk:
    """An open transaction. ``proofs``, and attempts that are ``over``, are for after its commit.

    ``off`` is how far our own clock is from ``now``, the ledger's time, if too far to go by it.
    ``urgent`` says that something began that must not be tried twice, whatever happens, or ended
    for good where nobody expected it: it must survive a power cut.
    """

    def __init__(
        self,
        db: Connection,
        books: SqliteBooks,
        leases: SqliteStore,
        *,
        now: float,
        off: float = 0.0,
    ) -> None:
        self._db, self._books, self._leases, self.now, self.off = db, books, leases, now, off
        self._namespace = leases.namespace
        self.proofs: list[int] = []
        self.over: list[tuple[str, str, bool]] = []  # lease, nonce, and whether that freed it
        self.urgent = False

    def due_jobs(
        self, *, most: int, only: str | None, after: JobPlace | None = None
    ) -> Iterator[JobRecord]:
        """Yield jobs that are due, page by page: those seen may be changed meanwhile."""
        if only is not None:
            job = self.job(only)
            if job is not None and job.next_due is not None and job.next_due <= self.now:
                yield job
            return
        last: tuple[Any, ...] = after or (float("-inf"), "")
        size = max(1, min(most, PAGE))
        while True:
            values = (self._namespace, self.now, *last, size)
            page = self._db.execute(sql.FIND_DUE, values).fetchall()
            for row in page:
                yield job_of(row)
            if len(page) < size:
                return
            seen = job_of(page[-1])
            last = (seen.next_due, seen.job)

    def due_runs(
        self, *, most: int, only: str | None, after: RunPlace | None = None
    ) -> Iterator[RunRecord]:
        """Yield runs that wait and whose time has come, page by page as well."""
        last: tuple[Any, ...] = (float("-inf"), "", 0, 0, 0) if after is None else _flat(after)
        size = max(1, min(most, PAGE))
        while True:
            values = (self._namespace, self.now, only, *last, size)
            page = [run_of(row) for row in self._db.execute(sql.FIND_DUE_RUNS, values).fetchall()]
            yield from page
            if len(page) < size:
                return
            last = _flat((page[-1].not_before, page[-1].key))

    def lost_runs(self, *, only: str | None) -> list[RunRecord]:
        """Return runs whose attempt is gone: its lease has lapsed, or its holder died.

        A dead holder is felt once, however many runs it had.
        """
        now, era = self._leases.now()
        dead: dict[tuple[str, str], bool] = {}
        lost = []
        for row in self._db.execute(sql.FIND_RUNNING, (self._namespace,)).fetchall():
            held, nonce, boot, expires_us, *pulse = row[:6]
            # Nearly all of them are well: only what is lost is worth a record.
            if only not in (None, row[_JOB]):
                continue
            gone = not held or nonce != row[_NONCE] or boot != era or expires_us <= now * 1e6
            if not gone:
                felt = (pulse[0], pulse[1])
                if felt not in dead:
                    dead[felt] = self._leases.is_dead(*felt)
                gone = dead[felt]
            if gone:
                lost.append(run_of(row[_RUN:]))
        return lost

    def granted(self, nonce: str) -> list[Claimed]:
        """Return attempts that were granted by an answer that was lost."""
        now, era = self._leases.now()
        found = []
        for row in self._db.execute(sql.FIND_RUNNING, (self._namespace,)).fetchall():
            held, holder, boot, expires_us = row[:4]
            left = expires_us / 1e6 - now if held else 0.0
            if held and boot == era and holder.startswith(nonce) and left > 0:
                run = run_of(row[6:])
                if run.holder.nonce != holder:
                    continue  # it was lost, and another run has its lease
                found.append(Claimed(Verdict.GO, run, Grant(run.token, left, adopted=True)))
        return found

    def due_lanes(self, *, jobs: Iterable[str]) -> Iterator[Lane]:
        """Yield what is to be made up now: of these jobs, and page by page whatever is due."""
        if self._db.execute(sql.ANY_LANE, (self._namespace,)).fetchone() is None:
            return
        freed = sorted(jobs)
        for job in freed:
            yield from self.lanes(job)
        last: tuple[float, int] = (float("-inf"), 0)
        while True:
            values = (self._namespace, self.now, *last, PAGE)
            page = self._db.execute(sql.FIND_DUE_LANES, values).fetchall()
            for lane in map(sql.lane_of, page):
                last = (lane.not_before, lane.number)
                if lane.job not in freed:
                    yield lane
            if len(page) < PAGE:
                return

    def lanes(self, job: str) -> list[Lane]:
        """Return what is being made up of a job."""
        rows = self._db.execute(sql.FIND_LANES_OF, (self._namespace, job)).fetchall()
        return [sql.lane_of(row) for row in rows]

    def lane(self, number: int) -> Lane | None:
        """Return one of what was ever to be made up."""
        row = self._db.execute(sql.FIND_LANE, (self._namespace, number)).fetchone()
        return None if row is None else sql.lane_of(row)

    def job(self, name: str) -> JobRecord | None:
        """Return a job."""
        row = self._db.execute(sql.FIND_JOB, (self._namespace, name)).fetchone()
        return None if row is None else job_of(row)

    def put_job(self, job: JobRecord) -> None:
        """Keep a job as it is now."""
        self._db.execute(sql.PUT_JOB, (self._namespace, *sql.row_of(job)))

    def advance(self, job: str, watermark: int, next_due: float | None, owed: int) -> None:
        """Move a job's watermark, and keep when to look at it again."""
        self._db.execute(sql.ADVANCE, (watermark, next_due, owed, self._namespace, job))

    def move_job(self, job: JobRecord) -> None:
        """Keep what time has changed about a job."""
        moved = (job.watermark, job.next_due, job.owed, job.paused, job.paused_until)
        self._db.execute(sql.MOVE_JOB, (*moved, self._namespace, job.job))

    def put_lane(self, lane: Lane) -> Lane:
        """Keep what is being made up as it is now; number it, if it is new."""
        new = lane._replace(number=None) if not lane.number else lane  # type: ignore[arg-type]
        number = self._db.execute(sql.PUT_LANE, (self._namespace, *new)).lastrowid
        return lane if lane.number else lane._replace(number=number or 0)

    def span(self, job: str, span: Span, *, apart: bool = False) -> None:
        """Record a range of slots."""
        row = None if apart else self._db.execute(sql.LAST_SPAN, (self._namespace, job)).fetchone()
        if row is not None and goes_on(last := sql.span_of(row).span, span, last.last):
            values = (span.last, self.now, self._namespace, job, last.first)
            self._db.execute(sql.LENGTHEN_SPAN, values)
            return
        first, until, state, *rest = span
        added = (self._namespace, job, first, until, state.value, *rest, self.now)
        self._db.execute(sql.ADD_SPAN, added)

    def run(self, key: RunKey) -> RunRecord | None:
        """Return a run."""
        return self._books.find(self._db, key)

    def put_run(self, run: RunRecord, *, before: RunRecord | None) -> RunRecord:
        """Keep a run as it is now."""
        return self._books.put(self._db, run, before=before)

    def waiting(self, job: str) -> list[RunRecord]:
        """Return the runs of a job that never began."""
        return [run for run in self.idle(job) if run.fresh]

    def idle(self, job: str) -> list[RunRecord]:
        """Return the runs of a job that do not run and have not ended."""
        rows = self._db.execute(sql.FIND_WAITING, (self._namespace, job)).fetchall()
        return [run_of(row) for row in rows]

    def made_up(self, job: str, trigger: str) -> int:
        """Return how many runs of a job are live that make up for the past in this way."""
        values = (self._namespace, job, trigger)
        count: int = self._db.execute(sql.COUNT_MADE_UP, values).fetchone()[0]
        return count

    def past(self, job: str) -> Past:
        """Return how the newest run of a job stands."""
        values = (self._namespace, job)
        row = self._db.execute(sql.FIND_PAST, values).fetchone()
        if row is None:
            return Past()
        live = self._db.execute(sql.IS_LIVE, values).fetchone() is not None
        return Past(row[0], live=live, ended_at=row[1])

    def last_began(self, jobs: Sequence[str]) -> dict[str, float]:
        """Return for each of some jobs when one of its newest runs last began; 0 if none did."""
        found = {}
        for job in jobs:
            values = (self._namespace, job, NEWEST)
            (found[job],) = self._db.execute(sql.LAST_BEGAN, values).fetchone()
        return found

    def newest_rerun(self, key: RunKey) -> RunRecord | None:
        """Return the newest run of a slot."""
        row = self._db.execute(sql.FIND_RERUN, (self._namespace, *key[:3])).fetchone()
        return None if row is None else run_of(row)

    def claim(self, want: Want) -> Claimed:
        """Decide who may run it, and record that."""
        free = want.room and want.policy.overlap is not Overlap.ALLOW
        claimed = self._books.claim_free(self._db, want) if free else None
        if claimed is None:
            claimed = self._books.claim(self._db, want, proofs=self.proofs)
        if claimed.verdict is Verdict.GO and want.policy.on_loss is OnLoss.FAIL:
            self.urgent = True
        return claimed

    def claim_all(self, slots: Sequence[Due]) -> list[Claimed | None]:
        """Claim by the batch what nothing speaks against."""
        claimed = self._books.claim_all(self._db, slots)
        careful = any(due.want.policy.on_loss is OnLoss.FAIL for due in slots)
        self.urgent = self.urgent or careful
        return claimed

    def finish_all(self, ends: Sequence[End]) -> list[RunRecord | RunLost]:
        """End attempts."""
        answers: list[RunRecord | RunLost] = []
        for end, run in zip(ends, self._books.finish_all(self._db, ends), strict=True):
            if run is None:
                answers.append(self._finish(end))
            else:
                self.over.append((end.attempt.lease, end.attempt.nonce, True))
                answers.append(run)
        return answers

    def _finish(self, end: End) -> RunRecord | RunLost:
        attempt, settled, report = end
        run = None
        if settled.state.terminal and not report.counts:
            run = self._books.finish_for_good(self._db, attempt, settled, report)
        if run is None:
            ended = self._books.finish(self._db, attempt, settled, report)
            if not isinstance(ended, Ended):  # it is over all the same: nobody vouches for it now
                self.over.append((attempt.lease, attempt.nonce, False))
                return ended
            run = ended.run
            # A retry that a cancel has overtaken is an end for good.
            self.urgent = self.urgent or run.state.terminal
        self.over.append((attempt.lease, attempt.nonce, True))
        return run

    def cancel(self, key: RunKey, *, force: bool, operator: str) -> RunRecord:
        """Cancel what does not run; ask what runs, or take it away."""
        ended = self._books.cancel(self._db, key, operator, force=force, only_waiting=False)
        self.urgent = self.urgent or ended.run.state.terminal
        if ended.freed:
            self.over.append((ended.run.lease, ended.run.holder.nonce, True))
        return ended.run

    def next_look(self) -> float | None:
        """Return the instant when something is due next."""
        due: float | None = self._db.execute(sql.NEXT_LOOK, (self._namespace,)).fetchone()[0]
        return due

    # Registration.

    def put_instance(self, record: InstanceRecord) -> None:
        """Keep an instance as it is now."""
        self._db.execute(sql.PUT_INSTANCE, (self._namespace, *sql.instance_row(record)))

    def drop_instance(self, name: str) -> None:
        """Forget an instance."""
        self._db.execute(sql.DROP_INSTANCE, (self._namespace, name))

    def instances(self) -> list[InstanceRecord]:
        """Return all instances."""
        rows = self._db.execute(sql.FIND_INSTANCES, (self._namespace,)).fetchall()
        return [sql.instance_of(row) for row in rows]

    def join(self, instance: str, definition: Definition, cohort: Cohort) -> None:
        """Keep that an instance shares a definition."""
        space, job = self._namespace, definition.job
        self._db.execute(sql.JOIN, (space, job, instance, cohort.digest))
        values = (space, job, *cohort, sql.definition_text(definition))
        self._db.execute(sql.PUT_COHORT, values)

    def part(self, record: InstanceRecord, *, most: int) -> list[str]:
        """Take jobs from an instance that is gone."""
        space, name = self._namespace, record.instance.name
        rows = self._db.execute(sql.FIND_MEMBERS_OF, (space, name, most)).fetchall()
        for job, digest in rows:
            self._db.execute(sql.SEE_COHORT, (record.beat_at, space, job, digest))
            self._db.execute(sql.PART, (space, job, name))
        return [job for job, _ in rows]

    def cohorts(self, job: str) -> list[Cohort]:
        """Return the cohorts of a job."""
        rows = self._db.execute(sql.FIND_COHORTS, (self._namespace, job)).fetchall()
        return [Cohort(*row) for row in rows]

    def members(self, job: str) -> int:
        """Return how many instances know a job."""
        count: int = self._db.execute(sql.COUNT_MEMBERS, (self._namespace, job)).fetchone()[0]
        return count

    def definition(self, job: str, digest: str) -> Definition:
        """Return the definition that a cohort shares."""
        values = (self._namespace, job, digest)
        return sql.definition_from(self._db.execute(sql.FIND_DEFINITION, values).fetchone()[0])

    def set_back(self, by: float) -> None:
        """Move what waits for a while, now that the clock was set back."""
        for statement in sql.SET_BACK:
            self._db.execute(statement, {"namespace": self._namespace, "by": by, "now": self.now})

    def unknown(self, *, before: float, most: int) -> list[JobRecord]:
        """Return jobs that nobody has known since before that instant."""
        rows = self._db.execute(sql.FIND_UNKNOWN, (self._namespace, before, most)).fetchall()
        return [job_of(row) for row in rows]
