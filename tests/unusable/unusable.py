"""What cannot be used, in one way each, and how it is mended: for one text about all of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from fencepost import Fencepost
from fencepost.errors import FencepostError
from fencepost.ledger.open import has_ledger
from fencepost.model.lease import Holder
from fencepost.stores.open import open_store
from fencepost.world.blocking import BlockingWorld
from fencepost.world.flow import finish

if TYPE_CHECKING:
    from servers import Running
    from small_disk import OnSmallDisk, SmallBinlog

SECRET = "hunter2"
_REFUSALS = 3  # in a row, until it is believed


class Unusable(NamedTuple):
    """A store that refuses, what it must say, and how to mend it."""

    url: str
    says: str  # a pattern, for whatever changes something
    mend: Callable[[], object]
    mended: str = ""  # the URL from then on, if it is another
    looks: int = 3  # the exit code of what only looks
    breaking: int = 3  # and of breaking a lock that is not there
    doctor: int | None = 3  # None: it may or may not be struck by the fault
    finds: str = ""  # the code by which the doctor names it, as long as it is so
    gone: bool = False  # it has ended itself, and is then as any server that nobody runs


Fault = Callable[[], AbstractContextManager[Unusable]]
FAULTS: dict[str, Fault] = {}


def fault(make: Callable[[], Iterator[Unusable]]) -> Callable[[], Iterator[Unusable]]:
    """Put a fault on the list, under its name."""
    FAULTS[make.__name__] = contextmanager(make)
    return make


def fresh() -> str:
    """Return a name that nothing has."""
    return f"u{uuid.uuid4().hex[:12]}"


def nothing() -> None:
    """Mend nothing: only the URL was wrong. Or be the body of a job."""


def keeps_runs(url: str) -> bool:
    """Say whether jobs can be recorded there."""
    return has_ledger(open_store(url, BlockingWorld(), namespace="default"))


def used(url: str) -> None:
    """Have everything made that the first use makes, the ledger as well."""
    with Fencepost(url) as fp:
        with fp.lock("before"):
            pass
        if keeps_runs(url):
            fp.job("before")(nothing)
            assert fp.trigger("before", manual=True).status == "succeeded"


def until_refused(url: str, *, times: int = _REFUSALS) -> None:
    """Take leases, and give none back, until the store has no room for another, however small."""
    for width in (120, 0):
        refused = 0
        while refused < times:
            refused = 0 if _takes(url, _REFUSALS, width=width) else refused + 1


def until_it_ends(server: Running, url: str) -> None:
    """Take leases until the server has had enough, and is gone."""
    assert server.process is not None
    while server.process.poll() is None:
        _takes(url, 10)


def _takes(url: str, count: int, *, width: int = 120) -> bool:
    """Say whether so many leases were granted, one after the other."""
    store = open_store(url, BlockingWorld(), namespace="default")
    try:
        for _ in range(count):
            name = f"{fresh():x<{width}}"
            finish(store.acquire(name, holder=Holder(fresh(), "h", 1), ttl=3600.0))
    except FencepostError:
        return False
    finally:
        finish(store.close())
    return True


def answers(url: str) -> bool:
    """Say whether leases can be looked at."""
    with Fencepost(url) as fp:
        try:
            fp.locks()
        except FencepostError:
            return False
    return True


def restarted(server: OnSmallDisk | SmallBinlog) -> None:
    """Make room, and start the server again."""
    server.disk.clear()
    server.restart()
