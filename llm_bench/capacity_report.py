"""A capacity plan as terminal text, Markdown or JSON: what stands in one stands in all, JSON with all its digits."""

import json
from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any

from llm_bench import kv_cache
from llm_bench.capacity_ask import Figure, Section, Table, digits
from llm_bench.errors import BenchError
from llm_bench.printable import counted

SCHEMA = 2  # of the JSON document; counts up when a key changes its meaning
WIDTH = 100


def shown(figure: Figure) -> str:
    """A figure with its unit; bytes in GiB and in GB, or whole where they are few."""
    value, unit = figure.value, figure.unit
    if value is None:
        return "–"
    if unit == "bytes":
        return f"{value:,.0f} bytes" if value < 1_000_000 else kv_cache.size(value)
    if unit == "share":
        return f"{value:.2%}"
    number = digits(value)
    if unit in ("replicas", "requests", "sequences", "days", "tokens"):
        return counted(number, unit.removesuffix("s"))
    return f"{number}{unit}" if unit.startswith("/") else f"{number} {unit}".removesuffix(" 1").rstrip()


def _cell(value: str | float | None) -> str:
    return value if isinstance(value, str) else digits(value)


def terminal(sections: Sequence[Section], width: int = WIDTH) -> str:
    lines: list[str] = []
    for section in sections:
        lines += ["", section.title]
        names = max((len(f.name) for f in section.figures), default=0)
        for figure in section.figures:
            value = shown(figure)
            lines += _wrapped(f"  {figure.name:<{names}}  {value}" + (f"  = {figure.how}" if figure.how else ""), width)
        for table in section.tables:
            lines += ["", *_columns(table)]
        if section.tables and section.notes:
            lines.append("")
        for note in section.notes:
            lines += _wrapped(f"  {note}", width)
    return "\n".join(lines[1:]) + "\n"


def _wrapped(text: str, width: int) -> list[str]:
    return fill(text, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False).split("\n")


def _columns(table: Table) -> list[str]:
    rows = [list(table.heads), *([_cell(value) for value in row] for row in table.rows)]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(not isinstance(row[i], str) for row in table.rows) for i in range(len(wide))]
    return [
        "  " + "  ".join(f"{v:>{w}}" if r else f"{v:<{w}}" for v, w, r in zip(row, wide, right, strict=True)).rstrip()
        for row in rows
    ]


def markdown(sections: Sequence[Section]) -> str:
    lines: list[str] = []
    for section in sections:
        lines += [f"### {_md(section.title)}", ""]
        if section.figures:
            lines += ["| figure | value | from |", "|---|---:|---|"]
            lines += [f"| {_md(f.name)} | {_md(shown(f))} | {_md(f.how)} |" for f in section.figures]
            lines.append("")
        for table in section.tables:
            lines += [f"| {' | '.join(map(_md, table.heads))} |", f"|{'---|' * len(table.heads)}"]
            lines += [f"| {' | '.join(_md(_cell(value)) for value in row)} |" for row in table.rows]
            lines.append("")
        lines += [*(f"- {_md(note)}" for note in section.notes), *([""] if section.notes else [])]
    return "\n".join(lines)


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def json_text(sections: Sequence[Section]) -> str:
    return json.dumps(document(sections), allow_nan=False) + "\n"


def document(sections: Sequence[Section]) -> dict[str, Any]:
    """JSON-able: sections by key, figures by key with value, unit and arithmetic."""
    return {
        "llm_bench_capacity": SCHEMA,
        "sections": {
            section.key: {
                "title": section.title,
                "figures": {f.key: {"value": f.value, "unit": f.unit, "how": f.how} for f in section.figures},
                "tables": [
                    [dict(zip(table.heads, row, strict=True)) for row in table.rows] for table in section.tables
                ],
                "notes": list(section.notes),
            }
            for section in sections
        },
    }


FORMATS: dict[str, Callable[[Sequence[Section]], str]] = {
    "terminal": terminal,
    "md": markdown,
    "json": json_text,
}


def check_format(name: str) -> None:
    if name not in FORMATS:
        raise BenchError(f"--format {name!r}: expected one of {', '.join(FORMATS)}")


def render(sections: Sequence[Section], format: str) -> str:  # noqa: A002
    """The plan in one of FORMATS. Raises BenchError for an unknown one."""
    check_format(format)
    return FORMATS[format](sections)
