"""SLO: `ttft_p95<800ms,error_rate<1%` -> Limits, and whether a cell MET or MISSED each, or cannot be said to have.

The grammar and the verdicts are METRICS.md's, section SLO; a verdict is refused where the data do not carry one.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from llm_bench import metrics, slo, stats, windows
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.metrics import QUANTILES, WHOLE, Metric, Value
from llm_bench.printable import counted
from llm_bench.series import SERIES, Bound, Context, due_in, outcome_in
from llm_bench.stats import Interval
from llm_bench.windows import Window

Verdict = Literal["MET", "MISSED", "UNDECIDED"]
OF_LIMITS = ("slo_attainment", "goodput")  # what they count is requests that met the other limits
SECTIONS = 10  # of a window, for the interval of a figure that has one value a cell: t9 of their spread (METRICS.md)

# MLPerf Inference's server scenarios: p99 of TTFT and of TPOT, ms (mlcommons/inference_policies, by model).
_MLPERF = {
    "llama2-70b": (2000, 200),
    "llama2-70b-interactive": (450, 40),
    "llama3.1-8b": (2000, 100),
    "llama3.1-8b-interactive": (500, 30),
    "llama3.1-405b": (6000, 175),
    "deepseek-r1": (2000, 80),
    "deepseek-r1-interactive": (1500, 15),
    "gpt-oss-120b": (3000, 80),
    "gpt-oss-120b-interactive": (2000, 20),
}
PRESETS: dict[str, str] = {
    f"mlperf-{name}": f"ttft_p99<={ttft}ms,tpot_p99<={tpot}ms" for name, (ttft, tpot) in _MLPERF.items()
}

# Unit of a metric -> what may be typed after a number, and what it is in that unit. "" is there where it is no mix-up.
_UNITS: dict[str, dict[str, float]] = {
    "ms": {"ms": 1.0, "s": 1000.0, "us": 1e-3, "µs": 1e-3},
    "ms/token": {"ms": 1.0, "ms/token": 1.0, "s": 1000.0},
    "share": {"%": 0.01},
    "tokens/s": {"": 1.0, "tokens/s": 1.0, "tok/s": 1.0},
    "1/s": {"": 1.0, "/s": 1.0, "1/s": 1.0},
    "1": {"": 1.0},
    "tokens": {"": 1.0, "tokens": 1.0},
    "Mbit/s": {"": 1.0, "Mbit/s": 1.0},
}
_EXAMPLES = {"ms": "800ms or 0.8s", "ms/token": "50ms", "share": "1%"}
_LIMIT = re.compile(r"(?:(?P<of>[^<>=:]+):)?(?P<name>[a-z0-9_]+)\s*(?P<op><=|>=|<|>)\s*(?P<value>[^\s<>=]+)\s*", re.A)
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)\s*(.*)", re.A | re.S)


class Limit(NamedTuple):
    """One limit of an SLO. `value` in the metric's unit."""

    text: str  # as typed, without blanks
    metric: Metric
    op: Literal["<", "<=", ">", ">="]
    value: float
    of_class: str = ""  # only requests of this class; "": all

    @property
    def share(self) -> float | None:
        """The share of requests that have to meet it; None for one without a per-request part."""
        return QUANTILES.get(self.metric.reducer)

    @property
    def bound(self) -> Bound | None:
        """Its per-request part."""
        return Bound(self.metric.of, self.op, self.value, self.of_class) if self.share is not None else None


class Judged(NamedTuple):
    """A limit and what a cell says of it."""

    limit: Limit
    verdict: Verdict
    why: str  # the evidence in words; for UNDECIDED what is missing
    value: Value  # the metric itself
    attained: float | None  # share of (ok + failed + dropped) that met it; None without a per-request part
    low: float | None  # 95% interval: of the share, or of the figure
    high: float | None
    n: int  # requests, or sections, that decided


class Slo(NamedTuple):
    """A whole SLO. `deadlines`: D_ttft and D_tpot in ms, of fluidity and on_time_share."""

    limits: tuple[Limit, ...] = ()
    deadlines: tuple[float, float] | None = None

    def context(self, of_class: str = "") -> Context:
        """What metrics of all requests, or of those of one class, need of it."""
        mine = (limit.bound for limit in self.limits if not of_class or limit.of_class in ("", of_class))
        return Context(tuple(dict.fromkeys(b for b in mine if b is not None)), self.deadlines)

    @property
    def text(self) -> str:
        return ",".join(limit.text for limit in self.limits)


NO_SLO = Slo()


# ---- what is typed


