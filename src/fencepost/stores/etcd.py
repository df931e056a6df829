"""Leases in etcd: its leader's clock decides, its revisions order the tokens, a quorum remembers.

A lease is a lock key, which etcd removes when its time is over, and a record that stays. Both are
written in one transaction, which is the whole acquire; a release is another. See
docs/decisions/0020-etcd-and-zookeeper.md.
"""

from __future__ import annotations

import json

from fencepost.errors import LeaseLost, OutcomeUnknown, StoreUnavailable, TokenStale
from fencepost.model.divided import in_place_of
from fencepost.model.lease import (
    LONGEST_TTL,
    Grant,
    Holder,
    Record,
    Verdict,
    View,
    checked_ttl,
    judge,
    refusal,
    view,
    why_lost,
)
from fencepost.model.name import well_formed
from fencepost.model.named import NamedTuple
from fencepost.stores import etcd_txn as txn
from fencepost.stores.api import Capabilities
from fencepost.stores.etcd_base import TokenBase
from fencepost.stores.etcd_doctor import examined
from fencepost.stores.etcd_line import EtcdPlace
from fencepost.stores.etcd_record import (
    ERA,
    NOBODY,
    NOW,
    Keys,
    Text,
    record_of,
    text_of,
    whole_seconds,
)
from fencepost.stores.etcd_spares import Spare, Spares
from fencepost.stores.etcd_url import read_url
from fencepost.world.etcd import Effect, EtcdDoor, EtcdLeaseGone, tls_context

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from fencepost.model.symptom import Symptom
    from fencepost.world.api import World

SHORTEST_TTL = 1.0  # etcd counts in seconds
# Each race that is lost was won by somebody: this many in a row means that something is wrong.
_MOST_RACES = 50
_MOST_OWN = 10_000
_SOON = 0.1
_MOST_TERMS = 2  # elections during one renewal
_MOST_MOVES = 3


def open_etcd(world: World, address: str, *, namespace: str) -> EtcdStore:
    """Open ``etcd://[user:password@]host:port[,host:port…][/prefix]``."""
    target = read_url("etcd", address)
    door = EtcdDoor(world, target.endpoints, credentials=target.credentials)
    return EtcdStore(world, door, prefix=target.prefix, namespace=namespace)


def open_etcds(world: World, address: str, *, namespace: str) -> EtcdStore:
    """Open the same over TLS: ``etcds://…?ca=ca.pem&cert=client.pem&key=client-key.pem``."""
    target = read_url("etcds", address)
    tls = tls_context(ca=target.ca, cert=target.cert, key=target.key)
    door = EtcdDoor(world, target.endpoints, tls=tls, credentials=target.credentials)
    return EtcdStore(world, door, prefix=target.prefix, namespace=namespace)


class _Own(NamedTuple):
    """A lease that this object was granted: what its release needs to know."""

    spare: Spare
    created: int
    text: Text


class _Found(NamedTuple):
    """The keys of one lease, read at one revision."""

    lock: txn.Kv | None
    record: txn.Kv | None
    spent: txn.Kv | None
    base: txn.Kv | None
    term: int


