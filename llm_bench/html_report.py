"""Runs as one HTML page that needs nothing else: what is said is the other formats', the pictures are `charts`'."""

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from llm_bench import charts, metrics
from llm_bench.as_tools import Table as Printed
from llm_bench.charts import Figure
from llm_bench.columns import Cell
from llm_bench.definitions import Definition, definitions
from llm_bench.metrics import Value
from llm_bench.outcomes import Failure
from llm_bench.printable import clean, lines
from llm_bench.recovery import Recovery
from llm_bench.recovery_words import TURNED, fault_lines, recoveries
from llm_bench.repeats import Group, groups
from llm_bench.results import Asked, Measured, Run, Sheet, sheets
from llm_bench.series import outcome_in
from llm_bench.timeline import Slices, slices, timeline
from llm_bench.windows import Window
from llm_bench.words import (
    INTERFERENCE_HEADS,
    SHORT,
    TOOL_HEADS,
    beside,
    by_target,
    first_error,
    group_lines,
    heading,
    interference_legend,
    interference_rows,
    legend,
    name_of,
    number,
    or_default,
    remarks,
    runs_legend,
    said_of,
    shown_outcomes,
    title,
    tool_remarks,
    tool_rows,
    tool_title,
    verdict_line,
    verdicts,
    warnings,
)

if TYPE_CHECKING:
    from jinja2 import Template

# In pictures and tables of every page.
DRAWN = (
    *("ttft_p95", "tpot_p95", "e2e_p95", "in_flight", "arrival_rate", "tokens_per_second"),
    *("payload_mbit_per_second", "payload_share"),
)
OPEN_CELLS = 4  # above it the cells' own sections are folded: a reader chooses
NOT_RECORDED = "not recorded"
NOT_ALIKE = "targets differ"  # the kind of doubt under which targets are not to be compared: said before all else
DATA = ("report.html.j2", "report.css", "report.js")


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


class Said(NamedTuple):
    """A line of the verdict: what it is about, and the evidence in each place where it holds."""

    mark: str  # MET, MISSED, UNDECIDED, failed, missing, doubt
    what: str
    found: Sequence[tuple[str, str]]  # (where, why)


class CellSection(NamedTuple):
    anchor: str
    target: str
    load: str
    remarks: Sequence[str]
    over_time: Sequence[Figure]
    single: Sequence[Figure]
    tables: Sequence[Table]


class Section(NamedTuple):
    """All that the page holds of one run."""

    anchor: str
    title: str
    lead: Sequence[str]
    summary: str
    held: Sequence[Said]
    broke: Sequence[Said]
    open: Sequence[Said]
    unjudged: bool  # no limits were asked for
    warnings: Sequence[str]
    tables: Sequence[Table]
    runs_notes: Sequence[str]  # on the runs of each cell that was repeated
    each_run: Sequence[Table]  # and every run of them alone
    curves: Sequence[Figure]
    distributions: Sequence[tuple[str, Sequence[Figure]]]
    cells: Sequence[CellSection]
    cells_open: bool
    errors: Table | None
    traffic: Table
    settings: Table
    targets: Table
    environment: Table
    definitions: Sequence[Definition]


def page(runs: Sequence[Run], asked: Asked) -> str:
    """The runs as one self-contained HTML document.

    Every text that a server, a trace or a user wrote is escaped by the template, or by `svg`. A policy in the page
    forbids every script but its own, and every request to anywhere.
    """
    found = [_section(run, or_default(asked, run), f"r{i}") for i, run in enumerate(runs)]
    template, css, script = _template()
    hashed = {"style": _policy(css), "script": _policy(script)}
    return lines(template.render(runs=found, css=css, script=script, hashed=hashed))


def _template() -> tuple["Template", str, str]:
    from jinja2 import Environment, StrictUndefined

    page_, css, script = ((resources.files("llm_bench") / "data" / name).read_text("utf-8") for name in DATA)
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(page_), css, script


