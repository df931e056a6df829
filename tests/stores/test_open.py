from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fencepost import BadName, BadUrl, Fencepost, Misuse, register_store
from fencepost.stores.open import redacted

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "must begin with one of"),
        ("fencepost.db", "must begin with one of"),
        ("postgress://host/db", "must begin with one of"),
        ("sqlite://relative.db", "three slashes"),
        ("sqlite://", "three slashes"),
        ("sqlite:///", "three slashes"),
        ("sqlite:///:memory:", "use memory://"),
        ("sqlite:///a.db?mode=ro", "unknown options"),
    ],
)
def test_a_wrong_url_gets_a_sentence(url: str, sentence: str) -> None:
    with pytest.raises(BadUrl, match=sentence):
        Fencepost(url)


def test_no_error_shows_a_password() -> None:
    with pytest.raises(BadUrl) as caught:
        Fencepost("oracle://scott:t1ger@host/db?sslpassword=hidden")
    assert "t1ger" not in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert redacted("x://u:p@h/d") == "x://u:***@h/d"


def test_without_a_url_the_environment_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FENCEPOST_URL", raising=False)
    with Fencepost() as fp, fp.lock("a"):
        assert (tmp_path / "fencepost.db").exists()
    monkeypatch.setenv("FENCEPOST_URL", f"sqlite:///{tmp_path}/other%20place.db")
    with Fencepost() as fp, fp.lock("a"):
        assert (tmp_path / "other place.db").exists()


@pytest.mark.parametrize("namespace", ["", "a/b", None])
def test_a_wrong_namespace_gets_a_sentence(namespace: object) -> None:
    with pytest.raises(BadName, match="namespace"):
        Fencepost("memory://open", namespace=namespace)  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "3"])
def test_a_wrong_limit_gets_a_sentence(limit: object) -> None:
    with Fencepost("memory://open") as fp, pytest.raises(Misuse, match="limit is"):
        fp.lock("a", limit=limit)  # type: ignore[arg-type]


def test_a_scheme_that_could_not_be_typed_is_refused() -> None:
    with pytest.raises(BadUrl, match="cannot be a URL scheme"):
        register_store("My Store", "x", opener="open")
