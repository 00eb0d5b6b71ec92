"""Why requests wait: more arrive than are served, seats, heaps of arrivals, long prompts before short ones."""

import numpy as np

from llm_bench import windows
from llm_bench.columns import Cell
from llm_bench.decompose import account, prefill_account
from llm_bench.diagnose_memory import kv_binds
from llm_bench.evidence import LEAST_BINS, Case, Finding
from llm_bench.series import NOTHING, SERIES, due_in, outcome_in

WAITING_SHARE = 0.4  # of the requests at the server, that its queue holds, to call its batch the limit
PLATEAU = 0.8  # a batch that is on average so near its largest is held there by something
LONG = 4.0  # times the median prompt
STOPS = 5.0  # times the typical gap, as long as a prompt's prefill stops the other streams
STOP_MS = 20.0
LATE_TIMES, LEAST_LATE = 3.0, 5  # TTFT of short prompts sent during such a prefill against the others, and how many
LEAST_LONG, MOST_LONG = 3, 0.3  # long prompts, and their share of all
# What holds a cell back and not only is there: of the whole time of the others, that their stops take, and of the short
# prompts, those that come late, fewer of which p95 TTFT does not show. A few prompts of a log-normal tail stay below.
HELD_BACK, LATE_SHARE = 0.05, 0.05
# Of what others wait longer, that computing a long prompt has to take: else they wait for something else.
EXPLAINS = 0.5
LEAST_LOADED = 0.25  # of the long and of the short, sent with the fewest in flight, tell what a long one takes
SPANS_MOST = 500  # of their prefills, evenly over the cell, tell the longest gap of each
DISPERSION = 3.0  # variance of arrivals in equal bins against their mean: 1 for Poisson, chance stays under 2
BIN_ARRIVALS = 5
PEAK_TIMES, PEAK_MS = 2.0, 20.0  # TTFT of the fullest bins against the others


def overload(case: Case) -> Finding | None:
    if not case.window.growth:
        return None
    waiting = case.most("waiting")
    queue = (
        "" if waiting is None else f"; at the server at most {waiting:.0f} were seen waiting ({case.names('waiting')})"
    )
    return Finding(
        f"the backlog grows by {case.window.growth:.2f} requests/s where {case.metric('arrival_rate') or 0:.2f}/s "
        f"arrive{queue}",
        "sure",
        "records",
        "Lower the rate until it no longer grows: that is the capacity; no figure here is one of a steady state",
    )


def small_batches(case: Case) -> Finding | None:
    """Requests are there and the batch does not take them, though KV memory is left."""
    running, waiting, most = case.said("running"), case.said("waiting"), case.most("running")
    kv = case.most("kv_usage")
    if running is None or waiting is None or not most or not running:
        return None
    if waiting < WAITING_SHARE * (running + waiting) or waiting < 1 or running < PLATEAU * most:
        return None
    if kv_binds(case):
        return None
    busy, cpu = case.gpus("gpu_busy"), case.host.rate("server_cpu") if case.host else None
    device = f"; the GPU was busy {busy:.0%} of the time" if busy is not None else ""
    if busy is None and cpu is not None:
        device = f"; its processes used {cpu:.1f} cores"
    memory = "how full its KV memory was is not known" if kv is None else f"at most {kv:.0%} of its KV memory was used"
    return Finding(
        f"{running:.1f} requests ran and {waiting:.1f} waited, on average; never more than {most:.0f} ran, and "
        f"{memory}{device}",
        "likely" if kv is None else "sure",
        case.names("running", "waiting", "kv_usage"),
        "Raise the server's batch limit (--max-num-seqs, --max-running-requests, --parallel) or its tokens a step, "
        "and see whether tokens/s rise",
    )


