"""What held a cell back: RULES is the table from symptom to finding, each with its evidence and how sure it is.

A rule looks at records, at the driver's last word and at what was scraped of the server; what it would need and has not
is said, and no rule guesses at it. Without a finding, every rule that could be judged saw nothing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import windows
from llm_bench.client import BUSY as CLIENT_BUSY
from llm_bench.client import CLIENT_CHECKS, CLIENT_LIMITED, LATE, LIMITED, MAX_CPU_SHARE, STALLED
from llm_bench.columns import Cell
from llm_bench.decompose import IN_ANSWERS, STAMPS, account
from llm_bench.evidence import Case, Finding, Sure, cached_share, flushes
from llm_bench.facts import Facts
from llm_bench.series import NOTHING, SERIES, due_in, outcome_in

CLIENT_SHARE, CLIENT_LARGE = (
    0.05,
    0.2,
)  # of e2e (or the window), from which the client held a cell back at all, and much
WAITING_SHARE = 0.4  # of the requests at the server, that its queue holds, to call its batch the limit
PLATEAU = 0.8  # a batch that is on average so near its largest is held there by something
KV_FULL = 0.9  # on average; or so full that one more request like those in it would not fit
PREEMPTED_SHARE = 0.02  # preemptions a request
CONTEXT_GROWTH = 1.2  # tokens a request, second half of the window against the first
BUSY, IDLE = 0.8, 0.5  # of a GPU
MEMORY_BUSY = 0.7
SCALES = 1.2  # tokens/s at twice the load, against which more load brings nothing
REST_SHARE, REST_MS = 0.25, 20.0  # of e2e, that neither server nor network accounts for
LONG = 4.0  # times the median prompt
STOPS = 5.0  # times the typical gap, as long as a prompt's prefill stops the other streams
STOP_MS = 20.0
LATE_TIMES, LEAST_LATE = 3.0, 5  # TTFT of short prompts sent during such a prefill against the others, and how many
LEAST_LONG, MOST_LONG = 3, 0.3  # long prompts, and their share of all
SPANS_MOST = 500  # of their prefills are looked at, evenly over the cell
DISPERSION = 3.0  # variance of arrivals in equal bins against their mean: 1 for Poisson, chance stays under 2
BIN_ARRIVALS, LEAST_BINS = 5, 10
PEAK_TIMES, PEAK_MS = 2.0, 20.0  # TTFT of the fullest bins against the others
QUEUE_SHARE, QUEUE_MS = 0.5, 20.0  # of TTFT
SPIKE_TIMES, SPIKE_MS = 5.0, 100.0  # p95 TTFT against p50, of prompts up to the median
RTT_SHARE, RTT_MS = 0.25, 5.0  # of the median TTFT
LINK_MBIT = 400.0  # received; a link of 1 Gbit/s carries little more than twice that
TIMER_MS, TIMER_SPREAD, TIMER_TOKENS = 15.0, 0.15, 1.5  # interval, its quartiles apart, tokens a flush
TIMER_VARIES = 0.15  # spread of the tokens a flush from which on they do not set the interval
CACHED_APART = 0.05  # of prompt tokens
HOT = 1.5  # times the mean replica's tokens
SCRAPE_IT = "rerun with --metrics-url auto"
_MEMORY = re.compile(r"out of memory|\bOOM\b|kv[ -]?cache.{0,40}(full|exhaust|no space|not enough)", re.I)


class Rule(NamedTuple):
    find: Callable[[Case], Finding | None]
    needs: Callable[[Case], str] = lambda _: ""  # why it cannot be judged, "" where it can


class Diagnosis(NamedTuple):
    case: Case
    findings: Mapping[str, Finding]  # by kind, in the order of RULES
    judged: Sequence[str]  # kinds that were looked for
    unjudged: Mapping[str, str]  # kind -> what is missing


def diagnose(case: Case) -> Diagnosis:
    """Every rule's finding; a cell without an ok request in its window is judged by few."""
    unjudged = {kind: why for kind, rule in RULES.items() if (why := rule.needs(case))}
    judged = [kind for kind in RULES if kind not in unjudged]
    findings = {kind: found for kind in judged if (found := RULES[kind].find(case))}
    return Diagnosis(case, findings, judged, unjudged)


