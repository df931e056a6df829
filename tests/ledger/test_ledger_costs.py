"""What each verb of the ledger costs, in statements, pages and syncs."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import pytest
from ledgerlab import DONE, claimed, opened, run_through

from fencepost.model.item import ItemState
from fencepost.model.policy import OnLoss, Policy
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.ledger.api import Attempt

FRAME = 24 + 4096
# Whether a backup was restored into the file: a number in its header, and no page more.
LOOK = "PRAGMA schema_version"


class Traced:
    """A ledger on a file with some history, and what it has asked of the file since."""

    def __init__(self, path: Path, synced: list[int]) -> None:
        self.ledger = opened(path)
        for slot in range(3):
            run_through(self.ledger, RunKey("job", slot), f"earlier {slot}")
        finish(self.ledger.note(RunKey("job", 0), "seen"))  # from here on syncs are ours to count
        self.sent: list[str] = []
        connection = self.ledger.leases.file._connection
        assert connection is not None
        connection.set_trace_callback(self.sent.append)
        self._log, self._synced = path.with_name(path.name + "-wal"), synced
        self.cost()

    def claim(self, slot: int = 60) -> Attempt:
        return claimed(self.ledger, RunKey("job", slot), f"nonce {slot}")

    def cost(self) -> tuple[list[str], int, int]:
        """Return the first words sent since the last call, pages written, and syncs."""
        # A statement that fires a trigger is traced again for each: it is still one.
        sent = [statement for statement in self.sent if LOOK not in statement]
        words = [statement.split()[0] for statement, _ in groupby(sent)]
        data = self._log.read_bytes()
        salts = data[16:24]
        frames = range(32, len(data) - FRAME + 1, FRAME)
        pages = sum(data[at + 8 : at + 16] == salts for at in frames)
        syncs = len(self._synced)
        before, self._before = getattr(self, "_before", (0, 0)), (pages, syncs)
        self.sent.clear()
        return words, pages - before[0], syncs - before[1]


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    synced: list[int] = []
    monkeypatch.setattr("os.fdatasync", synced.append)
    traced = Traced(tmp_path / "ledger.db", synced)
    yield traced
    finish(traced.ledger.close())


def test_a_claim_is_one_statement_that_is_its_own_transaction_and_no_sync(traced: Traced) -> None:
    traced.claim()
    words, pages, syncs = traced.cost()
    assert words == ["INSERT"]
    # The lease, the run, and the index of live runs.
    assert (pages, syncs) == (3, 0)
    finish(traced.ledger.sync())
    assert traced.cost() == ([], 0, 1)


def test_a_claim_of_what_must_not_be_tried_twice_is_synced(traced: Traced) -> None:
    claimed(traced.ledger, RunKey("job", 60), "n", Policy(on_loss=OnLoss.FAIL))
    assert traced.cost()[2] == 1


def test_a_finish_is_one_statement_that_is_its_own_transaction_and_one_sync(traced: Traced) -> None:
    attempt = traced.claim()
    traced.cost()
    finish(traced.ledger.finish(attempt, DONE))
    words, pages, syncs = traced.cost()
    assert words == ["UPDATE"]
    # The lease, the run, and the index of live runs.
    assert (pages, syncs) == (3, 1)


def test_a_beat_is_two_statements_and_no_sync(traced: Traced) -> None:
    attempt = traced.claim()
    traced.cost()
    finish(traced.ledger.beat(attempt, ttl=30.0))
    words, pages, syncs = traced.cost()
    assert words == ["BEGIN", "UPDATE", "UPDATE", "COMMIT"]
    assert (pages, syncs) == (2, 0)


def test_a_checkpoint_is_one_statement_and_one_sync(traced: Traced) -> None:
    attempt = traced.claim()
    traced.cost()
    finish(traced.ledger.save(attempt, checkpoint='{"page": 1}', order=1))
    words, pages, syncs = traced.cost()
    assert words == ["BEGIN", "UPDATE", "COMMIT"]
    assert (pages, syncs) == (1, 1)


def test_the_begin_of_an_item_is_synced_and_its_end_is_not(traced: Traced) -> None:
    attempt = traced.claim()
    traced.cost()
    finish(traced.ledger.begin(attempt, scope="s", items=["a"], call="c", repeat=False))
    words, pages, syncs = traced.cost()
    assert words == ["BEGIN", "SELECT", "INSERT", "COMMIT"]
    assert (pages, syncs) == (1, 1)
    finish(traced.ledger.end(attempt, scope="s", items=[("a", ItemState.DONE, None)]))
    words, pages, syncs = traced.cost()
    assert words == ["BEGIN", "SELECT", "UPDATE", "COMMIT"]
    assert (pages, syncs) == (1, 0)


def test_a_job_that_says_what_is_known_writes_nothing(traced: Traced) -> None:
    finish(traced.ledger.register("job", "{}"))
    traced.cost()
    finish(traced.ledger.register("job", "{}"))
    words, pages, syncs = traced.cost()
    assert words == ["SELECT"]
    assert (pages, syncs) == (0, 0)
