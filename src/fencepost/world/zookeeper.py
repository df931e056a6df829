"""The door to ZooKeeper: one session of kazoo's, and errors that say what is true.

The session is the client's word that it lives: what is ephemeral goes away with it. A request that
was answered on a session has touched it, so it lives for its negotiated timeout from then on. While
kazoo is suspended nothing is sent, so nothing is confirmed either.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kazoo import exceptions as told
from kazoo.client import KazooClient, TransactionRequest
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from fencepost.errors import BadUrl, OutcomeUnknown, StoreUnavailable, StoreUnfit
from fencepost.world.zookeeper_words import lost_quorum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fencepost.world.api import World

_CONNECT_WITHIN = 3.0
_GOODBYE_WITHIN = 2.0
_EXPLAIN_WITHIN = 0.5
# A leader may learn of a session's last sign of life half a tick late, and a tick is at most half
# of the shortest session: so this share of a session is certain, whatever server goes down.
CERTAIN = 0.75
_MOVED_ON = (told.BadVersionError, told.NoNodeError, told.NodeExistsError, told.NotEmptyError)
# Clients that a fork carried into this process: their threads are not here, so nothing of them
# may be used, and closing them would speak for the parent.
_carried_over: list[Any] = []
_log = logging.getLogger("fencepost.zookeeper")
_log.addHandler(logging.NullHandler())


class Node(NamedTuple):
    """A znode as it was read."""

    text: str
    version: int
    changed: int  # the transaction that wrote it last
    owner: int  # the session it goes away with; 0 if it stays


class Create(NamedTuple):
    """Make a node that is not there."""

    path: str
    text: str
    ephemeral: bool = False


class Write(NamedTuple):
    """Change a node that has this version."""

    path: str
    text: str
    version: int


class Delete(NamedTuple):
    """Remove a node that has this version."""

    path: str
    version: int


class Check(NamedTuple):
    """Demand that a node has this version, and leave it as it is."""

    path: str
    version: int


class Session(NamedTuple):
    """Who we are to the servers, and for how long we surely are after each answer."""

    id: int
    certain: float


class ZooKeeperDoor:
    """One session with one ensemble, for any thread."""

    def __init__(
        self, world: World, hosts: str, *, session: float, credentials: tuple[str, str] | None
    ) -> None:
        self._world, self._hosts, self._wanted = world, hosts, session
        self._credentials = credentials
        self.where, self.servers = f"ZooKeeper at {hosts}", hosts.split(",")
        self.user = credentials[0] if credentials else ""
        self.asked = 0  # round trips, for tests that count them
        self.negotiated = 0.0
        self._client: KazooClient | None = None
        self._turn = world.mutex()

    # What stores ask.

    def session(self) -> Session:
        """Return the session that is open now."""
        client = self._open()
        found = client.client_id
        if found is None:
            raise self._away("it has no session")
        return Session(int(found[0]), self.negotiated * CERTAIN)

    def look(self, *paths: str, timeout: float) -> list[Node | None]:
        """Read nodes as the leader knows them, in one round trip; None for those not there."""
        client = self._open()
        # The requests of a session are answered in order: what follows a sync has seen it.
        asked = [client.sync_async(paths[0]), *(client.get_async(path) for path in paths)]
        answers = self._answers(asked, timeout)[1:]
        return [None if found is None else _node(found) for found in answers]

    def children(self, path: str, *, timeout: float) -> list[str]:
        """Return the names below a node; none if it is not there."""
        client = self._open()
        asked = [client.sync_async(path), client.get_children_async(path)]
        return list(self._answers(asked, timeout)[1] or ())

    def commit(self, *steps: Check | Create | Write | Delete, timeout: float) -> bool:
        """Do all of it or nothing; say whether it was done. False: others were there first."""
        client = self._open()
        work = TransactionRequest(client)
        for step in steps:
            if isinstance(step, Create):
                work.create(step.path, step.text.encode(), self._acl(), ephemeral=step.ephemeral)
            elif isinstance(step, Write):
                work.set_data(step.path, step.text.encode(), step.version)
            elif isinstance(step, Check):
                work.check(step.path, step.version)
            else:
                work.delete(step.path, step.version)
        self.asked += 1
        try:
            results = work.commit_async().get(timeout=timeout)
        except Exception as error:
            raise self._unknown(error) from error
        for result in results:
            refused = isinstance(result, Exception)
            if refused and not isinstance(result, (*_MOVED_ON, told.RolledBackError)):
                if isinstance(result, told.RuntimeInconsistency):
                    continue
                raise self._told(result) from result
        return not any(isinstance(result, Exception) for result in results)

    def make(self, *paths: str, timeout: float) -> None:
        """Make nodes that stay, parents first, where there are none."""
        for path in paths:
            try:
                self.asked += 1
                self._open().create_async(path, b"", self._acl()).get(timeout=timeout)
            except told.NodeExistsError:
                continue
            except Exception as error:
                raise self._told(error) from error

    def bell(self, path: str, *, timeout: float) -> Bell | None:
        """Return what rings when the node changes or goes away; None if it is not there."""
        client = self._open()
        bell = Bell()
        try:
            found = self._answers([client.exists_async(path, watch=bell.ring)], timeout)[0]
        except BaseException:
            bell.close()
            raise
        if found is None:
            bell.close()
            return None
        return bell

    def server_says(self, word: str) -> str:
        """Return a server's answer to a four letter word; empty if it does not answer those."""
        client = self._open()
        with contextlib.suppress(told.KazooException, OSError, AttributeError):
            answer = str(client.command(word.encode()))
            return "" if "not in the whitelist" in answer else answer
        return ""

    def forget(self) -> None:
        """Begin anew in a forked child."""
        if self._client is not None:
            _carried_over.append(self._client)
        self._client, self._turn = None, self._world.mutex()

    def close(self, *, keep_session: bool) -> None:
        """Let go of the connection. A session that is kept ends by itself, with what it has."""
        with self._turn:
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(told.KazooException, OSError):  # it is gone in any case
                if keep_session or client.state != KazooState.CONNECTED:
                    client._stopped.set()  # noqa: SLF001 -- else stop() would end the session
                    _cut_off(client)
                    client._safe_close()  # noqa: SLF001 -- the rest of stop()
                else:
                    _say_goodbye(client)
                client.close()

    # Behind the door.

    def _open(self) -> KazooClient:
        with self._turn:
            if self._client is None:
                self._client = self._started()
            client = self._client
        if client.state == KazooState.CONNECTED:
            return client
        tried = client._connection._socket  # noqa: SLF001 -- kazoo has no word for it
        if not client._live.wait(_CONNECT_WITHIN):  # noqa: SLF001 -- what start() waits for
            if client._connection._socket is tried:  # noqa: SLF001 -- the same
                _hang_up(client)  # kazoo would wait for a server that hangs as for a session
            if client._connection.connection_stopped.is_set():  # noqa: SLF001 -- the same
                self._replace(client)  # its thread has died: the next call makes another
            raise self._nobody()
        return client

    def _nobody(self) -> StoreUnavailable:
        """Return why there is no session: kazoo hears no more than that a server hangs up."""
        why = lost_quorum(self._hosts, within=_EXPLAIN_WITHIN)
        if why is None:
            return self._away("no server answers")
        return StoreUnavailable(
            f"{self.where} grants no session: {why}; start the other servers of the ensemble"
        )

    def _replace(self, client: KazooClient) -> None:
        with self._turn:
            if self._client is client:
                self._client = None
        with contextlib.suppress(told.KazooException, OSError):
            client.stop()
            client.close()

    def _started(self) -> KazooClient:
        auth = [] if self._credentials is None else [("digest", ":".join(self._credentials))]
        try:
            client = KazooClient(
                hosts=self._hosts,
                timeout=self._wanted,
                auth_data=auth,
                connection_retry=KazooRetry(max_tries=-1, delay=0.05, backoff=2, max_delay=1.0),
                logger=_log,
            )
        except (ValueError, told.KazooException) as error:
            raise BadUrl(f"{self._hosts!r} is not a list of ZooKeeper servers: {error}") from error
        self._note_timeout(client)
        client.start_async()
        return client

    def _note_timeout(self, client: KazooClient) -> None:
        """Learn what the server grants: kazoo keeps it to itself."""
        connection = client._connection  # noqa: SLF001 -- there is no other way
        invoke = connection._invoke  # noqa: SLF001 -- the same

        def noting(*args: Any, **kwargs: Any) -> Any:
            answer = invoke(*args, **kwargs)
            granted = getattr(answer[0], "time_out", 0) if isinstance(answer, tuple) else 0
            if granted:
                self.negotiated = granted / 1000.0
            return answer

        connection._invoke = noting  # noqa: SLF001 -- the same

    def _answers(self, asked: Sequence[Any], timeout: float) -> list[Any]:
        self.asked += 1
        answers: list[Any] = []
        for one in asked:
            try:
                answers.append(one.get(timeout=timeout))
            except told.NoNodeError:
                answers.append(None)
            except Exception as error:
                self._hurry(error)
                raise self._told(error) from error
        return answers

    def _acl(self) -> Any:
        return OPEN_ACL_UNSAFE if self._credentials is None else CREATOR_ALL_ACL

    def _unknown(self, error: Exception) -> Exception:
        """Return what a failure means for what was to be changed."""
        self._hurry(error)
        if isinstance(error, told.ConnectionClosedError | told.AuthFailedError):
            return self._told(error)
        return OutcomeUnknown(
            f"{self.where} was asked and did not say whether it was done: {_words(error)}"
        )

    def _hurry(self, error: Exception) -> None:
        """Have kazoo look for another server now: it would wait for most of the session."""
        client = self._client
        if isinstance(error, KazooTimeoutError) and client is not None:
            _hang_up(client)

    def _told(self, error: Exception) -> Exception:
        """Return what a failure means if nothing was changed."""
        if isinstance(error, told.NoAuthError | told.AuthFailedError | told.InvalidACLError):
            who = f"user {self.user!r}" if self.user else "somebody without a password"
            return StoreUnfit(
                f"{self.where} does not let {who} do this: its nodes belong to somebody else; "
                "correct user:password@ in the URL, or the ACL of the nodes"
            )
        return self._away(_words(error))

    def _away(self, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.where} cannot be reached: {why}; is it running, and has it a quorum?"
        )


