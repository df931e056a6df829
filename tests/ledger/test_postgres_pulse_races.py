"""What comes between a look at a pulse and the commit, or between a commit and its answer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from ledgerlab import attempt_of, wanted

from fencepost.errors import RunLost
from fencepost.flows.acquire import Granted
from fencepost.flows.keep import Charges, Hold
from fencepost.ledger.planning import Ask
from fencepost.model.ending import Settled
from fencepost.model.lease import Grant
from fencepost.model.policy import OnLoss, Policy
from fencepost.model.run import State
from fencepost.model.slot import RunKey
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from fencepost.world.postgres_pulse import GRACE
from pglab import fresh_namespace, opened_postgres
from proxy import Proxy
from servers import Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.planning import Asked
    from fencepost.ledger.postgres import PostgresLedger
    from fencepost.model.claim import Want
    from fencepost.world.postgres_lean import RunLean

KEY = RunKey("job", 1)
LONG = Policy(lease=600.0)


@pytest.fixture
def space() -> str:
    return f"{fresh_namespace()}-{time.time_ns()}"


@pytest.fixture
def holder(space: str) -> Iterator[PostgresLedger]:
    """Return the ledger of a process that has runs: its pulse is its own."""
    ledger = opened_postgres(f"{shared(Postgres).url()}?application_name={space}", namespace=space)
    yield ledger
    finish(ledger.close())


@pytest.fixture
def other(space: str) -> Iterator[PostgresLedger]:
    """Return the same ledger as another process would have it."""
    name = f"other-{space}"
    ledger = opened_postgres(f"{shared(Postgres).url()}?application_name={name}", namespace=space)
    yield ledger
    finish(ledger.close())


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def claim(ledger: PostgresLedger, policy: Policy = LONG) -> tuple[Attempt, RunLean]:
    claimed = finish(ledger.claim(wanted(KEY, "a", policy)))
    (run,) = ledger.leases.pulse_here.vouching.leans.values()
    return attempt_of(claimed), run


def prove(ledger: PostgresLedger) -> None:
    ledger.leases.pulse_here.vouching.prove_at = 0.0
    finish(ledger.leases.vouch())


def pulse_in_row(space: str) -> int:
    rows = shared(Postgres).run(f"SELECT pulse FROM fencepost_lease WHERE namespace = '{space}'")
    ((pulse,),) = rows
    assert isinstance(pulse, int)
    return pulse


def wants(policy: Policy) -> Callable[[Asked], Want]:
    return lambda asked: wanted(asked.key, asked.nonce, policy)


@pytest.mark.parametrize("is_new", [False, True])
def test_what_was_granted_by_an_answer_that_was_lost_leans_on_the_pulse_of_today(
    holder: PostgresLedger, *, is_new: bool
) -> None:
    """Else nobody would prove it, and others would take it while it is believed in."""
    attempt, _ = claim(holder)
    finish(holder.finish(attempt, Settled(State.PENDING)))  # given back: it waits for anybody
    here = holder.leases.pulse_here
    first = finish(holder.planner.tick(Ask(wants(LONG), "nonce", 5)))
    assert len(first.begun) == 1
    here.vouching.leans.clear()  # nobody ever heard of it
    if is_new:
        here.end(here.key)
    again = finish(holder.planner.tick(Ask(wants(LONG), "nonce", 5, again=1)))
    (begun,) = again.begun
    assert begun.claimed.grant is not None
    assert begun.claimed.grant.token == first.begun[0].claimed.grant.token  # type: ignore[union-attr]
    (run,) = here.vouching.leans.values()
    assert begun.claimed.grant.lean is run
    assert run.on == pulse_in_row(holder.namespace) == here.key != 0


def test_a_run_that_is_found_to_be_ours_after_all_is_not_lost_by_who_looked_before(
    holder: PostgresLedger, other: PostgresLedger
) -> None:
    policy = Policy(lease=600.0, on_loss=OnLoss.FAIL)
    attempt, run = claim(holder, policy)
    here, server = holder.leases.pulse_here, shared(Postgres)
    here.end(here.key)  # its session was cut, and its keeper has no time
    ask = Ask(wants(policy), "other", 5, sweep=True)
    for _ in range(2):
        assert not finish(other.planner.tick(ask)).begun  # it learns of the pulse, and of its end
    assert other.leases.pulse_here.silences.silent()
    time.sleep(GRACE * 1.2)
    with psycopg.connect(server.url()) as conn:
        conn.execute("LOCK TABLE fencepost_run IN SHARE MODE")  # what is decided cannot be written
        looking = threading.Thread(target=lambda: finish(other.planner.tick(ask)))
        looking.start()
        until(lambda: server.run("SELECT 1 FROM pg_locks WHERE NOT granted AND mode ~ 'RowExcl'"))
        prove(holder)
        conn.rollback()
    looking.join()
    found = finish(holder.find(KEY))
    assert found is not None
    believed = run.until() > holder.leases.boottime()
    assert believed == (found.state is State.RUNNING)
    assert finish(holder.beat(attempt, ttl=600.0)) is False


def test_a_run_whose_row_leans_on_nothing_is_known_to_though_that_answer_was_lost(
    holder: PostgresLedger, space: str
) -> None:
    """Else it would be in doubt for ever: its row is renewed, and never leans on anything again."""
    _, run = claim(holder)
    shared(Postgres).run(f"UPDATE fencepost_lease SET pulse = 0 WHERE namespace = '{space}'")
    here = holder.leases.pulse_here
    here.end(here.key)
    prove(holder)
    assert run.on == 0
    assert run.until() == float("inf")


def test_a_keeper_that_sleeps_for_others_is_woken_in_time_to_prove_a_pulse(
    holder: PostgresLedger,
) -> None:
    """Those may lean on nothing, such as alarms that fire in the same process."""
    _, run = claim(holder)
    world, sent = BlockingWorld(), holder.leases.boottime()
    charges = Charges(world)
    for nonce, lean in (("alarm", None), ("a", run)):
        granted = Granted("job", Grant(1, 600.0, lean=lean), sent)
        hold = Hold(granted, nonce=nonce, ttl=600.0, max_hold=None, emit=lambda _: None)
        hold.next_try = sent + (2.0 if lean is None else 200.0)
        charges.add(hold)
    run.end()
    assert charges._wakes <= run.next_try < sent + GRACE


def test_of_many_runs_whose_proofs_are_late_none_that_was_taken_is_believed_in(
    holder: PostgresLedger, other: PostgresLedger
) -> None:
    """One statement lets the others go on; who was lost learns it by a question of its own."""
    keys = [RunKey(f"job {n}", 1) for n in range(100)]
    attempts = [
        attempt_of(finish(holder.claim(wanted(key, f"{n}", LONG)))) for n, key in enumerate(keys)
    ]
    here, boottime = holder.leases.pulse_here, holder.leases.boottime
    here.end(here.key)  # its session was cut, and its keeper has no time
    taken = {attempt.nonce for attempt in attempts[::2]}
    for key in keys[::2]:
        claimed = finish(other.claim(wanted(key, f"other {key.job}", LONG)))
        assert claimed.grant is not None
    assert all(run.until() < boottime() for run in here.vouching.leans.values())
    prove(holder)
    assert {run.nonce for run in here.vouching.leans.values() if run.on != here.key} == taken
    prove(holder)  # and again, while they learn of it one by one
    assert all(here.vouching.leans[nonce].until() < boottime() for nonce in taken)
    for attempt in attempts:
        if attempt.nonce in taken:
            with pytest.raises(RunLost):
                finish(holder.beat(attempt, ttl=600.0))
        else:
            assert finish(holder.beat(attempt, ttl=600.0)) is False


def test_what_lost_its_pulse_when_there_was_none_to_be_had_lasts_for_its_ttl_and_the_next_leans(
    other: PostgresLedger, space: str
) -> None:
    server = shared(Postgres)
    with Proxy(server.port) as proxy:
        through = server.url().replace(str(server.port), str(proxy.port))
        holder = opened_postgres(through, namespace=space)
        attempt, run = claim(holder)
        here = holder.leases.pulse_here
        proxy.mode = "refuse"  # no session more, as when the server has none to give
        here.end(here.key)
        prove(holder)
        assert (run.on, run.until(), pulse_in_row(space)) == (0, float("inf"), 0)
        proxy.mode = "pass"
        until(lambda: here.beat(holder.leases.db))
        prove(holder)
        assert run.on == 0
        assert finish(other.claim(wanted(KEY, "b", LONG))).grant is None
        assert finish(holder.beat(attempt, ttl=600.0)) is False
        following = finish(holder.claim(wanted(RunKey("next", 1), "next", LONG)))
        assert following.grant is not None
        assert following.grant.lean is not None
        finish(holder.close())
