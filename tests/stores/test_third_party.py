"""A store as somebody else would write it: one JSON file, and nothing of fencepost's own stores."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import fencepost
from fencepost.errors import LeaseHeld, LeaseLost, MissingExtra, TokenStale
from fencepost.model.divided import in_place_of, is_mark
from fencepost.model.lease import Grant, Holder, View, checked_ttl
from fencepost.model.name import well_formed
from fencepost.stores.api import Capabilities
from fencepost.testing.conformance import LeaseStoreConformance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import World


class JsonStore:
    """Leases in a JSON file that is rewritten under an exclusive lock."""

    capabilities = Capabilities(
        keeps_time=True,
        durable=True,
        notices_death=False,
        shared=True,
        failover_safe=False,
        fair=False,
        shortest_ttl=1.0,
        longest_ttl=86_400.0,
    )

    def __init__(self, world: World, path: str, *, namespace: str) -> None:
        self._world, self._path, self._namespace = world, path, namespace

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        ttl, key = checked_ttl(ttl), self._key(name)
        with self._leases() as leases:
            lease, now = leases.get(key), self._now()
            if lease and lease["nonce"] == holder.nonce:
                if not lease["held"]:
                    raise LeaseLost(name, token=lease["token"], reason="released before")
                if lease["expires"] > now:
                    lease["expires"] = now + ttl
                    return Grant(lease["token"], ttl, adopted=True)
            if lease and lease["held"] and lease["expires"] > now:
                before = Holder(lease["nonce"], lease["host"], lease["pid"])
                if not (is_mark(before) and is_mark(holder)):
                    raise LeaseHeld(
                        name,
                        holder=str(before),
                        token=lease["token"],
                        expires_in=lease["expires"] - now,
                    )
                holder = in_place_of(before, holder)
            token = self._next(leases)
            leases[key] = {
                "name": well_formed(name),
                "token": token,
                "nonce": holder.nonce,
                "host": holder.host,
                "pid": holder.pid,
                "held": True,
                "expires": now + ttl,
                "since": self._world.clocks.wall(),
                "ended": "",
            }
            return Grant(token, ttl)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        ttl = checked_ttl(ttl)
        with self._leases() as leases:
            lease = self._mine(leases, name, nonce, token)
            if not lease["held"] or lease["expires"] <= self._now():
                raise LeaseLost(name, token=token, reason=lease["ended"] or "it ran out")
            lease["expires"] = self._now() + ttl
            return Grant(token, ttl)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        with self._leases() as leases:
            self._mine(leases, name, nonce, token)["held"] = False

    async def peek(self, name: str) -> View | None:
        with self._leases() as leases:
            lease = leases.get(self._key(name))
            return self._view(lease) if lease else None

    async def views(self) -> list[View]:
        with self._leases() as leases:
            mine = (key for key in sorted(leases) if key.startswith(self._namespace + "/"))
            return [self._view(leases[key]) for key in mine]

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        with self._leases() as leases:
            lease = leases.get(self._key(name))
            if lease is None or lease["token"] != token:
                raise TokenStale(name, token=token, highest=lease["token"] if lease else 0)
            lease.update(token=self._next(leases), nonce="", held=False, ended=reason)
            return int(lease["token"])

    async def line(self, name: str) -> None:
        return None

    def forget(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def _mine(self, leases: Any, name: str, nonce: str, token: int | None) -> Any:
        lease = leases.get(self._key(name))
        if lease is None or lease["nonce"] != nonce or token not in (None, lease["token"]):
            raise LeaseLost(name, token=token or 0, reason=lease["ended"] if lease else "gone")
        return lease

    def _next(self, leases: Any) -> int:
        highest = max((lease["token"] for lease in leases.values()), default=0)
        return max(highest + 1, int(self._world.clocks.wall() * 1e6))

    def _view(self, lease: Any) -> View:
        left = lease["expires"] - self._now()
        held = lease["held"] and left > 0
        holder = Holder(lease["nonce"], lease["host"], lease["pid"])
        return View(
            lease["name"], lease["token"], held, holder, lease["since"], left if held else 0.0
        )

    def _now(self) -> float:
        return self._world.clocks.boottime()

    def _key(self, name: str) -> str:
        return f"{self._namespace}/{well_formed(name)}"

    @contextmanager
    def _leases(self) -> Iterator[dict[str, Any]]:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            leases = json.loads(os.pread(fd, 10_000_000, 0) or b"{}")
            yield leases
            text = json.dumps(leases).encode()
            os.ftruncate(fd, 0)
            os.pwrite(fd, text, 0)
        finally:
            os.close(fd)


def open_json(world: World, address: str, *, namespace: str) -> LeaseStore:
    return JsonStore(world, address, namespace=namespace)


class TestJsonStore(LeaseStoreConformance):
    def open_store(self, world: World, *, place: str, namespace: str) -> LeaseStore:
        return JsonStore(world, f"{place}/leases.json", namespace=namespace)


def test_a_registered_scheme_opens_a_store_of_somebody_elses(tmp_path: Path) -> None:
    fencepost.register_store("json", __name__, opener="open_json")
    with fencepost.Fencepost(f"json://{tmp_path}/leases.json") as fp:
        with fp.lock("a") as lease:
            lease.check()
            assert [view.name for view in fp.locks()] == ["a"]
        assert fp.locks() == []


def test_a_scheme_whose_library_is_missing_names_the_extra_to_install() -> None:
    fencepost.register_store("absent", "fencepost_no_such_module", opener="open", extra="absent")
    with pytest.raises(MissingExtra, match=r"pip install 'fencepost\[absent\]'"):
        fencepost.Fencepost("absent://somewhere")
