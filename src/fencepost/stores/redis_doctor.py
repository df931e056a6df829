"""What on a Redis server would break a promise, from its own words, or tried where it has none."""

from __future__ import annotations

import re

from fencepost.errors import Misuse, StoreUnavailable
from fencepost.model.named import NamedTuple
from fencepost.model.symptom import Severity, Symptom
from fencepost.world.redis import Ear, Script, packed, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World
    from fencepost.world.redis import RedisServer

OLDEST = (6, 2)
_FARTHEST = 2.0  # seconds that a server's clock may be off ours before it is worth a word
_SETTINGS = ("appendfsync", "min-replicas-to-write", "maxmemory-policy", "appendonly")

# Each command that the scripts need, on keys that vanish by themselves.
_PROBE = Script(
    """
local missing = {}
local function try(word, ...)
    local said = redis.pcall(word, ...)
    if type(said) == 'table' and said.err then
        missing[#missing + 1] = word .. '\\n' .. said.err
    end
end
try('TIME')
try('SET', KEYS[1], '1', 'PX', 1000)
try('GET', KEYS[1])
try('HSET', KEYS[2], 'a', '1')
try('HGET', KEYS[2], 'a')
try('EXISTS', KEYS[2])
try('SETRANGE', KEYS[1], 0, '0')
try('HDEL', KEYS[2], 'a')
try('ZADD', KEYS[3], 'NX', 1, 'a')
try('ZSCORE', KEYS[3], 'a')
try('ZPOPMIN', KEYS[3])
try('ZRANGE', KEYS[3], 0, 0)
try('ZREM', KEYS[3], 'a')
try('LPUSH', KEYS[4], 'a')
try('LTRIM', KEYS[4], 0, 99)
try('PEXPIRE', KEYS[4], 1)
try('PUBLISH', 'fp:turn:' .. ARGV[1], 'turn')
return missing
""",
    keys=4,
    arguments=1,
)


class Facts(NamedTuple):
    """What a server says about itself. Empty where it does not say."""

    info: dict[str, str]
    settings: dict[str, str]
    ahead: float  # its clock less ours, in seconds
    missing: dict[str, str]  # commands that are refused, and what the server said
    hidden: dict[str, str]  # what we could not find out, and why


async def examined(world: World, server: RedisServer, *, namespace: str) -> list[Symptom]:
    """Ask the server, and judge."""
    probe = f"fp:{{{namespace}:{world.nonce()}}}:"
    return symptoms(await world.call(_asked, world, server, probe), where=str(server.address))


def symptoms(facts: Facts, *, where: str) -> list[Symptom]:
    """Judge what was found, the worst first."""
    found = [
        *_of_place(facts, where),
        *_of_memory(facts, where),
        *_of_disk(facts, where),
        *_of_replicas(facts, where),
        *_of_writes(facts, where),
        *_of_rights(facts, where),
    ]
    return sorted(found, key=lambda symptom: -symptom.severity)


def _of_place(facts: Facts, where: str) -> list[Symptom]:
    info, found = facts.info, []
    shown = info.get("redis_version", "")
    version = tuple(int(part) for part in re.findall(r"\d+", shown)[:2])
    if version and version < OLDEST:
        found.append(Symptom(
            "redis.version", Severity.BREAKS, f"{where} is Redis {shown}",
            "use Redis 6.2 or newer, or Valkey",
        ))  # fmt: skip
    if info.get("cluster_enabled") == "1":
        found.append(Symptom(
            "redis.cluster", Severity.BREAKS, f"{where} is a node of a cluster",
            "use a server that is not: a line of waiters lives on one node",
        ))  # fmt: skip
    if info.get("role") in ("slave", "replica"):
        found.append(Symptom(
            "redis.replica", Severity.BREAKS, f"{where} is a read-only replica",
            "name the primary in the URL",
        ))  # fmt: skip
    if abs(facts.ahead) > _FARTHEST:
        found.append(Symptom(
            "redis.clock", Severity.RISK,
            f"the clock of {where} is {facts.ahead:+.1f} s off the clock here",
            "synchronise both with NTP: tokens begin with the server's time, so a server or "
            "replica that is behind would grant lower ones after a loss of data",
        ))  # fmt: skip
    return found


def _of_memory(facts: Facts, where: str) -> list[Symptom]:
    policy = facts.info.get("maxmemory_policy") or facts.settings.get("maxmemory-policy", "")
    if policy in ("", "noeviction"):
        return []
    bounded = facts.info.get("maxmemory", "0") != "0"
    return [Symptom(
        "redis.eviction", Severity.BREAKS if bounded else Severity.RISK,
        f"{where} has maxmemory-policy {policy}" + ("" if bounded else ", though no maxmemory"),
        "set maxmemory-policy noeviction, or use a server of its own: an evicted record frees a "
        "lease that somebody holds",
    )]  # fmt: skip