# ---- what a rule needs


def _needs_scrape(*wanted: str) -> Callable[[Case], str]:
    def why(case: Case) -> str:
        if case.server is None:
            return f"the server's metrics were not scraped, or under twice in the window: {SCRAPE_IT}"
        missing = [m for m in wanted if m not in case.server.of]
        return f"the server's metrics have no {', '.join(missing)}" if missing else ""

    return why


def _needs_ok(case: Case) -> str:
    return "" if case.ok.any() else "no ok request in the window"


def _needs_gpu(case: Case) -> str:
    return "" if case.gpus("gpu_busy") is not None else "no GPU was looked at: rerun with --gpu on the server's machine"


def _needs_streams(case: Case) -> str:
    return "" if (case.cell.counts[case.ok] > 1).any() else "no stream of two token-bearing events"


def _needs_open(case: Case) -> str:
    kind = (case.cell.header.get("load") or {}).get("kind")
    return "a closed loop decides its own arrivals" if kind == "closed" else _needs_ok(case)


def _needs_replicas(case: Case) -> str:
    if len(case.replicas) > 1:
        return ""
    if case.urls > 1:
        return (
            "the target has several URLs and records do not say which one answered; give each replica's metrics: "
            "rerun with --metrics-url URL|URL"
        )
    return "one server, as far as is known"


def _needs_account(case: Case) -> str:
    said = [case.parts.ms(name) for name in ("prefill", "decode")] if case.parts else [None]
    from_server = case.parts and not any(p.source.startswith(STAMPS) for p in case.parts.parts if p.name == "decode")
    if None in said or not from_server:
        return "the server gives no full account of its time (queue, prefill, decode)"
    return ""


# ---- the client, and the way there


def _client(case: Case) -> Finding | None:
    """What this client's own part is of the whole time; of TTFT alone it is a doubt of the report, and no cause."""
    facts = Facts(case.cell, case.window, (), (), case.end)
    doubts = {kind: doubt for kind in CLIENT_LIMITED if (doubt := CLIENT_CHECKS[kind](facts))}
    sizes = {kind: size for kind in doubts if (size := _CLIENT_SIZES[kind](case)) >= CLIENT_SHARE}
    if not sizes:
        return None
    worst = max(sizes, key=lambda kind: sizes[kind])
    large = sizes[worst] >= CLIENT_LARGE
    advice = doubts[worst].advice or "Use more --workers, or another machine"
    rest = "before that believe no other finding" if large else "latencies are that much too high; other findings stand"
    lag = case.parts.ms("client lag") if case.parts else None
    share = f"; its lag is {lag / case.parts.e2e_ms:.0%} of e2e" if case.parts and lag and case.parts.e2e_ms else ""
    return Finding(
        "; ".join(f"{kind}: {doubts[kind].text}" for kind in sizes) + share,
        "sure" if large else "possible",
        "this client's own stamps and CPU time",
        f"{advice}; {rest}",
    )


def _lag_size(case: Case) -> float:
    """Of the mean e2e."""
    lag = case.parts.ms("client lag") if case.parts else None
    return lag / case.parts.e2e_ms if case.parts and lag and case.parts.e2e_ms else 0.0


def _stall_size(case: Case) -> float:
    """Of the window, the stalls of all workers after each other."""
    stalls = case.end.get("loop_stalls")
    spans = [(at, at + ms * 1e6) for at, ms in stalls] if isinstance(stalls, list) else []
    begun, ended = np.array(spans, np.float64).reshape(-1, 2).T.astype(np.int64)
    return windows.overlap_s(begun, ended, case.window) / case.window.seconds


def _busy_size(case: Case) -> float:
    """How late its loop was (p99) against the mean e2e, all of it where the core was full."""
    facts = Facts(case.cell, case.window, (), (), case.end)
    if facts.ended("client_cpu_share") > MAX_CPU_SHARE or not case.parts or not case.parts.e2e_ms:
        return 1.0
    of_workers = case.end.get("worker_loop_lag_ms")
    lags = [facts.ended("loop_lag_p99_ms"), *(of_workers if isinstance(of_workers, list) else [])]
    return float(max(lags)) / case.parts.e2e_ms


