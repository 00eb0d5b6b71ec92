"""What every format of a report says: the figures by default, a window's edges, remarks, numbers in words."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from llm_bench import as_tools, outcomes, stats, windows
from llm_bench.as_tools import Table
from llm_bench.evidence import SERVERS, Work, work_of
from llm_bench.interference import ONE_RUN, SEVERAL_RUNS, Factor
from llm_bench.metrics import Value
from llm_bench.objectives import Judged
from llm_bench.printable import clean
from llm_bench.records import OUTCOMES
from llm_bench.recovery_words import fault_lines
from llm_bench.repeats import Group
from llm_bench.results import Asked, ClassSheet, Measured, Run, Sheet
from llm_bench.same_work import Side, agreement, first_line, same_work
from llm_bench.series import SINGLE_PASS, due_in, outcome_in, single_pass

_OF_A_CELL = ("tokens_per_second", "requests_per_second", "error_rate")
DEFAULT_METRICS = ("ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "e2e_p95", *_OF_A_CELL)
RETRIED = "first_attempt_success"  # by default too, where retries hide it
DEFAULT_UNSTREAMED = ("e2e_p50", "e2e_p95", "e2e_p99", *_OF_A_CELL)  # whole answers have no TTFT and no TPOT
FAILED = "failed, of all requests"  # warm-up and drain too, where a table counts those of the window
LIMITED = "client-limited: upper bounds of latency, lower bounds of throughput"
UNCHECKED = "its https certificate was not checked (--insecure): another server could have answered"
MOST_ERROR = 300  # characters of an error that are said: enough for what servers mean by one
RECONNECTED_SHARE = 0.1  # above it the target closes what a client would have kept open
DROPS_SHARE, DROPS_ALIKE = 0.5, "a server that drops requests within 50 ms would look the same"
GOOD_AND_ALL = (
    "goodput counts requests that were due in the window and met the limits, requests_per_second ok ones that ended in "
    "it: either may be the larger"
)
SHORT = {"cut_at_end": "cut"}  # outcomes as column heads


# Of a single pass what a server says of its own time stands by default, where it does: its batching decides it.
DEFAULT_SINGLE_PASS = ("e2e_p50", "e2e_p95", "e2e_p99", "requests_per_second", "error_rate")
OF_ITS_SERVER = {"queue_p95": "server_queue_ms", "prefill_p95": "server_prefill_ms", "batch_mean": "server_batch"}


def streamed(run: Run) -> bool:
    return any((m.cell.header.get("settings") or {}).get("stream", True) for m in run.cells)


def _default(run: Run) -> tuple[str, ...]:
    """The metrics of a run that named none: those of each kind of work in it."""
    passes = [m.cell for m in run.cells if single_pass(m.cell)]
    told = [name for name, column in OF_ITS_SERVER.items() if any((c[column] >= 0).any() for c in passes)]
    of_passes = (*DEFAULT_SINGLE_PASS[:3], *told, *DEFAULT_SINGLE_PASS[3:])
    others = DEFAULT_METRICS if streamed(run) else DEFAULT_UNSTREAMED
    if not passes:
        return others
    if len(passes) == len(run.cells):
        return of_passes
    first = [name for name in others if name not in _OF_A_CELL and name not in of_passes]
    return (*first, *of_passes[:-2], *_OF_A_CELL)


def columns(names: Sequence[str], mine: Sequence[Group]) -> list[int]:
    """Places in `names` of what a target's table shows: of single passes alone, only what they have."""
    lines = [line for group in mine for line in group_lines(group)]
    if not all(single_pass(sheet.measured.cell) for group in mine for sheet in group.sheets):
        return list(range(len(names)))
    known = [at for at in range(len(names)) if any(line.values[at].value is not None for line in lines)]
    return known or list(range(len(names)))


def or_default(asked: Asked, run: Run) -> Asked:
    """With each run's own SLO where none is given, and its metrics where none are named: those limited among them."""
    asked = asked._replace(slo=run.agreed(asked.slo))
    if asked.names:
        return asked
    tried_again = any(outcomes.retried(m.cell).any() for m in run.cells)
    names = _default(run) + ((RETRIED,) if tried_again else ())
    limited = tuple(limit.metric.name for limit in asked.slo.limits)
    met = ("slo_attainment", "goodput") if any(limit.bound for limit in asked.slo.limits) else ()
    return asked._replace(names=tuple(dict.fromkeys([*names, *limited, *met])))


