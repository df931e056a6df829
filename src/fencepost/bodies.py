"""How a job's body is carried out: called here, in a thread, or on an event loop.

A coroutine can be stopped: it is cancelled when its time is up, when somebody asks for it, and when
its lease is lost. A plain function cannot: it is told by ``run.check()``, its lease is kept until
it ends, and it is reported as stuck.
"""

from __future__ import annotations

from fencepost.errors import (
    BadValue,
    GiveUp,
    LeaseLost,
    Misuse,
    NoThread,
    RunCancelled,
    RunRecalled,
    RunTimedOut,
)
from fencepost.model.kept import encoded

TYPE_CHECKING = False
if TYPE_CHECKING:
    import asyncio
    import threading
    from collections.abc import Callable, Coroutine
    from typing import Any

    from fencepost.flows.course import Course


def kept_result(value: Any) -> str | None:
    """Return a body's result as the ledger keeps it. One that cannot be kept is never retried."""
    if value is None:
        return None
    try:
        return encoded(value, what="result")
    except BadValue as error:
        raise GiveUp(str(error)) from error


def _kept_if_possible(value: Any) -> str | None:
    """Return a result, or nothing if it cannot be kept: the work is done in any case."""
    try:
        return kept_result(value)
    except GiveUp:
        return None


def called_here(body: Callable[[], Any]) -> Any:
    """Call a body in this thread. An interrupt from outside comes to the main thread only.

    In any other one the body has raised it, and to give the run back would be to try it for ever.
    """
    try:
        return body()
    except BaseException as error:
        import threading

        ordinary = isinstance(error, Exception | SystemExit)
        if ordinary or threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError(f"the body raised {error!r}") from error


def on_a_loop(course: Course, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run an ``async def`` body to its end from blocking code."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(supervised(course, work))
    raise Misuse(
        f"job {course.run.key.job!r} is async def and an event loop is running in this thread: "
        "use AsyncFencepost here"
    )


async def supervised(course: Course, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Await an ``async def`` body, and cancel it once it must not go on."""
    import asyncio
    from contextlib import suppress

    loop = asyncio.get_running_loop()
    exits: list[SystemExit] = []
    task = loop.create_task(_kept_from_the_loop(work, exits))
    why: list[BaseException] = []
    timers: list[asyncio.TimerHandle] = []  # at most one

    def look() -> None:
        """Stop the body if there is a reason; else look again when its time is up."""
        _cancel(timers)
        if why or task.done():
            return
        reason, left = why_stopped(course), course.to_next_limit()
        if reason is not None:
            why.append(reason)
            task.cancel(str(reason))
        elif left is not None:
            timers.append(loop.call_later(left, look))

    def from_any_thread() -> None:
        with suppress(RuntimeError):  # the loop is closed, and its tasks have ended
            loop.call_soon_threadsafe(look)

    course.on_stop += (from_any_thread,)
    course.hold.on_loss += (from_any_thread,)
    course.on_recall += (from_any_thread,)  # before we look: a recall comes from any thread
    loop.call_soon(look)
    try:
        result = await task
    except asyncio.CancelledError as error:
        if why:
            raise why[0] from None
        _refuse_cancelled_from_within(error)
        raise  # somebody else cancelled us
    finally:
        _cancel(timers)
        course.on_stop = tuple(one for one in course.on_stop if one is not from_any_thread)
        course.on_recall = tuple(one for one in course.on_recall if one is not from_any_thread)
    if exits:
        raise exits[0]
    return result


def _cancel(timers: list[asyncio.TimerHandle]) -> None:
    while timers:
        timers.pop().cancel()


def _refuse_cancelled_from_within(error: BaseException) -> None:
    """Raise if nobody wants a body to stop: to give its run back would be to try it for ever."""
    import asyncio

    here = asyncio.current_task()
    if here is not None and not here.cancelling():
        raise RuntimeError("the body was cancelled from within, by what it awaited") from error


async def _kept_from_the_loop(
    work: Callable[[], Coroutine[Any, Any, Any]], exits: list[SystemExit]
) -> Any:
    """Await a body. Should it exit, keep that in mind: a task that raises it ends the loop."""
    try:
        return await work()
    except SystemExit as error:
        exits.append(error)


def why_stopped(course: Course) -> BaseException | None:
    """Return why a body must not go on; None if it may."""
    hold = course.hold
    if hold.why_lost is not None:
        return LeaseLost(hold.name, token=hold.token, reason=hold.why_lost)
    if course.cancelled:
        return RunCancelled(str(course.run.key))
    if course.overdue:
        return RunRecalled(str(course.run.key))
    return _out_of_time(course) if course.late else None


def _out_of_time(course: Course) -> RunTimedOut:
    return RunTimedOut(str(course.run.key), timeout=course.policy.timeout or 0.0)


async def in_a_thread(course: Course, work: Callable[[], Any]) -> Any:
    """Run a ``def`` body in a thread of its own, and wait for its end whatever happens.

    A caller that is cancelled asks the body to stop, and then waits: while the body runs, the run
    is neither over nor free.
    """
    import asyncio
    import threading

    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if error is None:
            ended.set_result(result)
        elif isinstance(error, StopIteration) or not isinstance(error, Exception | SystemExit):
            # No future may carry it, or it would end the loop: no interrupt comes to a thread.
            ended.set_exception(RuntimeError(f"the body raised {error!r}"))
        else:
            ended.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 -- it is passed on
            failure = error
        loop.call_soon_threadsafe(settle, result, failure)

    name = f"fencepost-{course.run.key.job}"
    _start(threading.Thread(target=run, name=name, daemon=True))
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        course.hear(cancelled=True)
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError:
                continue  # the first cancellation is already on its way
        if not ended.cancelled() and ended.exception() is None:
            course.returned += (_kept_if_possible(ended.result()),)  # it was done all the same
        raise


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThread(f"no thread is to be had: {error}") from error
