"""Cells of single passes in every report: latency and requests a second, and nothing that needs a token."""

import json
from pathlib import Path
from typing import Any

import pytest

from llm_bench import doubts, export, metrics, report, results, windows, words
from llm_bench.diagnose import diagnose
from llm_bench.evidence import Case
from llm_bench.records import Cell, Record
from llm_bench.results import Asked
from llm_bench.series import SINGLE_PASS, single_pass
from tests.sample import cell, gauge_of, record
from tests.test_report import write_cell

N, STAY = 200, 100.0
CLOSED = {"kind": "closed", "concurrency": 4, "label": "c=4", "warmup": None}


def passes(n: int = N, **fields: Any) -> list[Record]:
    """A closed loop of 4 slots, `n` answers of one pass of 100 ms."""
    whole: dict[str, Any] = {"asked_out": -1, "tokens_out": 0, "tokens_out_from": "", "finish_reason": ""}
    whole |= {"bytes_in": 900, "text_bytes": 0} | fields
    rows = [record(i, i // 4 * STAY + i % 4 * STAY / 4, **whole) for i in range(n)]
    for i, row in enumerate(rows):
        row.end_ns = row.due_ns + round((STAY + i % 7) * 1e6)
    return rows


def decoded(n: int = N) -> list[Record]:
    rows = []
    for i in range(n):
        due = i // 4 * STAY + i % 4 * STAY / 4
        rows.append(record(i, due, events=[due + 20, due + 40, due + 60, due + STAY + i % 7], asked_out=4))
    return rows


def of(rows: list[Record], api: str = "embeddings", **parts: Any) -> Cell:
    target = {"name": api, "url": "http://127.0.0.1:1", "api": api, "model": "m"}
    probe = {"usage_in_stream": False, "lengths_pinned": False, "finish_reason_seen": False, "rtt_ms": 0.1}
    facts: dict[str, Any] = {"load": CLOSED, "target": target, "probe": probe, "plan": {"requests": len(rows)}}
    return cell(rows, gauge_of(rows), **facts | parts)


def folder(path: Path, **targets: list[Record]) -> results.Run:
    cells = []
    for number, (name, rows) in enumerate(targets.items()):
        api = "openai-chat" if name == "chat" else "embeddings"
        write_cell(path, f"00{number}-{name}", rows, target={"name": name, "api": api, "model": "m"}, load=CLOSED)
        entry = {"name": f"00{number}-{name}", "file": f"00{number}-{name}.arrow", "target": name, "load": CLOSED}
        cells.append(entry | {"end": {"reason": "exhausted"}})
    (path / "run.json").write_text(json.dumps({"version": "0.1.0", "cells": cells}))
    return results.load_run(path)


@pytest.mark.parametrize(
    "fields",
    [{"tokens_out": 3}, {"text_bytes": 9}, {"asked_out": 16}, {"asked_out": 0}],
)
def test_an_answer_with_a_token_a_text_or_a_length_is_no_single_pass(fields):
    assert single_pass(of(passes()))
    assert single_pass(of(passes(tokens_out=-1)))  # a protocol that says nothing of tokens
    assert not single_pass(of(passes(**fields)))
    assert not single_pass(of(decoded()))
    assert not single_pass(of([*passes(), *decoded(1)]))
    assert not single_pass(of(passes(outcome="failed")))


def test_its_latency_is_to_the_end_and_what_needs_tokens_has_a_reason_and_no_value():
    c = of(passes())
    w = windows.of(c)
    by_name = {v.name: v for v in metrics.compute_all(metrics.names(), c, w)}
    assert by_name["e2e_p50"].value == pytest.approx(103)
    assert by_name["e2e_max"].value == pytest.approx(106)
    assert by_name["requests_per_second"].value == pytest.approx(39, rel=0.05)
    for name in ("tokens_per_second", "tokens_per_second_run", "wasted_tokens"):
        assert (by_name[name].value, by_name[name].reason) == (None, SINGLE_PASS)
    for name in ("ttft_p95", "tpot_p50", "itl_p99", "normalized_latency_mean", "output_speed_p50", "stall_max"):
        assert by_name[name].value is None, name
        assert by_name[name].reason, name
    prompts = by_name["total_tokens_per_second"]  # its prompts are its throughput in tokens
    assert prompts.value == pytest.approx(100 * by_name["requests_per_second"].value, rel=0.02)


def test_no_doubt_is_about_tokens_and_others_stand():
    c, other = of(passes()), of(decoded(), "openai-chat")
    w = windows.of(c)
    found = doubts.doubts(
        c, w, [c, other], metrics.compute_all(words.DEFAULT_SINGLE_PASS, c, w), {"reason": "exhausted"}
    )
    assert [d.kind for d in found] == []
    late = of([*passes(N - 40), *passes(N, outcome="failed")[N - 40 :]])
    assert "failed requests" in {d.kind for d in doubts.doubts(late, windows.of(late))}


def test_its_siblings_of_the_same_kind_are_held_against_it():
    a, b = of(passes()), of(passes(tokens_in=150), "rerank")
    (found,) = [d for d in doubts.doubts(a, windows.of(a), [a, b]) if d.kind == "targets differ"]
    assert "prompt tokens a request 100 at embeddings, 150 at rerank" in found.text


def test_a_diagnosis_speaks_of_its_queue_and_of_no_first_token():
    c = of(passes(server_queue_ms=80.0, server_prefill_ms=15.0))
    found = diagnose(Case("a", "embeddings", "c=4", c, windows.of(c)))
    assert list(found.findings) == ["queueing"]
    assert found.findings["queueing"].seen == "80 ms of a mean e2e of 103 ms are waiting in the server's queue"
    assert "KV memory" not in found.findings["queueing"].check
    assert [part.name for part in found.case.parts.parts] == ["client lag", "network", "queue", "prefill"]
    quiet = of(passes(server_queue_ms=1.0, server_prefill_ms=95.0))
    assert diagnose(Case("a", "embeddings", "c=4", quiet, windows.of(quiet))).findings == {}


def test_a_run_of_single_passes_alone_has_their_columns(tmp_path):
    run = folder(tmp_path, vectors=passes(server_queue_ms=3.0, server_prefill_ms=90.0, server_batch=6.0))
    names = words.or_default(Asked(), run).names
    of_server = ("queue_p95", "prefill_p95", "batch_mean")
    assert names == ("e2e_p50", "e2e_p95", "e2e_p99", *of_server, "requests_per_second", "error_rate")
    for kind in ("terminal", "md", "html"):
        text = report.render([run], Asked(), kind)
        assert SINGLE_PASS in text, kind
    text = report.render([run], Asked(), "md")
    assert "ttft" not in text
    assert "tpot" not in text
    document = json.loads(export.json_text([run], Asked()))
    assert list(document["runs"][0]["cells"][0]["metrics"]) == list(names)
    assert document["runs"][0]["cells"][0]["metrics"]["batch_mean"]["value"] == 6.0


def test_a_run_of_both_kinds_says_the_first_decision_and_each_target_has_its_own_columns(tmp_path):
    run = folder(tmp_path, chat=decoded(), vectors=passes())
    text = report.render([run], Asked(), "md")
    assert "chat: LLM decoding: answers grow token by token" in text
    assert "vectors: single pass: one result a request, nothing is decoded" in text
    assert "not the same work" not in text
    assert "targets differ" not in text
    heads = [line for line in text.splitlines() if line.startswith("| load |")]
    assert ["ttft" in line for line in heads] == [True, False]
    assert all("e2e\\_p99" in line or "e2e_p99" in line for line in heads)
    assert text.count(SINGLE_PASS) == 1
    alone = folder(tmp_path / "alone", vectors=passes())
    assert words.agreements(alone) == []


def test_metrics_that_are_asked_for_by_name_are_shown_with_their_reason(tmp_path):
    run = folder(tmp_path, vectors=passes())
    text = report.render([run], Asked(names=("ttft_p95", "tokens_per_second")), "md")
    assert "ttft" in next(line for line in text.splitlines() if line.startswith("| load |"))
    assert SINGLE_PASS in text
