"""Small tables as text for a terminal and in Markdown, and foreign text that cannot break out of the latter."""

from collections.abc import Sequence


def terminal(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Columns as wide as what is in them, those of `left` flush left. Each line ends with a newline."""
    from rich.cells import cell_len

    wide = [max(cell_len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        blank = [" " * (width - cell_len(text)) for text, width in zip(row, wide, strict=True)]
        placed = [t + b if i in left else b + t for i, (t, b) in enumerate(zip(row, blank, strict=True))]
        return f"  {'  '.join(placed)}".rstrip() + "\n"

    return "".join([line(headings), line(["─" * width for width in wide]), *map(line, rows)])


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    marks = ["---" if i in left else "---:" for i in range(len(headings))]
    body = [f"| {' | '.join(map(escaped, row))} |" for row in [headings, *rows]]
    return "\n".join([body[0], f"| {' | '.join(marks)} |", *body[1:]]) + "\n"


_SPECIAL = {c: f"\\{c}" for c in "\\`*_[]|~#"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@\u200b"}
_SPECIAL |= dict.fromkeys("\r\n\t", " ")


def escaped(text: str) -> str:
    """Text of a server, a trace or a name, for Markdown: no tag, link or table cell, and nobody is mentioned by it."""
    return "".join(_SPECIAL.get(c, c if c.isprintable() else "\ufffd") for c in text)
