"""Each promise: one history that keeps it, one that breaks it."""

from __future__ import annotations

import pytest

from fencepost.errors import Misuse
from fencepost.testing.checker import check, relevant
from fencepost.testing.history import Event, from_lines, table, to_lines


def granted(at: float, who: str, token: int, *, until: float, name: str = "job") -> Event:
    return Event(at, "granted", f"{who}.1", name, who, token, until)


def renewed(at: float, who: str, token: int, *, until: float) -> Event:
    return Event(at, "renewed", f"{who}.1", "job", who, token, until)


def released(at: float, who: str) -> Event:
    return Event(at, "released", f"{who}.1", "job", who)


def acted(at: float, who: str, token: int) -> Event:
    return Event(at, "acted", f"{who}.1", "job", who, token)


def admitted(at: float, token: int, *, name: str = "job") -> Event:
    return Event(at, "admitted", "a.1", name, token=token)


def broken(at: float, token: int) -> Event:
    return Event(at, "broken", "operator", "job", token=token)


def deleted(at: float) -> Event:
    return Event(at, "deleted", "operator", "job")


def crashed(at: float, who: str) -> Event:
    return Event(at, "crashed", f"{who}.1")


def wanted(at: float, who: str, *, until: float) -> Event:
    return Event(at, "wanted", f"{who}.1", "job", until=until)


LEGAL = {
    "nothing happened": [],
    "one after the release of the other": [
        granted(0, "a", 1, until=10),
        released(5, "a"),
        granted(5, "b", 2, until=15),
    ],
    "one after the end of the other": [
        granted(0, "a", 1, until=10),
        granted(10, "b", 2, until=20),
    ],
    "one after the end of the other as renewed": [
        granted(0, "a", 1, until=10),
        renewed(5, "a", 1, until=15),
        acted(12, "a", 1),
        granted(15, "b", 2, until=25),
    ],
    "one after the crash of the other": [
        granted(0, "a", 1, until=10),
        crashed(3, "a"),
        granted(4, "b", 2, until=14),
    ],
    "a grant to a process that had crashed before is nobody's": [
        crashed(0, "a"),
        granted(1, "a", 1, until=11),
        granted(2, "b", 2, until=12),
    ],
    "one after the other was broken": [
        granted(0, "a", 1, until=10),
        broken(3, 2),
        granted(4, "b", 3, until=14),
    ],
    "a holder that cannot know yet that its lease was broken": [
        granted(0, "a", 1, until=10),
        broken(3, 2),
        granted(4, "b", 3, until=14),
        acted(5, "a", 1),
    ],
    "a holder that cannot know yet that its record was deleted": [
        granted(0, "a", 1, until=10),
        deleted(3),
        granted(4, "b", 2, until=14),
        acted(5, "a", 1),
    ],
    "a lease that was released twice": [
        granted(0, "a", 1, until=10),
        released(5, "a"),
        released(6, "a"),
    ],
    "a grant that two logs tell of": [
        granted(0, "a", 1, until=10),
        granted(0, "a", 1, until=10),
        acted(5, "a", 1),
    ],
    "two names at once": [
        granted(0, "a", 1, until=10),
        granted(1, "b", 1, until=11, name="other"),
    ],
    "one holder that writes often, and its successor": [
        admitted(1, 7),
        admitted(2, 7),
        admitted(3, 9),
        admitted(4, 1, name="other"),
    ],
    "somebody who was served in time": [
        wanted(0, "a", until=10),
        granted(9, "a", 1, until=19),
        released(30, "a"),
    ],
    "somebody who crashed before being served": [
        wanted(0, "a", until=10),
        crashed(5, "a"),
        released(30, "b"),
    ],
    "a store that keeps whole microseconds": [
        granted(0, "a", 1, until=10.0000009),
        granted(10, "b", 2, until=20),
    ],
}

