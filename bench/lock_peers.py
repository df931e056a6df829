"""The locks of other libraries, each in its own process: acquire and release, asked by the batch.

A peer answers an order with the seconds of each of its operations; rounds of a few milliseconds
alternate with ours, so noise hits both alike.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import harness
import peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TTL = 30

_SERVE = """
import json, sys, time

port, ttl = int(sys.argv[1]), {ttl}
{program}

for text in sys.stdin:
    times = []
    for _ in range(json.loads(text)["count"]):
        begin = time.perf_counter()
        operation()
        times.append(time.perf_counter() - begin)
    print(json.dumps({{"times": times}}), flush=True)
"""

_TOOZ = """
from tooz import coordination
coordinator = coordination.get_coordinator({url}, b"member")
coordinator.start(start_heart=True)

def operation():
    with coordinator.get_lock(b"tooz"):
        pass
"""

REDIS = {
    "redis-py: Lock": """
import redis
client = redis.Redis(port=port)

def operation():
    with client.lock("redis-py", timeout=ttl):
        pass
""",
    "python-redis-lock": """
import redis, redis_lock
client = redis.Redis(port=port)

def operation():
    with redis_lock.Lock(client, "redis-lock", expire=ttl):
        pass
""",
    "pottery: Redlock": """
import pottery, redis
client = redis.Redis(port=port)

def operation():
    with pottery.Redlock(key="pottery", masters={client}, auto_release_time=ttl):
        pass
""",
    "tooz": _TOOZ.format(url='f"redis://127.0.0.1:{port}"'),
    "sherlock: RedisLock": """
import redis, sherlock
client = redis.Redis(port=port)
sherlock.configure(expire=ttl, timeout=5)

def operation():
    with sherlock.RedisLock("sherlock", client=client):
        pass
""",
}
# An advisory lock of a session: nothing is written, and there is no token. sherlock has none.
POSTGRES = {"tooz": _TOOZ.format(url='f"postgresql://postgres@127.0.0.1:{port}/postgres"')}
ETCD = {"tooz": _TOOZ.format(url='f"etcd3+http://127.0.0.1:{port}?api_version=v3"')}
ETCD3 = {
    "etcd3: Lock": """
import etcd3
client = etcd3.client(port=port)

def operation():
    with client.lock("etcd3", ttl=ttl):
        pass
"""
}


@contextlib.contextmanager
def crews(port: int, *kinds: tuple[dict[str, str], tuple[str, ...]]) -> Iterator[Sides]:
    """Start the peers of some kinds, each with what it requires; those that cannot run are told."""
    sides: Sides = {}
    with contextlib.ExitStack() as after:
        for programs, requirements in kinds:
            python = peers.interpreter(*requirements)
            for name, program in programs.items() if python is not None else ():
                words = [str(python), "-c", _SERVE.format(program=program, ttl=TTL)]
                crew = harness.Crew("", str(port), count=1, words=words)
                try:
                    crew.ask(count=20)
                except RuntimeError as error:
                    print(f"\n{name} cannot be compared with: {str(error)[:200]}")
                    continue
                after.callback(crew.close)
                sides[name] = crew
        yield sides


Sides = dict[str, harness.Crew]


def compared(
    ours: Callable[[], None], sides: Sides, *, rounds: int, per_round: int
) -> dict[str, harness.Spread]:
    """Return how long we take, in parts of what each peer takes."""
    mine: dict[str, list[float]] = {name: [] for name in sides}
    theirs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, crew in sides.items():
            (answer,) = crew.ask(count=per_round)
            theirs[name].append(harness.quantile(sorted(answer["times"]), 0.5))
            mine[name] += harness.in_turn({name: ours}, rounds=1, per_round=per_round)[name]
    return {name: harness.ratios(mine[name], theirs[name]) for name in sides}


def table(title: str, found: dict[str, harness.Spread]) -> harness.Row:
    """Print and return whether we are faster than each peer."""
    target = harness.Target(at_most=1.0)
    if found:
        rows: list[harness.Row] = [
            {"peer": name, "our time in parts of its": spread, "target": target.judged(spread[0])}
            for name, spread in found.items()
        ]
        harness.table(title, rows)
    facts: dict[str, Any] = {name: spread._asdict() for name, spread in found.items()}
    return facts