def parse(text: str, deadlines: str = "") -> Slo:
    """`ttft_p95<800ms,chat:tpot_p95<=50ms,error_rate<1%`, or a name of PRESETS; `deadlines`: `ttft=800ms,tpot=50ms`.

    A limit's unit has to be said where a number alone could be meant in two. Raises BenchError.
    """
    limits: list[Limit] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if re.fullmatch(r"[\w.-]+", part) and part not in PRESETS:
            raise BenchError(f"--slo {part!r}: a limit such as ttft_p95<800ms, or a preset: {', '.join(PRESETS)}")
        limits += [_limit(p) for p in PRESETS.get(part, part).split(",")]
    of_all = [limit.metric.name for limit in limits if limit.metric.name in OF_LIMITS]
    if of_all and not any(limit.bound for limit in limits):
        raise BenchError(f"--slo: {of_all[0]} counts requests within limits, expected one too, such as ttft_p95<800ms")
    named = [(limit.of_class, limit.metric.name, limit.op[0]) for limit in limits]
    for limit, name in zip(limits, named, strict=True):
        if named.count(name) > 1:
            raise BenchError(f"--slo: {limit.metric.name} has two limits, expected one")
    return Slo(tuple(limits), _deadlines(deadlines) if deadlines else _implied(limits))


def _limit(text: str) -> Limit:
    match = _LIMIT.fullmatch(text)
    if match is None:
        near = "" if "=" not in text else "; < or <=, as in ttft_p95<=800ms"
        raise BenchError(f"--slo {text!r}: expected [class:]metric<value such as ttft_p95<800ms{near}")
    metric = metrics.parse(match["name"])
    if metric.reducer == "std":
        raise BenchError(f"--slo {text!r}: a spread has no limit; expected a percentile, mean, max or a cell's figure")
    expected = "<" if metric.better == "lower" else ">"
    if match["op"][0] != expected:
        raise BenchError(
            f"--slo {text!r}: of {metric.name} {metric.better} is better, expected {expected} or {expected}="
        )
    value = _quantity(match["value"], metric.unit, f"--slo {text!r}")
    shown = "".join(text.split())
    return Limit(shown, metric, match["op"], value, (match["of"] or "").strip())  # type: ignore[arg-type]


def _quantity(text: str, unit: str, where: str) -> float:
    """A number with its unit, in `unit`."""
    match, known = _NUMBER.fullmatch(text), _UNITS[unit]
    right = _EXAMPLES.get(unit, "50")
    if match is None:
        raise BenchError(f"{where}: {text!r} is not a number, expected one such as {right}")
    number, suffix = float(match[1]), match[2].strip()
    if suffix not in known:
        what = f"the unit {suffix!r}" if suffix else "a number without its unit"
        raise BenchError(f"{where}: {what}, expected {right}")
    value = number * known[suffix]
    if not math.isfinite(value) or (unit == "share" and value > 1):
        raise BenchError(f"{where}: {text} is more than it can be")
    return value


