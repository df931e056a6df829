"""A job's body can be a Celery task: the run is handed off to a queue, and a worker ends it.

``celery_body`` is the dispatcher's side, ``fencepost_task`` the worker's. The message carries the
run's id and token. A worker begins a run only if its token is still the newest and nobody began it
before: a message that is delivered twice, or late, runs nothing. While the task runs the worker
keeps the lease; should it die, the lease runs out and the next claim sends another message.
"""

from __future__ import annotations

import inspect

from fencepost.errors import Lost, Misuse, StoreUnavailable, UnknownRun
from fencepost.model.slot import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Protocol

    from fencepost.model.outcome import Outcome
    from fencepost.running import Run

    class Celery(Protocol):
        """A Celery application."""

        def send_task(self, name: str, **options: Any) -> Any:
            """Send a message."""

        def task(self, **options: Any) -> Any:
            """Register a task."""

    class Face(Protocol):
        """A ``Fencepost``."""

        def take_over(self, run_id: str, body: Callable[..., Any], *, token: int) -> Outcome:
            """Carry out a run that was handed off."""


# The one argument of a task that is given runs, and the header by which a message is known.
ARGUMENT = "fencepost"


def celery_body(app: Celery, task_name: str, *, queue: str | None = None) -> Callable[[Run], None]:
    """Return a job's body that sends the run to a Celery task, and leaves it to the worker.

    The task is one that was made with ``fencepost_task``, there or here. It is sent first and
    handed over then: should this process die in between, the run is claimed again at once, and
    the worker that has the first message is refused, or has the run already.
    """
    if not task_name:
        raise Misuse(f"task_name is {task_name!r}: give the name under which it is registered")

    def send_to_celery(run: Run) -> None:
        told = {
            "run_id": run.id,
            "job": run.job,
            "slot": shown(int(run.slot.timestamp())),
            "attempt": run.attempt,
            "token": run.token,
            "idempotency_key": run.key_of(),
            "payload": run.payload,
        }
        app.send_task(
            task_name,
            kwargs={ARGUMENT: told},
            headers={ARGUMENT: run.id},
            task_id=f"{run.id}/{run.token}",
            queue=queue,
            retry=False,  # our own policy says when to try again
        )
        run.hand_over()

    return send_to_celery


def fencepost_task(
    app: Celery, fp: Face, *, name: str, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function the task that carries out handed-off runs; it is given its ``run``.

    What it returns is the run's result, what it raises is judged by the job's retry policy, and
    ``run.save``, ``run.once`` and ``run.check`` work as ever. To Celery the task always succeeds:
    its result says what became of the run. ``options`` are those of ``app.task``.
    """
    if inspect.iscoroutinefunction(fp.take_over):
        raise Misuse("a Celery worker blocks: give fencepost_task a Fencepost, no AsyncFencepost")
    # A store that is away for a moment is no reason to lose a message.
    options = {"autoretry_for": (StoreUnavailable,), "retry_backoff": True, **options}

    def decorate(body: Callable[..., Any]) -> Any:
        def deliver(fencepost: dict[str, Any]) -> dict[str, Any]:
            return _delivered(fp, body, fencepost)

        deliver.__name__, deliver.__doc__ = name.rpartition(".")[2] or name, body.__doc__
        deliver.__module__ = getattr(body, "__module__", __name__)
        return app.task(name=name, **options)(deliver)

    return decorate


def _delivered(fp: Face, body: Callable[..., Any], told: dict[str, Any]) -> dict[str, Any]:
    """Carry out the run that a message is about, unless it came too late or twice."""
    run_id, token = told["run_id"], told["token"]
    try:
        outcome = fp.take_over(run_id, body, token=token)
    except (Lost, UnknownRun) as error:
        return {"run_id": run_id, "status": "refused", "reason": str(error)}
    return {"run_id": run_id, "status": outcome.status, "reason": outcome.reason}
