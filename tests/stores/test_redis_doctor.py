"""The doctor says what on this very server would break a promise, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from redis_kit import WORLD, store_at, until

from fencepost import StoreUnavailable
from fencepost.model.symptom import Severity, Symptom
from fencepost.stores.redis import RedisStore, read_address
from fencepost.stores.redis_doctor import Facts, symptoms
from fencepost.testing.clock import SettableClocks
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish
from servers import Valkey

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    with Valkey.own() as server:
        yield server


@pytest.fixture
def client(server: Valkey) -> Iterator[Any]:
    with server.client() as client:
        names = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync")
        before = {name: client.config_get(name)[name] for name in names}
        yield client
        for name, value in before.items():
            client.config_set(name, value)


def found(port: int) -> dict[str, Symptom]:
    store = store_at(port)
    seen = finish(store.examine())
    finish(store.close())
    assert [symptom.severity for symptom in seen] == sorted(
        (symptom.severity for symptom in seen), reverse=True
    )
    return {symptom.code: symptom for symptom in seen}


def test_a_server_that_is_set_up_well_has_no_symptom_and_keeps_no_trace(
    server: Valkey, client: Any
) -> None:
    assert found(server.port) == {}
    until(lambda: client.keys("*") == [])


@pytest.mark.parametrize(
    ("settings", "code", "severity"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "redis.eviction", Severity.RISK),
        (
            {"maxmemory": "100mb", "maxmemory-policy": "volatile-ttl"},
            "redis.eviction",
            Severity.BREAKS,
        ),
        ({"appendonly": "no"}, "redis.no_aof", Severity.BREAKS),
        ({"appendfsync": "everysec"}, "redis.fsync", Severity.RISK),
        ({"appendfsync": "no"}, "redis.fsync", Severity.RISK),
    ],
)
def test_a_setting_that_loses_leases_is_a_symptom(
    server: Valkey, client: Any, settings: dict[str, str], code: str, severity: Severity
) -> None:
    for name, value in settings.items():
        client.config_set(name, value)
    seen = found(server.port)
    assert list(seen) == [code]
    assert seen[code].severity is severity
    assert list(settings.values())[-1] in seen[code].what
    assert seen[code].remedy


def test_replicas_are_a_risk_unless_writes_wait_for_one(server: Valkey) -> None:
    class Replica(Valkey):
        replica_of = server.port

    with Replica.own() as replica, server.client() as client, replica.client() as other:
        until(lambda: other.info("replication")["master_link_status"] == "up")
        assert found(server.port)["redis.replicas"].severity is Severity.RISK
        client.config_set("min-replicas-to-write", "1")
        assert found(server.port)["redis.failover"].severity is Severity.NOTE
        client.config_set("min-replicas-to-write", "0")
        seen = found(replica.port)
        assert seen["redis.replica"].severity is Severity.BREAKS
        assert "name the primary" in seen["redis.replica"].remedy


def test_a_clock_that_is_off_is_told_with_its_sign(server: Valkey) -> None:
    clocks = SettableClocks()
    clocks.step_wall(-60)
    address = read_address(f"127.0.0.1:{server.port}", tls=False)
    store = RedisStore(BlockingWorld(clocks=clocks), address)
    (symptom,) = finish(store.examine())
    finish(store.close())
    assert (symptom.code, symptom.severity) == ("redis.clock", Severity.RISK)
    assert "is +60.0 s off" in symptom.what


def test_rights_that_are_missing_are_named_and_what_is_hidden_is_said(
    server: Valkey, client: Any
) -> None:
    client.execute_command(
        "ACL", "SETUSER", "app", "on", ">s3cret", "~fp:*", "+@all", "-config", "-zpopmin",
        "-publish", "resetchannels",
    )  # fmt: skip
    address = read_address(f"app:s3cret@127.0.0.1:{server.port}", tls=False)
    store = RedisStore(WORLD, address)
    seen = finish(store.examine())
    finish(store.close())
    rights = [symptom for symptom in seen if symptom.code == "redis.rights"]
    assert {word for symptom in rights for word in ("ZPOPMIN", "PUBLISH", "SUBSCRIBE")
            if f"let us {word}" in symptom.what} == {"ZPOPMIN", "PUBLISH", "SUBSCRIBE"}  # fmt: skip
    assert all(symptom.severity is Severity.BREAKS for symptom in rights)
    (hidden,) = (symptom for symptom in seen if symptom.code == "redis.hidden")
    assert hidden.severity is Severity.NOTE
    assert "CONFIG" in hidden.what
    assert not any("s3cret" in str(symptom) for symptom in seen)


def test_the_rights_that_the_remedy_names_are_enough(server: Valkey, client: Any) -> None:
    client.execute_command(
        "ACL", "SETUSER", "enough", "on", ">s3cret", "+@read", "+@write", "+@scripting",
        "+@pubsub", "+time", "~fp:*", "resetchannels", "&fp:turn:*",
    )  # fmt: skip
    address = read_address(f"enough:s3cret@127.0.0.1:{server.port}", tls=False)
    store = RedisStore(WORLD, address)
    seen = finish(store.examine())
    finish(store.close())
    assert {symptom.code for symptom in seen} == {"redis.hidden"}


@pytest.mark.parametrize(
    ("info", "code"),
    [({"redis_version": "5.0.14"}, "redis.version"), ({"cluster_enabled": "1"}, "redis.cluster"),
     ({"aof_last_write_status": "err"}, "redis.aof_fails")],
)  # fmt: skip
def test_what_cannot_be_served_is_said(info: dict[str, str], code: str) -> None:
    (symptom,) = symptoms(Facts(info, {}, 0.0, {}, {}), where="here")
    assert (symptom.code, symptom.severity) == (code, Severity.BREAKS)


def test_a_server_that_is_away_has_no_symptoms_but_an_error() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        finish(store_at(1).examine())
