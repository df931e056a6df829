"""A run on PostgreSQL is taken over soon after its process died, and never while it believes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest
from ledgerlab import DONE, attempt_of, wanted
from run_believer_program import SLOT

from fencepost import Fencepost, Run
from fencepost.ledger.api import NOTHING
from fencepost.ledger.planning import Ask, End
from fencepost.model.policy import Policy
from fencepost.model.slot import RunKey
from fencepost.stores.postgres_runs import PROVE_PULSE
from fencepost.world.clocks import SystemClocks
from fencepost.world.flow import finish
from fencepost.world.postgres_pulse import GRACE
from pglab import fresh_namespace, opened_postgres
from proxy import Proxy
from servers import PgBouncer, Postgres, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fencepost.ledger.api import Attempt
    from fencepost.ledger.postgres import PostgresLedger

PROGRAM = Path(__file__).with_name("run_believer_program.py")
boottime = SystemClocks().boottime
RUN = f"job@{SLOT}"
# What a busy machine may add to the time that a take-over needs.
BUSY = 1.5


class Believer:
    """A process that has a run."""

    def __init__(
        self, url: str, space: str, what: str = "believe", *, lease: str = "10m", marks: str = "-"
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), url, space, what, lease, marks],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.token = 0
        if what != "apart":
            word, token = self.words()
            assert word == "began"
            self.token = int(token)

    def words(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def last_belief(self) -> float:
        word, instant, *_ = self.words()
        assert word == "lost"
        return float(instant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


class Successor:
    """Somebody else who knows the job, and notes when it was granted which token."""

    def __init__(self, url: str, space: str) -> None:
        self.fp = Fencepost(url, namespace=space)
        self.grants: list[tuple[float, int]] = []

        @self.fp.job(name="job", lease="10m", overlap="reschedule")
        def job(run: Run) -> None:
            self.grants.append((boottime(), run.token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.fp.close()

    def follow(self, *, wait: str = "20s") -> float:
        """Take the run over; return when it was ours."""
        while not self.grants:
            self.fp.trigger("job", slot=SLOT, wait=wait)
        return self.grants[0][0]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Take over as a scheduler does."""
        thread = threading.Thread(target=lambda: self.fp.run(signals=False))
        thread.start()
        try:
            yield
        finally:
            self.fp.stop()
            thread.join()


@pytest.fixture
def space() -> str:
    return f"{fresh_namespace()}-{time.time_ns()}"


