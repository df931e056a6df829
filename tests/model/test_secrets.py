from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from fencepost.model.secrets import MASK, redacted, secret_spans, secrets_of
from fencepost.stores.open import redacted as redacted_url

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w"
KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC=\n-----END RSA PRIVATE KEY-----"
SECRETS = st.lists(st.text("abcé€ \n", min_size=1, max_size=12), max_size=4)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x://u:p@h/d", "x://u:***@h/d"),
        ("to postgres://me:p@ss/w@db/app now", "to postgres://me:***@db/app now"),
        ("redis://:pw@h", "redis://:***@h"),
        ("http://h/?sslpassword=hid&mode=ro", "http://h/?sslpassword=***&mode=ro"),
        ("http://h/?mykey=hid", "http://h/?mykey=***"),
        ("password=hunter2 user=bob", "password=*** user=bob"),
        ("DB_PASS=hunter2", "DB_PASS=***"),
        ("PGPASSWORD='a b' psql", "PGPASSWORD='***' psql"),
        ("api_key=abc", "api_key=***"),
        ("X-Api-Key: abc", "X-Api-Key: ***"),
        ("secret: hunter2", "secret: ***"),
        ("secret: password: hunter2", "secret: ***"),
        ("token := abc", "token := ***"),
        ('{"password": "a \\" b", "user": "bob"}', '{"password": "***", "user": "bob"}'),
        (r'"{\"password\": \"hunter2\"}"', r'"{\"password\": ***'),
        ("{'token': b'a b', 'n': 1}", "{'token': b'***', 'n': 1}"),
        ("$c['password'] => 'x'", "$c['password'] => '***'"),
        ("AWS_SECRET_ACCESS_KEY=wJalr/XU", "AWS_SECRET_ACCESS_KEY=***"),
        ("+ mysql --password hunter2 -u bob", "+ mysql --password *** -u bob"),
        ("Authorization: Basic dTpw", "Authorization: Basic ***"),
        ("authorization: hunter2", "authorization: ***"),
        ('-H "Authorization: Bearer ab.cd" url', '-H "Authorization: Bearer ***" url'),
        ('Authorization: Digest u="b", response="c"', "Authorization: Digest ***"),
        ("sent Bearer abcdef123 to", "sent Bearer *** to"),
        ("Set-Cookie: session=1; path=/", "Set-Cookie: ***"),
        ("id AKIAIOSFODNN7EXAMPLE.", "id ***."),
        ("with ghp_0123456789abcdefABCDEF.", "with ***."),
        (f"got {JWT} end", "got *** end"),
        (f"line\\n{JWT}", "line\\n***"),
        (f"a {KEY} b", "a *** b"),
        (KEY.replace("\n", "\\n"), "***"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "",
        "connected to http://localhost:8080/path as bob",
        "FENCEPOST_TOKEN=17",
        "total_tokens: 512",
        "Pass: 10 Fail: 2",
        "the bearer of bad news",
        "-----BEGIN CERTIFICATE-----\nMIIE\n-----END CERTIFICATE-----",
        "heyJude.mp3",
        "mail bob@example.org",
        'password=""',
    ],
)
def test_what_only_resembles_a_secret_is_left_alone(text: str) -> None:
    assert redacted(text) == text


def test_half_a_private_key_is_masked_too() -> None:
    assert redacted(KEY[:45]) == MASK
    assert "MIIEow" not in redacted(KEY[32:])
    assert redacted("fine.\n" + KEY[32:] + "\nfine") == "fine.***\nfine"


def test_a_url_that_is_safe_to_show_stays_so_in_any_text() -> None:
    """``stores.open`` knows that it has a URL and nothing else; in a text its secrets go too."""
    for url in ("x://u:p@h/d", "oracle://scott:t1ger@host/db?sslpassword=hidden", "x://h/d?a=b"):
        assert redacted(url) == redacted_url(url)


def test_known_secrets_are_masked_even_where_they_overlap() -> None:
    assert redacted("abcdefghij", ["abcdef", "defghij"]) == MASK
    assert redacted("xababababx", ["ababab"]) == "x***x"


def test_a_known_secret_that_is_no_utf_8_is_masked_as_it_would_look() -> None:
    value = b"caf\xe9-pass".decode(errors="surrogateescape")
    assert redacted("it is caf\N{REPLACEMENT CHARACTER}-pass", [value]) == "it is ***"
    assert redacted(f"it is {value}", [value]) == "it is ***"
    assert redacted("it is", ["\ud800"]) == "it is"


@given(text=st.text("abcé€ \n"), known=SECRETS)
def test_no_known_secret_is_in_any_text(text: str, known: list[str]) -> None:
    shown = redacted(text, known)
    assert not [secret for secret in known if secret in shown]


@given(text=st.text(), known=st.lists(st.text(min_size=1)))
def test_spans_are_in_order_and_apart(text: str, known: list[str]) -> None:
    edges = [edge for span in secret_spans(text, known) for edge in span]
    assert edges == sorted(set(edges))
    assert all(0 <= edge <= len(text) for edge in edges)


@given(secret=st.text("ab", min_size=2), cut=st.integers(min_value=1), rest=st.text("cd"))
def test_a_torn_text_gives_away_no_half_of_a_known_secret(secret: str, cut: int, rest: str) -> None:
    cut = 1 + cut % (len(secret) - 1)
    end = secret_spans(rest + secret[:cut], [secret], torn_end=True)
    assert end[-1] == (len(rest), len(rest) + cut)
    start = secret_spans(secret[cut:] + rest, [secret], torn_start=True)
    assert start[0] == (0, len(secret) - cut)


def test_a_text_from_the_middle_of_a_known_secret_is_all_secret() -> None:
    assert secret_spans("cde", ["abcdefg"], torn_start=True) == [(0, 3)]


def test_the_secrets_of_an_environment_come_longest_first() -> None:
    environment = {
        "PGPASSWORD": "hunter2",
        "GITHUB_TOKEN": "a-much-longer-one\n",
        "STRIPE_KEY": "sk-abc",
        "DB_PASS": "hunter2",
        "API_SECRET": "short",
        "APP_CREDENTIALS": "é" * 8,
    }
    found = ["a-much-longer-one", "é" * 8, "hunter2", "sk-abc"]
    assert secrets_of(environment) == found


@pytest.mark.parametrize(
    "name",
    ["PWD", "OLDPWD", "FENCEPOST_TOKEN", "PASSWORD_FILE", "HOME", "KEYBOARD", "COMPASS_HOST"],
)
def test_a_variable_that_holds_no_secret_is_left_alone(name: str) -> None:
    assert secrets_of({name: "something long"}) == []


# What each pattern would like to begin with, over and over.
BEGINNINGS = [
    *("a", "://a:", "://@", "password", "password=", 'password="', 'password="\\', "token-"),
    *("--", "--a-", " --password-", "&key", "?key", "authorization:", "bearer ", "sk-", "AKIA"),
    *("eyJ", "_eyJaaaa", "eyJ.", "-----BEGIN ", KEY[:31], KEY[-29:], "pwd    ", "secret: "),
]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_no_text_takes_long_to_redact(beginning: str) -> None:
    text = beginning * (48 * 1024 // len(beginning))
    began = time.process_time()
    redacted(text, ["aaaaaa"])
    assert time.process_time() - began < 2  # usually a few hundredths; far more if it were squared
