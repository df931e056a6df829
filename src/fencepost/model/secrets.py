"""A secret has no place in a ledger, a log or an error: what is one, or looks like one, is masked.

In doubt it is masked: a word too many is missed by somebody, a password too many is abused. Every
pattern takes time in proportion to the text, whatever that is: commands print the strangest things.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Span = tuple[int, int]  # from where to where a text is secret

MASK = "***"
# A shorter value would mask half of the text, and tells more by its absence than it hides.
SHORTEST_SECRET = 6


def redacted(text: str, known: Sequence[str] = ()) -> str:
    """Return a text that may be shown: without the ``known`` secrets, and all that looks like one.

    The known are masked wherever they occur, even where they overlap.
    """
    return masked(text, secret_spans(text, known))


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return the values of the variables whose names look secret, the longest first."""
    values = {value.strip() for name, value in environment.items() if _is_secret_name(name)}
    fit = (value for value in values if len(value) >= SHORTEST_SECRET)
    return sorted(fit, key=lambda value: (-len(value), value))


def secret_spans(
    text: str, known: Sequence[str] = (), *, torn_start: bool = False, torn_end: bool = False
) -> list[Span]:
    """Return where a text is secret, in order and without overlaps.

    A text that was torn out of a longer one may begin or end within a known secret.
    """
    found = [*_known_spans(text, known), *_pattern_spans(text)]
    for secret in _forms(known):
        if torn_start:
            found += _torn_at_start(text, secret)
        if torn_end:
            found += _torn_at_end(text, secret)
    return _merged(found)


def masked(text: str, spans: Iterable[Span], *, start: int = 0, end: int | None = None) -> str:
    """Return a text, or its part from ``start`` to ``end``, with a mask for each span."""
    end = len(text) if end is None else end
    parts, at = [], start
    for first, last in spans:
        if last > start and first < end:
            parts += [text[at : max(first, at)], MASK]
            at = min(last, end)
    return "".join([*parts, text[at:end]])


def without(text: str, known: Sequence[str]) -> str:
    """Return a text without the ``known`` secrets, and otherwise as it is."""
    return masked(text, _merged(_known_spans(text, known)))


_SECRET_NAME = re.compile(
    r"pass(?:word|wd|phrase|code)|(?:^|_)pass(?:$|_)|pwd|secrets?(?![a-z])|tokens?(?![a-z])"
    r"|credentials?|api_?key|(?:access|private|signing|encryption)_?key|(?:^|_)key$"
    r"|authorization|(?:^|_)(?:auth|jwt|bearer|cookie)$",
    re.IGNORECASE,
)
# What only tells where a secret is kept, or is called so for another reason.
_OPEN_NAME = re.compile(r"(?:OLD)?PWD|FENCEPOST_TOKEN|.*_(?:FILE|PATH|DIR)", re.IGNORECASE)


def _is_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _OPEN_NAME.fullmatch(name)


# The names of what is secret in pairs. A fencing token is none, and neither are counts of tokens.
_NAMES = (
    r"(?:pass(?:word|wd|phrase|code)|(?<=[_-])pass|pass(?=[\"']?\s{0,8}=)|pwd|secret"
    r"|(?<!fencepost_)token(?!s\b|i[sz])|credentials?|api[_-]?key"
    r"|(?:access|account|auth|private|signing|encryption|shared)[_-]?key)"
)
# Quoted up to the quote, else one word; but of "secret: password: x" the last one.
_VALUE = (
    r"(?:[bru]{0,2}\"((?:[^\"\\\r\n]|\\.)*)|[bru]{0,2}'((?:[^'\\\r\n]|\\.)*)"
    r"|((?:[^\s&]*[:=][ \t]{1,8})?[^\s&]+))"
)
# As in shells, JSON, YAML, Python.
_PAIR = (
    rf"{_NAMES}[\w.-]{{0,64}}\\?[\"'\])}}]{{0,3}}[ \t]{{0,8}}(?:=>|:=|==?|:)[ \t]{{0,8}}{_VALUE}"
)
_OPTION = rf"(?<![\w-])--[\w-]{{0,64}}?{_NAMES}[ \t]{{1,8}}{_VALUE}"
_QUERY = r"[?&][^=&\s]{0,64}(?:pass|secret|token|key|sig)[^=&\s]{0,64}=([^&\s]*)"
# The schemes that are made of pairs themselves take the rest of the line.
_HEADER = (
    r"(?:authorization|cookie)\\?[\"']?[ \t]{0,8}[:=][ \t]{0,8}\\?[\"']?"
    r"(?:(?:digest|aws4-[\w-]{1,32})[ \t]([^\r\n]*)"
    r"|(?:(?:basic|bearer|negotiate|token|apikey)[ \t]{1,8})?([^\r\n\"']+))"
)
_BEARER = r"bearer[ \t]{1,8}([\w.~+/=-]{6,})"
_AWS_KEY = (
    r"(?<![A-Z0-9])((?:A3T[A-Z0-9]|A(?:KI|SI|GP|ID|RO|IP|NP|NV|BI|CC)A)[A-Z0-9]{16})(?![A-Z0-9])"
)
# Tokens that were made to be recognised: GitHub's, GitLab's, Slack's, Stripe's and their like.
_BRANDED = (
    r"(?<![A-Za-z0-9])"
    r"((?:gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|[rs]k_(?:live|test)_|sk-)[\w-]{16,})"
)
_KEY_LINE = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
# Even without its end.
_PRIVATE_KEY = rf"(-----BEGIN {_KEY_LINE}.*?(?:-----END {_KEY_LINE}|\Z))"