def _deadlines(text: str) -> tuple[float, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("ttft", "tpot") or name in found:
            raise BenchError(f"--deadlines {text!r}: expected ttft=800ms,tpot=50ms")
        found[name] = _quantity(value.strip(), "ms", f"--deadlines {text!r}")
    if len(found) < 2 or not found["tpot"]:
        raise BenchError(f"--deadlines {text!r}: expected both, ttft=800ms,tpot=50ms, and a tpot over 0")
    return found["ttft"], found["tpot"]


def _implied(limits: Sequence[Limit]) -> tuple[float, float] | None:
    """The strictest per-request limits on TTFT and TPOT, where the SLO has both for all requests."""
    mine = [limit for limit in limits if limit.bound and not limit.of_class]
    of = {name: min((x.value for x in mine if x.metric.of == name), default=0.0) for name in ("ttft", "tpot")}
    return (of["ttft"], of["tpot"]) if of["ttft"] and of["tpot"] else None


# ---- what a cell says


def judge(
    cell: Cell, window: Window, agreed: Slo, *, client_limited: bool = False, by_client: bool | None = None
) -> list[Judged]:
    """Each limit of the SLO against one cell.

    `client_limited`: latencies are upper bounds and throughput a lower one: a limit can be called missed only by
    failures that are not this client's doing. `by_client`: what `windows.by_client` says, where it was asked before.
    """
    alone = (cell.header.get("load") or {}).get("class_alone") or ""  # the limits of other classes say nothing of it
    mine = (limit for limit in agreed.limits if not alone or limit.of_class in ("", alone))
    if by_client is None:
        by_client = windows.by_client(cell, window, client_limited)
    grown = windows.BY_CLIENT if by_client else ""
    return [_judge(cell, window, limit, agreed, client_limited, grown) for limit in mine]


def of_class(cell: Cell, name: str) -> Cell:
    """The requests of one class alone."""
    return cell.only(cell.among("request_class", name))


def _judge(cell: Cell, window: Window, limit: Limit, agreed: Slo, client_limited: bool, grown: str) -> Judged:
    if limit.of_class:
        cell = of_class(cell, limit.of_class)
    value = metrics.compute(limit.metric.name, cell, window, agreed.context(limit.of_class))
    found = _share(cell, window, limit, value, agreed) if limit.bound else _figure(cell, window, limit, value, agreed)
    return _reserve(found, cell, window, client_limited, grown)


def _share(cell: Cell, window: Window, limit: Limit, value: Value, agreed: Slo) -> Judged:
    assert limit.bound is not None
    assert limit.share is not None
    got = slo.attainment(cell, window, [limit.bound], agreed.context(limit.of_class))
    if got.share is None or not got.ess:
        none = "no request that decides it was due in the window"
        if got.hidden:
            none += f"; of {got.hidden:,} it is hidden ({', '.join(got.hidden_by)})"
        return Judged(limit, "UNDECIDED", none, value, None, None, None, 0)
    open_ = got.decided + got.undecided
    low = stats.wilson(got.met / open_ * got.ess, got.ess).low
    high = stats.wilson((got.met + got.undecided) / open_ * got.ess, got.ess).high
    verdict: Verdict = "MET" if low >= limit.share else "MISSED" if high < limit.share else "UNDECIDED"
    op = limit.text.index(limit.op)
    why = (
        f"{got.met:,} of {got.decided:,} met {limit.bound.series}{limit.text[op:]}: {got.share:.2%}, "
        f"95% interval {low:.2%} to {high:.2%} (ESS {got.ess:.0f}), {100 * limit.share:.4g}% asked"
    )
    if cut := got.undecided - got.hidden:
        why += f"; {cut:,} cut ones are undecided"
    if got.hidden:
        why += f"; of {got.hidden:,} it is hidden ({', '.join(got.hidden_by)})"
    if verdict == "UNDECIDED":
        seen = got.decided + got.hidden  # a longer run has no more that are cut, and as large a part that is hidden
        why += f"; {_more(got.met / seen, (got.met + got.hidden) / seen, limit.share, got.ess, seen)}"
    return Judged(limit, verdict, why, value, got.share, low, high, got.decided)


def _more(least: float, most: float, asked: float, ess: float, n: int) -> str:
    """How many requests it would take, at this share and dependence, until the interval is clear of what is asked.

    The share is `least` were all hidden ones to miss, `most` were all to meet: with what is asked between the two, no
    number of requests decides it.
    """
    near = 1e-3 * min(asked, 1 - asked)
    if least < asked + near and most > asked - near:
        if least < most:
            return "no number of requests would decide it while so many are hidden"
        return "the share is what is asked: no number of requests is sure to decide it"
    for factor in range(2, 1001):
        samples = ess * factor
        low, high = stats.wilson(least * samples, samples).low, stats.wilson(most * samples, samples).high
        if low >= asked or high < asked:
            return f"about {n * factor:,} requests would decide it"
    return "not even a thousand times as many requests would decide it"


def _figure(cell: Cell, window: Window, limit: Limit, value: Value, agreed: Slo) -> Judged:
    if value.value is None:
        return Judged(limit, "UNDECIDED", value.reason, value, None, None, None, 0)
    within = slo.WITHIN[limit.op]
    shown = _shown(value.value, value.unit)
    if limit.metric.reducer in ("max", "min"):
        lost = int((due_in(cell, window) & outcome_in(cell, "failed", "dropped")).sum())
        why = f"{shown}, of the {counted(value.n, 'request')} measured"
        if lost and limit.metric.better == "lower":  # a failure ranks above every latency
            why = f"{lost:,} failed or {'was' if lost == 1 else 'were'} dropped; {why}"
            return Judged(limit, "MISSED", why, value, None, None, None, value.n)
        verdict: Verdict = "MET" if within(np.array(value.value), limit.value) else "MISSED"
        return Judged(limit, verdict, why, value, None, None, None, value.n)
    spread = _SHARES[limit.metric.name](cell, window) if limit.metric.name in _SHARES else value.interval
    n = value.n
    if spread is None:
        parts = _sections(cell, window, limit, agreed)
        if parts is None:
            why = f"{shown}: a tenth of the window has no such figure, so that its spread is not known"
            return Judged(limit, "UNDECIDED", why, value, None, None, None, n)
        half = stats.T9 * float(np.std(parts, ddof=1)) / math.sqrt(SECTIONS)
        spread, n = Interval(value.value - half, value.value + half), SECTIONS
    sides = [bool(within(np.array(edge), limit.value)) for edge in spread]
    verdict = "MET" if all(sides) else "UNDECIDED" if any(sides) else "MISSED"
    why = f"{shown}, 95% interval {_shown(spread.low, value.unit)} to {_shown(spread.high, value.unit)}"
    if verdict == "UNDECIDED" and limit.metric.name in _SHARES:
        why += f"; {_more(value.value, value.value, limit.value, float(n), n)}"
    return Judged(limit, verdict, why, value, None, spread.low, spread.high, n)


def _shown(value: float, unit: str) -> str:
    return f"{value:.2%}" if unit == "share" else f"{value:.4g} {unit}".removesuffix(" 1")


def _sections(cell: Cell, window: Window, limit: Limit, agreed: Slo) -> np.ndarray | None:
    """The figure in each tenth of the window; None where one of them has none."""
    edges = np.linspace(window.start_ns, window.end_ns, SECTIONS + 1).astype(np.int64).tolist()
    found = []
    for start, end in pairwise(edges):
        part = replace(window, start_ns=start, end_ns=end)
        found.append(metrics.compute(limit.metric.name, cell, part, agreed.context(limit.of_class)).value)
    return None if None in found else np.array(found, float)


def _counted(name: str, part: Sequence[str], of: Sequence[str]) -> Callable[[Cell, Window], Interval | None]:
    def interval(cell: Cell, window: Window) -> Interval | None:
        """Wilson on the effective number of requests: those of one burst fail together."""
        rows = due_in(cell, window) & (outcome_in(cell, *of) if of else True)
        hits = cell.among(name, *part)[rows]
        if not len(hits):
            return None
        share = float(hits.mean())
        ess = stats.ess_of(hits, share * (1 - share)) if 0 < share < 1 else float(len(hits))
        return stats.wilson(share * ess, ess)

    return interval


_SHARES: Mapping[str, Callable[[Cell, Window], Interval | None]] = {
    "error_rate": _counted("outcome", ["failed"], ["ok", "failed"]),
    "first_attempt_success": _counted("first_attempt", ["ok"], ["ok", "failed"]),
    "cancel_rate": _counted("outcome", ["cancelled"], []),
    "drop_rate": _counted("outcome", ["dropped"], []),
}


def _reserve(found: Judged, cell: Cell, window: Window, client_limited: bool, grown: str) -> Judged:
    """What a cell's state takes from a verdict. `grown`: what a backlog may come of, where not of the target."""
    better = SERIES[found.limit.metric.of].better if found.limit.metric.reducer else WHOLE[found.limit.metric.of].better
    reserve = ""
    none_ok = not (due_in(cell, window) & outcome_in(cell, "ok")).any()
    if (not window.opened or window.state == windows.TOO_SHORT) and not (none_ok and found.verdict == "MISSED"):
        reserve = "the window is too short" if window.opened else "the window never opened"
    elif window.state == windows.GROWING and found.verdict == "MET":
        reserve = f"the backlog grows by {window.growth:.3g} requests/s"
        reserve += f", {grown}" if grown else ": a longer run would be slower"
    elif client_limited and found.verdict == "MISSED" and not failed_by_target(found.limit, cell, window):
        metric = found.limit.metric
        which = metric.name if metric.unit == "share" else "latency" if better == "lower" else "throughput"
        reserve = f"this client was the limit, so that the target's own {which} may be better"
    if not reserve or found.verdict == "UNDECIDED":
        return found._replace(why=f"{found.why}; {reserve}" if reserve else found.why)
    return found._replace(verdict="UNDECIDED", why=f"{reserve} (else {found.verdict}: {found.why})")


# Failures that a late or stalled client has no part in: the target's own word, or nobody who listens. Time-outs run in
# this client's time, and a stream may be cut off for being read too slowly.
_OWN_WORD = ("connect_error", "http_4xx", "empty_output", "short_output")
_TOO_SLOW = 408  # the server waited for the request, which this client sent late or in parts
_OVERLOADED = ("rejected", "http_5xx", "server_error_in_stream")  # may come of heaps, as a late open loop sends them


def failed_by_target(limit: Limit, cell: Cell, window: Window) -> bool:
    """Do failures that are not this client's doing miss a limit by themselves, all others taken for good?

    Its lateness takes none of them away and adds none: a lower bound of the share that failed. A closed loop never has
    more at the target than was asked for, however late; so there refusals and errors under load count too.
    """
    if limit.share is None and limit.metric.name != "error_rate":
        return False
    closed = (cell.header.get("load") or {}).get("kind") == "closed"
    kinds = _OWN_WORD + _OVERLOADED if closed else _OWN_WORD
    judged = due_in(cell, window) & outcome_in(cell, "ok", "failed", *(("dropped",) if limit.share else ()))
    own = cell.among("error_kind", *kinds) & (cell["status"] != _TOO_SLOW)
    failed = (outcome_in(cell, "failed") & own)[judged]
    if not failed.any():
        return False
    share = float(failed.mean())
    ess = stats.ess_of(failed, share * (1 - share)) if share < 1 else float(len(failed))
    allowed = limit.value if limit.share is None else 1 - limit.share
    return stats.wilson(share * ess, ess).low > allowed
