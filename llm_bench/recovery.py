"""What a fault did to a cell and when it was over, from the records alone; pure.

A request belongs to the moment at which it was due. The fault is over at the first due time t from which on, for one
rolling window after the other, [t, t + W), error rate and TTFT p95 (not streamed: e2e) are within the SLO's limits on
them and no more than TOLERANCE (or LEAST_MS) worse than the worst such window before the first fault. A bad
request at t itself moves t to the next, so that a sharp end is found to within one gap between requests. What is as
short as a twentieth of W, or of as few requests, a p95 cannot see.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import outcomes, stats, windows
from llm_bench.columns import Cell
from llm_bench.faults import Done, Log
from llm_bench.objectives import Limit
from llm_bench.series import NOTHING, SERIES, outcome_in
from llm_bench.windows import Window

RECOVERED, DEGRADED, NOT_RECOVERED = "RECOVERED", "DEGRADED", "NOT RECOVERED"
NO_EFFECT, UNDECIDED = "NO EFFECT SEEN", "UNDECIDED"
GONE = "the target no longer answered"
TOLERANCE = 0.10
LEAST_MS = 5.0  # or so much, where a tenth is less: the client's own lateness is of this order on a busy machine
QUANTILE = 0.95
LEAST = 20  # requests of a window: of fewer the p95 is the slowest one
ROLLING_S = 1.0  # W, where the load has LEAST requests in it
BEFORE_WINDOWS = 400  # looked at before the first fault, evenly spread
RELAPSES = 0.10  # of the windows after a recovery that may be bad by chance
SILENCE = 3.0  # times the longest silence before: then no token came because of the fault
LEAST_SILENCE_S = 0.1
TIMEOUTS = ("connect_timeout", "ttft_timeout", "stall_timeout", "total_timeout")


class Before(NamedTuple):
    """The cell before its first fault, its warm-up left out."""

    requests: int
    window_s: float  # W
    error_rate: float  # of the worst window
    ttft_p95_ms: float
    in_system: int  # the most
    silence_s: float  # the longest without a token


class Queue(NamedTuple):
    """How the target turned requests away, first attempts included."""

    refused: int  # connections
    busy: int  # HTTP 429
    unavailable: int  # HTTP 503
    other_5xx: int
    timeouts: int
    cut: int  # connections that ended in the middle, or before any byte
    again: int  # requests that were tried again
    saved: int  # of them, ok at last
    waited_s: float  # between their attempts

    @property
    def retry_after(self) -> str:
        """Whether Retry-After was honoured: this client does so whenever it retries; records do not hold the header."""
        if not self.busy + self.unavailable:
            return "nothing to honour"
        return "honoured wherever it was sent" if self.again else "not honoured: no retries (--retries)"


class Recovery(NamedTuple):
    """One fault. Times in seconds since it began; None: never, or not known."""

    done: Done
    at_s: float | None  # when it began, since the first due time
    verdict: str
    why: str
    name: str  # ttft, or e2e of what is not streamed
    before: Before | None = None
    after_s: float | None = None  # when it was over
    first_error_s: float | None = None
    errors: tuple[str, ...] = ()  # by kind, in words
    failed: int = 0
    lost: int = 0  # sent, and not one byte came
    worst_ms: float | None = None  # p95 of the worst window
    silence_s: float = 0.0
    backlog: int = 0  # the most in the system: due and not ended
    drained_s: float | None = None  # when it was back at the most before
    attempts: int = 0
    requests: int = 0  # that these attempts were of: due from the fault until it was over
    queue: Queue | None = None

    @property
    def amplification(self) -> float | None:
        return self.attempts / self.requests if self.requests else None

    @property
    def resolution_s(self) -> float | None:
        return self.before.window_s if self.before else None


def of(
    cell: Cell,
    window: Window,
    log: Log | None,
    limits: Sequence[Limit] = (),
    reason: str = "",
    *,
    lateness: bool = True,
) -> list[Recovery]:
    """Each fault of a cell.

    `limits`: of the SLO; `reason`: what the cell ended by; `lateness`: whether the client's own is in the latencies.
    """
    if log is None:
        return []
    name = "ttft" if (cell.counts > 0).any() else "e2e"
    begun = [done for done in log.done if done.begun_ns]
    if not cell.n or not begun:
        return [Recovery(done, None, UNDECIDED, done.result or "nothing was recorded", name) for done in log.done]
    seen = _Seen(cell, name, lateness)
    before = _before(seen, window, begun[0].begun_ns)
    bounds = _bounds(before, limits, name)
    ends = [_next(begun[i:], int(seen.last_ns) + 1) for i in range(1, len(begun) + 1)]
    found = {
        id(done): _one(seen, done, end_ns, before, bounds, reason if end_ns > seen.last_ns else "next")
        for done, end_ns in zip(begun, ends, strict=True)
    }
    return [found.get(id(d)) or Recovery(d, None, UNDECIDED, d.result, name) for d in log.done]


def _next(later: Sequence[Done], last_ns: int) -> int:
    """When the next fault begins. What lets a process go on that was stopped is none: it ends one."""
    return next((done.begun_ns for done in later if not done.is_remedy), last_ns)


class _Seen:
    """A cell's requests in due order, and what is bad about each."""

    def __init__(self, cell: Cell, name: str, lateness: bool) -> None:
        self.cell, self.name = cell, name
        self.due = cell["due_ns"]
        self.failed = outcome_in(cell, "failed")
        values = SERIES[name].of(cell, NOTHING).values
        if not lateness:
            values = values - SERIES["lag_client"].of(cell, NOTHING).values
        cut, dropped = outcome_in(cell, "cut_at_end") & np.isnan(values), outcome_in(cell, "dropped")
        self.last_ns = max(int(cell["end_ns"].max()), int(self.due.max()))
        # Of what was cut without an answer the age is a lower bound; what was never attempted waited until the end.
        ended = np.where(dropped, self.last_ns, cell["end_ns"])
        self.ms = np.where(cut | dropped, (ended - self.due) / 1e6, values)
        self.ms[self.failed] = np.nan
        # What was given up at the cell's end never left the system: it drains nothing.
        self.ends = np.where(outcome_in(cell, "cut_at_end") | dropped, self.last_ns + 1, cell["end_ns"])
        self.judged = self.failed | ~np.isnan(self.ms)

    def slow(self, limit_ms: float) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return np.asarray(self.ms > limit_ms)

    def rolled(self, mask: np.ndarray, starts: np.ndarray, window_ns: int) -> np.ndarray:
        """How many requests of a mask are due in each [start, start + window)."""
        sums = np.concatenate([[0], np.cumsum(mask)])
        low, high = (np.searchsorted(self.due, at, "left") for at in (starts, starts + window_ns))
        return np.asarray(sums[high] - sums[low])

    def p95(self, start_ns: int, window_ns: int, rows: np.ndarray | None = None) -> float:
        """Of the requests of a mask, or of all, in a window; nan without any."""
        low, high = np.searchsorted(self.due, [start_ns, start_ns + window_ns], "left")
        values = self.ms[low:high] if rows is None else self.ms[low:high][rows[low:high]]
        values = values[~np.isnan(values)]
        return float(stats.percentile(values, QUANTILE)) if len(values) else math.nan

    def silence(self, start_ns: int, end_ns: int) -> tuple[int, int]:
        """The longest time [from, to) in a span in which no token came; not streamed: no answer."""
        if self.name == "e2e":
            came = [self.cell["end_ns"][outcome_in(self.cell, "ok")]]
        else:
            came = [piece.ns for piece in self.cell.pieces() if len(piece.ns)]
        found = [ns[(ns >= start_ns) & (ns < end_ns)] for ns in came]
        at = np.unique(np.concatenate([np.array([start_ns, end_ns], np.int64), *found]))
        longest = int(np.argmax(np.diff(at)))
        return int(at[longest]), int(at[longest + 1])


