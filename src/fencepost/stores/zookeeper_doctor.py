"""What about this very ZooKeeper would break a promise, or is about to."""

from __future__ import annotations

import re

from fencepost.errors import FencepostError
from fencepost.model.symptom import Severity, Symptom
from fencepost.world.zookeeper_words import trouble

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.stores.zookeeper_record import Paths
    from fencepost.world.zookeeper import ZooKeeperDoor

_USUAL_TTL = 30.0
_FEW = 10  # connections of one machine
_WITHIN = 5.0


def examined(door: ZooKeeperDoor, paths: Paths) -> list[Symptom]:
    """Ask one server about itself and the ensemble; change nothing that lasts."""
    certain = door.session().certain
    found = _of_ensemble(door) + _of_settings(door.server_says("conf"))
    found += _of_servers(door)
    if certain < _USUAL_TTL:
        what = (
            f"sessions last {door.negotiated:g} s at most, so a holder trusts its lease for "
            f"{certain:g} s after each renewal, whatever ttl it asked for"
        )
        remedy = f"set maxSessionTimeout to {_USUAL_TTL / 0.75 * 1000:.0f} or more"
        found.append(Symptom("zookeeper.session", Severity.NOTE, what, remedy))
    try:
        door.look(paths.records, paths.locks, timeout=_WITHIN)
    except FencepostError as error:
        remedy = "correct the user of the URL, or the ACL of the nodes"
        found.append(Symptom("zookeeper.rights", Severity.BREAKS, str(error), remedy))
    if not door.user:
        what = "nodes are open to the world: whoever reaches it can take, break and forge leases"
        remedy = "name a user in the URL: nodes are then made for that user alone"
        found.append(Symptom("zookeeper.open", Severity.NOTE, what, remedy))
    return found


def _of_ensemble(door: ZooKeeperDoor) -> list[Symptom]:
    try:
        (node,) = door.look("/zookeeper/config", timeout=_WITHIN)
    except FencepostError:
        node = None  # only superusers may read it here
    text = "" if node is None else node.text
    count = len(re.findall(r"^server\.\d+=(?!.*:observer)", text, re.MULTILINE))
    alone = "standalone" in door.server_says("srvr")
    if alone or (count == 1):
        what = "there is one server: if its disk is lost, so are leases and records"
        return [Symptom("zookeeper.servers", Severity.RISK, what, "run three servers")]
    if count and count % 2 == 0:
        what = f"there are {count} voting servers, and {count - 1} would survive as much"
        remedy = "run an odd number of servers"
        return [Symptom("zookeeper.servers", Severity.NOTE, what, remedy)]
    return []


def _of_servers(door: ZooKeeperDoor) -> list[Symptom]:
    remedy = "start this server and let it reach the others, or take it out of the URL"
    return [
        Symptom("zookeeper.server", Severity.RISK, f"{server} {why}", remedy)
        for server in door.servers
        if (why := trouble(server)) is not None
    ]


def _of_settings(conf: str) -> list[Symptom]:
    said = re.search(r"^maxClientCnxns=(\d+)", conf, re.MULTILINE)
    most = int(said[1]) if said else 0
    if 0 < most < _FEW:
        what = f"a machine may have {most} connections, and each process needs two"
        remedy = "raise maxClientCnxns"
        return [Symptom("zookeeper.connections", Severity.RISK, what, remedy)]
    return []
