"""Which part of a cell is measured: after warm-up, before the drain, by a rule that is printed with its edges.

Windows are half-open, [start_ns, end_ns). Requests belong to them by due time, tokens by event time (METRICS.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from llm_bench import steady
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.printable import counted

BY_CLIENT = "no more than this client's own lateness explains"  # said of a backlog that grows, but not in time
STATIONARY, WARMING, TOO_SHORT, GROWING = "stationary", "warming", "too short", "growing without bound"
OPEN_WARMUP_SHARE = 0.05  # of the span from start to last due time
GROWTH_INSTANTS = 30  # arrivals at fewer moments swing by over a third of themselves by chance: no verdict on growth
FIRST_STAYS = 10  # these find the system nearly empty: what they take is how long it fills
LEAST_WAVES = 5  # a closed loop's window holds at least this many requests a slot
LEAST_OPEN = 20  # requests of an open loop's window: with fewer not even a p95 can be told from the largest
# Standard errors between what a later cut would take and what it would leave. MSER-5 alone finds a later one in 20% of
# runs of 100 independent lognormal latencies, in 38% of 20; asked for this too, in at most 2% of 20 to 1,000.
APART = 3.0


class Settling(NamedTuple):
    """Steady state begins later than the warm-up given: after so many ok requests of those of warm-up and window."""

    after: int
    requests: int
    warmup: int  # how many of them were due before the window
    half: bool  # MSER-5 cuts no more than half: how much later it begins is not known
    early_ms: float  # mean latency of the requests between the two, and of those after
    rest_ms: float


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a cell. `state` is one of the four above; "" of a window that no rule of a load has set."""

    start_ns: int
    end_ns: int
    warmup: int  # requests due before the window
    requests: int  # requests due in it
    rule: str  # in words, with what decided the edges
    first_wave: int = 0  # closed loop: requests that filled the slots
    state: str = ""
    growth: float = 0.0  # GROWING: by how many requests a second, else 0
    opened: bool = True  # False: it never opened, so that the whole run stands in for it
    settling: Settling | None = None  # WARMING, or TOO_SHORT: the warm-up was not long enough
    drift: steady.Drift | None = None  # closed loop with two requests a batch, latencies in ms
    evidence: str = ""  # what the state rests on, in words

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def of(cell: Cell, end: Mapping[str, Any] | None = None) -> Window:
    """The window of a cell by the load in its header; `end`: how the driver says the cell ended, where it does.

    Raises BenchError for a load that is none of ours.
    """
    load = cell.header.get("load") or {}
    kind = load.get("kind")
    duration_s = load.get("duration_s")
    if kind == "closed":
        if not load.get("concurrency"):
            raise BenchError("record header: a closed load without its concurrency")
        duration_ns = None if duration_s is None else round(duration_s * 1e9)
        return closed(cell, load["concurrency"], load.get("warmup"), duration_ns, *_closed_by(end or {}, duration_ns))
    if kind in ("open", "replay"):
        return open_(cell, load.get("warmup"), load.get("max_in_flight"))
    raise BenchError(f"record header: load kind {kind!r}, known are closed, open, replay")


def _closed_by(end: Mapping[str, Any], duration_ns: int | None) -> tuple[int, bool]:
    """(until when the driver refilled every slot, 0 where it does not say; was it the duration that ended that?)"""
    opened_ns, closed_ns = end.get("window_open_ns") or 0, end.get("window_close_ns") or 0
    timed = end.get("reason") == "duration" and duration_ns is not None and closed_ns - opened_ns >= duration_ns
    return closed_ns, timed and opened_ns > 0


