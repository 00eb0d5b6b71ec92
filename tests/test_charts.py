"""What is drawn is what was measured: points where the figures are, limits, samples that say how many of how many."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm_bench import charts, objectives, results, scrape, svg
from llm_bench.charts import Figure
from llm_bench.objectives import NO_SLO
from llm_bench.records import Record
from llm_bench.results import Asked, Measured, Sheet
from llm_bench.server_metrics import Point
from llm_bench.timeline import timeline
from llm_bench.windows import Window
from tests.sample import cell, ns, record
from tests.test_html_report import write_cell

NAMES = ["ttft_p50", "ttft_p95", "tpot_p95", "e2e_p95", "tokens_per_second", "requests_per_second"]


def sheets_of(folder: Path, cells: dict[tuple[str, str], list[Record]], slo: str = "") -> dict[str, list[Sheet]]:
    """Cells by (target, load), at loads of an open loop."""
    for i, ((target, load), rows) in enumerate(cells.items()):
        head = {"target": {"name": target}, "load": {"kind": "open", "label": load, "rate": 5.0, "warmup": 0.0}}
        write_cell(folder, f"{i:03d}-{target}", rows, **head)
    found: dict[str, list[Sheet]] = {}
    for sheet in results.sheets(results.load_run(folder), Asked(NAMES, objectives.parse(slo))):
        found.setdefault(sheet.measured.target, []).append(sheet)
    return found


def steady(ttft: float, n: int = 60, gap: float = 10, tokens: int = 3) -> list[Record]:
    rows = [record(i, gap * i, events=[gap * i + ttft + 5 * k for k in range(tokens)]) for i in range(n)]
    return [replace(r, prompt_hash=int(1e6 * ttft) + r.index) for r in rows]


def measured(rows: list[Record], seconds: float) -> Measured:
    window = Window(ns(0), ns(1000 * seconds), 0, len(rows), "by hand")
    return Measured("000-a", "a", "load", cell(rows), window, {}, [])


def points(figure: Figure) -> list[tuple[float, float]]:
    found = re.findall(r'<circle class="marker s[^"]*" cx="([\d.]+)" cy="([\d.]+)"', figure.svg)
    return [(float(x), float(y)) for x, y in found]


def test_a_curve_has_a_point_a_load_where_its_figures_are(tmp_path: Path) -> None:
    mine = sheets_of(tmp_path, {("a", "one"): steady(50), ("a", "two"): steady(100, gap=5)})
    figures = {f.title: f for f in charts.curves(mine, NO_SLO)}
    assert list(figures) == ["ttft_p95 against throughput", "tpot_p95 against throughput", "e2e_p95 against throughput"]
    shown = figures["ttft_p95 against throughput"]
    speeds = [charts.value_of(s, "tokens_per_second").value or 0 for s in mine["a"]]
    x, y = svg.x_scale(np.array(speeds)), svg.y_scale(np.array([50.0, 100.0]), charts.HEIGHT)
    expected = list(zip(x.at(np.array(speeds)).tolist(), y.at(np.array([50.0, 100.0])).tolist(), strict=True))
    assert [pytest.approx(p, abs=0.06) for p in expected] == points(shown)
    assert shown.svg.count("hollow") == 2  # of 60 requests there is no interval
    assert "No 95% interval can be given" in shown.note
    assert not shown.keys  # one target needs no key


def test_one_load_makes_no_curve_and_a_second_target_has_a_key(tmp_path: Path) -> None:
    assert (
        charts.curves(sheets_of(tmp_path / "one", {("a", "one"): steady(50), ("b", "one"): steady(60)}), NO_SLO) == []
    )
    cells = {("a", "one"): steady(50), ("a", "two"): steady(60), ("b", "one"): steady(70)}
    figure = charts.curves(sheets_of(tmp_path / "two", cells), NO_SLO)[0]
    assert [target for _, target in figure.keys] == ["a", "b"]
    assert len(points(figure)) == 3


def test_a_class_of_a_mix_by_itself_is_no_load_of_the_mix(tmp_path: Path) -> None:
    for i, alone in enumerate(("", "chat")):
        load = {"kind": "replay", "label": f"x1 {alone}", "speed": 1.0, "warmup": 0.0, "class_alone": alone}
        write_cell(tmp_path, f"{i:03d}-a", steady(50 + i), target={"name": "a"}, load=load)
    mine = results.sheets(results.load_run(tmp_path), Asked(NAMES, NO_SLO))
    assert len(mine) == 2
    assert charts.curves({"a": list(mine)}, NO_SLO) == []


def test_intervals_are_drawn_where_there_are_some(tmp_path: Path) -> None:
    late = [(r, 1_000_000 * (37 * r.index % 90)) for r in steady(50, n=1200, gap=1)]
    many = [replace(r, event_ns=[t + by for t in r.event_ns]) for r, by in late]
    figure = charts.curves(sheets_of(tmp_path, {("a", "one"): many, ("a", "two"): steady(60)}), NO_SLO)[0]
    assert figure.svg.count("hollow") == 1
    assert figure.note.startswith("Bars: 95% interval")
    assert re.search(r"one: [\d.,]+ tokens/s, [\d.]+ \([\d.]+ to [\d.]+\) ms", figure.svg)


@pytest.mark.parametrize(
    ("limit", "drawn"), [("ttft_p95<80ms", True), ("ttft_p95<900ms", False), ("x:ttft_p95<80ms", False)]
)
def test_a_limit_is_a_line_unless_it_would_press_the_curve_flat(tmp_path: Path, limit: str, drawn: bool) -> None:
    slo = objectives.parse(limit)
    mine = sheets_of(tmp_path, {("a", "one"): steady(50), ("a", "two"): steady(100)}, limit)
    figure = next(f for f in charts.curves(mine, slo) if f.title.startswith("ttft_p95"))
    assert ('class="limit"' in figure.svg) == drawn
    assert ("lies above the picture" in figure.note) == (limit == "ttft_p95<900ms")
    distribution = charts.ecdfs(mine["a"], slo)[0]
    assert ("limit-point" in distribution.svg) == drawn


def test_repeats_of_a_load_are_points_without_a_line_and_share_a_key(tmp_path: Path) -> None:
    for pair, ttft in enumerate((50, 60, 70)):
        load = {"kind": "open", "label": "one", "rate": 5.0, "warmup": 0.0}
        write_cell(tmp_path, f"{pair:03d}-a", steady(ttft), target={"name": "a"}, load=load, pair=pair)
    mine = results.sheets(results.load_run(tmp_path), Asked(NAMES))
    figure = charts.curves({"a": mine}, NO_SLO)[0]
    assert len(points(figure)) == 3
    assert '<path class="line' not in figure.svg
    (key,) = charts.ecdfs(mine, NO_SLO)[0].keys
    assert key[1] == "one (n 60, 60, 60)"


def test_a_distribution_is_of_ok_requests_of_the_window(tmp_path: Path) -> None:
    rows = [*steady(50), record(99, 595, end=9000, outcome="failed")]
    (figure, _) = charts.ecdfs(sheets_of(tmp_path, {("a", "one"): rows})["a"], NO_SLO)
    assert figure.keys[0][1] == "one (n 60)"
    assert "p50 50 ms, p95 50 ms, max 50 ms" in figure.svg


def test_whole_answers_are_shown_by_their_e2e(tmp_path: Path) -> None:
    rows = [record(i, 10 * i, end=10 * i + 9, tokens_out=4) for i in range(50)]
    mine = sheets_of(tmp_path, {("a", "one"): rows, ("a", "two"): rows})
    assert [f.title for f in charts.ecdfs(mine["a"], NO_SLO)] == ["Distribution of e2e"]
    assert [f.title for f in charts.curves(mine, NO_SLO)] == ["e2e_p95 against throughput"]
    dotted = charts.scatter(mine["a"][0].measured)
    assert dotted is not None
    assert dotted.title == "e2e against prompt length"


def test_a_scatter_says_how_many_of_how_many_it_shows() -> None:
    few = measured([record(i, i, events=[i + 5.0], tokens_in=1 + i) for i in range(100)], 1)
    many = measured([record(i, i / 4, events=[i / 4 + 5.0], tokens_in=1 + i) for i in range(4000)], 1)
    unknown = measured([record(i, i, events=[i + 5.0], tokens_in=-1, planned_in=-1) for i in range(100)], 1)
    planned = measured([record(i, i, events=[i + 5.0], tokens_in=-1, planned_in=1 + i) for i in range(100)], 1)
    shown = [charts.scatter(m) for m in (few, many, unknown, planned)]
    assert [f and f.note for f in shown] == [
        "ok requests due in the window: all 100.",
        "ok requests due in the window: 1,500 of 4,000, evenly in due order.",
        None,
        "ok requests due in the window: all 100. Lengths that the server did not count are as planned.",
    ]
    assert [f and f.svg.count("h0M") + 1 for f in shown] == [100, 1500, None, 100]


def test_a_waterfall_shows_the_slowest_and_an_even_sample_with_the_parts_of_their_lives() -> None:
    rows = [record(i, 10 * i, sent=10 * i + 4, events=[10 * i + 10 + i, 10 * i + 40 + i]) for i in range(50)]
    rows[49] = replace(rows[49], ready_ns=rows[49].due_ns + 3_000_000)
    slowest, even = charts.waterfalls(measured(rows, 1))
    assert re.findall(r"<title>#(\d+):", slowest.svg) == [str(49 - k) for k in range(14)]
    assert re.findall(r"<title>#(\d+):", even.svg)[:: len(range(14)) - 1] == ["0", "49"]
    assert "14 of 50, evenly in due order" in even.note
    assert "#49: ready 3, sent 4, first 59, last 89 ms; 100 → 2 tokens" in slowest.svg
    assert slowest.svg.count('class="part-send"') == 1  # the others were ready when they were sent
    widths = {
        css: float(re.findall(rf'class="{css}" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', slowest.svg)[0])
        for css in ("part-wait", "part-first", "part-rest")
    }
    assert widths["part-first"] / widths["part-rest"] == pytest.approx(55 / 30, rel=0.02)
    assert widths["part-wait"] / widths["part-rest"] == pytest.approx(3 / 30, rel=0.1)


def test_a_waterfall_of_requests_that_fit_is_shown_once() -> None:
    assert len(charts.waterfalls(measured(steady(50, n=5), 1))) == 1
    assert charts.waterfalls(measured([record(0, 0, end=5, outcome="failed")], 1)) == []


def test_time_series_shade_the_window_and_show_failures_only_where_there_are_some() -> None:
    rows = steady(50)
    for rows_, titles in (
        (rows, ["Requests in flight", "Arrivals", "Output tokens"]),
        (
            [*rows, record(60, 590, end=600, outcome="failed")],
            ["Requests in flight", "Arrivals", "Output tokens", "Failed requests"],
        ),
        ([replace(r, event_ns=[], tokens_out=-1) for r in rows], ["Requests in flight", "Arrivals"]),
    ):
        m = measured(rows_, 0.3)
        figures = charts.over_time(m, timeline(m.cell, m.window))
        assert [f.title for f in figures] == titles
        assert all(f.svg.count('class="window"') == 1 for f in figures)


def test_what_the_server_exported_is_drawn_on_the_same_time(tmp_path: Path) -> None:
    m = measured(steady(50), 1.0)
    assert len(charts.over_time(m, timeline(m.cell, m.window))) == 3
    pages = [{"vllm:num_requests_running": float(n), "vllm:num_requests_waiting": 2.0 * n} for n in (0, 4, 6, 0)]
    scraped = [Point(ns(250 * i), page) for i, page in enumerate(pages)]
    sources = [scrape.Source(f"http://{name}/metrics", scraped, [], 0) for name in "ab"]
    m = replace(m, scraped=scrape.Scrape(0.25, sources, 0.0, 0, 1))
    shown = {f.title: f for f in charts.over_time(m, timeline(m.cell, m.window))}
    assert "KV memory in use" not in shown  # it was not exported
    running, waiting = shown["Running at the server"], shown["Waiting at the server"]
    assert "As scraped every 0.25 s, 2 servers" in running.note
    assert "most 10" in running.svg and "most 20" in waiting.svg  # of two: (4 + 6) / 2 each