def until(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def losses(server: Postgres, space: str, job: str = "job") -> int:
    query = "SELECT losses FROM fencepost_run WHERE namespace = '{}' AND job = '{}'"
    ((count,),) = server.run(query.format(space, job))
    assert isinstance(count, int)
    return count


def grace_of(space: str, server: Postgres) -> float:
    """Return how long others wait: on a machine that is short of time it may be longer."""
    rows = server.run(f"SELECT max(grace_us) FROM fencepost_lease WHERE namespace = '{space}'")
    ((grace_us,),) = rows
    assert isinstance(grace_us, int)
    return grace_us / 1e6


# Who died.


def test_the_run_of_a_killed_process_is_taken_over_by_whoever_triggers_it(space: str) -> None:
    server = shared(Postgres)
    with Successor(server.url(), space) as successor, Believer(server.url(), space) as holder:
        assert successor.fp.trigger("job", slot=SLOT).holder  # it is alive
        holder.signal(signal.SIGKILL)
        holder.process.wait()
        began, grace = boottime(), grace_of(space, server)
        followed = successor.follow()
        assert grace < followed - began < grace + BUSY
        assert successor.grants[0][1] > holder.token
        assert losses(server, space) == 1


def test_the_run_of_a_killed_process_is_taken_over_by_who_schedules(space: str) -> None:
    server = shared(Postgres)
    with ExitStack() as stack:
        holder = stack.enter_context(Believer(server.url(), space))
        successor = stack.enter_context(Successor(server.url(), space))
        stack.enter_context(successor.serving())
        time.sleep(1.2)  # until it has seen who has runs
        holder.signal(signal.SIGKILL)
        began, grace = boottime(), grace_of(space, server)
        until(lambda: successor.grants)
        followed, token = successor.grants[0]
        assert grace < followed - began < grace + BUSY
        assert token > holder.token
        assert losses(server, space) == 1


def test_behind_a_pooler_it_is_taken_over_at_the_end_of_its_lease(space: str) -> None:
    pooler = shared(PgBouncer.before(shared(Postgres).port))
    with Successor(pooler.url(), space) as successor:
        with Believer(pooler.url(), space, lease="3s") as holder:
            holder.signal(signal.SIGKILL)
            began = boottime()
            followed = successor.follow()
        assert 0.5 < followed - began < 3 + BUSY


def test_a_run_that_was_handed_over_outlives_its_dispatcher(space: str) -> None:
    server = shared(Postgres)
    with Successor(server.url(), space) as successor:
        with Believer(server.url(), space, "hand_over") as holder:
            assert holder.words() == ["handed"]
        time.sleep(GRACE * 2)
        assert successor.fp.trigger("job", slot=SLOT).status == "skipped"
        assert not successor.grants
        ended = successor.fp.complete(RUN, token=holder.token, status="succeeded")
        assert ended.status == "succeeded"


# Who did not.


def test_a_process_whose_sessions_are_cut_keeps_its_run(space: str) -> None:
    with Postgres.own() as server, ExitStack() as stack:
        holder = stack.enter_context(Believer(server.url(), space))
        for _ in range(3):
            assert server.terminate() >= 1
            time.sleep(GRACE / 2)
        successor = stack.enter_context(Successor(server.url(), space))
        assert successor.fp.trigger("job", slot=SLOT).token == holder.token
        assert holder.process.poll() is None


def test_a_process_that_was_stopped_for_a_while_keeps_its_run(space: str) -> None:
    """Its session lives: nobody could have taken it, and a proof tells so before it goes on."""
    server = shared(Postgres)
    with Successor(server.url(), space) as successor, Believer(server.url(), space) as holder:
        holder.signal(signal.SIGSTOP)
        time.sleep(1.0)
        assert successor.fp.trigger("job", slot=SLOT).token == holder.token
        holder.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert holder.process.poll() is None
        assert successor.fp.trigger("job", slot=SLOT).token == holder.token


def test_a_process_that_is_stopped_and_cut_off_believes_no_more_when_it_is_followed(
    space: str,
) -> None:
    with Postgres.own() as server, ExitStack() as stack:
        holder = stack.enter_context(Believer(server.url(), space))
        successor = stack.enter_context(Successor(server.url(), space))
        successor.fp.trigger("job", slot=SLOT)
        holder.signal(signal.SIGSTOP)
        assert server.terminate() >= 1
        followed = successor.follow()
        holder.signal(signal.SIGCONT)
        assert holder.last_belief() < followed


@pytest.mark.parametrize("mode", ["refuse", "hole"])
def test_a_process_that_cannot_reach_the_server_believes_no_more_when_it_is_followed(
    space: str, mode: str
) -> None:
    server = shared(Postgres)
    with Proxy(server.port) as proxy, ExitStack() as stack:
        through = server.url().replace(str(server.port), str(proxy.port))
        holder = stack.enter_context(Believer(through, space, lease="6s"))
        successor = stack.enter_context(Successor(server.url(), space))
        proxy.mode = mode
        if mode == "refuse":
            proxy.reset()
        followed = successor.follow()
        assert holder.last_belief() < followed


def test_after_a_restart_of_the_server_runs_go_on(space: str) -> None:
    with Postgres.own() as server, Believer(server.url(), space) as holder:
        server.restart()
        with Successor(server.url(), space) as successor:
            assert successor.fp.trigger("job", slot=SLOT).token == holder.token
            time.sleep(1.0)
            assert successor.fp.trigger("job", slot=SLOT).token == holder.token
        assert holder.process.poll() is None


# What runs under guard.


def marks_in(path: Path) -> list[tuple[float, int]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), int(token)) for at, token in (line.split() for line in lines[:-1])]


