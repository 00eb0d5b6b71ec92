"""What of a cell's time is this client's own, and what the way to the server takes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llm_bench import windows
from llm_bench.client import (
    BUSY,
    CLIENT_CHECKS,
    CLIENT_LIMITED,
    LATE,
    LIMITED,
    MAX_CPU_SHARE,
    MAX_LAG_MS,
    MIN_STALL_MS,
    STALLED,
)
from llm_bench.evidence import Case, Finding
from llm_bench.facts import Facts
from llm_bench.facts import Finding as Doubt
from llm_bench.series import NOTHING, SERIES

HELD_BACK, LARGE = 0.05, 0.2  # of e2e (or the window), from which the client held a cell back at all, and much
RTT_SHARE, RTT_MS = 0.25, 5.0  # of the median TTFT
LINK_MBIT = 400.0  # received; a link of 1 Gbit/s carries little more than twice that


def client_limited(case: Case) -> Finding | None:
    """What this client's own part is of the whole time; of TTFT alone it is a doubt of the report, and no cause."""
    doubts = _doubts(case)
    sizes = _sizes(case, doubts)
    if not sizes:
        return None
    worst = max(sizes, key=lambda kind: sizes[kind])
    large = sizes[worst] >= LARGE
    advice = doubts[worst].advice or "Use more --workers, or another machine"
    rest = "until then, trust no other finding" if large else "latencies are that much too high; other findings stand"
    lag = case.parts.ms("client lag") if case.parts else None
    share = f"; its lag is {lag / case.parts.e2e_ms:.0%} of e2e" if case.parts and lag and case.parts.e2e_ms else ""
    return Finding(
        "; ".join(f"{kind}: {doubts[kind].text}" for kind in sizes) + share,
        "sure" if large else "possible",
        "this client's own stamps and CPU time",
        f"{advice}; {rest}",
    )


def _doubts(case: Case) -> dict[str, Doubt]:
    facts = Facts(case.cell, case.window, (), (), case.end)
    return {kind: doubt for kind in CLIENT_LIMITED if (doubt := CLIENT_CHECKS[kind](facts))}


def _sizes(case: Case, doubts: Iterable[str]) -> dict[str, float]:
    """What each doubt is of the whole, where the client held the cell back by it."""
    return {kind: size for kind in doubts if (size := _SIZES[kind](case)) >= HELD_BACK}


class Calm(NamedTuple):
    """The requests that no lateness of this client touched: a mask (n,) of the cell's, and a case of them alone."""

    rows: np.ndarray
    case: Case


def untouched(case: Case) -> Calm | None:
    """What no lateness touched, of the case and of its siblings; None where it touched all that there is."""
    rows = calm_rows(case)
    if rows is None:
        return None
    siblings = [_alone(other, calm) for other in case.siblings if (calm := calm_rows(other)) is not None]
    return Calm(rows, replace(_alone(case, rows), siblings=siblings))


def _alone(case: Case, rows: np.ndarray) -> Case:
    """Those requests alone; how many were in flight beside them is of all."""
    gauge = np.stack(windows.in_flight(case.cell), axis=1)
    return replace(case, cell=replace(case.cell.only(rows), gauge=gauge), siblings=())


def calm_rows(case: Case) -> np.ndarray | None:
    """Mask (n,) of the requests that no lateness of this client touched; None where there are none.

    It touches who was due, on the way or answered while its loop stood still, or while a request that it sent late was
    at the server: a heap that is let go makes a queue, in which others wait too. Late is what holds a cell back: of
    short answers that is less than of long ones.
    """
    if set(_sizes(case, _doubts(case))) & {BUSY, LIMITED}:
        return None
    due, end = case.cell["due_ns"], case.cell["end_ns"]
    held_ms = min(MAX_LAG_MS, HELD_BACK * case.parts.e2e_ms) if case.parts else MAX_LAG_MS
    late = SERIES["lag_client"].of(case.cell, NOTHING).values > held_ms
    begun, ended = (np.concatenate(pair) for pair in zip(_stalls(case), (due[late], end[late]), strict=True))
    at_ns, level = windows.steps(begun, ended)
    at_ns, busy = np.append(at_ns, np.iinfo(np.int64).max), np.append(level > 0, False)
    # Touched where a span covers the due time or begins before the end.
    before = np.concatenate([[False], busy])[np.searchsorted(at_ns, due, "right")]
    starts = at_ns[busy]
    began = np.searchsorted(starts, end, "right") > np.searchsorted(starts, due, "right")
    calm = np.asarray(~before & ~began & windows.attempted(case.cell))
    return calm if calm.any() else None


