"""Only the boot-time clock ends a lease; a wall clock may say what it likes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from faultlab import Puppet, SteppedClocks, boottime, fencepost, until, url_of

from fencepost import LeaseHeld, LeaseLost, Misuse

if TYPE_CHECKING:
    from pathlib import Path

HOUR = 3600.0


@pytest.mark.parametrize("step", [HOUR, -HOUR])
@pytest.mark.parametrize("who", ["holder", "other", "both"])
def test_a_stepping_wall_clock_frees_nothing_and_blocks_nothing(
    tmp_path: Path, who: str, step: float
) -> None:
    ours, theirs = SteppedClocks(), SteppedClocks()
    url = url_of(tmp_path)
    with fencepost(url, clocks=ours) as holder, fencepost(url, clocks=theirs) as other:
        with holder.lock("x") as lease:
            for clocks, name in ((ours, "holder"), (theirs, "other")):
                clocks.wall_offset = step if who in (name, "both") else 0.0
            lease.check()
            with pytest.raises(LeaseHeld) as refused:
                other.lock("x").acquire()
            assert 0 < refused.value.expires_in <= 30
        with other.lock("x") as after:
            assert after.token > lease.token
        with holder.lock("x") as last:
            assert last.token > after.token


def test_tokens_rise_while_the_wall_clock_falls(tmp_path: Path) -> None:
    clocks, tokens = SteppedClocks(), []
    with fencepost(url_of(tmp_path), clocks=clocks) as fp:
        for hours in range(5):
            clocks.wall_offset = -hours * HOUR
            with fp.lock("x") as lease:
                tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


def test_another_boot_frees_everything(tmp_path: Path) -> None:
    before, after = SteppedClocks(), SteppedClocks()
    after.boot, after.boot_offset = "next boot", -boottime() + 5  # its clock begins anew
    url = url_of(tmp_path)
    with fencepost(url, clocks=before) as fp, fp.lock("x", ttl="10m") as lease:
        with fencepost(url, clocks=after) as later, later.lock("x") as next_lease:
            assert next_lease.token > lease.token
        assert not fp.lock("x").release(lease)


def test_another_time_namespace_is_refused(tmp_path: Path) -> None:
    here, elsewhere = SteppedClocks(), SteppedClocks()
    elsewhere.time_namespace = "time:[2]"
    url = url_of(tmp_path)
    with (
        fencepost(url, clocks=here) as fp,
        fp.lock("x"),
        fencepost(url, clocks=elsewhere) as stranger,
    ):
        with pytest.raises(Misuse, match=r"time namespace.*time:\[1\].*time:\[2\]"):
            stranger.lock("x").acquire()
        with pytest.raises(Misuse, match="time namespace"):
            stranger.lock("x", wait="1s").acquire()


def test_without_a_boot_id_a_lease_is_taken_only_after_watching_it_stand_still(
    tmp_path: Path,
) -> None:
    url = url_of(tmp_path)
    with (
        Puppet(url, PUPPET_HAS_NO_BOOT_ID="1") as holder,
        Puppet(url, PUPPET_HAS_NO_BOOT_ID="1") as other,
    ):
        holder.granted("x", "1s")
        holder.pause()
        began = boottime()
        until(lambda: boottime() - began > 1.0)  # past its end, by a clock that other cannot trust
        asked = boottime()
        _, got = other.granted("x", "1s", "30s")
        assert 1.0 <= got - asked < 2.5


def test_without_a_boot_id_a_renewed_lease_is_never_taken(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with (
        Puppet(url, PUPPET_HAS_NO_BOOT_ID="1") as holder,
        Puppet(url, PUPPET_HAS_NO_BOOT_ID="1") as other,
    ):
        holder.granted("x", "0.8s")
        assert other.ask("acquire", "x", "1s", "2.4s").startswith("LeaseHeld")
        assert holder.ask("check") == "fine"


@pytest.mark.parametrize("blind", ["holder", "other"])
def test_who_cannot_read_the_boot_id_does_not_pass_for_another_boot(
    tmp_path: Path, blind: str
) -> None:
    ours, theirs = SteppedClocks(), SteppedClocks()
    (ours if blind == "holder" else theirs).boot = None
    url = url_of(tmp_path)
    with fencepost(url, clocks=ours) as holder, fencepost(url, clocks=theirs) as other:
        with holder.lock("x", ttl="30s") as lease:
            with pytest.raises(LeaseHeld):
                other.lock("x").acquire()
            assert [view.held for view in other.locks()] == [True]
            theirs.boot_offset += 31  # more than the ttl, but nobody watched
            lease.check()
        with other.lock("x"):
            pass


def test_without_a_boot_id_an_instant_from_before_a_restart_blocks_for_one_ttl_only(
    tmp_path: Path,
) -> None:
    before, after = SteppedClocks(), SteppedClocks()
    before.boot = after.boot = None
    before.boot_offset = 1e6
    url = url_of(tmp_path)
    with fencepost(url, clocks=before) as fp, fencepost(url, clocks=after) as later:
        lease = fp.lock("x", ttl="10m").acquire()
        with pytest.raises(LeaseHeld) as refused:
            later.lock("x").acquire()
        assert refused.value.expires_in <= 600
        after.boot_offset = 600.0
        with later.lock("x"):
            pass
        before.boot_offset += 600.0
        with pytest.raises(LeaseLost):
            lease.check()


def test_a_restart_raises_tokens_only_of_those_who_were_there_before_it(tmp_path: Path) -> None:
    clocks, blind = SteppedClocks(), SteppedClocks()
    blind.boot = None
    url = url_of(tmp_path)
    with fencepost(url, clocks=clocks) as fp:
        lock = fp.lock("old")
        old = lock.acquire()
        clocks.boot = "the next boot"
        clocks.wall_offset -= 3600  # and it comes up with its clock behind
        with fencepost(url, clocks=blind) as other, other.lock("blind") as living:
            with fencepost(url, clocks=clocks) as late, late.lock("old") as new:
                assert new.token > old.token + 10_000_000  # above all that was reserved
            living.check()
            assert [view.token for view in other.locks() if view.name == "blind"] == [living.token]
        assert not lock.release(old)
