"""An endpoint as a job's body: what it is told, what its answers mean, and what stays secret."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from email.utils import formatdate
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from endpoint_kit import Asked, Endpoint, Said, said_json
from executor_kit import RUN, SLOT, Triggered, events, record, triggered, wait_for

from fencepost import BadUrl, Fencepost, Misuse, Retry
from fencepost.executors.http import http_body
from fencepost.executors.signing import About, SignatureRefused, verify

if TYPE_CHECKING:
    from pathlib import Path

    from fencepost.model.outcome import Outcome

both_faces = pytest.mark.parametrize("face", ["blocking", "asyncio"])
FAST = Retry(2, base="10ms")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/fp.db"


def answered(url: str, *answers: Said, **words: Any) -> tuple[Outcome, list[Asked]]:
    with Endpoint(*answers) as endpoint, Fencepost(url) as fp:
        fp.http("job", endpoint.url, **words)
        return fp.trigger("job", SLOT), endpoint.asked


@both_faces
def test_an_endpoint_is_told_everything_about_its_run(url: str, face: str) -> None:
    with Endpoint(said_json({"sent": 3})) as endpoint:
        at = f"{endpoint.url}/hook"
        words = {"secret": "s3cret-of-hooks", "every": "1h", "headers": {"X-Team": "ops"}}
        outcome = triggered(face, url, lambda fp: fp.http("job", at, **words))
        (asked,) = endpoint.asked
    assert (outcome.status, outcome.result) == ("succeeded", {"sent": 3})
    assert (asked.method, asked.path) == ("POST", "/hook")
    assert asked.json == {
        "run_id": RUN,
        "job": "job",
        "slot": "2026-01-20T02:00:00Z",
        "window": ["2026-01-20T01:00:00Z", "2026-01-20T02:00:00Z"],
        "attempt": 1,
        "token": outcome.token,
        "checkpoint": None,
        "payload": None,
    }
    assert asked.headers["fencing-token"] == str(outcome.token)
    assert asked.headers["idempotency-key"] == asked.headers["fencepost-run"] == RUN
    assert asked.headers["fencepost-slot"] == "2026-01-20T02:00:00Z"
    assert asked.headers["x-team"] == "ops"
    about = About("POST", "/hook", RUN, str(outcome.token))
    signature = asked.headers["fencepost-signature"]
    verify("s3cret-of-hooks", signature, asked.body, time.time(), about=about)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_request_without_a_body_is_signed_for_its_own_run(url: str, method: str) -> None:
    with Endpoint() as endpoint:
        at = f"{endpoint.url}/a hook?b=ü"
        words = {"secret": "s3cret-of-hooks", "method": method}
        outcome = triggered("blocking", url, lambda fp: fp.http("job", at, **words))
        (asked,) = endpoint.asked
    about = About(method, asked.path, asked.headers["fencepost-run"], str(outcome.token))
    signature = asked.headers["fencepost-signature"]
    verify("s3cret-of-hooks", signature, b"", time.time(), about=about)
    other = about._replace(token=str(outcome.token + 1))
    with pytest.raises(SignatureRefused):
        verify("s3cret-of-hooks", signature, b"", time.time(), about=other)


def test_the_path_of_a_hook_is_told_to_nobody(url: str) -> None:
    with Endpoint(Said(500, b"cannot POST /services/T0/B0/xyzzyxyzzy")) as endpoint:
        at = f"{endpoint.url}/services/T0/B0/xyzzyxyzzy"
        outcome = triggered("blocking", url, lambda fp: fp.http("job", at))
    assert f"{endpoint.url} answered 500" in (outcome.error or "")
    assert "xyzzy" not in (outcome.error or "")


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (Said(204), None),
        (Said(200, b"fine", (("Content-Type", "text/plain"),)), None),
        (Said(200, b"{not json", (("Content-Type", "application/json"),)), None),
        (said_json("x" * 100_000), None),
        (said_json([1, None, "a"], status=201), [1, None, "a"]),
    ],
)
def test_any_other_2xx_is_done_and_only_small_json_is_its_result(
    url: str, answer: Said, result: object
) -> None:
    outcome, _ = answered(url, answer)
    assert (outcome.status, outcome.result) == ("succeeded", result)


@pytest.mark.parametrize("status", [400, 401, 404, 410, 422])
def test_a_4xx_is_given_up(url: str, status: int) -> None:
    outcome, asked = answered(url, Said(status, b"no such customer"), retry=FAST)
    assert (outcome.status, outcome.reason, len(asked)) == ("failed", "gave_up", 1)
    assert f"answered {status}: no such customer" in (outcome.error or "")


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_what_may_pass_is_tried_again_with_the_same_key_and_a_higher_token(
    url: str, status: int
) -> None:
    outcome, asked = answered(url, Said(status), Said(200), retry=FAST)
    assert (outcome.status, outcome.attempt) == ("succeeded", 2)
    first, second = asked
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert int(first.headers["fencing-token"]) < int(second.headers["fencing-token"])
    assert second.json["attempt"] == 2


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_obeyed(url: str, status: int, as_date: bool) -> None:  # noqa: FBT001
    after = formatdate(time.time() + 3, usegmt=True) if as_date else "2"
    busy = Said(status, headers=(("Retry-After", after),))
    began = time.monotonic()
    outcome, asked = answered(url, busy, Said(200), retry=FAST)
    assert (outcome.status, len(asked)) == ("succeeded", 2)
    assert time.monotonic() - began > 1.5


def test_423_is_skipped_as_held_where_nothing_is_to_be_tried_again(url: str) -> None:
    outcome, _ = answered(url, Said(423))
    assert (outcome.status, outcome.reason) == ("skipped", "lock_held")


def test_423_is_tried_again_where_the_policy_allows(url: str) -> None:
    outcome, asked = answered(url, Said(423), Said(200), retry=FAST)
    assert (outcome.status, len(asked)) == ("succeeded", 2)


def test_no_redirect_is_followed(url: str) -> None:
    with Endpoint() as elsewhere:
        moved = Said(307, headers=(("Location", elsewhere.url),))
        outcome, _ = answered(url, moved, secret="s3cret-of-hooks")
        assert elsewhere.asked == []
    assert (outcome.status, outcome.reason) == ("failed", "gave_up")
    assert "no redirect is followed" in (outcome.error or "")


def test_an_endpoint_that_is_not_there_was_sent_nothing(url: str) -> None:
    with Endpoint() as gone:
        pass
    with Fencepost(url) as fp:
        fp.http("job", gone.url)
        outcome = fp.trigger("job", SLOT)
    assert outcome.status == "failed"
    assert "could not be reached, nothing was sent" in (outcome.error or "")


@pytest.mark.parametrize("how", ["close", "tear"])
def test_an_answer_that_breaks_off_may_have_happened_and_is_tried_again(url: str, how: str) -> None:
    outcome, asked = answered(url, Said(200, how=how), Said(200), retry=FAST)
    assert (outcome.status, len(asked)) == ("succeeded", 2)
    with Fencepost(url) as fp:
        (failed,) = [event for event in events(fp) if event.what == "attempt_failed"]
    assert "what was asked may have happened" in failed.detail


@pytest.mark.parametrize("how", ["hang", "drip"])
def test_an_endpoint_that_takes_too_long_may_have_happened(url: str, how: str) -> None:
    outcome, asked = answered(url, Said(200, how=how), Said(200), request_timeout="500ms", retry=2)
    assert len(asked) == 2
    with Fencepost(url) as fp:
        (failed,) = [event for event in events(fp) if event.what == "attempt_failed"]
    assert "may have happened; another try has the same Idempotency-Key" in failed.detail
    keys = {one.headers["idempotency-key"] for one in asked}
    assert (outcome.status, keys) == ("succeeded", {RUN})


def test_a_run_that_is_out_of_time_may_have_happened(url: str) -> None:
    outcome, _ = answered(url, Said(how="hang"), timeout="4s")  # by then it was sent
    assert (outcome.status, outcome.reason) == ("timed_out", "timeout")
    assert "may have happened" in (outcome.error or "")


@both_faces
def test_a_request_ends_when_its_run_is_cancelled(url: str, face: str) -> None:
    with Endpoint(Said(how="hang")) as endpoint, Fencepost(url) as fp:
        declare = partial(_declared, at=endpoint.url)
        under_way = Triggered(face, url, declare)
        wait_for(lambda: endpoint.asked)
        fp.cancel(RUN)
        assert under_way.outcome().status == "cancelled"


def _declared(fp: Any, *, at: str) -> None:
    fp.http("job", at)


def test_secrets_are_in_no_error_no_log_and_no_ledger(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = ["signing-secret-1", "url-password-2", "query-token-3", "header-bearer-4"]

    def echo(asked: Asked) -> Said:
        return Said(500, repr((asked.path, asked.headers, asked.body, secrets)).encode())

    def echoed(asked: Asked) -> Said:
        return said_json({"you said": [asked.path, *asked.headers.values(), *secrets]})

    with (
        caplog.at_level(logging.DEBUG),
        Endpoint(echo, Said(how="close"), echoed) as endpoint,
        Fencepost(url) as fp,
    ):
        at = (
            endpoint.url.replace("://", f"://me:{secrets[1]}@") + f"/hook?access_token={secrets[2]}"
        )
        headers = {"X-Api-Key": secrets[3]}
        fp.http("job", at, secret=secrets[0], headers=headers, retry=Retry(3, base="10ms"))
        outcome = fp.trigger("job", SLOT)
        assert outcome.status == "succeeded"
        assert endpoint.asked[0].headers["x-api-key"] == secrets[3]
        secrets.append(endpoint.asked[0].headers["authorization"].removeprefix("Basic "))
        told = "\n".join([*(repr(event) for event in events(fp)), repr(record(fp)), caplog.text])
    assert "HTTP Request" not in caplog.text
    for secret in secrets:
        assert secret not in told
        for file in tmp_path.glob("fp.db*"):
            if file.is_file():
                assert secret.encode() not in file.read_bytes(), file


def test_the_clients_own_log_lines_are_only_kept_back_for_our_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO), Endpoint() as endpoint:
        http_body(endpoint.url)
        httpx.get(endpoint.url)
    assert "HTTP Request" in caplog.text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"url": "ftp://host/x"}, BadUrl),
        ({"url": "host/x"}, BadUrl),
        ({"url": "https://"}, BadUrl),
        ({"method": "FETCH"}, Misuse),
        ({"secret": ""}, Misuse),
        ({"callback": "/relative"}, BadUrl),
        ({"timeout": "-1s"}, Misuse),
    ],
)
def test_what_cannot_be_asked_is_refused_when_it_is_declared(
    words: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        http_body(**{"url": "https://host/x", **words})


def test_without_the_extra_the_command_that_installs_it_is_told() -> None:
    program = (
        "import sys; sys.modules['httpx'] = None\n"
        "from fencepost import Fencepost, MissingExtra\n"
        "try: Fencepost('memory://x').http('job', 'https://host')\n"
        "except MissingExtra as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "pip install 'fencepost[http]'" in done.stdout
