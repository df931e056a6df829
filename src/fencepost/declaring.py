"""``@fp.job``, the same for both faces: a function gets a name, a schedule and policies."""

from __future__ import annotations

from fencepost.errors import Misuse
from fencepost.model.duration import positive

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from typing import Any, TypeVar

    from fencepost.model.duration import Duration
    from fencepost.model.policy import Retry
    from fencepost.model.schedule import Every, EveryAfter
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
        every: Duration | Every | EveryAfter | None = None,
        at: datetime | str | None = None,
        tz: str = "UTC",
        second: int | None = None,
        day_match: str | None = None,
        dst_gap: str | None = None,
        dst_fold: str | None = None,
        jitter: Duration | None = None,
        overlap: str = "skip",
        max_concurrent: int = 16,
        max_waiting: int | None = 1,
        catchup: str = "latest",
        catchup_limit: int = 1000,
        catchup_window: Duration = "7d",
        catchup_pause: Duration = 0,
        live_first: bool = False,
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
        handoff_beat: Duration | None = None,
        items: str = "slot",
        lock: str | Callable[[int], str] | None = None,
        isolation: str | None = None,
        leave_children: bool = False,
        idempotent: bool = False,
        needs: str | None = None,
        aliases: Sequence[str] = (),
        pin: str | None = None,
    ) -> Callable[[F], F]:
        """Declare a job. The function stays what it is; ``fp.trigger(name)`` runs it once per slot.

        Everything is checked here: a typo raises now, not at two in the morning.
        """
        words = {word: value for word, value in locals().items() if word not in ("self", "name")}
        from fencepost.jobs import declare, sorted_words  # with schedules, which locks never need

        working = self._working
        tier = working.offered(name, needs=needs, idempotent=idempotent)
        told = sorted_words(words, needs=tier)

        def declaring(function: F) -> F:
            job = declare(name, function, told)
            if isolation == "process":
                working.refuse_isolation(job, bound=False)
            working.registry.add(job)
            return function

        return declaring

    def command(
        self,
        name: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **words: Any,
    ) -> None:
        """Declare a job whose body is a command; ``words`` are those of ``job``.

        It runs under guard: nothing of it is left when others may have its lease, unless you say
        ``leave_children=True``.
        """
        from fencepost.executors.command import command_body

        self.job(name, **words)(command_body(argv, env=env, cwd=cwd))

    def http(
        self,
        name: str,
        url: str,
        *,
        secret: str | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        request_timeout: Duration | None = None,
        callback: str | None = None,
        **words: Any,
    ) -> None:
        """Declare a job whose body is a request to an endpoint; ``words`` are those of ``job``.

        What the answers mean is told in ``fencepost.executors.http``.
        """
        from fencepost.executors.http import http_body

        body = http_body(
            url,
            secret=secret,
            method=method,
            headers=headers,
            timeout=request_timeout,
            callback=callback,
        )
        self.job(name, **words)(body)


def build_of(version: int) -> int:
    """Return the number that says which of two versions of a program is newer."""
    if type(version) is not int or version < 0:
        raise Misuse(f"version is {version!r}: give the number of the build, or 0 for none")
    return version


def orphans_after(orphan_after: Duration) -> float:
    """Return how long nobody may know a job before it is an orphan."""
    return positive(orphan_after, what="orphan_after")
