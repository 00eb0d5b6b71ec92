"""What held a cell back: RULES is the table from symptom to finding, each with its evidence and how sure it is.

A rule looks at records, at the driver's last word and at what was scraped of the server; what it would need and has not
is said, and no rule guesses at it. Without a finding, every rule that could be judged saw nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import windows
from llm_bench.decompose import IN_ANSWERS, SCRAPED, STAMPS, account
from llm_bench.diagnose_client import Calm, client_limited, network_limited, untouched
from llm_bench.diagnose_failures import failed_requests
from llm_bench.diagnose_memory import kv_full, memory_bandwidth, out_of_memory, preemptions
from llm_bench.diagnose_queue import arrival_bursts, long_prefills, overload, small_batches
from llm_bench.diagnose_replicas import hot_by_metrics, hot_replica, needs_replicas, unseen_replicas
from llm_bench.diagnose_server import cache, front_end, server_cpu
from llm_bench.diagnose_stream import packed, timer
from llm_bench.evidence import IN_USAGE, LEAST_BINS, Case, Finding, cached_share
from llm_bench.series import NOTHING, SERIES

QUEUE_SHARE, QUEUE_MS = 0.5, 20.0  # of TTFT
SPIKE_TIMES, SPIKE_MS = 5.0, 100.0  # p95 TTFT against p50, of prompts up to the median
CLIENT = "client limited"
STILL = "this holds without what this client held up"
SCRAPE_IT = "rerun with --metrics-url auto"


class Rule(NamedTuple):
    find: Callable[[Case], Finding | None]
    needs: Callable[[Case], str] = lambda _: ""  # why it cannot be judged, "" where it can
    unseen: Callable[[Case], str] = lambda _: ""  # why not finding it says nothing, "" where it does


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
    for kind in [kind for kind in judged if kind not in findings]:
        if why := RULES[kind].unseen(case):
            judged.remove(kind)
            unjudged[kind] = why
    alone = [kind for kind in findings if kind in CLIENT_ALONE] if CLIENT in findings else []
    if alone:
        calm = untouched(case)
        for kind in alone:
            seen, again = findings.pop(kind).seen, CLIENT_ALONE[kind](case, calm)
            if again is None:
                judged.remove(kind)
                unjudged[kind] = f"this client was the limit, and what it held up can look so by itself: {seen}"
            else:
                findings[kind] = again._replace(seen=f"{again.seen}; {STILL}")
    return Diagnosis(case, {kind: findings[kind] for kind in RULES if kind in findings}, judged, unjudged)


# ---- what a rule needs


def _needs_scrape(*wanted: str) -> Callable[[Case], str]:
    def why(case: Case) -> str:
        if case.server is None:
            return f"the server's metrics were not scraped, or under twice in the window: {SCRAPE_IT}"
        missing = [m for m in wanted if m not in case.server.of]
        if missing:
            return f"the server's metrics have no {', '.join(missing)}"
        return next(filter(None, (case.fell(m) for m in wanted)), "")

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


def _needs_account(case: Case) -> str:
    said = [case.parts.ms(name) for name in ("prefill", "decode")] if case.parts else [None]
    from_server = case.parts and not any(p.source.startswith(STAMPS) for p in case.parts.parts if p.name == "decode")
    if None in said or not from_server:
        return "the server gives no full account of its time (queue, prefill, decode)"
    return ""


def _needs_cache(case: Case) -> str:
    if cached_share(case):
        return ""
    return case.fell("cache_hits") or case.fell("cache_queries") or "the server says nothing of its prefix cache"


# ---- what a rule may not have seen: what happened while nobody scraped, where it has no other word


def _queue_in_part(case: Case) -> str:
    scraped = account(case.cell, case.ok, case.server, "queue").source.startswith(SCRAPED)
    return case.scraped_part() if scraped else ""


def _account_in_part(case: Case) -> str:
    scraped = case.parts and any(p.source.startswith(SCRAPED) for p in case.parts.parts)
    return case.scraped_part() if scraped else ""


def _cache_in_part(case: Case) -> str:
    share = cached_share(case)
    return case.scraped_part() if share and share[1] != IN_USAGE else ""


# ---- symptoms, where no rule above has the cause


def _queueing(case: Case) -> Finding | None:
    """The queue is most of TTFT, and no rule above has its cause."""
    if _explained(case):
        return None
    queue, ttft = account(case.cell, case.ok, case.server, "queue"), case.values("ttft_sent")
    what, times = ("TTFT", ttft) if len(ttft) else ("e2e", case.values("e2e_sent"))  # whole answers have no TTFT
    mean = float(times.mean()) if len(times) else 0.0
    if queue.ms is None or queue.ms < QUEUE_MS or queue.ms < QUEUE_SHARE * mean:
        return None
    return Finding(
        f"{queue.ms:.0f} ms of a mean {what} of {mean:.0f} ms are waiting in the server's queue",
        "sure" if queue.source == IN_ANSWERS else "likely",
        queue.source,
        _next_of_a_queue(case),
    )


def _next_of_a_queue(case: Case) -> str:
    """By which of its causes were looked for: what was not judged explains nothing away."""
    causes = ["small batches", "KV memory full", "preemption storm", "long prefills"]
    if case.work == "single pass":
        causes = causes[:1]  # nothing is kept in memory between steps: there is one
    why = {kind: RULES[kind].needs(case) or RULES[kind].unseen(case) for kind in causes}
    missing = [kind for kind in causes if why[kind]]
    judged = [kind for kind in causes if kind not in missing]
    if missing:
        unscraped = case.server is None and missing != ["long prefills"]
        todo = SCRAPE_IT if unscraped else f"see why below ({why[missing[0]]})"
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


RULES: dict[str, Rule] = {
    "failed requests": Rule(failed_requests),  # first: where it finds some, all others speak of those that were left
    CLIENT: Rule(client_limited),
    "network limited": Rule(network_limited, _needs_ok),
    "overload": Rule(overload, _needs_open),
    "small batches": Rule(small_batches, _needs_scrape("running", "waiting"), Case.scraped_part),
    "KV memory full": Rule(kv_full, _needs_scrape("kv_usage", "waiting"), Case.scraped_part),
    "preemption storm": Rule(preemptions, _needs_scrape("preemptions"), Case.scraped_part),
    "out of memory": Rule(out_of_memory),
    "long prefills": Rule(long_prefills, _needs_streams),
    "arrival bursts": Rule(arrival_bursts, _needs_open),
    "queueing": Rule(_queueing, _needs_ok, _queue_in_part),
    "TTFT spikes": Rule(_spikes, _needs_ok),
    "server CPU": Rule(server_cpu, _needs_gpu, Case.gpus_part),
    "server front end": Rule(front_end, _needs_account, _account_in_part),
    "memory bandwidth": Rule(memory_bandwidth, _needs_gpu, Case.gpus_part),
    "timer-batched stream": Rule(timer, _needs_streams),
    "events of several tokens": Rule(packed, _needs_streams),
    "cache effects": Rule(cache, _needs_cache, _cache_in_part),
    "hot replica": Rule(hot_replica, needs_replicas, unseen_replicas),
}
# Kinds that explain why first tokens are late: where one is found, the symptom alone is no finding of its own.
CAUSES = (
    CLIENT,
    "overload",
    "small batches",
    "KV memory full",
    "preemption storm",
    "long prefills",
    "arrival bursts",
    "hot replica",
)


# Kinds that a client which stands still or is late can look like by itself, since they rest on its own stamps: each is
# looked for once more in what it did not touch. What rests on the server's word stays, and heaps are the plan's.
CLIENT_ALONE: Mapping[str, Callable[[Case, Calm | None], Finding | None]] = {
    "overload": lambda case, _: overload(case) if windows.grows_in_time(case.cell, case.window) else None,
    "long prefills": lambda _, calm: long_prefills(calm.case) if calm else None,
    "arrival bursts": lambda case, calm: arrival_bursts(case, calm.rows) if calm else None,
    "timer-batched stream": lambda _, calm: timer(calm.case) if calm else None,
    "events of several tokens": lambda _, calm: packed(calm.case) if calm else None,
    "hot replica": lambda case, calm: hot_by_metrics(case) or (hot_replica(calm.case) if calm else None),
}
