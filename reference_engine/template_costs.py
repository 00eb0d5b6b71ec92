"""What the filters and methods of a chat template may make of what they are given, in bytes, before they are run."""

import re
from collections.abc import Callable, Sequence
from string import Formatter
from types import MappingProxyType
from typing import Any, NamedTuple

import jinja2
from markupsafe import escape

# Of what a template makes, and of what it goes through to make that: some hundred times a long context's text.
MOST_BYTES = 2**27  # a character is 1 here, whatever it takes
LINK = 8  # bytes of a place in a list
PIECE = LINK * LINK  # of a short text and its place
MOST_WIDTH = 999  # within a format

TEXTS = (str, bytes)
KEYS: type[Any] = type({}.keys())
VALUES: type[Any] = type({}.values())
ITEMS: type[Any] = type({}.items())
LISTS = (list, tuple, set, frozenset, KEYS, VALUES, ITEMS)
DICTS = (dict, MappingProxyType)  # the latter is a view's `mapping`
SIZED = (*TEXTS, *LISTS, *DICTS, range)

# A place of a %-format: its flags, width and precision; its kind, "(" where its key has brackets.
PLACE = re.compile(r"%(?:\([^()]*\))?([-+ #0]*[\d.*]*)[hlL]?(.)", re.DOTALL)
WIDE = re.compile(r"\*|\{|\d{4}")  # a width from elsewhere, or of more digits than MOST_WIDTH has


class Use(NamedTuple):
    """A filter's or a method's value and arguments, and how much they are."""

    value: Any
    given: Sequence[Any]
    whole: int  # bytes of all of them
    added: int  # bytes of the arguments alone
    size: int  # characters or places of the value
    numbers: int  # the sum of those among the arguments
    texts: list[Any]  # among the arguments, or one level within them
    letters: int  # of these


def percent(form: str, whole: int) -> int:
    """Of a %-format, each place of which may hold all that there is. Raises: a width."""
    cost = form.count("%") * (whole + MOST_WIDTH)
    if cost <= MOST_BYTES and any(WIDE.search(place[1]) or place[2] == "(" for place in PLACE.finditer(form)):
        raise _too_wide()
    return cost


def _braces(use: Use) -> int:
    """As `percent`, of str.format."""
    cost: int = use.value.count("{") * (use.whole + MOST_WIDTH)
    if cost <= MOST_BYTES and any(WIDE.search(place[2] or "") for place in Formatter().parse(use.value)):
        raise _too_wide()
    return cost


def _too_wide() -> jinja2.TemplateRuntimeError:
    return jinja2.TemplateRuntimeError(f"a format with a width of more than {MOST_WIDTH}, or from elsewhere")


def glance(use: Use) -> int:
    """It looks at a place or two, or its items are counted as they come: what it is given need not be weighed."""
    return 0


def larger(use: Use) -> int:
    """Of what nothing is said: a few bytes of each."""
    return use.whole * LINK + use.numbers


def _pieces(use: Use) -> int:
    """A list of what it is given, a text character by character."""
    return use.size * (PIECE if isinstance(use.value, TEXTS) else LINK) + use.numbers * PIECE


def _apart(use: Use) -> int:
    """As `larger`, and a text is in pieces on the way."""
    return larger(use) * (LINK if isinstance(use.value, TEXTS) else 1)


def _inserted(use: Use) -> int:
    """A text, or so many spaces, at many places."""
    return use.whole * (LINK + use.numbers + use.letters)


def _searched(use: Use) -> int:
    """From the end, or for one of many characters: each argument at each place."""
    return use.whole * use.letters


def _split(use: Use) -> int:
    return PIECE * (use.value.count(use.texts[0]) if use.texts else use.size)


def _replaced(use: Use) -> int:
    """Whichever argument is which; with a marked text among them all are escaped."""
    marked = any(hasattr(v, "__html__") for v in (use.value, *use.given))
    ways: list[Callable[[Any], str]] = [escape if marked else str]
    if isinstance(use.value, bytes):
        ways.append(lambda v: v.decode("latin-1") if isinstance(v, bytes) else str(v))
    most = 0
    for way in ways:
        text, *words = map(way, (use.value, *use.given))
        most = max(most, *(text.count(a) * len(b) for a in words for b in words if a is not b), 0)
    return most


def _encoded(use: Use) -> int:
    """Some codecs go through all for each character; some ways with errors make a name of one."""
    return use.whole * (LINK if {t.lower() for t in use.texts} <= {"utf-8", "utf8", "ascii"} else use.size)


def _rounded(use: Use) -> int:
    if not isinstance(use.value, int | float):  # it would be repeated 10 ** precision times first
        raise TypeError(f"a {type(use.value).__name__} cannot be rounded")
    return use.numbers * LINK


def _summed(use: Use) -> int:
    """A list, where one is given to begin with, is copied for each."""
    return use.whole * use.size if any(isinstance(v, LISTS) for v in use.given) else 0


# What each takes beside all that it is given.
COSTS: dict[str, Callable[[Use], int]] = {
    **dict.fromkeys("get items keys values startswith endswith".split(), glance),
    **dict.fromkeys(
        "count find index removeprefix removesuffix lower upper capitalize swapcase casefold string int float safe "
        "center ljust rjust zfill".split(),
        lambda use: use.numbers,
    ),
    **dict.fromkeys("trim strip lstrip rstrip rfind rindex rpartition".split(), _searched),
    **dict.fromkeys("list reverse batch slice splitlines".split(), _pieces),
    **dict.fromkeys("sort unique groupby title wordcount".split(), _apart),
    **dict.fromkeys("tojson expandtabs".split(), _inserted),
    **dict.fromkeys("format format_map".split(), _braces),
    **dict.fromkeys("encode decode".split(), _encoded),
    "split": _split,
    "rsplit": lambda use: _split(use) + _searched(use),
    "indent": lambda use: _inserted(use) + _apart(use),
    "striptags": lambda use: str(use.value).count("<") * use.whole + _apart(use),
    "translate": lambda use: use.whole * use.size,
    "join": lambda use: use.size * sum(len(v) for v in use.given if isinstance(v, SIZED)),
    "replace": _replaced,
    "round": _rounded,
    "sum": _summed,
}
# Filters: some have a method's name and are another thing, a list comes first in `join`, a format has %.
FILTER_COSTS = COSTS | {
    **dict.fromkeys(
        "length count first last default d attr abs map select reject selectattr rejectattr".split(), glance
    ),
    "join": lambda use: use.size * use.added,
    "format": lambda use: percent(str(use.value), use.whole),
}
WHOLE = frozenset("join sum".split())  # filters that cost by how many items come
ANY_NUMBER = frozenset("default d get format format_map".split())  # is a value there, and makes nothing larger