def _of_disk(facts: Facts, where: str) -> list[Symptom]:
    on = facts.info.get("aof_enabled", "")
    if not on:
        on = {"yes": "1", "no": "0"}.get(facts.settings.get("appendonly", ""), "")
    if on == "0":
        return [Symptom(
            "redis.no_aof", Severity.BREAKS, f"{where} has appendonly no",
            "set appendonly yes: otherwise a restart frees every lease while its holder works on",
        )]  # fmt: skip
    found = []
    if facts.info.get("aof_last_write_status", "ok") != "ok":
        found.append(Symptom(
            "redis.aof_fails", Severity.BREAKS, f"{where} could not write its append-only file",
            "free some space, or look into its log: nothing is granted or renewed until then",
        ))  # fmt: skip
    sync = facts.settings.get("appendfsync", "always")
    if sync != "always":
        lost = "the last second" if sync == "everysec" else "the last half minute"
        found.append(Symptom(
            "redis.fsync", Severity.RISK, f"{where} has appendfsync {sync}",
            f"set appendfsync always: a power cut forgets the grants of {lost}, though no token "
            "falls and a fence still holds",
        ))  # fmt: skip
    return found


def _of_replicas(facts: Facts, where: str) -> list[Symptom]:
    count = facts.info.get("connected_slaves", "0")
    if count == "0":
        return []
    needed = facts.settings.get("min-replicas-to-write", "")
    if needed == "0":
        return [Symptom(
            "redis.replicas", Severity.RISK,
            f"{where} has {count} replicas and min-replicas-to-write 0",
            "set min-replicas-to-write 1: a primary that is cut off would go on granting leases "
            "that its successor knows nothing of. Fence what must not be written twice",
        )]  # fmt: skip
    return [Symptom(
        "redis.failover", Severity.NOTE, f"{where} has {count} replicas",
        "none: replication is asynchronous, so a failover may forget a grant. Fence what must "
        "not be written twice",
    )]  # fmt: skip


def _of_writes(facts: Facts, where: str) -> list[Symptom]:
    """Say why the server refuses to write, though we are allowed to."""
    reasons = {found for said in facts.missing.values() if (found := refusal(said)) is not None}
    return [
        Symptom(
            "redis.writes", Severity.BREAKS, f"{where} {meaning}",
            "until it writes again, leases are neither granted nor renewed here",
        )
        for word, meaning in sorted(reasons) if word != "READONLY"  # of which we speak elsewhere
    ]  # fmt: skip


def _of_rights(facts: Facts, where: str) -> list[Symptom]:
    grant = (
        "grant it: ACL SETUSER name +@read +@write +@scripting +@pubsub +time ~fp:* "
        "resetchannels &fp:turn:*"
    )
    check = "let an operator check what docs/stores/redis.md lists, or allow it to this user"
    missing = [
        Symptom("redis.rights", Severity.BREAKS, f"{where} does not let us {word}: {said}", grant)
        for word, said in facts.missing.items()
        if refusal(said) is None
    ]
    hidden = [
        Symptom("redis.hidden", Severity.NOTE, f"{where} does not let us see {what}: {said}", check)
        for what, said in facts.hidden.items()
    ]
    return missing + hidden


# What runs behind the door.


def _asked(world: World, server: RedisServer, probe: str) -> Facts:
    before = world.clocks.wall()
    seconds, micros = server.read(b"TIME")  # who cannot be reached says so here
    between = (before + world.clocks.wall()) / 2
    ahead = int(seconds) + int(micros) / 1e6 - between
    hidden: dict[str, str] = {}
    info, settings = _info(server, hidden), _settings(server, hidden)
    return Facts(info, settings, ahead, _missing(server, probe), hidden)


def _info(server: RedisServer, hidden: dict[str, str]) -> dict[str, str]:
    try:
        lines = server.read(b"INFO").decode().splitlines()
    except (Misuse, StoreUnavailable) as error:
        hidden["INFO"] = str(error)
        return {}
    return dict(line.split(":", 1) for line in lines if ":" in line and line[0] != "#")


def _settings(server: RedisServer, hidden: dict[str, str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for name in _SETTINGS:
        try:
            pair = [word.decode() for word in server.read(b"CONFIG", b"GET", name.encode())]
        except (Misuse, StoreUnavailable) as error:
            hidden["CONFIG"] = str(error)
            break
        settings |= dict(zip(pair[::2], pair[1::2], strict=True))
    return settings


def _missing(server: RedisServer, probe: str) -> dict[str, str]:
    keys = [f"{probe}probe{number}".encode() for number in range(4)]
    missing: dict[str, str] = {}
    try:
        said = server.run(_PROBE, packed(*keys, b"probe"))
        missing |= dict(word.decode().split("\n", 1) for word in said)
    except (Misuse, StoreUnavailable) as error:
        missing["EVALSHA"] = str(error)
    ear = Ear(server, "fp:turn:probe")
    try:
        ear.open()
    except (Misuse, StoreUnavailable) as error:
        missing["SUBSCRIBE"] = str(error)
    finally:
        ear.close()
    try:
        server.read(b"SCAN", b"0", b"MATCH", b"fp:*", b"COUNT", b"1")
    except (Misuse, StoreUnavailable) as error:
        missing["SCAN"] = str(error)
    return missing
