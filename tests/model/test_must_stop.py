"""When an isolated body is asked to stop, and when it is killed."""

from __future__ import annotations

from fencepost.model.command import must_stop
from fencepost.model.lease import trust

LEASE = trust(100.0, ttl=30.0)


def test_an_unrenewed_lease_stops_a_body_before_others_may_start() -> None:
    ask, kill = must_stop(LEASE, deadline=None, asked_at=None, grace=60.0)
    assert (ask, kill) == (115.0, 124.0)
    assert kill < LEASE.until


def test_a_timeout_gives_the_body_its_grace() -> None:
    assert must_stop(LEASE, deadline=105.0, asked_at=None, grace=10.0) == (105.0, 115.0)


def test_no_grace_lasts_longer_than_the_lease() -> None:
    assert must_stop(LEASE, deadline=105.0, asked_at=None, grace=60.0) == (105.0, 124.0)


def test_whatever_comes_first_counts() -> None:
    assert must_stop(LEASE, deadline=110.0, asked_at=104.0, grace=3.0) == (104.0, 107.0)
    assert must_stop(LEASE, deadline=104.0, asked_at=110.0, grace=3.0) == (104.0, 107.0)


def test_who_is_killed_at_once_is_not_asked_later() -> None:
    ask, kill = must_stop(LEASE, deadline=None, asked_at=90.0, grace=0.0)
    assert ask == kill == 90.0
