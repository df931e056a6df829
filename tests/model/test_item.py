from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from fencepost.errors import BadValue
from fencepost.model.item import Found, ItemRecord, ItemState, begun_by, find, named, once_each


def record(state: ItemState = ItemState.BEGUN, *, token: int = 7, call: str = "c") -> ItemRecord:
    return ItemRecord("scope", "item", state, token, "job@x", call, 0.0)


def found(
    known: ItemRecord | None, *, token: int = 9, living: bool = False, repeat: bool = False
) -> Found:
    return find(known, token=token, call="ours", begun_by_living=living, repeat=repeat)


def test_an_item_that_nobody_began_is_ours() -> None:
    assert found(None) is Found.FIRST


def test_an_item_that_failed_may_be_tried_again() -> None:
    assert found(record(ItemState.FAILED)) is Found.FIRST


@given(token=st.integers(1, 9), living=st.booleans(), repeat=st.booleans(), own=st.booleans())
def test_what_is_done_is_never_done_again(
    token: int, *, living: bool, repeat: bool, own: bool
) -> None:
    done = record(ItemState.DONE, token=token, call="ours" if own else "theirs")
    assert found(done, living=living, repeat=repeat) is Found.DONE


def test_a_begin_whose_reply_was_lost_finds_its_own() -> None:
    assert found(record(token=9, call="ours"), repeat=False) is Found.FIRST


def test_what_the_same_attempt_is_at_already_is_open() -> None:
    assert found(record(token=9, call="another"), repeat=True) is Found.OPEN


@pytest.mark.parametrize("repeat", [True, False])
def test_what_a_living_attempt_is_at_is_open_and_never_repeated(*, repeat: bool) -> None:
    assert found(record(), living=True, repeat=repeat) is Found.OPEN


def test_what_a_dead_attempt_began_is_in_doubt_and_not_repeated() -> None:
    assert found(record()) is Found.DOUBT


def test_what_is_in_doubt_is_repeated_only_if_the_job_said_so() -> None:
    assert found(record(), repeat=True) is Found.AGAIN


@pytest.mark.parametrize("word", Found)
def test_only_first_and_again_have_the_effect(word: Found) -> None:
    assert word.go is (word in (Found.FIRST, Found.AGAIN))


@given(items=st.lists(st.sampled_from("abc")), go=st.sampled_from(Found))
def test_an_item_that_is_named_twice_has_its_effect_at_most_once(
    items: list[str], go: Found
) -> None:
    answers = once_each(items, dict.fromkeys(items, go))
    assert len(answers) == len(items)
    for item in set(items):
        of_it = [answer for name, answer in zip(items, answers, strict=True) if name == item]
        assert of_it[0] is go
        assert not any(answer.go for answer in of_it[1:])


@pytest.mark.parametrize(
    ("known", "ours"),
    [
        (record(), True),
        (record(token=8), False),
        (record()._replace(run="job@y"), False),
        (record(ItemState.DONE), False),
        (record(ItemState.FAILED), False),
    ],
)
def test_only_the_attempt_that_began_an_item_may_end_it(known: ItemRecord, *, ours: bool) -> None:
    assert begun_by(known, key="job@x", token=7) is ours


@pytest.mark.parametrize(("item", "text"), [("inv-42", "inv-42"), (42, "42"), (-1, "-1")])
def test_an_item_is_known_by_its_text(item: object, text: str) -> None:
    assert named(item) == text


@pytest.mark.parametrize(
    "item",
    ["", "x" * 1001, None, 1.0, True, b"x", ("a", 1), 10**5000, "\ud800", "a\0b"],
    ids=lambda item: repr(item)[:9] if not isinstance(item, int) else "number",
)
def test_an_item_that_could_be_known_by_another_name_tomorrow_is_refused(item: object) -> None:
    with pytest.raises(BadValue, match=r"^item "):
        named(item)