# What a doubt about the client is of the whole, as a share. At the ceiling that selfcheck found it is all of it.
_CLIENT_SIZES: Mapping[str, Callable[[Case], float]] = {
    LATE: _lag_size,
    STALLED: _stall_size,
    CLIENT_BUSY: _busy_size,
    LIMITED: lambda _: 1.0,
}


def _network(case: Case) -> Finding | None:
    rtt_ms = (case.cell.header.get("probe") or {}).get("rtt_ms")
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


# ---- the queue


def _overload(case: Case) -> Finding | None:
    if not case.window.growth:
        return None
    waiting = case.most("waiting")
    queue = "" if waiting is None else f"; at the server up to {waiting:.0f} waited ({case.names('waiting')})"
    return Finding(
        f"the backlog grows by {case.window.growth:.2f} requests/s where {case.metric('arrival_rate') or 0:.2f}/s "
        f"arrive{queue}",
        "sure",
        "records",
        "Lower the rate until it no longer grows: that is the capacity; no figure here is one of a steady state",
    )


def _small_batches(case: Case) -> Finding | None:
    """Requests are there and the batch does not take them, though KV memory is left."""
    running, waiting, most = case.said("running"), case.said("waiting"), case.most("running")
    kv = case.most("kv_usage")
    if running is None or waiting is None or not most or not running:
        return None
    if waiting < WAITING_SHARE * (running + waiting) or waiting < 1 or running < PLATEAU * most:
        return None
    if _kv_binds(case):
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


def _kv_binds(case: Case) -> bool:
    """Is the KV memory so full that one more request of the mean size would not fit? A few large ones leave gaps."""
    kv, most, running = case.said("kv_usage"), case.most("kv_usage"), case.said("running")
    if kv is None or most is None:
        return False
    return kv >= KV_FULL or bool(running and most + kv / running > 1.0)


def _kv_full(case: Case) -> Finding | None:
    kv, most, waiting = case.said("kv_usage"), case.most("kv_usage"), case.said("waiting")
    if kv is None or most is None or waiting is None or waiting < 1 or not _kv_binds(case):
        return None
    running = case.said("running")
    each = f", by {running:.1f} requests," if running else ""
    return Finding(
        f"KV memory was {kv:.0%} full{each} on average (at most {most:.0%}) while {waiting:.1f} requests waited",
        "sure",
        case.names("kv_usage", "waiting"),
        "Give it more KV memory (a larger fraction, a smaller KV type, more GPUs), or shorter contexts; "
        "`llm-bench capacity` says what fits",
    )


def _preemptions(case: Case) -> Finding | None:
    count = case.said("preemptions")
    ended = int(outcome_in(case.cell, "ok").sum())
    if not count or count < PREEMPTED_SHARE * ended:
        return None
    kv = case.most("kv_usage")
    grown = _context_growth(case)
    full = "" if kv is None else f"; KV memory was up to {kv:.0%} full"
    return Finding(
        f"{count:.0f} preemptions where {ended} requests ended{full}"
        + (f"; requests of the second half hold {grown:.1f} times the tokens of the first" if grown else ""),
        "sure",
        case.names("preemptions", "kv_usage"),
        "Lower the batch limit, give more KV memory, or shorten contexts: what is preempted is computed again",
    )


def _context_growth(case: Case) -> float | None:
    tokens = (np.maximum(case.prompt_tokens, 0) + np.maximum(case.cell["tokens_out"], 0))[case.ok]
    half = len(tokens) // 2
    if half < LEAST_BINS or not tokens[:half].sum():
        return None
    grown = float(tokens[half:].mean() / tokens[:half].mean())
    return grown if grown >= CONTEXT_GROWTH else None


