"""The conformance suite for a store that notices a little late that a lease ran out."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, ClassVar

from fencepost.testing.conformance import NAME, Desk, LeaseStoreConformance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Any


class Patient(LeaseStoreConformance):
    """The same proofs. Where they let a lease lapse they wait for it, ``late`` seconds at most."""

    worlds: ClassVar[tuple[str, ...]] = ()
    late: ClassVar[float] = 0.0


def _patient(proof: Callable[..., Awaitable[None]]) -> Any:
    async def prove(self: Patient, desk: Desk) -> None:
        async def pass_time(seconds: float) -> None:
            await desk.pass_time(seconds)
            end = time.monotonic() + (self.late if seconds > desk.brief else 0.0)
            while time.monotonic() < end:
                seen = await desk.store.peek(NAME)
                if seen is None or not seen.held:
                    break
                await desk.pass_time(0.05)

        await proof(self, desk._replace(pass_time=pass_time))

    return prove


for _name, _proof in inspect.getmembers(LeaseStoreConformance, inspect.iscoroutinefunction):
    if _name.startswith("prove_"):
        setattr(Patient, _name, _patient(_proof))
