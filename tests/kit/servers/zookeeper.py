"""ZooKeeper: Debian's, unpacked, in the machine's Java."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from servers.running import Running
from servers.where import UNPACKED, missing, on_path, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

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
"""


class ZooKeeper(Running):
    """One server that keeps sessions of 0.4 to 4 seconds."""

    def prepare(self) -> None:
        """Write its settings."""
        (self.folder / "data").mkdir()
        text = _SETTINGS.format(folder=self.folder, port=self.port)
        (self.folder / "zoo.cfg").write_text(text)

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        java, jar = on_path("java"), unpacked("usr/share/java/zookeeper.jar")
        if java is None or jar is None:
            missing("ZooKeeper", "zookeeper (and a Java runtime)")
        jvm = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        classes = f"{UNPACKED}/usr/share/java/*"
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return [str(java), *jvm, "-cp", classes, main, str(self.folder / "zoo.cfg")]

    def ready(self) -> bool:
        """Say whether it serves."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as wire:
                wire.sendall(b"srvr")
                return b"Mode:" in wire.recv(4096)
        except OSError:
            return False

    def url(self) -> str:
        """Return where fencepost finds it."""
        return f"zookeeper://127.0.0.1:{self.port}"
