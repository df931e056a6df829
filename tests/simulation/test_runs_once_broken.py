"""What the simulator found in the flows and ledgers of runs, each as the shortest test of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fencepost.errors import OutcomeUnknown, RunLost, StoreUnavailable
from fencepost.flows.acquire import Granted
from fencepost.flows.attempt import attempt
from fencepost.flows.course import Course, Doors, begin, end, save
from fencepost.flows.keep import Hold, renew
from fencepost.flows.trigger import claim
from fencepost.ledger.api import Attempt
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.open import ledger_of
from fencepost.model.claim import Claimed, Verdict, Want
from fencepost.model.ending import Settled
from fencepost.model.item import Found, ItemState
from fencepost.model.lease import Holder
from fencepost.model.policy import OnLoss, Policy, Retry
from fencepost.model.run import RunRecord, State
from fencepost.model.slot import RunKey
from fencepost.stores.memory import MemoryStore
from fencepost.stores.sqlite import SqliteStore
from fencepost.testing.simulator.scheduler import Scheduler, run_simulated
from fencepost.testing.simulator.world import Machine, ServerWorld, SimulatedWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.ledger.api import Ledger, Report

KEY = RunKey("job", 3600)
POLICY = Policy(lease=10.0, retry=Retry(3, base=5, jitter=False))


def wanted(nonce: str, policy: Policy = POLICY) -> Want:
    return Want(KEY, Holder(nonce, "host", 1), policy, "job")


def attempt_of(claimed: Claimed) -> Attempt:
    assert claimed.run is not None
    run = claimed.run
    return Attempt(run.key, run.token, run.holder.nonce, run.lease)


@pytest.fixture(params=["memory", "sqlite"])
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    world = ServerWorld(Scheduler(0), instance="store")
    memory = request.param == "memory"
    ledger = ledger_of(world, MemoryStore(world) if memory else SqliteStore(world, ":memory:"))
    yield ledger
    finish(ledger.close())


def course_of(world: SimulatedWorld, claimed: Claimed, policy: Policy = POLICY) -> Course:
    assert claimed.run is not None
    assert claimed.grant is not None
    hold = Hold(
        Granted("job", claimed.grant, world.clocks.boottime()),
        nonce=claimed.run.holder.nonce,
        ttl=policy.lease,
        max_hold=None,
        emit=lambda _: None,
    )
    return Course(world, claimed.run, hold, policy)


def test_a_save_that_arrives_after_a_later_one_keeps_nothing(ledger: Ledger) -> None:
    # Repeated after a lost reply; the first request was only late, and took the checkpoint back.
    own = attempt_of(finish(ledger.claim(wanted("n"))))
    finish(ledger.save(own, checkpoint="1", order=1))
    finish(ledger.save(own, checkpoint="2", order=2))
    finish(ledger.save(own, checkpoint="1", order=1))
    run = finish(ledger.find(KEY))
    assert run is not None
    assert run.checkpoint == "2"


def test_the_saves_of_the_next_attempt_count_from_the_beginning(ledger: Ledger) -> None:
    own = attempt_of(finish(ledger.claim(wanted("n"))))
    finish(ledger.save(own, checkpoint="1", order=5))
    finish(ledger.finish(own, Settled(State.PENDING, "released")))
    again = attempt_of(finish(ledger.claim(wanted("m"))))
    finish(ledger.save(again, checkpoint="2", order=1))
    run = finish(ledger.find(KEY))
    assert run is not None
    assert run.checkpoint == "2"


def test_an_end_that_arrives_late_does_not_end_what_was_begun_again(ledger: Ledger) -> None:
    # The effect failed and was tried again; the end of the first try came twice, the second time
    # after the effect had happened. So the item was failed, and its effect happened once more.
    own = attempt_of(finish(ledger.claim(wanted("n"))))

    def begun(call: str) -> list[Found]:
        return finish(ledger.begin(own, scope="s", items=["i"], call=call, repeat=False))

    def ended(call: str, state: ItemState) -> None:
        finish(ledger.end(own, scope="s", items=[("i", state, None)], call=call))

    assert begun("first") == [Found.FIRST]
    ended("first", ItemState.FAILED)
    assert begun("second") == [Found.FIRST]
    ended("first", ItemState.FAILED)
    assert [item.state for item in finish(ledger.items("s"))] == [ItemState.BEGUN]
    ended("second", ItemState.DONE)
    assert begun("third") == [Found.DONE]


def test_the_flows_say_which_save_and_which_begin_they_mean() -> None:
    told: list[object] = []

    class Listens(MemoryLedger):
        async def save(
            self,
            attempt: Attempt,
            *,
            checkpoint: str,
            order: int | None = None,
            report: Report | None = None,
        ) -> bool:
            told.append(order)
            return False

        async def end(
            self, attempt: Attempt, *, scope: str, items: object, call: str | None = None
        ) -> None:
            told.append(call)

    async def flow(world: SimulatedWorld) -> None:
        doors = Doors(world, Listens(world, MemoryStore(world)))
        course = course_of(world, await doors.ledger.claim(wanted("n")))
        await save(doors, course, "1")
        await save(doors, course, "2")
        await begin(doors, course, "s", ["i"])
        await end(doors, course, "s", [("i", ItemState.DONE, None)])
        assert told == [1, 2, course.calls["s", "i"]]

    run_simulated(flow)


def test_a_claim_that_arrives_after_its_attempt_is_over_is_granted_nothing(ledger: Ledger) -> None:
    # It was: a start that nobody made, a lease that nobody held, and in the end a loss, which
    # with on_loss="fail" was the end of a run that only waited for its next try.
    policy = POLICY._replace(on_loss=OnLoss.FAIL)
    own = attempt_of(finish(ledger.claim(wanted("n", policy))))
    finish(ledger.finish(own, Settled(State.WAITING_RETRY, "error")))
    assert finish(ledger.claim(wanted("n", policy))).verdict is Verdict.BUSY
    assert finish(ledger.claim(wanted("m", policy))).verdict is Verdict.GO


def test_a_run_whose_store_fell_silent_is_lost_and_not_failed() -> None:
    # The lease ran out while a checkpoint could not be saved. That counted as an error of the
    # body, and once the store was back the run ended as failed, where it should be resumed.
    class FallsSilent(MemoryLedger):
        silent = False

        async def save(self, *_: object, **__: object) -> bool:
            raise OutcomeUnknown("no reply")

    async def flow(world: SimulatedWorld) -> None:
        doors = Doors(world, FallsSilent(world, MemoryStore(world)))
        course = course_of(world, await doors.ledger.claim(wanted("n")))

        async def body(course: Course) -> str | None:
            await save(doors, course, "1")
            return None

        assert await attempt(doors, course, body, emit=lambda _: None) is None
        run = await doors.ledger.find(KEY)
        assert run is not None
        assert run.state is State.RUNNING
        assert (await doors.ledger.claim(wanted("m"))).verdict is Verdict.GO

    run_simulated(flow)


def test_a_retry_is_due_by_the_clock_of_the_ledger_alone() -> None:
    # A process whose clock was hours ahead wrote when the next try was due, by its own clock.
    async def flow(world: SimulatedWorld) -> None:
        scheduler = world.scheduler
        ahead = SimulatedWorld(scheduler, Machine(scheduler, wall=1e6), instance="ahead")
        server = ServerWorld(scheduler, Machine(scheduler, name="store", wall=5000.0))
        ledger = MemoryLedger(server, MemoryStore(server))
        course = course_of(ahead, await ledger.claim(wanted("n")))

        async def body(_: Course) -> str | None:
            raise ValueError

        run = await attempt(Doors(ahead, ledger), course, body, emit=lambda _: None)
        assert run is not None
        assert run.not_before == 5005.0
        later = await ledger.claim(wanted("m"))
        assert (later.verdict, later.pause) == (Verdict.LATER, 5.0)

    run_simulated(flow)


@pytest.mark.parametrize("then", ["away", "busy"])
def test_a_claim_in_doubt_is_given_up_for_whatever_is_answered_next(then: str) -> None:
    # Granted unheard of, or still on its way: it kept everybody out for a whole ttl.
    class Doubtful(MemoryLedger):
        asked = 0

        async def claim(self, want: Want) -> Claimed:
            self.asked += 1
            if self.asked == 1:
                raise OutcomeUnknown("no reply")
            if then == "away":
                raise StoreUnavailable("the store is away")
            return Claimed(Verdict.BUSY, None)

    abandoned: list[tuple[str, str]] = []

    async def flow(world: SimulatedWorld) -> None:
        doors = Doors(world, Doubtful(world, MemoryStore(world)))
        try:
            await claim(doors, wanted("n"), abandon=lambda *what: abandoned.append(what))
        except StoreUnavailable:
            assert then == "away"

    run_simulated(flow)
    assert abandoned == [("job", "n")]


def test_a_beat_that_meets_its_own_end_does_not_make_a_loss_of_it() -> None:
    # The end was recorded and the reply got lost; a beat then heard that the run was over, and
    # took that for a loss. So nobody asked again, and who had succeeded was told "lost".
    class LosesAReply(MemoryLedger):
        asked = 0

        async def finish(self, attempt: Attempt, settled: Settled, **report: Report) -> RunRecord:
            run = await super().finish(attempt, settled, **report)
            self.asked += 1
            if self.asked == 1:
                await renew(self._world, self.leases, course.hold)
                raise OutcomeUnknown("no reply")
            return run

    course: Course

    async def flow(world: SimulatedWorld) -> None:
        nonlocal course
        doors = Doors(world, LosesAReply(world, MemoryStore(world)))
        course = course_of(world, await doors.ledger.claim(wanted("n")))
        course.hold.beats_by(lambda _, ttl: course.beat(doors.ledger, ttl))

        async def body(_: Course) -> str | None:
            return "1"

        run = await attempt(doors, course, body, emit=lambda _: None)
        assert run is not None
        assert run.state is State.SUCCEEDED

    run_simulated(flow)


def test_a_beat_of_a_run_that_is_not_about_to_end_still_tells_of_its_loss() -> None:
    async def flow(world: SimulatedWorld) -> None:
        ledger = MemoryLedger(world, MemoryStore(world))
        course = course_of(world, await ledger.claim(wanted("n")))
        await ledger.cancel(KEY, force=True, operator="ops")
        with pytest.raises(RunLost):
            await course.beat(ledger, 10.0)

    run_simulated(flow)
