"""What a free lock costs on etcd: ``with fp.lock("x"): pass`` beside two raw transactions.

The floor is one connection of the standard library that creates a key if it is absent, and deletes
it if it has not changed: no lease, no record, no token. Below it, the requests of one acquire and
release are counted, and what the steps cost that we leave out. Then come the locks of other
libraries, in processes of their own.

    python bench/etcd_uncontended.py [--quick]
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

import harness
import lock_peers
import peers
from fencepost import Fencepost

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tests", "kit"))
from servers import Etcd

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET = harness.Target(at_most=1.45)
OURS, FLOOR = "fencepost: with lock", "floor: two raw transactions"
LEASED = "raw: grant, transaction, revoke"
CYCLES = 100


def main() -> None:
    quick = "--quick" in sys.argv
    with Etcd.own() as server, Fencepost(server.url()) as fp:
        sides = {
            FLOOR: raw_transactions(server.port),
            OURS: locking(fp),
            LEASED: raw_lease(server.port),
        }
        harness.in_turn(sides, rounds=1, per_round=100)
        medians = harness.in_turn(sides, rounds=10 if quick else 40, per_round=20 if quick else 40)
        requests = counted(fp)
        kinds = (lock_peers.ETCD, peers.LOCKS), (lock_peers.ETCD3, peers.ETCD3)
        with lock_peers.crews(server.port, *kinds) as others:
            beside = lock_peers.compared(
                sides[OURS], others, rounds=15 if quick else 60, per_round=8
            )
    ratio = harness.ratios(medians[OURS], medians[FLOOR])
    rows: list[harness.Row] = [
        {"ms per operation": name, "median (quartiles)": harness.Spread.of(ms(times))}
        for name, times in medians.items()
    ]
    harness.table("Uncontended: acquire + release on etcd", rows)
    print(f"\nratio {ratio}; target {TARGET.judged(ratio.median)}")
    print(f"requests of one acquire + release: {requests}")
    harness.result(
        "etcd_uncontended",
        ratio=ratio._asdict(),
        target=TARGET.judged(ratio.median),
        ms={name: harness.Spread.of(ms(times)).median for name, times in medians.items()},
        requests=requests,
        peers=lock_peers.table("Beside other libraries, on etcd", beside),
    )


def locking(fp: Fencepost) -> Callable[[], None]:
    def operation() -> None:
        with fp.lock("x"):
            pass

    return operation


def counted(fp: Fencepost) -> float:
    """Count what was asked of etcd for one acquire and release, on average."""
    door: Any = getattr(fp, "_holding")._store.door  # noqa: B009, SLF001 -- the store is not public
    operation, before = locking(fp), door.asked
    for _ in range(CYCLES):
        operation()
    return float(door.asked - before) / CYCLES


def raw_transactions(port: int) -> Callable[[], None]:
    ask, key = asking(port), b64("c")

    def operation() -> None:
        owner = b64(secrets.token_hex(16))
        absent = {"key": key, "target": "CREATE", "create_revision": 0}
        put = {"request_put": {"key": key, "value": owner}}
        assert ask("/kv/txn", {"compare": [absent], "success": [put]})["succeeded"]
        ours = {"key": key, "target": "VALUE", "value": owner}
        delete = {"request_delete_range": {"key": key}}
        assert ask("/kv/txn", {"compare": [ours], "success": [delete]})["succeeded"]

    return operation


def raw_lease(port: int) -> Callable[[], None]:
    ask, key = asking(port), b64("d")

    def operation() -> None:
        lease = ask("/lease/grant", {"TTL": 30})["ID"]
        absent = {"key": key, "target": "CREATE", "create_revision": 0}
        put = {"request_put": {"key": key, "value": key, "lease": lease}}
        assert ask("/kv/txn", {"compare": [absent], "success": [put]})["succeeded"]
        ask("/lease/revoke", {"ID": lease})

    return operation


def asking(port: int) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json"}

    def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection.request("POST", "/v3" + path, json.dumps(body), headers)
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    return ask


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def ms(seconds: list[float]) -> list[float]:
    return [value * 1e3 for value in seconds]


if __name__ == "__main__":
    main()
