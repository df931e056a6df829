from __future__ import annotations

from datetime import timedelta

import pytest

from fencepost.errors import BadDuration
from fencepost.model.duration import positive, seconds, shown


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("90s", 90.0),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("250ms", 0.25),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("1.5h", 5400.0),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_durations_mean_what_people_mean(typed: float | str | timedelta, meant: float) -> None:
    assert seconds(typed) == meant


@pytest.mark.parametrize("typed", ["", "90", "s", "-5s", "5 parsecs", "5s later", "1e3s", "٣s"])
def test_text_that_could_mean_anything_is_refused_with_an_example(typed: str) -> None:
    with pytest.raises(BadDuration, match="such as '30s'"):
        seconds(typed, what="wait")


@pytest.mark.parametrize("typed", [None, True, [], object()])
def test_things_that_are_no_durations_are_refused(typed: object) -> None:
    with pytest.raises(BadDuration, match="give seconds"):
        seconds(typed)  # type: ignore[arg-type]


@pytest.mark.parametrize("typed", [0, -1, "0s", timedelta(0)])
def test_positive_means_more_than_zero(typed: float | str | timedelta) -> None:
    with pytest.raises(BadDuration, match="more than zero"):
        positive(typed, what="ttl")


@pytest.mark.parametrize(
    ("duration", "said"),
    [(0.42, "0.4 s"), (12.0, "12 s"), (180.0, "3 min"), (9000.0, "2.5 h"), (259200.0, "3 d")],
)
def test_durations_are_shown_as_people_say_them(duration: float, said: str) -> None:
    assert shown(duration) == said
