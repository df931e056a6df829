"""What a tick may do inside of its transaction on an SQL server: decide on what was read ahead.

A tick reads what is due, then all that is known about it, decides, and writes everything along
with the commit: a few round trips, however much is due. What another instance has locked is left
to it, and is not asked about.
"""

from __future__ import annotations

from fencepost.ledger import draft_books as books
from fencepost.ledger.draft_lanes import LaneShelf
from fencepost.ledger.draft_values import span_of, span_row
from fencepost.ledger.planning import PAGE, SpanRecord
from fencepost.model.claim import Claimed, Verdict, looked_at
from fencepost.model.definition import JobRecord
from fencepost.model.lease import Grant
from fencepost.model.plan import Past, goes_on
from fencepost.model.run import State
from fencepost.model.schedule import EveryAfter
from fencepost.model.slot import RunKey
from fencepost.model.turns import NEWEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Any

    from fencepost.errors import RunLost
    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_bearings import Watch
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.planning import Ask, Due, End, JobPlace, RunPlace
    from fencepost.model.claim import Want
    from fencepost.model.plan import Span
    from fencepost.model.run import RunRecord

    # What a run of a job needs, as far as was seen: its lock, and one of these leases.
    Needs = dict[str, tuple[str, list[str]]]

_WAITING = (State.PENDING, State.WAITING_RETRY)
_FIRST_RUN = RunKey("", -1)
_LONG_AGO = float("-inf")
_DUE = JobRecord._fields.index("next_due")
# How many runs around a slot of the past are read at once.
_AROUND = 300


