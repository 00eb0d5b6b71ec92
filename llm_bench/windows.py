"""Which part of a cell is measured: after warm-up, before the drain, by a rule that is printed with its edges.

Windows are half-open, [start_ns, end_ns). Requests belong to them by due time, tokens by event time (METRICS.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llm_bench.columns import Cell
from llm_bench.errors import BenchError

TOO_SHORT, GROWING = "too short", "growing without bound"
OPEN_WARMUP_SHARE = 0.05  # of the span from start to last due time
GROWTH_SHARE = 0.2  # of the arrivals left over at the window's end: the load is above what is served
GROWTH_INSTANTS = 30  # arrivals at fewer moments swing by over a third of themselves by chance: no verdict on growth
FIRST_STAYS = 10  # these find the system nearly empty: what they take is how long it fills
LEAST_WAVES = 5  # a closed loop's window holds at least this many requests a slot
LEAST_OPEN = 20  # requests of an open loop's window: with fewer not even a p95 can be told from the largest


@dataclass(frozen=True, slots=True)
class Window:
    """The measured part of a cell. `state` is "", TOO_SHORT or GROWING (then `growth` in requests/s is not 0)."""

    start_ns: int
    end_ns: int
    warmup: int  # requests due before the window
    requests: int  # requests due in it
    rule: str  # in words, with what decided the edges
    first_wave: int = 0  # closed loop: requests that filled the slots
    state: str = ""
    growth: float = 0.0
    opened: bool = True  # False: it never opened, so that the whole run stands in for it

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
        return closed(cell, load["concurrency"], load.get("warmup"), duration_ns, _refilled(cell, end or {}))
    if kind in ("open", "replay"):
        return open_(cell, load.get("warmup"))
    raise BenchError(f"record header: load kind {kind!r}, known are closed, open, replay")


def _refilled(cell: Cell, end: Mapping[str, Any]) -> bool:
    """Was every slot refilled until the duration was over? So it was where conversations of the plan never began."""
    planned = (cell.header.get("plan") or {}).get("requests") or 0
    return end.get("reason") == "duration" and cell.n + (end.get("turns_not_sent") or 0) < planned


def closed(
    cell: Cell, concurrency: int, warmup: float | None, duration_ns: int | None, refilled: bool = False
) -> Window:
    """Closed loop of `concurrency` slots. `warmup` in requests, None: the longer of 2N and the end of the first wave.

    Opens at the first moment with N in flight after `warmup` requests and the whole first wave have ended; closes when
    the first slot is not refilled, whatever the reason, or after `duration_ns`. `refilled`: all were for as long, so
    that a user of whom nothing more came was thinking when the drive ended.
    """
    due = cell["due_ns"]
    begun_ns, slot_ns, freed_ns = _conversations(cell)
    ends = np.sort(cell["end_ns"][attempted(cell)])
    wave = min(concurrency, len(begun_ns))
    asked = 2 * concurrency if warmup is None else round(warmup)
    if len(ends) <= asked or not wave:
        return _never(cell, f"{len(ends)} requests ended, warm-up takes {asked}", wave)
    warm_ns = max(int(freed_ns[:wave].max()), int(ends[asked - 1]) if asked else 0)
    at_ns, level = steps(slot_ns, freed_ns) if has_sessions(cell) else in_flight(cell)
    full = np.flatnonzero(level >= concurrency)
    # In flight stays at N from one step to the next: the moment may lie inside a step that began in warm-up.
    full = full[np.append(at_ns[1:], at_ns[-1:])[full] > warm_ns]
    if not len(full):
        return _never(cell, f"never {concurrency} in flight after the first wave and {asked} requests ended", wave)
    start_ns = max(warm_ns, int(at_ns[full[0]]))
    unfilled = freed_ns[freed_ns > begun_ns[-1]]
    end_ns, why = (int(unfilled.min()), "the first slot that was not refilled") if len(unfilled) else (0, "")
    if duration_ns is not None and (start_ns + duration_ns <= end_ns or (refilled and has_sessions(cell))):
        end_ns, why = start_ns + duration_ns, f"{duration_ns / 1e9:g} s later"
    if end_ns <= start_ns:
        return _never(cell, "the last request had left before the first wave and warm-up ended", wave)
    rule = (
        f"closed loop: from {concurrency} in flight after {asked} requests and the first wave of {wave} had ended, "
        f"to {why}"
    )
    requests = _due_in(cell, start_ns, end_ns)
    state = TOO_SHORT if requests < LEAST_WAVES * concurrency else ""
    return Window(start_ns, end_ns, int((due < start_ns).sum()), requests, rule, wave, state)


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


def open_(cell: Cell, warmup_s: float | None = None) -> Window:
    """Open loop or replay: from the end of warm-up (`warmup_s`, None: 5% of the span) to the last due time.

    Who is due at that very moment belongs to it: the window ends 1 ns later.
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
    state = TOO_SHORT if requests < LEAST_OPEN or _filled_ns(cell) >= last else ""
    window = Window(start_ns, end_ns, int((due < start_ns).sum()), requests, rule, state=state)
    growth = backlog_growth(cell, window)
    return replace(window, growth=growth, state=GROWING) if growth else window


