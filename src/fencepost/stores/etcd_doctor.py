"""What about this very etcd would break a promise, or is about to."""

from __future__ import annotations

from fencepost.errors import FencepostError, StoreUnavailable, StoreUnfit
from fencepost.model.symptom import Severity, Symptom
from fencepost.stores import etcd_txn as txn
from fencepost.world.etcd import Effect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from fencepost.stores.etcd_record import Keys
    from fencepost.world.etcd import EtcdDoor

_USUAL_QUOTA = 2 * 1024**3
_LONG = 5  # seconds: a ttl that people do ask for


def examined(door: EtcdDoor, keys: Keys) -> list[Symptom]:
    """Ask every endpoint and the cluster; change nothing that lasts."""
    found: list[Symptom] = []
    statuses: list[dict[str, Any]] = []
    refused: StoreUnfit | None = None
    for endpoint in door.endpoints:
        try:
            statuses.append(door.ask_one(endpoint, "/maintenance/status"))
        except FencepostError as error:
            refused = error if isinstance(error, StoreUnfit) else refused
            found.append(
                Symptom(
                    "etcd.endpoint",
                    Severity.RISK,
                    str(error),
                    "start this member, or take it out of the URL",
                )
            )
    if not statuses and refused is not None:
        raise refused
    if not statuses:
        raise StoreUnavailable(
            f"{door.where} cannot be reached: no endpoint answers; is it running?"
        )
    for status in statuses:
        found += _of_member(status)
    found += _of_members(door, {str(status.get("version", "")) for status in statuses})
    found += _of_alarms(door)
    found += _of_rights(door, keys)
    found += _of_time(door)
    return list(dict.fromkeys(found))


def _of_member(status: dict[str, Any]) -> list[Symptom]:
    found = []
    version = str(status.get("version", ""))
    if version in ("3.5.0", "3.5.1", "3.5.2"):
        what = f"a member runs etcd {version}, which may lose data when it is killed"
        found.append(Symptom("etcd.version", Severity.BREAKS, what, "upgrade to 3.5.3 or newer"))
    if int(status.get("leader", 0)) == 0:
        what = "a member sees no leader, so nothing can be granted or renewed there"
        found.append(Symptom("etcd.leader", Severity.BREAKS, what, "restore a quorum of members"))
    if status.get("isLearner"):
        what = "an endpoint of the URL is a learner, which answers no requests"
        found.append(Symptom("etcd.learner", Severity.RISK, what, "name voting members only"))
    size = int(status.get("dbSize", 0))
    quota = int(status.get("dbSizeQuota", 0)) or _USUAL_QUOTA
    if size > 0.8 * quota:
        what = f"the database has {size / 1024**2:.0f} MiB of {quota / 1024**2:.0f} MiB"
        remedy = "compact and defragment it, and set --auto-compaction-retention"
        found.append(Symptom("etcd.size", Severity.RISK, what, remedy))
    return found


def revokes_early(version: str) -> bool:
    """Say whether a deposed leader of this version has leases ended that its successor renews.

    It was stopped, or kept from its disk, and asks for it before it knows that it was deposed; etcd
    3.4.31 and 3.5.13 no longer listen to that.
    """
    parts = version.split(".")[:3]
    if len(parts) < 3 or not all(part.isdecimal() for part in parts):
        return False  # nobody knows
    known = tuple(map(int, parts))
    return known < (3, 4, 31) or (3, 5, 0) <= known < (3, 5, 13)


def _of_members(door: EtcdDoor, versions: set[str]) -> list[Symptom]:
    told = door.ask("/cluster/member/list", {}, effect=Effect.NONE)
    count = sum(1 for member in told.get("members", ()) if not member.get("isLearner"))
    early = sorted(filter(revokes_early, versions))
    if count > 1 and early:
        what = (
            f"members run etcd {', '.join(early)}: a leader that stood still and is back may end "
            "leases that are being renewed, and their holders learn of it at the next renewal"
        )
        remedy = "upgrade to 3.4.31, 3.5.13 or newer; fence what must not happen twice"
        return [Symptom("etcd.revokes", Severity.RISK, what, remedy), *_of_count(count)]
    return _of_count(count)


def _of_count(count: int) -> list[Symptom]:
    if count == 1:
        what = "the cluster has one member: if its disk is lost, so are leases and records"
        remedy = "run three members"
        return [Symptom("etcd.members", Severity.RISK, what, remedy)]
    if count % 2 == 0:
        what = f"the cluster has {count} members, and survives no more losses than {count - 1}"
        return [Symptom("etcd.members", Severity.NOTE, what, "run an odd number of members")]
    return []


def _of_alarms(door: EtcdDoor) -> list[Symptom]:
    told = door.ask("/maintenance/alarm", {"action": "GET"}, effect=Effect.NONE)
    return [
        Symptom(
            "etcd.alarm",
            Severity.BREAKS,
            f"the alarm {alarm.get('alarm', 'NONE')} is on, so nothing can be granted",
            "remove its cause, then run etcdctl alarm disarm",
        )
        for alarm in told.get("alarms", ())
    ]


def _of_rights(door: EtcdDoor, keys: Keys) -> list[Symptom]:
    found = []
    # Rights are checked for what a transaction might do; this one never does it.
    names = (keys.base, keys.lock("doctor"), keys.record("doctor"), keys.spent("doctor"))
    never = {**txn.created(keys.base, revision=-1)}
    rights = {"compare": [never], "success": [txn.put(name, "") for name in names]}
    try:
        door.ask("/kv/txn", rights, effect=Effect.NONE)
    except FencepostError as error:
        remedy = "grant readwrite on the prefix of the URL"
        found.append(Symptom("etcd.rights", Severity.BREAKS, str(error), remedy))
    if not door.knows_us:
        what = "anybody who reaches this etcd can take, break and forge leases"
        remedy = "enable authentication, and give each prefix a user of its own"
        found.append(Symptom("etcd.open", Severity.NOTE, what, remedy))
    elif not door.secure:
        what = "the password is sent without TLS"
        found.append(Symptom("etcd.plain", Severity.RISK, what, "use etcds://"))
    return found


def _of_time(door: EtcdDoor) -> list[Symptom]:
    try:
        told = door.ask("/lease/grant", {"TTL": 1}, effect=Effect.NONE)
        door.ask("/lease/revoke", {"ID": told["ID"]}, effect=Effect.AGAIN)
    except FencepostError as error:
        remedy = "see what else was found"
        return [Symptom("etcd.leases", Severity.BREAKS, str(error), remedy)]
    shortest = int(told["TTL"])
    if shortest <= _LONG:
        return []
    what = f"a holder that vanished keeps its lease for at least {shortest} s, whatever its ttl"
    remedy = "it is 1.5 times --election-timeout: lower that if your network allows"
    return [Symptom("etcd.shortest-ttl", Severity.NOTE, what, remedy)]
