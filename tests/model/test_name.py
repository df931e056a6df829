from __future__ import annotations

import pytest

from fencepost.errors import BadName
from fencepost.model.name import base, checked, checked_namespace, permits


@pytest.mark.parametrize("name", ["uploads#1", "a#b#12"])
def test_names_that_look_like_permits_are_kept_for_semaphores(name: str) -> None:
    with pytest.raises(BadName, match="kept for semaphores"):
        checked(name)


def test_permits_lead_back_to_their_semaphore() -> None:
    assert permits("uploads", limit=3) == ["uploads#1", "uploads#2", "uploads#3"]
    assert {base(permit) for permit in permits("uploads", limit=3)} == {"uploads"}
    assert base("uploads") == "uploads"


@pytest.mark.parametrize("namespace", ["", "a/b", "a b", "ä", "x" * 101, None])
def test_a_namespace_cannot_be_mistaken_for_part_of_a_name(namespace: object) -> None:
    with pytest.raises(BadName, match="namespace"):
        checked_namespace(namespace)
