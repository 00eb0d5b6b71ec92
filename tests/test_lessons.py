"""bench.lessons in virtual time: what the lessons teach is so, and the page says what the results say."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import lesson_cap, lesson_page, lessons
from bench.engine_client import engine
from bench.lesson_measured import counterpart, figures
from bench.lesson_sim import BASE, Ran, chat, p, simulate
from bench.lessons import LESSONS, batched, chunked
from llm_bench import records
from llm_bench.records import Record
from reference_engine.virtual import Arrival

REPORT = Path(__file__).parents[1] / "reports/lessons"
MS = 1_000_000


@pytest.mark.parametrize("rate", [16, 30])
def test_static_and_dynamic_saturate_where_continuous_does_not(rate: int) -> None:
    static, dynamic, continuous = (simulate(batched(mode), chat(rate, 600)) for mode in lessons.MODES)
    assert static.saturated
    assert dynamic.saturated
    assert not continuous.saturated
    assert max(static.tokens_per_s, dynamic.tokens_per_s) < 0.7 * continuous.tokens_per_s


def test_a_smaller_chunk_trades_the_first_token_for_even_gaps() -> None:
    large, small = (simulate(chunked(budget), chat(30)) for budget in (2048, 512))
    assert p(small.longest_gap_s, 95) < 0.5 * p(large.longest_gap_s, 95)
    assert p(small.ttft_s, 95) > 1.05 * p(large.ttft_s, 95)
    assert small.tokens_per_s == pytest.approx(large.tokens_per_s, rel=0.02)


def test_a_cap_on_one_prompt_lets_others_in_and_too_small_a_one_is_for_nothing() -> None:
    none, half, least = (simulate(lesson_cap.capped(cap), lesson_cap.crowd()) for cap in (0, 256, 64))
    ttft_s = [
        (p(ran.ttft_s[ran.clients == "short"], 95), ran.ttft_s[ran.clients == "long"]) for ran in (none, half, least)
    ]
    assert ttft_s[1][0] < 0.2 * ttft_s[0][0]
    assert (ttft_s[0][1] < ttft_s[1][1]).all()
    assert (1.5 * ttft_s[1][1] < ttft_s[2][1]).all()
    assert ttft_s[2][0] > 0.5 * ttft_s[1][0]


def test_too_little_memory_is_late_before_it_is_slow() -> None:
    roomy = replace(BASE, max_num_seqs=256)
    full, tight = (simulate(replace(roomy, num_blocks=n), chat(30)) for n in (4000, 2500))
    assert full.preemptions == 0 < tight.preemptions
    assert p(tight.ttft_s, 95) > 2 * p(full.ttft_s, 95)
    assert tight.tokens_per_s == pytest.approx(full.tokens_per_s, rel=0.01)


def test_a_window_makes_larger_batches_and_later_answers() -> None:
    random = np.random.default_rng(1)
    arrivals = [Arrival(s, [0] * 16, 1) for s in np.cumsum(random.exponential(1 / 60, 500)).tolist()]
    none, wide = (simulate(replace(BASE, batching="dynamic", max_wait_ms=wait), arrivals) for wait in (0, 50))
    assert wide.batch > 2 * none.batch
    assert wide.busy < 0.6 * none.busy
    assert p(wide.e2e_s, 50) > p(none.e2e_s, 50) + 0.03


def test_priority_moves_the_waiting_and_a_fair_share_protects_the_small() -> None:
    names = ["urgent" if i % 10 else "batch" for i in range(500)]
    arrivals = [
        a._replace(client=name, priority=lessons.CLASSES[name]) for a, name in zip(chat(30, 500), names, strict=True)
    ]
    tight = replace(BASE, max_num_seqs=16)
    batch_s = {
        policy: p(ran.ttft_s[ran.clients == "batch"], 95)
        for policy in lessons.POLICIES
        if (ran := simulate(replace(tight, policy=policy), arrivals))
    }
    assert batch_s["fair"] < 0.1 * batch_s["fcfs"] < batch_s["fcfs"] < batch_s["priority"]


def test_a_load_is_the_same_at_each_rate_only_closer() -> None:
    slow, fast = chat(2, 50), chat(20, 50)
    assert [(len(a.prompt), a.max_tokens) for a in slow] == [(len(a.prompt), a.max_tokens) for a in fast]
    assert [a.at_s for a in slow] == pytest.approx([10 * a.at_s for a in fast])


def test_figures_of_a_simulation_are_those_counted_off() -> None:
    """Steps of 1 ms, two requests of 3 tokens: the second comes while the first is in its second step."""
    config = replace(BASE, model="sim:fast")
    ran = simulate(config, [Arrival(0.0, [1] * 10, 3), Arrival(0.0015, [2] * 10, 3)])
    assert ran.queue_s.tolist() == [0, 0.0005]
    assert ran.ttft_s == pytest.approx([0.001, 0.0015])
    assert ran.tpot_s == pytest.approx([0.001, 0.001])
    assert ran.e2e_s == pytest.approx([0.003, 0.0035])
    assert ran.longest_gap_s == pytest.approx([0.001, 0.001])
    assert (ran.busy, ran.batch, ran.computed) == (1.0, 6 / 5, 10 + 2 + 10 + 2)
    assert ran.tokens_per_s == pytest.approx(1 / 0.0015)  # until the second came one token was there
    assert not ran.saturated


# ---- measured beside virtual


def test_a_failed_request_has_no_figures() -> None:
    ends = {"ok": [10**9 + MS], "timeout": []}
    cell = records.from_records(
        [Record(i, f"r{i}", name, 10**9, 10**9, 10**9, event_ns=ns, end_ns=10**9 + MS, first_byte_ns=10**9 + MS,
                tokens_in=8, tokens_out=len(ns)) for i, (name, ns) in enumerate(ends.items())]
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="1 of 2 requests were not ok but timeout"):
        figures(cell)


def test_a_busy_machine_is_named_on_the_page() -> None:
    facts = lesson_page.read_measured(REPORT / "measured.json")
    assert facts
    busy = "this machine was busy before it began"
    for load, cores, said in ((0.1, 2, False), (7.4, 2, True), (7.4, 32, False)):
        page = lesson_page.render({}, facts | {"machine": facts["machine"] | {"load_before": load, "cores": cores}})
        assert (busy in page) == said


def test_an_engine_that_does_not_start_is_named() -> None:
    with (
        pytest.raises(RuntimeError, match=r"exit 2 before it listened, of .*sim:nope"),
        engine(replace(BASE, model="sim:nope")),
    ):
        pass


def test_an_engine_that_closes_its_output_and_stays_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec >&-\ncat >/dev/null\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(RuntimeError, match="exit 3 before it listened"), engine(BASE):
        pass


def test_the_counterpart_of_a_measured_cell_has_its_moments_and_lengths() -> None:
    """An engine that keeps its model's times to the nanosecond would be measured to have the virtual figures."""
    config = replace(BASE, model="sim:fast")
    due_s, made = (0.0, 0.0015, 0.004), (3, 3, 40)
    virtual = simulate(config, [Arrival(at, [0] * 8, n) for at, n in zip(due_s, made, strict=True)])
    rows = []
    for i, (at, n) in enumerate(zip(due_s, made, strict=True)):
        due = 10**9 + round(at * 1e9)
        first = due + round(virtual.ttft_s[i] * 1e9)
        events = [first + k * MS for k in range(n)]
        rows.append(Record(i, f"r{i}", "ok", due, due, due, event_ns=events, end_ns=events[-1], first_byte_ns=first,
                           tokens_in=8, tokens_out=n))  # fmt: skip
    cell = records.from_records(rows)
    again = counterpart(config, cell)
    assert again.ttft_s.tolist() == virtual.ttft_s.tolist()
    measured = figures(cell)
    assert measured["TTFT p50, s"] == pytest.approx(p(virtual.ttft_s, 50))
    assert measured["TPOT p50, s"] == pytest.approx(p(virtual.tpot_s, 50))
    assert measured["e2e p95, s"] == pytest.approx(p(virtual.e2e_s, 95))
    assert measured["tok/s"] == pytest.approx(virtual.tokens_per_s)


