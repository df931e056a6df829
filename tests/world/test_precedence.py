"""Who serves comes first; others work while it waits for a server, or stand back for a moment."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from fencepost.world import precedence as home
from fencepost.world.precedence import Precedence, waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 30.0


@pytest.fixture
def first() -> Iterator[Precedence]:
    """Have this thread come first."""
    made = Precedence()
    made.take()
    yield made
    made.leave()


@pytest.fixture
def seen(first: Precedence, monkeypatch: pytest.MonkeyPatch) -> Precedence:
    """Have it seen to wait once, and others stand back for as long as it takes."""
    monkeypatch.setattr(home, "MOMENT", PATIENCE)
    with waiting():
        pass
    return first


def passes(first: Precedence) -> threading.Event:
    """Have another thread stand back once; return what tells that it has gone on."""
    gone_on = threading.Event()

    def other() -> None:
        first.stand_back()
        gone_on.set()

    threading.Thread(target=other, daemon=True).start()
    return gone_on


def test_others_stand_back_until_the_first_waits_for_a_server(seen: Precedence) -> None:
    other = passes(seen)
    assert not other.wait(0.1)
    with waiting():
        assert other.wait(PATIENCE)


def test_others_stand_back_until_the_first_leaves(seen: Precedence) -> None:
    other = passes(seen)
    assert not other.wait(0.1)
    seen.leave()
    assert other.wait(PATIENCE)


def test_nobody_stands_back_for_longer_than_a_moment(first: Precedence) -> None:
    with waiting():
        pass
    began = time.monotonic()
    assert passes(first).wait(PATIENCE)
    assert time.monotonic() - began >= home.MOMENT


def test_where_no_wait_is_ever_told_of_nobody_stands_back(
    first: Precedence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "MOMENT", PATIENCE)
    first.take()
    assert passes(first).wait(PATIENCE / 2)


def test_the_waits_of_other_threads_lend_nothing(seen: Precedence) -> None:
    def elsewhere() -> None:
        with waiting():
            met.wait()
            met.wait()

    met = threading.Barrier(2, timeout=PATIENCE)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    met.wait()
    other = passes(seen)
    assert not other.wait(0.1)
    met.wait()
    thread.join()
    seen.leave()
    assert other.wait(PATIENCE)


def test_an_error_while_it_waits_leaves_the_first_in_its_place(seen: Precedence) -> None:
    with pytest.raises(OSError, match="away"), waiting():
        raise OSError("away")
    other = passes(seen)
    assert not other.wait(0.1)
    seen.leave()
    assert other.wait(PATIENCE)
