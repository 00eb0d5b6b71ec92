"""Make the sample traces beside this file: python traces/make_samples.py [FOLDER]

One a format from seeded generators here, one a workload by `llm-bench trace synth` from models/. No row is taken from
a public trace; only the formats and, of the workloads, figures of the distributions are.
"""

import json
import math
import random
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

from llm_bench.cli_trace import app as trace

MODELS = Path(__file__).parent / "models"

Values = dict[str, Any]
MOONCAKE_BLOCK, OWN_BLOCK = 512, 16  # tokens


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


# -- workloads: what `llm-bench trace synth` makes of the models beside this file, each naming its source -------------

WORKLOADS = {  # name of models/NAME.json and workload-NAME.jsonl -> options of `llm-bench trace synth`
    "chat": "--rate 5.53 --duration 54 --seed 3",
    "code": "--rate 2.567 --duration 117 --seed 13",
    "rag": "--rate 1 --requests 300 --seed 1",  # the source has one request in 85 s, which is no load
    "long-context": "--requests 300 --seed 10",
    "agentic": "--seed 1",
    "reasoning": "--requests 200 --seed 1",
}


def jsonl(rows: Iterable[Values]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def main(folder: Path) -> None:
    (folder / "sample-chat.jsonl").write_bytes(jsonl(chat(random.Random(1))))
    (folder / "sample-sessions.jsonl").write_bytes(jsonl(sessions(random.Random(2))))
    (folder / "sample-mooncake.jsonl").write_bytes(jsonl(mooncake(random.Random(3))))
    # As the public file: CRLF between rows, nothing behind the last.
    (folder / "sample-azure2023.csv").write_bytes("\r\n".join(azure(random.Random(4))).encode())
    for name, options in WORKLOADS.items():
        sample = folder / f"workload-{name}.jsonl"
        sample.unlink(missing_ok=True)  # synth overwrites nothing
        trace(["synth", str(MODELS / f"{name}.json"), *options.split(), "-o", str(sample)], standalone_mode=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
