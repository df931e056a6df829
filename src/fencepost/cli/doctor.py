"""``fencepost doctor`` says what on this very set-up would break a promise, and what to do.

It looks at the store, its settings and its clock, and at how long runs take. It changes nothing.
"""

from __future__ import annotations

from fencepost.cli.asking import asked, url_of
from fencepost.cli.main import FINE, UNREACHABLE, WRONG, say
from fencepost.cli.reading import ledger_at
from fencepost.cli.showing import bold, plain, print_json
from fencepost.ledger.open import has_ledger
from fencepost.model.observed import Observed, misfits, outlived
from fencepost.model.run import State
from fencepost.model.symptom import Severity, Symptom
from fencepost.stores.open import open_store, redacted
from fencepost.world.blocking import BlockingWorld
from fencepost.world.clocks import SystemClocks

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from fencepost.ledger.api import Ledger
    from fencepost.model.definition import JobRecord
    from fencepost.stores.api import LeaseStore

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]  # noqa: SLF001

_WORDS = {Severity.BREAKS: "breaks", Severity.RISK: "risk", Severity.NOTE: "note"}
_ENDED = (State.SUCCEEDED, State.TIMED_OUT)
_UNUSABLE = ".unusable"  # how a store says that it could not even be examined
_UNMADE = ".tables"  # how it says that nobody has used it yet
_NEWEST = 30  # runs of each job that are looked at


def register(subparsers: Subparsers) -> None:
    """Add the verb ``doctor``."""
    parser = subparsers.add_parser(
        "doctor", help="say what on this store would break a promise, and what to do"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine the store and print what was found, the worst first; 1 if a promise is broken."""
    store = open_store(_trusting(url_of(args)), BlockingWorld(), namespace=args.namespace)
    try:
        found = _found(store, args)
    finally:
        asked(store.close())
    found.sort(key=lambda symptom: (-symptom.severity, symptom.code))
    unusable = [symptom for symptom in found if symptom.code.endswith(_UNUSABLE)]
    worst = found[0].severity if found else Severity.NOTE
    if args.json:
        print_json(
            {
                "url": redacted(url_of(args)),
                "ok": worst < Severity.BREAKS,
                "symptoms": [_plain(symptom) for symptom in found],
            }
        )
    elif not unusable:
        _print(found, args)
    if unusable:
        say(unusable[0].what)
        return UNREACHABLE
    return WRONG if worst is Severity.BREAKS else FINE


def _trusting(url: str) -> str:
    """Return the URL of a file as one that is opened anywhere: here a shared disk is a finding."""
    return f"{url}?trust_filesystem=1" if url.startswith("sqlite:///") and "?" not in url else url


def _found(store: LeaseStore, args: argparse.Namespace) -> list[Symptom]:
    examine = getattr(store, "examine", None)
    if examine is None:
        asked(store.views())  # at least it answers
    found = [] if examine is None else list(asked(examine()))
    if any(symptom.severity is Severity.BREAKS for symptom in found):
        return found  # a ledger that cannot be used has nothing to add
    found += _disclaimed(store)
    unmade = any(symptom.code.endswith(_UNMADE) for symptom in found)
    if has_ledger(store) and not unmade:  # to look at a ledger would make its tables
        with ledger_at(args) as ledger:
            if ledger is not None:
                found += _clock(ledger)
                found += _misfits(ledger, notices_death=store.capabilities.notices_death)
    return found


def _disclaimed(store: LeaseStore) -> Iterator[Symptom]:
    """Say what this kind of store cannot promise anywhere."""
    can = store.capabilities
    if not can.shared:
        yield Symptom(
            "store.private",
            Severity.RISK,
            "no other process sees the leases of this store",
            "use sqlite:/// on one machine, or a server for several",
        )
    if not can.exclusive:
        yield Symptom(
            "store.overlap",
            Severity.RISK,
            "this store may grant a lease to two holders for a moment",
            "fence every write that matters",
        )
    if not can.failover_safe and can.shared:
        yield Symptom(
            "store.failover",
            Severity.NOTE,
            "a store of this kind may forget the newest grants when it fails over",
            "fence every write that matters: tokens go on rising",
        )


def _clock(ledger: Ledger) -> Iterator[Symptom]:
    """Say whether our wall clock is the one that the instances of a file go by."""
    file = getattr(ledger.leases, "file", None)
    if file is None:
        return  # a server has a clock of its own, and its store has looked at that
    from fencepost.ledger.sqlite_clock import off_by

    asked(ledger.jobs())  # whoever asks a ledger brings it up to date
    off: float = file.read(lambda db: off_by(db, SystemClocks()))
    if off:
        yield Symptom(
            "sqlite.clock",
            Severity.RISK,
            f"the clock of this process is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'} of "
            "the one that the instances of this file go by: it decides nothing until they agree",
            "keep the clock with NTP; who agreed before is forgotten after 15 s of silence",
        )


def _misfits(ledger: Ledger, *, notices_death: bool) -> Iterator[Symptom]:
    for job in asked(ledger.jobs()):
        facts = _facts(job)
        if "lease" not in facts or job.retired:
            continue
        runs = asked(ledger.runs(job.job, limit=_NEWEST, states=_ENDED))
        took = [
            record.ended_at - record.started_at
            for record in runs
            if record.state is State.SUCCEEDED and record.started_at
        ]
        late = sum(record.state is State.TIMED_OUT for record in runs)
        lease, timeout = facts["lease"], facts.get("timeout")
        lived_on = _outlived(ledger, job.job)
        yield from misfits(Observed(job.job, lease, timeout, took, late, notices_death, lived_on))


def _outlived(ledger: Ledger, job: str) -> int:
    """Count the newest runs, ended or not, of which an attempt lived on after it was lost."""
    runs = asked(ledger.runs(job, limit=_NEWEST))
    return sum(outlived(asked(ledger.events(run.key))) for run in runs if run.losses)


def _facts(job: JobRecord) -> dict[str, float]:
    import json

    try:
        facts = json.loads(job.definition)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _plain(symptom: Symptom) -> dict[str, str]:
    return {
        "code": symptom.code,
        "severity": _WORDS[symptom.severity],
        "what": symptom.what,
        "remedy": symptom.remedy,
    }


def _print(found: list[Symptom], args: argparse.Namespace) -> None:
    if args.quiet:
        found = [symptom for symptom in found if symptom.severity is Severity.BREAKS]
    else:
        verdict = "nothing was found" if not found else f"{len(found)} found"
        print(bold(f"{redacted(url_of(args))}: {verdict}", args))
    for severity, symptom in ((_WORDS[symptom.severity], symptom) for symptom in found):
        print(f"  {severity:6}  {plain(symptom.what)}: {plain(symptom.remedy)} [{symptom.code}]")
