"""What registration may do inside of its transaction on an SQL server, alone in the office.

Who registers reads ahead all that it will ask about its jobs, and writes it back at once, as a
tick does it.
"""

from __future__ import annotations

from fencepost.ledger.draft_desk import DraftDesk
from fencepost.ledger.draft_values import (
    definition_from,
    definition_text,
    instance_of,
    instance_row,
)
from fencepost.ledger.planning import LOOK
from fencepost.model.cohort import Cohort

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from fencepost.ledger.draft import Draft
    from fencepost.ledger.draft_desk import Needs
    from fencepost.ledger.draft_dialect import Step
    from fencepost.ledger.planning import InstanceRecord, Lane
    from fencepost.model.definition import Definition, JobRecord


class DraftOffice(DraftDesk):
    """A desk, and the roll of instances and of what each of them knows."""

    def __init__(self, draft: Draft, namespace: str, needs: Needs) -> None:
        super().__init__(draft, namespace, needs)
        self._instances: dict[str, InstanceRecord] = {}
        self._instances_put: set[str] = set()
        self._gone: set[str] = set()
        self._enrolled: set[str] = set()  # the jobs whose members and cohorts are here
        self._members: dict[str, dict[str, str]] = {}  # by job: what each instance shares
        self._cohorts: dict[str, dict[str, tuple[Cohort, str]]] = {}
        self._joined: set[tuple[str, str]] = set()
        self._parted: set[tuple[str, str]] = set()
        self._cohorts_put: set[tuple[str, str]] = set()
        self.hastened = False  # whether something is due before others look again
        draft.also.append(self._roll_steps)

    def open(self, jobs: Iterable[str] = ()) -> None:
        """Wait until nobody else is in the office; read who is there, and about some jobs."""
        draft, names, space = self._draft, sorted(set(jobs)), {"namespace": self._namespace}
        known, instances, live, *roll = draft.begin(
            (self._sql.HAVE_OFFICE, space),
            read=[
                draft.jobs_by(names),
                (self._sql.FIND_INSTANCES, space),
                draft.live_of_jobs(names),
                *self._roll_of(names),
            ],
        )
        self.now = draft.now
        draft.took_jobs(known, names=names)
        records = map(instance_of, instances)
        self._instances = {record.instance.name: record for record in records}
        draft.took_runs(live, jobs=names)
        self._took_roll(names, *roll)

    def put_job(self, job: JobRecord) -> None:
        """Keep a job as it is now."""
        before, due = self.job(job.job), job.next_due
        if due is not None and due <= self.now + LOOK:
            known = None if before is None else before.next_due
            self.hastened |= known is None or due < known
        super().put_job(job)

    def put_lane(self, lane: Lane) -> Lane:
        """Keep what is being made up; what is new or goes on does so at once."""
        self.hastened |= not lane.ended_at
        return super().put_lane(lane)

    def put_instance(self, record: InstanceRecord) -> None:
        """Keep an instance as it is now."""
        name = record.instance.name
        self._instances[name] = record
        self._instances_put.add(name)
        self._gone.discard(name)

    def drop_instance(self, name: str) -> None:
        """Forget an instance."""
        self._instances.pop(name, None)
        self._instances_put.discard(name)
        self._gone.add(name)

    def instances(self) -> list[InstanceRecord]:
        """Return all instances, by name."""
        return [record for _, record in sorted(self._instances.items())]

    def join(self, instance: str, definition: Definition, cohort: Cohort) -> None:
        """Keep that an instance shares a definition."""
        job = definition.job
        self._enroll([job])
        self._members[job][instance] = cohort.digest
        self._joined.add((job, instance))
        self._parted.discard((job, instance))
        self._cohorts[job][cohort.digest] = (cohort, definition_text(definition))
        self._cohorts_put.add((job, cohort.digest))

    def part(self, record: InstanceRecord, *, most: int) -> list[str]:
        """Take jobs from an instance that is gone."""
        name = record.instance.name
        values = {"namespace": self._namespace, "instance": name, "most": most}
        jobs = [row[0] for row in self._draft.ask([(self._sql.FIND_MEMBERS_OF, values)])[0]]
        self._enroll(jobs)
        for job in jobs:
            digest = self._members[job].pop(name)
            self._parted.add((job, name))
            cohort, text = self._cohorts[job][digest]
            seen = max(cohort.seen_at, record.beat_at)
            self._cohorts[job][digest] = (cohort._replace(seen_at=seen), text)
            self._cohorts_put.add((job, digest))
        return jobs

    def cohorts(self, job: str) -> list[Cohort]:
        """Return the cohorts of a job, each as last heard of through any of its members."""
        self._enroll([job])
        found = []
        for digest, (cohort, _) in sorted(self._cohorts[job].items()):
            beats = [
                self._instances[instance].beat_at
                for instance, shared in self._members[job].items()
                if shared == digest and instance in self._instances
            ]
            found.append(cohort._replace(seen_at=max([cohort.seen_at, *beats])))
        return found

    def members(self, job: str) -> int:
        """Return how many instances know a job."""
        self._enroll([job])
        return len(self._members[job])

    def definition(self, job: str, digest: str) -> Definition:
        """Return the definition that a cohort shares."""
        self._enroll([job])
        return definition_from(self._cohorts[job][digest][1])

    def set_back(self, by: float) -> None:
        """Move what waits for a while, now that the clock was set back; before it is read."""
        assert not self._enrolled, "what was read before would not be what it is"
        values = {"namespace": self._namespace, "by": by, "now": self.now}
        self._draft.ask([(statement, values) for statement in self._sql.SET_BACK])

    def unknown(self, *, before: float, most: int) -> list[JobRecord]:
        """Return jobs that nobody has known since before that instant."""
        values = {"namespace": self._namespace, "before": before, "most": most}
        self._draft.took_jobs(self._draft.ask([(self._sql.FIND_UNKNOWN, values)])[0], names=[])
        found = [
            job
            for job in self._draft.jobs_here()
            if job.unknown_since and job.unknown_since <= before
            if not (job.orphaned_at or job.retired or job.stored)
        ]
        return sorted(found, key=lambda job: job.job)[:most]

    # The roll.

    def _enroll(self, jobs: Iterable[str]) -> None:
        unknown = sorted(set(jobs) - self._enrolled)
        if unknown:
            draft = self._draft
            known, live, *roll = draft.ask(
                [draft.jobs_by(unknown), draft.live_of_jobs(unknown), *self._roll_of(unknown)]
            )
            draft.took_jobs(known, names=unknown)
            draft.took_runs(live, jobs=unknown)
            self._took_roll(unknown, *roll)

    def _roll_of(self, jobs: list[str]) -> list[Step]:
        values = {"namespace": self._namespace, "jobs": jobs}
        return [(self._sql.FIND_MEMBERS, values), (self._sql.FIND_COHORTS, values)]

    def _took_roll(
        self,
        jobs: list[str],
        members: Sequence[tuple[Any, ...]],
        cohorts: Sequence[tuple[Any, ...]],
    ) -> None:
        for job in jobs:
            self._members[job], self._cohorts[job] = {}, {}
        for job, instance, digest in members:
            self._members[job][instance] = digest
        for job, digest, since, seen_at, build, definition in cohorts:
            cohort = Cohort(digest, since, seen_at, build)
            self._cohorts[job][digest] = (cohort, definition)
        self._enrolled.update(jobs)

    def _roll_steps(self) -> list[Step]:
        put = [instance_row(self._instances[name]) for name in sorted(self._instances_put)]
        joined = [
            {"job": job, "instance": name, "digest": self._members[job][name]}
            for job, name in sorted(self._joined)
            if name in self._members[job]
        ]
        parted = [{"job": job, "instance": name} for job, name in sorted(self._parted)]
        cohorts = []
        for job, digest in sorted(self._cohorts_put):
            cohort, text = self._cohorts[job][digest]
            cohorts.append({**cohort._asdict(), "job": job, "definition": text})
        rows, gone = self._draft.rows, sorted(self._gone)
        return [
            *rows(self._sql.PUT_INSTANCES, put),
            *rows(self._sql.PART, parted),
            *rows(self._sql.PUT_MEMBERS, joined),
            *rows(self._sql.PUT_COHORTS, cohorts),
            *(
                [(self._sql.DROP_INSTANCES, {"namespace": self._namespace, "names": gone})]
                if gone
                else []
            ),
        ]