@pytest.mark.parametrize("how", ["killed", "stopped and cut off"])
def test_an_isolated_body_never_acts_beside_its_successor(
    space: str, how: str, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    with Postgres.own() as server, ExitStack() as stack:
        holder = stack.enter_context(Believer(server.url(), space, "apart", marks=str(marks)))
        until(lambda: len(marks_in(marks)) > 10)
        fp = stack.enter_context(Fencepost(server.url(), namespace=space))
        grants: list[float] = []

        @fp.job(name="apart", lease="10m")
        def apart(run: Run) -> None:
            grants.append(boottime())

        began = boottime()
        if how == "killed":
            holder.signal(signal.SIGKILL)
        else:
            holder.signal(signal.SIGSTOP)
            server.terminate()
        while not grants:
            fp.trigger("apart", slot=SLOT, wait="20s")
        assert grants[0] - began < grace_of(space, server) + BUSY
        time.sleep(0.3)
        last, _ = marks_in(marks)[-1]
        assert last < grants[0]


def test_a_body_that_stood_still_goes_on_once_it_is_known_to_be_its_turn(
    space: str, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    server = shared(Postgres)
    with Believer(server.url(), space, "apart", marks=str(marks)) as holder:
        until(lambda: len(marks_in(marks)) > 10)
        holder.signal(signal.SIGSTOP)
        time.sleep(1.0)
        stood = marks_in(marks)[-1]
        time.sleep(0.1)
        assert marks_in(marks)[-1] == stood
        holder.signal(signal.SIGCONT)
        until(lambda: marks_in(marks)[-1][0] > stood[0] + 0.5)
        assert marks_in(marks)[-1][1] == stood[1]
        assert losses(server, space, "apart") == 0


def test_the_command_of_a_killed_wrapper_never_acts_beside_its_successor(
    space: str, tmp_path: Path
) -> None:
    marks, server = tmp_path / "marks", shared(Postgres)
    loop = f"while :; do cut -d' ' -f1 /proc/uptime >> {marks}; sleep 0.01; done"
    program = os.path.join(os.path.dirname(sys.executable), "fencepost")
    words = [program, "exec", "job", "--slot", SLOT, "--ttl", "10m"]
    words += ["--url", server.url(), "--namespace", space, "--", "sh", "-c", loop]
    with subprocess.Popen(words) as wrapper:
        until(lambda: marks.exists() and marks.read_text())
        with Successor(server.url(), space) as successor:
            wrapper.kill()
            began, grace = boottime(), grace_of(space, server)
            followed = successor.follow()
        assert followed - began < grace + BUSY
    last = float(marks.read_text().split()[-1])
    assert last < followed


# What it costs, and what it takes.


@pytest.fixture
def ledger(space: str) -> Iterator[PostgresLedger]:
    """Return a ledger whose pulse no other test shares."""
    ledger = opened_postgres(f"{shared(Postgres).url()}?application_name={space}", namespace=space)
    yield ledger
    finish(ledger.close())


def leaning(ledger: PostgresLedger, count: int) -> list[Attempt]:
    policy = Policy(lease=600.0)
    claims = [
        finish(ledger.claim(wanted(RunKey(f"job {n}", 1), f"{n}", policy))) for n in range(count)
    ]
    assert all(claimed.grant is not None and claimed.grant.lean for claimed in claims)
    return [attempt_of(claimed) for claimed in claims]


def test_one_statement_proves_all_runs_of_a_process(
    ledger: PostgresLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaning(ledger, 30)
    vouching, store = ledger.leases.pulse_here.vouching, ledger.leases
    before = boottime()
    asked = []
    ask = store.db.ask

    def counted(statement: object, *args: object, **words: object) -> object:
        asked.append(statement)
        return ask(statement, *args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(store.db, "ask", counted)
    vouching.prove_at = 0.0
    finish(store.vouch())
    assert asked == [PROVE_PULSE]
    assert all(run.proven >= before for run in vouching.leans.values())
    finish(store.vouch())
    assert asked == [PROVE_PULSE]  # it is not time yet


def test_who_is_late_to_prove_itself_has_more_grace_before_it_believes_for_longer(
    ledger: PostgresLedger,
) -> None:
    (attempt,) = leaning(ledger, 1)
    store, (run,) = ledger.leases, ledger.leases.pulse_here.vouching.leans.values()
    run.proven -= GRACE * 0.9  # as if the machine was short of time
    store.pulse_here.vouching.prove_at = 0.0
    finish(store.vouch())
    assert run.grace > GRACE * 2
    assert run.grace == pytest.approx(grace_of(ledger.namespace, shared(Postgres)))
    assert finish(ledger.beat(attempt, ttl=600.0)) is False


def test_a_pulse_that_was_lost_is_another_one_before_anybody_may_take_the_run(
    ledger: PostgresLedger,
) -> None:
    (attempt,) = leaning(ledger, 1)
    store = ledger.leases
    (run,) = store.pulse_here.vouching.leans.values()
    before = run.on
    store.pulse_here.end(before)
    other = opened_postgres(shared(Postgres).url(), namespace=ledger.namespace)
    store.pulse_here.vouching.prove_at = 0.0
    finish(store.vouch())
    assert run.on not in (0, before)
    busy = finish(other.claim(wanted(attempt.key, "other")))
    assert busy.grant is None
    assert busy.holder is not None
    finish(other.close())


def test_who_finds_a_silent_pulse_takes_nothing_before_the_grace_is_over(
    ledger: PostgresLedger,
) -> None:
    (attempt,) = leaning(ledger, 1)
    here = ledger.leases.pulse_here
    here.vouching.leans.clear()
    here.end(here.key)  # as if its process had died
    other = opened_postgres(shared(Postgres).url(), namespace=ledger.namespace)
    began = boottime()
    claimed = finish(other.claim(wanted(attempt.key, "other", Policy(lease=600.0))))
    assert claimed.grant is not None
    assert claimed.grant.token > attempt.token
    assert boottime() - began > GRACE
    assert claimed.run is not None
    assert claimed.run.losses == 1
    finish(other.close())


def test_what_has_ended_or_was_given_back_leans_on_nothing(ledger: PostgresLedger) -> None:
    attempts = leaning(ledger, 3)
    runs = ledger.leases.pulse_here.vouching.leans
    assert set(runs) == {attempt.nonce for attempt in attempts}
    finish(ledger.finish(attempts[0], DONE))
    finish(ledger.planner.tick(Ask(lambda _: None, "x", 0, [End(attempts[1], DONE, NOTHING)])))
    finish(ledger.leases.release(attempts[2].lease, nonce=attempts[2].nonce))
    assert not runs
