"""Triggers or backfills a job once, as a process whose clock may be wrong, and tells the answer.

It is started with a URL, a namespace, a face (``blocking`` or ``aio``), a verb and the words of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from fencepost import AsyncFencepost, Fencepost
from fencepost.errors import FencepostError

url, namespace, face, verb, text = sys.argv[1:]
words: dict[str, Any] = json.loads(text)
events: list[dict[str, Any]] = []
schedule: dict[str, Any] = words.pop("schedule")


def heard(event: Any) -> None:
    events.append({"what": event.what, **dict(getattr(event, "more", ()))})


def body() -> None:
    """Have nothing to do."""


def told(answer: Any) -> Any:
    if isinstance(answer, list):
        return [str(key) for key in answer]
    return str(answer) if verb == "backfill" else answer._asdict()


def blocking() -> Any:
    with Fencepost(url, namespace=namespace, on_event=heard) as fp:
        if verb == "alarm":
            return fp.alarms.set("bell", "one", in_=words["in_"])
        fp.job("bills", **schedule)(body)
        return told(getattr(fp, verb)("bills", **words))


async def aio() -> Any:
    async with AsyncFencepost(url, namespace=namespace, on_event=heard) as fp:
        fp.job("bills", **schedule)(body)
        return told(await getattr(fp, verb)("bills", **words))


answer: dict[str, Any] = {"wall": time.time()}
try:
    answer["answer"] = blocking() if face == "blocking" else asyncio.run(aio())
except FencepostError as error:
    answer["error"] = f"{type(error).__name__}: {error}"
print(json.dumps({**answer, "events": events}, default=str))
