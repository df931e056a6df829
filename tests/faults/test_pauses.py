"""Whoever slept through the end of its lease finds a fence, and takes nothing back."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from faultlab import Puppet, fencepost, until, url_of

from fencepost.fence import CREATE_GUARD

if TYPE_CHECKING:
    from pathlib import Path

TTL = 0.6


def test_a_paused_holder_is_fenced_out_by_its_successor(tmp_path: Path) -> None:
    url, effects = url_of(tmp_path), tmp_path / "effects.db"
    with sqlite3.connect(effects) as database:
        database.execute(CREATE_GUARD)
        database.execute("CREATE TABLE effect (value TEXT)")
    database.close()
    with Puppet(url) as first, Puppet(url) as second:
        old, at = first.granted("x", f"{TTL}s")
        assert first.ask("write", effects, "first") == "fine"
        first.pause()
        new, got = second.granted("x", f"{TTL}s", "30s")
        assert new > old
        assert got - at >= TTL  # a paused holder is not dead: it was waited for
        assert second.ask("write", effects, "second") == "fine"
        with fencepost(url) as fp:  # 3 ttl, through which the second one goes on renewing
            began = fp.locks()[0]
            until(lambda: fp.locks()[0].expires_in > 0 and _beats(tmp_path) >= 9)
            assert fp.locks()[0].token == began.token
        first.go_on()
        assert first.ask("write", effects, "late").startswith("TokenStale")
        assert first.ask("check").startswith("LeaseLost")
        assert first.ask("release") == "released False"
        assert second.ask("check") == "fine"
        assert second.ask("write", effects, "third") == "fine"
        assert first.ask("acquire", "x").startswith("LeaseHeld")
    with sqlite3.connect(effects) as database:
        written = [value for (value,) in database.execute("SELECT value FROM effect")]
    database.close()
    assert written == ["first", "second", "third"]


def _beats(folder: Path) -> int:
    with sqlite3.connect(folder / "leases.db") as database:
        (beat,) = database.execute("SELECT beat FROM fencepost_lease").fetchone()
    database.close()
    return int(beat)


def test_a_short_pause_loses_nothing(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    with Puppet(url) as holder, Puppet(url) as other:
        token, _ = holder.granted("x", "20s")
        holder.pause()
        assert other.ask("acquire", "x").startswith("LeaseHeld")
        holder.go_on()
        assert holder.ask("check") == "fine"
        assert f"token {token}" in other.ask("acquire", "x")
