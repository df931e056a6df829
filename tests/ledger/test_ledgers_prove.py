"""Whatever instances and operators do, what a ledger has on record proves that it kept its word."""

from __future__ import annotations

import os

from hypothesis import given, settings, strategies as st
from ledgerlab import StillClocks
from test_planners_agree import (
    ENDINGS,
    JOBS,
    POLICIES,
    RULES,
    SCHEDULES,
    Cluster,
    Said,
    commands,
    obey,
    remember,
    who,
)

from fencepost.cli.verify import gathered
from fencepost.ledger.memory import MemoryLedger
from fencepost.ledger.planning import Instance, Ticked
from fencepost.model.definition import Definition
from fencepost.model.ending import Settled
from fencepost.model.rules import CatchUp, Rules, text_of
from fencepost.model.run import State
from fencepost.model.schedule import Every, spec_of
from fencepost.stores.memory import MemoryStore
from fencepost.testing.evidence import from_lines, to_lines
from fencepost.testing.ledger_checker import prove
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

EXAMPLES = int(os.environ.get("FENCEPOST_EXAMPLES", "60"))


# Stories in which much runs: time passes, and instances that know their jobs have room for them.
rules = st.sampled_from([text_of(each) for each in RULES])
specs = st.sampled_from([spec_of(each) for each in SCHEDULES])
announced = st.tuples(*(st.builds(Definition, st.just(job), specs, rules) for job in JOBS)).map(
    list
)
busy = st.tuples(
    st.just("tick"),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(ENDINGS)), max_size=3),
    st.booleans(),
    st.just(False),  # noqa: FBT003
    st.none(),
    st.integers(0, len(POLICIES) - 1),
    st.just(()),
)
passing = st.tuples(st.just("pass"), st.sampled_from((1.0, 29.0, 61.0, 130.0)))
stories = st.lists(st.one_of(*[busy] * 6, *[passing] * 4, commands), min_size=20, max_size=80)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.tuples(st.just("announce"), who, announced), stories)
def test_no_story_that_can_happen_breaks_a_promise(
    first: tuple[object, ...], program: list[tuple[object, ...]]
) -> None:
    assert broken_by(first, *program) == []


def broken_by(*story: tuple[object, ...]) -> list[str]:
    """Say which promises a ledger has broken, by its own records, once a story is over."""
    clocks, said = StillClocks(), Said([], [])
    world = BlockingWorld(clocks=clocks)
    cluster = Cluster(clocks, MemoryLedger(world, MemoryStore(world)))
    for command in story:
        answer = obey(cluster, said, command)
        if isinstance(answer, Ticked):
            remember(said, answer)
    evidence = finish(gathered(cluster.ledger))
    assert from_lines(to_lines(evidence)) == evidence
    return [str(finding) for finding in prove(evidence).findings]


MINUTELY = [Definition(job, spec_of(Every(60)), "") for job in JOBS]


def announce(*definitions: Definition) -> tuple[object, ...]:
    return ("announce", Instance("i0", "here", 0, "1.0", 0, "", 300.0), list(definitions))


def tick(policy: int = 0, *, ends: tuple[int, ...] = ()) -> tuple[object, ...]:
    """Claim one run, after having ended the n-th of those that were claimed."""
    ended = [(number, Settled(State.SUCCEEDED)) for number in ends]
    return ("tick", 1, ended, False, False, None, policy, ())


def test_a_run_that_ends_after_its_permit_went_to_another_broke_nothing() -> None:
    assert not broken_by(
        announce(*MINUTELY),
        tick(),
        ("pass", 65.0),
        *[tick()] * 4,
        ("pass", 61.0),
        *[tick()] * 2,
        announce(Definition(JOBS[0], "", "", facts="{}")),
        ("pass", 61.0),
        *[tick()] * 4,
        tick(ends=(2,)),
    )


def test_a_lock_that_had_permits_before_a_deploy_is_not_taken_for_one_that_had_none() -> None:
    assert not broken_by(
        announce(*MINUTELY),
        tick(),
        ("pass", 64.0),
        *[tick()] * 4,
        ("pass", 130.0),
        *[tick()] * 2,
        announce(Definition(JOBS[0], "", "", facts="{}")),
        ("pass", 61.0),
        tick(),
        tick(5),
        tick(),
        ("pass", 30.0),
        tick(ends=(2,)),
    )


def test_a_run_whose_second_attempt_had_another_lock_broke_nothing() -> None:
    """Its first attempt still had the lock that it was declared with then."""
    assert not broken_by(
        announce(*MINUTELY),
        *[tick()] * 12,
        ("pass", 61.0),
        tick(),
        tick(1),
        *[tick()] * 2,
        ("pass", 61.0),
        announce(Definition("bills"), Definition("bills"), Definition("old", template="mail")),
        ("tick", 2, [(1, Settled(State.SUCCEEDED))], True, False, None, 1, ()),
    )


def test_a_name_that_is_taken_up_again_has_its_own_slots_on_record() -> None:
    """What the other name owed of that time is neither recorded nor run under this one."""
    patient = Definition("old", spec_of(Every(120)), text_of(Rules(CatchUp.ALL, live_first=True)))
    for spec in ("", spec_of(Every(240)), spec_of(Every(120))):
        assert not broken_by(
            announce(*MINUTELY[:1], Definition("mail", spec_of(Every(60))), patient),
            ("pass", 700.0),
            ("retire", "mail"),
            *[tick()] * 4,
            ("store", [Definition("mail", spec, aliases=("old",))]),
            *[tick()] * 8,
        )