def closed(
    cell: Cell,
    concurrency: int,
    warmup: float | None,
    duration_ns: int | None,
    closed_ns: int = 0,
    timed: bool = False,
) -> Window:
    """Closed loop of `concurrency` slots. `warmup` in requests, None: the longer of 2N and the end of the first wave.

    Opens at the first moment with N in flight after `warmup` requests and the whole first wave have ended; closes when
    the first slot is not refilled, whatever the reason, or after `duration_ns`. `closed_ns`: when that was, by the
    driver; 0: as the records show it, in which a user who still thought when the drive ended has left. `timed`: it was
    the duration that ended it.
    """
    due = cell["due_ns"]
    begun_ns, slot_ns, freed_ns = _conversations(cell)
    ends = np.sort(cell["end_ns"][attempted(cell)])
    wave = min(concurrency, len(begun_ns))
    asked = 2 * concurrency if warmup is None else round(warmup)
    if len(ends) <= asked or not wave:
        return _never(cell, f"{counted(len(ends), 'request')} ended, warm-up takes {asked}", wave)
    warm_ns = max(int(freed_ns[:wave].max()), int(ends[asked - 1]) if asked else 0)
    at_ns, level = steps(slot_ns, freed_ns) if has_sessions(cell) else in_flight(cell)
    full = np.flatnonzero(level >= concurrency)
    # In flight stays at N from one step to the next: the moment may lie inside a step that began in warm-up.
    full = full[np.append(at_ns[1:], at_ns[-1:])[full] > warm_ns]
    if not len(full):
        return _never(
            cell, f"never {concurrency} in flight after the first wave and {counted(asked, 'request')} ended", wave
        )
    start_ns = max(warm_ns, int(at_ns[full[0]]))
    unfilled = freed_ns[freed_ns > begun_ns[-1]]
    shown_ns = int(unfilled.min()) if len(unfilled) else 0
    end_ns, why = closed_ns or shown_ns, "the first slot that was not refilled"
    if duration_ns is not None and (timed or start_ns + duration_ns <= end_ns):
        end_ns, why = min(end_ns, start_ns + duration_ns), f"{duration_ns / 1e9:g} s later"
    if end_ns <= start_ns:
        return _never(cell, "the last request had left before the first wave and warm-up ended", wave)
    rule = (
        f"closed loop: from {concurrency} in flight after {counted(asked, 'request')} and the first wave of {wave} had "
        f"ended, to {why}"
    )
    requests = _due_in(cell, start_ns, end_ns)
    window = Window(start_ns, end_ns, int((due < start_ns).sum()), requests, rule, wave)
    if requests < LEAST_WAVES * concurrency:
        return replace(
            window, state=TOO_SHORT, evidence=f"{counted(requests, 'request')}, at least {LEAST_WAVES * concurrency}"
        )
    return _drifting(cell, _settled(cell, window))


