"""Which resources the fence of a run names."""

from __future__ import annotations

from hypothesis import given, strategies as st

from fencepost.model.fenced import (
    LEASE_CHANGED,
    Fenced,
    Former,
    Mark,
    fence_of,
    formers_of,
    moved_from,
)
from fencepost.model.run import RunEvent, RunRecord, State
from fencepost.model.slot import RunKey

KEY = RunKey("job", 1_768_874_400)


def run(lease: str, *, lock: str = "lock", token: int = 9) -> RunRecord:
    return RunRecord(KEY, State.RUNNING, lock, lease, token)


def test_an_exclusive_run_has_the_resource_of_its_lock_alone() -> None:
    assert fence_of("default", run("lock")) == Fenced("default/lock")


def test_a_run_with_a_permit_has_a_resource_of_its_own_and_that_of_the_permit() -> None:
    expected = Fenced(f"default:{KEY}", ("default/lock#2",))
    assert fence_of("default", run("lock#2")) == expected


def test_what_an_earlier_attempt_had_is_shut_up_to_its_token() -> None:
    fenced = fence_of("default", run("B", lock="B"), [Former("A", 5)])
    assert fenced.marks(9) == [Mark("default/A", 6, own=False), Mark("default/B", 9)]


def test_a_former_permit_of_a_run_that_is_exclusive_now_is_shut_by_both_names() -> None:
    fenced = fence_of("default", run("lock"), [Former("lock#1", 5)])
    assert fenced.formers == (Former("default/lock#1", 5), Former(f"default:{KEY}", 5))


leases = st.sampled_from(["A", "B", "A#1", "A#2", "B#1"])


@given(st.lists(leases, min_size=2, max_size=6))
def test_each_attempt_shuts_out_every_earlier_one(attempts: list[str]) -> None:
    """Whatever leases the attempts had, and whichever of them ever fenced."""
    events, last = [], None
    for token, lease in enumerate(attempts, 1):
        if last is not None and moved_from(last, lease):
            events.append(RunEvent(KEY, 0.0, LEASE_CHANGED, last.token, "", last.lease))
        last = run(lease, lock=lease[0], token=token)
    assert last is not None
    newest = {
        mark.resource: mark.token
        for mark in fence_of("default", last, formers_of(events)).marks(last.token)
    }
    for token, lease in enumerate(attempts[:-1], 1):
        marks = fence_of("default", run(lease, lock=lease[0])).marks(token)
        assert any(newest.get(mark.resource, 0) > mark.token for mark in marks)


@given(st.lists(st.tuples(leases, st.integers(1, 9)), max_size=5), leases)
def test_every_fence_takes_its_rows_in_one_order(
    formers: list[tuple[str, int]], lease: str
) -> None:
    marks = fence_of("default", run(lease), [Former(*one) for one in formers]).marks(9)
    names = [mark.resource for mark in marks]
    assert names == sorted(set(names))
