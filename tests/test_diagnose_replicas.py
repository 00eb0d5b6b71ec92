"""A slow, failing or hot replica is named from the client's own records; equal ones are not."""

import math
import random
import subprocess
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import queue_sim
from llm_bench import diagnose_report, results, windows
from llm_bench.diagnose import diagnose
from llm_bench.diagnose_replicas import needs_replicas, of_urls, text
from llm_bench.evidence import Case
from llm_bench.records import Record
from tests.bench import command, environment, rows, trace_file
from tests.quiet import undisturbed
from tests.sample import cell, record
from tests.test_null_target import null_target

OPEN = {"kind": "open", "rate": 10.0, "warmup": 0.0}
URLS = ("http://a:1/v1", "http://b:1/v1")


def answered(i: int, ttft: float, gap: float = 20.0, **fields: Any) -> Record:
    """Request i, due 100 ms after the one before, at URL i mod 2."""
    values = {"url_index": i % 2} | fields
    return record(i, 100 * i, events=[100 * i + ttft + gap * k for k in range(5)], **values)


def case(made: list[Record]) -> Case:
    c = cell(made, load=OPEN)
    return Case("000-a", "a", "10/s", c, windows.of(c), {"reason": "exhausted"}, urls=URLS)


def found(made: list[Record]) -> Any:
    return diagnose(case(made)).findings.get("hot replica")


def test_one_slow_url_is_named_with_what_both_did() -> None:
    finding = found([answered(i, 50 if i % 2 else 30) for i in range(200)])
    assert finding.sure == "sure"
    assert "http://b:1/v1 is slow: median TTFT 50 ms, of the others 30 ms, slower in 10 of 10 parts" in finding.seen
    first, _ = map(text, of_urls(case([answered(i, 50 if i % 2 else 30) for i in range(200)])))
    assert first == "http://a:1/v1: 100 requests, 0 failed, median TTFT 30.0 ms, TPOT 20.0 ms, e2e 110.0 ms"


def test_a_url_that_decodes_slowly_is_named_by_its_tpot() -> None:
    finding = found([answered(i, 30, 30 if i % 2 == 0 else 20) for i in range(200)])
    assert "http://a:1/v1 is slow: median TPOT 30 ms, of the others 20 ms" in finding.seen


def test_a_url_that_was_slow_for_a_while_is_none() -> None:
    assert found([answered(i, 90 if i % 2 and i < 120 else 30) for i in range(200)]) is None


def test_longer_prompts_at_a_url_may_be_why() -> None:
    finding = found([answered(i, 50 if i % 2 else 30, tokens_in=400 if i % 2 else 100) for i in range(200)])
    assert finding.sure == "possible"
    assert "its prompts are 4.0 times as long, which may be why" in finding.seen


def test_a_url_that_fails_is_named() -> None:
    made = [
        record(i, 100 * i, url_index=1, outcome="failed", error="HTTP 500: x") if i % 10 == 1 else answered(i, 30)
        for i in range(200)
    ]
    finding = found(made)
    assert "http://b:1/v1 failed 20 of 100 requests, the others 0 of 100" in finding.seen
    everywhere = [
        record(i, 100 * i, url_index=i % 2, outcome="failed", error="HTTP 500: x") if i % 5 == 0 else answered(i, 30)
        for i in range(200)
    ]
    assert found(everywhere) is None


def test_few_requests_one_url_and_records_that_do_not_say_are_not_judged() -> None:
    assert needs_replicas(case([answered(i, 30) for i in range(60)])).endswith(
        "had 30 requests in the window, 50 are needed of each"
    )
    assert "do not say which one answered" in needs_replicas(case([answered(i, 30, url_index=-1) for i in range(60)]))
    alone = case([answered(i, 30, url_index=0) for i in range(60)])
    alone.urls = URLS[:1]
    assert needs_replicas(alone) == "one server, as far as is known"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([60, 200]), st.sampled_from([0.1, 0.5, 1.0]))
def test_equal_urls_are_not_named(seed: int, n: int, spread: float) -> None:
    """Lognormal first tokens, of busy spells that both share."""
    draw, level, made = random.Random(seed), 1.0, []
    for i in range(2 * n):
        level = math.exp(0.9 * math.log(level) + 0.2 * draw.gauss(0, 1))
        made.append(answered(i, 40 * level * draw.lognormvariate(0, spread)))
    assert found(made) is None


@pytest.mark.parametrize("seed", range(12))
def test_equal_replicas_that_queue_apart_are_not_named(seed: int) -> None:
    """Round robin over two M/G/1 queues at 80% load: each has busy spells of its own."""
    draw = queue_sim.rng(9, seed)
    due, service, made = np.cumsum(draw.exponential(1 / 1.6, 400)), queue_sim.services(draw, 400), dict[int, Record]()
    for url in (0, 1):
        stays = queue_sim.fcfs(due[url::2], service[url::2], 1)
        for k, (at, begin, end) in enumerate(zip(stays.due_s, stays.begin_s, stays.end_s, strict=True)):
            events = [100 * begin + 5, 100 * max(end, begin + 0.1)]
            made[2 * k + url] = record(2 * k + url, 100 * at, events=events, url_index=url)
    assert found([made[i] for i in range(400)]) is None


@undisturbed
def test_two_processes_of_which_one_is_slow(tmp_path: Path) -> None:
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    trace = trace_file(tmp_path, rows(240, tokens_out=3))
    with null_target("--ttft-ms", "5") as quick, null_target("--ttft-ms", "40") as slow:
        asked = command("run", "--targets", f"t={quick}|{slow}", "--trace", trace, "--out", tmp_path / "run")
        asked += ["--concurrency", "8", "--metrics", "ttft_p50", "--workers", "1"]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment(), timeout=180, check=False)
        assert done.returncode == 0, done.stderr
    (of,) = diagnose_report.diagnosed(results.load_run(tmp_path / "run"))
    assert f"{slow} is slow: median TTFT" in of.diagnosis.findings["hot replica"].seen
    shown = [text(one) for one in of_urls(of.diagnosis.case)]
    assert [line.partition(": ")[0] for line in shown] == [quick, slow]
    assert all(line in diagnose_report.text(results.load_run(tmp_path / "run"), [of]) for line in shown)


@pytest.mark.parametrize("form", ["terminal", "md", "json"])
def test_each_form_holds_what_each_url_did(tmp_path: Path, form: str) -> None:
    made = case([answered(i, 50 if i % 2 else 30) for i in range(200)])
    of = diagnose_report.Diagnosed(diagnose(made), [])
    shown = diagnose_report.FORMS[form](results.Run(tmp_path, {}, [], []), [of])
    assert "http://a:1/v1" in shown
    assert "http://b:1/v1" in shown
