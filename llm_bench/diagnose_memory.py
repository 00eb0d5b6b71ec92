"""Whether the server's memory holds a cell back: room for KV, preemptions, failures for want of it, its bandwidth."""

import re

import numpy as np

from llm_bench.evidence import LEAST_BINS, Case, Finding
from llm_bench.printable import clean, counted
from llm_bench.series import outcome_in

KV_FULL = 0.9  # on average; or so full that one more request like those in it would not fit
PREEMPTED_SHARE = 0.02  # preemptions a request
CONTEXT_GROWTH = 1.2  # tokens a request, second half of the window against the first
BUSY, MEMORY_BUSY = 0.8, 0.7  # of a GPU and of its memory
SCALES = 1.2  # tokens/s at twice the load, against which more load brings nothing
_MEMORY = re.compile(r"out of memory|\bOOM\b|kv[ -]?cache.{0,40}(full|exhaust|no space|not enough)", re.I)


def kv_binds(case: Case) -> bool:
    """Is the KV memory so full that one more request of the mean size would not fit? A few large ones leave gaps."""
    kv, most, running = case.said("kv_usage"), case.most("kv_usage"), case.said("running")
    if case.server is None or kv is None or most is None:
        return False
    memories = case.server.of["kv_usage"].parts  # one an engine, which holds its part of what runs
    return kv >= KV_FULL or bool(running and most + kv * memories / running > 1.0)


def kv_full(case: Case) -> Finding | None:
    kv, most, waiting = case.said("kv_usage"), case.most("kv_usage"), case.said("waiting")
    if kv is None or most is None or waiting is None or waiting < 1 or not kv_binds(case):
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


def preemptions(case: Case) -> Finding | None:
    count = case.said("preemptions")
    ended = int(outcome_in(case.cell, "ok").sum())
    if not count or count < PREEMPTED_SHARE * ended:
        return None
    kv = case.most("kv_usage")
    grown = _context_growth(case)
    full = "" if kv is None else f"; KV memory was up to {kv:.0%} full"
    return Finding(
        f"{counted(f'{count:.0f}', 'preemption')} where {counted(ended, 'request')} ended{full}"
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


def out_of_memory(case: Case) -> Finding | None:
    failed = np.flatnonzero(outcome_in(case.cell, "failed"))
    texts = [case.cell.at("error", int(row)) for row in failed]
    mine = [text for text in texts if _MEMORY.search(text)]
    if not mine:
        return None
    of = counted(len(texts), "failed request")
    return Finding(
        f"{len(mine):,} of {of} {'says' if len(mine) == 1 else 'say'} so, first: {clean(mine[0])[:120]}",
        "sure",
        "the server's errors",
        "Lower the memory fraction for KV or the batch limit; look into the server's log for the step that failed",
    )


def memory_bandwidth(case: Case) -> Finding | None:
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
