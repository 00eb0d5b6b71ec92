"""The tables of the HTML page: figures, classes, failures, bytes, slices of the window, faults."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from llm_bench import charts, metrics
from llm_bench.as_tools import Table as Printed
from llm_bench.columns import Cell
from llm_bench.html_facts import NOT_RECORDED
from llm_bench.metrics import Value
from llm_bench.recovery import Recovery
from llm_bench.recovery_words import TURNED, fault_lines, recoveries
from llm_bench.repeats import Group
from llm_bench.results import Asked, Measured, Run, Sheet
from llm_bench.series import outcome_in
from llm_bench.timeline import Slices
from llm_bench.windows import Window
from llm_bench.words import (
    INTERFERENCE_HEADS,
    SHORT,
    TOOL_HEADS,
    beside,
    first_error,
    group_lines,
    heading,
    interference_legend,
    interference_rows,
    legend,
    number,
    runs_legend,
    shown_outcomes,
    tool_remarks,
    tool_rows,
    tool_title,
)


class Td(NamedTuple):
    """A cell of a table. `sort`: what the column is sorted by, None where there is nothing to compare."""

    text: str
    sort: float | str | None = None
    small: Sequence[str] = ()
    why: str = ""  # shown when it is pointed at
    tone: str = ""  # a class of the style sheet


class Table(NamedTuple):
    caption: str
    heads: Sequence[tuple[str, str]]  # (name, unit); the first column names the row
    rows: Sequence[Sequence[Td]]
    notes: Sequence[str] = ()
    foot: int = 0  # rows at the end that sorting leaves there


class Place(NamedTuple):
    """A target at a load: one cell, or its runs together."""

    target: str
    load: str


def place_of(group: Group) -> Place:
    return Place(group.target, heading(group))


def where(group: Group) -> str:
    return " at ".join(place_of(group))


def head(m: Measured) -> Td:
    return Td(m.load_and_run, None, [m.target])


def _named(names: Sequence[str]) -> list[tuple[str, str]]:
    units = (metrics.parse(name).unit for name in names)
    return [(name, "" if unit in ("1", "share") else unit) for name, unit in zip(names, units, strict=True)]


def figures(run: Run, asked: Asked, mine: Sequence[Sheet], together: Sequence[Group]) -> Table:
    notes = legend(run, asked.names, mine, "below") + runs_legend(together, "below")
    return table_of(asked, mine, together, "Figures by target and load", notes)


def table_of(asked: Asked, mine: Sequence[Sheet], lines: Sequence[Group], caption: str, notes: Sequence[str]) -> Table:
    """A row for each of `lines`."""
    outcomes = shown_outcomes(mine)
    heads = [("target and load", ""), *((SHORT.get(o, o), "") for o in outcomes), *_named(asked.names)]
    rows = []
    for group in lines:
        counts = [_count(group.outcomes[o], "bad" if o == "failed" else "") for o in outcomes]
        small = [group.target, *([f"{group.runs} runs"] if group.runs > 1 else [])]
        rows.append([Td(group.load, None, small), *counts, *map(_figure, group.values)])
    return Table(caption, heads, rows, notes)


def classes(asked: Asked, mine: Sequence[Sheet], together: Sequence[Group]) -> list[Table]:
    """The requests of each class, a row a class and line of the figures; no table where no cell has several."""
    lines = [(group, line) for group in together for line in group_lines(group)[1:]]
    if not lines:
        return []
    outcomes = shown_outcomes(mine)
    heads = [("class", ""), *((SHORT.get(o, o), "") for o in outcomes), *_named(asked.names)]
    rows = []
    for group, line in lines:
        counts = [_count(line.outcomes[o], "bad" if o == "failed" else "") for o in outcomes]
        rows.append([Td(line.head.strip(), None, [where(group)]), *counts, *map(_figure, line.values)])
    return [Table("Figures by class of request", heads, rows), *_interference(together)]


def _interference(together: Sequence[Group]) -> list[Table]:
    """What the classes did to each other; no table where none was measured alone too."""
    rows = []
    for group in together:
        for line in interference_rows(group):
            head, alone, beside_, factor, bounds = line.cells
            unit = "" if line.unit in ("1", "share") else f" {line.unit}"
            figures = [Td(alone + unit), Td(beside_ + unit)]
            rows.append([Td(head, None, [where(group)]), *figures, Td(factor, line.factor, why=line.why), Td(bounds)])
    heads = [(head, "") for head in INTERFERENCE_HEADS]
    return [Table("Interference", heads, rows, interference_legend(together))] if rows else []


def _count(n: int, tone: str = "") -> Td:
    return Td(f"{n:,}", n, tone=tone if n else "")


def _figure(v: Value) -> Td:
    """A figure with what it rests on, as every other format has it."""
    why = "; ".join(filter(None, [v.reason, *v.labels, v.refusal and f"no interval: {v.refusal}"]))
    return Td(number(v.value, v.unit), v.value, beside(v), why)


def failures(mine: Sequence[Sheet]) -> Table | None:
    heads = [("target and load", ""), ("kind", ""), ("requests", ""), ("HTTP statuses", ""), ("first error", "")]
    rows = [
        [
            head(s.measured),
            Td(f.kind, f.kind, tone="name"),
            _count(f.requests),
            Td(", ".join(f"{status} x{n}" for status, n in f.statuses.items()) or "none", tone="name"),
            Td(first_error(f), first_error(f), tone="said"),
        ]
        for s in mine
        for f in s.failures
    ]
    notes = ["Of all requests of a cell, its warm-up and drain included."]
    return Table("Failures by kind", heads, rows, notes) if rows else None


def traffic(mine: Sequence[Sheet]) -> Table:
    heads = [("target and load", ""), ("bytes received", ""), ("received", "Mbit/s"), ("payload", "Mbit/s")]
    heads += [("payload share", ""), ("bytes sent", ""), ("sent", "Mbit/s")]
    rows = []
    for s in mine:
        cell, window = s.measured.cell, s.measured.window
        received = int(cell["bytes_in"].sum())
        payload, share = metrics.compute_all(["payload_mbit_per_second", "payload_share"], cell, window)
        ended = (cell["end_ns"] >= window.start_ns) & (cell["end_ns"] < window.end_ns) & outcome_in(cell, "ok")
        mbit = float(cell["bytes_in"][ended].sum()) * 8e-6 / window.seconds
        rows.append([head(s.measured), _count(received), Td(number(mbit, "Mbit/s"), mbit), _figure(payload)])
        rows[-1] += [_figure(share), *_sent(cell, window)]
    notes = [
        "Bytes received are those of the whole cell, heads and framing included; rates and shares are of ok requests "
        "that ended in the window. Payload is the text of tokens. Bytes sent are heads and bodies, the last attempt's; "
        "their rate is of all that were sent in the window."
    ]
    return Table("Bytes on the wire", heads, rows, notes)


def _sent(cell: Cell, window: Window) -> list[Td]:
    sent, known = cell["bytes_out"], cell["bytes_out"] >= 0
    if not known.any():
        return [Td(NOT_RECORDED), Td(NOT_RECORDED)]  # a run of an earlier version
    within = known & (cell["sent_ns"] >= window.start_ns) & (cell["sent_ns"] < window.end_ns)
    mbit = float(sent[within].sum()) * 8e-6 / window.seconds
    return [_count(int(sent[known].sum())), Td(number(mbit, "Mbit/s"), mbit)]


def by_slice(sheet: Sheet, parts: Slices) -> Table:
    m = sheet.measured
    zero = int(m.cell["due_ns"][0])
    edges = ((parts.edges_ns - zero) / 1e9).tolist()
    heads = [("seconds", ""), ("arrivals", "1/s"), ("failed", ""), ("in_flight", ""), ("tokens_per_second", "tokens/s")]
    heads += [("ttft_p95", "ms"), ("tpot_p95", "ms")]
    tokens = [None] * len(parts.due) if parts.tokens is None else parts.tokens.tolist()
    rows = []
    for i, due in enumerate(parts.due.tolist()):
        mark = ["the busiest"] if i == parts.busiest else []
        row = [Td(f"{edges[i]:.3f} to {edges[i + 1]:.3f}", edges[i], mark), _bare(due / parts.seconds, "1/s")]
        row += [
            _count(int(parts.failed[i]), "bad"),
            _bare(float(parts.in_flight[i]), "1"),
            _bare(tokens[i], "tokens/s"),
        ]
        rows.append([*row, _bare(float(parts.ttft_p95[i]), "ms"), _bare(float(parts.tpot_p95[i]), "ms")])
    names = ["arrival_rate", "in_flight", "tokens_per_second", "ttft_p95", "tpot_p95"]
    rate, *others = (_bare(v.value, v.unit) for v in (charts.value_of(sheet, name) for name in names))
    rows.append([Td("whole window"), rate, _count(int(parts.failed.sum()), "bad"), *others])
    notes = [
        f"Ten equal slices of the window, {number(parts.seconds, 's')} s each: requests by due time, tokens by event "
        "time. The busiest is the one with the most requests due. A slice's p95 is of few requests: read its "
        "direction, not its digits."
    ]
    return Table("By slice of the window", heads, rows, notes, foot=1)


def _bare(value: float | None, unit: str) -> Td:
    """A figure without what it rests on; nan is not applicable."""
    value = None if value is None or math.isnan(value) else value
    return Td(number(value, unit), value)


def faults(sheet: Sheet) -> list[Table]:
    """What each fault did, and how the target turned requests away while it lasted."""
    found = recoveries(sheet)
    if not found:
        return []
    heads = [("fault", ""), ("verdict", ""), ("at", "s"), ("over after", "s"), ("first error after", "s")]
    heads += [("failed", ""), ("never answered", ""), (f"worst {found[0].name}_p95", "ms"), ("before", "ms")]
    heads += [("in system", "most"), ("before", "most"), ("drained after", "s"), ("attempts a request", "")]
    rows = [[Td(r.done.what, small=[r.done.result]), Td(r.verdict, r.verdict, why=r.why), *_effects(r)] for r in found]
    turned = [[Td(r.done.what), *(_count(getattr(r.queue, name)) for name in TURNED)] for r in found if r.queue]
    for row, r in zip(turned, (r for r in found if r.queue), strict=True):
        row += [_count(r.queue.again), _count(r.queue.saved), Td(r.queue.retry_after)] if r.queue else []
    names = [("fault", ""), *((said, "") for said in TURNED.values()), ("tried again", ""), ("ok at last", "")]
    notes = [line for line in fault_lines(sheet) if line.startswith("faults: ")]
    tables = [Table("Faults", heads, rows, notes)]
    return tables + ([Table("Turned away during faults", [*names, ("Retry-After", "")], turned)] if turned else [])


def _effects(r: Recovery) -> list[Td]:
    before = r.before
    known = [_bare(r.at_s, "s"), _bare(r.after_s, "s"), _bare(r.first_error_s, "s"), _count(r.failed, "bad")]
    known += [_count(r.lost, "bad"), _bare(r.worst_ms, "ms"), _bare(before and before.ttft_p95_ms, "ms")]
    known += [_count(r.backlog), _bare(before and before.in_system, "1"), _bare(r.drained_s, "s")]
    return [*known, _bare(r.amplification, "1")]


def as_tool(printed: Printed) -> Table:
    rows = [
        [Td(line[0]), Td(line[1]), Td(line[2], tone="name"), Td(line[3]), Td(line[4], tone="said")]
        for line in tool_rows(printed)
    ]
    return Table(tool_title(printed), [(head, "") for head in TOOL_HEADS], rows, tool_remarks(printed))
