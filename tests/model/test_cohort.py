"""Which definition is in force: the youngest cohort's, by its build, then by its age."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from fencepost.model.cohort import GONE_AFTER, ORPHAN_AFTER, Cohort, joined, winner

OLD, NEW = Cohort("old", since=100.0, seen_at=1000.0), Cohort("new", since=900.0, seen_at=1000.0)

cohorts = st.lists(
    st.builds(
        Cohort,
        st.sampled_from("abcdef"),
        st.floats(0, 1000),
        st.floats(900, 1000),
        st.sampled_from((0, 0, 0, 1, 2)),
    ),
    max_size=6,
    unique_by=lambda cohort: cohort.digest,
)


def test_the_youngest_cohort_wins() -> None:
    assert winner([OLD, NEW], now=1000.0) == winner([NEW, OLD], now=1000.0) == NEW


def test_the_older_wins_once_the_newer_is_gone() -> None:
    gone = NEW._replace(seen_at=1000.0 - GONE_AFTER)
    assert winner([OLD, gone], now=1000.0) == OLD
    assert winner([OLD, gone._replace(seen_at=1000.1 - GONE_AFTER)], now=1000.0) != OLD


def test_if_all_are_gone_none_wins() -> None:
    assert winner([OLD, NEW], now=1000.0 + GONE_AFTER) is None
    assert winner([], now=0.0) is None


def test_a_higher_build_wins_whatever_its_age() -> None:
    assert winner([OLD._replace(build=8), NEW._replace(build=7)], now=1000.0).digest == "old"  # type: ignore[union-attr]


def test_one_who_joins_leaves_a_cohort_as_old_as_it_was() -> None:
    grown = joined(OLD, "old", 3, now=1005.0, orphan_after=ORPHAN_AFTER)
    assert grown == OLD._replace(seen_at=1005.0, build=3)


def test_a_cohort_that_had_died_out_is_young_again() -> None:
    later = 1000.0 + ORPHAN_AFTER
    again = joined(OLD, "old", 0, now=later, orphan_after=ORPHAN_AFTER)
    assert again == Cohort("old", later, later)
    not_yet = joined(OLD, "old", 0, now=later - 0.1, orphan_after=ORPHAN_AFTER)
    assert not_yet.since == OLD.since


def test_a_clock_that_was_set_back_makes_no_cohort_younger_or_less_seen() -> None:
    grown = joined(OLD, "old", 0, now=500.0, orphan_after=ORPHAN_AFTER)
    assert grown == OLD


@given(cohorts)
def test_the_winner_does_not_depend_on_the_order(several: list[Cohort]) -> None:
    won = winner(several, now=1000.0)
    assert winner(several[::-1], now=1000.0) == won
    present = [one for one in several if 1000.0 - one.seen_at < GONE_AFTER]
    assert (won is None) == (not present)
    assert won is None or all((won.build, won.since) >= (one.build, one.since) for one in present)


@given(cohorts, st.floats(1000, 1059))
def test_an_instance_that_restarts_in_time_does_not_change_the_winner(
    several: list[Cohort], now: float
) -> None:
    before = winner(several, now=1000.0)
    for one in several:
        grown = joined(one, one.digest, one.build, now=now, orphan_after=ORPHAN_AFTER)
        others = [other for other in several if other is not one]
        after = winner([*others, grown], now=1000.0)
        assert (
            before is None
            or after is None
            or (after.build, after.since)
            >= (
                before.build,
                before.since,
            )
        )
        assert one != before or after is None or after.digest == one.digest


def test_restarts_of_both_versions_never_flip_the_definition() -> None:
    # Old and new instances restart in turn, for an hour.
    known = {"old": Cohort("old", 0.0, 0.0)}
    in_force = []
    for now in range(0, 3600, 7):
        digest = "new" if now >= 700 and now % 2 else "old"
        known[digest] = joined(
            known.get(digest), digest, 0, now=float(now), orphan_after=ORPHAN_AFTER
        )
        won = winner(known.values(), now=float(now))
        in_force.append(won.digest if won else "")
    changes = [b for a, b in pairwise(in_force) if a != b]
    assert changes == ["new"]
