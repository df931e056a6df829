"""The application that handed-off runs report back to, over ASGI and with real signatures."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import httpx
import pytest
from endpoint_kit import Asked, Endpoint, Said
from executor_kit import RUN, SLOT, record

from fencepost import AsyncFencepost, Fencepost, Misuse, Run
from fencepost.executors.callback import callback_app
from fencepost.executors.signing import SIGNATURE, About, sign
from fencepost.model.run import State

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "shared-by-both-sides"


@pytest.fixture
def fp(tmp_path: Path) -> Iterator[Fencepost]:
    with Fencepost(f"sqlite:///{tmp_path}/fp.db") as made:
        yield made


def hand_over(run: Run) -> None:
    run.hand_over()


def handed_off(fp: Fencepost, **words: Any) -> int:
    fp.job("job", **words)(hand_over)
    return fp.trigger("job", SLOT).token


def posted(
    fp: Any,
    path: str,
    content: object,
    *,
    secret: str | None = SECRET,
    late: float = 0.0,
    method: str = "POST",
    signed_for: str = "",
) -> tuple[int, dict[str, Any]]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    about = About(method, signed_for or unquote(path[max(0, path.find("/runs/")) :]))
    signature = sign(secret or "none", body, time.time() - late, about=about)
    headers = {} if secret is None else {SIGNATURE: signature}

    async def ask() -> tuple[int, dict[str, Any]]:
        transport = httpx.ASGITransport(callback_app(fp, SECRET))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            answer = await client.request(method, path, content=body, headers=headers)
            return answer.status_code, answer.json()

    return asyncio.run(ask())


def test_a_callback_completes_a_run_and_a_second_one_is_answered_the_same(fp: Fencepost) -> None:
    token = handed_off(fp)
    told = {"token": token, "status": "succeeded", "result": {"rows": 3}}
    first = posted(fp, f"/runs/{RUN}/complete", told)
    assert first[0] == 200
    assert (first[1]["run_id"], first[1]["status"]) == (RUN, "succeeded")
    assert posted(fp, f"/runs/{RUN}/complete", told) == first
    assert record(fp).result == '{"rows":3}'


def test_it_may_be_mounted_anywhere_and_the_run_may_be_quoted(fp: Fencepost) -> None:
    token = handed_off(fp)
    quoted = RUN.replace("@", "%40").replace(":", "%3A")
    told = {"token": token, "status": "failed", "error": "no"}
    assert posted(fp, f"/internal/jobs/runs/{quoted}/complete", told)[0] == 200
    assert record(fp).state is State.FAILED


def test_a_beat_is_answered_with_whether_a_cancel_was_asked_for(fp: Fencepost) -> None:
    token = handed_off(fp)
    told = {"token": token, "done": 1, "total": 2}
    assert posted(fp, f"/runs/{RUN}/beat", told) == (200, {"run_id": RUN, "cancelled": False})
    fp.cancel(RUN)
    assert posted(fp, f"/runs/{RUN}/beat", told) == (200, {"run_id": RUN, "cancelled": True})
    assert record(fp).done == 1


def test_the_asyncio_face_may_be_mounted_too(fp: Fencepost) -> None:
    token = handed_off(fp)
    afp = AsyncFencepost(fp._holding.source)
    told = {"token": token, "status": "succeeded"}
    assert posted(afp, f"/runs/{RUN}/complete", told)[0] == 200


def test_the_name_of_a_job_may_look_quoted(fp: Fencepost) -> None:
    fp.job("a%41")(hand_over)
    token = fp.trigger("a%41", SLOT).token
    run = RUN.replace("job@", "a%41@")
    told = {"token": token, "status": "succeeded"}
    assert posted(fp, f"/runs/{quote(run, safe='')}/complete", told)[1]["run_id"] == run


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret": None},
        {"secret": "guessed"},
        {"late": 400.0},
        {"signed_for": f"/runs/{RUN}/beat"},
        {"signed_for": "/runs/other@2026-01-20T02:00:00Z/complete"},
    ],
)
def test_who_is_not_signed_for_changes_nothing(fp: Fencepost, wrong: dict[str, Any]) -> None:
    token = handed_off(fp)
    told = {"token": token, "status": "succeeded"}
    status, content = posted(fp, f"/runs/{RUN}/complete", told, **wrong)
    assert (status, content["error"]["code"]) == (401, "signature_refused")
    assert SECRET not in json.dumps(content)
    assert record(fp).state is State.RUNNING


def test_an_old_token_is_a_conflict(fp: Fencepost) -> None:
    token = handed_off(fp)
    told = {"token": token - 1, "status": "succeeded"}
    for verb, words in (("complete", told), ("beat", {"token": token - 1})):
        status, content = posted(fp, f"/runs/{RUN}/{verb}", words)
        assert (status, content["error"]["code"]) == (409, "lost")
    assert record(fp).state is State.RUNNING


@pytest.mark.parametrize(
    ("path", "content", "method", "status"),
    [
        (
            "/runs/other@2026-01-20T02:00:00Z/complete",
            {"token": 1, "status": "failed"},
            "POST",
            404,
        ),
        (f"/runs/{RUN}/explode", {"token": 1}, "POST", 404),
        ("/complete", {"token": 1}, "POST", 404),
        (f"/runs/{RUN}/complete", {"token": 1, "status": "failed"}, "PUT", 405),
        ("/runs/nonsense/complete", {"token": 1, "status": "failed"}, "POST", 400),
        (f"/runs/{RUN}/complete", b"{no json", "POST", 400),
        (f"/runs/{RUN}/complete", [1], "POST", 400),
        (f"/runs/{RUN}/complete", {"status": "succeeded"}, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": 1}, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": "1", "status": "failed"}, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": 1, "status": "fine"}, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": 2**70, "status": "failed"}, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": -1, "status": "failed"}, "POST", 400),
        (f"/runs/{RUN}/complete", b"[" * 200_000 + b"]" * 200_000, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": 1, "status": "failed", "error": 5}, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": 1, "status": "failed", "retry": 1}, "POST", 400),
        (f"/runs/{RUN}/complete", {"token": 1, "status": "failed", "why": 1}, "POST", 400),
        (f"/runs/{RUN}/beat", {"token": 1, "done": "much"}, "POST", 400),
        (f"/runs/{RUN}/complete", b" " * 1_200_000, "POST", 413),
    ],
)
def test_what_cannot_be_understood_is_answered_with_what_to_do(
    fp: Fencepost, path: str, content: object, method: str, status: int
) -> None:
    handed_off(fp)
    answer, told = posted(fp, path, content, method=method)
    assert answer == status
    assert set(told["error"]) == {"code", "message", "hint"}
    assert record(fp).state is State.RUNNING


def test_an_endpoint_calls_back_where_it_was_told_to(fp: Fencepost) -> None:
    def accept(asked: Asked) -> Said:
        path = asked.json["callback"].removeprefix("https://here/fencepost")
        told = {"token": asked.json["token"], "status": "succeeded", "result": 7}
        callbacks.append(posted(Fencepost(fp._holding.source), f"{path}/complete", told)[0])
        return Said(202)

    callbacks: list[int] = []
    with Endpoint(accept) as endpoint:
        words: dict[str, Any] = {"secret": SECRET, "callback": "https://here/fencepost/"}
        fp.http("job", endpoint.url, **words)
        outcome = fp.trigger("job", SLOT)
    assert (callbacks, outcome.status, outcome.result) == ([200], "succeeded", 7)


def test_no_secret_is_no_protection(fp: Fencepost) -> None:
    with pytest.raises(Misuse, match="anybody could end your runs"):
        callback_app(fp, "")
