"""Foreign text made harmless where it is said; counts in words.

Of what others wrote (a server, a trace, a name) nothing acts and all is seen. A control character can clear a terminal,
hide a line or set its title; a bidirectional one shows letters in an order that they do not have (CVE-2021-42574).
"""

import re
from collections.abc import Mapping
from typing import Any

# C0, DEL and C1; marks, embeddings, overrides and isolates of bidirectional text; line and paragraph separators
# (U+2028, U+2029); halves of surrogate pairs, which no UTF-8 can say.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")  # SGR of ECMA-48: what our own tables are coloured with
_BLANK = re.compile("\r\n|[\n\t]")


def clean(text: str) -> str:
    """On one line: blanks for line ends and tabs, and what acts as it would be typed: ESC as `\\x1b`."""
    return text if text.isprintable() else _ACTS.sub(_typed, _BLANK.sub(" ", text))


def lines(text: str, *, colour: bool = False) -> str:
    """The same of a text of several lines, which stay; with `colour` so do colour codes."""
    if colour and "\x1b" in text:
        parts = _COLOUR.split(text)  # every second one is a code
        return "".join(part if i % 2 else lines(part) for i, part in enumerate(parts))
    return "\n".join(map(clean, text.replace("\r\n", "\n").split("\n")))


def counted(n: float | str, what: str) -> str:
    """`1 request`, `2 requests`, `1,000 requests`: for words that add an s. `n`: a number, or how it is written."""
    shown = n if isinstance(n, str) else f"{n:,}"
    return f"{shown} {what}{'' if shown == '1' else 's'}"


def cleaned(value: Any) -> Any:
    """A JSON value with each text in it, keys too, as `clean` has it."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): cleaned(of) for key, of in value.items()}
    return [cleaned(of) for of in value] if isinstance(value, list) else value


def _typed(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"  # the latter is right within JSON too
