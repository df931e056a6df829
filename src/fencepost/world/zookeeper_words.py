"""Four letter words, which a ZooKeeper server answers to anybody, without a session.

So they tell what is the matter with one that gives no session: it has lost the others.
"""

from __future__ import annotations

import socket
import time

_EACH = 1.0  # seconds; a word is answered at once or not at all
_NOT_SERVING = "not currently serving"
_READ_ONLY = "Mode: read-only"
_WHY = {
    _READ_ONLY: "is read-only, for it has lost the quorum",
    _NOT_SERVING: "serves nobody, for it has lost the quorum",
}


def said(server: str, word: str) -> str | None:
    """Return the answer of ``host:port``; None if nobody is there, empty if it says nothing."""
    host, _, port = server.rpartition(":")
    try:
        wire = socket.create_connection((host.strip("[]"), int(port)), _EACH)
    except OSError:
        return None
    answer = b""
    try:
        with wire:
            wire.sendall(word.encode())
            while some := wire.recv(65_536):
                answer += some
    except OSError:
        return ""
    return answer.decode(errors="replace")


def trouble(server: str) -> str | None:
    """Say why this server gives no session to those who write; None if it does, or may."""
    answer = said(server, "srvr")
    if answer is None:
        return "does not answer"
    return next((why for sign, why in _WHY.items() if sign in answer), None)


def lost_quorum(hosts: str, *, within: float) -> str | None:
    """Say which of the servers is there and has lost the others; None if none says so."""
    end = time.monotonic() + within
    for server in hosts.split(","):
        why = trouble(server)
        if why in _WHY.values():
            return f"{server} {why}"
        if time.monotonic() > end:
            break
    return None
