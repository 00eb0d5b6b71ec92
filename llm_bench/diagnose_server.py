"""What keeps a server slow that is not its batch: its CPU, what stands around its engine, what its cache gave."""

import numpy as np

from llm_bench.decompose import IN_ANSWERS
from llm_bench.diagnose_client import client_limited
from llm_bench.evidence import Case, Finding, cached_share

IDLE = 0.5  # of a GPU
REST_SHARE, REST_MS = 0.25, 20.0  # of e2e, that neither server nor network accounts for
CACHED_APART = 0.05  # of prompt tokens


def server_cpu(case: Case) -> Finding | None:
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


def front_end(case: Case) -> Finding | None:
    """The engine accounts for its time and the answers took longer: what stands around it is slow."""
    parts = case.parts
    if parts is None or client_limited(case) or parts.rest_ms < max(REST_MS, REST_SHARE * parts.e2e_ms):
        return None
    return Finding(
        f"of a mean e2e of {parts.e2e_ms:.0f} ms, {parts.rest_ms:.0f} ms are neither the client's lag, nor a round "
        "trip, nor in the server's queue, prefill and decode",
        "likely" if any(p.source == IN_ANSWERS for p in parts.parts) else "possible",
        "; ".join(dict.fromkeys(p.source for p in parts.parts if p.source)),
        "Look at what stands around the engine: HTTP server, tokenizer, detokenizer, a proxy or gateway between",
    )


def cache(case: Case) -> Finding | None:
    """Cells of one target and the same work that met its cache in different states."""
    mine, alike = cached_share(case), [other for other in case.siblings if _class_of(other) == _class_of(case)]
    theirs = [(share[0], other) for other in alike if (share := cached_share(other))]
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


def _class_of(case: Case) -> str:
    """The class of a mix that a cell measured by itself: its prompts share what they share, and no other class's."""
    return (case.cell.header.get("load") or {}).get("class_alone") or ""
