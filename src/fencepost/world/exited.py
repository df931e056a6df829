"""How a guarded command ended, in the words that a ledger keeps: its code, its signal, its output.

Shared by whoever runs commands: ``fencepost exec`` and the executor of command jobs.
"""

from __future__ import annotations

import os
import signal

from fencepost.model.slot import shown
from fencepost.version import VERSION
from fencepost.world.guardian import marked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fencepost.model.output import Excerpt
    from fencepost.model.run import RunRecord
    from fencepost.world.guardian import Guarded

# By which a program says that it may well succeed another time: EX_TEMPFAIL of sysexits.
TEMPFAIL = 75
# By its name one of our own would look like a secret, in a command within a command.
_OWN_KEY = "FENCEPOST_IDEMPOTENCY_KEY"


def environment_for(run: RunRecord) -> dict[str, str]:
    """Return our environment, and in it what a command gets to know of its run."""
    return marked(name=run.lease, token=run.token, nonce=run.holder.nonce) | {
        "FENCEPOST_RUN_ID": str(run.key),
        "FENCEPOST_JOB": run.key.job,
        "FENCEPOST_SLOT": shown(run.key.slot),
        "FENCEPOST_ATTEMPT": str(run.attempt),
        _OWN_KEY: str(run.key),
    }


def known_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return what must not be kept of a command's words: the values of secret-looking variables."""
    from fencepost.model.secrets import secrets_of  # its patterns are dear

    return secrets_of({name: value for name, value in environment.items() if name != _OWN_KEY})


def why_failed(command: Guarded) -> str:
    """Return why a command that ran is no success: its code, or what killed it."""
    if command.orphaned and not command.asked:
        return "its guardian was killed"
    if command.signal:
        return f"killed by {_named(command.signal)}"
    return f"exit code {command.code}"


def account_of(
    command: Guarded | None, excerpt: Excerpt, secrets: Sequence[str], *, duration: float
) -> dict[str, object]:
    """Return all that is kept of a command: how it ended, and what it said, without secrets."""
    ran = command if command is not None and not command.failed else None
    signum = 0 if ran is None else ran.signal
    return {
        "exit_code": None if ran is None or signum else ran.code,
        "signal": _named(signum) if signum else None,
        "duration": round(duration, 3),
        "output": excerpt.text(secrets),
        "output_bytes": excerpt.total,
        "output_left_out": excerpt.left_out,
        "host": os.uname().nodename,
        "version": VERSION,
    }


def _named(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # those without a name
        return f"signal {signum}"
