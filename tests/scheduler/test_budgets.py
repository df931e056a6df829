"""A tick keeps to its budget, and what it could not finish goes on in a later one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from schedlab import NOON, Noon, url_of

from fencepost import AsyncFencepost, Fencepost
from fencepost.ledger.planning import Asked
from fencepost.model.run import State
from fencepost.model.slot import RunKey

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost import AsyncRun, Run


def test_a_lease_is_no_longer_than_the_time_that_is_left_also_once_renewed(tmp_path: Path) -> None:
    clocks, left = Noon(), []
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:

        @fp.job("job", every="1m", lease="30s")
        def job() -> None:
            before = fp.locks()[0].expires_in
            deadline = time.monotonic() + 10
            while (now := fp.locks()[0].expires_in) <= before and time.monotonic() < deadline:
                time.sleep(0.01)
                before = now  # until it was renewed
            left.append(now)

        fp.tick()
        clocks.advance(60)
        assert len(fp.tick(budget="2s")) == 1
        clocks.advance(60)
        assert len(fp.tick()) == 1
    short, usual = left
    assert 1.5 < short <= 3.0
    assert usual > 20  # a budget is of one tick only


def test_a_step_that_is_longer_than_the_budget_is_kept_and_not_taken_for_ever(
    tmp_path: Path,
) -> None:
    clocks, taken = Noon(), []
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:

        @fp.job("job", every="1h")
        def job(run: Run) -> None:
            for step in range(run.checkpoint or 0, 3):
                taken.append(step)
                time.sleep(0.3)
                run.save(step + 1)

        fp.tick()
        clocks.advance(3600)
        first = fp.tick(budget="200ms")
        assert [outcome.reason for outcome in first] == ["released"]
        while not fp.runs("job")[0].state.terminal:
            assert fp.tick(budget="200ms")
        (run,) = fp.runs("job")
    assert taken == [0, 1, 2]
    assert (run.state, run.losses, run.attempt) == (State.SUCCEEDED, 0, 1)


def test_a_body_that_checks_stops_at_the_end_of_the_budget(tmp_path: Path) -> None:
    clocks = Noon()
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:

        @fp.job("job", every="1h")
        def job(run: Run) -> None:
            while True:
                run.check()
                clocks.advance(0.5)

        fp.tick()
        clocks.advance(3600)
        began = clocks.boottime()
        (outcome,) = fp.tick(budget="10s")
        assert (outcome.status, outcome.reason) == ("skipped", "released")
        assert clocks.boottime() - began < 12
        (run,) = fp.runs("job")
    assert (run.state, run.releases, run.losses, run.key.slot) == (
        State.PENDING,
        1,
        0,
        NOON + 3600,
    )


def test_a_coroutine_is_cancelled_at_the_end_of_the_budget_and_goes_on_later(
    tmp_path: Path,
) -> None:
    async def main() -> Any:
        clocks, taken = Noon(), []
        async with AsyncFencepost(url_of(tmp_path), clocks=clocks) as fp:

            @fp.job("job", every="1h")
            async def job(run: AsyncRun) -> None:
                taken.append(run.checkpoint)
                if run.checkpoint is None:
                    await run.save(1)
                    await asyncio.sleep(30)

            await fp.tick()
            clocks.advance(3600)
            began = time.monotonic()
            await fp.tick(budget="300ms")
            took = time.monotonic() - began
            await fp.tick()
            return taken, took, await fp.runs("job")

    taken, took, (run,) = asyncio.run(main())
    assert taken == [None, 1]
    assert took < 5
    assert (run.state, run.losses, run.releases) == (State.SUCCEEDED, 0, 1)


@pytest.mark.parametrize("catchup", ["latest", "all", "none"])
def test_both_colours_decide_alike(tmp_path: Path, catchup: str) -> None:
    words: dict[str, Any] = {"every": "1m", "catchup": catchup, "catchup_limit": 5}

    def blocking() -> list[Any]:
        clocks = Noon()
        (tmp_path / "one").mkdir()
        with Fencepost(url_of(tmp_path / "one"), clocks=clocks) as fp:
            fp.job("job", **words)(lambda: None)
            fp.tick()
            clocks.advance(7200)
            fp.tick()
            slots = fp.slots("job")
            return [[run.key for run in slots.runs], [record.span for record in slots.spans]]

    async def aio() -> list[Any]:
        clocks = Noon()
        (tmp_path / "two").mkdir()
        async with AsyncFencepost(url_of(tmp_path / "two"), clocks=clocks) as fp:
            fp.job("job", **words)(lambda: None)
            await fp.tick()
            clocks.advance(7200)
            await fp.tick()
            slots = await fp.slots("job")
            return [[run.key for run in slots.runs], [record.span for record in slots.spans]]

    first = blocking()
    assert first == asyncio.run(aio())
    assert len(first[0]) == {"latest": 1, "all": 5, "none": 1}[catchup]
    assert len(first[1]) == 1


def test_a_command_has_the_lease_that_it_needs_however_short_the_budget(tmp_path: Path) -> None:
    clocks, leases = Noon(), {}
    with Fencepost(url_of(tmp_path), clocks=clocks) as fp:
        fp.command("command", ["true"], every="1m", lease="30s")
        fp.job("plain", every="1m", lease="30s")(lambda: None)
        for job in ("command", "plain"):
            asked = Asked(RunKey(job, NOON), job, "nonce", "schedule", 0, "")
            want = fp._scheduling.serving.want(asked, lease=2.0)
            assert want is not None
            leases[job] = want.policy.lease
    assert leases == {"command": 5.0, "plain": 2.0}
