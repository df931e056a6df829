"""What a free lock costs on Redis: ``with fp.lock("x"): pass`` beside two raw scripts, one by one.

The floor is redis-py with two EVALSHA: one that takes a key for a while and counts a token, one
that deletes the key if it is ours. Then come the locks of other libraries, which have no token, in
processes of their own. One server writes its log once a second, as most do; the other before it
answers.

    python bench/redis_uncontended.py [--quick]
"""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING

import harness
import lock_peers
import peers
from fencepost import Fencepost

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests", "kit"))
from servers import Valkey
from servers.valkey import EverySecond

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis

TARGET = harness.Target(at_most=1.15)
OURS, FLOOR = "fencepost: with lock", "floor: two raw EVALSHA"
TTL_MS = 30_000
_TAKE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
    return redis.call('INCR', KEYS[2])
end
return 0"""
_GIVE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0"""


def main() -> None:
    quick = "--quick" in sys.argv
    facts = {
        title: compared(title, kind, rounds=8 if quick else 40, per_round=25 if quick else 60)
        for title, kind in {
            "appendfsync everysec": EverySecond,
            "appendfsync always": Valkey,
        }.items()
    }
    harness.result("redis_uncontended", **facts)


def compared(title: str, kind: type[Valkey], *, rounds: int, per_round: int) -> harness.Row:
    with kind.own() as server, server.client() as client, Fencepost(server.url()) as fp:
        sides = {FLOOR: raw(client), OURS: locking(fp)}
        harness.in_turn(sides, rounds=1, per_round=100)
        medians = harness.in_turn(sides, rounds=rounds, per_round=per_round)
        with lock_peers.crews(server.port, (lock_peers.REDIS, peers.LOCKS)) as others:
            beside = lock_peers.compared(sides[OURS], others, rounds=rounds * 2, per_round=8)
    rows: list[harness.Row] = [
        {
            "µs per operation": side,
            "median (quartiles)": harness.Spread.of(value * 1e6 for value in times),
        }
        for side, times in medians.items()
    ]
    harness.table(f"Uncontended: acquire + release, {title}", rows)
    ratio = harness.ratios(medians[OURS], medians[FLOOR])
    print(f"\nratio {ratio}; target {TARGET.judged(ratio.median)}")
    return {
        "ratio": ratio._asdict(),
        "target": TARGET.judged(ratio.median),
        "peers": lock_peers.table(f"Beside other libraries, {title}", beside),
    }


def locking(fp: Fencepost) -> Callable[[], None]:
    def operation() -> None:
        with fp.lock("x"):
            pass

    return operation


def raw(client: redis.Redis) -> Callable[[], None]:
    take, give = client.script_load(_TAKE), client.script_load(_GIVE)

    def operation() -> None:
        nonce = secrets.token_hex(16)
        assert client.evalsha(take, 2, "raw", "raw:token", nonce, TTL_MS)
        assert client.evalsha(give, 1, "raw", nonce)

    return operation


if __name__ == "__main__":
    main()
