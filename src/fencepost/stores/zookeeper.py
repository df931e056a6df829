"""Leases in ZooKeeper: a session vouches for its holder, versions order everything, no clock does.

A lease is an ephemeral lock node and a record that stays, changed together in one transaction. It
ends when its session does. ZooKeeper cannot end it sooner, so others may take it as well once they
saw it stand still for its whole ttl: see docs/decisions/0020-etcd-and-zookeeper.md.
"""

from __future__ import annotations

import json

from fencepost.errors import LeaseLost, OutcomeUnknown, StoreUnavailable, TokenStale
from fencepost.model.divided import in_place_of, is_mark
from fencepost.model.lease import (
    LONGEST_TTL,
    MARK,
    Grant,
    Holder,
    Record,
    Verdict,
    View,
    checked_ttl,
    judge,
    next_token,
    refusal,
    view,
    why_lost,
)
from fencepost.model.name import well_formed
from fencepost.model.named import NamedTuple
from fencepost.stores.api import Capabilities
from fencepost.stores.zookeeper_doctor import examined
from fencepost.stores.zookeeper_line import ZooKeeperPlace
from fencepost.stores.zookeeper_record import ERA, NOW, Paths, Text, agree, record_of, text_of
from fencepost.stores.zookeeper_still import Still
from fencepost.stores.zookeeper_url import read_url
from fencepost.world.zookeeper import Check, Create, Delete, Node, Write, ZooKeeperDoor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.model.symptom import Symptom
    from fencepost.world.api import World

SHORTEST_TTL = 0.5
_LAST_US = 2**53 - 2**50  # the year 2219: a clock beyond it is wrong, and tokens must fit JSON
# Each race that is lost was won by somebody: this many in a row means that something is wrong.
_MOST_RACES = 50
_MOST_OWN = 10_000
_AT_ONCE = 100  # leases that are asked about together


def open_zookeeper(world: World, address: str, *, namespace: str) -> ZooKeeperStore:
    """Open ``zookeeper://[user:password@]host:port[,host:port…][/root][?session=40]``."""
    target = read_url(address)
    door = ZooKeeperDoor(
        world, target.hosts, session=target.session, credentials=target.credentials
    )
    return ZooKeeperStore(world, door, root=target.root, namespace=namespace)


class _Own(NamedTuple):
    """A lease that this object was granted: what its release needs to know."""

    lock: int  # versions
    record: int
    text: Text


class _Found(NamedTuple):
    """The nodes of one lease, read between two instants of our clock."""

    lock: Node | None
    record: Node | None
    before: float
    after: float


