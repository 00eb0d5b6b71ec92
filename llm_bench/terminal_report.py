"""A run as text for a terminal: tables as wide as it is, remarks and doubts below."""

import io
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llm_bench import metrics, printable
from llm_bench.as_tools import Table
from llm_bench.doubts import Doubt
from llm_bench.metrics import Value
from llm_bench.repeats import Group, groups
from llm_bench.results import Asked, Run, sheets
from llm_bench.words import (
    SHORT,
    TOOL_HEADS,
    agreements,
    at_every_load,
    by_target,
    columns,
    group_lines,
    heading,
    legend,
    not_the_same_work,
    number,
    runs_legend,
    said_of,
    shown_outcomes,
    title,
    tool_remarks,
    tool_rows,
    tool_title,
    verdicts,
    warnings,
)

WIDTH = 100  # columns where the terminal does not say
TOOL_WIDTH = 80  # least of a table of another tool's figures: its words are broken into lines, its numbers never


def text(run: Run, asked: Asked) -> str:
    """A run for a terminal: as wide as it is, coloured where it is one. Nothing but our own colours acts in it."""
    from rich.console import Console
    from rich.text import Text

    out, colour = io.StringIO(), sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    console = Console(file=out, force_terminal=colour, width=width, highlight=False)
    # A table is as wide as its numbers: one that no terminal so narrow can hold is broken by the terminal, not cut.
    unbound = Console(file=out, force_terminal=colour, width=10_000, highlight=False)
    roomy = Console(file=out, force_terminal=colour, width=max(width, TOOL_WIDTH), highlight=False)
    console.print(Text(title(run), "bold"))
    if line := not_the_same_work(run):
        console.print(Text(line, "bold yellow"))
    for line in agreements(run):
        console.print(Text(line))
    for target, mine in by_target(sheets(run, asked)).items():
        together = groups(mine, apart=asked.runs)
        console.print(Text(target, "bold"))
        for line in warnings(mine):
            console.print(Text(line, "bold yellow"))
        for table in _tables(asked.names, together, shown_outcomes(mine), width, columns(asked.names, together)):
            unbound.print(table)
        for line in legend(run, asked.names, mine, "below") + runs_legend(together, "below"):
            console.print(Text(line, "dim"))
        everywhere = at_every_load(together)
        for line in everywhere:
            console.print(Text(f"at every load: {line}"))
        for group in together:
            _print_group(group, everywhere, console, roomy)
        console.print()
    for doubt in run.own_doubts:
        console.print(_doubt_text(doubt))
    shown = printable.lines(out.getvalue(), colour=colour)
    return "\n".join(line.rstrip() for line in shown.split("\n"))


def _print_group(group: Group, everywhere: Sequence[str], console: Any, roomy: Any) -> None:
    """Remarks, verdicts and doubts of one load. `everywhere`: said above already; `roomy`: for other tools' tables."""
    from rich.padding import Padding
    from rich.text import Text

    def indented(shown: Any) -> Any:
        return Padding(shown, (0, 0, 0, 2))

    console.print(Text(f"\n{heading(group)}", "bold"))
    for line in said_of(group):
        if line not in everywhere:
            console.print(indented(Text(line)))
    for verdict in verdicts(group):
        console.print(indented(_verdict_text(*verdict)))
    for doubt in group.doubts():
        console.print(indented(_doubt_text(doubt)))
    if not group.doubts():
        console.print(Text("  no doubts", "dim"))
    for tool in group.sheets[0].as_tools if group.runs == 1 else ():
        console.print(Padding(Text(tool_title(tool), "bold"), (1, 0, 0, 2)))
        roomy.print(indented(_tool_table(tool)))
        for line in tool_remarks(tool):
            console.print(indented(Text(line, "dim")))


def _tool_table(tool: Table) -> Any:
    from rich import box, table
    from rich.text import Text

    made = table.Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for head in TOOL_HEADS:
        value = "value" in head
        made.add_column(head, justify="right" if value else "left", no_wrap=value, overflow="fold")
    for row in tool_rows(tool):
        made.add_row(*map(Text, row))
    return made


def _doubt_text(doubt: Doubt) -> Any:
    from rich.text import Text

    return Text.assemble(("doubt: ", "bold yellow"), f"{doubt.kind}: {doubt.sentence}")


VERDICT_STYLES = {"MET": "bold green", "MISSED": "bold red", "UNDECIDED": "bold yellow"}


def _verdict_text(limit: str, verdict: str, why: str) -> Any:
    from rich.text import Text

    return Text.assemble(f"SLO {limit}: ", (verdict, VERDICT_STYLES[verdict]), f": {why}")


def _tables(
    names: Sequence[str], mine: Sequence[Group], outcomes: Sequence[str], width: int, places: Sequence[int]
) -> Iterator[Any]:
    """As few tables as `width` allows, of about as many metrics each, every one with its load and its counts.

    `places`: of the metrics among `names` that are shown.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    lines = [line for group in mine for line in group_lines(group)]
    fixed = [[Text("load"), *(Text(line.head) for line in lines)]]
    for outcome in outcomes:
        style = "red" if outcome == "failed" else ""
        counts = (Text(str(line.outcomes[outcome]), style if line.outcomes[outcome] else "") for line in lines)
        fixed.append([Text(SHORT.get(outcome, outcome)), *counts])
    figures = [[_heading(names[at]), *(_figure_text(line.values[at]) for line in lines)] for at in places]

    def wide(columns: Iterable[Sequence[Text]]) -> int:
        """Each column has a space on either side and a line before it; the last has a line behind it too."""
        return 1 + sum(3 + max(cell_len(line) for text in c for line in text.plain.split("\n")) for c in columns)

    for tables in range(1, len(figures) + 1):
        each = -(-len(figures) // tables)
        parts = [figures[at : at + each] for at in range(0, len(figures), each)]
        if all(wide([*fixed, *part]) <= width for part in parts):
            break
    for part in parts:
        table = Table()
        for number_, column in enumerate([*fixed, *part]):
            table.add_column(column[0], justify="right" if number_ else "left", no_wrap=True)
        for row in zip(*(column[1:] for column in [*fixed, *part]), strict=True):
            table.add_row(*row)
        yield table


def _heading(name: str) -> Any:
    """A metric's name over its column: `ttft`, `p95`, `ms` on lines of their own; long names break at underscores."""
    from rich.text import Text

    metric = metrics.parse(name)
    words = metric.of.split("_")
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) < 12:
            lines[-1] += f"_{word}"
        else:
            lines.append(f"_{word}")
    if metric.reducer:
        lines.append(metric.reducer)
    return Text.assemble("\n".join(lines), ("" if metric.unit in ("1", "share") else f"\n{metric.unit}", "dim"))


def _figure_text(v: Value) -> Any:
    from rich.text import Text

    small = [f"{v.n}, {v.ess:.0f}"] if v.ess is not None else []
    if v.interval:
        small.append(f"{number(v.interval.low, v.unit)}–{number(v.interval.high, v.unit)}")
    if v.all_requests is not None and v.all_requests != v.value:
        small.append(f"all: {number(v.all_requests, v.unit)}")
    return Text.assemble(number(v.value, v.unit), *((f"\n{line}", "dim") for line in small))