class DraftDesk(LaneShelf):
    """An open transaction, and the draft of what it will have done. ``needs`` outlives it.

    ``now`` is when it was read what is due. Claims go by the draft's time, which is a moment later.
    """

    def __init__(self, draft: Draft, namespace: str, needs: Needs) -> None:
        super().__init__(draft, namespace)
        self._needs = needs
        self.now = 0.0
        self._turns: set[str] = set()  # the locks that are ours until the commit
        self._busy: set[str] = set()  # those that somebody else has
        self._due_page: tuple[list[str], JobPlace | None] | None = None  # read, and how far
        self._runs_reach: tuple[RunPlace | None] | None = None
        self._lost_read: list[RunKey] | None = None
        self._newest: set[str] = set()  # the jobs of which the newest run is here
        self._spans: dict[str, SpanRecord | None] = {}
        self._spans_put: dict[tuple[str, int], SpanRecord] = {}
        draft.also.append(self._span_steps)
        draft.also.append(self.lane_steps)

    # Reading ahead.

    def read_ahead(self, ask: Ask, watch: Watch, *, size: int) -> None:
        """Read all that a tick will ask for, as far as that can be known: two round trips."""
        draft, since, space = self._draft, ask.since, {"namespace": self._namespace}
        freed = sorted({end.attempt.key.job for end in ask.ended})
        usual, others = draft.usual.ends_apart(ask.ended)
        keys = [end.attempt.key for end in others]
        whole = [*freed, *([ask.only] if ask.only else [])]
        place = since.run if since and since.run else (_LONG_AGO, _FIRST_RUN)
        steps: list[Step] = [(self._sql.SHARE_OFFICE, space)]
        if usual:
            steps.append(draft.usual.end_all(usual))
        if keys:
            steps.append(draft.runs_by(dict.fromkeys(keys), alone=True))
        steps.append((self._sql.SET_NOW, {}))
        first = len(steps)
        steps += [
            self._due_jobs_step(since.job if since else None, ask.only, size),
            self._due_runs_step(place, ask.only, size),
            self.due_lanes_step((_LONG_AGO, 0)),
            self.lanes_of_step(whole),
        ]
        if ask.sweep:
            steps += watch.lost(self._sql, {**space, "only": ask.only})
        answers = draft.ask(steps)
        self.now = draft.now = answers[first - 1][0][0]
        if usual:
            draft.took_ends(usual, answers.pop(1))
            first -= 1
        for rows in answers[1 : first - 1]:
            draft.took_runs(rows)
        draft.took_runs((), keys=keys)
        due, waiting, lanes, lanes_of, *swept = answers[first:]
        lost, seen = swept[:1], swept[1:]
        if seen:
            watch.saw(seen[0][0], sweep=True)
        self._due_page = self._took_due(due, size)
        self._runs_reach = (self._took_waiting(waiting, size),)
        self.took_lanes(lanes, page=True)
        self.took_lanes(lanes_of, jobs=whole)
        self._lost_read = [run.key for rows in lost for run in draft.took_runs(rows)]
        runs = {key.job for key in self._lost_read} | {row[0] for row in waiting}
        # Of jobs that have only ended nothing is asked, unless something may have waited for that.
        stirred = ask.stirs.intersection(freed)
        stirred |= {rival for job in stirred for rival in ask.rivals.get(job, ())}
        self._about({*self._due_page[0], *stirred, *self.lane_jobs(), *runs})

    def _about(self, jobs: Iterable[str]) -> None:
        """Read what is to be known about some jobs, in one round trip; and have their locks."""
        draft, names = self._draft, sorted(set(jobs))
        if not names:
            return
        locks, leases = self._needed(names)
        space = {"namespace": self._namespace}
        unknown = [name for name in names if not draft.knows_job(name)]
        known = [job for name in names if draft.knows_job(name) and (job := draft.job(name))]
        marks = {"jobs": [job.job for job in known], "marks": [job.watermark for job in known]}
        paced = [job.job for job in known if _is_paced(job)]
        turns, jobs_found, live, live_of, beyond, spans, newest, held = draft.ask_now(
            [
                (self._sql.TRY_TURNS, {**space, "locks": locks}),
                draft.jobs_by(unknown),
                draft.live_of(locks),
                draft.live_of_jobs(names),
                (self._sql.FIND_BEYOND, {**space, **marks}),
                (self._sql.LAST_SPANS, {**space, "jobs": marks["jobs"]}),
                (self._sql.FIND_NEWEST, {**space, "jobs": paced}),
                draft.leases_by(leases, locks=locks, jobs=names),
            ]
        )
        ours = {row[0] for row in turns}
        self._turns |= ours
        self._busy |= set(locks) - ours
        draft.took_jobs(jobs_found, names=unknown)
        runs = draft.took_runs(live, locks=ours) + draft.took_runs(live_of, jobs=names)
        draft.took_runs(beyond)
        for job in known:
            draft.took_beyond(job.job, job.watermark)
        draft.took_runs(newest)
        self._newest.update(paced)
        for row in spans:
            self._spans[row[0]] = span_of(row)
        for job in known:
            self._spans.setdefault(job.job, None)
        draft.took_leases(held, names=[*leases, *(run.lease for run in runs)])

    def _needed(self, names: list[str]) -> tuple[list[str], list[str]]:
        """Return the locks to have and the leases to read: a job mostly needs those of its name."""
        others = [self._needs[name] for name in names if name in self._needs]
        plain = {name for name in names if name not in self._needs} if others else set(names)
        locks = plain.union(lock for lock, _ in others) - self._turns - self._busy
        leases = plain.union(lease for _, several in others for lease in several)
        return sorted(locks), sorted(leases)

    # What is due.

    def due_jobs(
        self, *, most: int, only: str | None, after: JobPlace | None = None
    ) -> Iterator[JobRecord]:
        """Yield jobs that are due, page by page: those seen may be changed meanwhile."""
        last, size = after, max(1, min(most, PAGE))
        while True:
            if self._due_page is None:
                rows = self._draft.ask([self._due_jobs_step(last, only, size)])[0]
                self._due_page = self._took_due(rows, size)
                self._about(self._due_page[0])
            (names, last), self._due_page = self._due_page, None
            jobs = [job for name in names if (job := self.job(name)) is not None]
            yield from [
                job for job in jobs if job.next_due is not None and job.next_due <= self.now
            ]
            if last is None:
                return

    def due_runs(
        self, *, most: int, only: str | None, after: RunPlace | None = None
    ) -> Iterator[RunRecord]:
        """Yield runs that wait and whose time has come, page by page as well."""
        last: RunPlace = after or (_LONG_AGO, _FIRST_RUN)
        size = max(1, min(most, PAGE))
        while True:
            if self._runs_reach is None:
                rows = self._draft.ask([self._due_runs_step(last, only, size)])[0]
                self._runs_reach = (self._took_waiting(rows, size),)
                self._about(row[0] for row in rows)
            (reach,), self._runs_reach = self._runs_reach, None
            here = [
                (place, run)
                for run in self._draft.here()
                if run.state in _WAITING and run.not_before <= self.now
                if only in (None, run.key.job)
                if (place := (run.not_before, run.key)) > last and (reach is None or place <= reach)
            ]
            for _, run in sorted(here):
                yield run
            if reach is None:
                return
            last = reach

    def _took_due(
        self, rows: Sequence[tuple[Any, ...]], size: int
    ) -> tuple[list[str], JobPlace | None]:
        """Keep jobs that are due; return them, and how far they reach if there may be more."""
        self._draft.took_jobs(rows, names=[])
        names = [row[0] for row in rows]
        return names, (rows[-1][_DUE], names[-1]) if len(rows) >= size else None

    def _took_waiting(self, rows: Sequence[tuple[Any, ...]], size: int) -> RunPlace | None:
        """Keep runs that wait; return how far they reach, if there may be more."""
        runs = self._draft.took_runs(rows)
        return (runs[-1].not_before, runs[-1].key) if len(runs) >= size else None

    def lost_runs(self, *, only: str | None) -> list[RunRecord]:
        """Return runs whose attempt is gone: its lease has lapsed."""
        assert self._lost_read is not None, f"a tick reads ahead what it asks for (of {only})"
        runs = (self.run(key) for key in self._lost_read)
        return [run for run in runs if run is not None and run.state is State.RUNNING]

    def granted(self, nonce: str) -> list[Claimed]:
        """Return attempts that were granted by an answer that was lost."""
        values = {"namespace": self._namespace, "nonce": nonce}
        runs = self._draft.took_runs(self._draft.ask([(self._sql.FIND_GRANTED, values)])[0])
        self._draft.missing_leases({run.lease for run in runs})
        found = []
        for run in runs:
            now, lease = self.run(run.key), self._draft.lease(run.lease)
            if now is None or now.state is not State.RUNNING or lease is None:
                continue
            # It is written anew: what it leans on may have ended since, and nobody has proven it.
            if self._draft.extend(run.lease, now.holder.nonce, now.token, None):
                grant = Grant(now.token, lease.left, adopted=True)
                found.append(Claimed(Verdict.GO, now, grant))
        return found

    def next_look(self) -> float | None:
        """Return the instant when something is due next.

        Whoever ticks asks this last: so what was decided is committed along with the question.
        """
        (rows,) = self._draft.commit((self._sql.NEXT_LOOK, {"namespace": self._namespace}))
        due: float | None = rows[0][0]
        return due

    # Jobs and runs.

    def job(self, name: str) -> JobRecord | None:
        """Return a job."""
        return self._draft.job(name)

    def put_job(self, job: JobRecord) -> None:
        """Keep a job as it is now."""
        self._draft.put_job(job)

    def advance(self, job: str, watermark: int, next_due: float | None, owed: int) -> None:
        """Move a job's watermark, and keep when to look at it again."""
        known = self._draft.job(job)
        assert known is not None, "only a job that is there can be planned"
        self.put_job(known.passed(watermark, next_due, owed))

    def move_job(self, job: JobRecord) -> None:
        """Keep what time has changed about a job."""
        self.advance(job.job, job.watermark, job.next_due, job.owed)
        known = self._draft.job(job.job)
        assert known is not None, "just moved"
        self.put_job(known._replace(paused=job.paused, paused_until=job.paused_until))

    def run(self, key: RunKey) -> RunRecord | None:
        """Return a run."""
        return self._draft.run(key)

    def put_run(self, run: RunRecord, *, before: RunRecord | None) -> RunRecord:
        """Keep a run as it is now."""
        assert self._draft.run(run.key) == before, "nobody else can write while we do"
        return self._draft.put(run)

    def waiting(self, job: str) -> list[RunRecord]:
        """Return the runs of a job that never began."""
        return [run for run in self.idle(job) if run.fresh]

    def idle(self, job: str) -> list[RunRecord]:
        """Return the runs of a job that do not run and have not ended."""
        return [run for run in self._draft.live_of_job(job) if run.state in _WAITING]

    def made_up(self, job: str, trigger: str) -> int:
        """Return how many runs of a job are live that make up for the past in this way."""
        return sum(run.trigger == trigger for run in self._draft.live_of_job(job))

    def past(self, job: str) -> Past:
        """Return how the newest run of a job stands."""
        if job not in self._newest:
            values = {"namespace": self._namespace, "jobs": [job]}
            self._draft.took_runs(self._draft.ask([(self._sql.FIND_NEWEST, values)])[0])
            self._newest.add(job)
        newest = max(self._draft.of_job(job), key=lambda run: (run.key.slot, run.key), default=None)
        if newest is None:
            return Past()
        live = bool(self._draft.live_of_job(job))
        return Past(newest.key.slot, live=live, ended_at=newest.ended_at)

    def last_began(self, jobs: Sequence[str]) -> dict[str, float]:
        """Return for each of some jobs when one of its newest runs last began; 0 if none did."""
        draft = self._draft
        unknown = [job for job in jobs if not draft.knows_job(job)]
        values = {"namespace": self._namespace, "jobs": list(jobs), "most": NEWEST}
        steps = [(self._sql.LAST_BEGAN, values), draft.jobs_by(unknown)]
        began, found = draft.ask(steps)  # the jobs themselves are asked for next
        draft.took_jobs(found, names=unknown)
        return dict.fromkeys(jobs, 0.0) | {row[0]: row[1] for row in began}

    def newest_rerun(self, key: RunKey) -> RunRecord | None:
        """Return the newest run of a slot; its job was read after it."""
        if not self._draft.has_between(key):
            self._read_around(key)
        same = [run for run in self._draft.of_job(key.job) if run.key[:3] == key[:3]]
        return max(same, key=lambda run: run.key, default=None)

    def _read_around(self, key: RunKey) -> None:
        """Read the runs of a job from a slot on, and up to it: the next ones will be asked for.

        And the job after them: if a prune has deleted one of them before, its mark tells.
        """
        values = {"namespace": self._namespace, "job": key.job, "slot": key.slot}
        wide = {**values, "most": _AROUND}
        newest = {**values, "manual": key.manual}
        *found, job = self._draft.ask(
            [
                (self._sql.FIND_FROM, wide),
                (self._sql.FIND_UP_TO, wide),
                (self._sql.FIND_RERUN, newest),
                self._draft.jobs_by([key.job]),
            ]
        )
        later, earlier, same = map(self._draft.took_runs, found)
        self._draft.took_jobs(job, names=[key.job])
        last = later[-1].key.slot - 1 if len(later) == _AROUND else float("inf")
        first = earlier[-1].key.slot + 1 if len(earlier) == _AROUND else _LONG_AGO
        if first <= key.slot <= last:
            self._draft.took_slots(key.job, first, last)
        assert len(same) <= 1, "it was asked for one"

    # Claims.

    def claim(self, want: Want) -> Claimed:
        """Decide who may run it, and keep that; with whoever has the lock now, there is no room."""
        self._have([want])
        if want.lock in self._busy or self._in_doubt(want):
            return Claimed(Verdict.NO_ROOM, self.run(want.key))
        if self._repeats_forgotten(want):
            return Claimed(Verdict.ENDED, None)
        return books.claim(self._draft, want)

    def _repeats_forgotten(self, want: Want) -> bool:
        """Say whether the run that is to be repeated was pruned since it was read.

        Its items are gone then. If it is still there it stays, until its repeat is on record.
        """
        before = want.key._replace(rerun=want.key.rerun - 1)
        if not want.key.rerun or self.run(before) is None:
            return False
        return not self._draft.ask([self._draft.runs_by([before], alone=True)])[0]

    def _in_doubt(self, want: Want) -> bool:
        """Say whether it will be known only in a moment who has the lock: they may be dead."""
        draft, names = self._draft, looked_at(want)
        if not draft.bearings.hushed:
            return False
        if not draft.standing(want.lock).whole and not all(
            draft.standing(name).held for name in names
        ):
            return False
        others = (run.lease for run in draft.live(want.lock))
        return bool(draft.bearings.doubt([*names, *others]))

    def claim_all(self, slots: Sequence[Due]) -> list[Claimed | None]:
        """Claim slots against which nothing speaks, and let their jobs pass them.

        None for the others: they are decided one by one.
        """
        self._have([slot.want for slot in slots])
        return [self._claim_free(slot) for slot in slots]

    def _claim_free(self, due: Due) -> Claimed | None:
        """Claim a slot of which all is known that ``decide`` would ask for, if it would say GO."""
        draft, want = self._draft, due.want
        job = draft.job(want.key.job)
        if job is None or job.barred or job.retired or want.key.slot <= job.pruned:
            return None
        if want.lock in self._busy or not draft.is_free(want.key, want.lock):
            return None
        run, grant = draft.begin_run(want)
        planned = due.planned
        draft.put_job(job.passed(planned.watermark, planned.next_due, planned.owed))
        return Claimed(Verdict.GO, run, grant, now=draft.now)

    def _have(self, wants: Sequence[Want]) -> None:
        """Have locks that were not foreseen, and read what is to be known about them."""
        draft = self._draft
        for want in wants:
            name, needs = want.key.job, (want.lock, looked_at(want))
            if needs != (name, [name]):
                self._needs[name] = needs
            elif self._needs:
                self._needs.pop(name, None)
        locks = sorted({want.lock for want in wants} - self._turns - self._busy)
        if not locks:
            return
        names = [lease for want in wants for lease in looked_at(want)]
        turns, live, held = draft.ask_now(
            [
                (self._sql.TRY_TURNS, {"namespace": self._namespace, "locks": locks}),
                draft.live_of(locks),
                draft.leases_by(names, locks=locks, jobs=[]),
            ]
        )
        ours = {row[0] for row in turns}
        self._turns |= ours
        self._busy |= set(locks) - ours
        runs = draft.took_runs(live, locks=ours)
        draft.took_leases(held, names=[*names, *(run.lease for run in runs)])

    def finish_all(self, ends: Sequence[End]) -> list[RunRecord | RunLost]:
        """End attempts."""
        return [books.finish(self._draft, *end) for end in ends]

    def cancel(self, key: RunKey, *, force: bool, operator: str) -> RunRecord:
        """Cancel what does not run; ask what runs, or take it away."""
        return books.cancel(self._draft, key, operator, force=force)

    # Ranges.

    def span(self, job: str, span: Span, *, apart: bool = False) -> None:
        """Record a range of slots; one that goes on where the last one ended makes that longer."""
        record, known = None if apart else self._last_span(job), self.job(job)
        if record is not None and known is not None:
            last = record.span
            if goes_on(last, span, known.watermark):
                self._put_span(record._replace(span=last._replace(last=span.last), at=self.now))
                return
        self._put_span(SpanRecord(job, span, self.now))

    def _last_span(self, job: str) -> SpanRecord | None:
        if job not in self._spans:
            values = {"namespace": self._namespace, "jobs": [job]}
            rows = self._draft.ask([(self._sql.LAST_SPANS, values)])[0]
            self._spans[job] = span_of(rows[0]) if rows else None
        return self._spans[job]

    def _put_span(self, record: SpanRecord) -> None:
        self._spans[record.job] = record
        self._spans_put[record.job, record.span.first] = record

    def _span_steps(self) -> list[Step]:
        rows = [span_row(record) for record in self._spans_put.values()]
        return self._draft.rows(self._sql.PUT_SPANS, rows)

    # Statements.

    def _due_jobs_step(self, after: JobPlace | None, only: str | None, most: int) -> Step:
        due, job = after or (_LONG_AGO, "")
        values = {"namespace": self._namespace, "only": only, "due": due, "job": job, "most": most}
        return self._sql.FIND_DUE, values

    def _due_runs_step(self, after: RunPlace, only: str | None, most: int) -> Step:
        due, key = after
        values = {"namespace": self._namespace, "only": only, "due": due, "most": most}
        return self._sql.FIND_DUE_RUNS, {**values, **key._asdict()}


def _is_paced(job: JobRecord) -> bool:
    """Say whether the slots of a job depend on when its last run ended."""
    try:
        return isinstance(job.schedule, EveryAfter)
    except Exception:  # noqa: BLE001 -- whoever plans it tells of that
        return False
