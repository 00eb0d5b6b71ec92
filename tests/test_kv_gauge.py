"""What sequences held by the records, beside the server's gauge: by hand, and against the reference engine."""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import orjson
import pytest

from llm_bench import capacity_plan, capacity_report, kv_gauge, results, scrape, targets
from llm_bench.capacity_ask import Ask, Section
from llm_bench.records import Record
from llm_bench.results import Run
from llm_bench.server_metrics import read
from tests.bench import command, environment, rows, trace_file
from tests.sample import ns, record
from tests.test_carried import closed, run_of
from tests.test_energy import scraped

PAGE = "http://a/metrics"
CONFIG = 'vllm:cache_config_info{{block_size="{}",cache_dtype="auto",engine="0",num_gpu_blocks="{}"}} 1\n'


def held(n: int = 40, **fields: Any) -> list[Record]:
    """One at a time for 1 s each: 96 prompt tokens and 16 more at once, 7 blocks of 16 from the first token on."""
    return [record(i, 1000 * i, events=[1000 * i + k / 16 for k in range(15)] + [1000 * i + 1000],
                   tokens_in=96, server_queue_ms=0.0, **fields) for i in range(n)]  # fmt: skip


def run_with(folder: Path, values: dict[str, float], made: list[Record] | None = None) -> Run:
    where = run_of(folder, {"000-a-c=1": (made or held(), closed(1))}).path
    scraped(scrape.path_of(where, "000-a-c=1"), ns(0), [values] * 41, PAGE)
    return results.load_run(where)


def said(run: Run) -> tuple[tuple[Any, ...], str]:
    found = kv_gauge.section(run.cells)
    assert found is not None
    ((row,), notes) = found.tables[0].rows, "\n".join(found.notes)
    return row, notes


def page(usage: float, running: float = 1.0, block: int = 16, blocks: int = 100) -> dict[str, float]:
    gauges = f"vllm:kv_cache_usage_perc {usage}\nvllm:num_requests_running {running}\n"
    return read((gauges + CONFIG.format(block, blocks)).encode())


def test_the_size_of_a_pool_is_read_off_the_labels_of_its_configuration() -> None:
    assert page(0.07) == {
        "vllm:kv_cache_usage_perc": 0.07,
        "vllm:num_requests_running": 1.0,
        'cache:pool_tokens{engine="0"}': 1600.0,
        'cache:block_tokens{engine="0"}': 16.0,
    }
    assert read(CONFIG.format(16, "None").encode()) == {}


def test_two_that_agree_by_hand(tmp_path: Path) -> None:
    row, notes = said(run_with(tmp_path / "r", page(0.07)))
    # 7 blocks of 16 tokens are 112; 7% of 1,600.
    assert row == ("c=1", row[1], pytest.approx(112, rel=0.01), "7.00%", 1600, pytest.approx(112), row[6])
    assert abs(float(row[6].rstrip("%"))) < 1
    assert "the two agree" in notes


def test_replicas_scraped_at_other_times_are_not_held_against_the_records(tmp_path: Path) -> None:
    """One page was read for 40 s, the other for 10: what both held is not of one time."""
    where = run_of(tmp_path / "r", {"000-a-c=1": (held(), closed(1))}).path
    values = page(0.07)
    lines: list[dict[str, Any]] = [{"llm_bench_scrape": 1, "every_s": 1.0, "sources": [PAGE, "http://b/metrics"]}]
    for k, scrapes in ((0, 41), (1, 11)):
        lines += [{"k": k, "at": ns(0) + i * 10**9, "took": 0, "v": values} for i in range(scrapes)]
    scrape.path_of(where, "000-a-c=1").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    row, notes = said(results.load_run(where))
    assert (row[2], row[3], row[6]) == (None, "7.00%", "–")
    assert "not at the same times" in notes


