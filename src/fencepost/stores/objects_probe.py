"""A store that ignores conditions grants every lease to everybody: it is found out and refused.

One object, ``probe.json``, exists for this. Who finds it there needs two requests that a sound
store turns down. Whoever finds none creates it, and then has several create another one at once.
"""

from __future__ import annotations

from fencepost.errors import StoreUnfit
from fencepost.world.objects import Version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from fencepost.world.api import World
    from fencepost.world.objects import Bucket

_WITNESS = "probe.json"
_CONTENT = b'{"fencepost": "this object shows whether the store keeps conditions"}'
# An etag that no content has, and a generation that no object had.
_NEVER = Version('"00000000000000000000000000000000"', "1")
_RIVALS = 3


class IgnoresConditions(StoreUnfit):
    """Two would hold one lease."""


async def prove(world: World, bucket: Bucket, *, thoroughly: bool = False) -> None:
    """Raise ``IgnoresConditions`` if writes under conditions are not what they are said to be."""
    fresh = await world.call(bucket.create, _WITNESS, _CONTENT)
    if fresh is not None and await world.call(bucket.create, _WITNESS, _CONTENT) is not None:
        raise _ignores(bucket, "an object was created twice with If-None-Match: *")
    wrong = _NEVER if bucket.kind == "gs" else _NEVER._replace(generation=None)
    if await world.call(bucket.replace, _WITNESS, _CONTENT, wrong) is not None:
        raise _ignores(bucket, "an object was replaced though its etag did not match")
    if fresh is not None or thoroughly:
        await _race(world, bucket, wrong)


async def _race(world: World, bucket: Bucket, wrong: Version) -> None:
    key = f"probe-{world.nonce()}.json"
    if await world.call(bucket.replace, key, _CONTENT, wrong) is not None:
        raise _ignores(bucket, "an object that did not exist was replaced")
    try:
        tries = (world.call(bucket.create, key, _CONTENT) for _ in range(_RIVALS))
        created = [one for one in await world.together(*tries) if one is not None]
        if len(created) > 1:
            raise _ignores(bucket, f"{len(created)} of {_RIVALS} created the same object at once")
    finally:
        await world.call(bucket.remove, key)


def _ignores(bucket: Bucket, what: str) -> IgnoresConditions:
    return IgnoresConditions(
        f"{bucket.where} ignores conditions on writes ({what}): two could hold one lease, so it "
        "cannot keep leases; use a store that has conditional writes"
    )
