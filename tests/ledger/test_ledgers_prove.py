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
from fencepost.ledger.planning import Ticked
from fencepost.model.definition import Definition
from fencepost.model.rules import text_of
from fencepost.model.schedule import spec_of
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
    clocks, said = StillClocks(), Said([], [])
    world = BlockingWorld(clocks=clocks)
    cluster = Cluster(clocks, MemoryLedger(world, MemoryStore(world)))
    for command in (first, *program):
        answer = obey(cluster, said, command)
        if isinstance(answer, Ticked):
            remember(said, answer)
    evidence = finish(gathered(cluster.ledger))
    proof = prove(evidence)
    assert [str(finding) for finding in proof.findings] == []
    assert from_lines(to_lines(evidence)) == evidence
