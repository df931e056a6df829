"""ZooKeeper: Debian's, unpacked, in the machine's Java."""

from __future__ import annotations

import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from servers.running import Running, free_port
from servers.where import missing, on_path, packages, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SETTINGS = """\
tickTime=200
initLimit=10
syncLimit=5
dataDir={folder}/data
clientPort={port}
clientPortAddress=127.0.0.1
admin.enableServer=false
4lw.commands.whitelist=*
maxClientCnxns=0
maxSessionTimeout=60000
"""


class ZooKeeper(Running):
    """One server that keeps sessions of 0.4 to 60 seconds."""

    number = 0
    others = ""
    jvm: Sequence[str] = ()  # words for its Java

    def prepare(self) -> None:
        """Write its settings."""
        (self.folder / "data").mkdir()
        text = _SETTINGS.format(folder=self.folder, port=self.port) + self.others
        (self.folder / "zoo.cfg").write_text(text)
        if self.others:
            (self.folder / "data" / "myid").write_text(str(self.number))

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        java, jar = on_path("java"), unpacked("usr/share/java/zookeeper.jar")
        if java is None or jar is None:
            missing("ZooKeeper", "zookeeper (and a Java runtime)")
        jvm = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *self.jvm]
        classes = f"{packages()}/usr/share/java/*"
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return [str(java), *jvm, "-cp", classes, main, str(self.folder / "zoo.cfg")]

    def ready(self) -> bool:
        """Say whether it serves."""
        return "Mode:" in self.says("srvr")

    def leads(self) -> bool:
        """Say whether it is the leader of its ensemble."""
        return "Mode: leader" in self.says("srvr")

    def says(self, word: str) -> str:
        """Return its answer to a four letter word; empty if there is none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as wire:
                wire.sendall(word.encode())
                return wire.recv(4096).decode()
        except OSError:
            return ""

    def url(self) -> str:
        """Return where fencepost finds it."""
        return f"zookeeper://127.0.0.1:{self.port}"


class ReadOnlyZooKeeper(ZooKeeper):
    """One of several that lets others read, should it lose the quorum."""

    jvm = ("-Dreadonlymode.enabled=true",)


class ZooKeeperEnsemble:
    """Three servers that agree."""

    kind = ZooKeeper

    def __init__(self, servers: Sequence[ZooKeeper]) -> None:
        self.servers = servers

    @classmethod
    @contextmanager
    def own(cls) -> Iterator[Self]:
        """Run three servers for as long as the block lasts."""
        servers = [
            cls.kind(Path(tempfile.mkdtemp(prefix=f"fencepost-zookeeper-{number}-")))
            for number in (1, 2, 3)
        ]
        lines = [f"server.{number}=127.0.0.1:{free_port()}:{free_port()}\n" for number in (1, 2, 3)]
        try:
            for number, server in enumerate(servers, start=1):
                server.number, server.others = number, "".join(lines)
                server.prepare()
                server.launch()
            for server in servers:
                server.wait_until_ready()
            yield cls(servers)
        finally:
            for server in servers:
                server.end()

    def url(self) -> str:
        """Return where fencepost finds all three."""
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in self.servers)
        return f"zookeeper://{hosts}"

    def leader(self) -> ZooKeeper:
        """Return the server that leads now."""
        for server in self.servers:
            if server.leads():
                return server
        raise AssertionError("nobody leads")