def _before(seen: _Seen, window: Window, begun_ns: int) -> Before | str:
    """Or why there is nothing to compare with."""
    start_ns = max(window.start_ns, int(seen.due[0])) if window.start_ns < begun_ns else int(seen.due[0])
    over = seen.ends < begun_ns  # what was in flight is the fault's
    rows = (seen.due >= start_ns) & seen.judged & over
    span_s = (begun_ns - start_ns) / 1e9
    n = int(rows.sum())
    if n < LEAST or span_s <= 0:
        return f"{_due(n)} in the {max(span_s, 0):.3g} s before it, expected {LEAST} or more to compare with"
    window_s = max(ROLLING_S, math.ceil(10 * LEAST * span_s / n) / 10)
    if span_s < window_s:
        return f"{span_s:.3g} s before it, expected a window of {window_s:g} s or more to compare with"
    window_ns = round(window_s * 1e9)
    starts = seen.due[rows]
    starts = starts[starts <= begun_ns - window_ns]
    starts = starts[:: -(-len(starts) // BEFORE_WINDOWS)]
    failed, judged = (seen.rolled(mask & over, starts, window_ns) for mask in (seen.failed, seen.judged))
    levels = [seen.p95(int(start), window_ns, over) for start in starts]
    if np.all(np.isnan(levels)):
        return f"no request due in the {span_s:.3g} s before it was answered"
    at_ns, level = windows.steps(seen.due, seen.ends)
    inside = level[(at_ns >= start_ns) & (at_ns < begun_ns)]
    quiet = seen.silence(start_ns, begun_ns)
    return Before(
        n,
        window_s,
        float((failed / np.maximum(judged, 1)).max()),
        float(np.nanmax(levels)),
        int(inside.max(initial=0)),
        (quiet[1] - quiet[0]) / 1e9,
    )


def _due(requests: int) -> str:
    return "1 request was due" if requests == 1 else f"{requests} requests were due"


class _Bounds(NamedTuple):
    """What a window has to keep: to be back, and to be within the SLO."""

    error_rate: float
    ms: float
    slo_error_rate: float
    slo_ms: float  # inf: there is no such limit


def _bounds(before: Before | str, limits: Sequence[Limit], name: str) -> _Bounds:
    if isinstance(before, str):
        return _Bounds(0, 0, 0, 0)
    own = {limit.metric.name: limit.value for limit in limits if not limit.of_class and limit.op in ("<", "<=")}
    rate = before.error_rate * (1 + TOLERANCE)
    ms = before.ttft_p95_ms + max(TOLERANCE * before.ttft_p95_ms, LEAST_MS)
    slo_rate, slo_ms = own.get("error_rate", rate), own.get(f"{name}_p95", math.inf)
    # A limit that was missed before the fault already says nothing about the fault.
    rate = min(rate, slo_rate) if slo_rate >= before.error_rate else rate
    ms = min(ms, slo_ms) if slo_ms >= before.ttft_p95_ms else ms
    return _Bounds(rate, ms, max(slo_rate, rate), max(slo_ms, ms))


def _one(seen: _Seen, done: Done, end_ns: int, before: Before | str, bounds: _Bounds, reason: str) -> Recovery:
    """`reason`: what the cell ended by, or "next": another fault begins at `end_ns`."""
    cell, begun_ns = seen.cell, done.begun_ns
    ended_in = (cell["end_ns"] >= begun_ns) & (cell["end_ns"] < end_ns)
    mine = seen.failed & ended_in
    errors = outcomes.failures(cell, mine)
    lost = (outcome_in(cell, "failed", "cut_at_end") & ended_in) & (cell["sent_ns"] > 0) & (cell["first_byte_ns"] == 0)
    first = int(cell["end_ns"][mine].min()) if mine.any() else None
    found = Recovery(
        done,
        (begun_ns - int(seen.due[0])) / 1e9,
        UNDECIDED,
        "",
        seen.name,
        None if isinstance(before, str) else before,
        first_error_s=None if first is None else (first - begun_ns) / 1e9,
        errors=tuple(f.text for f in errors),
        failed=int(mine.sum()),
        lost=int(lost.sum()),
        queue=_queue(cell, ended_in),
    )
    if isinstance(before, str):
        return found._replace(why=before)
    return _judged(seen, found, end_ns, before, bounds, reason)


def _judged(seen: _Seen, found: Recovery, end_ns: int, before: Before, bounds: _Bounds, reason: str) -> Recovery:
    begun_ns, window_ns = found.done.begun_ns, round(before.window_s * 1e9)
    load_ends_ns = min(end_ns, int(seen.due[-1]) + 1)
    at_ns, level = windows.steps(seen.due, seen.ends)
    found = _backlog(found, at_ns, level, before, end_ns)
    starts = seen.due[(seen.due >= begun_ns) & (seen.due <= load_ends_ns - window_ns)]
    silent = seen.silence(begun_ns, load_ends_ns) if load_ends_ns > begun_ns else (begun_ns, begun_ns)
    silence_s = (silent[1] - silent[0]) / 1e9
    silenced = silence_s >= max(LEAST_SILENCE_S, SILENCE * before.silence_s)
    found = found._replace(silence_s=silence_s)
    good, kept = (_within(seen, starts, window_ns, *of) for of in (bounds[:2], bounds[2:]))
    if len(starts):
        worst = [seen.p95(int(s), window_ns) for s in starts[:: -(-len(starts) // BEFORE_WINDOWS)]]
        found = found._replace(worst_ms=None if np.all(np.isnan(worst)) else float(np.nanmax(worst)))
    if reason == "target gone":
        return _counted(seen, found._replace(verdict=NOT_RECOVERED, why=GONE), end_ns)
    if not found.done.ok:
        return _counted(seen, found._replace(why=f"it was not done as asked: {found.done.result}"), end_ns)
    due_s = (load_ends_ns - begun_ns) / 1e9
    if len(starts) < LEAST or due_s < 2 * before.window_s:
        many = int(((seen.due >= begun_ns) & (seen.due < end_ns)).sum())
        next_ = "until the next fault" if reason == "next" else "until the load ended"
        many_due = f"{_due(many)} in the {max(due_s, 0):.3g} s {next_}"
        short = due_s < 2 * before.window_s
        least = f"{2 * before.window_s:g} s of load" if short else f"{LEAST} requests that begin one"
        why = f"{many_due}: windows of {before.window_s:g} s need at least {least}"
        return _counted(seen, found._replace(why=why), end_ns)
    hit = bool((~good).any()) or silenced or (found.failed > 0 and before.error_rate == 0)
    if not hit:
        why = f"no window of {before.window_s:g} s was worse than before, no request failed"
        return _counted(seen, found._replace(verdict=NO_EFFECT, why=why), end_ns)
    over_ns = _over(seen, starts, good, window_ns, bounds)
    if over_ns is None:
        return _counted(seen, _unrecovered(found, starts, good, kept, window_ns, reason), end_ns)
    if silenced and good.all():  # a closed loop: nothing came due meanwhile, what was in flight stood still
        over_ns = silent[1]
    after_s = (over_ns - begun_ns) / 1e9 if (~good).any() or silenced else 0.0
    later = ~good[starts >= over_ns]
    why = f"{int(later.sum())} of {len(later)} windows after it were worse again" if later.any() else ""
    if not (~good).any() and not silenced:
        why = "only requests that were in flight already failed"
    return _counted(seen, found._replace(verdict=RECOVERED, why=why, after_s=after_s), end_ns)


def _within(seen: _Seen, starts: np.ndarray, window_ns: int, error_rate: float, ms: float) -> np.ndarray:
    """Which windows keep both: a p95 is within a limit where 5% at most are over it."""
    failed, judged, slow = (seen.rolled(mask, starts, window_ns) for mask in (seen.failed, seen.judged, seen.slow(ms)))
    timed = np.maximum(judged - failed, 0)
    return np.asarray((judged > 0) & (failed <= error_rate * judged + 1e-9) & (slow <= (1 - QUANTILE) * timed + 1e-9))


def _over(seen: _Seen, starts: np.ndarray, good: np.ndarray, window_ns: int, bounds: _Bounds) -> int | None:
    """The first due time from which all is well for a window's length, and for nearly all of the time after."""
    bad = np.concatenate([[0], np.cumsum(~good)])
    until = np.searchsorted(starts, starts + window_ns, "left")
    count = len(starts)
    clean = (bad[until] - bad[:count] == 0) & (starts + window_ns <= starts[-1])
    left = np.maximum(count - np.arange(count), 1)
    clean &= (bad[count] - bad[:count]) <= RELAPSES * left
    clean[: int(np.argmax(~good)) if (~good).any() else 0] = False
    if not clean.any():
        return None
    place = int(np.searchsorted(seen.due, starts[int(np.argmax(clean))], "left"))
    one_bad = seen.failed | seen.slow(bounds.ms)
    while place < len(seen.due) - 1 and one_bad[place]:
        place += 1
    return int(seen.due[place])


def _unrecovered(
    found: Recovery, starts: np.ndarray, good: np.ndarray, kept: np.ndarray, window_ns: int, reason: str
) -> Recovery:
    """What its last windows were like: those that keep the SLO, and those as good as before."""
    if good[-1]:
        since = starts[len(good) - int(np.argmin(good[::-1]))] if not good.all() else starts[0]
        since_s, most_s = (since - found.done.begun_ns) / 1e9, (int(starts[-1]) + window_ns - since) / 1e9
        ended = "the next fault began" if reason == "next" else "the load ended"
        return found._replace(
            why=f"well again after {since_s:.3f} s, but {ended} {most_s:.3g} s later: too soon to tell"
        )
    if reason == "next":
        return found._replace(why="the next fault began before this one was over")
    last = kept[starts >= starts[-1] - window_ns]
    if last.all():
        return found._replace(verdict=DEGRADED, why="at the end within the SLO, and still worse than before")
    return found._replace(verdict=NOT_RECOVERED, why=f"{int((~last).sum())} of the last {len(last)} windows were bad")


def _backlog(found: Recovery, at_ns: np.ndarray, level: np.ndarray, before: Before, end_ns: int) -> Recovery:
    begun_ns = found.done.begun_ns
    inside = np.flatnonzero((at_ns >= begun_ns) & (at_ns < end_ns))
    if not len(inside):
        return found
    worst = inside[int(np.argmax(level[inside]))]
    most = int(level[worst])
    if most <= before.in_system:
        return found._replace(backlog=most)
    drained = np.flatnonzero((at_ns >= at_ns[worst]) & (level <= before.in_system) & (at_ns < end_ns))
    drained_s = (int(at_ns[drained[0]]) - begun_ns) / 1e9 if len(drained) else None
    return found._replace(backlog=most, drained_s=drained_s)


def _counted(seen: _Seen, found: Recovery, end_ns: int) -> Recovery:
    """With the attempts of the requests due while it lasted."""
    begun_ns = found.done.begun_ns
    until = end_ns if found.after_s is None else begun_ns + round(found.after_s * 1e9)
    rows = (seen.due >= begun_ns) & (seen.due < until) & (seen.cell["attempts"] > 0)
    return found._replace(attempts=int(seen.cell["attempts"][rows].sum()), requests=int(rows.sum()))


def _queue(cell: Cell, rows: np.ndarray) -> Queue:
    """Last attempts that failed, and the first ones of those that were tried again."""
    failed, again = rows & outcome_in(cell, "failed"), rows & outcomes.retried(cell)
    status, kind = cell["status"], cell["error_kind"]
    firsts: Mapping[str, int] = {
        str(word): int(count)
        for word, count in zip(*np.unique(cell["first_attempt"][again].astype(str), return_counts=True), strict=True)
    }

    def count(statuses: Sequence[int]) -> int:
        return int((failed & np.isin(status, statuses)).sum()) + sum(firsts.get(f"http_{s}", 0) for s in statuses)

    def kinds(*names: str) -> int:
        return int((failed & np.isin(kind.astype(str), names)).sum()) + sum(firsts.get(name, 0) for name in names)

    return Queue(
        refused=kinds("connect_error"),
        busy=count([429]),
        unavailable=count([503]),
        other_5xx=count([500, 501, 502, 504]),
        timeouts=kinds(*TIMEOUTS),
        cut=kinds("truncated_stream", "truncated"),
        again=int(again.sum()),
        saved=int((again & outcome_in(cell, "ok")).sum()),
        waited_s=float(cell["retry_wait_ns"][again].sum()) / 1e9,
    )