def _conversations(cell: Cell) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(due, left, freed) of what a slot holds at a time, in due order: a request or, thinking included, a session."""
    tried = attempted(cell)
    due, left, end = cell["due_ns"][tried], left_ns(cell)[tried], cell["end_ns"][tried]
    if not has_sessions(cell):
        return due, left, end
    session = cell["session"][tried]
    alone = np.array([f"\0{i}" for i in range(len(session))], object)  # no session's name begins so
    _, first, which = np.unique(np.where(session == "", alone, session).astype(str), True, True)
    freed = np.zeros(len(first), np.int64)
    np.maximum.at(freed, which, end)
    order = np.argsort(first)
    return due[first[order]], left[first[order]], freed[order]


def open_(cell: Cell, warmup_s: float | None = None, cap: int | None = None) -> Window:
    """Open loop or replay: from the end of warm-up (`warmup_s`, None: 5% of the span) to the last due time.

    Who is due at that very moment belongs to it: the window ends 1 ns later. `cap`: how many the client lets in flight.
    """
    due = cell["due_ns"]
    if not cell.n:
        return _never(cell, "no request was due")
    began, last = int(due[0]), int(due[-1])
    warm_ns = round((last - began) * OPEN_WARMUP_SHARE) if warmup_s is None else round(warmup_s * 1e9)
    start_ns = began + warm_ns
    said = f"{OPEN_WARMUP_SHARE:.0%} of the span" if warmup_s is None else f"{warmup_s:g} s as asked"
    end_ns = last + 1
    if start_ns >= last:
        return _never(cell, f"the warm-up of {warm_ns / 1e9:g} s is not over before the last due time")
    rule = f"open loop: from {warm_ns / 1e9:.3g} s of warm-up ({said}) to the last due time"
    requests = _due_in(cell, start_ns, end_ns)
    window = Window(start_ns, end_ns, int((due < start_ns).sum()), requests, rule)
    growth = backlog_growth(cell, window, cap)
    if growth is not None and growth.growing:
        # Sen's slope of a level that rose late, and once, is 0; that of one whose arrivals came late is above them all.
        per_second = min(growth.per_second or growth.gained / window.seconds, requests / window.seconds)
        return replace(window, state=GROWING, growth=per_second, evidence=_trends(growth))
    if requests < LEAST_OPEN:
        return replace(window, state=TOO_SHORT, evidence=f"{counted(requests, 'request')}, at least {LEAST_OPEN}")
    if _filled_ns(cell) >= last:
        return replace(window, state=TOO_SHORT, evidence="the first requests stayed for longer than the window")
    untested = f"growth untested: under {GROWTH_INSTANTS} moments of arrival"
    return _settled(cell, replace(window, evidence=untested if growth is None else _trends(growth)))


def backlog_growth(cell: Cell, window: Window, cap: int | None = None) -> steady.Growth | None:
    """Whether requests due and not ended grow over the window. None where arrivals came at too few moments to say.

    What was dropped counts as never ended: it was waiting for its turn when the run gave up on it. `cap`: in flight, by
    the client, at most.
    """
    due, tried = cell["due_ns"], attempted(cell)
    inside = due[(due >= window.start_ns) & (due < window.end_ns)] - window.start_ns
    if len(np.unique(inside)) < GROWTH_INSTANTS:
        return None
    since_ns = np.linspace(0, window.end_ns - window.start_ns - 1, steady.SAMPLES).astype(np.int64)
    at_ns, end_ns = window.start_ns + since_ns, cell["end_ns"][tried]
    in_flight_ = level_at(*in_flight(cell), at_ns) if len(cell.gauge) else _level(left_ns(cell)[tried], end_ns, at_ns)
    filled_s = (_filled_ns(cell) - window.start_ns) / 1e9
    return steady.growth(since_ns / 1e9, in_flight_, _level(due, end_ns, at_ns), inside / 1e9, filled_s, cap)


def grows_in_time(cell: Cell, window: Window) -> bool:
    """Does the backlog grow without what this client held up, by its own lateness and not by a cap or a connection?

    By a bound that needs no model of the target: what is late piles up in front of it and adds, when it is let go, at
    most as much to its queue as was ever piled up in the window. What the queue gained less that is what it gains from
    requests sent in time. A loop that sends late reads late: who was due at a moment and ended within the longest lag
    after it may have been answered by then, and who was cut within it too.
    """
    cap = (cell.header.get("load") or {}).get("max_in_flight")
    growth = backlog_growth(cell, window, cap)
    due, ready, tried = cell["due_ns"], cell["ready_ns"], attempted(cell)
    passed_ns = left_ns(cell) - np.maximum(cell["connect_ns"], 0)
    late = tried & (ready > 0) & (passed_ns > ready) & ~connecting_retried(cell)
    mine = late & (passed_ns > window.start_ns) & (ready < window.end_ns)
    lag_ns = int((passed_ns - ready)[mine].max(initial=0))
    opens, last = window.start_ns, window.end_ns - 1 - lag_ns
    if growth is None or last <= opens:
        return False
    begun, ended = ready[late], passed_ns[late]
    if cap is None:  # nothing but this client kept those from being sent that it dropped
        begun, ended = np.append(begun, due[~tried]), np.append(ended, np.full(int((~tried).sum()), window.end_ns))
    at_ns, level = steps(begun, ended)  # what this client holds up
    most = int(level[(at_ns >= opens) & (at_ns <= last)].max(initial=0))
    before = _level(due, cell["end_ns"][tried], np.array([opens]))[0]
    ended_ns = np.maximum(cell["end_ns"] - lag_ns, due)[tried]  # an interval of `_level` ends after it has begun
    after = _level(due, ended_ns, np.array([last]))[0]
    return bool(after - level_at(at_ns, level, np.array([last]))[0] - most - before > growth.swing)


def by_client(cell: Cell, window: Window, client_limited: bool, *, grew: bool = False) -> bool:
    """Does the backlog of a cell that this client limited grow by no more than its own lateness explains?

    `grew`: the driver saw it grow, and ended the cell for it, whatever the state of what is left of the window.
    """
    return client_limited and (grew or window.state == GROWING) and not grows_in_time(cell, window)


def _trends(growth: steady.Growth) -> str:
    return (
        f"over the window the backlog grew by {growth.gained} (chance: {growth.swing:.0f}); "
        f"trend of it p = {growth.in_system.p:.2g}, of in flight p = {growth.in_flight.p:.2g}"
    )


def _settled(cell: Cell, window: Window) -> Window:
    """The window with what MSER-5 says of warm-up and window: STATIONARY, WARMING, or TOO_SHORT where half is warm-up.

    The rule of METRICS.md alone, a least error past the warm-up, doubts up to 26% of the steady runs of a queue
    (reports/statistics): hence `late`, and APART.
    """
    rows = cell.among("outcome", "ok") & (cell["due_ns"] < window.end_ns)
    latency_ms, warmup = e2e_ms(cell)[rows], int((cell["due_ns"][rows] < window.start_ns).sum())
    if not (rows & (cell["due_ns"] >= window.start_ns)).any():
        return replace(window, state=TOO_SHORT, evidence="no ok request was due in it")
    start, settling = steady.mser5(latency_ms, warmup), None
    if start.late:
        early, rest = latency_ms[warmup : start.cut], latency_ms[start.cut :]
        error = float(latency_ms[warmup:].std(ddof=1)) * math.sqrt(1 / len(early) + 1 / len(rest))
        early_ms, rest_ms = float(early.mean()), float(rest.mean())
        if abs(early_ms - rest_ms) > APART * error:
            settling = Settling(start.cut, len(latency_ms), warmup, start.too_short, early_ms, rest_ms)
    found = f"a warm-up of {warmup} of {counted(len(latency_ms), 'request')} is enough"
    found += f" (MSER-5 would take {start.cut}, which changes little)" if start.cut > warmup else " (MSER-5)"
    if settling:
        found = f"steady state begins after {settling.after} of {counted(len(latency_ms), 'request')} (MSER-5)"
    state = STATIONARY if settling is None else TOO_SHORT if settling.half else WARMING
    evidence = "; ".join(filter(None, [found, window.evidence]))
    return replace(window, state=state, settling=settling, evidence=evidence)


def _drifting(cell: Cell, window: Window) -> Window:
    """The window of a closed loop, which is not STATIONARY where its latency or its rate drifts, either way."""
    due, end = cell["due_ns"], cell["end_ns"][attempted(cell)]
    mine = cell.among("outcome", "ok") & (due >= window.start_ns) & (due < window.end_ns)
    ended_s = (end[(end >= window.start_ns) & (end < window.end_ns)] - window.start_ns) / 1e9
    drift = steady.drift(e2e_ms(cell)[mine], ended_s, 0.0, window.seconds)
    if drift is None:
        return replace(window, evidence=f"{window.evidence}; drift untested: under {2 * steady.DRIFT_BATCHES} requests")
    state = WARMING if drift.drifting and window.state == STATIONARY else window.state
    evidence = f"{window.evidence}; drift of latency or rate p = {drift.p:.2g}"
    return replace(window, state=state, drift=drift, evidence=evidence)


def _filled_ns(cell: Cell) -> int:
    """When a system that began empty is as full as its load makes it: one stay after the first requests began."""
    stays = (cell["end_ns"] - cell["due_ns"])[attempted(cell)][:FIRST_STAYS]
    return int(cell["due_ns"][0]) + (int(np.median(stays)) if len(stays) else 0)


def whole(cell: Cell, rule: str = "whole run, ramp and drain included", first_wave: int = 0, state: str = "") -> Window:
    """From the first due time to just after the last end: every request and every token is in it."""
    if not cell.n:
        return Window(0, 1, 0, 0, rule, first_wave, state)
    last = max(int(cell["end_ns"].max()), int(cell["due_ns"].max()), int(cell.last_ns.max(initial=0)))
    return Window(int(cell["due_ns"][0]), last + 1, 0, cell.n, rule, first_wave, state)


def _never(cell: Cell, why: str, first_wave: int = 0) -> Window:
    rule = f"whole run, because the window never opened: {why}"
    return replace(whole(cell, rule, first_wave, TOO_SHORT), opened=False, evidence=why)


def _due_in(cell: Cell, start_ns: int, end_ns: int) -> int:
    due = cell["due_ns"]
    return int(((due >= start_ns) & (due < end_ns)).sum())


def attempted(cell: Cell) -> np.ndarray:
    """Mask of requests for which a connection was begun or taken."""
    return ~cell.among("outcome", "dropped")


def connecting_retried(cell: Cell) -> np.ndarray:
    """Mask of requests whose first attempt found no connection: before the next they waited as told, and not late."""
    return np.asarray((cell["attempts"] > 1) & cell.among("first_attempt", "connect_error", "connect_timeout"))


def has_sessions(cell: Cell) -> bool:
    return not bool(cell.among("session", "").all())


def left_ns(cell: Cell) -> np.ndarray:
    """When each attempted request left: its last byte was handed over or, where it never was, its slot let it go."""
    sent, ready = cell["sent_ns"], cell["ready_ns"]
    return np.where(sent > 0, sent, np.where(ready > 0, ready, cell["end_ns"]))


def e2e_ms(cell: Cell) -> np.ndarray:
    """From due time to the last token or, not streamed, to the end; of no meaning where a request was not answered."""
    return np.asarray((np.where(cell.counts > 0, cell.last_ns, cell["end_ns"]) - cell["due_ns"]) / 1e6)


def in_flight(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Steps (at_ns, level): the driver's gauge where there is one, else rebuilt from [sent, end) of the records."""
    if len(cell.gauge):
        return cell.gauge[:, 0], cell.gauge[:, 1]
    tried = attempted(cell)
    return steps(left_ns(cell)[tried], cell["end_ns"][tried])


