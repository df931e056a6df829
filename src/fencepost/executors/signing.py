"""Both sides of a request can prove who they are: each signs it with a secret they share.

The header is ``Fencepost-Signature: t=<unix seconds>,v1=<hex>``, where the hex is the HMAC-SHA-256
of six parts with a line feed after each but the last: ``t``, the method, the path with its query,
the headers ``Fencepost-Run`` and ``Fencing-Token`` as they are sent, and the body. None of the
first five can have a line feed. The time is signed too, so a request that somebody recorded is soon
worthless; and so is one that is turned to another address, run or token.

A callback has neither header: there both parts are empty, and the path is
``/runs/{run_id}/complete`` or ``/beat``, unquoted and without whatever comes before.
"""

from __future__ import annotations

import hashlib
import hmac

from fencepost.errors import Misuse, Refused
from fencepost.model.named import NamedTuple

SIGNATURE = "Fencepost-Signature"
# How far the clocks of the two sides, and a slow network, may be apart.
TOLERANCE = 300.0


class About(NamedTuple):
    """What a signature is about, beside the body: how each part is spelled is told above."""

    method: str
    path: str
    run: str = ""
    token: str = ""


class SignatureRefused(Refused):
    """A request is not signed, not with our secret, or was signed too long ago."""


def sign(secret: str | bytes, body: bytes, at: float, *, about: About) -> str:
    """Return the header that proves: this was sent at ``at`` by one who knows the secret."""
    if any("\n" in part for part in about):
        raise Misuse("what is signed has a line feed in its method, path, run or token")
    stamp = str(int(at))
    return f"t={stamp},v1={_digest(secret, stamp, about, body)}"


def verify(
    secret: str | bytes,
    header: str | None,
    body: bytes,
    now: float,
    tolerance: float = TOLERANCE,
    *,
    about: About,
) -> None:
    """Return if ``header`` proves that all of it is from one who knows the secret, and is recent.

    Raises ``SignatureRefused``, which says why and never what would have been right. Several
    ``v1`` may be given, so that a secret can be changed: one that fits is enough.
    """
    pairs = [part.strip().partition("=") for part in (header or "").split(",")]
    stamps = [value for name, _, value in pairs if name == "t"]
    digests = [value for name, _, value in pairs if name == "v1"]
    if len(stamps) != 1 or not digests or not _is_stamp(stamps[0]):
        raise SignatureRefused(f"the header {SIGNATURE} is missing or malformed")
    if any("\n" in part for part in about):
        raise SignatureRefused("the method, path, run or token has a line feed")
    expected = _digest(secret, stamps[0], about, body).encode()
    # All are compared, each in constant time: nobody learns from how long it took.
    matches = [hmac.compare_digest(expected, digest.encode()) for digest in digests]
    if not any(matches):
        raise SignatureRefused("the signature is not by one who knows the secret")
    age = now - int(stamps[0])
    if abs(age) > tolerance:
        when = "ago" if age > 0 else "in the future"
        raise SignatureRefused(
            f"the signature was made {abs(age):.0f} s {when}, and {tolerance:g} s is the most"
        )


def _digest(secret: str | bytes, stamp: str, about: About, body: bytes) -> str:
    key = secret.encode() if isinstance(secret, str) else secret
    head = "".join(f"{part}\n" for part in (stamp, *about))
    return hmac.new(key, head.encode(errors="surrogatepass") + body, hashlib.sha256).hexdigest()


def _is_stamp(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 12
