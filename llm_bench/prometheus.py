"""Prometheus text (exposition format 0.0.4, and what OpenMetrics adds to a line) as samples: strict, in linear time.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import re
from collections.abc import Container, Mapping
from typing import NamedTuple

LONGEST_LINE = 65_536  # characters; vLLM's longest has 1,200
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
# Each alternative begins with another character, so that no text makes the match go back.
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*)"[ \t]*')
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[iI]nf|Infinity|[nN]a[nN])")
_ESCAPE = re.compile(r'\\([\\"n])')

Labels = tuple[tuple[str, str], ...]


class Sample(NamedTuple):
    name: str  # of the sample: a histogram's end in _bucket, _sum, _count
    labels: Labels  # in the order of their names
    value: float


def parse(text: str, wanted: Container[str] | None = None) -> list[Sample]:
    """The samples of a page, in its order; with `wanted`, only those of these names: other lines are passed over.

    Raises ValueError with the line's number for a line that is none, and for one sample given twice.
    """
    found: list[Sample] = []
    seen: set[tuple[str, Labels]] = set()
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip(" \t\r")
        if not line or line[0] == "#":
            continue
        match = _NAME.match(line)
        if match is None:
            raise ValueError(f"line {number}: {line[:60]!r}, expected the name of a metric")
        if wanted is not None and match[0] not in wanted:
            continue
        try:
            sample = _sample(match[0], line, match.end())
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from None
        if sample[:2] in seen:
            raise ValueError(f"line {number}: {match[0]} with the same labels a second time")
        seen.add(sample[:2])
        found.append(sample)
    return found


def labels(text: str) -> Labels:
    """`a="b",c="d"`, as it stands between braces. Raises ValueError for anything else."""
    found, end = _labels(f"{{{text}}}", 0)
    if end != len(text) + 2:
        raise ValueError(f'{text[:60]!r}, expected labels such as a="b"')
    return found


def written(name: str, found: Labels) -> str:
    """A sample's name and labels as a page has them."""
    if not found:
        return name
    escaped = {"\\": r"\\", '"': r"\"", "\n": r"\n"}
    inside = ",".join(f'{key}="{"".join(escaped.get(c, c) for c in value)}"' for key, value in found)
    return f"{name}{{{inside}}}"


def split(key: str) -> tuple[str, Mapping[str, str]]:
    """What `written` made, in its parts. Raises ValueError for anything else."""
    name, brace, rest = key.partition("{")
    if not _NAME.fullmatch(name) or (brace and not rest.endswith("}")):
        raise ValueError(f"{key[:60]!r}, expected a name, and labels in braces")
    return name, dict(labels(rest[:-1])) if brace else {}


def _sample(name: str, line: str, at: int) -> Sample:
    if len(line) > LONGEST_LINE:
        raise ValueError(f"{name}: a line of {len(line)} characters, expected at most {LONGEST_LINE}")
    found: Labels = ()
    rest = line[at:].lstrip(" \t")
    if rest.startswith("{"):
        found, end = _labels(rest, 0)
        rest = rest[end:]
    elif rest and at < len(line) and line[at] not in " \t":
        raise ValueError(f"{line[: at + 1]!r}, expected a blank or {{ after the name")
    value, *more = _fields(rest)
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"{name}: value {value[:40]!r}, expected a number")
    if more and not _NUMBER.fullmatch(more[0]):
        raise ValueError(f"{name}: {more[0][:40]!r} after the value, expected a time or nothing")
    if len(more) > 1:
        raise ValueError(f"{name}: {more[1][:40]!r} after the time, expected nothing")
    return Sample(name, found, float(value))


def _fields(rest: str) -> list[str]:
    """Value and time; what OpenMetrics puts behind a `#` (an exemplar) is none of ours."""
    return rest.partition(" #")[0].split() or [""]


def _labels(text: str, at: int) -> tuple[Labels, int]:
    """The labels in braces that begin at `at`, and where they end."""
    found: dict[str, str] = {}
    end = at + 1
    while match := _LABEL.match(text, end):
        if match[1] in found:
            raise ValueError(f"label {match[1]} twice in {text[at : at + 60]!r}")
        found[match[1]] = _ESCAPE.sub(lambda m: "\n" if m[1] == "n" else m[1], match[2])
        end = match.end()
        if not text.startswith(",", end):
            break
        end += 1  # a comma after the last label is allowed
    while text.startswith((" ", "\t"), end):
        end += 1
    if not text.startswith("}", end):
        raise ValueError(f'{text[at : at + 60]!r}, expected labels such as {{a="b"}}')
    return tuple(sorted(found.items())), end + 1
