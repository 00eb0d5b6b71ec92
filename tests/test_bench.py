"""bench/: what is read from each rival's output, what is made of a truth file, what a process tree costs."""

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import hotpath, table, tokenizer
from bench.client import Load, beside, loads, read_truth, summary
from bench.ours import CONTROL, OURS, ROWS
from bench.rivals import RIVALS
from bench.row import Claim, Work
from llm_bench.records import Record, Writer

REPOSITORY = Path(__file__).parents[1]
POINTS = {"successful": {"percentiles": {"p50": 51.5, "p99": 60.25}}}
GUIDELLM = {
    "request_totals": {"successful": 64},
    "time_to_first_token_ms": POINTS,
    "inter_token_latency_ms": {"successful": {"percentiles": {"p50": 20.0, "p99": 21.5}}},
}
VLLM = {"completed": 64, "median_ttft_ms": 51.5, "p99_ttft_ms": 60.25, "median_itl_ms": 20.0, "p99_itl_ms": 21.5}
INFERENCE_PERF = {
    "count": 64,
    "latency": {
        "time_to_first_token": {"median": 0.0515, "p99": 0.06025},
        "inter_token_latency": {"median": 0.02, "p99": 0.0215},
    },
}
AIPERF = {
    "request_count": {"unit": "requests", "avg": 64.0},
    "time_to_first_token": {"unit": "ms", "avg": 52.0, "p50": 51.5, "p99": 60.25},
    "inter_chunk_latency": {"unit": "ms", "p50": 20.0, "p99": 21.5},
}
EVALSCOPE = [
    {"Percentiles": "50%", "TTFT (ms)": 51.5, "ITL (ms)": 20.0, "TPOT (ms)": 20.0},
    {"Percentiles": "99%", "TTFT (ms)": 60.25, "ITL (ms)": 21.5, "TPOT (ms)": 20.1},
]
LOCUST = '{"ok": 64, "ttft_ms": [51.5, 60.25], "gap_ms": [20.0, 21.5]}'
# name -> the part of its output that is read, as recorded from the releases in RIVALS: {file: content}, what it printed
RECORDED: dict[str, tuple[dict[str, Any], str]] = {
    "aiperf": ({"aiperf/profile_export_aiperf.json": AIPERF}, ""),
    "guidellm": ({"guidellm.json": {"benchmarks": [{"metrics": GUIDELLM}]}}, ""),
    "evalscope": (
        {
            "evalscope/20260101_000000/bench/parallel_32/benchmark_summary.json": {"Success Requests": 64},
            "evalscope/20260101_000000/bench/parallel_32/benchmark_percentile.json": EVALSCOPE,
        },
        "",
    ),
    "inference-perf": ({"inference-perf/summary_lifecycle_metrics.json": {"successes": INFERENCE_PERF}}, ""),
    "vllm": ({"result.json": VLLM}, ""),
    "sglang": ({"result.json": VLLM}, ""),
    "sglang-rust": ({"result.json": VLLM}, ""),
    "locust": ({}, f"Type     Name  # reqs\n{LOCUST}\nAggregated 64\n"),
}
LOAD = Load("paced", 50.0, 20.0, 2, 3, (2, 4))


def _lay(out: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(json.dumps(content))


@pytest.mark.parametrize("name", RIVALS)
def test_the_output_of_each_rival_is_read(name: str, tmp_path: Path) -> None:
    files, printed = RECORDED[name]
    _lay(tmp_path, files)
    claim = RIVALS[name].read(tmp_path, printed)
    assert claim.ok == 64
    assert claim.ttft_ms == pytest.approx((51.5, 60.25))
    assert claim.gap_ms == pytest.approx((20.0, 21.5))
    assert claim.gap_of == ("requests" if name == "guidellm" else "events")


def test_failed_requests_of_aiperf_are_not_claimed(tmp_path: Path) -> None:
    _lay(tmp_path, {"aiperf/profile_export_aiperf.json": AIPERF | {"error_request_count": {"avg": 4.0}}})
    assert RIVALS["aiperf"].read(tmp_path, "").ok == 60


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_that_wrote_nothing_raises_what_the_client_catches(name: str, tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError, LookupError)):
        RIVALS[name].read(tmp_path, "Traceback: it fell over")


