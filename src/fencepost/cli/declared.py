"""How a verb finds the jobs that it is about: ``module:fp``, a file of jobs, or ./jobs.toml."""

from __future__ import annotations

import inspect
import os
from contextlib import contextmanager

from fencepost.blocking import Fencepost
from fencepost.cli.asking import url_of
from fencepost.errors import BadUrl, Misuse, StoreUnavailable
from fencepost.stores.open import anchored, redacted

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator
    from typing import Any

    from fencepost.aio import AsyncFencepost
    from fencepost.scheduling import Scheduling

JOBS, DEFAULT = "jobs.toml", "default"


def add_source(parser: argparse.ArgumentParser) -> None:
    """Let a verb be told where its jobs are declared."""
    parser.add_argument(
        "source",
        metavar="module:fp | jobs.toml",
        nargs="?",
        help="where the jobs are declared (./jobs.toml, if it is there)",
    )


def has_source(args: argparse.Namespace) -> bool:
    """Say whether there are declared jobs at all."""
    return args.source is not None or os.path.exists(JOBS)


def fencepost_of(args: argparse.Namespace) -> Fencepost | AsyncFencepost:
    """Return the face that has the jobs declared to it, or say what is missing."""
    source: str | None = args.source
    if source is None and not os.path.exists(JOBS):
        raise Misuse(
            "no jobs are declared here: name a Python object as module:fp, or a file of jobs, or "
            f"put a {JOBS} into this folder"
        )
    if source is None or source.endswith(".toml") or os.path.isfile(source):
        return _from_file(source or JOBS, args)
    from fencepost.finding import find_fencepost

    if args.url is not None:  # for those that take whatever is in effect
        os.environ["FENCEPOST_URL"] = args.url
    found = find_fencepost(source)
    _refuse_another(found, source, args)
    return found


def _from_file(path: str, args: argparse.Namespace) -> Fencepost:
    """Declare the jobs of a file: on the store that was asked for, or that the file names."""
    from fencepost.jobfile import load, read_file

    read = read_file(path)
    url = args.url or read.url or url_of(args)
    space = args.namespace if args.namespace != DEFAULT else read.namespace or DEFAULT
    fp = Fencepost(url, namespace=space)
    load(path, fp)
    return fp


def _refuse_another(fp: Fencepost | AsyncFencepost, source: str, args: argparse.Namespace) -> None:
    """Raise if ``--url`` names another store than the one that the program has chosen."""
    chosen = url_behind(fp)
    if args.url is not None and chosen != anchored(args.url):
        raise Misuse(
            f"{source} keeps its ledger at {redacted(chosen)}, not at {redacted(args.url)}: leave "
            "--url out, or let the program take $FENCEPOST_URL"
        )


def scheduling_of(fp: Fencepost | AsyncFencepost) -> Scheduling:
    """Return what both faces share of the scheduler: the command line is a face as well."""
    return fp._scheduling  # noqa: SLF001


def url_behind(fp: Fencepost | AsyncFencepost) -> str:
    """Return where a face keeps its ledger."""
    source = fp._holding.source  # noqa: SLF001 -- as above
    return source if isinstance(source, str) else "a store of the program's own"


def done(fp: Fencepost | AsyncFencepost, work: Callable[[Any], Any]) -> Any:
    """Have ``work(fp)`` done and the face closed, whichever colour it has."""
    try:
        return _done(fp, work)
    except BadUrl as error:  # it was well formed, so it leads nowhere
        raise StoreUnavailable(str(error)) from error


def _done(fp: Fencepost | AsyncFencepost, work: Callable[[Any], Any]) -> Any:
    if isinstance(fp, Fencepost):
        with fp:
            return work(fp)
    import asyncio

    async def both() -> Any:
        async with fp:
            answer = work(fp)
            return await answer if inspect.isawaitable(answer) else answer

    return asyncio.run(both())


@contextmanager
def face_at(args: argparse.Namespace) -> Iterator[Fencepost]:
    """Open the store that ``--url`` names, for verbs that need no declared job."""
    with Fencepost(url_of(args), namespace=args.namespace) as fp:
        yield fp
