"""What one session of PostgreSQL remembers of the statements that were planned on it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from fencepost.world.postgres_session import Session, Statement, connected
from fencepost.world.postgres_told import Refusal
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Iterator

PLANNED = Statement("SELECT count(*) FROM pg_prepared_statements", prepared=False)


def soon() -> float:
    return time.monotonic() + 30


@pytest.fixture
def session() -> Iterator[Session]:
    made = connected([shared(Postgres).url()], schema="public", shown="the test's", end=soon())
    made.direct = True
    yield made
    made.close()


def said(number: int) -> Statement:
    """Return a statement that no session has planned yet."""
    return Statement(f"SELECT {number} + :more::int")


def planned(session: Session) -> int:
    ((count,),) = session.ask(PLANNED, end=soon()).rows
    return int(count)


def test_what_is_new_is_planned_in_the_packet_of_its_first_use(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_its_own(*_: object) -> None:
        raise AssertionError("that would be another round trip")

    monkeypatch.setattr(Session, "_prepare", of_its_own)
    one, two = said(1), said(2)
    steps = [(one, [1]), (two, [1]), (one, [2])]
    for _ in range(2):
        assert [answer.rows for answer in session.batch(steps, end=soon())] == [
            [(2,)],
            [(3,)],
            [(3,)],
        ]
    assert planned(session) == 2


@pytest.mark.parametrize(
    "refused", [Statement("SELECT 1 / :more::int"), Statement("SELECT no_such_column, :more::int")]
)
def test_what_was_planned_before_a_refusal_is_known_and_what_came_after_is_not(
    session: Session, refused: Statement
) -> None:
    before, after = said(1), said(2)
    with pytest.raises(Refusal):
        session.batch([(before, [1]), (refused, [0]), (after, [1])], end=soon())
    answers = session.batch([(before, [1]), (after, [1])], end=soon())
    assert [answer.rows for answer in answers] == [[(2,)], [(3,)]]
    assert session.ask(before, [2], end=soon()).rows == [(3,)]


def test_behind_a_pooler_nothing_is_planned(session: Session) -> None:
    session.direct = False
    one = said(1)
    assert session.batch([(one, [1]), (one, [2])], end=soon())[1].rows == [(3,)]
    assert planned(session) == 0
