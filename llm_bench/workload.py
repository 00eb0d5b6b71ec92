"""What a trace holds, in figures: arrivals, lengths, clients, sessions and shared prefixes, as the field names them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llm_bench import prefixes, ticks
from llm_bench.request import Request, Trace
from llm_bench.sheet import Rows, Sheet, of, prompts, sheet
from llm_bench.stats import percentile

WINDOW_S = 60
LEAST_IN_WINDOW = 20  # arrivals: the CV of fewer gaps says little
LEAST_WINDOWS = 10  # whole ones: the variance of fewer counts says little
DISPERSION_S = (1, 10, 60)
PROFILE = 10  # equal parts of the span
LEAST_FOR_RHO = 3
LADDER = sorted(n * 10**k for k in range(1, 10) for n in (1, 3, 5))  # blocks of a cache
CAPACITIES = 7  # of the ladder, the largest that are smaller than all blocks together


@dataclass(frozen=True)
class Quantiles:
    """Of n values by numpy's `linear` method; in the values' own unit."""

    n: int
    min: float
    p50: float
    p95: float
    p99: float
    max: float
    mean: float


@dataclass(frozen=True)
class Arrivals:
    """Of the rows with a time of their own, later turns of sessions among them."""

    n: int
    span_s: float  # first to last
    rate: float | None  # n / span, per second
    rates: list[float]  # per second, in each tenth of the span; [] where there is no span
    cv: float | None  # of all gaps
    cv_window: list[float] | None  # p10, p50, p90 of the CV inside each window of 60 s with 20 arrivals or more
    dispersion: dict[str, float | None]  # variance over mean of the counts in whole windows of so many seconds
    instants: int  # distinct stamps
    tick_s: float | None  # the step of the ticks that stamps stand on
    cv_spread: float | None  # the two CVs with arrivals at random places inside their tick; None without ticks
    cv_window_spread: list[float] | None


@dataclass(frozen=True)
class Sessions:
    """Of the conversations that have a name."""

    sessions: int
    several: int  # of more than one turn
    turns: Quantiles
    think_s: Quantiles | None  # of the later turns that have a pause


@dataclass(frozen=True)
class Sharing:
    """Of the rows with hash ids. A block is hit where the same prefix came before, a partial last block too."""

    block_size: int  # tokens; the largest, where rows differ
    blocks: int
    distinct: int
    block_hits: float  # share of blocks that an endless cache hits
    token_hits: float  # share of all prompt tokens in them
    token_hits_full: float  # share of all prompt tokens in full blocks hit
    lru: list[tuple[int, float]]  # (blocks of an LRU cache, share of blocks hit)


@dataclass(frozen=True)
class Workload:
    """describe(trace); a figure that is not defined is None, and `reasons` says why, by its name."""

    n: int
    arrivals: Arrivals
    tokens_in: Quantiles | None  # of known lengths
    tokens_out: Quantiles | None
    spearman: float | None  # rank correlation of the two lengths, ties at their average rank
    clients: int
    top_client_share: float | None  # of all rows
    classes: dict[str, int]  # request class -> rows; {} where no row has one
    models: dict[str, int]
    sessions: Sessions | None
    sharing: Sharing | None
    reasons: dict[str, str]


def describe(trace: Trace | Sheet) -> Workload:
    """Every figure of a trace's requests, deterministic; 0 < len(trace.requests).

    Arrival statistics are of the stamps as they stand in the trace; cv_spread and cv_window_spread are those of the
    same stamps at uniformly random places inside their ticks (seed 0).
    """
    rows = sheet(trace).rows
    reasons: dict[str, str] = {}
    arrivals = _arrivals(stamps(rows), reasons)
    tokens_in, tokens_out = (quantiles(known) for known in lengths(rows))
    if tokens_in is None:
        reasons["tokens_in"] = "no row says its prompt's length"
    if tokens_out is None:
        reasons["tokens_out"] = "no row says its answer's length"
    rho = spearman(*pairs(rows))
    if rho is None:
        reasons["spearman"] = f"fewer than {LEAST_FOR_RHO} rows have both lengths, or one is the same in all"
    by_client = _counts(rows, "client")
    if not by_client:
        reasons["top_client_share"] = "no row says who sent it"
    sessions = _sessions(rows)
    if sessions is None:
        reasons["sessions"] = "no row belongs to a session"
    sharing = _sharing(rows)
    if sharing is None:
        reasons["sharing"] = "no row has hash ids"
    return Workload(
        n=rows.n,
        arrivals=arrivals,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        spearman=rho,
        clients=len(by_client),
        top_client_share=max(by_client.values()) / rows.n if by_client else None,
        classes=_counts(rows, "request_class"),
        models=_counts(rows, "model"),
        sessions=sessions,
        sharing=sharing,
        reasons=reasons,
    )


def _counts(rows: Rows, label: str) -> dict[str, int]:
    """Name -> rows, the most frequent first, ties in order of their first rows."""
    if label not in rows:
        return {}
    codes = rows[label]
    found, first, n = np.unique(codes[codes >= 0], return_index=True, return_counts=True)
    names = rows.names[label]
    return {names[found[i]]: int(n[i]) for i in np.lexsort((first, -n)).tolist()}


# -- arrivals ---------------------------------------------------------------------------------------------------------


def stamps(requests: Sequence[Request] | Rows) -> np.ndarray:
    """Seconds since the first request, (n,) in order, of the rows with a time of their own."""
    rows = of(requests)
    if "at_s" not in rows:
        return np.empty(0)
    at_s = rows["at_s"]
    untimed = np.isnan(at_s)
    return at_s[~untimed] if untimed.any() else at_s


def _arrivals(at_s: np.ndarray, reasons: dict[str, str]) -> Arrivals:
    n, span = len(at_s), float(at_s[-1] - at_s[0]) if len(at_s) else 0.0
    cv = ticks.inter_arrival_cv(at_s)
    cv_window = window_cv(at_s)
    by_window = {str(w): dispersion(at_s, w) for w in DISPERSION_S}
    if not span:
        reasons["rate"] = "all rows share one instant" if n > 1 else "fewer than two rows have a time"
    if cv is None:
        reasons["cv"] = reasons.get("rate", "fewer than three rows have a time")
    if cv_window is None:
        reasons["cv_window"] = f"no {WINDOW_S} s have {LEAST_IN_WINDOW} arrivals"
    for name, value in by_window.items():
        if value is None:
            reasons[f"dispersion {name} s"] = f"the span has fewer than {LEAST_WINDOWS} windows of {name} s"
    tick = ticks.step_s(at_s)
    apart = None if tick is None else ticks.spread(at_s, tick, 0)
    return Arrivals(
        n=n,
        span_s=span,
        rate=n / span if span else None,
        rates=[float(x) for x in np.histogram(at_s, PROFILE)[0] / (span / PROFILE)] if span else [],
        cv=cv,
        cv_window=cv_window,
        dispersion=by_window,
        instants=len(np.unique(at_s)),
        tick_s=tick,
        cv_spread=None if apart is None else ticks.inter_arrival_cv(apart),
        cv_window_spread=None if apart is None else window_cv(apart),
    )


def window_cv(at_s: np.ndarray) -> list[float] | None:
    """p10, p50, p90 of the CV of the gaps inside windows of 60 s, counted from the first of stamps (n,) in order.

    Windows with 20 arrivals or more count, the last, cut one among them; gaps over a window's edge do not. None without
    such a window. Where a rate varies slowly this tells burstiness from that: a Poisson stream has 1 in each window.
    """
    if not len(at_s):
        return None
    edges = np.flatnonzero(np.diff((at_s - at_s[0]) // WINDOW_S)) + 1
    parts = [part for part in np.split(at_s, edges) if len(part) >= LEAST_IN_WINDOW]
    cvs = [cv for part in parts if (cv := ticks.inter_arrival_cv(part)) is not None]
    return [percentile(np.array(cvs), q) for q in (0.1, 0.5, 0.9)] if cvs else None


def dispersion(at_s: np.ndarray, window_s: float) -> float | None:
    """Variance (ddof 0) over mean of the arrivals in each whole window of the span; 1 for a Poisson stream.

    None where the span has fewer than ten such windows. Also called the index of dispersion of counts, or Fano factor.
    """
    if not len(at_s):
        return None
    since = at_s - at_s[0]
    whole = int(since[-1] // window_s)
    if whole < LEAST_WINDOWS:
        return None
    _, counts = np.unique((since // window_s).astype(np.int64), return_counts=True)
    inside = counts[:-1].astype(float)  # the last stamp always stands in the cut window
    mean = inside.sum() / whole  # windows without any arrival are not in `counts`: in a trace of years they fill GB
    return float(((inside - mean) ** 2).sum() + (whole - len(inside)) * mean**2) / whole / float(mean)


# -- lengths ----------------------------------------------------------------------------------------------------------


def lengths(requests: Sequence[Request] | Rows) -> tuple[np.ndarray, np.ndarray]:
    """Known prompt lengths and known answer lengths in tokens; a given text of unknown length is in neither."""
    rows = of(requests)
    tokens_in, tokens_out = rows["tokens_in"], rows["tokens_out"]
    return tokens_in[tokens_in > 0].astype(float), tokens_out[tokens_out >= 0].astype(float)


def pairs(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and answer tokens of the rows that say both."""
    both = (rows["tokens_in"] > 0) & (rows["tokens_out"] >= 0)
    return rows["tokens_in"][both].astype(float), rows["tokens_out"][both].astype(float)


