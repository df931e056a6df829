"""Each real store, each trouble: no two holders at once, tokens in order, no late write let in."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from crowd import Storm
from fencepost.testing.checker import check, relevant
from fencepost.testing.history import table
from proxy import Proxy
from servers import Etcd, MariaDB, MySQL, Postgres, Seaweed, Valkey, ZooKeeper
from servers.objects import KEY, SECRET

if TYPE_CHECKING:
    from pathlib import Path


def address(server: Any) -> str:
    """Return the URL of leases on a server."""
    if isinstance(server, Seaweed):
        return server.url(server.bucket("storms")).replace("timeout=30", "timeout=1")
    if isinstance(server, MariaDB | Postgres):
        return server.database("storms")
    return str(server.url())


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (Postgres, "?advisory=auto"),
        (Postgres, "?advisory=off"),
        (MariaDB, ""),
        (MySQL, ""),
        (Valkey, ""),
        (Etcd, ""),
        (ZooKeeper, "/storms?session=2"),
        (Seaweed, ""),
    ],
)
def test_no_trouble_breaks_a_promise(
    kind: Any, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies cut, half-open connections, kills of server and holders, a stop past the ttl."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with kind.own() as server, Proxy(server.port) as proxy:
        url = address(server).replace(str(server.port), str(proxy.port)) + option
        history = Storm(url, server, proxy, tmp_path, seed=7).rage(rounds=1)
    broken = check(history)
    assert not broken, f"{broken[0]}\n{table(relevant(history, broken[0]))}"
    seen = Counter(event.what for event in history)
    assert seen["granted"] > 6, seen
    assert seen["admitted"] > 20, seen