def edges(m: Measured) -> str:
    """The window in seconds since the first due time, and the rule that set it."""
    if not m.cell.n:
        return "no request was recorded"
    w, zero = m.window, int(m.cell["due_ns"][0])
    return (
        f"window {(w.start_ns - zero) / 1e9:.3f} s to {(w.end_ns - zero) / 1e9:.3f} s ({w.seconds:.3f} s), "
        f"{w.requests} requests due in it, {w.warmup} before it; {w.rule}"
    )


def number(value: float | str | None, unit: str) -> str:
    """Four digits or so: as many as a measurement carries."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if unit == "share":
        return f"{value:.2%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.4g}"


def beside(v: Value) -> list[str]:
    """What a figure rests on, as it stands beside it: n and ESS, the interval, the all-requests reading."""
    small = [f"n {v.n}, ESS {v.ess:.0f}"] if v.ess is not None else []
    if v.interval:
        small.append(f"{number(v.interval.low, v.unit)} to {number(v.interval.high, v.unit)}")
    if v.all_requests is not None and v.all_requests != v.value:
        small.append(f"all: {number(v.all_requests, v.unit)}")
    return small


def first_error(failure: outcomes.Failure) -> str:
    """Its text, or the beginning of one that is a page long (a proxy's page, a traceback)."""
    text = failure.first_error
    if len(text) <= MOST_ERROR:
        return text
    return f"{text[:MOST_ERROR].rstrip()} … (of {len(text):,} characters; the records have them)"


def remarks(sheet: Sheet) -> list[str]:
    """What stands below a table, for one cell: rule and edges, what is missing and why, labels, failures.

    What a doubt says is not said here too: the window's state, and that a percentile is of too few.
    """
    w = sheet.measured.window
    steady = [f"{w.state}: {w.evidence}"] if w.state == windows.STATIONARY else []  # the other states have a doubt
    lines = [edges(sheet.measured), *steady, *([sheet.little.text] if sheet.little.rate else [])]
    said = (sheet.sending and sheet.sending.text, sheet.in_flight, sheet.energy and sheet.energy.text)
    lines += [line for line in said if line]
    lines += _of_cells(sheet.values, [sheet])
    lines += [line for name, of in sheet.by_class.items() for line in _interference(name, of)]
    whole = [f"{v.name} {number(v.value, v.unit)} {v.unit}" for v in sheet.whole_run if v.value is not None]
    if whole:
        wave = sheet.measured.window.first_wave
        lines.append(f"whole run, first wave of {wave} and drain included: {', '.join(whole)}")
    if sheet.attempts:
        lines.append(sheet.attempts.text)
    anew, tried = sheet.reconnected
    if anew > RECONNECTED_SHARE * tried:
        alike = f"; {DROPS_ALIKE}" if anew > DROPS_SHARE * tried else ""
        lines.append(f"{anew} of {tried} requests found their kept-alive connection closed and opened it anew{alike}")
    lines += [f"{FAILED}: {failure.text}, first: {first_error(failure)}" for failure in sheet.failures]
    return lines + _unknown_prompts(sheet.measured) + fault_lines(sheet)


def _unknown_prompts(m: Measured) -> list[str]:
    """That nobody counted the prompts: no reason to distrust figures without them, and no proof of the work either."""
    ok = due_in(m.cell, m.window) & outcome_in(m.cell, "ok")
    rows = int((ok & (m.cell["tokens_in"] < 0) & (m.cell["planned_in"] > 0)).sum())
    if not rows or single_pass(m.cell):
        return []
    whose = f"of {rows} of {int(ok.sum())} requests the server says no prompt tokens"
    return [f"{whose}: whether they were as long as planned is unknown"]


def _interference(name: str, of: ClassSheet) -> list[str]:
    """What the other classes of a mix did to one, where it was measured alone too: a line a figure."""
    who, lines, without = f"{clean(name) or 'no class'} in the mix", list[str](), dict[str, list[str]]()
    for f in of.factors:
        against = f"{f.name} {number(f.together, f.unit)} against {number(f.alone, f.unit)} {f.unit} alone"
        if f.interval:
            bounds = f"{times(f.interval.low)} to {times(f.interval.high)}, {f.confidence} sure"
            lines.append(f"{who}: {against} ({_factor(f)}; {bounds})")
        elif f.value is not None:
            without.setdefault(f"no interval, {f.refusal}", []).append(f"{against} ({_factor(f)})")
        else:
            without.setdefault(f"no factor, {f.reason}", []).append(f.name)
    lines += [f"{who}: {', '.join(figures)}: {why}" for why, figures in without.items()]
    own = {v.name: v for v in of.alone or []}
    shares = [
        f"{v.name} {number(v.value, v.unit)} against {number(own[v.name].value, v.unit)} alone"
        for v in of.values
        if v.unit == "share" and v.name in own and v.value != own[v.name].value
    ]
    return lines + ([f"{who}: {', '.join(shares)}"] if shares else [])


def times(factor: float | None) -> str:
    """A factor, in three digits or so."""
    return "–" if factor is None else f"{factor:.2f}" if factor < 100 else f"{factor:,.0f}"


def _factor(f: Factor) -> str:
    return f"{times(f.value)} times" + (f", geometric mean of {f.runs} runs" if f.runs > 1 else "")


INTERFERENCE_HEADS = ("class and metric", "alone", "together", "factor", "interval")


class Disturbed(NamedTuple):
    """A line of the table of factors: INTERFERENCE_HEADS, what its factor is sorted by, and why something lacks."""

    cells: tuple[str, str, str, str, str]
    unit: str
    factor: float | None
    why: str


def interference_rows(group: Group) -> list[Disturbed]:
    """A line a class and metric of a cell, or of its runs together, whose classes were measured alone too."""
    rows = []
    for name, of in group.by_class.items():
        for f in of.factors:
            bounds = f"{times(f.interval.low)} to {times(f.interval.high)}" if f.interval else "–"
            head = f"{clean(name) or 'no class'}: {f.name}"
            cells = (head, number(f.alone, f.unit), number(f.together, f.unit), times(f.value), bounds)
            rows.append(Disturbed(cells, f.unit, f.value, f.reason or (f.refusal and f"no interval: {f.refusal}")))
    return rows


def interference_legend(groups: Iterable[Group]) -> list[str]:
    """What the intervals of that table are, where it has any."""
    found = {f.confidence for g in groups for of in g.by_class.values() for f in of.factors if f.interval}
    one = f"{ONE_RUN} sure: the ratio while each of the two figures is anywhere in its 95% interval"
    several = "95% t interval over the runs of the logarithm of each run's factor; the factor is their geometric mean"
    return [text for sure, text in ((ONE_RUN, one), (SEVERAL_RUNS, several)) if sure in found]


def _of_cells(values: Sequence[Value], sheets_: Sequence[Sheet]) -> list[str]:
    """What the figures of a cell, or of its runs, rest on; a single pass has a sentence for all that it has not."""
    if not all(single_pass(sheet.measured.cell) for sheet in sheets_):
        return _of_figures(values)
    return [SINGLE_PASS, *_of_figures([v for v in values if v.value is not None])]


def _of_figures(values: Sequence[Value]) -> list[str]:
    said: dict[str, list[str]] = {}  # what holds for several figures is said once
    for v in values:
        if v.reason:
            said.setdefault(f"– because {v.reason}", []).append(v.name)
        elif v.not_applicable:
            said.setdefault(f"left out of it {_counted(v.not_applicable)}", []).append(v.name)
        for label in v.labels:
            if not (v.few and "≈ max" in label):
                said.setdefault(label, []).append(v.name)
        if v.refusal and not v.few:
            few = v.ess is not None and v.ess < stats.LEAST_ESS
            text = f"ESS under {stats.LEAST_ESS:.0f}" if few else v.refusal
            said.setdefault(f"no interval, {text}", []).append(v.name)
    return [f"{', '.join(names)}: {text}" for text, names in said.items()]


def remarks_on_runs(group: Group) -> list[str]:
    """The same for several runs of a cell: how far they lie apart, and what failed in any of them."""
    ranges = [(v, group.range_of(v.name)) for v in group.values]
    apart = [f"{v.name} {number(r[0], v.unit)} to {number(r[1], v.unit)}" for v, r in ranges if r]
    lines = [f"from the least run to the largest: {', '.join(apart)}"] if apart else []
    lines += _of_cells(group.values, group.sheets)
    lines += [line for name, of in group.by_class.items() for line in _interference(name, of)]
    for sheet in group.sheets:
        which = "" if sheet.measured.pair is None else f"run {sheet.measured.pair + 1} "
        lines += [f"{which}{FAILED}: {f.text}, first: {first_error(f)}" for f in sheet.failures]
        lines += [f"{which}{line}" for line in fault_lines(sheet)]
    return lines


def said_of(group: Group) -> list[str]:
    """The remarks on a cell, or on its runs."""
    return remarks(group.sheets[0]) if group.runs == 1 else remarks_on_runs(group)


def at_every_load(mine: Sequence[Group]) -> list[str]:
    """The remarks that are word for word the same at several loads, at all of them: said once for a target."""
    first, *others = [said_of(group) for group in mine] or [[]]
    return [line for line in first if others and all(line in other for other in others)]


def heading(group: Group) -> str:
    return group.load if group.runs == 1 else f"{group.load}, {group.runs} runs"


def verdicts(group: Group) -> list[tuple[str, str, str]]:
    """Of each limit of the SLO: its text, MET, MISSED or UNDECIDED, and the evidence."""
    found: list[tuple[str, str, str]] = []
    if group.runs == 1:
        found += [(j.limit.text, j.verdict, j.why) for j in group.sheets[0].judged]
        return found
    for said in group.limits():
        runs = ", ".join(f"{verdict} in {count}" for verdict, count in said.runs.items())
        found.append((said.limit.text, said.verdict, f"{runs} of {group.runs} runs, each judged alone"))
    return found


class Line(NamedTuple):
    """A line of a target's table: a cell, or one class of its requests."""

    head: str
    of_class: str  # as the trace has it
    outcomes: Mapping[str, int]
    values: Sequence[Value]


def group_lines(group: Group) -> list[Line]:
    """A cell or its runs together, and under it each class, where its requests are of several."""
    classes = group.by_class.items()
    return [
        Line(heading(group), "", group.outcomes, group.values),
        *(Line(f"  {clean(name) or 'no class'}", name, mine.outcomes, mine.values) for name, mine in classes),
    ]


def legend(run: Run, names: Sequence[str], mine: Sequence[Sheet], where: str) -> list[str]:
    """What the columns of a target's tables hold, where it is not plain."""
    heads = ", ".join(SHORT.get(o, o) for o in shown_outcomes(mine))
    per_second = "; requests_per_second counts the ok ones that ended in it" if "requests_per_second" in names else ""
    lines = [f"{heads}: requests due in the window{per_second}"]
    if "goodput" in names and "requests_per_second" in names:
        lines.append(GOOD_AND_ALL)
    if any(v.ess is not None for s in mine for v in s.values):
        too = " (slo_attainment too)" if "slo_attainment" in names else ""
        lines.append(
            f"{where} a percentile: n, ESS (effective sample size), 95% interval{too}, all: with failures on top"
        )
    if not streamed(run):
        lines.append("nothing was streamed: no TTFT and no TPOT; e2e runs to the end of the answer")
    return lines


def runs_legend(mine: Iterable[Group], where: str) -> list[str]:
    """What the figures of several runs are."""
    if not any(group.runs > 1 for group in mine):
        return []
    return [f"of several runs: counts of all, the mean of their figures, {where} it its 95% t interval over the runs"]


def warnings(mine: Sequence[Sheet]) -> list[str]:
    """What stands above a target's figures."""
    heads = [s.measured.cell.header.get("target") or {} for s in mine]
    asked = dict.fromkeys(f"asked through the proxy {head['proxy']}" for head in heads if head.get("proxy"))
    if any(head.get("insecure") for head in heads):
        asked[UNCHECKED] = None
    return [*asked, *dict.fromkeys(f"{s.measured.load}: {LIMITED}" for s in mine if s.client_limited)]


def shown_outcomes(mine: Iterable[Sheet]) -> list[str]:
    """Those that need a column: ok, and what else occurred."""
    mine = list(mine)
    return [o for o in OUTCOMES if o == "ok" or any(s.outcomes[o] for s in mine)]


def by_target(of_run: Sequence[Sheet]) -> dict[str, list[Sheet]]:
    found: dict[str, list[Sheet]] = {}
    for sheet in of_run:
        found.setdefault(sheet.measured.target, []).append(sheet)
    return found


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.items())


