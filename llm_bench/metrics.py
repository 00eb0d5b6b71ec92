"""What each number of a cell is: WHOLE beside SERIES; `parse` reads a metric's name, `compute` gives its Value.

Definitions are METRICS.md's, row by row. What is undefined is None with the reason in words, never 0.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from llm_bench import slo, stats, windows
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.series import (
    NOTHING,
    SERIES,
    SINGLE_PASS,
    Column,
    Context,
    due_in,
    events_in,
    gaps,
    outcome_in,
    over,
    row_sums,
    single_pass,
)
from llm_bench.windows import Window


class Whole(NamedTuple):
    unit: str
    of: Callable[[Cell, Window, Context], float | str]  # a str is the reason why there is none
    better: Literal["lower", "higher"]
    meaning: str
    tokens_of: tuple[str, ...] = ()  # outcomes whose tokens enter: an estimate where the server does not say them
    prompts: bool = False  # prompt tokens enter too: planned ones where the server does not say them


QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
REDUCERS: dict[str, Callable[[np.ndarray], float]] = {
    **{name: partial(stats.percentile, q=q) for name, q in QUANTILES.items()},
    "mean": lambda x: float(np.mean(x)),
    "std": lambda x: float(np.std(x, ddof=1)),  # of the sample; needs two
    "min": lambda x: float(np.min(x)),
    "max": lambda x: float(np.max(x)),
}


def _ended_in(cell: Cell, window: Window) -> np.ndarray:
    return np.asarray((cell["end_ns"] >= window.start_ns) & (cell["end_ns"] < window.end_ns))


def tokens_in_window(cell: Cell, window: Window, rows: np.ndarray) -> float | str:
    """Output tokens of the requests in mask `rows` by event time; not streamed: all at the end.

    An event weighs its own tokens where the wire says them, else tokens_out / events, else 1. A str where a whole
    answer of them does not say how many it has.
    """
    if single_pass(cell):
        return SINGLE_PASS
    many, out = cell.counts, cell["tokens_out"]
    whole = rows & (many == 0) & _ended_in(cell, window)
    unknown = int((whole & (out < 0)).sum())
    if unknown:
        ended = int((rows & _ended_in(cell, window)).sum())
        return f"how many tokens they have is unknown of {unknown} of {ended} answers"
    share = np.where(out > 0, over(out.astype(np.float64), many), 1.0)
    streamed = events_in(cell, window) * share
    for piece in cell.pieces():
        if piece.tokens is not None:
            sizes = piece.tokens * ((piece.ns >= window.start_ns) & (piece.ns < window.end_ns))
            said = row_sums(piece.offsets, piece.tokens) > 0
            streamed[piece.rows[said]] = row_sums(piece.offsets, sizes)[said]
    return float(np.where(whole, out, np.where(many > 0, streamed, 0.0))[rows].sum())


def _prompts_in(cell: Cell, window: Window) -> np.ndarray:
    """Prompts of ok and cut requests, credited at the first token; not streamed: at the end."""
    ended_ns = np.where(outcome_in(cell, "ok"), cell["end_ns"], -1)  # cut without a token: no prompt was used yet
    first_ns = np.where(cell.counts > 0, cell.first_ns, ended_ns)
    return np.asarray((first_ns >= window.start_ns) & (first_ns < window.end_ns) & outcome_in(cell, *_DELIVERED))


def _uncounted(cell: Cell, window: Window) -> np.ndarray:
    """Prompts whose length the server did not say: a planned one stands in, which may be off in one arm alone.

    Those of cut answers are left out: usage comes at the end, so that no server had said theirs.
    """
    return np.asarray(_prompts_in(cell, window) & (cell["tokens_in"] < 0) & outcome_in(cell, "ok"))


def _prompt_tokens(cell: Cell, window: Window) -> float | str:
    inside = _prompts_in(cell, window)
    said = np.where(cell["tokens_in"] >= 0, cell["tokens_in"], cell["planned_in"])[inside]
    unknown = int((said < 0).sum())
    return f"how long they are is unknown of {unknown} of {len(said)} prompts" if unknown else float(said.sum())


def _tokens_per_second(cell: Cell, window: Window, _: Context) -> float | str:
    tokens = tokens_in_window(cell, window, outcome_in(cell, *_DELIVERED))
    return tokens if isinstance(tokens, str) else tokens / window.seconds


def _total_tokens_per_second(cell: Cell, window: Window, _: Context) -> float | str:
    out = 0.0 if single_pass(cell) else tokens_in_window(cell, window, outcome_in(cell, *_DELIVERED))
    prompts = _prompt_tokens(cell, window)
    for unknown in (out, prompts):
        if isinstance(unknown, str):
            return unknown
    return (float(out) + float(prompts)) / window.seconds


def _tokens_per_second_run(cell: Cell, _: Window, ctx: Context) -> float | str:
    return _tokens_per_second(cell, windows.whole(cell), ctx)


def _wasted(cell: Cell, window: Window, _: Context) -> float | str:
    return tokens_in_window(cell, window, outcome_in(cell, *_WASTED))


def _requests_per_second(cell: Cell, window: Window, _: Context) -> float | str:
    return float((outcome_in(cell, "ok") & _ended_in(cell, window)).sum()) / window.seconds


def _in_flight(cell: Cell, window: Window, _: Context) -> float | str:
    tried = windows.attempted(cell)
    return windows.overlap_s(windows.left_ns(cell)[tried], cell["end_ns"][tried], window) / window.seconds


def _in_system(cell: Cell, window: Window, _: Context) -> float | str:
    tried = windows.attempted(cell)
    return windows.overlap_s(cell["due_ns"][tried], cell["end_ns"][tried], window) / window.seconds


def _concurrency(cell: Cell, window: Window, _: Context) -> float | str:
    """λ · W: the whole stays of the requests due in the window, over the window."""
    rows = due_in(cell, window) & windows.attempted(cell)
    return float((cell["end_ns"] - cell["due_ns"])[rows].sum()) / 1e9 / window.seconds


def _share(part: str, of: tuple[str, ...]) -> Callable[[Cell, Window, Context], float | str]:
    def share(cell: Cell, window: Window, _: Context) -> float | str:
        rows = due_in(cell, window)
        total = int((rows & outcome_in(cell, *of)).sum()) if of else int(rows.sum())
        return int((rows & outcome_in(cell, part)).sum()) / total if total else "no such request was due in the window"

    return share


def _first_attempt(cell: Cell, window: Window, _: Context) -> float | str:
    rows = due_in(cell, window) & outcome_in(cell, "ok", "failed")
    if not rows.any():
        return "no such request was due in the window"
    return int((rows & cell.among("first_attempt", "ok")).sum()) / int(rows.sum())


def _cached(cell: Cell, window: Window, _: Context) -> float | str:
    rows = due_in(cell, window) & outcome_in(cell, "ok") & (cell["tokens_cached"] >= 0) & (cell["tokens_in"] > 0)
    if not rows.any():
        return "the server does not say how many prompt tokens it took from its cache"
    return float(cell["tokens_cached"][rows].sum() / cell["tokens_in"][rows].sum())


def _payload_mbit(cell: Cell, window: Window, _: Context) -> float | str:
    return float(cell["text_bytes"][outcome_in(cell, "ok") & _ended_in(cell, window)].sum()) * 8e-6 / window.seconds


def _payload_share(cell: Cell, window: Window, _: Context) -> float | str:
    rows = outcome_in(cell, "ok") & _ended_in(cell, window)
    received = int(cell["bytes_in"][rows].sum())
    return int(cell["text_bytes"][rows].sum()) / received if received else "no bytes were received in the window"


def _tokens_per_event(cell: Cell, window: Window, _: Context) -> float | str:
    rows = due_in(cell, window) & outcome_in(cell, "ok") & (cell.counts > 0) & (cell["tokens_out"] > 0)
    events = int(cell.counts[rows].sum())
    return int(cell["tokens_out"][rows].sum()) / events if events else "no streamed ok request in the window"


def _zero_gaps(cell: Cell, window: Window, _: Context) -> float | str:
    mine = due_in(cell, window) & outcome_in(cell, "ok")
    zero = total = 0
    for rows, count, between in gaps(cell):
        if not mine[rows].all():
            between = between[np.repeat(mine[rows], count)]
        zero, total = zero + len(between) - int(np.count_nonzero(between)), total + len(between)
    return zero / total if total else "no gap between two events in the window"


NO_LIMITS = "no limits were given: --slo"


def _slo_attainment(cell: Cell, window: Window, ctx: Context) -> float | str:
    if not ctx.limits:
        return NO_LIMITS
    got = slo.attainment(cell, window, ctx.limits, ctx)
    if got.share is not None:
        return got.share
    return f"of all {got.undecided:,} requests it is not known" if got.undecided else "no request was due in the window"


def _goodput(cell: Cell, window: Window, ctx: Context) -> float | str:
    return slo.attainment(cell, window, ctx.limits, ctx).met / window.seconds if ctx.limits else NO_LIMITS


def _arrival_rate(cell: Cell, window: Window, _: Context) -> float | str:
    return int(due_in(cell, window).sum()) / window.seconds


_JUDGED, _DUE = ("ok", "failed"), ()
_DELIVERED, _WASTED = ("ok", "cut_at_end"), ("failed", "cancelled")
WHOLE: dict[str, Whole] = {
    "tokens_per_second": Whole("tokens/s", _tokens_per_second, "higher", "output tokens in the window", _DELIVERED),
    "total_tokens_per_second": Whole(
        "tokens/s", _total_tokens_per_second, "higher", "prompt tokens too", _DELIVERED, True
    ),
    "tokens_per_second_run": Whole("tokens/s", _tokens_per_second_run, "higher", "ramp and drain included", _DELIVERED),
    "wasted_tokens": Whole("tokens", _wasted, "lower", "output of failed and cancelled requests", _WASTED),
    "requests_per_second": Whole("1/s", _requests_per_second, "higher", "ok requests ended in the window"),
    "arrival_rate": Whole("1/s", _arrival_rate, "higher", "requests due in the window"),
    "in_flight": Whole("1", _in_flight, "lower", "time-average between sent and end"),
    "in_system": Whole("1", _in_system, "lower", "time-average between due and end"),
    "error_rate": Whole("share", _share("failed", _JUDGED), "lower", "failed / (ok + failed)"),
    "first_attempt_success": Whole("share", _first_attempt, "higher", "ok without a retry / (ok + failed)"),
    "cancel_rate": Whole("share", _share("cancelled", _DUE), "lower", "cancelled by plan / due"),
    "drop_rate": Whole("share", _share("dropped", _DUE), "lower", "due but never attempted / due"),
    "slo_attainment": Whole("share", _slo_attainment, "higher", "requests that met every limit of --slo"),
    "goodput": Whole("1/s", _goodput, "higher", "requests that met every limit of --slo, per second"),
    "cached_prompt_share": Whole("share", _cached, "lower", "prompt tokens from the server's cache"),
    "concurrency_effective": Whole("1", _concurrency, "lower", "sum of times in system / window"),
    "payload_mbit_per_second": Whole("Mbit/s", _payload_mbit, "higher", "token text received"),
    "payload_share": Whole("share", _payload_share, "higher", "token text / bytes received"),
    "tokens_per_event": Whole("tokens", _tokens_per_event, "lower", "output tokens / token-bearing events", ("ok",)),
    "zero_gap_share": Whole("share", _zero_gaps, "lower", "gaps of 0 between events: one read brought both"),
}


# ---- names and values ----


class Metric(NamedTuple):
    """A parsed name: a series with its reducer, or a figure of the whole cell ("" for the reducer)."""

    name: str
    of: str
    reducer: str

    @property
    def unit(self) -> str:
        return (SERIES if self.reducer else WHOLE)[self.of].unit

    @property
    def better(self) -> str:
        return (SERIES if self.reducer else WHOLE)[self.of].better


@dataclass(frozen=True, slots=True)
class Value:
    """One figure of one cell with what is needed to judge it. `value` is None for a `reason`."""

    name: str
    unit: str
    value: float | None
    n: int  # samples in it; for a figure of the cell the requests due in the window
    reason: str = ""
    labels: tuple[str, ...] = ()  # "estimated from events", "depends on run length", ...
    not_applicable: Mapping[str, int] = field(default_factory=dict)  # reason -> ok requests
    all_requests: float | Literal["error"] | None = None  # failed and dropped requests rank above every latency
    ess: float | None = None  # percentiles: effective samples
    interval: stats.Interval | None = None  # 95%, or the refusal says why not
    refusal: str = ""

    @property
    def few(self) -> bool:
        """A percentile of so few samples that it says what the largest say."""
        q = QUANTILES.get(parse(self.name).reducer)
        return q is not None and self.ess is not None and stats.among_largest(q, self.n)


def names() -> list[str]:
    """Every name that `parse` takes."""
    return [*(f"{series}_{reducer}" for series in SERIES for reducer in REDUCERS), *WHOLE]


def parse(name: str) -> Metric:
    """`<series>_<reducer>` or a figure of the cell. Raises BenchError with the nearest known names."""
    if name in WHOLE:
        return Metric(name, name, "")
    for reducer in REDUCERS:
        series = name.removesuffix(f"_{reducer}")
        if series in SERIES and series != name:
            return Metric(name, series, reducer)
    if name in SERIES:
        raise BenchError(f"metric {name!r}: a series needs a reducer: {name}_p95, or one of {', '.join(REDUCERS)}")
    near = difflib.get_close_matches(name, names(), 3, 0.5)
    known = (
        f"nearest: {', '.join(near)}"
        if near
        else f"known: <{'|'.join(SERIES)}>_<{'|'.join(REDUCERS)}>, {', '.join(WHOLE)}"
    )
    raise BenchError(f"metric {name!r} is unknown; {known}")


def compute(name: str, cell: Cell, window: Window, context: Context = NOTHING) -> Value:
    """One metric of one cell over its window. Raises BenchError for an unknown name."""
    return compute_all([name], cell, window, context)[0]


def compute_all(wanted: Sequence[str], cell: Cell, window: Window, context: Context = NOTHING) -> list[Value]:
    """The same for several names; a series is worked out once however many reducers ask for it."""
    metrics = [parse(name) for name in wanted]
    samples = {m.of: _samples(m.of, cell, window, context) for m in metrics if m.reducer}
    return [
        _reduce(m, samples[m.of], window) if m.reducer else _figure(m, WHOLE[m.of], cell, window, context)
        for m in metrics
    ]


class _Samples(NamedTuple):
    values: np.ndarray  # in due order, of ok requests due in the window, those that apply
    groups: np.ndarray | None  # request of each value, pooled series only
    requests: int  # ok requests due in the window
    lost: int  # failed and dropped ones
    not_applicable: dict[str, int]
    labels: tuple[str, ...]


def _samples(series: str, cell: Cell, window: Window, context: Context) -> _Samples:
    column = SERIES[series].of(cell, context)
    due = due_in(cell, window)
    ok, lost = due & outcome_in(cell, "ok"), due & outcome_in(cell, "failed", "dropped")
    labels = _estimates(cell, ok) if SERIES[series].counts_tokens else ()
    missing = _reasons(column, ok)
    if column.rows is not None:
        mine = ok[column.rows]
        return _Samples(column.values[mine], column.rows[mine], int(ok.sum()), int(lost.sum()), missing, labels)
    values = column.values[ok]
    return _Samples(values[~np.isnan(values)], None, int(ok.sum()), int(lost.sum()), missing, labels)


def _reasons(column: Column, ok: np.ndarray) -> dict[str, int]:
    """How many ok requests a series does not apply to, each counted under its first reason."""
    left, found = ok.copy(), {}
    for reason, mask in column.why.items():
        if (left & mask).any():
            found[reason] = int((left & mask).sum())
            left &= ~mask
    if column.rows is None and np.isnan(column.values[left]).any():
        found["stamp missing"] = int(np.isnan(column.values[left]).sum())
    return found


def _estimates(cell: Cell, rows: np.ndarray) -> tuple[str, ...]:
    said = {"events": "estimated from events", "tokenizer": "estimated with a tokenizer"}
    return tuple(text for kind, text in said.items() if (rows & cell.among("tokens_out_from", kind)).any())


def _reduce(metric: Metric, samples: _Samples, window: Window) -> Value:
    values, n = samples.values, len(samples.values)
    unit, labels, missing = metric.unit, list(samples.labels), samples.not_applicable
    q = QUANTILES.get(metric.reducer)
    on_all: float | Literal["error"] | None = None
    if q is not None and metric.better == "lower" and samples.groups is None:
        on_all = stats.percentile_all(values, samples.lost, q)
    if not n or (metric.reducer == "std" and n < 2):
        reason = "one sample has no spread" if n else _why_none(samples)
        return Value(metric.name, unit, None, n, reason, tuple(labels), missing, on_all)
    value = REDUCERS[metric.reducer](values)
    labels += _unbounded(metric.name, window)
    if q is None:
        return Value(metric.name, unit, value, n, "", tuple(labels), missing)
    if q >= 0.9 and stats.among_largest(q, n):
        labels.append(f"{stats.percent_name(q)} ≈ max (n={n} < {round(1 / (1 - q)) + 1})")
    size = stats.ess(values, q, samples.groups)
    bounds = stats.interval(values, q, samples.groups, size)
    interval, refusal = (None, bounds) if isinstance(bounds, str) else (bounds, "")
    return Value(metric.name, unit, value, n, "", tuple(labels), missing, on_all, size, interval, refusal)


def _why_none(samples: _Samples) -> str:
    if not samples.requests:
        return "no ok request was due in the window"
    return "not applicable: " + ", ".join(f"{reason} ({k})" for reason, k in samples.not_applicable.items())


def _figure(metric: Metric, row: Whole, cell: Cell, window: Window, context: Context) -> Value:
    due = due_in(cell, window)
    value = row.of(cell, window, context)
    labels = _estimates(cell, outcome_in(cell, *row.tokens_of)) if row.tokens_of else ()
    if row.prompts and _uncounted(cell, window).any():
        labels += ("prompt tokens as planned",)
    if isinstance(value, str):
        return Value(metric.name, row.unit, None, int(due.sum()), value, labels)
    labels = (*labels, *_unbounded(metric.name, window))
    if metric.name != "slo_attainment":
        return Value(metric.name, row.unit, value, int(due.sum()), "", labels)
    got = slo.attainment(cell, window, context.limits, context)
    if got.undecided and got.lower is not None and got.upper is not None:
        labels += (f"{got.lower:.2%} to {got.upper:.2%}, as {got.undecided:,} undecided ones missed or met",)
    return Value(metric.name, row.unit, value, got.decided, "", labels, ess=got.ess, interval=got.interval)


def _unbounded(name: str, window: Window) -> tuple[str, ...]:
    """What never settles has no figures of its own, only those of a run of some length; what was offered stays so."""
    return ("depends on run length",) if window.state == windows.GROWING and name != "arrival_rate" else ()