def quantiles(values: np.ndarray) -> Quantiles | None:
    if not len(values):
        return None
    low, p50, p95, p99, high = (percentile(values, q) for q in (0, 0.5, 0.95, 0.99, 1))
    return Quantiles(len(values), low, p50, p95, p99, high, float(values.mean()))


def spearman(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's correlation of the ranks of x and y, (n,) each, ties at their average rank; None if undefined."""
    if len(x) < LEAST_FOR_RHO or not np.ptp(x) or not np.ptp(y):
        return None
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[which])


# -- conversations and prefixes ---------------------------------------------------------------------------------------


def _sessions(rows: Rows) -> Sessions | None:
    counts = turn_counts(rows)
    turns = quantiles(counts)
    if turns is None:
        return None
    think_s = rows["think_s"][(rows["session"] >= 0) & (rows["turn"] > 0)]
    return Sessions(turns.n, int((counts > 1).sum()), turns, quantiles(think_s[~np.isnan(think_s)]))


def turn_counts(requests: Sequence[Request] | Rows) -> np.ndarray:
    """Turns of each named session, in the order in which the file names them."""
    session = of(requests)["session"]
    return np.unique(session[session >= 0], return_counts=True)[1].astype(float)


def _sharing(rows: Rows) -> Sharing | None:
    found = prefixes.blocks(prompts(rows)) if "blocks" in rows else None
    if found is None or not len(found.nodes) or not found.prompt_tokens:
        return None
    bound = prefixes.infinite(found)
    capacities = [c for c in LADDER if c < bound.distinct][-CAPACITIES:]
    return Sharing(
        block_size=int(rows["block_size"].max()),
        blocks=bound.blocks,
        distinct=bound.distinct,
        block_hits=bound.blocks_hit / bound.blocks,
        token_hits=bound.tokens_hit / bound.tokens,
        token_hits_full=bound.tokens_hit_full / bound.tokens,
        lru=list(zip(capacities, prefixes.lru_curve(found, capacities), strict=True)),
    )