class ZooKeeperStore:
    """Leases as nodes of one ensemble."""

    capabilities = Capabilities(
        keeps_time=False,
        durable=True,
        notices_death=False,
        shared=True,
        failover_safe=True,
        fair=False,
        shortest_ttl=SHORTEST_TTL,
        longest_ttl=LONGEST_TTL,
    )

    def __init__(
        self, world: World, door: ZooKeeperDoor, *, root: str, namespace: str = "default"
    ) -> None:
        self._world, self.door, self.namespace = world, door, namespace
        self.paths = Paths(root, namespace)
        self._still = Still()
        self._ready = False
        self._own: dict[str, _Own] = {}
        self._vouched: set[str] = set()  # nonces whose locks go away with our session

    async def acquire(self, name: str, *, holder: Holder, ttl: float) -> Grant:
        """Grant the lease, adopt it, or say who has it."""
        ttl, name = checked_ttl(ttl, shortest=SHORTEST_TTL), well_formed(name)
        return await self._world.call(self._acquire, name, holder, ttl)

    async def renew(self, name: str, *, nonce: str, token: int, ttl: float) -> Grant:
        """Move the end of the lease, if it is still ours."""
        ttl, name = checked_ttl(ttl), well_formed(name)
        return await self._world.call(self._renew, name, nonce, token, ttl)

    async def release(self, name: str, *, nonce: str, token: int | None = None) -> None:
        """Give it back; those who wait see the lock go away."""
        await self._world.call(self._release, well_formed(name), nonce, token)

    async def peek(self, name: str) -> View | None:
        """Return who has it."""
        return await self._world.call(self._peek, well_formed(name))

    async def views(self) -> list[View]:
        """Return every lease of this namespace."""
        return await self._world.call(self._views)

    async def break_(self, name: str, *, token: int, reason: str, operator: str) -> int:
        """Take the lease away and leave a record of it."""
        return await self._world.call(self._break, well_formed(name), token, reason, operator)

    async def line(self, name: str) -> ZooKeeperPlace:
        """Wait by a watch. There is no order: whoever asks first when the lock goes away has it."""
        return ZooKeeperPlace(self._world, self.door, path=self.paths.lock(well_formed(name)))

    async def examine(self) -> list[Symptom]:
        """Say what about this ensemble would break a promise."""
        return await self._world.call(examined, self.door, self.paths)

    def forget(self) -> None:
        """Drop what a fork carried over. The parent's session is the parent's."""
        self.door.forget()
        self._own, self._vouched, self._still = {}, set(), Still()

    async def close(self) -> None:
        """Let go of the session. If leases lean on it, it is left to end by itself."""
        await self._world.call(self._close)

    # What runs behind the door.

    def _acquire(self, name: str, holder: Holder, ttl: float) -> Grant:
        patience = _patience(ttl)
        for _ in range(_MOST_RACES):
            found = self._look(name, timeout=patience)
            record = record_of(lock=found.lock, record=found.record)
            verdict = judge(record, nonce=holder.nonce, now=NOW, era=ERA)
            if record is not None and verdict is Verdict.SPENT:
                raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
            over = record is None or self._stands_still(record, found)
            if record is not None and verdict is Verdict.HELD and not over:
                raise refusal(record, expires_in=record.ttl)
            if record is not None and verdict is Verdict.OURS and not over and found.record:
                adopted = self._adopted(name, record, ttl)
                if adopted is not None:
                    return adopted
                continue
            token = self._next_token(0 if record is None else record.token)
            if record is not None and verdict is Verdict.DIVIDED:
                holder = in_place_of(record.holder, holder)
            text = Text(name, holder, token, self._world.clocks.wall(), ttl)
            grant = self._grant(found, text, timeout=patience)
            if grant is not None:
                return grant
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")

    def _grant(self, found: _Found, text: Text, *, timeout: float) -> Grant | None:
        """Take a lease that was seen to be free; None if somebody else did."""
        session = self.door.session()
        self._make_ready(timeout)
        lock, record = self.paths.lock(text.name), self.paths.record(text.name)
        steps: list[Create | Write | Delete] = []
        if found.lock is not None:
            steps.append(Delete(lock, found.lock.version))
        mark = is_mark(text.holder)  # of permits that other sessions may have
        steps.append(Create(lock, str(text), ephemeral=not mark))
        if found.record is None:
            steps.append(Create(record, str(text)))
        else:
            steps.append(Write(record, str(text), found.record.version))
        if not mark:
            self._vouch(text.holder.nonce)
        if not self.door.commit(*steps, timeout=timeout):
            self._vouched.discard(text.holder.nonce)
            self._ready = False  # somebody may have removed what the nodes stand on
            return None
        if len(self._own) >= _MOST_OWN:
            self._own = {}  # releases of what is still held then read before they write
        version = 0 if found.record is None else found.record.version + 1
        self._own[text.holder.nonce] = _Own(0, version, text)
        return Grant(text.token, min(text.ttl, session.certain))

    def _adopted(self, name: str, record: Record, ttl: float) -> Grant | None:
        """Return again what this nonce was granted; None if it has just ended."""
        try:
            grant = self._renew(name, record.holder.nonce, record.token, ttl)
        except LeaseLost:
            return None
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"granted, and then: {error}") from error
        return grant._replace(adopted=True)

    def _renew(self, name: str, nonce: str, token: int, ttl: float) -> Grant:
        patience, path, kept = _patience(ttl), self.paths.lock(name), self.paths.record(name)
        for _ in range(_MOST_RACES):
            session = self.door.session()
            found = self._look(name, timeout=patience)
            record = record_of(lock=found.lock, record=found.record)
            reason = why_lost(record, nonce=nonce, token=token, now=NOW, era=ERA)
            if reason is None and found.record is None:
                reason = "its record is gone from the store"
            if reason is None and record is not None and self._stands_still(record, found):
                reason = "it ran out before it was renewed"
            if reason is not None or found.record is None:
                self._own.pop(nonce, None)
                self._vouched.discard(nonce)
                raise LeaseLost(name, token=token, reason=str(reason))
            lock = found.lock
            assert lock is not None, "who holds has a lock"
            text = str(text_of(lock)._replace(ttl=ttl))
            mark = nonce.startswith(MARK)
            if not mark:
                self._vouch(nonce)
            # Every lock begins with the same version; the record's says that it is still this one.
            steps: list[Check | Create | Write | Delete]
            if mark or lock.owner == session.id:
                steps = [Check(kept, found.record.version), Write(path, text, lock.version)]
            else:  # another session of ours vouched for it: from now on this one does
                steps = [
                    Write(kept, text, found.record.version),
                    Delete(path, lock.version),
                    Create(path, text, ephemeral=True),
                ]
            if self.door.commit(*steps, timeout=patience):
                return Grant(token, min(ttl, session.certain))
        raise StoreUnavailable(f"lease {name!r} changed too often while it was renewed")

    def _release(self, name: str, nonce: str, token: int | None) -> None:
        own = self._own.pop(nonce, None)
        if own is not None and token in (None, own.text.token):
            steps = Delete(self.paths.lock(name), own.lock), self._ended(own.text, own.record)
            if self.door.commit(*steps, timeout=_patience(LONGEST_TTL)):
                self._vouched.discard(nonce)
                return
        for _ in range(_MOST_RACES):
            found = self._look(name)
            record = record_of(lock=found.lock, record=found.record)
            is_ours = record is not None and record.holder.nonce == nonce
            if record is None or not is_ours or (token is not None and record.token != token):
                self._vouched.discard(nonce)
                reason = why_lost(record, nonce=nonce, token=token or 0, now=NOW, era=ERA)
                raise LeaseLost(name, token=token or 0, reason=str(reason))
            if not record.held or found.record is None:
                self._vouched.discard(nonce)
                return
            ended: list[Write | Delete] = [self._ended(text_of(found.record), found.record.version)]
            if found.lock is not None:
                ended.append(Delete(self.paths.lock(name), found.lock.version))
            if self.door.commit(*ended, timeout=_patience(LONGEST_TTL)):
                self._vouched.discard(nonce)
                return
        raise StoreUnavailable(f"lease {name!r} changed too often while it was released")

    def _ended(self, text: Text, version: int) -> Write:
        path = self.paths.record(text.name)
        return Write(path, str(text._replace(ended="it was released")), version)

    def _break(self, name: str, token: int, reason: str, operator: str) -> int:
        wall, patience = self._world.clocks.wall(), _patience(LONGEST_TTL)
        for _ in range(_MOST_RACES):
            found = self._look(name)
            record = record_of(lock=found.lock, record=found.record)
            if record is None or found.record is None or record.token != token:
                raise TokenStale(name, token=token, highest=0 if record is None else record.token)
            text = text_of(found.record)
            audit = {
                "name": name,
                "token": token,
                "holder": str(text.holder),
                "operator": operator,
                "reason": reason,
                "at": wall,
            }
            broken = text._replace(
                holder=text.holder._replace(nonce=""),
                token=self._next_token(token),
                ended=f"it was broken by {operator}: {reason}",
            )
            steps: list[Create | Write | Delete] = [
                Write(self.paths.record(name), str(broken), found.record.version),
                Create(self.paths.audit(name, token=token), json.dumps(audit)),
            ]
            if found.lock is not None:
                steps.append(Delete(self.paths.lock(name), found.lock.version))
            if self.door.commit(*steps, timeout=patience):
                return broken.token
        raise StoreUnavailable(f"lease {name!r} changed too often while it was broken")

    def _peek(self, name: str) -> View | None:
        found = self._look(name)
        record = record_of(lock=found.lock, record=found.record)
        return None if record is None else self._view(record, found)

    def _views(self) -> list[View]:
        patience, views = _patience(LONGEST_TTL), []
        names = sorted(self.door.children(self.paths.records, timeout=patience))
        for number in range(0, len(names), _AT_ONCE):
            some = names[number : number + _AT_ONCE]
            places = (self.paths.locks, self.paths.records)
            wanted = [f"{place}/{name}" for place in places for name in some]
            before = self._world.clocks.boottime()
            nodes = self.door.look(*wanted, timeout=patience)
            after = self._world.clocks.boottime()
            for lock, kept in zip(nodes[: len(some)], nodes[len(some) :], strict=True):
                record = record_of(lock=lock, record=kept)
                if record is not None:
                    views.append(self._view(record, _Found(lock, kept, before, after)))
        return sorted(views, key=lambda view: view.name)

    def _view(self, record: Record, found: _Found) -> View:
        held = found.lock is not None and not self._stands_still(record, found)
        return view(record, held=held, expires_in=record.ttl, alive=None)

    def _stands_still(self, record: Record, found: _Found) -> bool:
        """Say whether we saw it unchanged for its whole ttl, by our own clock."""
        return record.held and self._still.long_enough(
            record, before=found.before, after=found.after
        )

    def _vouch(self, nonce: str) -> None:
        """Remember that a lock leans on our session: closing must not end it."""
        if len(self._vouched) >= _MOST_OWN:
            self._vouched = {"many"}
        self._vouched.add(nonce)

    def _next_token(self, highest: int) -> int:
        wall_us = int(self._world.clocks.wall() * 1e6)
        return next_token(highest, store_us=wall_us if wall_us < _LAST_US else 0)

    def _look(self, name: str, *, timeout: float = 5.0) -> _Found:
        """Read both nodes, as they were at one time: each is read by itself."""
        clock, wanted = (
            self._world.clocks.boottime,
            (self.paths.lock(name), self.paths.record(name)),
        )
        for _ in range(_MOST_RACES):
            before = clock()
            lock, record = self.door.look(*wanted, timeout=timeout)
            if lock is None or record is None or agree(lock, record):
                return _Found(lock, record, before, clock())
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was looked at")

    def _make_ready(self, timeout: float) -> None:
        """Make the nodes that all others stand on, once."""
        if not self._ready:
            self.door.make(*self.paths.all, timeout=timeout)
            self._ready = True

    def _close(self) -> None:
        self.door.close(keep_session=bool(self._vouched))


def _patience(ttl: float) -> float:
    """Return how long to wait for an answer about a lease: it must come before its end is near."""
    return min(5.0, max(0.5, ttl / 3))
