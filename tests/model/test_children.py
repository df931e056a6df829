"""What a command left behind is told in few words, without arguments and control characters."""

from __future__ import annotations

import pytest

from fencepost.model.command import Children, children_from


def word(pid: int, name: str) -> str:
    return f"{pid}:{name.encode().hex()}"


@pytest.mark.parametrize(
    ("children", "told"),
    [
        (children_from("stopped", "1", [word(7, "sleep")]), "sleep (pid 7)"),
        (children_from("stopped", "2", [word(7, "a b"), word(8, "")]), "a b (pid 7),  (pid 8)"),
        (children_from("left", "12", [word(7, "sleep")]), "sleep (pid 7) and 11 more"),
        (children_from("left", "1", [word(7, "\x1b[2J\n:é")]), "?[2J?:é (pid 7)"),
    ],
)
def test_children_are_named_and_the_rest_is_counted(children: Children, told: str) -> None:
    assert str(children) == told


def test_the_event_says_what_became_of_them() -> None:
    assert Children("stopped", 1, ((7, "sleep"),)).event == "children_stopped"
    assert Children("left", 1, ((7, "sleep"),)).event == "children_left"
