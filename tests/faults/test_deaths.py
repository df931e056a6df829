"""A dead holder's lease is free at once; a living holder is never taken for dead."""

from __future__ import annotations

import os
import shutil
import sqlite3
from typing import TYPE_CHECKING

from faultlab import Puppet, boottime, fencepost, until, url_of, waiters

from fencepost import LeaseHeld

if TYPE_CHECKING:
    from pathlib import Path


def pulse_of(folder: Path, name: str) -> Path:
    with sqlite3.connect(folder / "leases.db") as database:
        (pulse,) = database.execute(
            "SELECT pulse FROM fencepost_lease WHERE name = ?", (name,)
        ).fetchone()
    database.close()
    return folder / "leases.db-live" / str(pulse)


def is_held(url: str, name: str) -> bool:
    with fencepost(url) as fp:
        try:
            lease = fp.lock(name).acquire()
        except LeaseHeld:
            return True
        fp.lock(name).release(lease)
        return False


def test_who_waits_has_the_lease_within_a_second_of_its_holders_death(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, Puppet(url) as waiter:
        first, _ = holder.granted("x", "10m")
        waiter.tell("acquire", "x", "10m", "60s")
        until(lambda: waiters(tmp_path))
        died = boottime()
        holder.kill()
        second, got = Puppet.grant(waiter.answer())
    assert second > first
    assert got - died < 1.0


def test_who_asks_again_has_the_lease_within_a_second_of_its_holders_death(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, Puppet(url) as other:
        first, _ = holder.granted("x", "10m")
        assert other.ask("acquire", "x").startswith("LeaseHeld")
        died = boottime()
        holder.kill()
        second, got = other.granted("x")
    assert second > first
    assert got - died < 1.0


def test_the_death_of_a_whole_process_group_frees_its_lease_within_a_second(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, Puppet(url) as other:
        holder.granted("x", "10m")
        holder.ask("fork", "stays")
        died = boottime()
        holder.kill_group()
        _, got = other.granted("x", "10m", "60s")
    assert got - died < 1.0


def test_a_dead_child_that_nobody_buried_is_dead(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, fencepost(url) as fp:
        holder.granted("x", "10m")
        os.kill(holder.pid, 9)  # and no wait: it stays in the process table
        until(lambda: holder.state() == "Z")
        died = boottime()
        with fp.lock("x", wait="30s"):
            assert boottime() - died < 1.0


def test_a_paused_process_that_had_the_lease_vouches_for_nobody_else(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as zombie, Puppet(url) as holder, Puppet(url) as other:
        token, _ = zombie.granted("x", "10m")
        zombie.pause()
        with fencepost(url) as fp:
            fp.break_lock("x", token=token, reason="it is stuck")
        holder.granted("x", "10m")
        assert other.ask("acquire", "x").startswith("LeaseHeld")
        died = boottime()
        holder.kill()
        _, got = other.granted("x", "10m", "60s")
    assert got - died < 1.0


def test_a_removed_pulse_file_makes_nobody_look_dead(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder:
        holder.granted("x", "10m")
        pulse_of(tmp_path, "x").unlink()
        assert is_held(url, "x")


def test_a_file_put_in_the_place_of_a_pulse_makes_nobody_look_dead(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder:
        holder.granted("x", "10m")
        pulse = pulse_of(tmp_path, "x")
        pulse.unlink()
        pulse.touch()
        assert is_held(url, "x")


def test_a_pulse_that_was_removed_and_begun_anew_elsewhere_leaves_its_inode_to_nobody(
    tmp_path: Path,
) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder:
        holder.granted("x", "10m")
        pulse = pulse_of(tmp_path, "x")
        pulse.unlink()

        def beats_elsewhere() -> bool:
            holder.granted("y", "10m")
            elsewhere = pulse_of(tmp_path, "y").name != pulse.name
            holder.ask("release")
            return elsewhere

        until(beats_elsewhere)  # it looks after its file every now and then
        pulse.touch()
        assert is_held(url, "x")


def test_the_removed_folder_of_pulses_makes_nobody_look_dead_and_stops_nobody(
    tmp_path: Path,
) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, Puppet(url) as other:
        holder.granted("x", "10m")
        other.granted("y", "10m")
        shutil.rmtree(tmp_path / "leases.db-live")
        assert is_held(url, "x")
        assert holder.ask("release") == "released True"
        other.granted("x", "10m", "5s")
        shutil.rmtree(tmp_path / "leases.db-live")
        assert other.ask("release") == "released True"
        assert other.ask("release") == "released True"


def test_a_child_that_closes_every_descriptor_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder:
        holder.granted("x", "10m")
        holder.ask("fork", "closes-all")
        assert is_held(url, "x")
        assert holder.ask("check") == "fine"


def test_a_child_that_outlives_its_parent_does_not_vouch_for_it(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, fencepost(url) as fp:
        holder.granted("x", "10m")
        child = int(holder.ask("fork", "stays").split()[1])
        died = boottime()
        holder.kill()
        os.kill(child, 0)  # it is alive
        with fp.lock("x", wait="30s"):
            assert boottime() - died < 1.0


def test_those_who_died_leave_no_files_once_their_leases_were_taken_over(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    for _ in range(3):
        with Puppet(url) as holder:
            holder.granted("x", "10m")
            holder.kill()
    with fencepost(url) as fp, fp.lock("x"):
        pulses = [f for f in (tmp_path / "leases.db-live").iterdir() if f.suffix == ".pulse"]
        assert pulses == [pulse_of(tmp_path, "x")]
    assert os.listdir(tmp_path / "leases.db-live") == ["line-2"]


def test_a_swept_folder_keeps_the_pulses_that_leases_lean_on(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as dead:
        dead.granted("x", "10m")
        dead.granted("y", "10m")
        dead.kill()
    with fencepost(url) as fp:
        with fp.lock("x"):
            pass  # sweeps
        with fp.lock("y", wait="1s"):
            pass  # the dead one still lies where it fell


def test_a_program_that_exits_with_a_lease_is_dead(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, fencepost(url) as fp:
        holder.granted("x", "10m")
        holder.leave()
        with fp.lock("x") as lease:
            lease.check()
