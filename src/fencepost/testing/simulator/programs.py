"""A program is one version of what a cluster is to do: its jobs, their schedules and policies."""

from __future__ import annotations

from fencepost.ledger.planning import Instance
from fencepost.model.claim import Want
from fencepost.model.definition import Definition
from fencepost.model.lease import Holder
from fencepost.model.named import NamedTuple
from fencepost.model.policy import OnLoss, Overlap, Policy, Retry, RetryUntil
from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.schedule import Cron, Every, EveryAfter, spec_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from random import Random

    from fencepost.ledger.planning import Asked

# How long a job may be unknown, and a version be gone, before that means something.
ORPHAN_AFTER = 90.0
_OVERLAPS = (*tuple(Overlap), Overlap.SKIP, Overlap.RESCHEDULE)
_CRONS = ("* * * * *", "*/2 * * * *")
_INTERVALS = (15, 20, 30, 45, 60)


class ServedJob(NamedTuple):
    """A job of a simulated cluster."""

    name: str
    spec: str
    rules: Rules
    policy: Policy
    longest: float  # seconds that a body takes at most, unless it dawdles

    @property
    def definition(self) -> Definition:
        """Return the job as it is made known."""
        return Definition(self.name, self.spec, text_of(self.rules))

    @property
    def stirs(self) -> bool:
        """Say whether a run of it may wait for another, as production jobs do."""
        waits = self.policy.overlap in (Overlap.RESCHEDULE, Overlap.REPLACE)
        return waits or self.rules.catchup is CatchUp.ALL or "every_after" in self.spec

    def described(self) -> str:
        """Return what the checkers must know of it, in words."""
        policy = self.policy
        return (
            f"overlap={policy.overlap} limit={policy.max_concurrent} on_loss={policy.on_loss} "
            f"retry_until={policy.retry_until} start_deadline={policy.start_deadline or ''}"
        )


class Program(NamedTuple):
    """One version, which several instances run."""

    number: int
    jobs: dict[str, ServedJob]
    definitions: list[Definition]
    stirs: frozenset[str]  # of which another run may wait for one that ends

    def instance(self, host: str, pid: int) -> Instance:
        """Return a process that runs it, as that tells of itself."""
        return Instance(f"{host}.{pid}", host, pid, f"{self.number}", orphan_after=ORPHAN_AFTER)

    def want(self, asked: Asked, instance: Instance) -> Want | None:
        """Return the request for a run, or None if the job is none of this version's."""
        job = self.jobs.get(asked.template)
        if job is None:
            return None
        holder = Holder(asked.nonce, instance.host, instance.pid, instance.version)
        return Want(asked.key, holder, job.policy, asked.key.job, asked.trigger, epoch=asked.epoch)


def draw_programs(dice: Random, *, ttl: float) -> list[Program]:
    """Return two versions: in the second, jobs are edited, added and removed."""
    names = ["bills", "mail", "news"][: dice.choice((2, 3, 3))]
    first = {name: _draw_job(dice, name, ttl=ttl) for name in names}
    second = {
        name: _edited(dice, job) if dice.random() < 0.6 else job for name, job in first.items()
    }
    if dice.random() < 0.3:
        del second[dice.choice(names)]
    if dice.random() < 0.4:
        second["added"] = _draw_job(dice, "added", ttl=ttl)
    return [_program(1, first), _program(2, second)]


def _program(number: int, jobs: dict[str, ServedJob]) -> Program:
    definitions = [job.definition for job in jobs.values()]
    stirs = frozenset(name for name, job in jobs.items() if job.stirs)
    return Program(number, jobs, definitions, stirs)


def _draw_job(dice: Random, name: str, *, ttl: float) -> ServedJob:
    pick = dice.choice
    overlap = pick(_OVERLAPS)
    policy = Policy(
        overlap=overlap,
        max_concurrent=2,
        max_waiting=pick((1, 2, None)),
        retry=Retry(pick((1, 1, 2, 3)), base=ttl / 3, ceiling=ttl),
        retry_until=pick(tuple(RetryUntil)),
        cancel_grace=ttl / 2,
        lease=ttl,
        on_loss=pick((OnLoss.RESUME, OnLoss.RESUME, OnLoss.FAIL)),
        max_losses=50,
        loss_pause=1.0,
        start_deadline=pick((None, None, 1.5 * ttl)),
    )
    return ServedJob(name, _draw_spec(dice), _draw_rules(dice), policy, pick((1.0, 5.0, 12.0)))


def _draw_spec(dice: Random) -> str:
    kind = dice.random()
    if kind < 0.2:
        return spec_of(Cron(dice.choice(_CRONS)))
    interval = dice.choice(_INTERVALS)
    if kind < 0.3:
        return spec_of(EveryAfter(interval))
    return spec_of(Every(interval, phase=dice.choice((0, 0, 7))))


def _draw_rules(dice: Random) -> Rules:
    catchup = dice.choice(tuple(CatchUp))
    if catchup is CatchUp.ALL:
        return Rules(
            catchup,
            limit=dice.choice((3, 1000)),
            window=dice.choice((50.0, 86400.0)),
            pause=dice.choice((0.0, 0.0, 5.0)),
            live_first=dice.random() < 0.3,
        )
    deadline = dice.choice((None, None, 20.0))
    return Rules(catchup, deadline, jitter=dice.choice((0.0, 0.0, 10.0)))


def _edited(dice: Random, job: ServedJob) -> ServedJob:
    if dice.random() < 0.25:
        return job._replace(rules=_draw_rules(dice))
    return job._replace(spec=_draw_spec(dice))