class EtcdStore:
    """Leases as keys of one cluster."""

    capabilities = Capabilities(
        keeps_time=True,
        durable=True,
        notices_death=False,
        shared=True,
        failover_safe=True,
        fair=False,
        shortest_ttl=SHORTEST_TTL,
        longest_ttl=LONGEST_TTL,
    )

    def __init__(
        self, world: World, door: EtcdDoor, *, prefix: str = "fencepost", namespace: str = "default"
    ) -> None:
        self._world, self.door, self.namespace = world, door, namespace
        self.keys = Keys(prefix, namespace)
        self._base = TokenBase(world, door, key=self.keys.base)
        self._spares = Spares(world, door)
        self._own: dict[str, _Own] = {}
        self._leases: dict[str, tuple[str, int]] = {}  # of nonces: etcd's id, and its seconds

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

    async def line(self, name: str) -> EtcdPlace:
        """Wait by a watch. There is no order: whoever asks first when the lock goes away has it."""
        return EtcdPlace(self._world, self.door, key=self.keys.lock(well_formed(name)))

    async def examine(self) -> list[Symptom]:
        """Say what about this cluster would break a promise."""
        return await self._world.call(examined, self.door, self.keys)

    def forget(self) -> None:
        """Drop what a fork carried over. The parent's etcd leases are the parent's."""
        self.door.forget()
        self._spares.forget()
        self._own, self._leases = {}, {}

    async def close(self) -> None:
        """Close the connections. Spare etcd leases end by themselves."""
        await self._world.call(self.door.close)

    # What runs behind the door.

    def _acquire(self, name: str, holder: Holder, ttl: float) -> Grant:
        asked, patience = self._world.clocks.boottime(), _patience(ttl)
        first = False
        for _ in range(_MOST_RACES):
            known = self._base.known(timeout=patience)
            spare, old = self._spare(ttl, asked)
            text = Text(holder, known.base, self._world.clocks.wall(), ttl, spare.seconds)
            wish = self._wish(name, text, spare, first=first)
            try:
                answer = self._txn(wish, effect=Effect.ONCE, timeout=patience)
            except EtcdLeaseGone:
                continue  # it ended early: etcd was restored, or somebody revoked it
            except StoreUnavailable:  # after anything else the spare may have got its key
                self._spares.put_back(old)
                raise
            proven = spare.term in (0, answer.term)
            if answer.done:
                token = known.base + answer.revision
                if not self._base.granted(token, known, wire=answer.wire):
                    self._undo(name, text, answer.revision)
                    continue
                self._remember(_Own(spare if proven else old, answer.revision, text))
                if not proven:
                    return self._certain(self._kept, name, holder.nonce, token, ttl, spare.id)
                return Grant(token, min(ttl, spare.left(asked)))
            self._spares.put_back(spare if proven else old)
            found = _found(answer)
            adopted = self._judged(name, found, holder, ttl)
            if adopted is not None:
                return adopted
            self._base.learn(None if found.base is None else found.base.value)
            first = found.spent is None
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was asked for")

    def _spare(self, ttl: float, asked: float) -> tuple[Spare, Spare]:
        """Return an etcd lease to be used now, and the same as it was known before."""
        patience = _patience(ttl)
        while True:
            old = self._spares.take(whole_seconds(ttl), timeout=patience)
            if old.is_new(asked):
                return old, old
            spare = self._spares.refreshed(old, timeout=patience)
            if spare is not None:
                return spare, old

    def _wish(self, name: str, text: Text, spare: Spare, *, first: bool) -> dict[str, Any]:
        keys = self.keys
        lock, record, spent = keys.lock(name), keys.record(name), keys.spent(name)
        nonce, said = text.holder.nonce, str(text)
        success = [txn.put(lock, said, lease=spare.id), txn.put(record, said)]
        if first:  # nobody was ever granted this name
            unspent = txn.absent(spent)
            success.append(txn.put(spent, NOBODY))
        else:
            unspent = txn.is_not_value(spent, nonce)
        return {
            "compare": [txn.absent(lock), unspent, txn.is_value(keys.base, str(text.base))],
            "success": success,
            "failure": self._gets(name),
        }

    def _undo(self, name: str, text: Text, created: int) -> None:
        """Take back a grant that nobody heard of: its token may have been seen before."""
        done = [txn.delete(self.keys.lock(name))]
        ours = {"compare": self._ours(name, text, created), "success": done}
        try:
            self._txn(ours, effect=Effect.ONCE)
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"granted, and then: {error}") from error

    def _ours(self, name: str, text: Text, created: int) -> list[dict[str, Any]]:
        """Demand that a grant is this one: once etcd was set back, revisions come again."""
        lock, record = self.keys.lock(name), self.keys.record(name)
        return [txn.created(lock, revision=created), txn.is_value(record, str(text))]

    def _remember(self, own: _Own) -> None:
        if len(self._own) >= _MOST_OWN:
            self._own = {}  # releases of what is still held then read before they write
        nonce = own.text.holder.nonce
        self._own[nonce] = own
        self._note(nonce, own.spare.id, own.spare.seconds)

    def _note(self, nonce: str, lease: str, seconds: int) -> None:
        if len(self._leases) >= _MOST_OWN:
            self._leases = {}  # renewals then read before they write
        self._leases[nonce] = lease, seconds

    def _certain(self, work: Callable[..., Grant], *args: object) -> Grant:
        """Do what comes after a grant: if that fails, the lease may well be ours."""
        try:
            return work(*args)
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"granted, and then: {error}") from error

    def _judged(self, name: str, found: _Found, holder: Holder, ttl: float) -> Grant | None:
        """Adopt what this nonce was granted, or refuse; None if it looks free."""
        record = record_of(name, lock=found.lock, record=found.record)
        verdict = judge(record, nonce=holder.nonce, now=NOW, era=ERA)
        if record is None or verdict is Verdict.FREE:
            return None
        if verdict is Verdict.SPENT:
            raise LeaseLost(name, token=record.token, reason="this nonce has given it back")
        assert found.lock is not None, "who holds has a lock"
        if verdict is Verdict.OURS:
            try:
                grant = self._certain(self._renew, name, holder.nonce, record.token, ttl)
            except LeaseLost:
                return None  # it has just ended
            return grant._replace(adopted=True)
        if verdict is Verdict.DIVIDED:
            return self._in_place(found, record, holder, ttl)
        # It may have ended by now, or be overdue: then it is soon gone.
        raise refusal(record, expires_in=max(_SOON, self._spares.left(found.lock.lease)))

    def _in_place(self, found: _Found, before: Record, holder: Holder, ttl: float) -> Grant | None:
        """Put a mark in the place of another one; None if that has changed meanwhile.

        The lock's revision of creation stays, so the token is said: each such step has a revision
        of its own, so it is below the token of every later grant.
        """
        lock, patience, seconds = found.lock, _patience(ttl), whole_seconds(ttl)
        assert lock is not None, "who holds has a lock"
        token, old, lease = before.token + 1, text_of(lock.value), lock.lease
        if old.seconds != seconds or self._spares.keep_alive(lease, timeout=patience).seconds <= 0:
            lease = self._spares.grant(seconds, timeout=patience).id
        mark, since = in_place_of(before.holder, holder), self._world.clocks.wall()
        text = str(Text(mark, old.base, since, ttl, seconds, token))
        record = self.keys.record(before.name)
        seen = {lock.key: lock.changed, record: found.record.changed if found.record else 0}
        words = {
            "compare": [txn.changed(key, revision=revision) for key, revision in seen.items()],
            "success": [txn.put(lock.key, text, lease=lease), txn.put(record, text)],
        }
        try:
            return Grant(token, ttl) if self._txn(words, effect=Effect.ONCE).done else None
        except EtcdLeaseGone:
            return None  # it ended before it was used

    def _renew(self, name: str, nonce: str, token: int, ttl: float) -> Grant:
        seconds, patience = whole_seconds(ttl), _patience(ttl)
        lease, length = self._leases.get(nonce, ("", 0))
        if length == seconds:
            return self._kept(name, nonce, token, ttl, lease)
        for _ in range(_MOST_MOVES):
            lock = self._held(name, nonce, token, timeout=patience).lock
            assert lock is not None, "who holds has a lock"
            if text_of(lock.value).seconds == seconds:
                self._note(nonce, lock.lease, seconds)
                return self._kept(name, nonce, token, ttl, lock.lease)
            spare = self._moved(lock, ttl)
            if spare is not None:
                self._note(nonce, spare.id, seconds)
                return Grant(token, min(ttl, spare.granted))
        raise StoreUnavailable(f"lease {name!r} could not be moved to another etcd lease in time")

    def _moved(self, lock: txn.Kv, ttl: float) -> Spare | None:
        """Move a lock to an etcd lease of another length; None if it has changed meanwhile.

        The revision in which it came to be stays.
        """
        seconds, patience = whole_seconds(ttl), _patience(ttl)
        spare = self._spares.grant(seconds, timeout=patience)
        text = text_of(lock.value)._replace(ttl=ttl, seconds=seconds)
        words = {
            "compare": [
                txn.created(lock.key, revision=lock.created),
                txn.changed(lock.key, revision=lock.changed),
            ],
            "success": [txn.put(lock.key, str(text), lease=spare.id)],
        }
        try:
            if self._txn(words, effect=Effect.ONCE, timeout=patience).done:
                return spare
        except EtcdLeaseGone:
            return None  # it ended before it was used: we were stopped, or somebody revoked it
        self._spares.put_back(spare)
        return None

    def _kept(self, name: str, nonce: str, token: int, ttl: float, lease: str) -> Grant:
        """Keep the etcd lease alive, then see that the lock is ours, in the same term."""
        patience = _patience(ttl)
        for _ in range(_MOST_TERMS):
            kept = self._spares.keep_alive(lease, timeout=patience)
            found = self._held(name, nonce, token, timeout=patience)
            assert found.lock is not None, "who holds has a lock"
            if found.lock.lease != lease:  # another object of ours has moved it
                lease = found.lock.lease
                self._note(nonce, lease, text_of(found.lock.value).seconds)
            elif kept.seconds > 0 and kept.term == found.term:
                return Grant(token, min(ttl, kept.seconds))
        raise OutcomeUnknown(
            f"lease {name!r} could not be confirmed: {self.door.where} changes its leader"
        )

    def _held(self, name: str, nonce: str, token: int, *, timeout: float) -> _Found:
        """Return the keys of a lease that is ours, or say why it is not."""
        found = self._look(name, timeout=timeout)
        record = record_of(name, lock=found.lock, record=found.record)
        reason = why_lost(record, nonce=nonce, token=token, now=NOW, era=ERA)
        if reason is not None:
            self._leases.pop(nonce, None)
            raise LeaseLost(name, token=token, reason=reason)
        return found

    def _release(self, name: str, nonce: str, token: int | None) -> None:
        own = self._own.pop(nonce, None)
        self._leases.pop(nonce, None)
        lock = self.keys.lock(name)
        if own is not None:
            ours = self._ours(name, own.text, own.created)
            held = own.text.base + own.created
            if token in (None, held) and self._end(name, own.text, held, ours):
                self._spares.put_back(own.spare)
                return
        for _ in range(_MOST_RACES):
            found = self._look(name)
            record = record_of(name, lock=found.lock, record=found.record)
            is_ours = record is not None and record.holder.nonce == nonce
            if record is None or not is_ours or (token is not None and record.token != token):
                reason = why_lost(record, nonce=nonce, token=token or 0, now=NOW, era=ERA)
                raise LeaseLost(name, token=token or 0, reason=str(reason))
            if not record.held:
                return
            kv = found.lock or found.record
            assert kv is not None, "what is known was read"
            ours = [txn.created(lock, revision=0 if found.lock is None else found.lock.created)]
            if found.record is not None:
                ours.append(txn.changed(found.record.key, revision=found.record.changed))
            if self._end(name, text_of(kv.value), record.token, ours):
                return
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was released")

    def _end(self, name: str, text: Text, token: int, ours: list[dict[str, Any]]) -> bool:
        """Write that a lease was released, if that is still for us to do."""
        keys, ended = self.keys, text._replace(token=token, ended="it was released")
        return self._txn(
            {
                "compare": ours,
                "success": [
                    txn.delete(keys.lock(name)),
                    txn.put(keys.record(name), str(ended)),
                    txn.put(keys.spent(name), text.holder.nonce),
                ],
            },
            effect=Effect.ONCE,
        ).done

    def _break(self, name: str, token: int, reason: str, operator: str) -> int:
        keys, wall = self.keys, self._world.clocks.wall()
        for _ in range(_MOST_RACES):
            base, found = self._base.known(timeout=_patience(LONGEST_TTL)).base, self._look(name)
            record = record_of(name, lock=found.lock, record=found.record)
            if record is None or found.record is None or record.token != token:
                raise TokenStale(name, token=token, highest=0 if record is None else record.token)
            text = text_of(found.record.value)
            ended = f"it was broken by {operator}: {reason}"
            nobody = text.holder._replace(nonce="")
            audit = {
                "name": name,
                "token": token,
                "holder": str(text.holder),
                "operator": operator,
                "reason": reason,
                "at": wall,
            }
            created = 0 if found.lock is None else found.lock.created
            broken = str(text._replace(holder=nobody, base=base, token=0, ended=ended))
            answer = self._txn(
                {
                    "compare": [
                        txn.created(keys.lock(name), revision=created),
                        txn.changed(keys.record(name), revision=found.record.changed),
                        txn.is_value(keys.base, str(base)),
                    ],
                    "success": [
                        txn.delete(keys.lock(name)),
                        txn.put(keys.record(name), broken),
                        txn.put(keys.audit(name, token=token), json.dumps(audit)),
                    ],
                },
                effect=Effect.ONCE,
            )
            if answer.done:
                return base + answer.revision
            self._base.learn(None if found.base is None else found.base.value)
        raise StoreUnavailable(f"lease {name!r} changed hands too often while it was broken")

    def _peek(self, name: str) -> View | None:
        found = self._look(name)
        record = record_of(name, lock=found.lock, record=found.record)
        return None if record is None else self._view(record, found.lock)

    def _views(self) -> list[View]:
        keys = self.keys
        both = [txn.get_all(keys.records), txn.get_all(keys.locks)]
        answer = self._txn({"success": both}, effect=Effect.NONE)
        records = {kv.key.removeprefix(keys.records): kv for kv in answer.read[0]}
        locks = {kv.key.removeprefix(keys.locks): kv for kv in answer.read[1]}
        views = []
        for name in sorted(records.keys() | locks.keys()):
            lock = locks.get(name)
            record = record_of(name, lock=lock, record=records.get(name))
            assert record is not None, "one of them was read"
            views.append(self._view(record, lock))
        return views

    def _view(self, record: Record, lock: txn.Kv | None) -> View:
        remains = 0.0 if lock is None else self._spares.left(lock.lease)
        return view(record, held=remains > 0, expires_in=remains, alive=None)

    def _look(self, name: str, *, timeout: float = 5.0) -> _Found:
        gets = self._gets(name)
        answer = self._txn({"success": gets}, effect=Effect.NONE, timeout=timeout)
        return _found(answer)

    def _gets(self, name: str) -> list[dict[str, Any]]:
        keys = self.keys
        wanted = (keys.lock(name), keys.record(name), keys.spent(name), keys.base)
        return [txn.get(key) for key in wanted]

    def _txn(self, words: dict[str, Any], *, effect: Effect, timeout: float = 5.0) -> txn.Answer:
        return txn.answer_of(self.door.ask("/kv/txn", words, effect=effect, timeout=timeout))


def _found(answer: txn.Answer) -> _Found:
    lock, record, spent, base = (answer.first(number) for number in range(4))
    return _Found(lock, record, spent, base, answer.term)


def _patience(ttl: float) -> float:
    """Return how long to wait for an answer about a lease: it must come before its end is near."""
    return min(5.0, max(0.5, ttl / 3))
