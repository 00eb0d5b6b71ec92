"""The lesson of a long prompt among short ones: what a cap on one prompt's part of a step moves, and to whom."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.lesson_page import Lesson, Panel
from bench.lesson_sim import ABOUT, BASE, Ran, p, rng, said, simulate
from reference_engine.config import EngineConfig
from reference_engine.virtual import Arrival

BUDGET = 512  # tokens a step
CAPS = (0, 384, 256, 128, 64)  # of it for one prompt; 0: none
LONG = ((0.5, 20_000), (2.5, 20_000))  # at s, tokens
SHORTS, SHORT_RATE = 96, 24
WHOLE = "whole prompts"


def capped(threshold: int) -> EngineConfig:
    return replace(BASE, max_num_batched_tokens=BUDGET, long_prefill_token_threshold=threshold)


def crowd(long: Sequence[tuple[float, int]] = LONG) -> list[Arrival]:
    """A chat of short prompts for some four seconds, and long ones that come into it."""
    random = rng(17)
    at_s = np.cumsum(random.exponential(1 / SHORT_RATE, SHORTS)).tolist()
    short = [
        Arrival(s, [0] * int(random.integers(64, 257)), int(random.integers(24, 65)), client="short") for s in at_s
    ]
    return sorted([*short, *(Arrival(s, [0] * n, 8, client="long") for s, n in long)], key=lambda arrival: arrival.at_s)


def prefill_cap() -> Lesson:
    alone = simulate(capped(0), crowd(()))
    found: dict[str, Ran] = {WHOLE: simulate(replace(capped(0), chunked_prefill=False,
                                                     max_num_batched_tokens=32_768), crowd())}  # fmt: skip
    names = {cap: f"at most {cap}" if cap else f"chunks of {BUDGET}" for cap in CAPS}
    found |= {names[cap]: simulate(capped(cap), crowd()) for cap in CAPS}

    def of(name: str, values: str, client: str = "short", q: int = 95) -> float:
        ran = found[name]
        return p(getattr(ran, values)[ran.clients == client], q)

    def row(name: str) -> list[str]:
        ttft_s = of(name, "ttft_s")
        short = [said(of(name, "ttft_s", q=50)), said(ttft_s), f"{ttft_s / p(alone.ttft_s, 95):.1f}"]
        return [name, *short, said(of(name, "longest_gap_s")), said(of(name, "ttft_s", "long", 50))]

    none, half, least = names[0], names[BUDGET // 2], names[CAPS[-1]]
    return Lesson(
        "A long prompt among short ones",
        "How much of a step may one prompt have?",
        f"{ABOUT}; continuous, 64 seats, {BUDGET} tokens a step. {SHORTS} short prompts (64 to 256 tokens, "
        f"{SHORT_RATE} a second), and {len(LONG)} of {LONG[0][1]:,} tokens that come into them. Caps are tokens of a "
        "step for one prompt (`--long-prefill-token-threshold`). Alone the short have a TTFT p95 of "
        f"{said(p(alone.ttft_s, 95))}.",
        ["one prompt's part", "short: TTFT p50", "TTFT p95", "times alone", "longest gap p95", "long: TTFT p50"],
        [row(name) for name in found],
        [
            f"Chunks keep answers going (longest gap {said(of(none, 'longest_gap_s'))} instead of "
            f"{said(of(WHOLE, 'longest_gap_s'))}) and let nobody in: a long prompt takes what is left of each step "
            f"until it is done, and who comes behind it has a TTFT p95 of {said(of(none, 'ttft_s'))}.",
            f"A cap of half a step lets the others in at once: {said(of(half, 'ttft_s'))}. The long prompt pays with "
            f"{of(half, 'ttft_s', 'long', 50) / of(none, 'ttft_s', 'long', 50) - 1:.0%} more time to its first token.",
            f"Too small a cap starves it for nothing: at {CAPS[-1]} it takes {said(of(least, 'ttft_s', 'long', 50))}, "
            f"and the short are no better off ({said(of(least, 'ttft_s'))}), since a step costs a reading of the "
            "weights however little it computes.",
        ],
        [
            Panel("tokens of a step for one prompt", "TTFT, ms", [cap or BUDGET for cap in CAPS],
                  {"short, p95": [of(names[cap], "ttft_s") * 1e3 for cap in CAPS],
                   "long, p50": [of(names[cap], "ttft_s", "long", 50) * 1e3 for cap in CAPS]}, log_x=True, log_y=True),
        ],
    )  # fmt: skip