def arrival_bursts(case: Case, calm: np.ndarray | None = None) -> Finding | None:
    """Arrivals that come in heaps, and first tokens that are late in the heaps.

    `calm`: mask (n,) of the requests whose first tokens are looked at, None: all. The heaps are of the whole plan.
    """
    mine = due_in(case.cell, case.window)
    bins = int(mine.sum()) // BIN_ARRIVALS
    if bins < LEAST_BINS:
        return None
    width_ns = (case.window.end_ns - case.window.start_ns) / bins
    place = np.minimum(((case.cell["due_ns"] - case.window.start_ns) / width_ns).astype(int), bins - 1)
    counts = np.bincount(place[mine], minlength=bins)
    dispersion = float(counts.var(ddof=1) / counts.mean())
    ttft = SERIES["ttft"].of(case.cell, NOTHING).values
    known = case.ok & ~np.isnan(ttft) & (True if calm is None else calm)
    if dispersion < DISPERSION or not known.any():
        return None
    # The first tenth of the requests in the fullest bins: they make the queue in which the rest of the heap waits.
    full = counts[np.where(known, place, 0)] >= max(2 * counts.mean(), np.quantile(counts, 0.9))
    peak, rest = ttft[known & full], ttft[known & ~full]
    if len(peak) < LEAST_BINS or len(rest) < LEAST_BINS:
        return None
    high, low = float(np.median(peak)), float(np.median(rest))
    if high < PEAK_TIMES * low or high - low < PEAK_MS:
        return None
    return Finding(
        f"arrivals in bins of {width_ns / 1e9:.2g} s have {dispersion:.1f} times the variance of Poisson's; due in the "
        f"fullest, median TTFT is {high:.0f} ms, elsewhere {low:.0f} ms",
        "likely",
        "records",
        "Replay the same rate evenly (--rate with --arrivals constant) to see how much the bursts cost; then size for "
        "the peak, or let a queue in front smooth it",
    )


def long_prefills(case: Case) -> Finding | None:
    """While a long prompt is computed all streams stand still, or short prompts that come then wait for it."""
    cell, tokens = case.cell, case.prompt_tokens
    known = outcome_in(cell, "ok") & (tokens > 0) & (cell.counts > 0)
    if not known.any():
        return None
    middle = float(np.median(tokens[known]))
    long = known & (tokens >= LONG * middle)
    if not LEAST_LONG <= long.sum() <= MOST_LONG * known.sum():
        return None
    begun = (cell["sent_ns"] + np.nan_to_num(cell["server_queue_ms"]) * 1e6).astype(np.int64)
    spans = np.stack([begun[long], cell.first_ns[long]], axis=1)  # (k, 2): when the long ones are computed, ns
    short = case.ok & known & (tokens <= middle)
    takes_ms, by, source = _prefill(case, known, long, tokens <= middle)
    effects = (_stopped(cell, long, spans), _overtaken(case, short, spans))
    found = [text for ms, text in effects if text and takes_ms >= EXPLAINS * ms]
    if not found:
        return None
    return Finding(
        f"while one of {len(spans)} prompts of {LONG * middle:.0f} tokens or more is computed, "
        f"{' and '.join(found)}; computing one takes {by} {takes_ms:.0f} ms{_by_length(case, middle)}",
        "likely",
        f"records; {source}",
        "Switch chunked prefill on, or try other sizes of its chunk; or give long prompts a replica of their own",
    )


def _prefill(case: Case, known: np.ndarray, long: np.ndarray, short: np.ndarray) -> tuple[float, str, str]:
    """(ms, `about` or `at most`, by whose word): how long a long prompt is computed, whoever else waits.

    A server's histogram has all prompts in it: if the short ones took nothing, all of it was the long ones'. Where the
    server says nothing, it is by how much later the first token of a long one comes than that of a short one, of those
    that met the fewest others: they wait alike.
    """
    said = prefill_account(case.cell, long, None)
    if said.ms is not None:
        return said.ms, "about", f"prefill: {said.source}"
    scraped = account(case.cell, long, case.server, "prefill")
    if scraped.ms is not None:
        return scraped.ms * float(known.sum() / long.sum()), "at most", f"prefill: {scraped.source}"
    sent = case.cell["sent_ns"]
    beside = windows.level_at(*windows.in_flight(case.cell), sent - 1)
    ttft = SERIES["ttft_sent"].of(case.cell, NOTHING).values
    alone = []
    for rows in (known & long, known & short):
        mine = np.flatnonzero(rows & ~np.isnan(ttft))
        few = max(round(LEAST_LOADED * len(mine)), LEAST_LONG)
        alone.append(float(np.median(ttft[mine[np.argsort(beside[mine], kind="stable")][:few]])) if len(mine) else 0.0)
    return (
        max(alone[0] - alone[1], 0.0),
        "about",
        "prefill: TTFT by prompt length, of those sent with the fewest in flight",
    )