class Bell:
    """Rings once, from a thread of kazoo's; its descriptor can then be read."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)  # noqa: FBT003 -- the library's way to say it

    @property
    def fd(self) -> int:
        """What becomes readable."""
        return self._ours.fileno()

    def ring(self, _: object) -> None:
        """Ring. Whoever has left hears nothing."""
        with contextlib.suppress(OSError):
            self._theirs.send(b"!")

    def close(self) -> None:
        """Stop listening."""
        self._ours.close()
        self._theirs.close()


def _node(found: tuple[bytes, Any]) -> Node:
    data, stat = found
    return Node(data.decode(), stat.version, stat.mzxid, stat.ephemeralOwner)


def _hang_up(client: KazooClient) -> None:
    wire = client._connection._socket  # noqa: SLF001 -- kazoo has no word for it
    if wire is not None:
        with contextlib.suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)


def _say_goodbye(client: KazooClient) -> None:
    """End the session; a server that does not answer to that is left alone."""
    impatience = threading.Timer(_GOODBYE_WITHIN, _cut_off, [client])
    impatience.daemon = True
    impatience.start()
    try:
        client.stop()
    finally:
        impatience.cancel()


def _cut_off(client: KazooClient) -> None:
    """Hang up until kazoo, which was told to stop, no longer tries."""
    end = time.monotonic() + _GOODBYE_WITHIN
    while time.monotonic() < end:
        _hang_up(client)
        if client._connection.connection_stopped.wait(0.05):  # noqa: SLF001 -- as above
            return


def _words(error: Exception) -> str:
    if isinstance(error, KazooTimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
