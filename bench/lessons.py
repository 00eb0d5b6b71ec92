"""What each choice of a serving engine costs and buys, on the engine's own scheduler and the cost model.

    python -m bench.lessons [--only batching,window] [--measured] [--out reports/lessons]

Writes README.md, a figure a lesson and results.json. The clock is virtual and every draw has a seed: the same figures
on each machine. --measured also runs the batching lesson over HTTP in real time (three minutes) and keeps what came of
it in measured.json. A lesson is a function of LESSONS; bench/lesson_page.py makes the page of what it returns.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench import lesson_cap, lesson_page
from bench.lesson_page import Lesson, Panel
from bench.lesson_sim import ABOUT, BASE, LOAD, Ran, chat, p, rng, said, simulate
from reference_engine.config import EngineConfig
from reference_engine.cost_model import PROFILES, Load, costs_of
from reference_engine.virtual import Arrival

GIB = 2**30


def _lines(
    x_name: str,
    y_name: str,
    xs: Sequence[int],
    names: Iterable[str],
    value: Callable[[str, int], float],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> Panel:
    """A line of `value(name, x)` for each name."""
    series = {name: [value(name, x) for x in xs] for name in names}
    return Panel(x_name, y_name, list(xs), series, log_x, log_y)


# ---- the lessons

MODES = {"static": 1000, "dynamic": 50, "continuous": 0}  # -> max_wait_ms
RATES = (2, 4, 8, 16, 30, 45)
SHOWN_RATES = (2, 16, 30)


def batched(mode: str) -> EngineConfig:
    return replace(BASE, batching=mode, max_wait_ms=MODES[mode])


def batching() -> Lesson:
    found = {(mode, rate): simulate(batched(mode), chat(rate)) for rate in RATES for mode in MODES}

    def row(rate: int, mode: str) -> list[str]:
        ran = found[mode, rate]
        tails = [said(p(values, 95)) for values in (ran.ttft_s, ran.tpot_s, ran.e2e_s)]
        waits = " → ".join(map(said, ran.fifths_s))
        return [f"{rate}", mode, f"{ran.tokens_per_s:,.0f}", *tails, waits, "yes" if ran.saturated else "no"]

    most = {mode: max(found[mode, rate].tokens_per_s for rate in RATES) for mode in MODES}
    low = {mode: said(p(found[mode, 2].ttft_s, 95)) for mode in MODES}
    stuck = [rate for rate in RATES if found["static", rate].saturated and found["dynamic", rate].saturated]
    return Lesson(
        "Static, dynamic and continuous batching",
        "What does it cost to wait until a batch has ended before the next begins?",
        f"{ABOUT}; 64 seats, 2,048 tokens a step. {LOAD}. Static waits up to 1 s for 64 requests and keeps their "
        "memory to the batch's end; dynamic takes what came within 50 ms; continuous fills a seat at the next step.",
        ["req/s", "mode", "tok/s", "TTFT p95", "TPOT p95", "e2e p95", "queue: first fifth → last", "saturated"],
        [row(rate, mode) for rate in SHOWN_RATES for mode in MODES],
        [
            "A batch lasts as long as its longest answer, and the seats of the others stay empty meanwhile: the most "
            f"that came out here is {most['static']:,.0f} tok/s static, {most['dynamic']:,.0f} dynamic, "
            f"{most['continuous']:,.0f} continuous.",
            f"From {stuck[0]} req/s on both kinds of batch saturate: their queue grows for as long as one measures, "
            "and their latencies only say how long that was.",
            f"Where there is room they are late all the same: at 2 req/s the first token comes after {low['static']}, "
            f"{low['dynamic']} and {low['continuous']} (p95), since who comes during a batch waits for its end.",
        ],
        [
            _lines("requests/s offered", "tokens/s", RATES, MODES, lambda m, r: found[m, r].tokens_per_s),
            _lines(
                "requests/s offered", "TTFT p95, s", RATES, MODES, lambda m, r: p(found[m, r].ttft_s, 95), log_y=True
            ),
        ],
    )


WAITS_MS = (0, 2, 5, 10, 20, 50, 100)
QUERY_RATES = (60, 300, 1000)
QUERY_TOKENS = 16
QUERIES = 4000


def window() -> Lesson:
    def queries(rate: float) -> list[Arrival]:
        at_s = np.cumsum(rng(11).exponential(1 / rate, QUERIES)).tolist()
        return [Arrival(s, [0] * QUERY_TOKENS, 1) for s in at_s]

    def dynamic(wait_ms: int) -> EngineConfig:
        return replace(BASE, batching="dynamic", max_wait_ms=wait_ms)

    found = {(rate, wait): simulate(dynamic(wait), queries(rate)) for rate in QUERY_RATES for wait in WAITS_MS}

    def row(rate: int, wait: int) -> list[str]:
        ran = found[rate, wait]
        return [
            f"{rate}",
            f"{wait} ms",
            f"{ran.batch:.1f}",
            f"{ran.busy:.0%}",
            *(said(p(ran.e2e_s, q)) for q in (50, 95)),
        ]

    slow, short, long = (found[QUERY_RATES[0], wait] for wait in (0, 5, 20))
    fast = found[QUERY_RATES[-1], 0]
    return Lesson(
        "The batch window",
        "How long should a batch wait for company?",
        f"{ABOUT}; dynamic batching, at most 64. {QUERIES:,} short requests, {QUERY_TOKENS} tokens in and one out (a "
        "classifier, a router): a step takes about as long for 1 as for 12 of them, since the weights are read once.",
        ["req/s", "window", "requests in a batch", "machine busy", "latency p50", "latency p95"],
        [row(rate, wait) for rate in QUERY_RATES for wait in (0, 5, 20, 100)],
        [
            f"A window buys machine time with latency: at {QUERY_RATES[0]} req/s 20 ms make batches of "
            f"{long.batch:.1f} instead of {slow.batch:.1f} and leave the machine busy {long.busy:.0%} instead of "
            f"{slow.busy:.0%}; the median goes from {said(p(slow.e2e_s, 50))} to {said(p(long.e2e_s, 50))}.",
            "One shorter than a step costs the tail nothing, since else one waits for the step before: with 5 ms p95 "
            f"is {said(p(short.e2e_s, 95))}, without {said(p(slow.e2e_s, 95))}.",
            f"Under load batches form by themselves: at {QUERY_RATES[-1]} req/s they have {fast.batch:.1f} requests "
            "without any window, those that came during the batch before.",
        ],
        [
            _lines("window, ms", "latency p95, ms", WAITS_MS, {f"{r} req/s": r for r in QUERY_RATES},
                   lambda name, w: p(found[int(name.split()[0]), w].e2e_s, 95) * 1e3),
            _lines("window, ms", "machine busy, %", WAITS_MS, {f"{r} req/s": r for r in QUERY_RATES},
                   lambda name, w: found[int(name.split()[0]), w].busy * 100),
        ],
    )  # fmt: skip


BLOCKS = (800, 1000, 1250, 1500, 2000, 2500, 3000, 4000)


def kv_share() -> Lesson:
    block_gib = BASE.block_size * PROFILES["8b-h100"].kv_bytes / GIB
    found = {n: simulate(replace(BASE, max_num_seqs=256, num_blocks=n), chat(30)) for n in BLOCKS}
    least = min(ran.computed for ran in found.values())

    def row(n: int, ran: Ran) -> list[str]:
        tails = [said(p(values, q)) for values, q in ((ran.ttft_s, 50), (ran.ttft_s, 95), (ran.e2e_s, 95))]
        again = f"{ran.computed / least - 1:.0%}"
        return [f"{n:,}", f"{n * block_gib:.1f}", f"{ran.preemptions:,}", again, f"{ran.tokens_per_s:,.0f}", *tails]

    enough = next(n for n in BLOCKS if not found[n].preemptions)
    first, half, full = (
        max(n for n in BLOCKS if n < enough),
        max(n for n in BLOCKS if n <= enough / 2),
        found[BLOCKS[-1]],
    )
    return Lesson(
        "The share of memory for keys and values",
        "What happens when the KV pool is too small?",
        f"{ABOUT}; continuous, 256 seats, 30 req/s. {LOAD}. A block holds {BASE.block_size} tokens; their number is "
        "what varies. When they end, who came last gives his away and is computed again later.",
        ["blocks", "GiB", "preemptions", "computed again", "tok/s", "TTFT p50", "TTFT p95", "e2e p95"],
        [row(n, ran) for n, ran in found.items()],
        [
            f"From {enough:,} blocks ({enough * block_gib:.1f} GiB) on more memory changes nothing: this load never "
            "holds more at once. It is the load that decides what is enough.",
            f"Too little shows in the first token before it shows in the throughput: with {first:,} blocks TTFT p95 is "
            f"{said(p(found[first].ttft_s, 95))} instead of {said(p(full.ttft_s, 95))}, at "
            f"{found[first].tokens_per_s / full.tokens_per_s:.0%} of the tok/s.",
            f"Then it saturates: with {half:,} blocks {found[half].tokens_per_s / full.tokens_per_s:.0%} of the tok/s "
            f"come out, of {found[half].computed / least - 1:.0%} more work, and TTFT p95 is "
            f"{said(p(found[half].ttft_s, 95))}.",
        ],
        [
            _lines("KV blocks", "TTFT, s", BLOCKS, {"p50": 50, "p95": 95},
                   lambda name, n: p(found[n].ttft_s, float(name[1:])), log_y=True),
            _lines("KV blocks", "preemptions", BLOCKS, {"preemptions": 0}, lambda _, n: found[n].preemptions),
        ],
    )  # fmt: skip


STREAMS = (1, 8, 64)
PRECISIONS = {
    "bf16": "8b-h100", "8-bit KV": "8b-kv8-h100", "8-bit weights": "8b-w8-h100", "8-bit both": "8b-w8-kv8-h100",
    "4-bit weights, 8-bit KV": "8b-w4-kv8-h100",
}  # fmt: skip
CONTEXT = 2048


def precision() -> Lesson:
    def tokens_per_s(model: str, streams: int) -> float:
        context = streams * CONTEXT
        return streams / costs_of(f"sim:{model}").step_s(Load(streams, context, context))

    found = {(name, n): tokens_per_s(model, n) for name, model in PRECISIONS.items() for n in STREAMS}
    gain = {(name, n): value / found["bf16", n] for (name, n), value in found.items()}
    one, many = STREAMS[0], STREAMS[-1]
    four = "4-bit weights, 8-bit KV"
    return Lesson(
        "Precision of weights, and of keys and values",
        "What does halving their bytes buy?",
        f"{ABOUT}. So many streams decode at once, each with a context of {CONTEXT:,} tokens. **These are the cost "
        "model's ratios, not measurements**: fewer bytes are read faster, arithmetic costs what it did, unpacking "
        "costs nothing, and nobody looks at the answers' quality.",
        ["precision", *(f"tok/s, {n} stream{'s' if n > 1 else ''}" for n in STREAMS)],
        [[name, *(f"{found[name, n]:,.0f} ({gain[name, n]:.2f}×)" for n in STREAMS)] for name in PRECISIONS],
        [
            f"Alone, a token costs one reading of the weights: 8-bit weights give {gain['8-bit weights', one]:.2f}×, "
            f"8-bit KV {gain['8-bit KV', one]:.2f}×. It is not 2×: the step's overhead does not shrink.",
            f"At {many} streams the weights are shared, and each stream brings its own context: 8-bit KV gives "
            f"{gain['8-bit KV', many]:.2f}×, 8-bit weights {gain['8-bit weights', many]:.2f}×, both "
            f"{gain['8-bit both', many]:.2f}×.",
            f"4-bit weights beside 8-bit KV give {gain[four, one]:.2f}× alone and {gain[four, many]:.2f}× at {many}. A "
            "gain that was measured alone says little of a busy server. 8-bit KV also holds twice the tokens: see "
            "above.",
        ],
        [
            Panel("streams", "times as fast as bf16", [f"{n}" for n in STREAMS],
                  {name: [gain[name, n] for n in STREAMS] for name in PRECISIONS}),
        ],
    )  # fmt: skip


BUDGETS = (128, 256, 512, 1024, 2048, 4096)
WHOLE = "2048, whole prompts"


def chunked(budget: int) -> EngineConfig:
    return replace(BASE, max_num_seqs=256, max_num_batched_tokens=budget)


def chunked_prefill() -> Lesson:
    found = {f"{n}": simulate(chunked(n), chat(30)) for n in BUDGETS}
    found[WHOLE] = simulate(replace(chunked(2048), chunked_prefill=False), chat(30))

    def row(name: str, ran: Ran) -> list[str]:
        latencies = ((ran.ttft_s, 50), (ran.ttft_s, 95), (ran.tpot_s, 95), (ran.longest_gap_s, 95))
        return [name, f"{ran.tokens_per_s:,.0f}", *(said(p(values, q)) for values, q in latencies)]

    def ttft(name: str) -> str:
        return said(p(found[name].ttft_s, 95))

    def gap(name: str) -> str:
        return said(p(found[name].longest_gap_s, 95))

    return Lesson(
        "Chunked prefill",
        "How many tokens may a step compute?",
        f"{ABOUT}; continuous, 256 seats, 30 req/s. {LOAD}. Who runs comes first in each step's budget, prompts get "
        "what is left, in chunks if they must.",
        ["tokens a step", "tok/s", "TTFT p50", "TTFT p95", "TPOT p95", "longest gap of an answer, p95"],
        [row(name, ran) for name, ran in found.items()],
        [
            "A long step makes everyone's next token late: from 2,048 to 512 tokens a step the longest gap within an "
            f"answer falls from {gap('2048')} to {gap('512')} (p95).",
            f"The first token pays, its prompt now takes several steps: TTFT p95 goes from {ttft('2048')} to "
            f"{ttft('512')}. Throughput stays, {found['2048'].tokens_per_s:,.0f} and {found['512'].tokens_per_s:,.0f} "
            "tok/s.",
            f"There is an end: a step of few tokens still reads all the weights. At 256 TTFT p95 is {ttft('256')}, at "
            f"128 prompts cannot keep up with 30 req/s and it is {ttft('128')}.",
        ],
        [
            Panel("tokens a step", "p95, ms", list(BUDGETS),
                  {"TTFT": [p(found[f"{n}"].ttft_s, 95) * 1e3 for n in BUDGETS],
                   "longest gap": [p(found[f"{n}"].longest_gap_s, 95) * 1e3 for n in BUDGETS]}, log_x=True, log_y=True),
        ],
    )  # fmt: skip


PREFIXES = (1, 8, 32, 64, 128, 256, 1024)
PREFIX_TOKENS = 1024
PREFIX_POOL = 8192


def prefix_cache() -> Lesson:
    def arrivals(kinds: int) -> list[Arrival]:
        random, found = rng(13, kinds), []
        for arrival in chat(16):
            own = random.integers(10_000, 2**31 - 1, len(arrival.prompt)).tolist()
            found.append(arrival._replace(prompt=[int(random.integers(kinds))] * PREFIX_TOKENS + own))
        return found

    config = replace(BASE, num_blocks=PREFIX_POOL, max_num_seqs=256)
    off = simulate(config, arrivals(8))
    found = {n: simulate(replace(config, prefix_caching=True), arrivals(n)) for n in PREFIXES}

    def row(name: str, ran: Ran) -> list[str]:
        tails = [said(p(values, q)) for values, q in ((ran.ttft_s, 50), (ran.ttft_s, 95), (ran.e2e_s, 95))]
        return [name, f"{ran.hits:.0%}", f"{ran.computed:,}", *tails]

    few, some, many = found[8], found[128], found[PREFIXES[-1]]
    held = PREFIX_POOL * BASE.block_size // PREFIX_TOKENS
    return Lesson(
        "The prefix cache",
        "What do shared beginnings save, and when do they stop?",
        f"{ABOUT}; continuous, 256 seats, 16 req/s. {LOAD}, each after one of so many system prompts of "
        f"{PREFIX_TOKENS:,} tokens. {PREFIX_POOL:,} blocks would hold {held} of those and nothing else; the block that "
        "was unused longest goes first.",
        ["system prompts", "prompt tokens found", "tokens computed", "TTFT p50", "TTFT p95", "e2e p95"],
        [row(name, ran) for name, ran in [("8, no cache", off), *((f"{n:,}", ran) for n, ran in found.items())]],
        [
            f"With 8 system prompts {few.hits:.0%} of the prompt tokens are found, and TTFT p95 is "
            f"{said(p(few.ttft_s, 95))} instead of {said(p(off.ttft_s, 95))}: one's own prefill is shorter, and so is "
            "that of everybody one waits behind.",
            f"It ends with memory, and not at once: {some.hits:.0%} are found at 128 system prompts, {many.hits:.0%} "
            f"at {PREFIXES[-1]:,}. Who measures with one system prompt measures the best case.",
            "What is cached costs nothing: its blocks are free ones, and are taken when somebody needs them.",
        ],
        [
            _lines("system prompts", "prompt tokens found, %", PREFIXES, {"found": 0},
                   lambda _, n: found[n].hits * 100, log_x=True),
            _lines("system prompts", "TTFT p95, s", PREFIXES, {"cache": 0, "no cache": 0},
                   lambda name, n: p((found[n] if name == "cache" else off).ttft_s, 95), log_x=True, log_y=True),
        ],
    )  # fmt: skip


URGENT_SHARES = (0.2, 0.9)
POLICIES = ("fcfs", "priority", "fair")
CLASSES = {"urgent": 0, "batch": 1}  # -> priority


def priorities() -> Lesson:
    def arrivals(share: float) -> list[Arrival]:
        random = rng(17)
        names = ["urgent" if random.random() < share else "batch" for _ in chat(30)]
        return [a._replace(priority=CLASSES[n], client=n) for a, n in zip(chat(30), names, strict=True)]

    found: dict[tuple[float, str, str], np.ndarray] = {}  # TTFT
    for share in URGENT_SHARES:
        for policy in POLICIES:
            ran = simulate(replace(BASE, policy=policy, max_num_seqs=32), arrivals(share))
            found |= {(share, policy, name): ran.ttft_s[ran.clients == name] for name in CLASSES}

    def at(share: float, policy: str, name: str, q: int = 95) -> str:
        return said(p(found[share, policy, name], q))

    few, most = URGENT_SHARES
    return Lesson(
        "Priorities and fair shares",
        "When not all can be served in time, who waits?",
        f"{ABOUT}; continuous, 32 seats, 30 req/s, which is more than they serve. {LOAD}. A share of the requests is "
        "urgent and of one client, the rest is batch work of another. fcfs serves in order of arrival; priority the "
        "urgent first; fair gives each client that has work the same share of the tokens.",
        ["urgent", "policy", "urgent: TTFT p50", "TTFT p95", "batch: TTFT p50", "TTFT p95"],
        [
            [f"{share:.0%}", policy, *(at(share, policy, name, q) for name in CLASSES for q in (50, 95))]
            for share in URGENT_SHARES
            for policy in POLICIES
        ],
        [
            f"First come, first served lets all wait alike: {at(few, 'fcfs', 'urgent')} and {at(few, 'fcfs', 'batch')} "
            "(p95). A policy moves waiting to others, it takes none away.",
            f"A few urgent requests are served almost at once ({at(few, 'priority', 'urgent')}), and the many others "
            f"wait {at(few, 'priority', 'batch')} instead.",
            f"When nearly all is urgent, priority starves the rest ({at(most, 'priority', 'batch')}); a fair share "
            f"protects the small client ({at(most, 'fair', 'batch')}) and lets the large one wait "
            f"({at(most, 'fair', 'urgent')} instead of {at(most, 'priority', 'urgent')}).",
        ],
        [
            Panel(f"policy; {share:.0%} are urgent", "TTFT p95, s", list(POLICIES),
                  {name: [p(found[share, policy, name], 95) for policy in POLICIES] for name in CLASSES})
            for share in URGENT_SHARES
        ],
    )  # fmt: skip


LESSONS: dict[str, Callable[[], Lesson]] = {
    "batching": batching,
    "window": window,
    "kv-share": kv_share,
    "precision": precision,
    "chunked-prefill": chunked_prefill,
    "prefill-cap": lesson_cap.prefill_cap,
    "prefix-cache": prefix_cache,
    "priorities": priorities,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lessons", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(LESSONS), help="names of lessons; the others stay as they were")
    parser.add_argument("--measured", action="store_true", help="batching over HTTP too, in real time: three minutes")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "reports/lessons")
    asked = parser.parse_args()
    names = asked.only.split(",")
    if unknown := set(names) - LESSONS.keys():
        parser.error(f"--only {sorted(unknown)}: known are {', '.join(LESSONS)}")
    asked.out.mkdir(parents=True, exist_ok=True)
    results = asked.out / "results.json"
    lessons = lesson_page.read(results) if LESSONS.keys() - set(names) and results.exists() else {}
    for name in names:
        began_s = time.process_time()
        lessons[name] = LESSONS[name]()
        print(f"{name}: {time.process_time() - began_s:.1f} CPU-s", file=sys.stderr)
        lesson_page.draw(lessons[name].panels, asked.out / f"{name}.svg")
    lessons = {name: lessons[name] for name in LESSONS if name in lessons}
    results.write_text(json.dumps(lesson_page.as_json(lessons), indent=1) + "\n")
    if asked.measured:
        from bench import lesson_measured

        found = lesson_measured.measure()
        (asked.out / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
    page = lesson_page.render(lessons, lesson_page.read_measured(asked.out / "measured.json"))
    (asked.out / "README.md").write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
