"""Statements of user code commit with their items and checkpoint, by whoever still has the run."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from ledgerlab import DONE, claimed

from fencepost.errors import LeaseLost, RunLost, StoreUnavailable
from fencepost.ledger.api import NOTHING, Report
from fencepost.model.item import Found, ItemState
from fencepost.model.policy import Overlap, Policy
from fencepost.model.slot import RunKey
from fencepost.world.flow import finish
from joinlab import HOMES, Home, LoggedMariaHome, LoggedMySQLHome, until
from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.draft_joined import Joined
    from fencepost.ledger.draft_ledger import DraftLedger

KEY, DATABASE = RunKey("job", 1_000), "joined"


@pytest.fixture(params=(*HOMES, LoggedMariaHome(), LoggedMySQLHome()), ids=str)
def home(request: pytest.FixtureRequest) -> Home:
    home: Home = request.param
    return home


@pytest.fixture
def url(home: Home) -> str:
    url = home.database(DATABASE)
    home.run("CREATE TABLE IF NOT EXISTS effect (space varchar(100), item integer)", DATABASE)
    return url + home.options


@pytest.fixture
def ledger(home: Home, url: str) -> Iterator[DraftLedger]:
    ledger = home.opened(url, namespace=f"n{time.time_ns()}")
    finish(ledger.jobs())
    yield ledger
    finish(ledger.close())


def begun(ledger: DraftLedger, attempt: Attempt, *, idle: float = 10.0) -> Joined:
    joined = ledger.join(attempt)
    assert joined.begin(idle=idle, longest=0.0) is False
    return joined


def add(joined: Joined, ledger: DraftLedger, item: int) -> None:
    joined.execute("INSERT INTO effect VALUES (%s, %s)", (ledger.namespace, item))


def effects(home: Home, ledger: DraftLedger) -> list[Any]:
    rows = home.run(
        f"SELECT item FROM effect WHERE space = '{ledger.namespace}' ORDER BY item", DATABASE
    )
    return [item for (item,) in rows]


def run_out(home: Home, ledger: DraftLedger) -> None:
    """Have all leases end now, as if their holders had not been heard of for long."""
    home.run(
        f"UPDATE fencepost_lease SET expires_us = 1 WHERE namespace = '{ledger.namespace}'",
        DATABASE,
    )


def told(ledger: DraftLedger, key: RunKey = KEY) -> list[str]:
    return [f"{event.what} {event.detail}".strip() for event in finish(ledger.events(key))]


def test_effect_item_and_checkpoint_are_one(home: Home, ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    assert joined.once("s", "x", call="1", repeat=False) is Found.FIRST
    assert joined.once("s", "x", call="2", repeat=False) is Found.DONE
    add(joined, ledger, 1)
    joined.roll_back()
    assert (effects(home, ledger), finish(ledger.items("s"))) == ([], [])
    joined = begun(ledger, attempt)
    assert joined.once("s", "x", call="3", repeat=False) is Found.FIRST
    add(joined, ledger, 1)
    assert joined.commit('"half"', Report(done=5)) is False
    run = finish(ledger.find(KEY))
    assert run is not None
    assert (effects(home, ledger), run.checkpoint, run.done) == ([1], '"half"', 5)
    assert [item.state for item in finish(ledger.items("s"))] == [ItemState.DONE]
    assert len(home.spare(ledger)) == 1  # kept for the next one


def test_who_lost_its_run_commits_nothing_and_is_on_record(home: Home, ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    assert joined.once("s", "x", call="1", repeat=False) is Found.FIRST
    add(joined, ledger, 1)
    run_out(home, ledger)
    later = claimed(ledger, KEY, "b")  # who takes over does not wait for it
    assert later.token > attempt.token
    with pytest.raises(RunLost):
        joined.commit('"late"', NOTHING)
    assert (effects(home, ledger), finish(ledger.items("s"))) == ([], [])
    assert told(ledger) == ["attempt_lost", "stale_write transaction"]
    run = finish(ledger.find(KEY))
    assert run is not None
    assert run.checkpoint is None
    with pytest.raises(RunLost):
        ledger.join(attempt).begin(idle=10.0, longest=0.0)
    joined = begun(ledger, later)
    finish(ledger.finish(later, DONE))
    with pytest.raises(RunLost):
        joined.once("s", "y", call="1", repeat=False)


def test_who_lost_its_lease_to_another_run_commits_nothing(home: Home, ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    add(joined, ledger, 1)
    run_out(home, ledger)
    home.run(  # by a run of another job under the same lock: our row says nothing of it
        "UPDATE fencepost_lease SET token = token + 1, nonce = 'b' "
        f"WHERE namespace = '{ledger.namespace}'",
        DATABASE,
    )
    with pytest.raises(LeaseLost, match="it ran out"):
        joined.commit(None, NOTHING)
    assert effects(home, ledger) == []


def test_a_lease_that_ended_and_was_not_taken_is_good_for_the_commit_but_not_to_begin(
    home: Home, ledger: DraftLedger
) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    add(joined, ledger, 1)
    run_out(home, ledger)
    joined.commit(None, NOTHING)
    assert effects(home, ledger) == [1]
    late = ledger.join(attempt)
    with pytest.raises(LeaseLost, match="it ran out"):
        late.begin(idle=10.0, longest=0.0)
    late.roll_back()


def test_nobody_waits_for_an_open_transaction(home: Home, ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    assert joined.once("s", "x", call="1", repeat=False) is Found.FIRST
    add(joined, ledger, 1)
    assert finish(ledger.beat(attempt, ttl=30.0, report=Report(done=1))) is False
    finish(ledger.save(attempt, checkpoint="1"))
    finish(ledger.cancel(KEY, force=False, operator="me"))
    assert finish(ledger.beat(attempt, ttl=30.0)) is True
    assert joined.commit("2", NOTHING) is True  # and so it hears of the cancel
    assert effects(home, ledger) == [1]
    again = ledger.join(attempt)
    assert again.begin(idle=10.0, longest=0.0) is True
    again.roll_back()


def test_a_claim_by_force_is_not_overwritten(home: Home, ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a", Policy(overlap=Overlap.ALLOW))
    joined = begun(ledger, attempt)
    add(joined, ledger, 1)
    finish(ledger.cancel(KEY, force=True, operator="me"))
    with pytest.raises(RunLost):
        joined.commit(None, NOTHING)
    assert effects(home, ledger) == []


def test_an_item_that_was_begun_before_is_found_as_it_is_outside(
    home: Home, ledger: DraftLedger
) -> None:
    first = claimed(ledger, KEY, "a")
    finish(ledger.begin(first, scope="s", items=["x", "y", "z"], call="c", repeat=False))
    failed = [("z", ItemState.FAILED, "no")]
    finish(ledger.end(first, scope="s", items=failed))
    joined = begun(ledger, first)
    assert joined.once("s", "x", call="d", repeat=False) is Found.OPEN  # our own, elsewhere
    joined.roll_back()
    run_out(home, ledger)
    second = claimed(ledger, KEY, "b")
    joined = begun(ledger, second)
    assert joined.once("s", "x", call="e", repeat=False) is Found.DOUBT
    assert joined.once("s", "y", call="f", repeat=True) is Found.AGAIN
    assert joined.once("s", "z", call="g", repeat=False) is Found.FIRST
    joined.commit(None, NOTHING)
    states = {item.item: (item.state, item.token) for item in finish(ledger.items("s"))}
    assert states == {
        "x": (ItemState.BEGUN, first.token),
        "y": (ItemState.DONE, second.token),
        "z": (ItemState.DONE, second.token),
    }


def test_what_a_transaction_costs(
    home: Home, ledger: DraftLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(ledger, KEY, "a")
    trips: list[int] = []
    batch = home.asks.batch

    def counted(session: Any, steps: list[Any], **words: Any) -> Any:
        trips.append(len(steps))
        return batch(session, steps, **words)

    for number in range(2):
        monkeypatch.setattr(home.asks, "batch", counted)
        trips.clear()
        joined = begun(ledger, attempt)
        joined.once("s", str(number), call="1", repeat=False)
        joined.commit(str(number), NOTHING)
        monkeypatch.undo()
    assert len(trips) == 3  # one each


def test_who_asks_nothing_for_too_long_is_undone(home: Home, ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt, idle=0.1)
    add(joined, ledger, 1)
    until(lambda: home.is_cut(joined))
    with pytest.raises(StoreUnavailable, match="nothing was committed"):
        joined.commit(None, NOTHING)
    joined = begun(ledger, attempt, idle=0.1)
    add(joined, ledger, 2)
    until(lambda: home.is_cut(joined))
    with pytest.raises(StoreUnavailable, match=r"nothing was committed|idle-in-transaction"):
        joined.once("s", "x", call="1", repeat=False)
    joined.roll_back()
    assert effects(home, ledger) == []


def test_a_commit_whose_reply_was_lost_is_found_out(home: Home, url: str) -> None:
    server = home.server
    with Proxy(server.port) as proxy:
        through = url.replace(str(server.port), str(proxy.port))
        ledger = home.opened(through, namespace=f"lost-{time.time_ns()}")
        attempt = claimed(ledger, KEY, "a")
        begun(ledger, attempt).commit("0", NOTHING)  # from here on everything is prepared
        joined = begun(ledger, attempt)
        add(joined, ledger, 1)
        proxy.lose_replies(0)  # and cut nothing: a server that is cut off may not come to its end
        commit = threading.Thread(target=joined.commit, args=("1", NOTHING))
        commit.start()
        until(lambda: effects(home, ledger) == [1])
        proxy.mode = "pass"
        proxy.reset()
        commit.join()  # and what it raises would be a warning
        joined = begun(ledger, attempt)
        add(joined, ledger, 2)
        proxy.reset()
        with pytest.raises(StoreUnavailable, match="nothing was committed"):
            joined.commit("2", NOTHING)
        begun(ledger, attempt).commit("3", NOTHING)
        assert effects(home, ledger) == [1]
        finish(ledger.close())


def test_a_fork_leaves_its_parents_sessions_alone(home: Home, ledger: DraftLedger) -> None:
    attempt = claimed(ledger, KEY, "a")
    begun(ledger, attempt).commit("1", NOTHING)
    joined = begun(ledger, attempt)
    add(joined, ledger, 1)
    inside = home.session(joined)
    child = os.fork()
    if not child:
        try:
            begun(ledger, attempt).roll_back()  # on one of its own
            finish(ledger.close())
        except BaseException:  # noqa: BLE001 -- nothing of the tests may go on in the child
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    joined.commit("2", NOTHING)
    assert effects(home, ledger) == [1]
    assert home.spare(ledger) == [inside]


def test_a_claim_that_comes_while_the_commit_waits_is_decided_one_way(
    home: Home, ledger: DraftLedger, url: str
) -> None:
    attempt = claimed(ledger, KEY, "a")
    joined = begun(ledger, attempt)
    add(joined, ledger, 1)
    run_out(home, ledger)
    errors: list[BaseException] = []

    def commit() -> None:
        try:
            joined.commit(None, NOTHING)
        except RunLost as error:
            errors.append(error)

    with closing(home.connected(url)) as other:  # a later claim, not yet committed
        other.cursor().execute(
            "UPDATE fencepost_run SET token = token + 1, nonce = 'b' WHERE namespace = %s",
            (ledger.namespace,),
        )
        late = threading.Thread(target=commit)
        late.start()
        until(lambda: home.waits(DATABASE))
        other.commit()
    late.join()
    assert len(errors) == 1
    assert effects(home, ledger) == []
