"""The scheduler's part of the blocking face; ``aio_schedules.py`` is its twin."""

from __future__ import annotations

from functools import cached_property

from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime
    from typing import Any

    from fencepost.holding import Holding
    from fencepost.ledger.planning import InstanceRecord, Lane, Slots
    from fencepost.model.definition import JobRecord
    from fencepost.model.duration import Duration
    from fencepost.model.outcome import Outcome
    from fencepost.model.slot import RunKey
    from fencepost.scheduling import Progress, Scheduling
    from fencepost.working import Working
    from fencepost.world.api import World

    Instant = datetime | str | float


class Schedules:
    """What a face needs to be a scheduler instance, and to be asked about one."""

    if TYPE_CHECKING:
        _holding: Holding
        _world: World
        _build: int
        _orphan_after: float

        @property
        def _working(self) -> Working: ...

    @cached_property
    def _scheduling(self) -> Scheduling:
        from fencepost.scheduling import Scheduling  # a dear import, for schedulers only

        return Scheduling(
            self._working,
            self._holding,
            self._world,
            build=self._build,
            orphan_after=self._orphan_after,
        )

    def run(self, *, concurrency: int = 16, grace: Duration = "30s", signals: bool = True) -> None:
        """Be a scheduler instance in this process until stopped: by ``stop``, SIGTERM or Ctrl-C.

        At most ``concurrency`` attempts run at the same time. A stop begins nothing more, lets
        what runs finish, and gives back what has not after ``grace``, to go on elsewhere.
        A body that cannot be stopped ends with the process if a signal asked for the stop, and
        goes on under its lease if ``stop`` did.
        """
        from fencepost.running_here import run_here

        run_here(
            self._scheduling,
            concurrency=concurrency,
            grace=grace,
            signals=signals,
            alarms=self.__dict__.get("_alarming"),
        )

    def stop(self, *, grace: Duration | None = None) -> None:
        """Stop the scheduler instance of this object, from any thread."""
        from fencepost.running_here import stop_here

        stop_here(self._scheduling, grace=grace)

    def _end_instance(self) -> None:
        from fencepost.running_here import end_here

        end_here(self._scheduling)

    def tick(self, budget: Duration | None = None, *, most: int | None = None) -> list[Outcome]:
        """Run whatever is due now, inside of the budget; return what became of it.

        For serverless callers, any number at once. A body that checks gives its run back at the
        end of the budget. ``most=1`` with ``catchup="all"`` takes the oldest missing slot only.
        """
        return finish(self._scheduling.tick(budget, most=most))

    def pause(
        self,
        job: str | Callable[..., Any],
        *,
        until: Instant | None = None,
        reason: str = "",
    ) -> JobRecord:
        """Let the slots of a job pass, each recorded as skipped; what runs goes on."""
        return finish(self._scheduling.pause(job, until=until, reason=reason))

    def resume(self, job: str | Callable[..., Any]) -> JobRecord:
        """Let a job run again from now on: out of a pause, or out of quarantine."""
        return finish(self._scheduling.resume(job))

    def retire(self, job: str | Callable[..., Any], *, reason: str = "") -> JobRecord:
        """End a job for good. Its name stays taken, so that no old instance brings it back."""
        return finish(self._scheduling.retire(job, reason=reason))

    def next(
        self,
        job: str | Callable[..., Any],
        count: int = 5,
        *,
        after: Instant | None = None,
    ) -> list[datetime]:
        """Return when a job is due next, in UTC, jitter included."""
        return finish(self._scheduling.next(job, count, after=after))

    def slots(
        self,
        job: str | Callable[..., Any],
        *,
        start: Instant | None = None,
        end: Instant | None = None,
    ) -> Slots:
        """Return what became of the slots of a job: its runs, and ranges that were decided."""
        return finish(self._scheduling.slots(job, start=start, end=end))

    def store(
        self, template: str | Callable[..., Any], entries: Iterable[Mapping[str, Any]]
    ) -> int:
        """Keep jobs in the ledger, each with a name, a schedule and a payload of its own.

        A declared job runs them, with its policies; ``run.payload`` tells them apart. They cost
        no memory, so there may be a million. Returns how many are new or changed.
        """
        return finish(self._scheduling.store(template, entries))

    def backfill(  # noqa: PLR0913 -- one for each word that an operator may say
        self,
        job: str | Callable[..., Any],
        start: Instant,
        end: Instant,
        *,
        existing: str = "skip",
        order: str = "oldest",
        max_active: int = 1,
        dry_run: bool = False,
        wait: bool = True,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RunKey] | Lane:
        """Make up slots from ``start`` on and before ``end``; ``dry_run`` says which, and no more.

        ``existing`` says what happens to slots that have a run: "skip" leaves them, "failed"
        repeats those that did not succeed, "all" repeats all. Asked for again, it goes on where it
        was. Without ``wait`` it is left to the instances.
        """
        return finish(
            self._scheduling.backfill(
                job,
                start,
                end,
                existing=existing,
                order=order,
                max_active=max_active,
                dry_run=dry_run,
                wait=wait,
                progress=progress,
            )
        )

    def stop_backfill(self, number: int) -> Lane:
        """Stop a backfill by its number: what it has begun goes on, nothing more begins."""
        return finish(self._scheduling.stop_backfill(number))

    def instances(self) -> list[InstanceRecord]:
        """Return the scheduler instances that were heard of lately."""
        return finish(self._scheduling.planner.instances())
