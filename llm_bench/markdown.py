"""A run in Markdown: a table a target, remarks and doubts below. Foreign text in it is text alone (grid.escaped)."""

import re

from llm_bench import grid, metrics, printable
from llm_bench.doubts import Doubt
from llm_bench.metrics import Value
from llm_bench.repeats import groups
from llm_bench.results import Asked, Run, sheets
from llm_bench.words import (
    SHORT,
    TOOL_HEADS,
    agreements,
    beside,
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


def text(run: Run, asked: Asked) -> str:
    """A run in Markdown."""
    names = asked.names
    lines = [f"## {_md(title(run))}", ""]
    lines += [f"{_md(line)}\n" for line in agreements(run)]
    if differs := not_the_same_work(run):
        lines += [f"**{_md(differs)}**", ""]
    units = [metrics.parse(name).unit for name in names]
    heads = [f"{n} ({u})" if u not in ("1", "share") else n for n, u in zip(names, units, strict=True)]
    for target, mine in by_target(sheets(run, asked)).items():
        together = groups(mine, apart=asked.runs)
        outcomes, places = shown_outcomes(mine), columns(names, together)
        over = ["load", *(SHORT.get(o, o) for o in outcomes), *(heads[at] for at in places)]
        lines += [f"### {_md(target)}", "", *(f"**{_md(line)}**\n" for line in warnings(mine))]
        lines += [f"| {' | '.join(over)} |", f"|---|{'---:|' * (len(over) - 1)}"]
        for line in (line for group in together for line in group_lines(group)):
            counts = [str(line.outcomes[o]) for o in outcomes]
            figures = [number(v.value, v.unit) + _small(v) for v in (line.values[at] for at in places)]
            lines.append(f"| {' | '.join([_md(line.head), *counts, *figures])} |")
        lines += [
            "",
            *(f"{_md(line)}  " for line in legend(run, names, mine, "beside") + runs_legend(together, "beside")),
        ]
        for group in together:
            lines += ["", f"**{_md(heading(group))}**", ""]
            lines += [f"- {_md(line)}" for line in said_of(group)]
            lines += [f"- **SLO {_md(': '.join(verdict))}**" for verdict in verdicts(group)]
            lines += [_md_doubt(d) for d in group.doubts()] or ["- no doubts"]
            for tool in group.sheets[0].as_tools if group.runs == 1 else ():
                lines += ["", f"*{_md(tool_title(tool))}*", ""]
                lines += [f"| {' | '.join(TOOL_HEADS)} |", "|---|---:|---|---:|---|"]
                lines += [f"| {' | '.join(map(_md, row))} |" for row in tool_rows(tool)]
                lines += ["", *(f"- {_md(line)}" for line in tool_remarks(tool))]
        lines.append("")
    lines += [_md_doubt(d) for d in run.own_doubts]
    return printable.lines("\n".join(lines) + "\n")


def _md_doubt(doubt: Doubt) -> str:
    return f"- **doubt: {_md(doubt.kind)}**: {_md(doubt.sentence)}"


_WITHIN_A_NAME = re.compile(r"(?<=[^\W_])\\_(?=[^\W_])")


def _md(text: str) -> str:
    """Escaped, but for an underscore within a name, which marks nothing there (CommonMark 6.2): `ttft_p95`."""
    return _WITHIN_A_NAME.sub("_", grid.escaped(text))


def _small(v: Value) -> str:
    return f" ({', '.join(small)})" if (small := beside(v)) else ""