def _stopped(cell: Cell, long: np.ndarray, spans: np.ndarray) -> tuple[float, str]:
    """Gaps of other streams as long as a prefill, and none such elsewhere: their median in ms, and in words."""
    row, at, after = _event_gaps(cell)
    order = np.argsort(at, kind="stable")
    row, at, after = row[order], at[order], after[order]
    gap_ms = (after - at) / 1e6
    typical = float(np.median(gap_ms[gap_ms > 0])) if (gap_ms > 0).any() else 0.0
    reach = int((after - at).max(initial=0))  # no gap that began earlier than this before a moment lasts until it
    touched = _during(spans, at, after) & ~long[row]
    longest, every = [], -(-len(spans) // SPANS_MOST)
    for begun, first in spans[::every].tolist():
        near = slice(np.searchsorted(at, begun - reach), np.searchsorted(at, first))
        meets = (after[near] > begun) & ~long[row[near]]
        if meets.any():
            longest.append(float(gap_ms[near][meets].max()))
    if len(longest) < LEAST_LONG:
        return 0.0, ""
    stop = float(np.median(longest))
    shortest = float(np.quantile(np.diff(spans) / 1e6, 0.1))
    quiet = float(np.quantile(gap_ms[~touched], 0.99)) if (~touched).any() else 0.0
    if stop < max(STOPS * typical, STOP_MS, 0.5 * shortest, 2 * quiet):
        return 0.0, ""
    others = (cell.counts > 0) & ~long
    whole_ms = float((cell.last_ns - cell["sent_ns"])[others].sum()) / 1e6
    if float(gap_ms[touched & (gap_ms >= stop / 2)].sum()) < HELD_BACK * whole_ms:
        return 0.0, ""
    return stop, f"other streams stand still for {stop:.0f} ms (median; elsewhere 99% of gaps are under {quiet:.0f} ms)"


def _overtaken(case: Case, short: np.ndarray, spans: np.ndarray) -> tuple[float, str]:
    """Short prompts sent while a long one is computed, against those sent at other times: chosen by when they came.

    By how much later their first token comes, in ms, and in words.
    """
    sent = case.cell["sent_ns"]
    during = _during(spans, sent, sent + 1)
    ttft = SERIES["ttft_sent"].of(case.cell, NOTHING).values
    late, others = ttft[short & during], ttft[short & ~during]
    if len(late) < max(LEAST_LATE, LATE_SHARE * (len(late) + len(others))) or len(others) < LEAST_LATE:
        return 0.0, ""
    high, low = float(np.median(late)), float(np.median(others))
    if high < LATE_TIMES * low or high - low < STOP_MS:
        return 0.0, ""
    return high - low, f"short prompts that are sent then have a median TTFT of {high:.0f} ms, others {low:.0f} ms"


def _during(spans: np.ndarray, at: np.ndarray, until: np.ndarray) -> np.ndarray:
    """Mask (n,) of the times [at, until) that share one with any of `spans` (k, 2), both in ns; k is at least 1."""
    begun, ended = spans[np.argsort(spans[:, 0])].T
    last = np.searchsorted(begun, until) - 1  # of those that begin before it is over; the latest end of them decides
    return np.asarray((last >= 0) & (np.maximum.accumulate(ended)[last] > at))


def _event_gaps(cell: Cell) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, begin and end (ns) of every gap between two events of a request."""
    row = np.repeat(np.arange(cell.n), cell.counts)
    same = row[1:] == row[:-1]
    return row[1:][same], cell.event_ns[:-1][same], cell.event_ns[1:][same]


def _by_length(case: Case, middle: float) -> str:
    """TTFT by prompt length, in words."""
    ttft = SERIES["ttft"].of(case.cell, NOTHING).values
    known = case.ok & ~np.isnan(ttft)
    short, long = known & (case.prompt_tokens <= middle), known & (case.prompt_tokens >= LONG * middle)
    if not short.any() or not long.any():
        return ""
    of_short, of_long = ttft[short], ttft[long]
    return (
        f"; TTFT of prompts up to {middle:.0f} tokens: p50 {np.median(of_short):.0f}, p95 "
        f"{np.quantile(of_short, 0.95):.0f} ms, of the long ones p50 {np.median(of_long):.0f} ms"
    )
