"""How a verb opens the store that ``--url`` names, and asks it."""

from __future__ import annotations

import os

from fencepost.errors import BadUrl, Misuse, StoreUnavailable
from fencepost.stores.open import DEFAULT_URL, open_store
from fencepost.world.flow import finish

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import TypeVar

    from fencepost.stores.api import LeaseStore
    from fencepost.world.api import Flow, World

    T = TypeVar("T")


def url_of(args: argparse.Namespace) -> str:
    """Return the URL that was given, or the one that is in effect without."""
    return args.url or os.environ.get("FENCEPOST_URL") or DEFAULT_URL


def opened(args: argparse.Namespace, world: World) -> LeaseStore:
    """Open the store. A URL that cannot be one is refused here; nothing is asked yet."""
    return open_store(url_of(args), world, namespace=args.namespace)


def asked(flow: Flow[T]) -> T:
    """Run a flow. A URL that is well formed but leads nowhere is a store that cannot be reached.

    So is one whose store refuses everybody: what a store calls a misuse is about itself, unless it
    has a name of its own.
    """
    try:
        return finish(flow)
    except Misuse as error:
        if type(error) not in (Misuse, BadUrl):
            raise
        raise StoreUnavailable(str(error)) from error
