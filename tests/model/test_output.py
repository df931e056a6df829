from __future__ import annotations

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from fencepost.model.output import KEPT, LONGEST_LINE, Braid, Excerpt

FILLERS = [b"x", b"\n", b"line\n", "é".encode(), "€uro ".encode(), b"\xff", b"\0"]


def excerpt_of(*chunks: bytes) -> Excerpt:
    excerpt = Excerpt()
    for chunk in chunks:
        excerpt.feed(chunk)
    return excerpt


def filled(filler: bytes, length: int) -> bytes:
    return (filler * (length // len(filler) + 1))[:length]


def test_a_short_stream_is_shown_as_it_is() -> None:
    assert excerpt_of().text() == ""
    excerpt = excerpt_of("grü".encode()[:-1], "grü".encode()[-1:], b"\nbye")
    assert (excerpt.text(), excerpt.left_out, excerpt.total) == ("grü\nbye", 0, 8)


def test_a_stream_that_just_fits_is_shown_whole_and_a_longer_one_is_not() -> None:
    data = bytes(i % 64 + 48 for i in range(2 * KEPT))
    assert excerpt_of(data).text() == data.decode()
    excerpt = excerpt_of(data[:KEPT], b"+", data[KEPT:])
    assert excerpt.left_out == 1
    head, line, tail = excerpt.text().split("\n")
    assert (head, tail) == (data[:KEPT].decode(), data[KEPT:].decode())
    assert line == "[… 1 bytes left out …]"


def test_the_line_for_what_is_left_out_stands_alone() -> None:
    excerpt = excerpt_of(b"a" * (KEPT - 1), b"\n", b"b" * 5000, b"c" * KEPT)
    head, line, tail = excerpt.text().split("\n")
    assert (set(head), line, set(tail)) == ({"a"}, "[… 5,000 bytes left out …]", {"c"})


@pytest.mark.parametrize("shift", range(4))
def test_no_character_is_cut_in_two(shift: int) -> None:
    data = b"a" * shift + "😀".encode() * (KEPT * 3 // 4)
    excerpt = excerpt_of(data)
    text = excerpt.text()
    assert "\N{REPLACEMENT CHARACTER}" not in text
    head, _, tail = text.split("\n")
    assert len(head.encode()) + excerpt.left_out + len(tail.encode()) == len(data)


def test_what_is_no_text_is_replaced() -> None:
    assert excerpt_of(b"a\xff\0b").text() == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200)), repeat=st.integers(1, 900))
@settings(max_examples=50)
def test_the_excerpt_does_not_depend_on_the_chunks(
    data: bytes, cuts: list[int], repeat: int
) -> None:
    places = sorted({0, *cuts, len(data)})
    pieces = [data[a:b] for a, b in pairwise(places)]
    once, many = excerpt_of(data * repeat), excerpt_of(*pieces * repeat)
    assert once.text() == many.text()
    assert once.left_out == many.left_out


@given(
    secret=st.text("sécret €x\n", min_size=6, max_size=40) | st.just("s€c" * 5000),
    filler=st.sampled_from(FILLERS),
    before=st.integers(0, 200) | st.integers(KEPT - 60, KEPT + 20),
    between=st.integers(0, 4 * KEPT),
    after=st.integers(0, 200) | st.integers(KEPT - 60, KEPT + 20),
    size=st.integers(1, 5000),
)
@settings(max_examples=300, deadline=None)
def test_no_known_secret_is_shown_however_it_is_chunked(
    secret: str, filler: bytes, before: int, between: int, after: int, size: int
) -> None:
    raw = secret.encode()
    parts = filled(filler, before), raw, filled(filler, between), raw, filled(filler, after)
    data = b"".join(parts)
    excerpt = excerpt_of(*(data[at : at + size] for at in range(0, len(data), size)))
    assert secret not in excerpt.text([secret])


@pytest.mark.parametrize("length", [8, 500, 10_000, 30_000])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9])
def test_no_part_of_a_known_secret_is_shown_beside_a_cut(length: int, share: float) -> None:
    """The secret has letters of its own, so that any of them betrays it."""
    secret = "".join(chr(0x4E00 + i) for i in range(length))
    raw = secret.encode()
    inside = max(3, int(len(raw) * share))
    at_head = b"." * max(0, KEPT - inside) + raw + b"." * 100_000
    at_tail = b"." * 100_000 + raw + b"." * max(0, KEPT - inside)
    for data in (at_head, at_tail):
        text = excerpt_of(data).text([secret])
        assert "***" in text
        assert not set(secret) & set(text)


@pytest.mark.parametrize("inside", [1, 5, 12, 20])
@pytest.mark.parametrize(
    "secret", ["password=hunter2hunter2", "x://u:hunter2hunter2@h", "Bearer hunter2hunter2"]
)
def test_what_looks_like_a_secret_is_not_shown_in_part_either(secret: str, inside: int) -> None:
    raw, dots = secret.encode(), b". " * 50_000
    for data in (
        (b". " * KEPT)[: KEPT - inside] + raw + b" " + dots,
        dots + raw + b" " + (b". " * KEPT)[: KEPT - inside],
    ):
        text = excerpt_of(data).text()
        assert "hunter" not in text
        assert "unter2" not in text


def test_memory_is_bounded_for_any_size_of_chunk() -> None:
    big, small = b"x" * 1_000_000, b"y" * 100
    tracemalloc.start()
    try:
        excerpt = Excerpt()
        for _ in range(50):
            excerpt.feed(big)
        for _ in range(20_000):
            excerpt.feed(small)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert excerpt.total == 52_000_000
    assert peak < 20 * KEPT


def test_lines_of_two_streams_are_not_torn_apart() -> None:
    excerpt = Excerpt()
    braid = Braid(excerpt)
    braid.feed(1, b"first\nhun")
    braid.feed(2, b"oops\nand")
    braid.feed(1, b"ter2\n")
    braid.end()
    assert excerpt.text() == "first\noops\nhunter2\nand"


def test_a_line_without_an_end_is_not_waited_for() -> None:
    excerpt = Excerpt()
    braid = Braid(excerpt)
    braid.feed(1, b"x" * LONGEST_LINE)
    assert excerpt.total == 0
    braid.feed(1, b"x")
    assert excerpt.total == LONGEST_LINE + 1
