"""What a power cut may forget, and that no token is ever issued again because of it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from ledgerlab import DONE, StillClocks, claimed, opened

from fencepost.model.lease import Holder
from fencepost.model.slot import RunKey
from fencepost.stores.sqlite import SqliteStore
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path


class Machine:
    """A machine whose disk can be put back to where it last was synced, and that then restarts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clocks, self._folder, self._boots = StillClocks(), folder, 1
        self.path = folder / "ledger.db"
        self.synced = 0
        monkeypatch.setattr("os.fdatasync", self._sync)

    def _sync(self, _fd: int) -> None:
        """Keep what the disk has now; the log is all that changed since the last time."""
        self.synced += 1
        for name in ("ledger.db", "ledger.db-wal"):
            if (self._folder / name).exists():
                shutil.copyfile(self._folder / name, self._folder / f"{name}.synced")

    def lose_power(self, *, clock_falls: float) -> None:
        """Forget everything since the last sync, and come up with the clock behind."""
        for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
            (self._folder / name).unlink(missing_ok=True)
            if (self._folder / f"{name}.synced").exists():
                shutil.copyfile(self._folder / f"{name}.synced", self._folder / name)
        self._boots += 1
        self.clocks.reboot()
        self.clocks.step_wall(-clock_falls)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_no_token_of_a_forgotten_claim_is_ever_issued_again(machine: Machine) -> None:
    ledger = opened(machine.path, machine.clocks)
    for slot in range(3):
        attempt = claimed(ledger, RunKey("job", slot), f"n{slot}")
        finish(ledger.finish(attempt, DONE))
        machine.clocks.advance(1)
    before = machine.synced
    lost = claimed(ledger, RunKey("job", 3), "lost")
    assert machine.synced == before  # nothing but this claim is at stake
    machine.lose_power(clock_falls=3600)
    again = opened(machine.path, machine.clocks)
    assert finish(again.find(RunKey("job", 3))) is None  # it was forgotten
    assert claimed(again, RunKey("job", 3), "again").token > lost.token
    finish(again.close())


def test_nor_does_a_plain_lock_of_the_same_name_get_it(machine: Machine) -> None:
    ledger = opened(machine.path, machine.clocks)
    finish(ledger.finish(claimed(ledger, RunKey("job", 0), "n0"), DONE))
    lost = claimed(ledger, RunKey("job", 1), "lost")
    machine.lose_power(clock_falls=3600)
    store = SqliteStore(BlockingWorld(clocks=machine.clocks), str(machine.path))
    grant = finish(store.acquire("job", holder=Holder("plain", "here", 1), ttl=30))
    assert grant.token > lost.token
    finish(store.close())


def test_what_a_synced_write_follows_is_not_forgotten(machine: Machine) -> None:
    ledger = opened(machine.path, machine.clocks)
    finish(ledger.finish(claimed(ledger, RunKey("job", 0), "n0"), DONE))
    attempt = claimed(ledger, RunKey("job", 1), "n1")
    finish(ledger.save(attempt, checkpoint="1"))
    machine.lose_power(clock_falls=0)
    again = opened(machine.path, machine.clocks)
    run = finish(again.find(RunKey("job", 1)))
    assert run is not None
    assert (run.starts, run.checkpoint) == (1, "1")
    finish(again.close())