def backlog_growth(cell: Cell, window: Window) -> float:
    """By how many requests a second those due and not ended grow from the window's start to its end; 0 if they do not.

    They grow when over a fifth of the arrivals, and more than twice the chance swing of so many Poisson bursts, are
    left over: in the whole window and in the part after the system has filled, which is its second half or, where the
    first requests take longer than that, what is left after one such stay.
    """
    due = cell["due_ns"]
    inside = due[(due >= window.start_ns) & (due < window.end_ns)]
    if len(np.unique(inside)) < GROWTH_INSTANTS:
        return 0.0
    middle = (window.start_ns + window.end_ns) // 2
    for start_ns in (window.start_ns, min(max(middle, _filled_ns(cell)), window.end_ns)):
        left = _unfinished(cell, window.end_ns) - _unfinished(cell, start_ns)
        bursts = np.unique(inside[inside >= start_ns], return_counts=True)[1]
        if left <= GROWTH_SHARE * bursts.sum() or left <= 2 * float((bursts**2).sum()) ** 0.5:
            return 0.0
    return (_unfinished(cell, window.end_ns) - _unfinished(cell, window.start_ns)) / window.seconds


def _filled_ns(cell: Cell) -> int:
    """When a system that began empty holds what its load makes it hold: one stay of the first requests after them."""
    stays = (cell["end_ns"] - cell["due_ns"])[attempted(cell)][:FIRST_STAYS]
    return int(cell["due_ns"][0]) + (int(np.median(stays)) if len(stays) else 0)


def _unfinished(cell: Cell, at_ns: int) -> int:
    """Requests due before a moment and not ended before it: never more of them come in a window than are due in it.

    What was dropped counts as never ended: it was waiting for its turn when the run gave up on it.
    """
    return int((cell["due_ns"] < at_ns).sum() - (attempted(cell) & (cell["end_ns"] < at_ns)).sum())


def whole(cell: Cell, rule: str = "whole run, ramp and drain included", first_wave: int = 0, state: str = "") -> Window:
    """From the first due time to just after the last end: every request and every token is in it."""
    if not cell.n:
        return Window(0, 1, 0, 0, rule, first_wave, state)
    last = max(int(cell["end_ns"].max()), int(cell["due_ns"].max()), int(cell.last_ns.max(initial=0)))
    return Window(int(cell["due_ns"][0]), last + 1, 0, cell.n, rule, first_wave, state)


def _never(cell: Cell, why: str, first_wave: int = 0) -> Window:
    rule = f"whole run, because the window never opened: {why}"
    return replace(whole(cell, rule, first_wave, TOO_SHORT), opened=False)


def _due_in(cell: Cell, start_ns: int, end_ns: int) -> int:
    due = cell["due_ns"]
    return int(((due >= start_ns) & (due < end_ns)).sum())


def attempted(cell: Cell) -> np.ndarray:
    """Mask of requests for which a connection was begun or taken."""
    return ~cell.among("outcome", "dropped")


def has_sessions(cell: Cell) -> bool:
    return not bool(cell.among("session", "").all())


def left_ns(cell: Cell) -> np.ndarray:
    """When each attempted request left: its last byte was handed over or, where it never was, its slot let it go."""
    sent, ready = cell["sent_ns"], cell["ready_ns"]
    return np.where(sent > 0, sent, np.where(ready > 0, ready, cell["end_ns"]))


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
