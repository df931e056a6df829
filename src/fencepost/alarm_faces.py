"""``fp.alarms`` in two colours: each method is one line over what both share."""

from __future__ import annotations

from fencepost.alarm_ringing import when
from fencepost.errors import Misuse
from fencepost.model.alarm import AlarmState, Setting
from fencepost.model.alarm_policy import AlarmPolicy, checked_key, checked_kind
from fencepost.model.alarm_view import view_of
from fencepost.model.duration import seconds
from fencepost.model.kept import encoded
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    import builtins
    from typing import Any

    from fencepost.alarming import Alarming
    from fencepost.flows.firing import Fired
    from fencepost.model.alarm_policy import Moment
    from fencepost.model.alarm_view import AlarmView
    from fencepost.model.duration import Duration

_THERE = (AlarmState.ARMED, AlarmState.FIRING, AlarmState.DEAD)


class Alarms:
    """The alarms of a ``Fencepost``."""

    def __init__(self, alarming: Alarming) -> None:
        self._alarming = alarming

    def set(
        self,
        kind: str,
        key: str,
        at: Moment | None = None,
        payload: Any = None,
        *,
        in_: Duration | None = None,
        if_generation: int | None = None,
    ) -> int:
        """Set an alarm, in place of any that there is, and return its generation.

        With ``if_generation`` only if it is still that one, 0 meaning that there is none; else
        ``AlarmChanged`` is raised, with the ``current`` generation, and nothing was changed.
        """
        asked = _setting(self._alarming, kind, key, at, in_, payload, if_generation)
        return finish(self._alarming.book.set(asked)).generation

    def start(
        self, kind: str, key: str, payload: Any = None, *, in_: Duration | None = None
    ) -> int:
        """Set an alarm of a kind that has ``every``, unless it is set already."""
        asked = _starting(self._alarming, kind, key, payload, in_)
        return finish(self._alarming.book.set(asked)).generation

    def get(self, kind: str, key: str) -> AlarmView | None:
        """Return an alarm; None if there is none."""
        return _seen(finish(self._alarming.book.get(checked_kind(kind), checked_key(key))))

    def clear(self, kind: str, key: str, *, if_generation: int | None = None) -> int:
        """Clear an alarm; return the generation that its tombstone has, 0 if there was none."""
        keep = _kept_for(self._alarming, kind)
        names = checked_kind(kind), checked_key(key)
        cleared = self._alarming.book.clear(*names, keep=keep, if_generation=if_generation)
        return _generation(finish(cleared))

    def list(
        self, kind: str | None = None, *, state: str | None = None, limit: int = 100
    ) -> builtins.list[AlarmView]:
        """Return alarms by kind and key, of one kind or of all, in one state or in any."""
        found = self._alarming.book.listed(_kind(kind), states=_states(state), limit=limit)
        return [view_of(record) for record in finish(found)]

    def run_due(
        self, budget: Duration | None = None, *, limit: int | None = None, workers: int = 1
    ) -> Fired:
        """Fire whatever is due now, and say what became of it. Safe to call twice at once.

        None begins after ``budget``. With ``workers`` so many run side by side, in threads.
        """
        return finish(self._alarming.fire(limit, _budget(budget), workers=workers))


class AsyncAlarms:
    """The alarms of an ``AsyncFencepost``: the same names, awaited."""

    def __init__(self, alarming: Alarming) -> None:
        self._alarming = alarming

    async def set(
        self,
        kind: str,
        key: str,
        at: Moment | None = None,
        payload: Any = None,
        *,
        in_: Duration | None = None,
        if_generation: int | None = None,
    ) -> int:
        """Set an alarm, in place of any that there is, and return its generation.

        With ``if_generation`` only if it is still that one, 0 meaning that there is none; else
        ``AlarmChanged`` is raised, with the ``current`` generation, and nothing was changed.
        """
        asked = _setting(self._alarming, kind, key, at, in_, payload, if_generation)
        return (await self._alarming.book.set(asked)).generation

    async def start(
        self, kind: str, key: str, payload: Any = None, *, in_: Duration | None = None
    ) -> int:
        """Set an alarm of a kind that has ``every``, unless it is set already."""
        asked = _starting(self._alarming, kind, key, payload, in_)
        return (await self._alarming.book.set(asked)).generation

    async def get(self, kind: str, key: str) -> AlarmView | None:
        """Return an alarm; None if there is none."""
        return _seen(await self._alarming.book.get(checked_kind(kind), checked_key(key)))

    async def clear(self, kind: str, key: str, *, if_generation: int | None = None) -> int:
        """Clear an alarm; return the generation that its tombstone has, 0 if there was none."""
        keep = _kept_for(self._alarming, kind)
        names = checked_kind(kind), checked_key(key)
        cleared = self._alarming.book.clear(*names, keep=keep, if_generation=if_generation)
        return _generation(await cleared)

    async def list(
        self, kind: str | None = None, *, state: str | None = None, limit: int = 100
    ) -> builtins.list[AlarmView]:
        """Return alarms by kind and key, of one kind or of all, in one state or in any."""
        found = self._alarming.book.listed(_kind(kind), states=_states(state), limit=limit)
        return [view_of(record) for record in await found]

    async def run_due(
        self, budget: Duration | None = None, *, limit: int | None = None, workers: int = 1
    ) -> Fired:
        """Fire whatever is due now, and say what became of it. Safe to call twice at once.

        None begins after ``budget``. With ``workers`` so many run side by side, as tasks.
        """
        return await self._alarming.fire(limit, _budget(budget), workers=workers)


def _setting(
    alarming: Alarming,
    kind: str,
    key: str,
    at: Moment | None,
    in_: Duration | None,
    payload: Any,
    if_generation: int | None,
) -> Setting:
    instant, after = when(at, in_)
    text = None if payload is None else encoded(payload, what="payload")
    names = checked_kind(kind), checked_key(key)
    call = alarming.world.nonce()
    return Setting(*names, call, instant, after, text, if_generation)


def _starting(
    alarming: Alarming, kind: str, key: str, payload: Any, in_: Duration | None
) -> Setting:
    name = checked_kind(kind)
    handler = alarming.handlers.get(name)
    if handler is None or handler.policy.every is None:
        raise Misuse(
            f"alarms of kind {kind!r} do not come every so often here: declare the handler with "
            "@fp.alarm(…, every='1m'), or use set"
        )
    first = handler.policy.every if in_ is None else in_
    asked = _setting(alarming, kind, key, None, first, payload, None)
    return asked._replace(keep=True)


def _kept_for(alarming: Alarming, kind: str) -> float:
    handler = alarming.handlers.get(kind)
    return (AlarmPolicy() if handler is None else handler.policy).horizon


def _seen(record: Any) -> AlarmView | None:
    there = record is not None and record.state is not AlarmState.CLEARED
    return view_of(record) if there else None


def _generation(record: Any) -> int:
    return 0 if record is None else int(record.generation)


def _kind(kind: str | None) -> str | None:
    return None if kind is None else checked_kind(kind)


def _states(state: str | None) -> tuple[AlarmState, ...]:
    if state is None:
        return _THERE
    try:
        return (AlarmState(state),)
    except ValueError:
        known = ", ".join(repr(word.value) for word in AlarmState)
        raise Misuse(f"state is {state!r}: it must be one of {known}") from None


def _budget(budget: Duration | None) -> float | None:
    return None if budget is None else seconds(budget, what="budget")
