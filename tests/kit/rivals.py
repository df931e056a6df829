"""Rivals for one lease through a bad network, and the history of what each of them believed."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Protocol

from fencepost import Fencepost, FencepostError
from fencepost.isolated import believed_until
from fencepost.testing.history import Event
from fencepost.world.clocks import SystemClocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy import Proxy
    from servers import Running

boottime = SystemClocks().boottime


class Trouble(Protocol):
    """What disturbs rivals, ten times a second, until it is calmed."""

    def disturb(self) -> None:
        """Do something, or nothing."""

    def calm(self) -> None:
        """Leave everything as it should be."""


def recorded(
    url: str, trouble: Trouble, *, rivals: int = 4, seconds: float = 6.0, ttl: str = "1s"
) -> list[Event]:
    """Let them compete for as long, in trouble all the while. Return what they believed."""
    history: list[Event] = []
    end = time.monotonic() + seconds

    def compete(number: int) -> None:
        with Fencepost(url) as fp:
            while time.monotonic() < end:
                try:
                    lock = fp.lock("x", ttl=ttl, wait="2s")
                    lease = lock.acquire()
                except FencepostError:
                    continue
                nonce, token = lease.hold.nonce, lease.token
                said = Event(0, "", node=str(number), name="x", holder=nonce, token=token)
                until = min(lease.hold.trust.until, believed_until(lease.hold.lean))
                at = boottime()
                history.append(said._replace(at=at, what="granted", until=until))
                while random.random() < 0.8:
                    # Read before the clock: a renewal or proof in between only makes it longer.
                    until = min(lease.hold.trust.until, believed_until(lease.hold.lean))
                    at = boottime()
                    if at >= until or lease.remaining() <= 0:
                        break
                    history.append(said._replace(at=at, what="renewed", until=until))
                    history.append(said._replace(at=at, what="acted"))
                    time.sleep(random.random() * 0.1)
                history.append(said._replace(at=boottime(), what="released"))
                lock.release(lease)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(rivals)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        trouble.disturb()
        time.sleep(0.1)
    trouble.calm()
    for thread in threads:
        thread.join(60)
    return history


class BadWire:
    """Now and then it loses replies, cuts connections, or lets nothing through."""

    def __init__(self, proxy: Proxy, *, seed: int) -> None:
        self._proxy, self._dice, self._mend_at = proxy, random.Random(seed), 0.0

    def disturb(self) -> None:
        """Mend what is broken for long enough; else perhaps break something."""
        if self._proxy.mode != "pass":
            if time.monotonic() >= self._mend_at:
                self.calm()
        elif self._dice.random() < 0.3:
            what = self._dice.choice(["lose", "reset", "hole", "hole_down", "hole_up"])
            self._mend_at = time.monotonic() + self._dice.choice([0.1, 0.3, 1.0])
            if what == "lose":
                self._proxy.lose_replies()
            elif what == "reset":
                self._proxy.reset()
            else:
                self._proxy.mode = what

    def calm(self) -> None:
        """Let everything through."""
        self._proxy.mode = "pass"
        self._proxy.reset()


class BadServers:
    """One of several servers at a time is stopped for a while, or killed and started again."""

    def __init__(self, servers: Sequence[Running], *, seed: int) -> None:
        self._servers, self._dice = servers, random.Random(seed)
        self._stopped: Running | None = None
        self._mend_at = 0.0

    def disturb(self) -> None:
        """Mend what is broken for long enough; else perhaps break something."""
        if self._stopped is not None:
            if time.monotonic() >= self._mend_at:
                self.calm()
        elif self._dice.random() < 0.2:
            server = self._dice.choice(self._servers)
            if self._dice.random() < 0.3:
                server.kill()
                server.launch()
            else:
                server.pause()
                self._stopped = server
                self._mend_at = time.monotonic() + self._dice.choice([0.3, 1.5, 2.5])

    def calm(self) -> None:
        """Let all go on."""
        if self._stopped is not None:
            self._stopped.go_on()
            self._stopped = None
