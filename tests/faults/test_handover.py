"""A lease that is handed over has one owner at every instant, whoever dies, stops or gives up."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from faultlab import Puppet, boottime, fencepost, until, url_of, waiters
from partylab import Party

from fencepost.errors import LeaseHeld, LeaseLost, OutcomeUnknown, StoreUnavailable
from fencepost.flows.acquire import acquire
from fencepost.stores.sqlite import SqliteStore
from fencepost.stores.sqlite_handover import SqlitePlace, read_wish
from fencepost.stores.sqlite_reserve import TokenReserve
from fencepost.world.blocking import BlockingWorld
from fencepost.world.board import Board, board_of
from fencepost.world.flow import finish
from fencepost.world.line import Called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Callable[..., Party]]:
    parties: list[Party] = []

    def make(nonce: str) -> Party:
        parties.append(Party(tmp_path, nonce))
        return parties[-1]

    yield make
    for one in parties:
        one.close()


def test_a_release_is_the_next_grant_in_one_commit(party: Callable[..., Party]) -> None:
    first, second = party("a"), party("b")
    token = first.acquire()
    second.join()
    first.trace()
    second.trace()
    first.release(token)
    heir = second.accept()
    assert heir is not None
    assert heir > token
    assert first.verbs() == ["UPDATE"]
    assert second.verbs() == [], "the board says it all"
    view = finish(second.store.peek("x"))
    assert view is not None
    assert (view.holder, view.alive) == (second.holder, True)


def test_trust_begins_no_later_than_the_grant_and_with_the_ttl_of_the_waiter(
    party: Callable[..., Party],
) -> None:
    first, second = party("a"), party("b")
    token = first.acquire()
    place = second.join()
    before = boottime()
    first.release(token)
    after = boottime()
    finish(place.turn(1.0))
    handed = finish(place.accept())
    assert handed is not None
    assert before - 1e-5 <= handed.sent <= after
    assert handed.grant.ttl == 20.0


def test_what_was_handed_over_is_synced_before_it_is_taken(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenReserve, "covers", lambda *_: False)
    first, second = party("a"), party("b")
    first.release(first.acquire())
    first = party("c")
    token = first.acquire()
    second.join()
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    first.release(token)
    assert second.accept() is not None
    assert len(synced) == 1, "whoever hands it over, or else whoever takes it"


def test_who_hears_nothing_of_a_sync_sees_to_it_by_itself(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenReserve, "covers", lambda *_: False)
    first, second = party("a"), party("b")
    token = first.acquire()
    second.join()
    monkeypatch.setattr(Board, "hand", lambda *_: None)
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    first.release(token)
    before = len(synced)
    assert second.accept() is not None
    assert len(synced) == before + 1


def test_the_confirmation_of_an_earlier_hand_over_does_not_stand_for_a_later_one(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenReserve, "covers", lambda *_: False)
    first, second, third = party("a"), party("b"), party("c")
    first.release(first.acquire())
    token = party("d").acquire()
    second.join()
    finish(first.store.release("x", nonce="d", token=token))  # handed over, and confirmed
    token = third.acquire()  # but taken over by another, who hands it over again
    monkeypatch.setattr(Board, "hand", lambda *_: None)
    third.release(token)
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    assert second.accept() is not None
    assert len(synced) == 1


def test_what_was_handed_to_one_who_does_not_take_it_is_for_whoever_asks(
    party: Callable[..., Party],
) -> None:
    first, stopped, third = party("a"), party("b"), party("c")
    token = first.acquire()
    stopped.join()
    first.release(token)
    later = third.acquire()
    assert later > token
    assert stopped.accept() is None
    with pytest.raises(LeaseHeld):
        stopped.acquire()
    third.release(later)  # to the one that stands in line still, and asks after a call in vain
    assert finish(stopped.store.acquire("x", holder=stopped.holder, ttl=30)).adopted


def test_what_was_taken_is_refused_to_everybody_else(party: Callable[..., Party]) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    second.join()
    first.release(token)
    assert second.accept() is not None
    with pytest.raises(LeaseHeld):
        third.acquire()


def test_who_is_just_being_looked_at_asks_for_what_it_was_handed(
    party: Callable[..., Party], tmp_path: Path
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    place = second.join()
    first.release(token)
    looking = os.open(tmp_path / "leases.db-live" / place.seat.name, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.flock(looking, fcntl.LOCK_SH)
    assert second.accept() is None
    adopted = finish(second.store.acquire("x", holder=second.holder, ttl=30))
    assert adopted.adopted
    os.close(looking)
    with pytest.raises(LeaseHeld):  # it leans on the pulse of the process now
        third.acquire()


def test_whoever_takes_over_keeps_the_waiter_from_taking_until_it_is_done(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    second.join()
    first.release(token)
    tried: list[int | None] = []
    grant = SqliteStore._grant

    def meanwhile(self: SqliteStore, *args: object, **words: object) -> object:
        if self is third.store:
            tried.append(second.accept())
        return grant(self, *args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(SqliteStore, "_grant", meanwhile)
    assert third.acquire() > token
    assert tried == [None]


def test_who_withdraws_is_told_the_truth_by_its_last_question(
    party: Callable[..., Party],
) -> None:
    first, early, late = party("a"), party("b"), party("c")
    token = first.acquire()
    place = early.join()
    first.release(token)
    place.withdraw()
    token = early.acquire()  # handed over before: so it is adopted
    place = late.join()
    place.withdraw()
    early.release(token)
    view = finish(late.store.peek("x"))
    assert view is not None
    assert not view.held, "nothing is handed to who has withdrawn"


def test_who_withdraws_between_the_call_and_the_commit_is_handed_nothing(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = party("a"), party("b")
    token = first.acquire()
    place = second.join()
    still_waits = Called.still_waits

    def meanwhile(called: Called) -> bool:
        place.withdraw()
        return still_waits(called)

    monkeypatch.setattr(Called, "still_waits", meanwhile)
    first.release(token)
    view = finish(second.store.peek("x"))
    assert view is not None
    assert not view.held
    assert view.holder == first.holder


@pytest.mark.parametrize("fault", ["torn", "another name", "another namespace", "nonsense"])
def test_what_is_not_surely_wanted_is_set_free(party: Callable[..., Party], fault: str) -> None:
    first = party("a")
    second = party("b")
    token = first.acquire()
    place = second.join()
    board, slot = place.seat.board, place.seat.slot
    text = board.read(slot, place._ticket)
    assert read_wish(text) is not None
    if fault == "torn":
        board._bytes[(slot + 1) * 512 + 130] ^= 1
    else:
        other = {
            "another name": text.replace(b"\nx\n", b"\ny\n"),
            "another namespace": text.replace(b"default", b"another"),
            "nonsense": b"a\nb",
        }
        board.write(slot, other[fault])
    first.release(token)
    view = finish(first.store.peek("x"))
    assert view is not None
    assert not view.held
    assert second.accept() is None, "called it is, all the same"
    assert second.acquire() > token


def test_a_release_whose_reply_was_lost_after_the_hand_over_is_no_loss(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = party("a"), party("b")
    token = first.acquire()
    second.join()
    write = type(first.store._file).write_one

    def cut(*args: object, **words: object) -> None:
        write(*args, **words)  # type: ignore[arg-type]
        raise OutcomeUnknown("the reply was lost")

    with monkeypatch.context() as patch:
        patch.setattr(type(first.store._file), "write_one", cut)
        with pytest.raises(OutcomeUnknown):
            first.release(token)
    first.release(token)
    assert second.accept() is not None
    with pytest.raises(LeaseLost):
        first.release(token)


def test_who_was_handed_the_lease_by_one_who_died_before_the_call_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as second:
        lock = fp.lock("x")
        lease = lock.acquire()
        second.tell("acquire", "x", "10m", "60s")
        until(lambda: waiters(tmp_path))
        monkeypatch.setattr(Called, "hang_up", lambda _: None)
        monkeypatch.setattr(Board, "hand", lambda *_: None)
        released = boottime()
        assert lock.release(lease)
        _, got = Puppet.grant(second.answer())
        assert got - released < 0.5
        assert second.ask("check") == "fine"


def test_one_who_was_handed_the_lease_and_dies_is_followed_at_once(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as second:
        with fp.lock("x"):
            second.tell("acquire", "x", "10m", "60s")
            until(lambda: waiters(tmp_path))
        Puppet.grant(second.answer())
        second.ask("fork", "stays")  # a child that must not vouch for it
        with pytest.raises(LeaseHeld):
            fp.lock("x").acquire()
        second.kill()
        began = boottime()
        with fp.lock("x", wait="20s"):
            assert boottime() - began < 1.0


def test_one_who_was_handed_the_lease_and_ends_without_giving_it_back_is_followed_at_once(
    tmp_path: Path,
) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as second:
        with fp.lock("x"):
            second.tell("acquire", "x", "10m", "60s")
            until(lambda: waiters(tmp_path))
        Puppet.grant(second.answer())
        second.leave()
        began = boottime()
        with fp.lock("x", wait="20s"):
            assert boottime() - began < 1.0


def test_a_lease_that_was_handed_over_is_renewed_and_given_back_like_any_other(
    tmp_path: Path,
) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as second:
        with fp.lock("x"):
            second.tell("acquire", "x", "0.3s", "60s")
            until(lambda: waiters(tmp_path))
        _, got = Puppet.grant(second.answer())
        until(lambda: boottime() > got + 0.5)
        assert second.ask("check") == "fine"
        assert second.ask("release") == "released True"
        with fp.lock("x"):
            pass


def waits_in_vain(party: Party, error: type[Exception]) -> list[tuple[str, str]]:
    """Wait for a moment, and return what is left to others to give back."""
    abandoned: list[tuple[str, str]] = []
    flow = acquire(
        BlockingWorld(),
        party.store,
        ["x"],
        holder=party.holder,
        ttl=30,
        wait=0.05,
        abandon=lambda name, nonce: abandoned.append((name, nonce)),
        handed=True,
    )
    with pytest.raises(error):
        finish(flow)
    return abandoned


def test_who_is_told_at_last_who_has_it_leaves_nothing_to_give_back(
    party: Callable[..., Party],
) -> None:
    first, second = party("a"), party("b")
    first.acquire()
    assert waits_in_vain(second, LeaseHeld) == []


def test_what_was_handed_to_one_who_just_gives_up_and_is_not_answered_is_given_back(
    party: Callable[..., Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = party("a"), party("b"), party("c")
    token = first.acquire()
    withdraw = SqlitePlace.withdraw

    async def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("busy")

    def too_late(place: SqlitePlace) -> None:
        first.release(token)  # to the second, who hears nothing of it
        monkeypatch.setattr(second.store, "acquire", away)
        withdraw(place)

    monkeypatch.setattr(SqlitePlace, "withdraw", too_late)
    assert waits_in_vain(second, StoreUnavailable) == [("x", "b")]
    assert third.join("y").seat.lock(), "and not with the pipe that the lease leans on"
    assert first.acquire() > token


def test_who_must_not_be_handed_anything_wishes_for_nothing(
    party: Callable[..., Party], tmp_path: Path
) -> None:
    first, second = party("a"), party("b")
    first.acquire()
    flow = acquire(
        BlockingWorld(),
        second.store,
        ["x"],
        holder=second.holder,
        ttl=30,
        wait=0.05,
        abandon=lambda *_: None,
    )
    wishes: list[bytes] = []
    readable = BlockingWorld.readable

    async def looked_at(self: BlockingWorld, fd: int, timeout: float) -> bool:
        board = board_of(str(tmp_path / "leases.db-live"))
        wishes.extend(board.read(slot, t) for slot, t in enumerate(board.tickets()) if t)
        return await readable(self, fd, timeout)

    with pytest.MonkeyPatch.context() as patch, suppress(LeaseHeld):
        patch.setattr(BlockingWorld, "readable", looked_at)
        finish(flow)
    assert wishes
    assert set(wishes) == {b""}
