"""The fence of an HTTP service: guards in a file, and the two middlewares in front of an app."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from hypothesis import given, strategies as st

from fencepost import StoreUnavailable, TokenStale
from fencepost.errors import Misuse
from fencepost.fence import admit, header_safe
from fencepost.verifier import FenceASGI, FenceWSGI, Guards, SqliteGuards, read_resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from fencepost import Fencepost, Lease


@pytest.fixture
def guards(tmp_path: Path) -> Iterator[SqliteGuards]:
    guards = SqliteGuards(tmp_path / "guards.db")
    yield guards
    guards.close()


# The guards.


def test_guards_refuse_what_is_older_than_what_they_have_seen(guards: SqliteGuards) -> None:
    for token in (5, 5, 7):
        guards.admit("r", token=token)
    with pytest.raises(TokenStale) as refusal:
        guards.admit("r", token=6)
    assert refusal.value.highest == 7
    guards.admit("other", token=1)


def test_guards_remember_after_they_were_closed(tmp_path: Path) -> None:
    for token in (7, 6):
        guards = SqliteGuards(tmp_path / "guards.db")
        try:
            guards.admit("r", token=token)
        except TokenStale as stale:
            assert (stale.token, stale.highest) == (6, 7)  # noqa: PT017 -- both turns count
        else:
            assert token == 7
        finally:
            guards.close()


def test_guards_survive_a_power_cut(guards: SqliteGuards, tmp_path: Path) -> None:
    guards.admit("r", token=1)
    connection = guards._file._connection
    assert connection is not None
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


@pytest.mark.parametrize("token", [0, -3, 2**63, True])
def test_guards_refuse_what_cannot_be_a_token(guards: SqliteGuards, token: int) -> None:
    with pytest.raises(Misuse, match="fencing token"):
        guards.admit("r", token=token)
    assert guards.highest("r") == 0


def test_no_thread_is_admitted_after_one_with_a_higher_token(guards: SqliteGuards) -> None:
    finished = [0]

    def knock(token: int) -> None:
        highest = max(finished)
        try:
            guards.admit("r", token=token)
        except TokenStale:
            return
        assert token >= highest
        finished.append(token)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(knock, [token for token in range(1, 60) for _ in range(3)]))
    assert max(finished) == 59


PROGRAM = """
import sys
from fencepost import TokenStale
from fencepost.verifier import SqliteGuards

guards = SqliteGuards(sys.argv[1])
for token in range(1, 200):
    try:
        guards.admit("r", token=token)
    except TokenStale as stale:
        assert stale.highest > token
    assert guards.highest("r") >= token
"""


def test_processes_share_the_maximum(guards: SqliteGuards, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "guards.db")]
    programs = [subprocess.Popen(command) for _ in range(4)]
    assert [program.wait(timeout=60) for program in programs] == [0] * 4
    assert guards.highest("r") == 199


def test_a_forked_child_and_its_parent_share_the_maximum(guards: SqliteGuards) -> None:
    guards.admit("r", token=1)
    child = os.fork()
    if child == 0:  # pragma: no cover -- no report comes from here
        try:
            guards.admit("r", token=2)
            os._exit(0)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with pytest.raises(TokenStale):
        guards.admit("r", token=1)


def test_the_guards_of_a_file_and_the_fence_on_it_are_one(database: str) -> None:
    guards = SqliteGuards(database)
    guards.admit("r", token=5)
    with closing(sqlite3.connect(database, isolation_level=None)) as conn:
        conn.execute("BEGIN IMMEDIATE")
        with pytest.raises(TokenStale):
            admit(conn, resource="r", token=4)
        admit(conn, resource="r", token=6)
        conn.execute("COMMIT")
    with pytest.raises(TokenStale):
        guards.admit("r", token=5)
    guards.close()


# The headers.


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_resource_arrives_as_it_was_sent(resource: str) -> None:
    sent = header_safe(resource)
    assert sent.isascii()
    assert sent.isprintable()
    assert sent == sent.strip()
    assert read_resource([sent]) == resource


@pytest.mark.parametrize("values", [[], ["a", "b"], ["a,b"], ["%ff"], ["é"]])
def test_a_resource_that_cannot_be_read_is_none(values: list[str]) -> None:
    assert read_resource(values) is None


# The middlewares: the same requests to both, one called directly, one over a socket.


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


async def asgi_app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with what the middleware left in the scope."""
    told = {key: scope[key] for key in scope if key.startswith("fencepost.")}
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


