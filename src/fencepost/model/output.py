"""Of what a command says, the first and the last 16 KB are kept, and no secret is.

Secrets are looked for in the whole excerpt, never chunk by chunk, so none can hide in two chunks.
Beside each cut a little more is kept than is shown: a secret that the cut would divide is seen
whole, and its half is masked.
"""

from __future__ import annotations

import codecs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# The event with what an attempt said whose run went on; its record has only the last one's words.
OUTPUT = "attempt_output"
KEPT = 16 * 1024
# Longer than the secrets that are known by their looks alone.
_BESIDE = 8 * 1024
_HELD = KEPT + _BESIDE
# How long an unfinished line is waited for.
LONGEST_LINE = 8 * 1024


class Excerpt:
    """The head and the tail of a stream of bytes, in bounded memory."""

    def __init__(self) -> None:
        self.total = 0  # bytes so far
        self._first = bytearray()  # the stream's first bytes, up to _HELD
        self._last = bytearray()  # its last bytes, at least _HELD; perhaps some of the same

    def feed(self, chunk: bytes) -> None:
        """Take note of the next bytes of the stream."""
        self.total += len(chunk)
        self._first += chunk[: _HELD - len(self._first)]
        self._last += chunk[-_HELD:]
        if len(self._last) > 2 * _HELD:  # not each time: to shift them is work
            del self._last[:-_HELD]

    @property
    def left_out(self) -> int:
        """How many bytes are not shown."""
        if self.total <= 2 * KEPT:
            return 0
        return self.total - _whole_end(self._first[:KEPT]) - KEPT + _whole_start(self._last[-KEPT:])

    def text(self, known: Sequence[str] = ()) -> str:
        """Return what may be shown: no secret, no half character, and a line for what is left out.

        What is no UTF-8 is replaced, and so is NUL, which some databases cannot keep in a text.
        """
        # Its patterns are worth compiling only once there is a text.
        from fencepost.model.secrets import redacted, without

        text = self._parts(known) if self.left_out else redacted(_decoded(self._whole()), known)
        # Neither our own words nor a replaced character shall complete what is a secret elsewhere.
        return without(text.replace("\0", "\N{REPLACEMENT CHARACTER}"), known)

    def _whole(self) -> bytes:
        missing = self.total - len(self._first)
        return bytes(self._first + self._last[len(self._last) - missing :])

    def _parts(self, known: Sequence[str]) -> str:
        from fencepost.model.secrets import masked, secret_spans  # as in ``text``

        first = self._first[: _whole_end(self._first)]
        cut = _whole_end(first[:KEPT])
        shown, beside = _decoded(first[:cut]), _decoded(first[cut:])
        spans = secret_spans(shown + beside, known, torn_end=True)
        head = masked(shown + beside, spans, end=len(shown))
        last = self._last[-_HELD:]
        last = last[_whole_start(last) :]
        cut = len(last) - KEPT + _whole_start(last[-KEPT:])
        beside, shown = _decoded(last[:cut]), _decoded(last[cut:])
        spans = secret_spans(beside + shown, known, torn_start=True)
        tail = masked(beside + shown, spans, start=len(beside))
        new_line = "" if head.endswith("\n") else "\n"
        return f"{head}{new_line}[… {self.left_out:,} bytes left out …]\n{tail}"


class Braid:
    """Several streams become one, line by line.

    A line is passed on when it is finished, so that no line of one stream tears apart a line of
    another, and a secret in it. Only one that is longer than LONGEST_LINE is passed on as it comes.
    """

    def __init__(self, excerpt: Excerpt) -> None:
        self._excerpt = excerpt
        self._unfinished: dict[int, bytearray] = {}

    def feed(self, strand: int, chunk: bytes) -> None:
        """Take note of the next bytes of one of the streams."""
        rest = self._unfinished.setdefault(strand, bytearray())
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if len(rest) - end > LONGEST_LINE:
            end = len(rest)
        self._excerpt.feed(bytes(rest[:end]))
        del rest[:end]

    def end(self) -> None:
        """Pass on the lines that will never be finished."""
        for rest in self._unfinished.values():
            self._excerpt.feed(bytes(rest))
            rest.clear()


def _whole_end(data: bytearray) -> int:
    """Return where the last whole character ends, if the data was cut within one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(data) - len(decoder.getstate()[0])


def _whole_start(data: bytearray) -> int:
    """Return where the first whole character begins: three bytes at most belong to another."""
    start = data[:3]
    return len(start) - len(start.lstrip(_CONTINUING))


_CONTINUING = bytes(range(0x80, 0xC0))


def _decoded(data: bytes | bytearray) -> str:
    return data.decode(errors="replace")