def _out_of_memory(case: Case) -> Finding | None:
    failed = np.flatnonzero(outcome_in(case.cell, "failed"))
    texts = [case.cell.at("error", int(row)) for row in failed]
    mine = [text for text in texts if _MEMORY.search(text)]
    if not mine:
        return None
    return Finding(
        f"{len(mine)} of {len(texts)} failed requests say so, first: {mine[0][:120]}",
        "sure",
        "the server's errors",
        "Lower the memory fraction for KV or the batch limit; look into the server's log for the step that failed",
    )


def _arrival_bursts(case: Case) -> Finding | None:
    """Arrivals that come in heaps, and first tokens that are late in the heaps."""
    mine = due_in(case.cell, case.window)
    bins = int(mine.sum()) // BIN_ARRIVALS
    if bins < LEAST_BINS:
        return None
    width_ns = (case.window.end_ns - case.window.start_ns) / bins
    place = np.minimum(((case.cell["due_ns"] - case.window.start_ns) / width_ns).astype(int), bins - 1)
    counts = np.bincount(place[mine], minlength=bins)
    dispersion = float(counts.var(ddof=1) / counts.mean())
    ttft = SERIES["ttft"].of(case.cell, NOTHING).values
    known = case.ok & ~np.isnan(ttft)
    if dispersion < DISPERSION or not known.any():
        return None
    # The first tenth of the requests in the fullest bins: they make the queue in which the rest of the heap waits.
    full = counts[np.where(known, place, 0)] >= max(2 * counts.mean(), np.quantile(counts, 0.9))
    peak, calm = ttft[known & full], ttft[known & ~full]
    if len(peak) < LEAST_BINS or len(calm) < LEAST_BINS:
        return None
    high, low = float(np.median(peak)), float(np.median(calm))
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


def _long_prefills(case: Case) -> Finding | None:
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
    found = [text for text in (_stopped(cell, long, spans), _overtaken(case, short, spans)) if text]
    if not found:
        return None
    return Finding(
        f"while one of {len(spans)} prompts of {LONG * middle:.0f} tokens or more is computed, "
        f"{' and '.join(found)}{_by_length(case, middle)}",
        "likely",
        "records",
        "Switch chunked prefill on, or try other sizes of its chunk; or give long prompts a replica of their own",
    )


