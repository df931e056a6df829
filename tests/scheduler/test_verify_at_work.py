"""The proof can be had while instances work and die: what goes on is no violation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from schedlab import Member, Noon, effects, members, unproven, until, url_of

from fencepost import Fencepost
from fencepost.cli.verify import gathered
from fencepost.ledger.api import NOTHING, Attempt
from fencepost.ledger.open import ledger_of
from fencepost.ledger.planning import Ask, Begun, End, Ticked
from fencepost.model.ending import Settled
from fencepost.model.run import State
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


@pytest.mark.parametrize("then", ["cancel", "end", "release"])
def test_a_run_without_its_permit_may_end_in_any_way(tmp_path: Path, then: str) -> None:
    clocks = Noon()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        fp.job("a", every="1h", lease="1m", overlap="allow", max_concurrent=1)(lambda: None)
        fp.tick()

        def tick(number: int, *ended: End) -> Ticked:
            want = fp._scheduling.serving.want
            return finish(fp._scheduling.planner.tick(Ask(want, f"n{number}-", 1, ended)))

        def end(begun: Begun, settled: Settled) -> End:
            run = begun.claimed.run
            assert run is not None
            attempt = Attempt(run.key, run.token, run.holder.nonce, run.lease, str(run.holder))
            return End(attempt, settled, NOTHING)

        clocks.advance(3600)
        (lapsed,) = tick(1).begun
        clocks.advance(3600)
        (other,) = tick(2).begun
        clocks.advance(5)
        assert lapsed.claimed.run is not None
        if then == "cancel":
            fp.cancel(str(lapsed.claimed.run.key), force=True)
        elif then == "end":
            tick(3, end(lapsed, Settled(State.SUCCEEDED)))
        else:
            tick(3, end(lapsed, Settled(State.PENDING, "released")))
        tick(4, end(other, Settled(State.SUCCEEDED)))
    assert unproven(tmp_path) == []