def steps(start_ns: np.ndarray, end_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many of the intervals [start, end) hold each moment: levels from each distinct edge on."""
    at_ns, place = np.unique(np.concatenate([start_ns, end_ns]), return_inverse=True)
    change = np.repeat([1, -1], (len(start_ns), len(end_ns)))
    return at_ns, np.cumsum(np.bincount(place, change, len(at_ns))).astype(np.int64)


def _level(start_ns: np.ndarray, end_ns: np.ndarray, when_ns: np.ndarray) -> np.ndarray:
    """How many of the intervals [start, end) hold each moment: those that have begun less those that have ended."""
    begun, ended = (np.searchsorted(np.sort(edges), when_ns, "right") for edges in (start_ns, end_ns))
    return np.asarray(begun - ended)


def level_at(at_ns: np.ndarray, level: np.ndarray, when_ns: np.ndarray) -> np.ndarray:
    """The level of a step function at each moment, 0 before its first step."""
    return np.concatenate([[0], level])[np.searchsorted(at_ns, when_ns, "right")]


def integral_s(at_ns: np.ndarray, level: np.ndarray, window: Window) -> float:
    """The time integral of a step function over a window, in level · seconds."""
    if not len(at_ns):
        return 0.0
    edges = np.clip(np.append(at_ns, window.end_ns), window.start_ns, window.end_ns)
    return float((np.diff(edges) * level).sum()) / 1e9


def overlap_s(start_ns: np.ndarray, end_ns: np.ndarray, window: Window) -> float:
    """Sum of the overlaps of [start, end) with a window, in seconds."""
    inside = np.minimum(end_ns, window.end_ns) - np.maximum(start_ns, window.start_ns)
    return float(np.maximum(inside, 0).sum()) / 1e9
