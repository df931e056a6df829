"""Who came first is served first, and nobody waits long behind the dead or the stopped."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from faultlab import Puppet, boottime, fencepost, until, url_of, waiters

from fencepost.world.board import board_of
from fencepost.world.line import Line

if TYPE_CHECKING:
    from pathlib import Path


def join(puppet: Puppet, folder: Path, *, wait: str = "60s") -> None:
    """Let a puppet stand in line, and see it there."""
    before = len(waiters(folder))
    puppet.tell("acquire", "x", "10m", wait)
    until(lambda: len(waiters(folder)) == before + 1)


def test_waiters_are_served_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    with fencepost(url_of(tmp_path)) as fp, ExitStack() as stack:
        puppets = [stack.enter_context(Puppet(url_of(tmp_path))) for _ in range(5)]
        for _ in range(3):
            with fp.lock("x"):
                for puppet in puppets:
                    join(puppet, tmp_path)
            grants = []
            for puppet in puppets:
                grants.append(Puppet.grant(puppet.answer()))
                assert puppet.ask("release") == "released True"
            assert grants == sorted(grants)


def test_a_waiter_that_died_in_line_delays_nobody(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as dead, Puppet(url) as second:
        with fp.lock("x"):
            join(dead, tmp_path)
            join(second, tmp_path)
            dead.kill()
        released = boottime()
        _, got = Puppet.grant(second.answer())
        assert got - released < 0.5


def test_a_stopped_waiter_delays_those_behind_it_by_half_a_second_at_most(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as stopped, Puppet(url) as second:
        with fp.lock("x"):
            join(stopped, tmp_path)
            join(second, tmp_path)
            stopped.pause()
        released = boottime()
        _, got = Puppet.grant(second.answer())
        assert got - released < 0.6
        stopped.go_on()
        assert second.ask("release") == "released True"
        Puppet.grant(stopped.answer())


def test_who_gives_up_waiting_passes_the_baton(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as hasty, Puppet(url) as second:
        with fp.lock("x"):
            join(hasty, tmp_path, wait="0.3s")
            join(second, tmp_path)
            assert hasty.answer().startswith("LeaseHeld")
            assert len(waiters(tmp_path)) == 1
        released = boottime()
        _, got = Puppet.grant(second.answer())
        assert got - released < 0.5


def test_a_dead_holder_is_followed_by_the_first_in_line(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, ExitStack() as stack:
        holder.granted("x", "10m")
        puppets = [stack.enter_context(Puppet(url)) for _ in range(3)]
        for puppet in puppets:
            join(puppet, tmp_path)
        holder.kill()
        first, _ = Puppet.grant(puppets[0].answer())
        assert puppets[0].ask("release") == "released True"
        second, _ = Puppet.grant(puppets[1].answer())
        assert second > first


def test_another_users_pipe_is_left_alone(tmp_path: Path) -> None:
    # As seen by somebody who may not write to it: a name that opens with an error other than
    # "nobody reads". A folder is one that even root cannot write to.
    url = url_of(tmp_path)
    with fencepost(url) as fp, Puppet(url) as second:
        with fp.lock("x"):
            strange = tmp_path / "leases.db-live" / "strange.waiter"
            strange.mkdir()
            board = board_of(str(strange.parent))
            slot = board.claim(strange.name, is_dead=lambda _: False)
            board.stand(slot, Line(str(strange.parent), namespace="default", name="x").key, 1)
            join(second, tmp_path)
        Puppet.grant(second.answer())
        assert strange.exists()
        assert board.ticket(slot) == 1
