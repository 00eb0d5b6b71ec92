"""Requests against per-request limits: how many met all of them, how many cannot be judged, and how sure that is."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import stats
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.series import (
    HIDDEN,
    NOTHING,
    ONE_STAMP,
    SERIES,
    SEVERAL,
    Bound,
    Column,
    Context,
    due_in,
    elapsed_ms,
    outcome_in,
    single_pass,
    stamp,
)
from llm_bench.windows import Window

# What is made of the times between tokens, or a token: one result of a single pass has neither.
OF_TOKENS = ("tpot", "tpot_decode", "itl", "stall", "output_speed", "normalized_latency", "server_tpot")


class Attainment(NamedTuple):
    """How many requests due in the window met every limit, and how sure that is."""

    met: int
    decided: int  # ok + failed + dropped + those cut requests whose stamps or age already break a limit
    undecided: int  # other cut requests, and the hidden ones
    share: float | None  # met / decided
    lower: float | None  # were all undecided to miss
    upper: float | None  # were all undecided to meet
    interval: stats.Interval | None  # Wilson on the effective sample size
    hidden: int = 0  # of undecided: what the limit is on exists and is not known
    ess: float = 0.0  # of the interval
    hidden_by: tuple[str, ...] = ()  # why it is not known, of HIDDEN


def attainment(cell: Cell, window: Window, limits: Sequence[Bound], context: Context = NOTHING) -> Attainment:
    """Requests due in the window against per-request limits, all of which each has to meet.

    A limit that does not apply is met. Where there is such a figure and it is hidden (burst delivery, several choices,
    an answer that came whole or without a token of answer, a server that says nothing of its queue, deadlines that
    nobody gave) the request is undecided, unless it breaks another limit. Raises BenchError for an unknown series.
    """
    rows = due_in(cell, window)
    ok, cut = rows & outcome_in(cell, "ok"), rows & outcome_in(cell, "cut_at_end")
    lost = rows & outcome_in(cell, "failed", "dropped")
    against = [_against(cell, bound, context) for bound in limits]
    met, broken, least_ess = _all_met(ok, against), np.zeros(cell.n, bool), np.inf
    could = ok.copy()  # meet all limits, were what is hidden to meet them
    hidden_by: dict[str, np.ndarray] = {}
    for bound, of in zip(limits, against, strict=True):
        values, fine, _, bound_by, unknown = of
        for reason, mine in unknown.items():
            hidden_by[reason] = hidden_by.get(reason, np.zeros(cell.n, bool)) | (mine & bound_by)
        could &= fine | np.isnan(values) | ~bound_by
        least = _censored(cell, bound.series, values)
        broken |= cut & bound_by & ~np.isnan(least) & ~WITHIN[bound.op](least, bound.value)
        if (ok & ~np.isnan(values)).any():
            least_ess = min(least_ess, stats.ess(values[ok & ~np.isnan(values)], 0.95))
    hidden_ = could & ~met
    judged = (ok & ~hidden_) | lost | broken
    k, n, open_ = int(met.sum()), int(judged.sum()), int((cut & ~broken).sum()) + int(hidden_.sum())
    if not n + open_:
        return Attainment(0, 0, 0, None, None, None, None)
    share = k / n if n else None
    if share is not None and 0 < share < 1:
        least_ess = stats.ess_of(met[judged], share * (1 - share))
    interval = stats.wilson(share * min(least_ess, n), min(least_ess, n)) if share is not None else None
    lower, upper = k / (n + open_), (k + open_) / (n + open_)
    why = tuple(reason for reason, mine in hidden_by.items() if (mine & hidden_).any())
    return Attainment(k, n, open_, share, lower, upper, interval, int(hidden_.sum()), float(min(least_ess, n)), why)


def met_in(cell: Cell, window: Window, limits: Sequence[Bound], context: Context = NOTHING) -> np.ndarray:
    """Mask (n,) of the ok requests due in the window that met every limit: those that attainment counts."""
    ok = due_in(cell, window) & outcome_in(cell, "ok")
    return _all_met(ok, [_against(cell, bound, context) for bound in limits])


class _Against(NamedTuple):
    """Each request against one limit; masks (n,)."""

    values: np.ndarray
    fine: np.ndarray  # within it
    applies: np.ndarray  # it binds the request, and there is such a figure, known or not
    bound_by: np.ndarray  # of its class
    unknown: Mapping[str, np.ndarray]


def _all_met(ok: np.ndarray, against: Sequence[_Against]) -> np.ndarray:
    """Mask (n,) of those of `ok` that met every limit that applies to them."""
    return np.asarray(np.logical_and.reduce([ok, *(of.fine | ~of.applies for of in against)]))


def _against(cell: Cell, bound: Bound, context: Context) -> _Against:
    column = _per_request(cell, bound.series, context)
    values, unknown = column.values, _unknown(cell, bound.series, column)
    bound_by = cell.among("request_class", bound.of_class) if bound.of_class else np.ones(cell.n, bool)
    applies = np.logical_or.reduce([~np.isnan(values), *unknown.values()]) & bound_by
    return _Against(values, np.asarray(WITHIN[bound.op](values, bound.value)), applies, bound_by, unknown)


def _unknown(cell: Cell, name: str, column: Column) -> dict[str, np.ndarray]:
    """By reason of HIDDEN, the requests (n,) that have such a figure, which is not known; the first of each counts."""
    if name in OF_TOKENS and single_pass(cell):
        return {}
    found, said = {}, np.zeros(cell.n, bool)
    for reason, mask in column.why.items():
        mine, said = mask & ~said, said | mask
        if reason in (ONE_STAMP, SEVERAL):
            mine &= cell["tokens_out"] >= 2
        if reason in HIDDEN:
            found[reason] = mine
    return found


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