# ---- the page


def test_the_page_is_what_its_results_say() -> None:
    said = lesson_page.read(REPORT / "results.json")
    assert list(said) == list(LESSONS)
    facts = lesson_page.read_measured(REPORT / "measured.json")
    assert (REPORT / "README.md").read_text() == lesson_page.render(said, facts)
    for name, lesson in said.items():
        assert (REPORT / f"{name}.svg").read_text().count("<svg") == 1
        assert all(len(row) == len(lesson.columns) for row in lesson.rows)
        assert all(len(values) == len(panel.x) for panel in lesson.panels for values in panel.series.values())


@pytest.mark.parametrize("name", ["precision", "window"])
def test_the_kept_results_are_those_of_this_tree(name: str) -> None:
    """The cheapest two. Else: `make lessons`."""
    kept, found = lesson_page.read(REPORT / "results.json")[name], LESSONS[name]()
    assert (found.rows, found.teaches, found.setup) == (kept.rows, kept.teaches, kept.setup)
    for ours, theirs in zip(found.panels, kept.panels, strict=True):
        for line, values in theirs.series.items():
            assert ours.series[line] == pytest.approx(values, rel=1e-6)  # exp differs in its last bit by machine


def test_a_figure_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = [
        lesson_page.Panel("x", "y", [1, 2, 4], {"a": [1.0, 2.0, 3.0], "b": [3.0, 2.0, 1.0]}, log_x=True, log_y=True),
        lesson_page.Panel("x", "y", ["u", "v"], {"a": [1.0, 2.0]}),
    ]
    for name in ("one", "two"):
        lesson_page.draw(panels, tmp_path / f"{name}.svg")
    one = (tmp_path / "one.svg").read_bytes()
    assert one == (tmp_path / "two.svg").read_bytes()
    assert b"<dc:date>" not in one


def test_saturated_is_a_queue_that_grows() -> None:
    def waited(queue_s: list[float]) -> bool:
        empty = np.array([])
        return Ran(0, np.array(queue_s), empty, empty, empty, empty, empty, 1, 1, 1, 0, 0).saturated

    assert waited([1.0, 2.0, 3.0, 4.0, 5.0])
    assert not waited([3.0, 3.0, 3.0, 3.0, 4.0])  # long, and no longer
    assert not waited([0.01, 0.1, 0.2, 0.3, 0.5])  # short