@pytest.mark.parametrize(("usage", "running", "fields", "what"), [
    (0.21, 3.0, {}, "the server ran 3 sequences, the records have 1 that held something"),
    (0.21, 1.0, {}, "room kept for answers not yet made"),
    (0.04, 1.0, {"tokens_cached": 48}, "without those the records have 64 tokens, with which the gauge agrees"),
    (0.04, 1.0, {}, "it shares blocks between them and does not say so"),
])  # fmt: skip
def test_what_a_difference_may_come_of(
    tmp_path: Path, usage: float, running: float, fields: dict[str, Any], what: str
) -> None:
    row, notes = said(run_with(tmp_path / "r", page(usage, running), held(**fields)))
    assert row[6] == ("+200.0%" if usage > 0.1 else "-42.9%")
    assert what in notes


def test_the_plans_memory_is_held_against_the_servers_own(tmp_path: Path) -> None:
    cells = run_with(tmp_path / "r", page(0.07)).cells
    for planned, what in ((1700.0, "as the plan has it"), (16_000.0, "0.1 times what the plan has")):
        found = kv_gauge.section(cells, planned)
        assert found is not None
        assert [f.value for f in found.figures] == [planned, 1600]
        assert what in found.figures[1].how


def test_of_a_pool_of_unknown_size_it_is_said_how_large_it_would_be(tmp_path: Path) -> None:
    row, notes = said(run_with(tmp_path / "r", {"llamacpp:kv_cache_usage_ratio": 0.14}))
    assert (row[4], row[5], row[6]) == (None, None, "–")
    assert "both agree if it holds 800 tokens" in notes


def test_without_a_gauge_there_is_no_section(tmp_path: Path) -> None:
    assert kv_gauge.section(run_with(tmp_path / "r", {"vllm:num_requests_running": 1.0}).cells) is None
    assert kv_gauge.section(run_of(tmp_path / "q", {"000-a-c=1": (held(), closed(1))}).cells) is None


def test_answers_that_came_whole_have_no_figure_of_the_records(tmp_path: Path) -> None:
    whole = [record(i, 1000 * i, end=1000 * i + 900, tokens_out=5) for i in range(40)]
    row, notes = said(run_with(tmp_path / "r", page(0.07), whole))
    assert row[2] is None
    assert "no sequence streamed its tokens" in notes


def test_a_plan_of_a_run_whose_server_was_scraped_has_the_two_side_by_side(tmp_path: Path) -> None:
    (section,) = [s for s in capacity_plan.plan([run_with(tmp_path / "r", page(0.07))], Ask()) if "kv_gauge" in s.key]
    assert section.tables[0].rows[0][2] == pytest.approx(112, rel=0.01)


def test_a_mean_of_few_scrapes_is_said_to_be_one_and_a_silent_replica_leaves_no_figure(tmp_path: Path) -> None:
    where = run_of(tmp_path / "r", {"000-a-c=1": (held(), closed(1))}).path
    path = scrape.path_of(where, "000-a-c=1")
    scraped(path, ns(10_000), [page(0.07)] * 3, PAGE)
    _, notes = said(results.load_run(where))
    assert "3 scrapes are few" in notes
    path.write_text(
        path.read_text().replace('"sources":["http://a/metrics"]', f'"sources":["{PAGE}","http://b/metrics"]')
    )
    assert kv_gauge.section(results.load_run(where).cells) is None


@pytest.mark.engine
def test_against_the_reference_engine_the_two_agree(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    pytest.importorskip("prometheus_client")
    declared = targets.parse("reference", tmp_path / "none.toml", {})[0]
    engine = (*declared.launch, "--model", "sim:7b-h100", "--num-blocks", "2000")
    trace = trace_file(tmp_path, rows(120, 300, 60))
    with targets.running(dataclasses.replace(declared, launch=engine), print) as target:
        asked = command("run", "--targets", f"e={target.url}", "--trace", trace, "--out", tmp_path / "run")
        asked += ["--concurrency", "12", "--workers", "1", "--metrics", "ttft_p50"]
        asked += ["--metrics-url", "auto", "--scrape-every", "0.05"]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment(), timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    row, notes = said(results.load_run(tmp_path / "run"))
    assert row[4] == 2000 * 16
    assert abs(float(row[6].rstrip("%"))) < 10, (row, notes)
    sections: list[Section] = capacity_plan.plan([results.load_run(tmp_path / "run")], Ask())
    assert "KV memory: the records against the server's gauge" in capacity_report.render(sections, "terminal")
