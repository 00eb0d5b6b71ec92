"""`trace inspect` in words: the figures of a trace and the reasons to distrust it, as terminal text, Markdown, JSON."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llm_bench.doctor import Finding, figure
from llm_bench.request import Trace
from llm_bench.sheet import Sheet
from llm_bench.workload import WINDOW_S, Quantiles, Sharing, Workload

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = 1  # of the JSON document; counts up when a key changes its meaning
_LENGTHS = ("n", "min", "p50", "p95", "p99", "max", "mean")


def figures(w: Workload) -> Iterator[tuple[str, str]]:
    """(name, value in words) of each figure that is one number or a few; "–" with the reason where it is undefined."""

    def said(name: str, value: float | None, unit: str = "") -> str:
        return f"– ({w.reasons[name]})" if value is None else figure(value) + unit

    a = w.arrivals
    yield "requests", f"{w.n:,}" + (f", {a.n:,} of them with a time" if a.n != w.n else "")
    yield "span", f"{figure(a.span_s)} s" if a.n else "– (no row has a time)"
    yield "rate", said("rate", a.rate, "/s")
    if a.rates:
        yield "rate by tenth of the span", " ".join(f"{x:.3g}" for x in a.rates) + " /s"
    yield "inter-arrival CV", said("cv", a.cv) + _apart(a.cv_spread)
    window = f"CV in {WINDOW_S} s windows, p10/p50/p90"
    yield window, _three(a.cv_window, w.reasons.get("cv_window", "")) + _apart(a.cv_window_spread)
    values = [f"{v:.3g}" if v is not None else "–" for v in a.dispersion.values()]
    yield f"dispersion of counts in {'/'.join(a.dispersion)} s", " / ".join(values)
    rho = said("spearman", None) if w.spearman is None else f"{w.spearman:.2f}"
    yield "correlation of lengths (Spearman)", rho
    if w.top_client_share is not None:
        yield "clients", f"{w.clients:,}, the top one sends {w.top_client_share:.1%}"
    for name, counts in (("classes", w.classes), ("models", w.models)):
        if counts:
            yield name, _top(counts)
    if w.sessions:
        yield "sessions", f"{w.sessions.sessions:,}, {w.sessions.several:,} of them of several turns"
    if w.sharing:
        yield "prefix hits of an endless cache", _bound(w.sharing)


def _bound(s: Sharing) -> str:
    return (
        f"{s.block_hits:.1%} of {s.blocks:,} blocks of {s.block_size}; {s.token_hits:.1%} of prompt tokens, "
        f"{s.token_hits_full:.1%} in full blocks alone"
    )


def _apart(value: float | list[float] | None) -> str:
    if value is None:
        return ""
    return f"; inside ticks at random {_three(value, '') if isinstance(value, list) else figure(value)}"


def _three(values: list[float] | None, reason: str) -> str:
    return " / ".join(f"{v:.2f}" for v in values) if values else f"– ({reason})"


def _top(counts: dict[str, int]) -> str:
    first = [f"{name} {count:,}" for name, count in list(counts.items())[:8]]
    return ", ".join(first) + (f" and {len(counts) - 8} more" if len(counts) > 8 else "")


def tables(w: Workload) -> Iterator[tuple[list[str], list[list[str]]]]:
    """(heads, rows) of what stands better in a table: quantiles, hits by cache size."""
    several = {
        "prompt tokens": w.tokens_in,
        "answer tokens": w.tokens_out,
        "turns a session": w.sessions and w.sessions.turns,
        "think time, s": w.sessions and w.sessions.think_s,
    }
    rows = [[name, *_quantiles(q)] for name, q in several.items() if q]
    if rows:
        yield ["", *_LENGTHS], rows
    if w.sharing and w.sharing.lru:
        heads = ["LRU cache, blocks", *(f"{blocks:,}" for blocks, _ in w.sharing.lru), "endless"]
        yield (
            heads,
            [["of all blocks hit", *(f"{share:.1%}" for _, share in w.sharing.lru), f"{w.sharing.block_hits:.1%}"]],
        )


def _quantiles(q: Quantiles) -> list[str]:
    return [f"{q.n:,}", *(figure(getattr(q, name)) for name in _LENGTHS[1:])]


def _title(trace: Trace | Sheet) -> str:
    return f"{trace.path}  ·  {trace.format}"


def text(
    trace: Trace | Sheet, workload: Workload, findings: Sequence[Finding], width: int = 100, colour: bool = False
) -> str:
    """What `trace inspect` prints on a terminal of so many columns; no line of it is wider, save a table's."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, width=width, highlight=False)
    unbound = Console(file=out, force_terminal=colour, width=10_000, highlight=False)  # a table is broken, never cut
    console.print(Text(_title(trace), "bold"))
    for note in trace.notes:
        console.print(Padding(Text(note), (0, 0, 0, 2)))
    console.print()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(max_width=width // 2)
    grid.add_column(overflow="fold")  # a figure is broken, never cut
    for name, value in figures(workload):
        grid.add_row(Text(name, "dim"), Text(value))
    console.print(grid)
    for heads, rows in tables(workload):
        unbound.print(_table(heads, rows))
    console.print()
    for f in findings:
        mark = Text("doubt: ", "bold yellow") if f.doubt else Text("note: ", "dim")
        console.print(Text.assemble(mark, f"{f.kind}: {f.text}"))
    if not any(f.doubt for f in findings):
        console.print(Text("no doubts", "dim"))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _table(heads: list[str], rows: list[list[str]]) -> "Table":
    from rich.table import Table

    table = Table()
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(trace: Trace | Sheet, workload: Workload, findings: Sequence[Finding]) -> str:
    lines = [f"## {_md(_title(trace))}", "", *(f"- {_md(note)}" for note in trace.notes), ""]
    lines += ["| figure | value |", "|---|---|"]
    lines += [f"| {_md(name)} | {_md(value)} |" for name, value in figures(workload)]
    for heads, rows in tables(workload):
        lines += ["", f"| {' | '.join(map(_md, heads))} |", f"|---|{'---:|' * (len(heads) - 1)}"]
        lines += [f"| {' | '.join(map(_md, row))} |" for row in rows]
    lines.append("")
    lines += [f"- **{'doubt' if f.doubt else 'note'}: {f.kind}**: {_md(f.text)}" for f in findings]
    if not any(f.doubt for f in findings):
        lines.append("- no doubts")
    return "\n".join(lines) + "\n"


def _md(value: str) -> str:
    return value.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def document(trace: Trace | Sheet, workload: Workload, findings: Sequence[Finding]) -> dict[str, Any]:
    """The same as one JSON-able object: strict JSON, no NaN; what is undefined is null, its reason under `reasons`."""
    return {
        "schema": SCHEMA,
        "path": trace.path,
        "format": trace.format,
        "notes": list(trace.notes),
        "skipped": dict(trace.skipped),
        "facts": dict(trace.facts),
        "workload": asdict(workload),
        "findings": [f._asdict() for f in findings],
    }
