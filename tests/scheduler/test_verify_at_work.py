"""The proof can be had while instances work and die: what goes on is no violation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedlab import Member, effects, members, until, url_of

from fencepost.cli.verify import gathered
from fencepost.ledger.open import ledger_of
from fencepost.stores.open import open_store
from fencepost.testing.ledger_checker import prove
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 12


def test_a_ledger_is_proven_while_instances_work_and_are_killed(tmp_path: Path) -> None:
    world = BlockingWorld()
    with members() as fleet:
        fleet += [Member(tmp_path, "cluster", jobs=20, lease="5s") for _ in range(2)]
        until(lambda: effects(tmp_path))
        ledger = ledger_of(world, open_store(url_of(tmp_path), world, namespace="default"))
        for number in range(ROUNDS):
            seen = len(effects(tmp_path))
            proof = prove(finish(gathered(ledger)))
            assert [str(finding) for finding in proof.findings] == []
            if number == ROUNDS // 2:
                fleet[0].kill()
            until(lambda: len(effects(tmp_path)) > seen)  # noqa: B023 -- it is asked at once
        fleet[1].ask_to_stop()
        assert fleet[1].ended() == 0
    proof = prove(finish(gathered(ledger)))
    finish(ledger.close())
    assert proof.findings == ()
    assert proof.counts.runs >= 20
