"""When a command under a lock is asked to stop, and when it is killed."""

from __future__ import annotations

import pytest

from fencepost.model.command import must_end, notice_of
from fencepost.model.lease import renewal_ttl, trust

ENDS = 103.0


def test_a_lease_that_is_not_renewed_ends_its_command_before_others_may_begin() -> None:
    assert must_end(trust(100.0, ttl=30.0), ends=None, notice=5.0) == (115.0, 124.0)


@pytest.mark.parametrize("sent", [100.0, 101.7, 102.2, 102.5, 102.7])
def test_a_hold_that_is_over_leaves_both_guards_time_to_kill(sent: float) -> None:
    """However short the last renewal was: the lease ends with the hold, and others begin then."""
    ttl = renewal_ttl(5.0, now=sent, ends=ENDS)
    assert ttl is not None
    _, kill = must_end(trust(sent, ttl=ttl, ends=ENDS), ends=ENDS, notice=0.5)
    assert ENDS - kill >= 0.4 - 1e-9


def test_a_command_has_its_whole_notice_before_it_is_killed_for_its_hold() -> None:
    notice = notice_of(0.5, max_hold=3.0)
    ask, kill = must_end(trust(100.0, ttl=30.0, ends=ENDS), ends=ENDS, notice=notice)
    assert (round(ask, 6), round(kill, 6)) == (102.1, 102.6)
