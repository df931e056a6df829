"""Redis, etcd, ZooKeeper and object storage that cannot be used."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.etcd import Effect
from fencepost.world.flow import finish
from holder import until
from servers import Etcd, EtcdCluster, Seaweed, Valkey, ZooKeeper, shared
from servers.objects import SECRET as KEYS_SECRET
from servers.zookeeper import ReadOnlyZooKeeper, ZooKeeperEnsemble
from small_disk import SmallEtcd, SmallSeaweed, SmallValkey, SmallZooKeeper
from unusable import (
    SECRET,
    Unusable,
    answers,
    fault,
    fresh,
    nothing,
    restarted,
    until_it_ends,
    until_refused,
    used,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

# Redis.


@fault
def redis_password() -> Iterator[Unusable]:
    server = shared(Valkey)
    url = f"redis://ann:{SECRET}@127.0.0.1:{server.port}/0"
    yield Unusable(url, "refused the user or the password", nothing, server.url())


@fault
def redis_host() -> Iterator[Unusable]:
    url = f"redis://ann:{SECRET}@127.0.0.1:1/0"
    yield Unusable(url, "cannot be reached", nothing, shared(Valkey).url())


@fault
def redis_rights() -> Iterator[Unusable]:
    server, name = shared(Valkey), fresh()
    with server.client() as client:
        user = ("ACL", "SETUSER", name)
        client.execute_command(*user, "on", f">{SECRET}", "~fp:*", "&*", "+@all", "-set")
        yield Unusable(
            f"redis://{name}:{SECRET}@127.0.0.1:{server.port}/0",
            "does not allow what leases need",
            lambda: client.execute_command(*user, "+set"),
            looks=0,
            breaking=4,
            doctor=1,
            finds="redis.rights",
        )
        client.execute_command("ACL", "DELUSER", name)


@fault
def redis_replica() -> Iterator[Unusable]:
    server = shared(Valkey)

    class Replica(Valkey):
        replica_of = server.port

    with Replica.own() as replica, replica.client() as client:
        yield Unusable(
            replica.url(),
            "is a read-only replica",
            lambda: client.replicaof("NO", "ONE"),
            looks=0,
            breaking=4,
            doctor=1,
            finds="redis.replica",
        )


@fault
def redis_memory() -> Iterator[Unusable]:
    with Valkey.own() as server, server.client() as client:
        used(server.url())
        client.config_set("maxmemory", "1")
        yield Unusable(
            server.url(),
            "out of memory: raise maxmemory",
            lambda: client.config_set("maxmemory", "0"),
            looks=0,
            breaking=4,
            doctor=1,
            finds="redis.writes",
        )


@fault
def redis_full() -> Iterator[Unusable]:
    """It syncs its log before it answers; a log that cannot be written is the end of it."""
    with SmallValkey.own() as server:
        used(server.url())
        server.disk.fill()
        until_it_ends(server, server.url())
        yield Unusable(server.url(), "cannot be reached", lambda: restarted(server), gone=True)


class NextSecond(SmallValkey):
    """It syncs its log once a second, and refuses writes when it cannot."""

    settings = ("--appendonly", "yes", "--appendfsync", "everysec")


@fault
def redis_full_later() -> Iterator[Unusable]:
    with NextSecond.own() as server:
        used(server.url())
        server.disk.fill()
        until_refused(server.url())
        yield Unusable(
            server.url(),
            "cannot save to its disk",
            server.disk.clear,
            looks=0,
            breaking=4,
            doctor=1,
            finds="redis.aof_fails",
        )


class WithSnapshots(SmallValkey):
    """It saves a snapshot now and then beside its log, and refuses writes when it cannot."""

    settings = (*SmallValkey.settings, "--save", "3600 1")


@fault
def redis_snapshot() -> Iterator[Unusable]:
    """There is room for the log, and none for a snapshot of as much as there is."""
    with WithSnapshots.own() as server, server.client() as client:
        used(server.url())
        client.set("large", os.urandom(2 * 2**20))
        server.disk.fill(but=2**20)
        assert not saved(client)

        def mend() -> None:
            server.disk.clear()
            assert saved(client)

        yield Unusable(
            server.url(),
            "cannot save to its disk",
            mend,
            looks=0,
            breaking=4,
            doctor=1,
            finds="redis.writes",
        )


def saved(client: Any) -> bool:
    """Have a snapshot made; say whether that went well."""
    client.bgsave()
    until(lambda: not client.info("persistence")["rdb_bgsave_in_progress"])
    return bool(client.info("persistence")["rdb_last_bgsave_status"] == "ok")


# etcd.


def etcd_asked(url: str, path: str, body: Mapping[str, Any]) -> Any:
    """Ask an etcd something that is not about leases."""
    store: Any = open_store(url, BlockingWorld(), namespace="default")
    try:
        return store.door.ask(path, body, effect=Effect.ONCE)
    finally:
        finish(store.close())


def guarded(server: Etcd) -> str:
    """Let only root in, and a guest who may do nothing; return root's URL."""
    for path, body in (
        ("/auth/user/add", {"name": "root", "password": "right"}),
        ("/auth/role/add", {"name": "root"}),
        ("/auth/user/grant", {"user": "root", "role": "root"}),
        ("/auth/user/add", {"name": "guest", "password": SECRET}),
        ("/auth/enable", {}),
    ):
        etcd_asked(server.url(), path, body)
    return f"etcd://root:right@127.0.0.1:{server.port}"


@fault
def etcd_password() -> Iterator[Unusable]:
    with Etcd.own() as server:
        root = guarded(server)
        yield Unusable(root.replace("right", SECRET), "refuses the password", nothing, root)