def not_the_same_work(run: Run) -> str:
    """What stands above everything where the targets of a run did not do the same work; "" where they did.

    Single passes are compared among themselves: that they are other work than LLM decoding is said by `kinds`.
    """
    passes = [single_pass(m.cell) for m in run.cells]
    sides = [Side(m.target, m.cell) for m in run.cells]
    found = [
        same_work([s for s, passed in zip(sides, passes, strict=True) if passed is kind]) for kind in (False, True)
    ]
    return first_line([difference for of_kind in found for difference in of_kind])


def kinds(run: Run) -> list[str]:
    """The first decision on a server, where a run has both: what is an LLM's decoding, and what a single pass."""
    of: dict[Work, list[str]] = {}
    for m in run.cells:
        if (work := work_of(m.cell, m.window)) != "unknown" and m.target not in of.setdefault(work, []):
            of[work].append(m.target)
    return [f"{', '.join(map(clean, names))}: {SERVERS[work]}" for work, names in of.items()] if len(of) > 1 else []


def agreements(run: Run) -> list[str]:
    """Of the targets beside each other: which kind of work each does, where they do several, and how far they gave the
    same greedy answers: a figure, since engines round differently.
    """
    return kinds(run) + _agreements(run)


def _agreements(run: Run) -> list[str]:
    firsts = {m.target: m.cell for m in reversed(run.cells)}
    pairs = ((a, b, agreement(Side(a, firsts[a]), Side(b, firsts[b]))) for a, b in combinations(sorted(firsts), 2))
    return [f"{a} and {b} gave the same greedy answer to {n[0]} of {n[1]} fixed prompts" for a, b, n in pairs if n]


