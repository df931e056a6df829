"""Which statements end the transaction that they are said in, by their text, on MariaDB.

What a procedure, a prepared statement or a branch of a compound one does cannot be seen from here.
Statements that commit along with what they do commit even if they fail.
"""

from __future__ import annotations

import functools
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# What it takes to know a statement; of SET, which may be a list, it takes all.
_ENOUGH = 5

_ALWAYS = frozenset(
    (
        *("alter", "backup", "check", "commit", "flush", "grant", "install", "lock", "optimize"),
        *("rename", "repair", "reset", "revoke", "shutdown", "truncate", "uninstall"),
    )
)
# The rest by how they go on, each word with a space behind it.
_ENDING = re.compile(
    r"""
      analyze [ ] (?: (?: local | no_write_to_binlog ) [ ] )? tables? [ ]
    | begin [ ] (?: work [ ] )? \Z
    | create [ ] (?! (?: or [ ] replace [ ] )? temporary [ ] table [ ] )
    | drop [ ] (?! temporary [ ] | prepare [ ] )
    | rollback [ ] (?! (?: work [ ] )? to [ ] )
    | set [ ] (?: password | default [ ] role ) [ ]
    | start [ ] transaction [ ]
    """,
    re.VERBOSE,
)
# To switch it on commits, and DEFAULT is what the server has, which is mostly on.
_AUTOCOMMIT = re.compile(
    r"""
    (?: \A set | , ) [ ]
    (?: session [ ] | local [ ] | @@ [ ] (?: (?: session | local ) [ ] [.] [ ] )? )?
    autocommit [ ] :?= [ ]
    (?! (?: 0 | off | false ) [ ] (?: , | \Z ) )
    """,
    re.VERBOSE,
)


def ends_transaction(sql: str, *, backslashes: bool = True) -> bool:
    r"""Say whether a text has a statement that ends the transaction.

    ``backslashes`` says whether in ``'\''`` the second quote is one, or the end. What is in a
    comment for some versions only may be read or not: it ends the transaction if one of both does.
    """
    readings = (True, False) if "/*!" in sql or "/*M!" in sql else (True,)
    return any(
        _ends(words)
        for executed in readings
        for words in _statements(sql, backslashes=backslashes, executed=executed)
    )


def _ends(words: list[str]) -> bool:
    if not words:
        return False
    if words[0] in _ALWAYS:
        return True
    text = " ".join((*words, ""))
    if words[:2] == ["set", "statement"]:  # SET STATEMENT name = value, … FOR a statement
        return "for" in words and _ends(words[words.index("for") + 1 :])
    return bool(_ENDING.match(text) or (words[0] == "set" and _AUTOCOMMIT.search(text)))


def _statements(sql: str, *, backslashes: bool, executed: bool) -> Iterator[list[str]]:
    """Return of each statement the words that it begins with, without quotes, in lower case."""
    token, rest = _patterns(backslashes=backslashes, executed=executed)
    words: list[str] = []
    place = 0
    while (found := token.match(sql, place)) is not None:
        place = found.end()
        kind, text = found.lastgroup, found.group()
        if kind == "end":
            yield words
            words = []
        elif kind != "skip":
            words.append(text.strip("'\"`").lower())
            if len(words) >= _ENOUGH and words[0] != "set":
                if sql.find(";", place) < 0:
                    break
                skipped = rest.match(sql, place)
                place = skipped.end() if skipped is not None else place
    yield words


@functools.cache
def _patterns(*, backslashes: bool, executed: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return how to read one word, and how to come to the end of a statement."""
    escape, plain = (r"|\\.", r"\\") if backslashes else ("", "")
    quoted = "|".join(
        [
            rf"'(?:[^'{plain}]++|''{escape})*+'?",
            rf'"(?:[^"{plain}]++|""{escape})*+"?',
            r"`(?:[^`]++|``)*+`?",
        ]
    )
    comments = r"--(?=[\x00-\x20]|\Z)[^\n]*+|\#[^\n]*+|"
    # What is to be executed is read as if the signs around it were not there.
    whole = r"/\*(?!M?!)(?:.*?\*/|.*)" if executed else r"/\*(?:.*?\*/|.*)"
    signs = r"|/\*M?!\d*+|\*/" if executed else ""
    skip = rf"(?P<skip>[ \t\n\v\f\r]++|{comments}{whole}{signs})"
    word = r"(?P<word>[A-Za-z0-9_$\x80-\U0010ffff]++|@@|:=)"
    token = rf"{skip}|(?P<end>;)|{word}|(?P<quoted>{quoted})|(?P<other>.)"
    rest = rf"(?:[^;'\"`\#/-]++|{quoted}|{comments}{whole}|[^;])*+"
    return re.compile(token, re.DOTALL), re.compile(rest, re.DOTALL)
