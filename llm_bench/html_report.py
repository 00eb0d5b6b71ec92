"""Runs as one HTML page that needs nothing else: what is said is the other formats', the pictures are `charts`'."""

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from llm_bench import charts, html_facts
from llm_bench.charts import Figure
from llm_bench.definitions import Definition, definitions
from llm_bench.html_tables import (
    Place,
    Table,
    Td,
    as_tool,
    by_slice,
    classes,
    failures,
    faults,
    figures,
    place_of,
    table_of,
    traffic,
    where,
)
from llm_bench.outcomes import Failure
from llm_bench.printable import lines
from llm_bench.repeats import Group, groups
from llm_bench.results import Asked, Run, Sheet, sheets
from llm_bench.timeline import slices, timeline
from llm_bench.words import (
    FAILED,
    by_target,
    first_error,
    name_of,
    or_default,
    remarks,
    said_of,
    title,
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
NOT_ALIKE = "targets differ"  # the kind of doubt under which targets are not to be compared: said before all else
DATA = ("report.html.j2", "report.css", "report.js")


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
    began = html_facts.moment(facts.get("anchor"))
    return Section(
        anchor=anchor,
        title=f"run {name_of(run)}",
        lead=[part.strip() for part in title(run).split("  ·  ")[1:]] + ([began] if began else []),
        summary=_summary(run, together),
        held=_limits(together, "MET"),
        broke=[*_limits(together, "MISSED"), *_failed(together), *_missing(run)],
        open=[*_limits(together, "UNDECIDED"), *_doubtful(together)],
        unjudged=not asked.slo.limits,
        warnings=[f"{target}: {line}" for target, of in targets.items() for line in warnings(of)],
        tables=[figures(run, asked, mine, together), *classes(asked, mine, together)],
        runs_notes=[f"{where(group)}: {line}" for group in together if group.runs > 1 for line in said_of(group)],
        each_run=[table_of(asked, mine, alone, "Each run alone", ())] if alone else [],
        curves=charts.curves(targets, asked.slo),
        distributions=[(target, found) for target, of in targets.items() if (found := charts.ecdfs(of, asked.slo))],
        cells=[_cell(sheet, f"{anchor}-c{i}") for i, sheet in enumerate(mine)],
        cells_open=len(mine) <= OPEN_CELLS,
        errors=failures(mine),
        traffic=traffic(mine),
        settings=_pairs("Settings", ("setting", "value"), html_facts.settings(facts)),
        targets=_pairs("Targets", ("what", "found"), html_facts.targets(run, facts)),
        environment=_pairs("Environment and trace", ("what", "found"), html_facts.environment(run, facts)),
        definitions=list(definitions([*asked.names, *DRAWN])),
    )


# ---- the verdict


def _limits(mine: Iterable[Group], verdict: str) -> list[Said]:
    found = ((group, *line) for group in mine for line in verdicts(group))
    return _said_once((verdict, limit, place_of(group), why) for group, limit, said, why in found if said == verdict)


def _failed(mine: Iterable[Group]) -> list[Said]:
    return _said_once(
        ("failed", f.kind, place_of(group), _failure(group, f)) for group in mine for f in group.failures()
    )


def _failure(group: Group, f: Failure) -> str:
    requests = sum(sheet.measured.cell.n for sheet in group.sheets)
    return f"{f.text}, of {requests:,} requests; first: {first_error(f)}"


def _missing(run: Run) -> list[Said]:
    """Each by itself: whoever looks for a cell finds its name and its reason together."""
    found = [(f"{m.target} at {m.load}", m.why) for m in run.missing]
    return [Said("missing", "no figures", found)] if found else []


def _doubtful(mine: Iterable[Group]) -> list[Said]:
    return _said_once(("doubt", d.kind, place_of(group), d.sentence) for group in mine for d in group.doubts())


def _said_once(lines: Iterable[tuple[str, str, Place, str]]) -> list[Said]:
    """(mark, what, place, why) with what is said of several places under one head, and the same of several once."""
    found: dict[tuple[str, str], dict[str, list[Place]]] = {}
    for mark, what, place, why in lines:
        found.setdefault((mark, what), {}).setdefault(why, []).append(place)
    return [Said(*about, [(_places(of), why) for why, of in reasons.items()]) for about, reasons in found.items()]


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


# ---- circumstances and cells


def _pairs(caption: str, heads: tuple[str, str], pairs: Iterable[tuple[str, str]]) -> Table:
    return Table(caption, [(head, "") for head in heads], [[Td(name), Td(said)] for name, said in pairs])


def _cell(sheet: Sheet, anchor: str) -> CellSection:
    m = sheet.measured
    said = [line for line in remarks(sheet) if not line.startswith(FAILED)]  # they have a table
    tools = [*faults(sheet), *(as_tool(printed) for printed in sheet.as_tools)]
    if m.pair is not None:  # the verdict is of all runs of the cell: this one's own stands here
        said += [verdict_line(j) for j in sheet.judged] + [f"doubt: {d.kind}: {d.sentence}" for d in sheet.doubts]
    load = m.load_and_run
    if not m.cell.n:
        return CellSection(anchor, m.target, load, said, (), (), tools)
    line = timeline(m.cell, m.window)
    dotted = charts.scatter(m)
    single = [*([dotted] if dotted else []), *charts.waterfalls(m)]
    parts = by_slice(sheet, slices(m.cell, m.window, line))
    return CellSection(anchor, m.target, load, said, charts.over_time(m, line), single, [parts, *tools])