@pytest.mark.parametrize("name", [*RIVALS, *ROWS])
def test_each_client_is_asked_for_the_same_work(name: str, tmp_path: Path) -> None:
    work = Work("http://127.0.0.1:4321/v1", 37, 411, 59, 32, tmp_path / "tokenizer", tmp_path)
    row = (RIVALS | ROWS)[name]
    words = row.command(tmp_path / "home", work)
    said = " ".join([*words, *(path.read_text() for path in tmp_path.glob("*") if path.is_file())])
    assert "127.0.0.1:4321" in said
    assert "37" in said and "59" in said
    assert "411" in said or said.count('"output_length": 59') == 411  # our trace has a row a request


def _truth(*answers: tuple[int, list[int]]) -> list[str]:
    lines = [{"request_id": "", "read_ns": r * 10**6, "write_ns": [w * 10**6 for w in ws]} for r, ws in answers]
    return [json.dumps(line) for line in lines]


def test_the_truth_leaves_probes_out_and_counts_their_events() -> None:
    lines = _truth((2000, [2051, 2071, 2091]), (0, [400]), (1000, [1050, 1070, 1092]))  # by their ends, as written
    truth = read_truth(lines, LOAD, 2)
    assert (truth.answers, truth.events, truth.first_ns) == (3, 7, 1000 * 10**6)
    assert truth.ttft_ms == pytest.approx((50.5, 50.99))
    assert truth.gap_ms == pytest.approx((20.0, 21.94))
    assert truth.mean_gap_ms == pytest.approx((20.5, 20.99))
    assert truth.events_per_s == pytest.approx(6 / 1.091)
    assert truth.late_ms == pytest.approx(1.95)


def test_a_server_that_saw_nothing_is_no_truth() -> None:
    with pytest.raises(ValueError, match="no request"):
        read_truth([], LOAD, 2)


def _run(requests: int, cpu_s: float, events: int, rss: int, **more: Any) -> dict[str, Any]:
    facts = {"requests": requests, "cpu_s": cpu_s, "events": events, "peak_rss_bytes": rss, "exit_code": 0, "note": ""}
    return facts | {"claimed": requests, "served": requests + 1} | more


def test_start_up_is_not_in_the_cost_of_an_event() -> None:
    small = [_run(10, 5.0, 1000, 100 << 20), _run(10, 7.0, 1000, 100 << 20)]
    large = [_run(50, 5.2, 5000, 101 << 20, start_s=1.0), _run(50, 7.4, 5000, 101 << 20, start_s=3.0)]
    found = summary(small, large)
    assert found["cpu_s_per_1k"] == pytest.approx([0.075, 0.05, 0.1])
    assert found["kib_per_1k"] == pytest.approx([256.0] * 3)
    assert found["start_s"] == [2.0, 1.0, 3.0]
    assert found["ttft_error_p50_ms"] is None


def test_the_page_holds_us_against_a_rival_one_that_failed_and_one_that_is_missing() -> None:
    def client(cpu_s: float, **more: Any) -> dict[str, Any]:
        return summary([_run(10, 0.0, 0, 1 << 20)], [_run(50, cpu_s, 1000, 1 << 20, **more)])

    broken = summary([_run(10, 1.0, 0, 1, note="no result: it fell over", claimed=None)], [_run(50, 1.0, 0, 1)])
    rows = {OURS: client(0.02), "aiperf": client(0.3, ttft_error_p50_ms=76.0, ttft_error_p99_ms=90.0), "locust": broken}
    page = table.render(
        {
            "machine": {
                "cpu": "a",
                "cores": 2,
                "memory_gib": 24,
                "load_before": 0.5,
                "load_after": 2.0,
                "python": "3.11.7",
            }
        }
        | {"summaries": {"paced": rows}, "versions": {"aiperf": "0.13.0"}, "missing": ["vllm"], "runs": []}
        | {"command": ["--repeats 1"]}
    )
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in page.splitlines() if line[:1] == "|"}
    assert cells["aiperf 0.13.0"][1:3] == ["0.3000", "15.00"]
    assert cells["aiperf 0.13.0"][7] == "+76.00 / +90.00"
    assert cells["aiperf 0.13.0"][10] == "60 of 60 (served +2)"
    assert cells["locust"][1] == "–"
    assert "locust: no result: it fell over" in page
    assert cells["vllm"][1].startswith("not installed")