@fault
def etcd_rights() -> Iterator[Unusable]:
    with Etcd.own() as server:
        root = guarded(server)

        def grant() -> None:
            etcd_asked(root, "/auth/user/grant", {"user": "guest", "role": "root"})

        guest = f"etcd://guest:{SECRET}@127.0.0.1:{server.port}"
        yield Unusable(guest, "grant its role readwrite", grant, doctor=1, finds="etcd.rights")


@fault
def etcd_host() -> Iterator[Unusable]:
    url = f"etcd://ann:{SECRET}@127.0.0.1:1"
    yield Unusable(url, "cannot be reached", nothing, shared(Etcd).url())


@fault
def etcd_quorum() -> Iterator[Unusable]:
    with EtcdCluster.own() as cluster:
        used(cluster.url())
        leader = cluster.leader()
        others = [node for node in cluster.nodes if node is not leader]
        for node in others:
            node.kill()

        def bring_back() -> None:
            for node in others:
                node.start()

        yield Unusable(cluster.url(), "leader|cannot be reached|did not answer", bring_back)


@fault
def etcd_quota() -> Iterator[Unusable]:
    with Etcd.own() as server:
        used(server.url())
        member = etcd_asked(server.url(), "/maintenance/status", {})["header"]["member_id"]
        alarm = {"memberID": member, "alarm": "NOSPACE"}

        def switch(action: str) -> None:
            etcd_asked(server.url(), "/maintenance/alarm", {"action": action, **alarm})

        switch("ACTIVATE")
        yield Unusable(
            server.url(),
            "full and takes no writes",
            lambda: switch("DEACTIVATE"),
            looks=0,
            doctor=1,
            finds="etcd.alarm",
        )


@fault
def etcd_full() -> Iterator[Unusable]:
    """An etcd that cannot commit ends itself."""
    with SmallEtcd.own() as server:
        used(server.url())
        server.disk.fill()
        until_it_ends(server, server.url())
        yield Unusable(server.url(), "cannot be reached", lambda: restarted(server), gone=True)


# ZooKeeper.


@fault
def zookeeper_rights() -> Iterator[Unusable]:
    server, root = shared(ZooKeeper), fresh()
    mine = f"zookeeper://me:right@127.0.0.1:{server.port}/{root}"
    used(mine)
    theirs = mine.replace("right", SECRET)
    yield Unusable(
        theirs,
        "belong to somebody else",
        nothing,
        mine,
        breaking=4,
        doctor=1,
        finds="zookeeper.rights",
    )


@fault
def zookeeper_host() -> Iterator[Unusable]:
    url = f"zookeeper://ann:{SECRET}@127.0.0.1:1"
    yield Unusable(url, "cannot be reached", nothing, f"{shared(ZooKeeper).url()}/{fresh()}")


class ReadOnlyEnsemble(ZooKeeperEnsemble):
    """Three servers, each of which would let others read without the rest."""

    kind = ReadOnlyZooKeeper


def without_the_others(kind: type[ZooKeeperEnsemble], mode: str, says: str) -> Iterator[Unusable]:
    """Leave one server of three alone, until it says how it is."""
    with kind.own() as ensemble:
        used(ensemble.url())
        alone, *others = ensemble.servers
        for server in others:
            server.kill()
        until(lambda: mode in alone.says("srvr"), within=30)

        def bring_back() -> None:
            for server in others:
                server.launch()
            for server in ensemble.servers:
                server.wait_until_ready()

        yield Unusable(ensemble.url(), says, bring_back)


@fault
def zookeeper_quorum() -> Iterator[Unusable]:
    says = "serves nobody, for it has lost the quorum; start the other servers"
    yield from without_the_others(ZooKeeperEnsemble, "not currently serving", says)


@fault
def zookeeper_read_only() -> Iterator[Unusable]:
    says = "is read-only, for it has lost the quorum; start the other servers"
    yield from without_the_others(ReadOnlyEnsemble, "Mode: read-only", says)


@fault
def zookeeper_full() -> Iterator[Unusable]:
    """A ZooKeeper that cannot write its log ends itself."""
    with SmallZooKeeper.own() as server:
        used(server.url())
        server.disk.fill()
        until_it_ends(server, server.url())
        yield Unusable(server.url(), "cannot be reached", lambda: restarted(server), gone=True)


# Object storage.


@fault
def objects_host() -> Iterator[Unusable]:
    server = shared(Seaweed)
    mended = server.url(f"{server.bucket('unusable')}/{fresh()}")
    yield Unusable(mended.replace(str(server.port), "1"), "cannot be reached", nothing, mended)


@fault
def objects_keys() -> Iterator[Unusable]:
    server = shared(Seaweed)
    url = server.url(f"{server.bucket('unusable')}/{fresh()}")
    os.environ["AWS_SECRET_ACCESS_KEY"] = SECRET

    def correct() -> None:
        os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS_SECRET

    yield Unusable(
        url, "credentials for .* were refused", correct, doctor=1, finds="objects.access"
    )


@fault
def objects_full() -> Iterator[Unusable]:
    with SmallSeaweed.own() as server:
        url = server.url(server.bucket("unusable"))
        used(url)
        server.disk.fill()
        until_refused(url)

        def mend() -> None:
            restarted(server)
            until(lambda: answers(url))  # its parts find each other a moment after they answer

        # What the doctor writes lies in another folder, and this server keeps a log for each.
        yield Unusable(url, "answered 500", mend, looks=0, breaking=4, doctor=None)
