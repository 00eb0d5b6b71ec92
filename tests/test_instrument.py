"""bench.instrument: client minus engine, joined by request id, on figures counted off by hand and once over HTTP."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bench import instrument
from bench.engine_client import engine, write_trace
from bench.instrument import apart, facts_of, held, loads, points, table
from bench.lesson_sim import chat
from llm_bench import records, trace
from llm_bench.records import Record
from reference_engine.fit_cost import read_steps

MS = 1_000_000
MACHINE = {"cpu": "a CPU", "cores": 2, "python": "3.11", "load_before": 0.1}


def line(name: str, received_ns: int, tokens: int = 3, preemptions: int = 0, **parts: int) -> str:
    """Of the engine's log: 1 + 2 + 10 ms to the first token, 20 ms to the last, 0.5 ms to the end of the answer."""
    ns = {"http_in": 1, "queue": 2, "prefill": 10, "decode": 20, "preempted": 0, "recompute": 0, "http_out": 0.5}
    ns = {key: round(value * MS) for key, value in (ns | parts).items()}
    return json.dumps({"request_id": name, "received_ns": received_ns, "outcome": "length", "preemptions": preemptions,
                       "completion_tokens": tokens, "parts_ns": ns, "total_ns": sum(ns.values())})  # fmt: skip


def record(name: str, index: int = 0, sent_ns: int = 10**9, outcome: str = "ok", **fields: Any) -> Record:
    """Sent, first token 13.4 ms later, last 33.6 ms, end 34 ms."""
    events = [sent_ns + round(ms * MS) for ms in (13.4, 23.5, 33.6)]
    facts = {"event_ns": events, "end_ns": sent_ns + 34 * MS, "first_byte_ns": events[0], "tokens_out": 3} | fields
    return Record(index, name, outcome, sent_ns, sent_ns, sent_ns, **facts)


def test_what_the_client_saw_less_what_the_engine_said() -> None:
    cell = records.from_records([record("a")], gauge=np.array([[10**9, 1], [10**9 + 34 * MS, 0]]))
    found = apart(cell, [line("a", 10**9 + 200_000), line("probe", 1)])
    assert found.there_ms == pytest.approx([0.2])
    assert found.ttft_ms == pytest.approx([0.4])
    assert found.tpot_ms == pytest.approx([(20.2 - 20) / 2])
    assert found.e2e_ms == pytest.approx([34 - 33.5])
    assert (found.unknown, found.tokens) == (0, (3, 3))
    assert found.in_flight_s == pytest.approx((0.034, 0.0335))


def test_a_preempted_answer_has_no_first_token_in_the_log_and_its_gaps_hold_what_was_lost() -> None:
    found = apart(
        records.from_records([record("a")]), [line("a", 10**9, preemptions=1, decode=15, preempted=3, recompute=2)]
    )
    assert len(found.ttft_ms) == 0
    assert found.tpot_ms == pytest.approx([0.1])
    assert found.e2e_ms == pytest.approx([0.5])


def test_only_ok_requests_are_joined_and_who_is_unknown_is_counted() -> None:
    cell = records.from_records([record("a", 0), record("b", 1, 2 * 10**9), record("c", 2, 3 * 10**9, "cut_at_end")])
    found = apart(cell, [line("a", 10**9), line("c", 3 * 10**9)])
    assert (len(found.e2e_ms), found.unknown) == (1, 1)


def test_a_lost_token_an_unknown_request_and_a_late_tail_each_break_the_claim() -> None:
    load = loads(1)["fast"]
    cell = records.from_records([record("a")])
    good = facts_of(load, apart(cell, [line("a", 10**9)]))
    assert held(good)
    assert not held(facts_of(load, apart(cell, [line("a", 10**9, tokens=4)])))
    assert not held(good | {"unknown": 1})
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert not held(good | {name: good[name] | {"p99": instrument.LIMIT_MS}})


def test_points_are_of_sizes_and_keep_the_sign_of_the_least() -> None:
    found = points(np.array([-2.0, 1.0, 0.5]))
    assert (found["p50"], found["max"], found["least"]) == (1.0, 2.0, -2.0)


def test_the_table_has_a_row_for_each_figure() -> None:
    facts = facts_of(loads(1)["fast"], apart(records.from_records([record("a")]), [line("a", 10**9 + 200_000)]))
    said = table({"fast": facts}, MACHINE)
    assert "| fast | TTFT | 0.400 | 0.400 | 0.400 | 0.400 |" in said
    assert "| fast | of these: sent → received | 0.200 |" in said
    assert "1 requests joined, 0 not in the engine's log; tokens 3 and 3" in said


def test_a_written_trace_is_read_with_its_times_and_lengths(tmp_path: Any) -> None:
    arrivals = chat(16, 20)
    write_trace(tmp_path / "t.jsonl", arrivals)
    found = trace.read(tmp_path / "t.jsonl").requests
    assert [(r.tokens_in, r.tokens_out) for r in found] == [(len(a.prompt), a.max_tokens) for a in arrivals]
    first_s = arrivals[0].at_s
    assert [r.at_s for r in found] == pytest.approx([a.at_s - first_s for a in arrivals], abs=2e-6)


def test_client_and_engine_agree_over_http() -> None:
    """A handful of requests, wide bounds: who reads a socket later than it was written to is never before it."""
    pytest.importorskip("aiohttp")
    load = loads(24)["fast"]
    found = instrument.run(load, None)
    assert (len(found.e2e_ms), found.unknown) == (24, 0)
    assert found.tokens == (sum(a.max_tokens for a in load.arrivals),) * 2
    assert found.ttft_ms.min() > 0
    assert found.there_ms.min() > 0
    assert found.e2e_ms.min() > -500  # the engine stamps its end when it has written: the client may have read by then
    for ms in (found.ttft_ms, found.e2e_ms, found.there_ms):
        assert np.median(ms) < 500
    client_s, engine_s = found.in_flight_s
    assert client_s > 0
    assert engine_s > 0


def test_an_engine_in_scaled_time_reports_the_models_and_logs_its_steps(tmp_path: Path) -> None:
    """Steps of 1 ms in a quarter of it: what the engine says is the model's time, what passed here is a quarter."""
    pytest.importorskip("aiohttp")
    log, steps = tmp_path / "log", tmp_path / "steps"
    body = {"prompt": [1] * 10, "max_tokens": 200}
    flags = (f"--log-requests={log}", f"--log-steps={steps}", "--time-scale=0.25")
    with engine(loads(1)["fast"].config, *flags) as url, httpx.Client(trust_env=False) as client:
        assert client.get(f"{url}/models").status_code == 200  # what a first request takes is no part of it
        begun_ns = time.monotonic_ns()
        assert client.post(f"{url}/completions", json=body).status_code == 200
        passed_ns = time.monotonic_ns() - begun_ns
    (said,) = map(json.loads, log.read_text().splitlines())
    assert said["parts_ns"]["decode"] > 190 * MS
    assert said["total_ns"] / passed_ns <= 4  # the rest is the way there and back
    work, seconds = read_steps(steps.read_text().splitlines(), "steps")
    assert work[:, 0].tolist() == [10, *[1] * 199]
    assert work[:, 1].tolist() == [10, *range(11, 210)]
    assert seconds.mean() > 0.5e-3  # of 1 ms, less what a late step before it took of its time; unscaled it is 0.25
