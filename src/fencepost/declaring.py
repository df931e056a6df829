"""``@fp.job``, the same for both faces: a function gets a name, a schedule and policies."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from typing import Any, TypeVar

    from fencepost.model.duration import Duration
    from fencepost.model.policy import Retry
    from fencepost.model.schedule import Every
    from fencepost.working import Working

    F = TypeVar("F", bound=Callable[..., Any])


class Declares:
    """What a face needs to have jobs declared to it."""

    if TYPE_CHECKING:

        @property
        def _working(self) -> Working: ...

    def job(  # noqa: PLR0913 -- one for each word that a job may say
        self,
        name: str,
        *,
        cron: str | None = None,
        every: Duration | Every | None = None,
        at: datetime | str | None = None,
        tz: str = "UTC",
        overlap: str = "skip",
        max_concurrent: int = 16,
        max_waiting: int | None = 1,
        catchup: str = "latest",
        start_deadline: Duration | None = None,
        timeout: Duration | None = "1h",
        cancel_grace: Duration = "30s",
        retry: Retry | int | None = None,
        retry_until: str | None = None,
        lease: Duration = "30s",
        on_loss: str = "resume",
        max_losses: int = 5,
        loss_pause: Duration = "1s",
        in_doubt: str = "report",
        items: str = "slot",
        lock: str | Callable[[int], str] | None = None,
        isolation: str | None = None,
        idempotent: bool = False,
        needs: str | None = None,
    ) -> Callable[[F], F]:
        """Declare a job. The function stays what it is; ``fp.trigger(name)`` runs it once per slot.

        Everything is checked here: a typo raises now, not at two in the morning.
        """
        from fencepost.jobs import Declared, declare  # with schedules, which locks never need

        working = self._working
        tier = working.offered(name, needs=needs, idempotent=idempotent)
        declared = Declared(lock, isolation, items, catchup, tier, idempotent)
        schedule = {"cron": cron, "every": every, "at": at, "tz": tz}
        policy = {
            "overlap": overlap,
            "max_concurrent": max_concurrent,
            "max_waiting": max_waiting,
            "retry": retry,
            "retry_until": retry_until,
            "timeout": timeout,
            "cancel_grace": cancel_grace,
            "lease": lease,
            "on_loss": on_loss,
            "max_losses": max_losses,
            "loss_pause": loss_pause,
            "start_deadline": start_deadline,
            "in_doubt": in_doubt,
        }

        def declaring(function: F) -> F:
            job = declare(name, function, declared, schedule=schedule, policy=policy)
            if isolation == "process":
                working.refuse_isolation(job, bound=False)
            working.registry.add(job)
            return function

        return declaring
