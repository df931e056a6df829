"""``@fp.alarm``, the same for both faces: a function handles all alarms of one kind."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    from fencepost.alarming import Alarming
    from fencepost.model.alarm_policy import Reschedule
    from fencepost.model.duration import Duration
    from fencepost.model.policy import Retry

    F = TypeVar("F", bound=Callable[..., Any])


class DeclaresAlarms:
    """What a face needs to have handlers of alarms declared to it."""

    if TYPE_CHECKING:

        @property
        def _alarming(self) -> Alarming: ...

    def alarm(  # noqa: PLR0913 -- one for each word that a kind of alarm may say
        self,
        kind: str,
        *,
        every: Duration | None = None,
        retry: Retry | int | None = None,
        on_error: Reschedule | None = None,
        faults: type[BaseException] | tuple[type[BaseException], ...] = (),
        timeout: Duration | None = "1h",
        cancel_grace: Duration = "30s",
        lease: Duration = "30s",
        max_losses: int = 5,
        grace: Duration = "1m",
        budget: int | tuple[int, Duration] = 100,
    ) -> Callable[[F], F]:
        """Declare the handler of a kind of alarm. It is called with the alarm that fires.

        After six errors an alarm is dead, unless ``retry`` or ``on_error`` says otherwise. Errors
        of ``faults``, and those of the store, use up no tries. With ``every`` it is set again
        after each success.
        """
        from fencepost.alarming import handler_of
        from fencepost.model.alarm_policy import checked_alarm_policy, checked_kind
        from fencepost.model.lease import checked_ttl

        name = checked_kind(kind)
        policy = checked_alarm_policy(
            retry=retry,
            on_error=on_error,
            faults=faults if isinstance(faults, tuple) else (faults,),
            timeout=timeout,
            cancel_grace=cancel_grace,
            lease=checked_ttl(lease),
            max_losses=max_losses,
            grace=grace,
            budget=budget,
            every=every,
        )

        def declaring(function: F) -> F:
            self._alarming.add(handler_of(name, function, policy))
            return function

        return declaring
