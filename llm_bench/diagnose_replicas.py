"""Whether one of several replicas is slower, fails more or has more of the work: by their metrics, by own records."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from llm_bench import printable, stats
from llm_bench.evidence import Case, Finding, Sure
from llm_bench.series import NOTHING, SERIES, due_in, outcome_in
from llm_bench.server_names import METRICS_OF

HOT = 1.5  # times the mean replica's tokens
SLOW = 1.3  # times the others' median
SLOW_MS = {"ttft_sent": 5.0, "tpot": 1.0, "e2e_sent": 10.0}  # and so much more: a machine's own unevenness stays below
NAMES = {"ttft_sent": "TTFT", "tpot": "TPOT", "e2e_sent": "e2e"}
# The window in equal parts, of which nearly all have to show it; and intervals of the two medians that do not meet. Of
# 600 pairs of equal queues at loads of 0.5 to 0.9 that were simulated so 2 were named, without the intervals 56.
PARTS, SLOWER_PARTS, LEAST_IN_PART = 10, 9, 5
LEAST_FAILED, FAILS_TIMES = 5, 2.0
CONFIDENCE, T9 = 0.99, 3.250  # two-sided, of Student's t with 9 degrees of freedom
DEPENDENCE = (0.25, 0.5, 0.75)  # quantiles at which it is asked how far requests hang together
LONGER = 1.25  # times the others' median tokens: then the requests may be why
CHECK = "Look at that replica: its GPU and clocks, neighbours, settings, cache; take it out and measure again"


class OfUrl(NamedTuple):
    """What the records say of one of the target's URLs, of the requests due in the window."""

    url: str
    requests: int
    ok: int
    failed: int
    tokens_out: int  # of the ok ones, where they are known
    median_ms: Mapping[str, float]  # of SLOW_MS, as far as ok requests have them


def of_urls(case: Case) -> list[OfUrl]:
    """By URL; empty where the records know of one alone."""
    index, due = case.cell["url_index"], due_in(case.cell, case.window)
    known = sorted(set(index[due & (index >= 0)].tolist()))
    if len(known) < 2:
        return []
    failed, out = outcome_in(case.cell, "failed"), np.maximum(case.cell["tokens_out"], 0)
    values = {name: SERIES[name].of(case.cell, NOTHING).values for name in SLOW_MS}
    found = []
    for k in known:
        mine, ok = due & (index == k), case.ok & (index == k)
        medians = {name: float(np.nanmedian(v[ok])) for name, v in values.items() if not np.isnan(v[ok]).all()}
        requests, answered, gone = (int(rows.sum()) for rows in (mine, ok, mine & failed))
        found.append(OfUrl(name_of(case, k), requests, answered, gone, int(out[ok].sum()), medians))
    return found


def name_of(case: Case, index: int) -> str:
    """As it was typed, made harmless to print."""
    return printable.clean(case.urls[index]) if index < len(case.urls) else f"URL {index}"


def text(of: OfUrl) -> str:
    """`http://a:8000: 500 requests, 0 failed, median TTFT 50.0 ms, TPOT 20.0 ms, e2e 130.0 ms`."""
    medians = ", ".join(f"{NAMES[name]} {ms:.1f} ms" for name, ms in of.median_ms.items())
    requests = printable.counted(of.requests, "request")
    return f"{of.url}: {requests}, {of.failed} failed{f', median {medians}' if medians else ''}"


def needs_replicas(case: Case) -> str:
    return "" if len(case.replicas) > 1 else _needs_records(case)


def unseen_replicas(case: Case) -> str:
    """Where the records do not tell the URLs apart, all rests on what the replicas say, and on when they said it."""
    if not _needs_records(case):
        return ""
    return case.scraped_part() if _told(case) else "the replicas' metrics have no count of their work in common"


def _needs_records(case: Case) -> str:
    """Why the records alone cannot tell one URL from another; "" where they can."""
    by_url = of_urls(case)
    if len(by_url) > 1:
        least = PARTS * LEAST_IN_PART
        few = [of for of in by_url if of.requests < least]
        if not few:
            return ""
        had = printable.counted(few[0].requests, "request")
        return f"{few[0].url} had {had} in the window, {least} are needed of each"
    if len(case.urls) > 1:
        return (
            "the target has several URLs and the records do not say which one answered; give each replica's metrics: "
            "rerun with --metrics-url URL|URL"
        )
    return "one server, as far as is known"


def hot_replica(case: Case) -> Finding | None:
    """By what the replicas say, else by what this client saw of each."""
    return hot_by_metrics(case) or _failing(case) or _slow(case)


def _told(case: Case) -> str | None:
    """What of their work all replicas tell."""
    wanted = ("generated_tokens", "requests_ended", "running")
    told = [{m for m, of in f.of.items() if not of.resets} for f in case.replicas.values()]  # a fallen counter is none
    return next((m for m in wanted if all(m in of for of in told)), None)