def wsgi_app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer with what the middleware left in the environ."""
    told = {key: environ[key] for key in environ if key.startswith("fencepost.")}
    start_response("200 OK", [])
    return [json.dumps(told).encode()]


def ask_asgi(app: FenceASGI, method: str, headers: list[tuple[str, str]]) -> Answer:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("nobody reads the body here")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": "/invoices",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers],
    }
    asyncio.run(app(scope, receive, send))
    start, *rest = sent
    names = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], names, b"".join(part["body"] for part in rest))


class Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- as it is named there
        pass


@contextmanager
def served(app: Any) -> Iterator[int]:
    """Serve a WSGI application on loopback; yield its port."""
    with make_server("127.0.0.1", 0, app, handler_class=Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask_wsgi(app: FenceWSGI, method: str, headers: list[tuple[str, str]]) -> Answer:
    with served(app) as port, closing(HTTPConnection("127.0.0.1", port, timeout=10)) as client:
        client.putrequest(method, "/invoices")
        for name, value in headers:
            client.putheader(name, value)
        client.endheaders()
        response = client.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, names, response.read())


@pytest.fixture(params=["asgi", "wsgi"])
def fenced(request: pytest.FixtureRequest) -> Callable[..., Callable[..., Answer]]:
    """Return a way to put an application behind a fence, which returns a way to ask it."""

    def fence(guards: Guards, **options: Any) -> Callable[..., Answer]:
        def ask(
            method: str, headers: dict[str, str] | None = None, *more: tuple[str, str]
        ) -> Answer:
            pairs = [*(headers or {}).items(), *more]
            if request.param == "asgi":
                return ask_asgi(FenceASGI(asgi_app, guards=guards, **options), method, pairs)
            return ask_wsgi(FenceWSGI(wsgi_app, guards=guards, **options), method, pairs)

        return ask

    return fence


def claim(token: object, resource: str = "default/billing") -> dict[str, str]:
    return {"Fencing-Token": str(token), "Fencing-Resource": resource}


def test_a_stale_request_is_answered_with_412_and_the_highest_token(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    ask = fenced(guards)
    assert ask("POST", claim(5)).status == 200
    assert ask("POST", claim(6)).status == 200
    refused = ask("POST", claim(5))
    assert refused.status == 412
    assert refused.headers["content-type"] == "application/json"
    assert refused.headers["content-length"] == str(len(refused.body))
    assert refused.error["code"] == "token_stale"
    assert refused.error["highest"] == 6
    assert "default/billing" in refused.error["message"]
    assert refused.error["hint"]
    assert ask("POST", claim(6)).status == 200


def test_the_headers_of_a_lease_are_admitted_until_its_successor_came(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards, fp: Fencepost
) -> None:
    ask = fenced(guards)
    with fp.lock("rücklauf, täglich %") as old:
        answer = ask("POST", old.headers())
    assert json.loads(answer.body) == {
        "fencepost.token": old.token,
        "fencepost.resource": "default/rücklauf, täglich %",
    }
    with fp.lock("rücklauf, täglich %") as new:
        assert ask("POST", new.headers()).status == 200
    assert ask("POST", old.headers()).status == 412


def test_a_request_without_a_token_passes_untouched(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    answer = fenced(guards)("POST")
    assert (answer.status, answer.body) == (200, b"{}")


def test_a_token_can_be_required_of_what_changes_something(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    ask = fenced(guards, required=True)
    for method in ("POST", "PUT", "PATCH", "DELETE", "PROPPATCH"):
        refused = ask(method)
        assert (refused.status, refused.error["code"]) == (428, "token_required")
    for method in ("GET", "OPTIONS"):
        assert ask(method).status == 200
    assert ask("POST", claim(1)).status == 200


def test_a_read_with_a_token_shuts_out_the_predecessor(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    ask = fenced(guards)
    assert ask("GET", claim(6)).status == 200
    assert ask("POST", claim(5)).status == 412
    assert ask("GET", claim(5)).status == 412


@pytest.mark.parametrize(
    "token", ["", "x", "0", "-1", "+5", "05", "5.0", "1e3", "5,6", "²", "9" * 19, "1" * 5000]
)
def test_a_malformed_token_is_answered_with_400(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards, token: str
) -> None:
    refused = fenced(guards)("POST", claim(token))
    assert (refused.status, refused.error["code"]) == (400, "token_malformed")
    assert len(refused.body) < 500


def test_two_tokens_in_one_request_are_answered_with_400(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    refused = fenced(guards)("POST", claim(5), ("Fencing-Token", "6"))
    assert (refused.status, refused.error["code"]) == (400, "token_malformed")


@pytest.mark.parametrize("resource", ["", "a,b", "%ff", "x" * 1202])
def test_a_malformed_resource_is_answered_with_400(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards, resource: str
) -> None:
    refused = fenced(guards)("POST", claim(5, resource))
    assert (refused.status, refused.error["code"]) == (400, "resource_malformed")


def test_a_service_may_say_itself_what_it_guards(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    ask = fenced(guards, resource="invoices")
    assert ask("POST", claim(6, "whatever")).status == 200
    assert ask("POST", {"Fencing-Token": "5"}).status == 412
    assert guards.highest("invoices") == 6


def test_a_service_may_find_what_it_guards_in_the_request(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    def path(request: dict[str, Any]) -> str:
        return str(request.get("path") or request["PATH_INFO"])

    ask = fenced(guards, resource=path)
    assert ask("POST", claim(6)).status == 200
    assert guards.highest("/invoices") == 6


def test_a_head_request_is_refused_without_a_body(
    fenced: Callable[..., Callable[..., Answer]], guards: SqliteGuards
) -> None:
    ask = fenced(guards)
    ask("POST", claim(6))
    refused = ask("HEAD", claim(5))
    assert (refused.status, refused.body) == (412, b"")


class Unavailable:
    def admit(self, resource: str, *, token: int) -> None:
        raise StoreUnavailable("the disk is on fire")


def test_a_token_that_cannot_be_compared_is_not_admitted(
    fenced: Callable[..., Callable[..., Answer]],
) -> None:
    refused = fenced(Unavailable())("POST", claim(5))
    assert (refused.status, refused.error["code"]) == (503, "guards_unavailable")
    assert refused.headers["retry-after"] == "1"


def test_only_http_goes_through_the_fence(guards: SqliteGuards) -> None:
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    fence = FenceASGI(app, guards=guards, required=True)
    for kind in ("lifespan", "websocket"):
        asyncio.run(fence({"type": kind}, None, None))  # type: ignore[arg-type]
    assert passed == ["lifespan", "websocket"]


class Slow:
    """Guards that answer only when they are told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()

    def admit(self, resource: str, *, token: int) -> None:
        assert self.answer.wait(timeout=10)


def test_the_loop_goes_on_while_the_guards_are_asked() -> None:
    slow = Slow()

    async def discard(message: Any) -> None:
        pass

    async def both() -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "headers": [(b"fencing-token", b"5"), (b"fencing-resource", b"r")],
        }
        fence = FenceASGI(asgi_app, guards=slow)
        request = asyncio.create_task(fence(scope, discard, discard))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        slow.answer.set()  # this task can only get here if the other does not block the loop
        await request

    asyncio.run(both())


def test_importing_the_verifier_brings_in_no_loop(lease: Lease) -> None:
    heavy = "{'asyncio', 'json', 'urllib.parse', 'concurrent.futures'}"
    program = f"import sys, fencepost.verifier; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "[]"
