"""Make the sample traces beside this file, from seeded generators: python traces/make_samples.py [FOLDER]

No row is taken from a public trace; only the formats and, of the workloads, figures of the distributions are.
"""

import json
import math
import random
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from statistics import NormalDist
from typing import Any

Values = dict[str, Any]
MOONCAKE_BLOCK, OWN_BLOCK = 512, 16  # tokens
LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)  # of the quantile tables below
TAIL = 4.0  # the largest of some 10,000 rows stands one in 10^4 from the end


def length(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    """A lognormal number of tokens, cut to [least, most]."""
    return min(max(round(rng.lognormvariate(math.log(median), sigma)), least), most)


def chat(rng: random.Random) -> Iterator[Values]:
    """400 single turns, Poisson at 4/s; most begin with one of three system prompts of 2, 3 or 6 blocks."""
    yield {
        "llm_bench_trace": 1,
        "unit": "s",
        "block_size": OWN_BLOCK,
        "about": "synthetic chat, traces/make_samples.py",
    }
    fresh = count(1)
    system_prompts = [[next(fresh) for _ in range(blocks)] for blocks in (2, 3, 6)]
    now_us = 0
    for _ in range(400):
        tokens_in = length(rng, 60, 0.8, 4, 400)
        shared = rng.choices([*system_prompts, []], [4, 2, 2, 2])[0]
        if len(shared) * OWN_BLOCK >= tokens_in:
            shared = []
        own = -(-tokens_in // OWN_BLOCK) - len(shared)
        yield {
            "timestamp": now_us / 1e6,
            "input_length": tokens_in,
            "output_length": length(rng, 24, 0.7, 1, 96),
            "hash_ids": shared + [next(fresh) for _ in range(own)],
        }
        now_us += round(rng.expovariate(4) * 1e6)


def sessions(rng: random.Random) -> Iterator[Values]:
    """20 conversations of 1 to 6 turns, one begun every 3 s or so; lengths are cumulative, later turns wait think_s."""
    yield {"llm_bench_trace": 1, "unit": "s", "turns": "cumulative", "about": "synthetic, traces/make_samples.py"}
    now_us = 0
    for session in range(20):
        tokens_in = length(rng, 40, 0.6, 8, 150)
        for turn in range(rng.randint(1, 6)):
            tokens_out = length(rng, 20, 0.6, 2, 64)
            named = {"session_id": f"c{session:02}", "turn": turn}
            when = {"think_s": round(rng.expovariate(1 / 2), 3)} if turn else {"timestamp": now_us / 1e6}
            yield named | when | {"input_length": tokens_in, "output_length": tokens_out}
            tokens_in += tokens_out + length(rng, 15, 0.6, 3, 60)
        now_us += round(rng.expovariate(1 / 3) * 1e6)


def mooncake(rng: random.Random) -> Iterator[Values]:
    """100 rows on ticks of 3 s; all share a first block, half take up the prompt of an earlier row."""
    fresh = count(1)
    earlier: list[list[int]] = [[0]]
    for row in range(100):
        whole = list(rng.choice(earlier)) if rng.random() < 0.5 else [0]
        tokens_in = min(len(whole), 6) * MOONCAKE_BLOCK + length(rng, 600, 0.7, 1, 2000)
        whole = whole[:6]
        ids = whole + [next(fresh) for _ in range(-(-tokens_in // MOONCAKE_BLOCK) - len(whole))]
        earlier.append(ids[: tokens_in // MOONCAKE_BLOCK])  # the last block is partial: its text goes on differently
        yield {
            "timestamp": 3000 * (row // 4),
            "input_length": tokens_in,
            "output_length": length(rng, 80, 0.8, 1, 400),
            "hash_ids": ids,
        }


def azure(rng: random.Random) -> Iterator[str]:
    """200 rows over a midnight, stamps with seven digits whose last is 0."""
    yield "TIMESTAMP,ContextTokens,GeneratedTokens"
    now = datetime(2023, 11, 16, 23, 59, 30)
    for _ in range(200):
        stamp = now.strftime("%Y-%m-%d %H:%M:%S.%f0")
        yield f"{stamp},{length(rng, 300, 0.9, 3, 2000)},{length(rng, 60, 0.8, 1, 300)}"
        now += timedelta(microseconds=round(rng.expovariate(4) * 1e6))


# -- workloads: realistic lengths, one kind of use each ---------------------------------------------------------------


def quantile(table: tuple[int, ...], u: float) -> int:
    """Tokens at level u of a distribution with these quantiles at LEVELS; between them the logarithm is linear.

    Above p99 it is linear in log(1 - u), as of a power law, up to the largest value.
    """
    above = next(i for i, level in enumerate(LEVELS) if level >= u and i)
    part = (u - LEVELS[above - 1]) / (LEVELS[above] - LEVELS[above - 1])
    if above == len(LEVELS) - 1:
        part = min(1.0, (-math.log10(max(1 - u, 1e-9)) - 2) / (TAIL - 2))
    low, high = table[above - 1], table[above]
    return round(math.exp(math.log(low) + part * (math.log(high) - math.log(low))))


def lengths(rng: random.Random, tokens_in: tuple[int, ...], tokens_out: tuple[int, ...], rho: float) -> tuple[int, int]:
    """Prompt and answer tokens of these distributions whose ranks correlate by rho (Spearman), by a Gaussian copula."""
    r = 2 * math.sin(math.pi * rho / 6)
    x = rng.gauss(0, 1)
    y = r * x + math.sqrt(1 - r * r) * rng.gauss(0, 1)
    to_level = NormalDist().cdf
    return quantile(tokens_in, to_level(x)), quantile(tokens_out, to_level(y))


def header(about: str, **more: object) -> Values:
    return {"llm_bench_trace": 1, "unit": "s"} | more | {"about": f"{about}; traces/make_samples.py"}


def workload_chat(rng: random.Random) -> Iterator[Values]:
    """300 requests of Azure's conversation service, 2023: n 19,366; 5.53/s, nearly Poisson; rank correlation 0.07."""
    yield header("synthetic chat, lengths and rate as in the Azure 2023 conversation trace")
    tokens_in = (2, 181, 396, 1020, 1189, 4083, 4142, 14050)
    tokens_out = (7, 41, 85, 129, 395, 451, 601, 1000)
    now_us = 0
    for _ in range(300):
        prompt, answer = lengths(rng, tokens_in, tokens_out, 0.073)
        yield {"timestamp": now_us / 1e6, "input_length": prompt, "output_length": answer}
        now_us += round(rng.expovariate(5.53) * 1e6)


def workload_code(rng: random.Random) -> Iterator[Values]:
    """300 requests of Azure's code service, 2023: n 8,819; 2.57/s in bursts (CV inside 60 s windows 3.2 at the median).

    On and off: 6.65/s (the p90 of its minutes) for about 15 s, then silence for about 24 s, so that the mean is 2.57/s.
    """
    yield header("synthetic code completion, lengths, rate and bursts as in the Azure 2023 code trace")
    tokens_in = (3, 75, 578, 1469, 2744, 7303, 7436, 7437)
    tokens_out = (6, 6, 9, 13, 24, 90, 251, 1899)
    now_s = 0.0
    ends_s = rng.expovariate(1 / 15)
    for _ in range(300):
        prompt, answer = lengths(rng, tokens_in, tokens_out, -0.021)
        yield {"timestamp": round(now_s, 6), "input_length": prompt, "output_length": answer}
        now_s += rng.expovariate(6.65)
        while now_s > ends_s:
            silent_s = rng.expovariate(1 / 24)
            now_s += silent_s
            ends_s += silent_s + rng.expovariate(1 / 15)


def workload_rag(rng: random.Random) -> Iterator[Values]:
    """300 requests of a question-answering service (RAGPulse): n 7,106; rank correlation 0.42; shortest prompt 1,052.

    Its prompt hits are 31% of tokens: here a system prompt of 15 blocks of 64, the same for all, which is 33% of a mean
    prompt. Its rate is one request in 85 s; 1/s here, so that the sample is a load.
    """
    block, system = 64, list(range(1, 16))
    yield header("synthetic RAG, lengths and sharing as in RAGPulse; the rate is not its own", block_size=block)
    tokens_in = (1052, 1055, 2754, 3140, 3437, 4425, 5438, 7712)
    tokens_out = (7, 66, 131, 234, 385, 670, 891, 2183)
    fresh = count(16)
    now_us = 0
    for _ in range(300):
        prompt, answer = lengths(rng, tokens_in, tokens_out, 0.42)
        ids = system + [next(fresh) for _ in range(-(-prompt // block) - len(system))]
        yield {"timestamp": now_us / 1e6, "input_length": prompt, "output_length": answer, "hash_ids": ids}
        now_us += round(rng.expovariate(1) * 1e6)


def workload_long(rng: random.Random) -> Iterator[Values]:
    """300 requests of a chat service with long prompts (Mooncake conversation): n 12,031; 3.40/s, nearly Poisson.

    All share their first block of 512; 40% go on from the whole of an earlier prompt, so that an endless cache
    hits about the 37% of tokens that it hits there.
    """
    yield header("synthetic long context, lengths and rate as in Mooncake conversation", block_size=MOONCAKE_BLOCK)
    tokens_in = (891, 901, 2306, 6909, 15367, 39550, 85400, 126195)
    tokens_out = (1, 10, 156, 350, 472, 698, 1119, 2000)
    fresh = count(1)
    open_ends: list[list[int]] = []
    now_us = 0
    for _ in range(300):
        prompt, answer = lengths(rng, tokens_in, tokens_out, 0.072)
        fits = [i for i, ids in enumerate(open_ends) if len(ids) <= prompt // MOONCAKE_BLOCK]
        ids = open_ends.pop(max(fits, key=lambda i: len(open_ends[i]))) if fits and rng.random() < 0.4 else [0]
        ids = ids + [next(fresh) for _ in range(-(-prompt // MOONCAKE_BLOCK) - len(ids))]
        open_ends.append(ids[: prompt // MOONCAKE_BLOCK])
        yield {"timestamp": now_us / 1e6, "input_length": prompt, "output_length": answer, "hash_ids": ids}
        now_us += round(rng.expovariate(3.4) * 1e6)


def workload_agentic(rng: random.Random) -> Iterator[Values]:
    """10 sessions of a coding agent, begun 20 s apart, as of Codex on SWE-bench Pro (vLLM blog, 2026-05-06).

    Median 33 turns; the context grows from 12,000 to 80,000 tokens, 2,242 a turn; 131 prompt tokens for one of answer,
    so about 390 an answer; the pause for tools is 5.2 s at the median, 81.4 s at p99 (a lognormal of sigma 1.18).
    """
    about = "synthetic coding agent, turns, growth and pauses as published for Codex on SWE-bench Pro"
    yield header(about, turns="cumulative")
    now_us = 0
    for session in range(10):
        prompt = length(rng, 12_000, 0.3, 4_000, 30_000)
        for turn in range(length(rng, 33, 0.25, 15, 60)):
            answer = length(rng, 285, 0.8, 20, 3_000)
            pause_s = round(rng.lognormvariate(math.log(5.2), 1.18), 3)
            when = {"think_s": pause_s} if turn else {"timestamp": now_us / 1e6}
            named = {"session_id": f"agent-{session}", "turn": turn}
            yield named | when | {"input_length": prompt, "output_length": answer}
            prompt += answer + length(rng, 1_120, 1.0, 30, 12_000)
        now_us += round(rng.expovariate(1 / 20) * 1e6)


def workload_reasoning(rng: random.Random) -> Iterator[Values]:
    """200 requests to a model that reasons: quantiles of the largest client of ServeGen's deepseek-r1, hour 6.

    Reasoning and answer together are the output. The two lengths are drawn apart, for their correlation is not known;
    so is the arrival rate here: Poisson at 1/s.
    """
    yield header("synthetic reasoning, lengths as of ServeGen's largest deepseek-r1 client; the rate is not its own")
    tokens_in = (17, 49, 62, 163, 431, 801, 983, 1056)
    tokens_out = (122, 431, 857, 1165, 1577, 3194, 6017, 28757)
    now_us = 0
    for _ in range(200):
        prompt, answer = lengths(rng, tokens_in, tokens_out, 0.0)
        yield {"timestamp": now_us / 1e6, "input_length": prompt, "output_length": answer}
        now_us += round(rng.expovariate(1) * 1e6)


WORKLOADS = {
    "chat": workload_chat,
    "code": workload_code,
    "rag": workload_rag,
    "long-context": workload_long,
    "agentic": workload_agentic,
    "reasoning": workload_reasoning,
}


def jsonl(rows: Iterable[Values]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def main(folder: Path) -> None:
    (folder / "sample-chat.jsonl").write_bytes(jsonl(chat(random.Random(1))))
    (folder / "sample-sessions.jsonl").write_bytes(jsonl(sessions(random.Random(2))))
    (folder / "sample-mooncake.jsonl").write_bytes(jsonl(mooncake(random.Random(3))))
    # As the public file: CRLF between rows, nothing behind the last.
    (folder / "sample-azure2023.csv").write_bytes("\r\n".join(azure(random.Random(4))).encode())
    for seed, (name, rows) in enumerate(WORKLOADS.items(), 5):
        (folder / f"workload-{name}.jsonl").write_bytes(jsonl(rows(random.Random(seed))))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