def hot_by_metrics(case: Case) -> Finding | None:
    """One of several replicas has far more of the work than its share."""
    metric = _told(case)
    if metric is None or len(case.replicas) < 2:
        return None
    # A replica that was scraped for longer has not more work: counters are compared by the second.
    counter = METRICS_OF[metric].kind == "counter"
    of = {url: (f.rate(metric) if counter else f.value(metric)) or 0.0 for url, f in case.replicas.items()}
    mean = sum(of.values()) / len(of)
    url, most = max(of.items(), key=lambda item: item[1])
    if not mean or most < HOT * mean:
        return None
    shares = ", ".join(f"{name} {value / sum(of.values()):.0%}" for name, value in of.items())
    waits = {name: f.value("waiting") for name, f in case.replicas.items()}
    queue = ""
    if None not in waits.values():
        queue = f"; waiting on average: {', '.join(f'{name} {value:.1f}' for name, value in waits.items())}"
    what = f"{metric.replace('_', ' ')} a second" if counter else "running requests"  # the only gauge of `_told`
    return Finding(
        f"{url} has {most / mean:.1f} times the {what} of the mean replica ({shares}){queue}",
        "likely" if case.server and case.server.apart else "sure",  # of other times the load may have been another
        case.names(metric),
        "Look at how requests are spread: session affinity, prefix routing, round robin over unequal lengths",
    )


def _failing(case: Case) -> Finding | None:
    """One URL fails more than the others do, beyond what chance makes of equal ones."""
    by_url = of_urls(case)
    if not by_url or needs_replicas(case):
        return None
    worst = max(by_url, key=lambda of: of.failed / of.requests)
    others = [of for of in by_url if of is not worst]
    failed, requests = sum(of.failed for of in others), sum(of.requests for of in others)
    if worst.failed < LEAST_FAILED or worst.failed / worst.requests < FAILS_TIMES * failed / requests:
        return None
    if stats.wilson(worst.failed, worst.requests, CONFIDENCE).low <= stats.wilson(failed, requests, CONFIDENCE).high:
        return None
    return Finding(
        f"{worst.url} failed {worst.failed} of {worst.requests} requests, the others {failed} of {requests}",
        "sure",
        "records",
        f"Look at the errors of that replica (llm-bench report) and at its log. {CHECK}",
    )


def _slow(case: Case) -> Finding | None:
    """One URL is slower than the others, in nearly every part of the window."""
    by_url = of_urls(case)
    if not by_url or needs_replicas(case):
        return None
    index = case.cell["url_index"]
    for series in SLOW_MS:
        values = SERIES[series].of(case.cell, NOTHING).values
        known = case.ok & ~np.isnan(values) & (index >= 0)
        sized = [of for of in by_url if series in of.median_ms]
        if len(sized) < 2:
            continue
        slowest = max(sized, key=lambda of: of.median_ms[series])
        place = next(k for k in set(index[known].tolist()) if name_of(case, k) == slowest.url)
        mine, others = known & (index == place), known & (index != place)
        high, low = float(np.median(values[mine])), float(np.median(values[others]))
        if high < SLOW * low or high - low < SLOW_MS[series]:
            continue
        parts = _slower_in(case, values, mine, others)
        if parts < SLOWER_PARTS or _median_of(values[mine])[0] <= _median_of(values[others])[1]:
            continue
        longer = _longer(case, mine, others)
        sure: Sure = "possible" if longer else "sure" if parts == PARTS else "likely"
        return Finding(
            f"{slowest.url} is slow: median {NAMES[series]} {high:.0f} ms, of the others {low:.0f} ms, slower in "
            f"{parts} of {PARTS} parts of the window{longer}",
            sure,
            "records",
            CHECK,
        )
    return None


def _slower_in(case: Case, values: np.ndarray, mine: np.ndarray, others: np.ndarray) -> int:
    """In how many of PARTS parts of the window the median of `mine` is above that of the others."""
    window, due = case.window, case.cell["due_ns"]
    part = (due - window.start_ns) * PARTS // max(window.end_ns - window.start_ns, 1)
    slower = 0
    for k in range(PARTS):
        a, b = values[mine & (part == k)], values[others & (part == k)]
        slower += bool(min(len(a), len(b)) >= LEAST_IN_PART and np.median(a) > np.median(b))
    return slower


def _median_of(values: np.ndarray) -> tuple[float, float]:
    """Bounds of the median of `values` in due order, by their effective size: what one queue made hangs together."""
    half = T9 * math.sqrt(0.25 / min(stats.ess(values, q) for q in DEPENDENCE))
    low, high = np.quantile(values, (max(0.5 - half, 0.0), min(0.5 + half, 1.0)))
    return float(low), float(high)


def _longer(case: Case, mine: np.ndarray, others: np.ndarray) -> str:
    """Whether its requests are longer than those of the others, in words."""
    said = []
    for name, tokens in (("prompts", case.prompt_tokens), ("answers", case.cell["tokens_out"])):
        a, b = (float(np.median(tokens[rows])) for rows in (mine, others))
        if b > 0 and a >= LONGER * b:
            said.append(f"its {name} are {a / b:.1f} times as long")
    return f"; {' and '.join(said)}, which may be why" if said else ""
