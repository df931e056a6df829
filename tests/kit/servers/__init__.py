"""Real servers of our own: each on a free port of loopback, in a temporary folder, ended by its id.

``shared(Postgres)`` is one server for all tests of this process that leave it as it is. A test that
kills, stops or restarts its server has one of its own: ``with Postgres.own() as server: …``.
"""

from __future__ import annotations

from servers.etcd import Etcd, EtcdCluster
from servers.mariadb import MariaDB
from servers.mysql import MySQL
from servers.objects import Seaweed
from servers.pgbouncer import PgBouncer
from servers.postgres import Postgres
from servers.running import Running, shared
from servers.valkey import Valkey
from servers.zookeeper import ZooKeeper

__all__ = [
    "Etcd",
    "EtcdCluster",
    "MariaDB",
    "MySQL",
    "PgBouncer",
    "Postgres",
    "Running",
    "Seaweed",
    "Valkey",
    "ZooKeeper",
    "shared",
]