def _policy(text: str) -> str:
    """How a content security policy names an inline style or script: by the hash of what stands between its tags."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(run: Run, asked: Asked, anchor: str) -> Section:
    mine = sheets(run, asked)
    together = groups(mine, apart=asked.runs)
    alone = [one for group in together if group.runs > 1 for one in groups(group.sheets, apart=True)]
    targets = by_target(mine)
    facts = run.facts or (run.cells[0].cell.header if run.cells else {})
    return Section(
        anchor=anchor,
        title=f"run {name_of(run)}",
        lead=[part.strip() for part in title(run).split("  ·  ")[1:]] + _began(facts),
        summary=_summary(run, together),
        held=_limits(together, "MET"),
        broke=[*_limits(together, "MISSED"), *_failed(together), *_missing(run)],
        open=[*_limits(together, "UNDECIDED"), *_doubtful(together)],
        unjudged=not asked.slo.limits,
        warnings=[f"{target}: {line}" for target, of in targets.items() for line in warnings(of)],
        tables=[_figures(run, asked, mine, together), *_classes(asked, mine, together)],
        runs_notes=[f"{_where(group)}: {line}" for group in together if group.runs > 1 for line in said_of(group)],
        each_run=[_table_of(asked, mine, alone, "Each run alone", ())] if alone else [],
        curves=charts.curves(targets, asked.slo),
        distributions=[(target, found) for target, of in targets.items() if (found := charts.ecdfs(of, asked.slo))],
        cells=[_cell(sheet, f"{anchor}-c{i}") for i, sheet in enumerate(mine)],
        cells_open=len(mine) <= OPEN_CELLS,
        errors=_errors(mine),
        traffic=_traffic(mine),
        settings=Table("Settings", [("setting", ""), ("value", "")], _rows(_settings(facts))),
        targets=Table("Targets", [("what", ""), ("found", "")], _rows(_targets(run, facts))),
        environment=Table("Environment and trace", [("what", ""), ("found", "")], _rows(_environment(run, facts))),
        definitions=list(definitions([*asked.names, *DRAWN])),
    )


# ---- the verdict


def _place(group: Group) -> Place:
    return Place(group.target, heading(group))


def _where(group: Group) -> str:
    return " at ".join(_place(group))


def _limits(mine: Iterable[Group], verdict: str) -> list[Said]:
    found = ((group, *line) for group in mine for line in verdicts(group))
    return _said_once((verdict, limit, _place(group), why) for group, limit, said, why in found if said == verdict)


def _failed(mine: Iterable[Group]) -> list[Said]:
    return _said_once(("failed", f.kind, _place(group), _failure(group, f)) for group in mine for f in group.failures())


def _failure(group: Group, f: Failure) -> str:
    requests = sum(sheet.measured.cell.n for sheet in group.sheets)
    return f"{f.text}, of {requests:,} requests; first: {first_error(f)}"


def _missing(run: Run) -> list[Said]:
    """Each by itself: whoever looks for a cell finds its name and its reason together."""
    found = [(f"{m.target} at {m.load}", m.why) for m in run.missing]
    return [Said("missing", "no figures", found)] if found else []


def _doubtful(mine: Iterable[Group]) -> list[Said]:
    return _said_once(("doubt", d.kind, _place(group), d.sentence) for group in mine for d in group.doubts())


def _said_once(lines: Iterable[tuple[str, str, Place, str]]) -> list[Said]:
    """(mark, what, where, why) with what is said of several places under one head, and the same of several once."""
    found: dict[tuple[str, str], dict[str, list[Place]]] = {}
    for mark, what, where, why in lines:
        found.setdefault((mark, what), {}).setdefault(why, []).append(where)
    return [Said(*head, [(_places(where), why) for why, where in of.items()]) for head, of in found.items()]


def _places(where: Iterable[Place]) -> str:
    """`a at c=1, c=2; b at c=1`: each target, and each of its loads, once."""
    loads: dict[str, list[str]] = {}
    for place in dict.fromkeys(where):
        loads.setdefault(place.target, []).append(place.load)
    return "; ".join(f"{target} at {', '.join(of)}" for target, of in loads.items())


def _summary(run: Run, mine: Sequence[Group]) -> str:
    """The verdict in a line, of counts alone."""
    verdicts_ = Counter(verdict for group in mine for _, verdict, _ in verdicts(group))
    judged = f"Of {verdicts_.total()} limits (each at each load) {verdicts_['MET']} met, {verdicts_['MISSED']} missed, "
    judged += f"{verdicts_['UNDECIDED']} undecided. "
    failed, due = (sum(n) for n in zip(*((g.outcomes["failed"], sum(g.outcomes.values())) for g in mine), strict=True))
    of_sheets = [sheet for group in mine for sheet in group.sheets]
    kinds = {d.kind for sheet in of_sheets for d in sheet.doubts}
    doubted = sum(bool(sheet.doubts) for sheet in of_sheets)
    doubts = (
        f"{_many(len(kinds), 'kind')} of doubt in {doubted} of {_many(len(of_sheets), 'cell')}"
        if kinds
        else "No doubts"
    )
    lost = f" {_many(len(run.missing), 'cell')} missing." if run.missing else ""
    apart = f"The targets did not do the same work ({NOT_ALIKE}). " if NOT_ALIKE in kinds else ""
    return f"{apart}{judged if verdicts_ else ''}{failed:,} of {due:,} requests of the windows failed. {doubts}.{lost}"


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


# ---- tables


def _head(m: Measured) -> Td:
    return Td(m.load_and_run, None, [m.target])


def _named(names: Sequence[str]) -> list[tuple[str, str]]:
    units = (metrics.parse(name).unit for name in names)
    return [(name, "" if unit in ("1", "share") else unit) for name, unit in zip(names, units, strict=True)]


def _figures(run: Run, asked: Asked, mine: Sequence[Sheet], together: Sequence[Group]) -> Table:
    notes = legend(run, asked.names, mine, "below") + runs_legend(together, "below")
    return _table_of(asked, mine, together, "Figures by target and load", notes)


def _table_of(asked: Asked, mine: Sequence[Sheet], lines: Sequence[Group], caption: str, notes: Sequence[str]) -> Table:
    """A row for each of `lines`."""
    outcomes = shown_outcomes(mine)
    heads = [("target and load", ""), *((SHORT.get(o, o), "") for o in outcomes), *_named(asked.names)]
    rows = []
    for group in lines:
        counts = [_count(group.outcomes[o], "bad" if o == "failed" else "") for o in outcomes]
        small = [group.target, *([f"{group.runs} runs"] if group.runs > 1 else [])]
        rows.append([Td(group.load, None, small), *counts, *map(_figure, group.values)])
    return Table(caption, heads, rows, notes)


def _classes(asked: Asked, mine: Sequence[Sheet], together: Sequence[Group]) -> list[Table]:
    """The requests of each class, a row a class and line of the figures; no table where no cell has several."""
    lines = [(group, line) for group in together for line in group_lines(group)[1:]]
    if not lines:
        return []
    outcomes = shown_outcomes(mine)
    heads = [("class", ""), *((SHORT.get(o, o), "") for o in outcomes), *_named(asked.names)]
    rows = []
    for group, line in lines:
        counts = [_count(line.outcomes[o], "bad" if o == "failed" else "") for o in outcomes]
        rows.append([Td(line.head.strip(), None, [_where(group)]), *counts, *map(_figure, line.values)])
    return [Table("Figures by class of request", heads, rows), *_interference(together)]


def _interference(together: Sequence[Group]) -> list[Table]:
    """What the classes did to each other; no table where none was measured alone too."""
    rows = []
    for group in together:
        for line in interference_rows(group):
            head, alone, beside_, factor, bounds = line.cells
            unit = "" if line.unit in ("1", "share") else f" {line.unit}"
            figures = [Td(alone + unit), Td(beside_ + unit)]
            rows.append([Td(head, None, [_where(group)]), *figures, Td(factor, line.factor, why=line.why), Td(bounds)])
    heads = [(head, "") for head in INTERFERENCE_HEADS]
    return [Table("Interference", heads, rows, interference_legend(together))] if rows else []


def _count(n: int, tone: str = "") -> Td:
    return Td(f"{n:,}", n, tone=tone if n else "")


def _figure(v: Value) -> Td:
    """A figure with what it rests on, as every other format has it."""
    why = "; ".join(filter(None, [v.reason, *v.labels, v.refusal and f"no interval: {v.refusal}"]))
    return Td(number(v.value, v.unit), v.value, beside(v), why)


def _errors(mine: Sequence[Sheet]) -> Table | None:
    heads = [("target and load", ""), ("kind", ""), ("requests", ""), ("HTTP statuses", ""), ("first error", "")]
    rows = [
        [
            _head(s.measured),
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


def _traffic(mine: Sequence[Sheet]) -> Table:
    heads = [("target and load", ""), ("bytes received", ""), ("received", "Mbit/s"), ("payload", "Mbit/s")]
    heads += [("payload share", ""), ("bytes sent", ""), ("sent", "Mbit/s")]
    rows = []
    for s in mine:
        cell, window = s.measured.cell, s.measured.window
        received = int(cell["bytes_in"].sum())
        payload, share = metrics.compute_all(["payload_mbit_per_second", "payload_share"], cell, window)
        ended = (cell["end_ns"] >= window.start_ns) & (cell["end_ns"] < window.end_ns) & outcome_in(cell, "ok")
        mbit = float(cell["bytes_in"][ended].sum()) * 8e-6 / window.seconds
        rows.append([_head(s.measured), _count(received), Td(number(mbit, "Mbit/s"), mbit), _figure(payload)])
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


def _slices(sheet: Sheet, parts: Slices) -> Table:
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


def _cell(sheet: Sheet, anchor: str) -> CellSection:
    m = sheet.measured
    said = [line for line in remarks(sheet) if not line.startswith("failed: ")]  # they have a table
    tools = [*_fault_tables(sheet), *(_as_tool(printed) for printed in sheet.as_tools)]
    if m.pair is not None:  # the verdict is of all runs of the cell: this one's own stands here
        said += [verdict_line(j) for j in sheet.judged] + [f"doubt: {d.kind}: {d.sentence}" for d in sheet.doubts]
    load = m.load_and_run
    if not m.cell.n:
        return CellSection(anchor, m.target, load, said, (), (), tools)
    line = timeline(m.cell, m.window)
    dotted = charts.scatter(m)
    single = [*([dotted] if dotted else []), *charts.waterfalls(m)]
    parts = _slices(sheet, slices(m.cell, m.window, line))
    return CellSection(anchor, m.target, load, said, charts.over_time(m, line), single, [parts, *tools])


def _fault_tables(sheet: Sheet) -> list[Table]:
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


def _as_tool(printed: Printed) -> Table:
    rows = [
        [Td(line[0]), Td(line[1]), Td(line[2], tone="name"), Td(line[3]), Td(line[4], tone="said")]
        for line in tool_rows(printed)
    ]
    return Table(tool_title(printed), [(head, "") for head in TOOL_HEADS], rows, tool_remarks(printed))


# ---- circumstances


def _rows(pairs: Iterable[tuple[str, str]]) -> list[list[Td]]:
    return [[Td(name), Td(said)] for name, said in pairs]


def _settings(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "loads", ", ".join(map(str, facts.get("loads") or [])) or NOT_RECORDED
    yield from _flat(facts.get("settings") or {})


def _flat(of: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in of.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", _said(value)


def _said(value: Any) -> str:
    """A value of run.json in words."""
    if value is None or value in ("", [], {}):
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _began(facts: Mapping[str, Any]) -> list[str]:
    moment = _moment(facts.get("anchor"))
    return [moment] if moment else []


def _moment(anchor: Any) -> str:
    """The wall time of an anchor, [ns since 1970, ns of the monotonic clock]."""
    if not isinstance(anchor, Sequence) or len(anchor) != 2 or not all(isinstance(ns, int) for ns in anchor):
        return ""
    try:
        began = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=anchor[0] // 1000)
    except OverflowError:
        return ""
    return began.strftime("%Y-%m-%d %H:%M:%S UTC")


def _environment(run: Run, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    host, trace, hashes = (facts.get(key) or {} for key in ("host", "trace", "hashes"))
    yield "folder", clean(str(run.path))
    yield "llm-bench", str(facts.get("version") or NOT_RECORDED)
    yield "run", str(facts.get("run_id") or NOT_RECORDED)
    yield "began", _moment(facts.get("anchor")) or NOT_RECORDED
    yield "anchor (wall ns, monotonic ns)", _said(facts.get("anchor")) if facts.get("anchor") else NOT_RECORDED
    yield "command", " ".join(map(str, facts.get("command") or [])) or NOT_RECORDED
    for key, said in _flat(host):
        yield f"host: {key}", said
    yield "trace", str(trace.get("path") or NOT_RECORDED)
    for key, said in _flat({key: value for key, value in trace.items() if key not in ("path", "notes", "sha256")}):
        yield f"trace: {key}", said
    for note in trace.get("notes") or []:
        yield "trace: note", str(note)
    yield "trace: sha256 of the file", str(trace.get("sha256") or NOT_RECORDED)
    yield "trace: hash of the requests sent", str(hashes.get("trace") or NOT_RECORDED)
    for name, digest in (hashes.get("tokenizers") or {}).items():
        yield f"tokenizer of {name}: hash", str(digest)


def _targets(run: Run, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of each target what was declared, and what the probe found; "" and null are nothing."""
    declared = {str(d.get("name")): d for d in facts.get("declared") or [] if isinstance(d, Mapping)}
    for m in run.cells:
        declared.setdefault(m.target, m.cell.header.get("target") or {})
    probes = {m.target: m.cell.header.get("probe") or {} for m in reversed(run.cells)}
    for name, target in declared.items():
        for key, said in _flat({**target, "probe": probes.get(name) or {}}):
            if said != "–" and key != "name":
                yield f"{name}: {key}", said
