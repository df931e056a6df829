"""``NamedTuple`` as in ``typing``, for a program that starts quickly: ``typing`` itself costs 5 ms.

A type checker sees the original. At run time a class body becomes a ``collections.namedtuple``
with the same fields, defaults and methods. ``Protocol`` has nothing to do at run time at all.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple, Protocol
else:
    from collections import namedtuple

    class _Body(type):
        """Turns the class statements that inherit from ``NamedTuple`` into named tuples."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, object]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = body.pop("__annotations__", {})
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(  # noqa: PYI024 -- that is the point
                name, fields, defaults=defaults, module=body["__module__"]
            )
            made.__annotations__ = fields
            for key, value in body.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_Body):
        """The base to name in a class statement."""

    Protocol = object

__all__ = ["NamedTuple", "Protocol"]