BROKEN = {
    "two holders at once": (
        "one holder",
        [granted(0, "a", 1, until=10), granted(9, "b", 2, until=19)],
    ),
    "a renewal for one while another has it": (
        "one holder",
        [
            granted(0, "a", 1, until=10),
            granted(10, "b", 2, until=20),
            renewed(11, "a", 1, until=21),
        ],
    ),
    "a renewal after the release": (
        "one holder",
        [granted(0, "a", 1, until=10), released(5, "a"), renewed(6, "a", 1, until=16)],
    ),
    "a release by somebody else": (
        "one holder",
        [granted(0, "a", 1, until=10), released(5, "b")],
    ),
    "a token that is used twice": (
        "tokens grow",
        [granted(0, "a", 1, until=10), released(5, "a"), granted(6, "b", 1, until=16)],
    ),
    "a token that falls": (
        "tokens grow",
        [granted(0, "a", 5, until=10), granted(10, "b", 4, until=20)],
    ),
    "a token that falls behind a break": (
        "tokens grow",
        [granted(0, "a", 5, until=10), broken(3, 7), granted(4, "b", 6, until=14)],
    ),
    "a lower token after a higher one": ("fence holds", [admitted(1, 9), admitted(2, 7)]),
    "an act while another has the lease": (
        "proof",
        [granted(0, "a", 1, until=10), granted(10, "b", 2, until=20), acted(11, "a", 1)],
    ),
    "an act past the end": ("proof", [granted(0, "a", 1, until=10), acted(10, "a", 1)]),
    "an act after the release": (
        "proof",
        [granted(0, "a", 1, until=10), released(5, "a"), acted(6, "a", 1)],
    ),
    "an act on a broken lease past its end": (
        "proof",
        [granted(0, "a", 1, until=10), broken(3, 2), acted(10, "a", 1)],
    ),
    "an act with the token of an earlier grant": (
        "proof",
        [granted(0, "a", 1, until=10), granted(10, "a", 2, until=20), acted(11, "a", 1)],
    ),
    "somebody who was not served in time": (
        "progress",
        [wanted(0, "a", until=10), granted(11, "a", 1, until=21)],
    ),
    "a flow that failed": ("progress", [Event(1, "failed", detail="LeaseLost: …")]),
}


@pytest.mark.parametrize("history", LEGAL.values(), ids=LEGAL.keys())
def test_a_legal_history_breaks_no_promise(history: list[Event]) -> None:
    assert check(history) == []


@pytest.mark.parametrize(("rule", "history"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_promise_is_found_and_named(rule: str, history: list[Event]) -> None:
    violations = check(history)
    assert [violation.rule for violation in violations] == [rule]
    assert violations[0].event in history


@pytest.mark.parametrize(("rule", "history"), BROKEN.values(), ids=BROKEN.keys())
def test_a_history_read_back_from_its_lines_is_judged_alike(
    rule: str, history: list[Event]
) -> None:
    assert from_lines(to_lines(history)) == history
    assert [violation.rule for violation in check(from_lines(to_lines(history)))] == [rule]


def test_merged_logs_may_come_in_any_order() -> None:
    rule, history = BROKEN["an act while another has the lease"]
    assert [violation.rule for violation in check(reversed(history))] == [rule]


def test_a_log_that_begins_in_the_middle_is_not_blamed_for_what_it_does_not_show() -> None:
    assert check([acted(1, "a", 1), released(2, "a"), renewed(3, "b", 2, until=13)]) == []


def test_the_sentence_says_who_and_when() -> None:
    (violation,) = check(BROKEN["two holders at once"][1])
    assert str(violation) == (
        "one holder: 'job' was granted to b at 9.000000, but a has it until 10.000000"
    )


def test_only_what_led_to_the_violation_is_shown() -> None:
    _, history = BROKEN["two holders at once"]
    noise = [granted(1, "c", 3, until=11, name="other"), crashed(2, "d")]
    (violation,) = check([*history, *noise, released(20, "b")])
    shown = relevant([*history, *noise, released(20, "b")], violation)
    assert [event.what for event in shown] == ["granted", "crashed", "granted"]
    assert len(relevant(history, violation, most=1)) == 1


def test_a_line_leaves_out_what_is_empty() -> None:
    assert to_lines([granted(0.0, "a", 1, until=10.5)]) == [
        '{"at":0.0,"what":"granted","node":"a.1","name":"job","holder":"a","token":1,"until":10.5}'
    ]


def test_lines_may_be_empty_and_have_fields_of_others() -> None:
    assert from_lines(["", '{"at":1,"what":"crashed","node":"a.1","level":"info"}\n']) == [
        Event(1.0, "crashed", "a.1")
    ]


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"what":"granted"}', '{"at":"x"}'])
def test_a_line_that_is_no_event_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(Misuse, match="line 2"):
        from_lines(['{"at":1,"what":"calm"}', line])


def test_a_table_is_aligned() -> None:
    rows = table([granted(1, "a", 7, until=10), Event(12.5, "crashed", "bb.1")]).splitlines()
    assert rows == [
        "     time  node  event    lease  holder  token  details",
        " 1.000000  a.1   granted  job    a           7  until 10.000000",
        "12.500000  bb.1  crashed",
    ]
