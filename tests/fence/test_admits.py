"""The rule of the fence as a pure function, and the SQL that must say the same."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from hypothesis import given, strategies as st

from fencepost import TokenStale, admits
from fencepost.errors import Misuse
from fencepost.fence import CREATE_GUARD, HIGHEST_TOKEN, admit

tokens = st.integers(min_value=1, max_value=5) | st.integers(1, HIGHEST_TOKEN)


def admitted(arrivals: list[int]) -> list[int]:
    """Return which of the arriving tokens a resource lets through."""
    highest, through = 0, []
    for token in arrivals:
        if admits(highest, token):
            highest = max(highest, token)
            through.append(token)
    return through


@given(st.lists(st.integers(-2, 10)))
def test_admitted_tokens_never_fall_in_whatever_order_they_arrive(arrivals: list[int]) -> None:
    through = admitted(arrivals)
    assert through == sorted(through)


@given(st.lists(tokens, min_size=1))
def test_the_newest_holder_is_always_admitted(arrivals: list[int]) -> None:
    assert admitted(arrivals)[-1] == max(arrivals)


@given(tokens)
def test_a_holder_may_come_as_often_as_it_likes(token: int) -> None:
    assert admitted([token] * 3) == [token] * 3


@pytest.mark.parametrize("token", [0, -1])
def test_zero_and_less_are_never_admitted(token: int) -> None:
    assert not admits(0, token)
    assert not admits(-5, token)


@given(st.lists(st.tuples(st.sampled_from("ab"), tokens, st.booleans())))
def test_the_guard_table_admits_what_the_model_admits(
    transactions: list[tuple[str, int, bool]],
) -> None:
    highest = {"a": 0, "b": 0}
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        conn.execute(CREATE_GUARD)
        for resource, token, commits in transactions:
            conn.execute("BEGIN IMMEDIATE")
            if admits(highest[resource], token):
                admit(conn, resource=resource, token=token)
                if commits:
                    highest[resource] = max(highest[resource], token)
            else:
                with pytest.raises(TokenStale) as refusal:
                    admit(conn, resource=resource, token=token)
                assert refusal.value.highest == highest[resource]
            conn.execute("COMMIT" if commits else "ROLLBACK")


@pytest.mark.parametrize("token", [0, -1, True, 1.5, "7", None, HIGHEST_TOKEN + 1])
def test_what_cannot_be_a_token_is_refused_before_anything_is_written(token: object) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as conn:
        conn.execute(CREATE_GUARD)
        conn.execute("BEGIN IMMEDIATE")
        with pytest.raises(Misuse, match="fencing token"):
            admit(conn, resource="r", token=token)  # type: ignore[arg-type]
        assert conn.execute("SELECT count(*) FROM fencepost_guard").fetchone() == (0,)