# Each finds a secret as its last group that took part. A repetition that may turn out to be in vain
# is bounded, for else a text could be made of nothing but such beginnings.
_PATTERNS = [
    *(re.compile(p, re.IGNORECASE | re.DOTALL) for p in (_PAIR, _OPTION, _QUERY, _HEADER, _BEARER)),
    *(re.compile(p, re.DOTALL) for p in (_AWS_KEY, _BRANDED, _PRIVATE_KEY)),
]
# {"alg":""} in base64.
_SHORTEST_HEADER = 15
_KEY_END = re.compile(rf"-----END {_KEY_LINE}")
_KEY_TEXT = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=\\ \t\r\n"
_WORD = re.compile(r"\S+")
_DOTTED = re.compile(r"[\w.-]+")
_PASSWORD_IN_URL = re.compile(r"://[^:/@]*:(.*)@")


def _pattern_spans(text: str) -> Iterator[Span]:
    for pattern in _PATTERNS:
        for match in pattern.finditer(text):
            yield match.span(match.lastindex or 0)
    yield from _passwords_in_urls(text)
    yield from _web_tokens(text)
    for match in _KEY_END.finditer(text):  # a private key whose beginning is elsewhere
        yield len(text[: match.start()].rstrip(_KEY_TEXT)), match.end()


def _passwords_in_urls(text: str) -> Iterator[Span]:
    for word in _WORD.finditer(text):
        # A password may have an @ in it, so it ends at the last one.
        end = text.rfind("@", *word.span()) + 1
        found = _PASSWORD_IN_URL.search(text, word.start(), end) if end else None
        if found:
            yield found.span(1)


def _web_tokens(text: str) -> Iterator[Span]:
    """Find JSON web tokens: the first part is an object, and so begins with {" in base64."""
    for word in _DOTTED.finditer(text) if "eyJ" in text else ():
        start = text.find("eyJ", *word.span())
        if start >= 0 and text.rfind(".", start, word.end()) >= start + _SHORTEST_HEADER:
            yield start, word.end()


def _known_spans(text: str, known: Sequence[str]) -> Iterator[Span]:
    for secret in _forms(known):
        at = text.find(secret)
        while at >= 0:
            yield at, at + len(secret)
            at = text.find(secret, at + 1)  # it may overlap with itself


def _torn_at_start(text: str, secret: str) -> list[Span]:
    if text in secret:
        return [(0, len(text))]
    for length in range(min(len(secret), len(text)), 0, -1):
        if text.startswith(secret[-length:]):
            return [(0, length)]
    return []


def _torn_at_end(text: str, secret: str) -> list[Span]:
    for length in range(min(len(secret), len(text)), 0, -1):
        if text.endswith(secret[:length]):
            return [(len(text) - length, len(text))]
    return []


def _forms(known: Sequence[str]) -> set[str]:
    """Return the secrets as they are and as they look in a text, where they are no valid UTF-8."""
    forms = set(known)
    for secret in known:
        try:
            forms.add(secret.encode(errors="surrogateescape").decode(errors="replace"))
        except UnicodeEncodeError:
            continue  # no bytes at all could look like this
    return forms - {""}


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged
