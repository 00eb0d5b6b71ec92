"""Requests against per-request limits: how many met all of them, how many cannot be judged, and how sure that is."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import stats
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.series import HIDDEN, NOTHING, SERIES, Bound, Column, Context, due_in, elapsed_ms, outcome_in, stamp
from llm_bench.windows import Window


class Attainment(NamedTuple):
    """How many requests due in the window met every limit, and how sure that is."""

    met: int
    decided: int  # ok + failed + dropped + those cut requests whose stamps or age already break a limit
    undecided: int  # other cut requests, and the hidden ones
    share: float | None  # met / decided
    lower: float | None  # were all undecided to miss
    upper: float | None  # were all undecided to meet
    interval: stats.Interval | None  # Wilson on the effective sample size
    each: Mapping[Bound, tuple[int, int]]  # limit -> met, of those it applies to; a failure misses each
    hidden: int = 0  # of undecided: burst delivery or several choices hide whether they met it
    ess: float = 0.0  # of the interval


def attainment(cell: Cell, window: Window, limits: Sequence[Bound], context: Context = NOTHING) -> Attainment:
    """Requests due in the window against per-request limits, all of which each has to meet.

    A limit that does not apply is met. Where there is such a figure and it is hidden (burst delivery, several choices)
    the request is undecided, unless it breaks another limit. Raises BenchError for an unknown series.
    """
    rows = due_in(cell, window)
    ok, cut = rows & outcome_in(cell, "ok"), rows & outcome_in(cell, "cut_at_end")
    lost = rows & outcome_in(cell, "failed", "dropped")
    met, broken, each, least_ess = ok.copy(), np.zeros(cell.n, bool), {}, np.inf
    could = ok.copy()  # meet all limits, were what is hidden to meet them
    for bound in limits:
        column = _per_request(cell, bound.series, context)
        values = column.values
        hidden = np.logical_or.reduce([column.why.get(reason, np.zeros(cell.n, bool)) for reason in HIDDEN])
        applies = ~np.isnan(values) | (hidden & (cell["tokens_out"] >= 2))
        bound_by = cell.among("request_class", bound.of_class) if bound.of_class else np.ones(cell.n, bool)
        applies &= bound_by
        fine = np.asarray(WITHIN[bound.op](values, bound.value))
        met &= fine | ~applies
        could &= fine | np.isnan(values) | ~bound_by
        each[bound] = (int((ok & fine & bound_by).sum()), int((ok & applies).sum() + (lost & bound_by).sum()))
        least = _censored(cell, bound.series, values)
        broken |= cut & bound_by & ~np.isnan(least) & ~WITHIN[bound.op](least, bound.value)
        if (ok & ~np.isnan(values)).any():
            least_ess = min(least_ess, stats.ess(values[ok & ~np.isnan(values)], 0.95))
    hidden_ = could & ~met
    judged = (ok & ~hidden_) | lost | broken
    k, n, open_ = int(met.sum()), int(judged.sum()), int((cut & ~broken).sum()) + int(hidden_.sum())
    if not n + open_:
        return Attainment(0, 0, 0, None, None, None, None, each)
    share = k / n if n else None
    if share is not None and 0 < share < 1:
        least_ess = stats.ess_of(met[judged], share * (1 - share))
    interval = stats.wilson(share * min(least_ess, n), min(least_ess, n)) if share is not None else None
    lower, upper = k / (n + open_), (k + open_) / (n + open_)
    return Attainment(k, n, open_, share, lower, upper, interval, each, int(hidden_.sum()), float(min(least_ess, n)))


def _per_request(cell: Cell, name: str, context: Context) -> Column:
    if name not in SERIES:
        raise BenchError(f"limit on {name!r}: no such series; known are {', '.join(SERIES)}")
    return SERIES["stall" if name == "itl" else name].of(cell, context)  # every gap within the limit: so is the longest


WITHIN: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}


def _censored(cell: Cell, name: str, values: np.ndarray) -> np.ndarray:
    """A lower bound, for requests cut at the end, of what the series would have become; nan where there is none."""
    if name in ("ttft", "ttft_sent", "ttfo", "e2e", "e2e_sent"):
        age = elapsed_ms(stamp(cell, "end_ns"), stamp(cell, "sent_ns" if name.endswith("_sent") else "due_ns"))
        return age if name.startswith("e2e") else np.where(np.isnan(values), age, values)
    return (
        values if name in ("itl", "stall", "lag", "lag_wait", "lag_connect", "lag_client") else np.full(cell.n, np.nan)
    )
