"""Joules a token and an answer, by hand, from the records to the capacity report; no GPU was tried."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from llm_bench import capacity_plan, capacity_report, diagnose_report, results, scrape, windows
from llm_bench.capacity_ask import Ask
from llm_bench.energy import Energy, spent
from llm_bench.server_metrics import Figure, Figures
from llm_bench.windows import Window
from tests.sample import cell, ns, record
from tests.test_carried import closed, run_of, slots

# 100 requests of 5 tokens, due every 100 ms, each done within 60 ms: 10 answers and 50 tokens a second.
ROWS = [record(i, 100 * i, events=[100 * i + 20 + 10 * k for k in range(5)]) for i in range(100)]
WINDOW = Window(ns(0), ns(10_000), 0, 100, "")


def gpu(start: float = 0.0, end: float = 10_000.0, **values: Any) -> Figures:
    of = {name: value if isinstance(value, Figure) else Figure(name, name, value) for name, value in values.items()}
    return Figures(of, ns(start), ns(end), 11, True)


def test_a_counter_of_energy_over_what_was_answered_by_hand() -> None:
    found = spent(cell(ROWS), WINDOW, gpu(gpu_energy=3000.0, gpu_power=1.0))
    assert found == Energy(3000.0, 10.0, 100, 500.0, "NVML's energy counter")
    assert (found.watts, found.per_answer, found.per_thousand_tokens) == (300, 30, 6000)
    assert "3,000 J in 10.0 s (300 W), 6,000 J per 1k output tokens, 30 J an answer" in found.text


def test_only_what_came_between_the_scrapes_counts() -> None:
    found = spent(cell(ROWS), WINDOW, gpu(1000, 3000, gpu_energy=600.0))
    assert found is not None
    assert (found.answers, found.tokens, found.watts) == (20, 100, 300)


@pytest.mark.parametrize("counter", [{}, {"gpu_energy": Figure("gpu_energy", "x", 9.0, resets=1)}, {"gpu_energy": 0.0}])
def test_without_a_counter_that_tells_power_is_taken_over_the_time(counter: dict[str, Any]) -> None:
    found = spent(cell(ROWS), WINDOW, gpu(gpu_power=250.0, **counter))
    assert found is not None
    assert (found.joules, found.source) == (2500, "the mean of NVML's power over 11 scrapes")


def test_what_is_not_known_is_none() -> None:
    assert spent(cell(ROWS), WINDOW, None) is None
    assert spent(cell(ROWS), WINDOW, gpu(gpu_busy=0.5)) is None
    whole = cell([record(i, 100 * i, end=100 * i + 50, tokens_out=-1) for i in range(100)])
    found = spent(whole, WINDOW, gpu(gpu_energy=3000.0))
    assert found is not None
    assert (found.per_answer, found.per_thousand_tokens) == (30, None)
    assert "tokens" not in found.text
    failed = cell([record(i, 100 * i, outcome="failed", end=100 * i + 1) for i in range(100)])
    nothing = spent(failed, WINDOW, gpu(gpu_energy=3000.0))
    assert nothing is not None
    assert (nothing.per_answer, nothing.per_thousand_tokens) == (None, None)


def scraped(path: Path, start_ns: int, samples: list[dict[str, float]], source: str = scrape.GPU) -> None:
    """A scrape a second from `start_ns` on, as the process beside a run writes it."""
    lines: list[dict[str, Any]] = [{"llm_bench_scrape": 1, "every_s": 1.0, "sources": [source]}]
    lines += [{"k": 0, "at": start_ns + i * 10**9, "took": 0, "v": values} for i, values in enumerate(samples)]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def test_a_run_with_gpus_has_joules_in_its_plan_and_its_diagnosis(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", {"000-a-c=4": (slots(400, 4, 100, 20), closed(4))}).path
    # 40 answers/s of 5 tokens; two GPUs of 100 W each: 200 J a second.
    energies = [{'nvml:energy_j{gpu="0"}': 100.0 * i, 'nvml:energy_j{gpu="1"}': 7 + 100.0 * i} for i in range(11)]
    scraped(scrape.path_of(folder, "000-a-c=4"), ns(0), energies)
    run = results.load_run(folder)
    (loads,) = [s for s in capacity_plan.plan([run], Ask()) if s.key.endswith("loads")]
    row = dict(zip(loads.tables[0].heads, loads.tables[0].rows[0], strict=True))
    assert row["J/answer"] == pytest.approx(5, rel=0.05)
    assert row["J/1k tokens"] == pytest.approx(1000, rel=0.05)
    assert any("c=4: energy of this machine's GPUs" in note for note in loads.notes)
    assert '"J/answer"' in capacity_report.json_text([loads])
    shown = diagnose_report.text(run, diagnose_report.diagnosed(run))
    assert "energy of this machine's GPUs" in shown
    assert windows.of(run.cells[0].cell).seconds > 9
