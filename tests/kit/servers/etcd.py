"""etcd, one node or three: Debian's, unpacked, else what is installed."""

from __future__ import annotations

import json
import ssl
import tempfile
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from servers.running import Running, free_port
from servers.where import libraries, missing, on_path, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def program() -> Path:
    """Return the server."""
    found = unpacked("usr/bin/etcd") or on_path("etcd")
    if found is None:
        missing("etcd", "etcd-server")
    return found


class Etcd(Running):
    """One node, alone unless it is told of others."""

    name = "n0"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.peer_port = free_port()
        self.members: Mapping[str, int] = {}

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, self.peer_port))
        members = self.members or {self.name: self.peer_port}
        everybody = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in members.items())
        return [
            str(program()),
            *("--name", self.name, "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", everybody, "--initial-cluster-state", "new"),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
        ]

    def environment(self) -> Mapping[str, str]:
        """Return where its libraries are."""
        return libraries()

    def ready(self) -> bool:
        """Say whether it is healthy, which needs a leader."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/health", timeout=2
            ) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False

    def url(self) -> str:
        """Return where fencepost finds it."""
        return f"etcd://127.0.0.1:{self.port}"

    def version(self) -> str:
        """Return which etcd it is."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/version", timeout=5) as answer:
            return str(json.load(answer)["etcdserver"])

    def leads(self) -> bool:
        """Say whether this node is the leader of its cluster."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v3/maintenance/status", data=b"{}", method="POST"
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            told = json.load(answer)
        return bool(told["leader"] == told["header"]["member_id"])


class TlsEtcd(Etcd):
    """One node that shows a certificate."""

    cert: Path
    key: Path

    @classmethod
    @contextmanager
    def own_with(cls, cert: Path, key: Path) -> Iterator[Self]:
        """Run it for as long as the block lasts."""
        cls.cert, cls.key = cert, key
        with cls.own() as server:
            yield server

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        plain, secure = (f"{scheme}://127.0.0.1:{self.port}" for scheme in ("http", "https"))
        words = [secure if word == plain else word for word in super().command()]
        return [*words, "--cert-file", str(self.cert), "--key-file", str(self.key)]

    def ready(self) -> bool:
        """Say whether it is healthy."""
        known = ssl.create_default_context(cafile=str(self.cert))
        try:
            with urllib.request.urlopen(
                f"https://127.0.0.1:{self.port}/health", timeout=2, context=known
            ) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, ValueError):
            return False


class EtcdCluster:
    """Three nodes that agree."""

    def __init__(self, nodes: Sequence[Etcd]) -> None:
        self.nodes = nodes

    @classmethod
    @contextmanager
    def own(cls) -> Iterator[Self]:
        """Run three nodes for as long as the block lasts."""
        nodes = [
            Etcd(Path(tempfile.mkdtemp(prefix=f"fencepost-etcd-{number}-"))) for number in range(3)
        ]
        members = {f"n{number}": node.peer_port for number, node in enumerate(nodes)}
        try:
            for name, node in zip(members, nodes, strict=True):
                node.name, node.members = name, members
                node.launch()
            for node in nodes:
                node.wait_until_ready()
            yield cls(nodes)
        finally:
            for node in nodes:
                node.end()

    def url(self) -> str:
        """Return where fencepost finds all three."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"etcd://{hosts}"

    def leader(self) -> Etcd:
        """Return the node that leads now."""
        for node in self.nodes:
            try:
                if node.leads():
                    return node
            except (urllib.error.URLError, OSError):
                continue
        raise AssertionError("nobody leads")
