from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from fencepost.errors import BadDuration
from fencepost.model.lease import (
    DRIFT,
    LONGEST_TTL,
    SHORTEST_TTL,
    Holder,
    Phase,
    Record,
    Trust,
    Verdict,
    admits,
    checked_ttl,
    judge,
    next_token,
    phase,
    renew_due,
    renewal_ttl,
    retry_pause,
    stop_times,
    trust,
    why_lost,
)

ERA = "boot-1"
instants = st.floats(min_value=0, max_value=1e9)
ttls = st.floats(min_value=SHORTEST_TTL, max_value=LONGEST_TTL)
tokens = st.integers(min_value=1, max_value=2**53)


def record(*, held: bool = True, expires: float = 100.0, era: str = ERA, ended: str = "") -> Record:
    holder = Holder("nonce-a", "host-a", 1)
    return Record("job", 7, holder, held, era, expires, 30.0, 0.0, ended)


@pytest.mark.parametrize(
    ("found", "nonce", "now", "verdict"),
    [
        (None, "nonce-b", 0.0, Verdict.FREE),
        (record(), "nonce-b", 99.9, Verdict.HELD),
        (record(), "nonce-b", 100.0, Verdict.FREE),
        (record(), "nonce-a", 99.9, Verdict.OURS),
        (record(), "nonce-a", 100.0, Verdict.FREE),
        (record(held=False), "nonce-b", 0.0, Verdict.FREE),
        (record(held=False), "nonce-a", 0.0, Verdict.SPENT),
        (record(era="boot-0"), "nonce-b", 0.0, Verdict.FREE),
        (record(era="boot-0"), "nonce-a", 0.0, Verdict.FREE),
    ],
)
def test_an_acquire_finds_what_the_record_says(
    found: Record | None, nonce: str, now: float, verdict: Verdict
) -> None:
    assert judge(found, nonce=nonce, now=now, era=ERA) is verdict


@pytest.mark.parametrize(
    ("found", "now", "reason"),
    [
        (record(), 99.0, None),
        (record(), 100.0, "ran out"),
        (None, 0.0, "gone"),
        (record(held=False), 0.0, "released"),
        (record(held=False, ended="it was broken by ops: hung"), 0.0, "hung"),
        (record(era="boot-0"), 0.0, "restarted"),
        (record()._replace(token=8), 0.0, "token 8"),
        (record()._replace(holder=Holder("nonce-b", "host-b", 2)), 0.0, "host-b pid 2"),
    ],
)
def test_a_holder_learns_why_it_lost(found: Record | None, now: float, reason: str | None) -> None:
    why = why_lost(found, nonce="nonce-a", token=7, now=now, era=ERA)
    assert why is None if reason is None else reason in (why or "")


@given(highest=tokens, store_us=st.integers(min_value=-(2**50), max_value=2**53))
def test_a_token_is_above_all_before_it_whatever_the_clock_says(
    highest: int, store_us: int
) -> None:
    token = next_token(highest, store_us=store_us)
    assert token > highest
    assert token >= store_us


@given(seen=st.lists(tokens, max_size=20))
def test_what_a_fence_admits_never_falls(seen: list[int]) -> None:
    highest, admitted = 0, []
    for token in seen:
        if admits(highest, token):
            highest = token
            admitted.append(token)
    assert admitted == sorted(admitted)


@pytest.mark.parametrize("token", [0, -1])
def test_zero_and_less_are_never_admitted(token: int) -> None:
    assert not admits(-5, token)


@given(sent=instants, delay=st.floats(min_value=0, max_value=1e6), ttl=ttls)
def test_a_holder_stops_believing_before_the_store_frees_its_lease(
    sent: float, delay: float, ttl: float
) -> None:
    granted_at_store = sent + delay  # the request arrives later than it was sent, never earlier
    fastest_store = granted_at_store + ttl * (1 - DRIFT)
    assert trust(sent, ttl=ttl).until < fastest_store


@given(ttl=ttls, elapsed=st.floats(min_value=0, max_value=2))
def test_phases_come_in_their_order(ttl: float, elapsed: float) -> None:
    order = [Phase.HELD, Phase.DANGER, Phase.SUSPECT, Phase.LOST]
    held = trust(0.0, ttl=ttl)
    now, later = elapsed * ttl, (elapsed + 0.1) * ttl
    assert order.index(phase(held, now=now)) <= order.index(phase(held, now=later))


def test_a_lease_is_renewed_while_it_is_still_fully_trusted() -> None:
    held = trust(0.0, ttl=30.0)
    assert phase(held, now=renew_due(held)) is Phase.HELD
    assert phase(held, now=held.until) is Phase.LOST
    assert phase(held, now=15.0) is Phase.DANGER
    assert phase(held, now=24.0) is Phase.SUSPECT


@given(ttl=ttls)
def test_a_failed_renewal_is_tried_again_several_times_before_the_end(ttl: float) -> None:
    held = trust(0.0, ttl=ttl)
    assert renew_due(held) + 2 * retry_pause(ttl) < held.until


@given(ttl=ttls, now=instants, left=st.floats(min_value=-10, max_value=1e6))
def test_max_hold_is_never_exceeded(ttl: float, now: float, left: float) -> None:
    ends = now + left
    renewed = renewal_ttl(ttl, now=now, ends=ends)
    if renewed is None:
        assert ends - now < SHORTEST_TTL
    else:
        assert renewed <= ttl
        assert now + renewed <= ends + 1e-6 * max(1.0, now)
    assert trust(now, ttl=ttl, ends=ends).until <= ends


@given(ttl=ttls)
def test_a_command_is_killed_before_its_lease_can_end(ttl: float) -> None:
    held: Trust = trust(0.0, ttl=ttl)
    asked, killed = stop_times(held)
    assert asked <= killed <= held.until
    assert killed <= 0.8 * ttl


@pytest.mark.parametrize(
    "ttl", [0, -1, None, float("nan"), float("inf"), 0.1, 90_000, "", "5", True]
)
def test_degenerate_ttls_are_refused_with_their_value(ttl: object) -> None:
    with pytest.raises(BadDuration, match="ttl is"):
        checked_ttl(ttl)  # type: ignore[arg-type]
