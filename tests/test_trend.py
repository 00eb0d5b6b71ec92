"""The trend page: self-contained, a panel a metric, change points where they are, hostile names that stay text."""

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import changes, metrics, svg, trend
from llm_bench.history import History, Point

DAY_NS = 86_400 * 10**9
BEGAN_NS = 1_700_000_000 * 10**9
HOSTILE = "<script>hacked=1</script>\"'&\x1b[2J"


def history(values: list[float | None], metric: str = "ttft_p95", **facts: str) -> History:
    """A run a day; every third is in doubt."""
    points = [
        Point(f"r{i:03d}", BEGAN_NS + i * DAY_NS, v, 1, "" if v is not None else "too few", ["retries"] * (i % 3 == 2))
        for i, v in enumerate(values)
    ]
    known = np.array([v for v in values if v is not None], float)
    place = {"target": "t", "load": "c=8"} | facts
    return History(place["target"], place["load"], metrics.parse(metric), points, changes.e_divisive(known))


class Page(HTMLParser):
    """The tags of a page, and its text; nothing of it may be left open."""

    VOID = ("meta", "wbr", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", list[str]()
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


STEP = [100.0, 101, 99, 100, 102, 98, 100, 101, 120, 121, 119, 120, 122, 118, 120, 121]


def test_each_metric_has_a_panel_and_each_run_a_row() -> None:
    found = [history(STEP), history([2.0] * 16, "tokens_per_second")]
    page = Page(trend.page(found))
    assert len(page.of("figure")) == 2
    assert (
        page.text.count("from r008 (2023-11-22 22:13) on worse: 100.1 to 120.1, +20%") == 3
    )  # above, in its panel, below it
    assert "1 changed for the worse, 0 for the better, in 2 histories that are long enough." in page.text
    assert len([a for a in page.of("td") if a.get("class") == "said"]) == 16
    assert page.text.count("worse from here") == 1
    assert "Trend of 16 runs" in page.text and "no change point in 16 runs" in page.text


def test_the_change_is_drawn_between_the_two_runs() -> None:
    panel = trend.panel(history(STEP))
    (rule,) = re.findall(r'<path class="line change worse" d="M([\d.]+) ', panel.svg)
    xs = [float(x) for x in re.findall(r'<circle class="marker s0 of-run(?: hollow)?" cx="([\d.]+)"', panel.svg)]
    assert len(xs) == 16 and xs == sorted(xs)
    assert float(rule) == pytest.approx((xs[7] + xs[8]) / 2, abs=0.11)
    assert panel.svg.count("hollow") == 5
    first, second = (
        float(y) for y in re.findall(r'<path class="line level" d="M[\d.]+ ([\d.]+)L[\d.]+ \1"', panel.svg)
    )
    assert first > second  # 120 stands above 100: y counts downwards
    assert ">+20% worse<" in panel.svg


def test_of_many_runs_only_the_doubtful_are_marked_one_by_one() -> None:
    random = np.random.Generator(np.random.PCG64(1))
    panel = trend.panel(history(random.normal(100, 1, 240).round(3).tolist()))
    assert panel.svg.count("<circle") == panel.svg.count("hollow") == 80
    assert panel.svg.count("h0") == 160


def test_the_page_asks_nothing_of_anywhere_and_runs_no_script_but_its_own() -> None:
    text = trend.page([history(STEP)])
    page = Page(text)
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & {tag for tag, _ in page.tags}
    assert "http://" not in text and "https://" not in text
    assert len(page.of("script")) == 1 and not any(name.startswith("on") for _, a in page.tags for name in a)
    assert "default-src 'none'" in text and text.count("'sha256-") == 2


def test_what_a_run_or_a_target_is_called_stays_text() -> None:
    h = history(STEP, target=HOSTILE, load=HOSTILE)
    h = h._replace(points=[p._replace(run=HOSTILE, doubts=[HOSTILE]) for p in h.points])
    text = trend.page([h])
    page = Page(text)
    assert len(page.of("script")) == 1 and "hacked=1</script>" not in text and "\x1b" not in text
    assert "<script>hacked=1" in page.text


@pytest.mark.parametrize(
    ("values", "said"), [([None, None], "no run has the figure"), ([5.0], "no verdict: 1 run has")]
)
def test_few_or_no_figures_are_said(values: list[float | None], said: str) -> None:
    page = Page(trend.page([history(values)]))
    assert said in page.text
    assert "No verdict: too few runs for a change point." in page.text


def test_shares_are_shown_in_percent_and_the_hours_of_a_single_day() -> None:
    h = history([0.0, 0.01, 0.02], "error_rate")
    h = h._replace(points=[p._replace(at_ns=BEGAN_NS + i * 10**12) for i, p in enumerate(h.points)])
    panel = trend.panel(h)
    assert ">2%<" in panel.svg and ">22:13<" in panel.svg and "runs of 2023-11-14" in panel.svg


@settings(deadline=None, max_examples=40)
@given(st.lists(st.none() | st.floats(1e-6, 1e9), min_size=1, max_size=40), st.sampled_from(["e2e_p99", "error_rate"]))
def test_nothing_is_drawn_outside_the_panel(values: list[float | None], metric: str) -> None:
    panel = trend.panel(history(values, metric))
    assert "nan" not in panel.svg and "inf" not in panel.svg.replace("info", "")
    for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", panel.svg):
        assert -1 <= float(x) <= svg.WIDTH + 1 and -1 <= float(y) <= trend.HEIGHT + 1


def test_labels_of_neighbouring_changes_do_not_cover_each_other() -> None:
    values = [float(v) for v in np.repeat([100, 200, 300, 500], 8) + np.tile([0, 1], 16)]
    labels = re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" class="(?:better|worse)"[^>]*>([^<]+)<', trend.panel(history(values)).svg
    )
    assert len(labels) == 3
    spans = sorted((y, float(x), float(x) + svg.text_width(said)) for x, y, said in labels)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(spans))


def test_a_page_of_real_runs(tmp_path: Path) -> None:
    from tests.test_history import made, told

    found = told(*(made(tmp_path, f"r{day}", 100.0 + day, day) for day in range(3)), metric="ttft_p50")
    page = Page(trend.page(found))
    assert "Trend of 3 runs" in page.text and "2023-11-14 22:13 to 2023-11-16 22:13 UTC" in page.text
