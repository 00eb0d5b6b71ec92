"""Which requests failed, how, and when: what was measured of the others is of survivors."""

import numpy as np

from llm_bench import printable
from llm_bench.evidence import Case, Finding
from llm_bench.outcomes import Failure, failures
from llm_bench.series import due_in, outcome_in

LEAST_SHARE = 0.01  # of ok + failed: the error rate that a search allows by itself
MIDDLE = 0.1  # of the failures are left out at either end, to say when most of them came
SHOWN = 120  # letters of an error

# What to look at, by kind of METRICS.md's outcomes.
CHECKS: dict[str, str] = {
    "connect_error": "whether the server listens all the time (restarts, a full listen queue), and its address",
    "connect_timeout": "the network and the server's listen queue: connections were not accepted",
    "rejected": "the limit that refuses (requests that run or wait, a gateway's rate), or lower the load",
    "http_4xx": "what the server says of the request: model name, context limit, parameters, key",
    "http_5xx": "the server's log at that time",
    "server_error_in_stream": "the server's log at that time: it failed after it had begun to answer",
    "truncated_stream": "the server's log for a worker that died, and the time-outs of any proxy between",
    "empty_output": "prompts and parameters: the server ends at once, without a token",
    "short_output": "whether ignore_eos and min_tokens are obeyed: answers end before the length that was asked for",
    "ttft_timeout": "its queue: no token came in time; lower the load, or raise --ttft-timeout to see how late it is",
    "stall_timeout": "what stops a stream that has begun: preemption, a dead worker, a proxy",
    "total_timeout": "the load and the lengths: answers take longer than --total-timeout",
    "protocol_error": "the API (--api) and any proxy between: what came is not what the protocol says",
}
UNKNOWN = "the error, and the server's log"  # a kind of another version's


def failed_requests(case: Case) -> Finding | None:
    """Of the requests due in the window or, where none of it ended ok or failed, of the whole cell."""
    failed, judged = outcome_in(case.cell, "failed"), outcome_in(case.cell, "ok", "failed")
    mine, of = judged & due_in(case.cell, case.window), "due in the window"
    if not mine.any():
        mine, of = judged, "of the whole cell (none was due in a window)"
    lost, total = int((failed & mine).sum()), int(mine.sum())
    if not lost or lost < LEAST_SHARE * total:
        return None
    kinds = sorted(failures(case.cell, mine), key=lambda kind: -kind.requests)
    left = f"every latency here is of the {total - lost:,} that were answered, and of no user who failed"
    if lost == total:
        left = "none was answered: there is no latency, and no other cause can be looked for in it"
    return Finding(
        f"{lost:,} of {printable.counted(total, 'request')} {of} failed ({lost / total:.1%}): {_in_words(kinds)}; "
        f"{_when(case, mine, failed)}; {left}",
        "sure",
        "records",
        "; ".join(f"{printable.clean(kind.kind)}: {CHECKS.get(kind.kind, UNKNOWN)}" for kind in kinds),
    )


def _in_words(kinds: list[Failure]) -> str:
    """`http_5xx 500 x20 (67% of them), first: "busy"; connect_error 10 (33% of them), first: ...`."""
    total = sum(kind.requests for kind in kinds)
    shares = [f" ({kind.requests / total:.0%} of them)" if len(kinds) > 1 else "" for kind in kinds]
    return "; ".join(
        f"{printable.clean(kind.text)}{share}, first: {printable.clean(kind.first_error)[:SHOWN]}"
        for kind, share in zip(kinds, shares, strict=True)
    )


def _when(case: Case, mine: np.ndarray, failed: np.ndarray) -> str:
    """Between which due times most of the failures lie, and which share of the requests then due failed."""
    since_s = (case.cell["due_ns"] - case.window.start_ns) / 1e9
    begun, ended = np.quantile(since_s[mine & failed], (MIDDLE, 1 - MIDDLE), method="nearest").tolist()
    then = mine & (since_s >= begun) & (since_s <= ended)
    share = (failed & then).sum() / then.sum()
    return (
        f"most of them were due from {begun:.4g} to {ended:.4g} s of a window of {case.window.seconds:.4g} s, "
        f"where {share:.0%} failed"
    )