def _lag_size(case: Case) -> float:
    """Of the mean e2e."""
    lag = case.parts.ms("client lag") if case.parts else None
    return lag / case.parts.e2e_ms if case.parts and lag and case.parts.e2e_ms else 0.0


def _stall_size(case: Case) -> float:
    """Of the window, by the stalls that the doubt is about: shorter ones than a gap between tokens held up nothing."""
    at_ns, level = windows.steps(*_stalls(case))  # of several workers at once they count once
    return windows.integral_s(at_ns, np.minimum(level, 1), case.window) / case.window.seconds


def _stalls(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end (ns) of each."""
    stalls = case.end.get("loop_stalls")
    least_ms = max(MIN_STALL_MS, case.metric("itl_p50") or 0.0)
    spans = [(at, at + round(ms * 1e6)) for at, ms in stalls if ms > least_ms] if isinstance(stalls, list) else []
    begun, ended = np.array(spans, np.int64).reshape(-1, 2).T
    return begun, ended


def _busy_size(case: Case) -> float:
    """How late its loop was (p99) against the mean e2e, all of it where the core was full."""
    facts = Facts(case.cell, case.window, (), (), case.end)
    if facts.ended("client_cpu_share") > MAX_CPU_SHARE or not case.parts or not case.parts.e2e_ms:
        return 1.0
    of_workers = case.end.get("worker_loop_lag_ms")
    lags = [facts.ended("loop_lag_p99_ms"), *(of_workers if isinstance(of_workers, list) else [])]
    return float(max(lags)) / case.parts.e2e_ms


# What a doubt about the client is of the whole, as a share. At the ceiling that selfcheck found it is all of it.
_SIZES: Mapping[str, Callable[[Case], float]] = {
    LATE: _lag_size,
    STALLED: _stall_size,
    BUSY: _busy_size,
    LIMITED: lambda _: 1.0,
}


def _round_trip_ms(case: Case) -> float | None:
    """The probe's, or less where that leaves a request too little: it was taken in user space, on a busy machine late.

    Each first token has gone the way there and back, beside what the server accounts for: none has had less for it.
    """
    rtt_ms = (case.cell.header.get("probe") or {}).get("rtt_ms")
    if not rtt_ms:
        return None
    known = SERIES["ttft_sent"].of(case.cell, NOTHING).values
    at_server = np.nan_to_num(case.cell["server_queue_ms"]) + np.nan_to_num(case.cell["server_prefill_ms"])
    left = (known - at_server)[case.ok & ~np.isnan(known)]
    return float(min(rtt_ms, left.min(initial=np.inf)))


def network_limited(case: Case) -> Finding | None:
    rtt_ms = _round_trip_ms(case)
    ttft = case.values("ttft_sent")
    mbit = case.metric("payload_mbit_per_second")
    share = case.metric("payload_share")
    if rtt_ms and len(ttft) and rtt_ms >= RTT_MS and rtt_ms >= RTT_SHARE * np.median(ttft):
        return Finding(
            f"a round trip takes {rtt_ms:.1f} ms, {rtt_ms / np.median(ttft):.0%} of the median TTFT of "
            f"{np.median(ttft):.1f} ms",
            "likely",
            "the probe's round trips, records",
            "Measure from nearer to the server, and compare; keep connections alive",
        )
    if mbit is not None and mbit / (share or 1.0) >= LINK_MBIT:
        received = mbit / (share or 1.0)
        return Finding(
            f"{received:.0f} Mbit/s were received, {share or 0:.0%} of it text of tokens",
            "possible",
            "records; the link's capacity is not known",
            "Look at the link's use at both ends; pack more tokens into an event (a stream interval)",
        )
    return None