def title(run: Run) -> str:
    facts, host = run.facts, run.facts.get("host") or {}
    trace = (facts.get("trace") or {}).get("path", "")
    parts = [f"llm-bench {facts['version']}" if "version" in facts else "", f"trace {trace}" if trace else ""]
    parts += [f"{host['cpu']}, {host.get('cores')} cores" if host.get("cpu") else ""]
    return "  ·  ".join([f"run {name_of(run)}", *filter(None, parts)])


def name_of(run: Run) -> str:
    """Its folder's."""
    return clean(run.path.name)


TOOL_HEADS = ("its name", "its value", "our name", "our value", "why they differ")


def tool_title(table: Table) -> str:
    return f"as {table.version} prints it: {table.requests} requests of the whole run; ours: of the window"


def tool_rows(table: Table) -> list[tuple[str, ...]]:
    """A row of TOOL_HEADS a figure; where its value is not known, what it lies between, or a dash."""
    rows: list[tuple[str, ...]] = []
    said = ""
    for line in table.lines:
        its = number(line.value, line.unit)
        if line.least is not None and line.most is not None:
            its = f"{number(line.least, line.unit)} to {number(line.most, line.unit)}"
        name = f"{line.name}, {line.unit}"
        why = "" if line.why == said else line.why  # once for a figure's mean and percentiles
        said = line.why
        rows.append((name, its, line.ours, number(line.our_value, line.unit), why))
    return rows


def tool_remarks(table: Table) -> list[str]:
    """Why a tool's values are not known or only bounded, and what else to know of them."""
    said: dict[str, list[str]] = {}
    for line in table.lines:
        if line.reason:
            said.setdefault(line.reason, []).append(line.name)
    return [f"{', '.join(_short(names))}: {reason}" for reason, names in said.items()] + list(table.notes)


def _short(names: Sequence[str]) -> list[str]:
    """Each figure once, where all of its reducers say the same."""
    bare = {name: name.rpartition(" ") for name in names}
    figures = (head if tail in as_tools.REDUCERS else name for name, (head, _, tail) in bare.items())
    return list(dict.fromkeys(figures))


def verdict_line(judged: Judged) -> str:
    """A limit's verdict with its evidence, one line."""
    return f"SLO {judged.limit.text}: {judged.verdict}: {judged.why}"