def test_the_larger_size_is_larger_whatever_is_asked_for() -> None:
    for asked in (None, 1, 100, 5000):
        assert all(load.sizes[0] < load.sizes[1] for load in loads([64, 256], asked))


_ORPHAN = "import time; e = time.process_time() + 0.3\nwhile time.process_time() < e: pass"
_PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_ORPHAN!r}])"
_HARNESS = f"""
import json, os, sys
from pathlib import Path
from bench import process
process.adopt_orphans()
core = min(os.sched_getaffinity(0))
ran = process.run([sys.executable, "-c", {_PARENT!r}], core, 30.0, Path(sys.argv[1]), os.environ, Path.cwd())
print(json.dumps(ran._asdict()))
"""


def test_a_process_that_its_parent_left_behind_is_paid_for(tmp_path: Path) -> None:
    asked = [sys.executable, "-c", _HARNESS, f"{tmp_path}/printed"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=180)
    ran = json.loads(done.stdout)
    assert ran["exit_code"] == 0 and not ran["timed_out"]
    assert ran["cpu_s"] >= 0.3


def test_every_word_is_a_token(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    loaded = library.Tokenizer.from_file(str(tokenizer.write(tmp_path / "t") / "tokenizer.json"))
    assert len(loaded.encode("word w7 never-seen " * 11).ids) == 33


def test_the_hot_path_is_measured_in_both_shapes(tmp_path: Path) -> None:
    facts = asyncio.run(hotpath.measure(16, 2, 1, tmp_path))
    for shape in ("whole", "one_event"):
        assert all(math.isfinite(facts[shape][f"{stage}_ns"]) for stage in hotpath.STAGES)
        assert facts[shape]["total_ns"] >= facts[shape]["read_ns"] > 0
    assert facts["one_event"]["python_calls"] > facts["whole"]["python_calls"] > 0
    assert len(hotpath.show(facts).splitlines()) == 2 + len(hotpath.STAGES) + 2


def test_our_records_are_held_against_the_truth_request_by_request(tmp_path: Path) -> None:
    ms = 10**6
    (tmp_path / "run").mkdir()
    writer = Writer(tmp_path / "run/000-x.arrow", {})
    came = [2054 * ms, 2074 * ms, 2095 * ms]
    writer.write(Record(0, "a", "ok", 1, sent_ns=2000 * ms - 500_000, end_ns=came[-1], event_ns=came))
    writer.write(Record(1, "b", "failed", 1, sent_ns=2000 * ms, event_ns=[9000 * ms]))
    writer.close()
    claim = ROWS[OURS].read(tmp_path, "")
    assert claim.ok == 1
    assert claim.ttft_ms == pytest.approx((54.5, 54.5))
    assert claim.gap_ms == pytest.approx((20.5, 20.99))
    (line,) = _truth((2000, [2051, 2071, 2091]))
    facts = beside(read_truth([line.replace('""', '"a"')], LOAD, 1), claim, LOAD)
    assert facts["ttft_error_p50_ms"] == pytest.approx(3.5)
    assert facts["read_after_sent_p50_ms"] == pytest.approx(0.5)
    assert facts["stamp_after_write_p50_ms"] == pytest.approx(3.0)


def test_the_control_counts_what_it_was_asked_for(tmp_path: Path) -> None:
    printed = 'noise\n{"answers": 64, "events": 4352, "bytes": 700000}\n'
    assert ROWS[CONTROL].read(tmp_path, printed) == Claim(64)
