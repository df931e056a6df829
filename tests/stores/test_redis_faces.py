"""What users meet: URLs, wrong passwords, round trips, the command line, jobs that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from redis_kit import WORLD, holder, store_at

from fencepost import (
    BadUrl,
    Fencepost,
    FencepostError,
    LeaseHeld,
    Misuse,
    StoreUnavailable,
    StoreUnfit,
)
from fencepost.stores.redis import RedisStore, open_rediss, read_address
from fencepost.world.flow import finish
from servers import Postgres, Valkey, shared

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def space(tmp_path: Path) -> str:
    return f"f{abs(hash(str(tmp_path)))}"


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis://", "names no host"),
        ("redis://:6379/0", "names no host"),
        ("redis://host:port", "a port that is not a number"),
        ("redis://host/main", "must be a number, such as /0"),
        ("redis://host/0?retries=3", "unknown option 'retries'"),
        ("redis://host/0?ssl_ca_certs=x", "unknown option 'ssl_ca_certs'"),
        ("redis://host/0?timeout=soon", "timeout=soon: it must be 0.05 to 60 seconds"),
        ("redis://host/0?timeout=0", "timeout=0: it must be"),
        ("rediss://host/0?ssl_check_hostname=perhaps", "it must be true or false"),
    ],
)
def test_a_wrong_url_gets_a_sentence(url: str, sentence: str) -> None:
    with pytest.raises(BadUrl, match=sentence):
        Fencepost(url)


@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize(
    "secret",
    [
        *("s3cr[et", "s3cr]et", "s3cr/et", "s3cr?et", "s3cr#et", "s3cr\u2100et"),
        *("1234/s3cret", "1234?s3cret", "1234#s3cret"),
    ],
)
def test_no_piece_of_a_password_is_shown(scheme: str, secret: str) -> None:
    with pytest.raises(BadUrl) as caught:
        Fencepost(f"{scheme}://user:{secret}@127.0.0.1:1/0")
    told: BaseException | None = caught.value
    while told is not None:
        assert not any(piece in str(told) for piece in ("s3cr", "et@", "1234")), str(told)
        told = told.__cause__ or told.__context__


def test_a_password_may_be_anything_if_it_is_written_in_percents() -> None:
    text = "[a/b?c#d@e:f,g%h]"
    assert read_address(f":{quote(text, safe='')}@host", tls=False).password == text
    assert read_address(":a@b:c,d@host", tls=False).password == "a@b:c,d"


def test_a_url_is_read_to_the_last_option() -> None:
    address = read_address("us%40er:p%2Fw@[::1]:7000/3?timeout=0.5", tls=False)
    assert address == ("::1", 7000, 3, "us@er", "p/w", 0.5, None)
    assert str(address) == "[::1]:7000/3"
    assert read_address("host", tls=False)[:5] == ("host", 6379, 0, None, None)
    encrypted = open_rediss(WORLD, "host?ssl_ca_certs=/ca.pem", namespace="default")
    assert encrypted._server.address.tls == {"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": True}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Valkey]:
    class Guarded(Valkey):
        settings = (*Valkey.settings, "--requirepass", "0pen-sesame")

        password = "0pen-sesame"

    with Guarded.own() as server:
        yield server


@pytest.mark.parametrize("who", ["", ":wr0ng@", "nobody:wr0ng@"])
def test_a_wrong_password_is_said_and_never_shown(guarded: Valkey, who: str) -> None:
    store = RedisStore(WORLD, read_address(f"{who}127.0.0.1:{guarded.port}", tls=False))
    for attempt in (
        store.acquire("x", holder=holder(), ttl=30.0),
        store.views(),
    ):
        with pytest.raises(StoreUnfit, match="refused the user or the password") as caught:
            finish(attempt)
        assert f"127.0.0.1:{guarded.port}" in str(caught.value)
        assert "wr0ng" not in str(caught.value)
    finish(store.close())


def test_the_right_password_opens(guarded: Valkey) -> None:
    with Fencepost(f"redis://:0pen-sesame@127.0.0.1:{guarded.port}/0") as fp, fp.lock("x"):
        assert [view.name for view in fp.locks()] == ["x"]


def refused_by(store: RedisStore) -> FencepostError:
    with pytest.raises(FencepostError) as caught:
        finish(store.acquire("x", holder=holder(), ttl=30.0))
    finish(store.close())
    return caught.value


def test_who_cannot_be_reached_is_named() -> None:
    error = refused_by(store_at(1))
    assert isinstance(error, StoreUnavailable)
    assert "Redis at 127.0.0.1:1/0 cannot be reached" in str(error)
    assert "is this the right host and port?" in str(error)


def test_a_database_that_does_not_exist_is_named() -> None:
    store = RedisStore(WORLD, read_address(f"127.0.0.1:{shared(Valkey).port}/99", tls=False))
    error = refused_by(store)
    assert isinstance(error, StoreUnfit)
    assert "there is no database 99" in str(error)


def test_a_missing_right_is_said_once_and_nothing_is_half_done(space: str) -> None:
    server = shared(Valkey)
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", space, "on", ">pw", "~fp:*", "+@all", "-set")
        address = read_address(f"{space}:pw@127.0.0.1:{server.port}", tls=False)
        error = refused_by(RedisStore(WORLD, address, namespace=space))
        assert isinstance(error, Misuse)
        assert "does not allow what leases need" in str(error)
        client.execute_command("ACL", "DELUSER", space)
        assert client.keys(f"fp:{{{space}*") == []


def test_a_key_that_is_not_ours_is_left_alone(space: str) -> None:
    server = shared(Valkey)
    with server.client() as client:
        for value in ("something else", "1\n0\nrubbish"):
            client.set(f"fp:{{{space}:x}}:lease", value)
            error = refused_by(store_at(server.port, space))
            assert isinstance(error, Misuse)
            assert "that we did not write" in str(error)
            assert client.get(f"fp:{{{space}:x}}:lease") == value.encode()


def test_a_server_that_speaks_something_else_is_no_redis() -> None:
    server = shared(Postgres)
    error = refused_by(store_at(server.port, options="?timeout=1"))
    assert isinstance(error, StoreUnavailable), "nothing was asked of it"
    assert "cannot be reached: Connection closed by server" in str(error)


def test_each_verb_is_one_command(space: str) -> None:
    server = shared(Valkey)
    store, who = store_at(server.port, space), holder()
    grant = finish(store.acquire("warm", holder=who, ttl=30.0))
    finish(store.renew("warm", nonce=who.nonce, token=grant.token, ttl=30.0))
    finish(store.release("warm", nonce=who.nonce, token=grant.token))
    finish(store.peek("warm"))
    with server.client() as client, client.monitor() as watched:
        grant = finish(store.acquire("x", holder=who, ttl=30.0))
        with pytest.raises(LeaseHeld):
            finish(store.acquire("x", holder=holder(), ttl=30.0))
        finish(store.renew("x", nonce=who.nonce, token=grant.token, ttl=30.0))
        finish(store.peek("x"))
        finish(store.release("x", nonce=who.nonce, token=grant.token))
        client.echo("over")
        seen = []
        for command in watched.listen():
            word = command["command"].split()[0]
            if word in ("ECHO", "HELLO", "CLIENT"):  # or the connection for it
                break
            seen.append(word if command["client_type"] != "lua" else word.lower())
    assert [word for word in seen if word.isupper()] == ["EVALSHA"] * 5
    writes = [word for word in seen if word in ("set", "setrange", "zadd", "hset", "pexpire")]
    assert writes == ["set", "set", "setrange"], "one write for each change, none for the others"
    finish(store.close())


def test_a_forgotten_script_costs_one_more_command_and_nothing_else(space: str) -> None:
    server = shared(Valkey)
    store, who = store_at(server.port, space), holder()
    with server.client() as client:
        grant = finish(store.acquire("x", holder=who, ttl=30.0))
        client.script_flush()
        finish(store.renew("x", nonce=who.nonce, token=grant.token, ttl=30.0))
        client.script_flush()
        finish(store.release("x", nonce=who.nonce, token=grant.token))
    finish(store.close())


def test_leases_are_found_among_very_many_other_keys(space: str) -> None:
    with Valkey.own() as server, server.client() as client:
        client.eval("for i = 1, 30000 do redis.call('SET', 'other:' .. i, i) end", 0)
        store = store_at(server.port, space)
        for number in range(30):
            finish(store.acquire(f"job {number:02}", holder=holder(), ttl=30.0))
        names = [view.name for view in finish(store.views())]
        assert names == [f"job {number:02}" for number in range(30)]
        finish(store.close())


def fencepost(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("fencepost")), "--url", url, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_line_runs_shows_and_breaks(space: str) -> None:
    url = shared(Valkey).url()
    name = f"nightly {space}"
    inner = [sys.executable, "-c", "import os; print(os.environ['FENCEPOST_TOKEN'])"]
    ran = fencepost(url, "exec", name, "--", *inner)
    assert ran.returncode == 0, ran.stderr
    with Fencepost(url) as fp:
        lock = fp.lock(name)
        lease = lock.acquire()
        assert lease.token > int(ran.stdout)
        assert fencepost(url, "exec", name, "--", "true").returncode != 0
        shown = json.loads(fencepost(url, "--json", "locks").stdout)
        assert [found["token"] for found in shown if found["name"] == name] == [lease.token]
        broken = fencepost(
            url, "lock", "break", name, "--token", str(lease.token), "--reason", "it hangs"
        )
        assert broken.returncode == 0, broken.stderr
        assert lock.release(lease) is False


def test_a_job_is_refused_with_a_sentence() -> None:
    only = "RedisStore keeps leases only: jobs need a store with a ledger"
    with Fencepost(shared(Valkey).url()) as fp, pytest.raises(Misuse, match=only):

        @fp.job("nightly")
        def nightly() -> None: ...
