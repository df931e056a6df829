"""Our ``NamedTuple`` must not be told from that of ``typing``."""

from __future__ import annotations

import pickle
import typing

from fencepost.model.named import NamedTuple


class Ours(NamedTuple):
    """A point."""

    x: int
    y: int = 2

    def __str__(self) -> str:
        return f"{self.x}/{self.y}"

    @property
    def sum(self) -> int:
        return self.x + self.y


class Theirs(typing.NamedTuple):
    """A point."""

    x: int
    y: int = 2

    def __str__(self) -> str:
        return f"{self.x}/{self.y}"

    @property
    def sum(self) -> int:
        return self.x + self.y


def test_fields_defaults_and_methods_are_the_same() -> None:
    ours, theirs = Ours(1), Theirs(1)
    assert tuple(ours) == tuple(theirs) == (1, 2)
    assert str(ours) == str(theirs) == "1/2"
    assert ours.sum == theirs.sum == 3
    assert tuple(ours._replace(y=5)) == tuple(theirs._replace(y=5)) == (1, 5)
    assert ours._asdict() == theirs._asdict()


def test_the_classes_say_the_same_about_themselves() -> None:
    for name in ("_fields", "_field_defaults", "__doc__", "__module__"):
        assert getattr(Ours, name) == getattr(Theirs, name)
    assert list(Ours.__annotations__) == list(Theirs.__annotations__)
    assert repr(Ours(1)) == repr(Theirs(1)).replace("Theirs", "Ours")


def test_a_value_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(Ours(1, 3))) == Ours(1, 3)
