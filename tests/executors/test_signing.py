"""A signature proves who sent a body and when, and nothing else passes for one."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from fencepost import Misuse
from fencepost.executors.signing import About, SignatureRefused, sign, verify

SECRET, BODY, AT = "correct horse", b'{"token": 7}', 1_700_000_000.9
ABOUT = About("POST", "/hook?a=1", "job@2026-01-20T02:00:00Z", "7")
GOOD = sign(SECRET, BODY, AT, about=ABOUT)


def test_a_signature_is_the_hmac_of_all_that_is_asked() -> None:
    head = b"1700000000\nPOST\n/hook?a=1\njob@2026-01-20T02:00:00Z\n7\n"
    expected = hmac.new(SECRET.encode(), head + BODY, hashlib.sha256).hexdigest()
    assert f"t=1700000000,v1={expected}" == GOOD


@pytest.mark.parametrize("late", [-300.0, 0.0, 299.0])
def test_a_good_signature_is_accepted_while_it_is_recent(late: float) -> None:
    verify(SECRET, GOOD, BODY, 1_700_000_000 + late, about=ABOUT)
    verify(SECRET.encode(), GOOD, BODY, 1_700_000_000 + late, about=ABOUT)


def test_a_secret_can_be_changed_while_both_sign() -> None:
    old = sign("old secret", BODY, AT, about=ABOUT).partition(",")[2]
    verify(SECRET, f"{GOOD},{old}", BODY, AT, about=ABOUT)
    verify("old secret", f"{GOOD},{old}", BODY, AT, about=ABOUT)


@pytest.mark.parametrize(
    ("header", "body", "now", "why"),
    [
        (GOOD, b'{"token": 8}', AT, "not by one who knows"),
        (sign("wrong", BODY, AT, about=ABOUT), BODY, AT, "not by one who knows"),
        (GOOD.replace("t=1700000000", "t=1700000001"), BODY, AT, "not by one who knows"),
        (GOOD[:-1], BODY, AT, "not by one who knows"),
        (GOOD.replace("v1=", "v1=é"), BODY, AT, "not by one who knows"),
        (GOOD, BODY, AT + 302, "30[23] s ago"),
        (GOOD, BODY, AT - 302, "in the future"),
        (None, BODY, AT, "missing or malformed"),
        ("", BODY, AT, "missing or malformed"),
        ("v1=abc", BODY, AT, "missing or malformed"),
        ("t=1700000000", BODY, AT, "missing or malformed"),
        ("t=soon,v1=abc", BODY, AT, "missing or malformed"),
        (f"t=1,{GOOD}", BODY, AT, "missing or malformed"),
        ("t=1" + "0" * 400 + ",v1=abc", BODY, AT, "missing or malformed"),
    ],
)
def test_anything_else_is_refused(header: str | None, body: bytes, now: float, why: str) -> None:
    with pytest.raises(SignatureRefused, match=why) as refused:
        verify(SECRET, header, body, now, about=ABOUT)
    assert SECRET not in str(refused.value)
    assert GOOD.partition("v1=")[2] not in str(refused.value)


def test_the_tolerance_is_the_callers_to_choose() -> None:
    verify(SECRET, GOOD, BODY, AT + 900, 1000, about=ABOUT)
    with pytest.raises(SignatureRefused):
        verify(SECRET, GOOD, BODY, AT + 20, tolerance=10, about=ABOUT)


@pytest.mark.parametrize(
    "other",
    [
        ABOUT._replace(method="PUT"),
        ABOUT._replace(path="/hook?a=2"),
        ABOUT._replace(run="job@2026-01-20T03:00:00Z"),
        ABOUT._replace(token="8"),
        ABOUT._replace(run="", token=""),
        ABOUT._replace(path="/hook?a=1\njob@2026-01-20T02:00:00Z", run="7", token=""),
    ],
)
def test_a_request_cannot_be_turned_into_another_one(other: About) -> None:
    with pytest.raises(SignatureRefused):
        verify(SECRET, GOOD, BODY, AT, about=other)


def test_nothing_is_signed_that_could_be_read_in_two_ways() -> None:
    with pytest.raises(Misuse, match="line feed"):
        sign(SECRET, BODY, AT, about=ABOUT._replace(path="/a\nb"))
