"""A ledger in a file with real runs in it, and somebody who asks about them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from fencepost import Fencepost
from fencepost.cli.main import main
from fencepost.ledger.open import ledger_of
from fencepost.model.claim import Verdict, Want
from fencepost.model.lease import Holder
from fencepost.model.policy import Policy
from fencepost.model.slot import RunKey
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from fencepost import Run

SLOT = "2026-01-20T02:00:00Z"
LATER = "2026-01-20T03:00:00Z"
INSTANT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \([\d.]+ (s|min|h|d) ago\)"


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Desk:
    """A ledger in a file, and somebody who asks about it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._capsys = folder / "runs.db", capsys
        self.url = f"sqlite:///{self.path}"

    def ask(self, *words: str) -> Answer:
        self._capsys.readouterr()
        code = main([*words, "--url", self.url])
        return Answer(code, *self._capsys.readouterr())

    def ran(self, body: Callable[[Run], object], *slots: str, name: str = "job") -> None:
        """Run a job for some slots, here and now."""
        with Fencepost(self.url) as fp:
            fp.job(name, every="1h")(body)
            for slot in slots:
                fp.trigger(name, slot)

    def poisoned(self) -> None:
        """Have a job whose attempts vanish until it is put into quarantine."""
        world = BlockingWorld()
        ledger = ledger_of(world, open_store(self.url, world, namespace="default"))
        key, policy = RunKey("job", 1_768_874_400), Policy(max_losses=1, loss_pause=1e-6)
        finish(ledger.register("job", '{"schedule": "every 1 h", "overlap": "skip"}'))
        for number in range(10):
            holder = Holder(f"nonce-{number}", "host", 1)
            want = Want(key, holder, policy, "job", can_be_alone=True)
            claimed = finish(ledger.claim(want))
            if claimed.verdict is Verdict.ENDED:
                break
            if claimed.verdict is Verdict.GO:
                finish(ledger.leases.release("job", nonce=holder.nonce))
        else:
            raise AssertionError("it never ended")
        finish(ledger.close())


def fine(run: Run) -> str:
    run.count("emails_sent", 3)
    with run.once("inv-1"):
        pass
    return "all sent"


def broken(_: Run) -> None:
    raise ValueError("no \x1b[31minput")


def nothing(_: Run) -> None:
    """Succeed."""
