"""Eight processes want one lock and hold it for 5 ms each: fencepost beside a raw queue on Redis.

The floor is a list with one element: whoever pops it (BLPOP) is inside, and pushes it back. It
writes a record of who is inside, as fencepost does, in the same step as it pushes and before it
begins: two durable writes for each turn. A second floor writes no record at all, and knows neither
holder nor end; it is shown, not judged. *Greedy* processes ask again at once; *polite* ones first
think for about 5 ms. A side file that every holder locks without waiting tells whether two were
ever inside together. The server writes its log before it answers.

    python bench/redis_contended.py [--quick]
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

import redis

import harness
from fencepost import Fencepost

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests", "kit"))
from servers import Valkey
from servers.valkey import EverySecond

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

PROCESSES, HOLD = 8, 0.005
THINK = {"greedy": 0.0, "polite": 0.005}
FASTER, FAIR = harness.Target(at_least=0.95), harness.Target(at_most=1.3)
OURS, FLOOR, BARE = "fencepost", "floor: BLPOP + record", "BLPOP alone"
_GIVE = """
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return redis.call('RPUSH', KEYS[1], '1')"""


def main() -> None:
    quick = "--quick" in sys.argv
    rounds, seconds = (2, 1.5) if quick else (5, 2.0)
    facts: dict[str, object] = {}
    for title, kind in {"always": Valkey, "everysec": EverySecond}.items():
        with harness.workdir() as folder, kind.own() as server, contextlib.ExitStack() as after:
            crews = {
                side: harness.Crew(__file__, side, folder, str(server.port), count=PROCESSES)
                for side in SIDES
            }
            for side, crew in crews.items():
                after.callback(crew.close)
                if side != OURS:
                    with server.client() as client:
                        client.rpush(side, "1")
                contest(crew, seconds=0.5, think=0.0)
            for mode, think in THINK.items():
                facts[f"{mode} {title}"] = compared(
                    f"{mode} processes, appendfsync {title}",
                    crews,
                    rounds=rounds,
                    seconds=seconds,
                    think=think,
                )
    harness.result("redis_contended", processes=PROCESSES, hold_ms=HOLD * 1e3, **facts)


def compared(
    title: str, crews: dict[str, harness.Crew], *, rounds: int, seconds: float, think: float
) -> harness.Row:
    """Run all sides in turn, print what came of it, and return it."""
    answers: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in crews}
    order = list(crews)
    for _ in range(rounds):
        order.reverse()
        for side in order:
            answers[side].append(contest(crews[side], seconds=seconds, think=think))
    rates = {
        side: [sum(len(member["waits"]) for member in crew) / seconds for crew in rounds_of]
        for side, rounds_of in answers.items()
    }
    ratio, bare = (harness.ratios(rates[OURS], rates[side]) for side in (FLOOR, BARE))
    rows = [summary(side, answers[side], harness.Spread.of(rates[side])) for side in crews]
    harness.table(f"{PROCESSES} {title}, one lock, {HOLD * 1e3:.0f} ms hold", rows)
    worst = max(fairness(crew) for crew in answers[OURS])
    speed, fair = FASTER.judged(ratio.median), FAIR.judged(worst)
    print(f"\nacquisitions: ratio {ratio}; target {speed}; to the queue without a record: {bare}")
    print(f"worst max/min of a round: {harness.shown(worst)}; target {fair}")
    return {
        "ratio": ratio._asdict(),
        "ratio_to_bare": bare._asdict(),
        "speed": speed,
        "fair": fair,
    }


def contest(crew: harness.Crew, *, seconds: float, think: float) -> list[dict[str, Any]]:
    return crew.ask(start=time.monotonic() + 0.1, seconds=seconds, think=think)


def summary(side: str, rounds: list[list[dict[str, Any]]], rate: harness.Spread) -> harness.Row:
    members = [member for crew in rounds for member in crew]
    waits = sorted(wait * 1e3 for member in members for wait in member["waits"])
    gaps = sorted(gap * 1e3 for crew in rounds for gap in between(crew))
    return {
        "side": side,
        "acquired/s": rate,
        "max/min": harness.Spread.of(fairness(crew) for crew in rounds),
        "wait p50 ms": harness.quantile(waits, 0.5),
        "p99": harness.quantile(waits, 0.99),
        "max": waits[-1],
        "gap p50 ms": harness.quantile(gaps, 0.5),
        "gap p90": harness.quantile(gaps, 0.9),
        "cpu ms": sum(member["cpu"] for member in members) / len(waits) * 1e3,
        "overlaps": sum(member["overlaps"] for member in members),
    }


def fairness(crew: list[dict[str, Any]]) -> float:
    """Return how many times as often the luckiest was served as the unluckiest."""
    served = [len(member["waits"]) for member in crew]
    return max(served) / max(1, min(served))


def between(crew: list[dict[str, Any]]) -> list[float]:
    """Return how long nobody was inside, each time."""
    inside = sorted(span for member in crew for span in member["inside"])
    return [entered - left for (_, left), (entered, _) in itertools.pairwise(inside)]


# What a worker does.


def locking(port: int) -> Callable[[], AbstractContextManager[object]]:
    fp = Fencepost(f"redis://127.0.0.1:{port}/0")
    return lambda: fp.lock("x", wait=60)


def queueing(port: int) -> Callable[[], AbstractContextManager[object]]:
    """Pop the one element, write who we are; write that nobody is inside, and push it back."""
    client = redis.Redis(port=port)
    give, name = client.script_load(_GIVE), FLOOR

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        client.blpop([name], 60)
        client.set(f"{name}:record", secrets.token_hex(16), px=30_000)
        try:
            yield
        finally:
            client.evalsha(give, 2, name, f"{name}:record", "nobody", 30_000)

    return lock


def popping(port: int) -> Callable[[], AbstractContextManager[object]]:
    client = redis.Redis(port=port)

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        client.blpop([BARE], 60)
        try:
            yield
        finally:
            client.rpush(BARE, "1")

    return lock


SIDES = {OURS: locking, FLOOR: queueing, BARE: popping}


def worker(side: str, folder: str, port: str) -> None:
    lock = SIDES[side](int(port))
    inside = os.path.join(folder, f"inside-{SIDES[side].__name__}")

    def contend(start: float, seconds: float, think: float) -> harness.Row:
        time.sleep(max(0.0, start - time.monotonic()))
        end, waits, spans, overlaps = start + seconds, [], [], 0
        cpu = harness.cpu_seconds()
        while (asked := time.monotonic()) < end:
            with lock():
                entered = time.monotonic()
                overlaps += not alone(inside)
                left = time.monotonic()
            if entered < end:
                waits.append(entered - asked)
                spans.append((entered, left))
            if think:
                time.sleep(think * random.uniform(0.5, 1.5))
        used = harness.cpu_seconds() - cpu
        return {"waits": waits, "inside": spans, "overlaps": overlaps, "cpu": used}

    harness.serve(contend)


def alone(path: str) -> bool:
    """Hold for a while; say whether nobody else was inside."""
    probe = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        time.sleep(HOLD)
        os.close(probe)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    else:
        main()
