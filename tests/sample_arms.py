"""Runs of two arms, pair by pair, as record files: what `run --interleave --repeat N` leaves."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_bench.records import Record, Writer
from tests.sample import START_NS, header, record

REQUESTS = 120
LOAD = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
ANCHOR_NS = 1_700_000_000_000_000_000


def rows(ttft_ms: float = 100.0, tokens: int = 4, salt: int = 0, failed: int = 0) -> list[Record]:
    """Requests 10 ms apart whose TTFT rises from the p0 to the p100 by 40% around `ttft_ms`; 20 ms between tokens."""
    made = []
    for i in range(REQUESTS):
        due = 10.0 * i
        if i < failed:
            made.append(record(i, due, end=due + 5, outcome="failed", asked_out=tokens, prompt_hash=salt + i + 1))
            continue
        first = due + ttft_ms * (0.8 + 0.4 * (37 * i % REQUESTS) / REQUESTS)
        events = [first + 20 * k for k in range(tokens)]
        made.append(record(i, due, events=events, asked_out=tokens, prompt_hash=salt + i + 1))
    return made


def write(folder: Path, name: str, records: Sequence[Record], **head: Any) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    writer = Writer(folder / f"{name}.arrow", header(**head))
    for row in records:
        writer.write(row)
    writer.close()


def target(name: str, **facts: Any) -> dict[str, Any]:
    return {"name": name, "url": "http://127.0.0.1:1", "api": "openai-chat", "model": "m", **facts}


def write_arms(
    folder: Path,
    arms: Mapping[str, Sequence[float]],
    loads: Sequence[dict[str, Any]] = (LOAD,),
    of: Callable[..., list[Record]] = rows,
    interleaved: bool = True,
    **head: Any,
) -> Path:
    """A run of the arms' TTFTs in ms, one a pair: A B, B A, A B, ... The prompts of no two cells are equal."""
    at = 0
    for load in loads:
        for pair in range(len(next(iter(arms.values())))):
            names = list(arms) if pair % 2 == 0 else list(reversed(arms))
            for order, name in enumerate(names):
                place = {"pair": pair, "arm": name, "order": order} if interleaved else {"pair": pair}
                facts = {"target": target(name), "load": load, "anchor": [ANCHOR_NS, START_NS], **place, **head}
                write(folder, f"{at:03d}-{name}", of(arms[name][pair], salt=1000 * (at + 1)), **facts)
                at += 1
    return folder


def write_book(folder: Path, **facts: Any) -> None:
    (folder / "run.json").write_text(json.dumps(facts))


# Eight pairs of p95 TTFT in ms: the same build, one that is 6% slower, and the same on a machine that others use too.
BASE = [101.2, 99.4, 100.7, 98.9, 100.1, 99.8, 100.9, 99.0]
SAME = [100.9, 99.9, 100.2, 99.3, 99.8, 100.3, 100.5, 99.2]
SLOW = [107.1, 105.5, 106.9, 104.7, 106.2, 105.6, 107.0, 105.1]
NOISY = [125.0, 99.0, 127.0, 98.0, 99.5, 126.0, 101.0, 78.0]
