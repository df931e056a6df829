"""Several keepers of one process prove its pulse, one in each turn."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from fencepost.stores import postgres_runs
from fencepost.stores.postgres_runs import vouch
from fencepost.world.postgres_lean import EVERY, SOON, RunLean, Vouching

if TYPE_CHECKING:
    from collections.abc import Callable

    from fencepost.stores.postgres import PostgresStore

GRACE = 0.6


class Keepers:
    """Keepers that share a pulse, at a time that the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.vouching, self.now = Vouching(), 1000.0
        self.patiences: list[float] = []
        lean = RunLean(
            self.vouching, lease=b"", nonce="n", token=1, on=1, grace=GRACE, sent=self.now
        )
        self.vouching.lean(lean)
        patch.setattr(postgres_runs, "_prove", self._prove)

    def vouch(self, answer: Callable[[], None]) -> None:
        """Prove the pulse; ``answer`` is what becomes of the question."""
        store = SimpleNamespace(
            pulse_here=SimpleNamespace(vouching=self.vouching),
            boottime=lambda: self.now,
            answer=answer,
        )
        vouch(cast("PostgresStore", store))

    def _prove(self, store: SimpleNamespace, *_: object, patience: float) -> None:
        self.patiences.append(patience)
        store.answer()


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> Keepers:
    return Keepers(monkeypatch)


def test_an_answer_to_one_keeper_is_none_to_another_that_asked_later(keepers: Keepers) -> None:
    asked, answered = threading.Event(), threading.Event()

    def late() -> None:
        asked.set()
        assert answered.wait(10)

    def silent() -> None:
        answered.set()
        first.join(10)
        raise TimeoutError

    keepers.now += EVERY
    first = threading.Thread(target=keepers.vouch, args=(late,))
    first.start()
    assert asked.wait(10)
    keepers.now += EVERY
    with pytest.raises(TimeoutError):
        keepers.vouch(silent)
    assert keepers.vouching.prove_at == keepers.now + SOON
    keepers.now += EVERY
    keepers.vouch(lambda: None)
    assert keepers.patiences[-1] > 0.4 * GRACE, "there is time to open a session anew"


def test_one_keeper_asks_in_each_turn(keepers: Keepers) -> None:
    for _ in range(3):
        keepers.now += EVERY
        for _ in range(2):
            keepers.vouch(lambda: None)
    assert len(keepers.patiences) == 3
