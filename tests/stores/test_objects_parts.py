"""The parts of the object store that touch nothing: URLs, keys, bodies, the end of a lease."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fencepost.errors import BadUrl, StoreUnfit
from fencepost.model.lease import Holder, Record
from fencepost.stores.objects_expiry import (
    AGREE,
    SLACK,
    Sightings,
    over_by_stamps,
    patience,
    worth_a_stamp,
)
from fencepost.stores.objects_record import Entry, body_of, entry_of, key_of
from fencepost.stores.objects_url import address_of
from fencepost.world.objects import Found, Version

names = st.text(
    st.characters(exclude_categories=("Cs", "Cc", "Cf", "Zl", "Zp", "Co", "Cn")), min_size=1
)
HOLDER = Holder("n1", "host", 7, "1.0")


def record(**fields: Any) -> Record:
    held = Record("job", 5, HOLDER, held=True, era="objects", expires=0.0, ttl=30.0, since=1.0)
    return held._replace(**fields)


def entry(*, modified: float, written_at: float, ttl: float = 30.0) -> Entry:
    return Entry(record(ttl=ttl), (), written_at, Version("e"), modified)


# URLs.


def test_a_url_says_where_and_how() -> None:
    found = address_of(
        "s3",
        "my-bucket/a/b/?endpoint=http://127.0.0.1:9000&allow_http=true&region=eu&timeout=2s",
    )
    assert (found.bucket, found.prefix, found.timeout, found.shortest) == (
        "my-bucket",
        "a/b",
        2.0,
        15.0,
    )
    assert found.config == {"endpoint": "http://127.0.0.1:9000", "region": "eu"}
    assert found.client == {"allow_http": True}
    assert found.where == "s3://my-bucket/a/b at 127.0.0.1:9000"
    assert address_of("gs", "bucket").where == "gs://bucket"
    assert address_of("az", "box/x?account=me").config == {"account_name": "me"}


@pytest.mark.parametrize(
    ("kind", "address", "sentence"),
    [
        ("s3", "", "names no bucket"),
        ("s3", "/prefix", "names no bucket"),
        ("s3", "b/a//c", "an empty part"),
        ("s3", "b/../c", "'..' in its prefix"),
        ("s3", "b?colour=red", "has no option 'colour'"),
        ("gs", "b?region=eu", "has no option 'region'"),
        ("s3", "key:hunter2@b", "no place for credentials"),
        ("s3", "b?endpoint=http://key:hunter2@host", "must not have credentials"),
        ("s3", "b?endpoint=http://host", "plain http: add allow_http=true"),
        ("s3", "b?endpoint=host:9000", "must be http://host:port"),
        ("s3", "b?endpoint=http://[", "must be http://host:port"),
        ("s3", "b?allow_http=perhaps", "must be true or false"),
        ("s3", "b?timeout=soon", "timeout is 'soon'"),
        ("s3", "b?timeout=0", "must be more than zero"),
        ("s3", "b?shortest_ttl=0.001", "at least 0.2 s"),
    ],
)
def test_a_bad_url_is_one_sentence_without_the_password(
    kind: str, address: str, sentence: str
) -> None:
    with pytest.raises(BadUrl) as caught:
        address_of(kind, address)
    assert sentence in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_endpoint_of_the_environment_is_shown_without_its_userinfo() -> None:
    found = address_of("s3", "b", elsewhere="https://key:hunter2@minio.example:9000")
    assert found.where == "s3://b at minio.example:9000"


# Keys and bodies.


@given(names, names)
def test_two_names_never_share_a_key(one: str, two: str) -> None:
    assert (key_of("default", one) == key_of("default", two)) == (one == two)


def test_keys_are_readable_and_short_enough_for_every_store() -> None:
    assert key_of("default", "nightly-report.v2") == "leases.default/nightly-report.v2.json"
    assert key_of("..", "..") == "leases.../...json"
    assert key_of("default", "a/b c=d") == "leases.default/a=2fb=20c=3dd.json"
    assert len(key_of("n" * 100, "🔒" * 1000)) < 500


@given(names, st.integers(1, 2**53 - 1), st.booleans(), st.text())
def test_what_is_written_is_read_back(name: str, token: int, held: bool, ended: str) -> None:  # noqa: FBT001 -- drawn
    kept = record(name=name, token=token, held=held, ended=ended, beat=3)
    breaks = ({"token": 1},)
    body = body_of(kept, breaks=breaks, written_at=9.5)
    found = entry_of(Found(body, Version("e"), 10.0), key="k", where="w")
    assert found == Entry(kept, breaks, 9.5, Version("e"), 10.0)


@pytest.mark.parametrize(
    "body", [b"", b"\xff", b"[]", b"{}", b"null", b'{"fencepost": 1, "name": "x"}', b"7"]
)
def test_an_object_of_somebody_else_is_no_lease(body: bytes) -> None:
    with pytest.raises(StoreUnfit, match=r"'k' of s3://b is not a lease"):
        entry_of(Found(body, Version("e"), 1.0), key="k", where="s3://b")


@pytest.mark.parametrize("token", [0, -1, 2**53, 1.5, "7", None, True])
def test_a_token_that_cannot_be_one_is_refused(token: object) -> None:
    fields = json.loads(body_of(record(), breaks=(), written_at=1.0)) | {"token": token}
    with pytest.raises(StoreUnfit, match="is not a lease"):
        entry_of(Found(json.dumps(fields).encode(), Version("e"), 1.0), key="k", where="w")


def test_a_lease_of_a_later_format_is_left_alone() -> None:
    fields = json.loads(body_of(record(), breaks=(), written_at=1.0)) | {"fencepost": 2}
    with pytest.raises(StoreUnfit, match="newer fencepost: upgrade"):
        entry_of(Found(json.dumps(fields).encode(), Version("e"), 1.0), key="k", where="w")


def test_only_the_last_breaks_are_kept() -> None:
    body = body_of(record(), breaks=tuple({"token": n} for n in range(99)), written_at=1.0)
    kept = json.loads(body)["breaks"]
    assert [one["token"] for one in kept] == list(range(79, 99))


# When it is over.


def test_a_lease_stands_still_only_as_long_as_its_etag_does() -> None:
    seen = Sightings()
    assert seen.see("k", Version("a"), now=1.0) == 1.0
    assert seen.see("k", Version("a"), now=9.0) == 1.0
    assert seen.see("k", Version("b"), now=10.0) == 10.0
    assert seen.see("k", Version("a"), now=11.0) == 11.0, "a late answer frees nothing"


def test_sightings_do_not_pile_up() -> None:
    seen = Sightings()
    for number in range(10_050):
        seen.see(str(number), Version("a"), now=float(number))
    assert len(seen._seen) == 10_000
    assert seen.see("10049", Version("a"), now=99_999.0) == 10_049.0


def test_a_watcher_allows_for_a_clock_that_is_too_fast() -> None:
    assert patience(100.0) == pytest.approx(101.0)


def test_stamps_free_a_lease_only_a_while_after_its_end() -> None:
    left_alone = entry(modified=1000.0, written_at=999.0)
    end = 1000.0 + patience(30.0) + SLACK
    assert not over_by_stamps(left_alone, stamp=end - 0.1, wall=end)
    assert over_by_stamps(left_alone, stamp=end + 0.1, wall=end)
    assert worth_a_stamp(left_alone, wall=end)
    assert not worth_a_stamp(left_alone, wall=1010.0)


@pytest.mark.parametrize("off", [-3600.0, -2.1, 2.1, 3600.0])
def test_a_stamp_that_the_clock_beside_it_denies_frees_nothing(off: float) -> None:
    now = 1000.0 + patience(30.0) + SLACK + 5000.0
    assert over_by_stamps(entry(modified=1000.0, written_at=1000.0), stamp=now, wall=now)
    assert not over_by_stamps(entry(modified=1000.0, written_at=1000.0 + off), stamp=now, wall=now)
    assert not over_by_stamps(entry(modified=1000.0, written_at=1000.0), stamp=now, wall=now + off)


clock_errors = st.floats(-10_000.0, 10_000.0)


@given(age=st.floats(0, 100), write=clock_errors, now=clock_errors, ttl=st.sampled_from([5.0, 30]))
def test_a_server_whose_clock_jumps_never_frees_what_is_held(
    age: float, write: float, now: float, ttl: float
) -> None:
    """The machines' clocks are right; the server's is off at both ends, each time by another."""
    held = entry(modified=float(int(1e9 + write)), written_at=1e9, ttl=ttl)
    if over_by_stamps(held, stamp=1e9 + age + now, wall=1e9 + age):
        assert age >= ttl


@given(age=st.floats(0, 100), holder=clock_errors, ours=clock_errors)
def test_machines_whose_clocks_are_wrong_never_free_what_is_held(
    age: float, holder: float, ours: float
) -> None:
    """The server's clock is right; those of the machines are off, each by another."""
    held = entry(modified=float(int(1e9)), written_at=1e9 + holder)
    if over_by_stamps(held, stamp=1e9 + age, wall=1e9 + age + ours):
        assert age >= 30.0


def test_slack_covers_what_still_agrees() -> None:
    assert SLACK >= 2 * AGREE + 1.0
