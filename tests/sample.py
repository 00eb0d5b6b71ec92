"""Builders of Records for tests: times in milliseconds since an arbitrary start, everything else by keyword."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from llm_bench import records
from llm_bench.records import Cell, Record

START_NS = 7_000_000_000_000  # a monotonic clock does not start at 0; a forgotten subtraction shows


def ns(ms: float) -> int:
    return START_NS + round(ms * 1e6)


def record(
    index: int = 0,
    due: float = 0.0,
    sent: float | None = None,
    events: Sequence[float] = (),
    end: float | None = None,
    outcome: str = "ok",
    **fields: Any,
) -> Record:
    """One request. `sent` defaults to `due`, `end` to the last event, `tokens_out` to the number of events."""
    sent = due if sent is None else sent
    end = (events[-1] if len(events) else sent) if end is None else end
    failed, dropped = outcome == "failed", outcome == "dropped"
    values: dict[str, Any] = {
        "index": index,
        "request_id": f"r{index}",
        "outcome": outcome,
        "error_kind": "http_5xx" if failed else "",
        "error": "HTTP 503: busy" if failed else "",
        "status": 503 if failed else 0 if dropped else 200,
        "finish_reason": "length" if outcome == "ok" else "",
        "labels": [],
        "due_ns": ns(due),
        "ready_ns": 0 if dropped else ns(sent),
        "sent_ns": 0 if dropped else ns(sent),
        "first_byte_ns": ns(events[0]) if len(events) else 0,
        "end_ns": 0 if dropped else ns(end),
        "event_ns": [ns(t) for t in events],
        "event_tokens": [],
        "event_choice": [],
        "first_answer_ns": ns(events[0]) if len(events) else 0,
        "planned_in": 100,
        "asked_out": -1,
        "tokens_in": 100,
        "tokens_cached": -1,
        "tokens_out": len(events),
        "tokens_out_from": "usage",
        "tokens_counted": -1,
        "text_bytes": 4 * len(events),
        "bytes_in": 200 * len(events),
        "bytes_out": 400,
        "url_index": 0,
        "comments": 0,
        "reconnects": 0,
        "attempts": 0 if dropped else 1,
        "first_attempt": outcome,
        "retry_wait_ns": 0,
        "priority": 0,
        "turn": 0,
        "session": "",
        "request_class": "",
        "prompt_hash": 1000 + index,
        "server_ttft_ms": math.nan,
        "server_tpot_ms": math.nan,
        "server_queue_ms": math.nan,
        "server_prefill_ms": math.nan,
        "server_decode_ms": math.nan,
        "raw": b"",
    }
    return Record(**(values | fields))


def header(**parts: Any) -> dict[str, Any]:
    """A cell's header as `run` writes it, sections replaced by keyword."""
    whole: dict[str, Any] = {
        "cell": {"name": "a-c1"},
        "target": {"name": "a", "url": "http://127.0.0.1:1", "api": "openai-chat", "model": "m"},
        "load": {"kind": "open", "rate": 5.0, "warmup": 0.0},
        "started": {"start_ns": START_NS, "anchor": [1_700_000_000_000_000_000, START_NS]},
        "settings": {},
        "probe": {"usage_in_stream": True, "lengths_pinned": True, "finish_reason_seen": True, "rtt_ms": 0.1},
    }
    return whole | parts


def cell(rows: Sequence[Record], gauge: Sequence[tuple[float, int]] = (), **parts: Any) -> Cell:
    """The columns of `rows`; `gauge` as (ms, in flight from then on)."""
    steps = np.array([(ns(at), level) for at, level in gauge], np.int64).reshape(-1, 2)
    return records.from_records(list(rows), header(**parts), steps)


def gauge_of(rows: Sequence[Record], late: float = 0.0) -> list[tuple[float, int]]:
    """What a driver counts that hears of each end `late` ms after the read: a step for each start and each end."""
    edges = sorted([*((r.ready_ns, 1) for r in rows), *((r.end_ns + round(late * 1e6), -1) for r in rows)])
    levels = np.cumsum([change for _, change in edges]).tolist()
    return [((at_ns - START_NS) / 1e6, level) for (at_ns, _), level in zip(edges, levels, strict=True)]


def closed_loop(n: int, concurrency: int, stay: float = 100.0, tokens: int = 5, **parts: Any) -> Cell:
    """`n` requests of `stay` ms each from `concurrency` slots whose first wave is staggered by an even step."""
    rows = []
    for i in range(n):
        due = i // concurrency * stay + i % concurrency * stay / concurrency
        rows.append(record(i, due, events=[due + stay * (k + 1) / tokens for k in range(tokens)]))
    return cell(rows, **{"load": {"kind": "closed", "concurrency": concurrency, "warmup": None}} | parts)


def stood_still(seed: int, stop: float = 8000.0, until: float = 10_500.0, n: int = 1000) -> list[Record]:
    """Poisson arrivals of 100/s at a server with a seat for everyone; the client stands still from `stop` to `until`
    ms: what is due meanwhile it sends then, and what comes meanwhile it reads then.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    dues, stays = np.cumsum(rng.exponential(10, n)).tolist(), rng.exponential(100, n).tolist()
    rows = []
    for i, (due, stay) in enumerate(zip(dues, stays, strict=True)):
        sent = until if stop <= due < until else due
        end = until if stop <= sent + stay < until else sent + stay
        rows.append(record(i, due, sent, [end - (end - sent) / 2, end], ready_ns=ns(due)))
    return rows