def _stopped(cell: Cell, long: np.ndarray, spans: np.ndarray) -> str:
    """Gaps of other streams as long as a prefill, and none such elsewhere."""
    row, at, after = _event_gaps(cell)
    order = np.argsort(at, kind="stable")
    row, at, after = row[order], at[order], after[order]
    gap_ms = (after - at) / 1e6
    typical = float(np.median(gap_ms[gap_ms > 0])) if (gap_ms > 0).any() else 0.0
    reach = int((after - at).max(initial=0))  # no gap that began earlier than this before a moment lasts until it
    touched, longest = np.zeros(len(at), bool), []
    for begun, first in spans[:: -(-len(spans) // SPANS_MOST)].tolist():
        near = slice(np.searchsorted(at, begun - reach), np.searchsorted(at, first))
        meets = (after[near] > begun) & ~long[row[near]]
        touched[near] |= meets
        if meets.any():
            longest.append(float(gap_ms[near][meets].max()))
    if len(longest) < LEAST_LONG:
        return ""
    stop = float(np.median(longest))
    shortest = float(np.quantile(np.diff(spans) / 1e6, 0.1))
    quiet = float(np.quantile(gap_ms[~touched], 0.99)) if (~touched).any() else 0.0
    if stop < max(STOPS * typical, STOP_MS, 0.5 * shortest, 2 * quiet):
        return ""
    return f"other streams stand still for {stop:.0f} ms (median; elsewhere 99% of gaps are under {quiet:.0f} ms)"


def _overtaken(case: Case, short: np.ndarray, spans: np.ndarray) -> str:
    """Short prompts sent while a long one is computed, against those sent at other times: chosen by when they came."""
    sent = case.cell["sent_ns"]
    begun, first = spans[np.argsort(spans[:, 0])].T
    last = np.searchsorted(begun, sent, "right") - 1  # of those that had begun; the latest end of them decides
    during = (last >= 0) & (np.maximum.accumulate(first)[last] > sent)
    ttft = SERIES["ttft_sent"].of(case.cell, NOTHING).values
    late, others = ttft[short & during], ttft[short & ~during]
    if len(late) < LEAST_LATE or len(others) < LEAST_LATE:
        return ""
    high, low = float(np.median(late)), float(np.median(others))
    if high < LATE_TIMES * low or high - low < STOP_MS:
        return ""
    return f"short prompts that are sent then have a median TTFT of {high:.0f} ms, others {low:.0f} ms"


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


def _queueing(case: Case) -> Finding | None:
    """The queue is most of TTFT, and no rule above has its cause."""
    if _explained(case):
        return None
    queue, ttft = account(case.cell, case.ok, case.server, "queue"), case.values("ttft_sent")
    mean = float(ttft.mean()) if len(ttft) else 0.0
    if queue.ms is None or queue.ms < QUEUE_MS or queue.ms < QUEUE_SHARE * mean:
        return None
    return Finding(
        f"{queue.ms:.0f} ms of a mean TTFT of {mean:.0f} ms are waiting in the server's queue",
        "sure" if queue.source == IN_ANSWERS else "likely",
        queue.source,
        _next_of_a_queue(case),
    )


def _next_of_a_queue(case: Case) -> str:
    """By which of its causes were looked for: what was not judged explains nothing away."""
    causes = ("small batches", "KV memory full", "preemption storm", "long prefills")
    missing = [kind for kind in causes if RULES[kind].needs(case)]
    judged = [kind for kind in causes if kind not in missing]
    if missing:
        unscraped = case.server is None and missing != ["long prefills"]
        todo = SCRAPE_IT if unscraped else f"see why below ({RULES[missing[0]].needs(case)})"
        seen = f"; {' and '.join(judged)} were looked for and not seen" if judged else ""
        return f"{', '.join(missing)} could not be judged: {todo}{seen}. More replicas shorten any queue"
    return (
        f"{', '.join(judged)} were looked for and do not explain it: look at the tokens a step, at scheduling, at what "
        "the server does beside; more replicas shorten any queue"
    )


def _spikes(case: Case) -> Finding | None:
    """First tokens of short prompts that are late now and then, and no rule above has the cause."""
    if _explained(case) or _queueing(case):
        return None
    ttft = SERIES["ttft"].of(case.cell, NOTHING).values
    known = case.ok & ~np.isnan(ttft)
    tokens = case.prompt_tokens
    short = ttft[known & (tokens <= np.median(tokens[known]))] if known.any() else ttft[:0]
    if len(short) < 2 * LEAST_BINS:
        return None
    p50, p95 = float(np.median(short)), float(np.quantile(short, 0.95))
    if p95 < SPIKE_TIMES * p50 or p95 - p50 < SPIKE_MS:
        return None
    return Finding(
        f"of prompts up to the median length, p95 TTFT is {p95:.0f} ms, p50 {p50:.0f} ms",
        "possible",
        "records; the server says nothing of its queue",
        f"{SCRAPE_IT[0].upper()}{SCRAPE_IT[1:]}: queue time and preemptions tell the causes apart",
    )


def _explained(case: Case) -> bool:
    return any(not RULES[kind].needs(case) and RULES[kind].find(case) for kind in CAUSES)


# ---- busy, and yet slow


def _server_cpu(case: Case) -> Finding | None:
    busy, cpu = case.gpus("gpu_busy"), case.host.rate("server_cpu") if case.host else None
    in_flight = case.metric("in_flight") or 0.0
    if busy is None or busy >= IDLE or in_flight < 2:
        return None
    if cpu is None:
        return Finding(
            f"the GPU was busy {busy:.0%} of the time while {in_flight:.1f} requests were in flight",
            "possible",
            "NVML, records",
            "Look at the CPU time of the server's processes: tokenizing, scheduling and detokenizing are done there",
        )
    if cpu < 0.9:
        return None
    return Finding(
        f"the GPU was busy {busy:.0%} of the time, the server's processes used {cpu:.1f} cores, with "
        f"{in_flight:.1f} requests in flight",
        "likely",
        "NVML, /proc, records",
        "Find the thread at 100%: tokenizer, scheduler or detokenizer; more API processes, or a faster tokenizer",
    )


def _frontend(case: Case) -> Finding | None:
    """The engine accounts for its time and the answers took longer: what stands around it is slow."""
    parts = case.parts
    if parts is None or _client(case) or parts.rest_ms < max(REST_MS, REST_SHARE * parts.e2e_ms):
        return None
    return Finding(
        f"of a mean e2e of {parts.e2e_ms:.0f} ms, {parts.rest_ms:.0f} ms are neither the client's lag, nor a round "
        "trip, nor in the server's queue, prefill and decode",
        "likely" if any(p.source == IN_ANSWERS for p in parts.parts) else "possible",
        "; ".join(dict.fromkeys(p.source for p in parts.parts if p.source)),
        "Look at what stands around the engine: HTTP server, tokenizer, detokenizer, a proxy or gateway between",
    )


def _memory_bandwidth(case: Case) -> Finding | None:
    """Twice the load brought little more, with a larger batch, while the GPU's memory was the busy part."""
    busy, memory, running = case.gpus("gpu_busy"), case.gpus("gpu_memory_busy"), case.said("running")
    if busy is None or memory is None or busy < BUSY or memory < MEMORY_BUSY:
        return None
    mine, rate = _slots(case), case.metric("tokens_per_second")
    for other in case.siblings:
        theirs, before, had = _slots(other), other.metric("tokens_per_second"), other.said("running")
        if not (mine and theirs and rate and before) or mine < 2 * theirs or rate >= SCALES * before:
            continue
        if running is not None and had is not None and running < 1.5 * had:
            continue
        return Finding(
            f"from {other.load} to {case.load} tokens/s went from {before:.0f} to {rate:.0f}, and the GPU's memory was "
            f"read or written {memory:.0%} of the time",
            "likely",
            "NVML, records",
            "Smaller weights or KV (quantisation, fewer KV heads), shorter contexts, or more GPUs: batching has given "
            "what it can",
        )
    return None


def _slots(case: Case) -> int | None:
    found = (case.cell.header.get("load") or {}).get("concurrency")
    return int(found) if found else None


# ---- how tokens arrive


def _batched_stream(case: Case) -> tuple[bool, Finding] | None:
    """(is it a timer, finding) where events come in flushes of several tokens at a steady interval."""
    found = flushes(case.cell, case.ok)
    if found is None or found.every_ms < TIMER_MS or found.spread > TIMER_SPREAD or found.tokens < TIMER_TOKENS:
        return None
    seen = (
        f"tokens come every {found.every_ms:.1f} ms (quartiles {found.spread:.0%} apart), {found.tokens:.1f} at a time"
    )
    others = [f for other in case.siblings if (f := flushes(other.cell, other.ok)) and f.tokens >= TIMER_TOKENS]
    steady = [f for f in others if _near(f.every_ms, found.every_ms, 0.1)]
    sized = [f for f in others if _near(f.tokens, found.tokens, 0.1) and not _near(f.every_ms, found.every_ms, 0.2)]
    timer = found.varies >= TIMER_VARIES or any(not _near(f.tokens, found.tokens, 0.2) for f in steady)
    zero = case.metric("zero_gap_share") or 0.0
    if timer and not sized:
        how = (
            f"at a time {found.varies:.0%} more or fewer" if found.varies >= TIMER_VARIES else "as many at other loads"
        )
        how = how.replace("as many", "not as many")
        several = f", {found.events:.1f} events a time; {zero:.0%} of the gaps are 0" if found.events > 1.2 else ""
        sure: Sure = "likely" if found.events > 1.2 or steady else "possible"
        text = f"{seen}, {how}, at the same interval{several}"
        check = "Look for a flush interval in the gateway or serving layer (Ray Serve LLM: 50 ms); ITL and TPOT are its"
        return True, Finding(text, sure, "records", f"{check}, not the engine's. Speculative decoding looks alike")
    why = "the same number at another interval at another load" if sized else "a timer, or a fixed number an event"
    check = (
        "Ask for one token an event (vLLM: --stream-interval 1) to see the engine's own gaps; tpot is right as it is"
    )
    return False, Finding(f"{seen}: {why}", "likely" if sized else "possible", "records", check)


def _near(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * max(a, b)


def _timer(case: Case) -> Finding | None:
    found = _batched_stream(case)
    return found[1] if found and found[0] else None


def _packed(case: Case) -> Finding | None:
    found = _batched_stream(case)
    return found[1] if found and not found[0] else None


# ---- what makes cells differ


def _needs_cache(case: Case) -> str:
    return "" if cached_share(case) else "the server says nothing of its prefix cache"


def _cache(case: Case) -> Finding | None:
    """Cells of one target that met its cache in different states."""
    mine = cached_share(case)
    theirs = [(share[0], other) for other in case.siblings if (share := cached_share(other))]
    if mine is None or not theirs:
        return None
    least, other = min(theirs, key=lambda of: of[0])
    if mine[0] - least < CACHED_APART:
        return None
    ttft = ", ".join(
        f"{name} {np.median(values):.0f} ms"
        for name, values in ((other.load, other.values("ttft_sent")), (case.load, case.values("ttft_sent")))
        if len(values)
    )
    return Finding(
        f"{mine[0]:.0%} of the prompt tokens were in the cache, {least:.0%} at {other.load}"
        + (f"; median TTFT: {ttft}" if ttft else ""),
        "sure",
        mine[1],
        "Compare cells with equal shares only: restart the server between them, switch its prefix cache off, or let "
        "prompts differ (no --reuse-prompts)",
    )


def _hot_replica(case: Case) -> Finding | None:
    """One of several replicas has far more of the work than its share."""
    metric = next(
        (
            m
            for m in ("generated_tokens", "requests_ended", "running")
            if all(m in f.of for f in case.replicas.values())
        ),
        None,
    )
    if metric is None:
        return None
    of = {url: f.value(metric) or 0.0 for url, f in case.replicas.items()}
    mean = sum(of.values()) / len(of)
    url, most = max(of.items(), key=lambda item: item[1])
    if not mean or most < HOT * mean:
        return None
    shares = ", ".join(f"{name} {value / sum(of.values()):.0%}" for name, value in of.items())
    waits = {name: f.value("waiting") for name, f in case.replicas.items()}
    queue = ""
    if None not in waits.values():
        queue = f"; waiting on average: {', '.join(f'{name} {value:.1f}' for name, value in waits.items())}"
    return Finding(
        f"{url} has {most / mean:.1f} times the {metric.replace('_', ' ')} of the mean replica ({shares}){queue}",
        "sure",
        case.names(metric),
        "Look at how requests are spread: session affinity, prefix routing, round robin over unequal lengths",
    )


RULES: dict[str, Rule] = {
    "client limited": Rule(_client),
    "network limited": Rule(_network, _needs_ok),
    "overload": Rule(_overload, _needs_open),
    "small batches": Rule(_small_batches, _needs_scrape("running", "waiting")),
    "KV memory full": Rule(_kv_full, _needs_scrape("kv_usage", "waiting")),
    "preemption storm": Rule(_preemptions, _needs_scrape("preemptions")),
    "out of memory": Rule(_out_of_memory),
    "long prefills": Rule(_long_prefills, _needs_streams),
    "arrival bursts": Rule(_arrival_bursts, _needs_open),
    "queueing": Rule(_queueing, _needs_ok),
    "TTFT spikes": Rule(_spikes, _needs_ok),
    "server CPU": Rule(_server_cpu, _needs_gpu),
    "server front end": Rule(_frontend, _needs_account),
    "memory bandwidth": Rule(_memory_bandwidth, _needs_gpu),
    "timer-batched stream": Rule(_timer, _needs_streams),
    "events of several tokens": Rule(_packed, _needs_streams),
    "cache effects": Rule(_cache, _needs_cache),
    "hot replica": Rule(_hot_replica, _needs_replicas),
}
# Kinds that explain why first tokens are late: where one is found, the symptom alone is no finding of its own.
CAUSES = (
    "client limited",
    "overload",
    "small batches",
    "KV memory full",
    "preemption storm",
    "long prefills",
    "arrival bursts",
    "hot replica",
)
