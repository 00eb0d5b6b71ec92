"""Servers' own names under one; figures between two scrapes, recomputed by hand."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.server_metrics import Figures, Point, bracket, figures, read, total
from llm_bench.server_names import METRICS_OF, WANTED

CAPTURES = Path(__file__).parents[2] / "shared" / "captures"
S = 1_000_000_000
E0 = '{engine="0",model_name="m"}'
QUEUE = "vllm:request_queue_time_seconds"


def between(*pages: str, start: int = 0, end: int | None = None) -> Figures:
    """Figures of pages that were read a second apart, from second 0 on."""
    points = [Point(i * S, read(page.encode())) for i, page in enumerate(pages)]
    found = figures(points, start * S, len(pages) * S if end is None else end * S)
    assert found is not None
    return found


def queue_page(total_s: float, count: int, within_10_ms: int) -> str:
    le = 'engine="0",le='
    return (
        f'{QUEUE}_sum{E0} {total_s}\n{QUEUE}_count{E0} {count}\n{QUEUE}_bucket{{{le}"0.01"}} {within_10_ms}\n'
        f'{QUEUE}_bucket{{{le}"0.1"}} {count}\n{QUEUE}_bucket{{{le}"+Inf"}} {count}\n'
    )


def test_a_counter_is_its_increase_over_the_span() -> None:
    found = between(f"vllm:generation_tokens_total{E0} 100", f"vllm:generation_tokens_total{E0} 130")
    assert found.of["generated_tokens"].value == 30
    assert found.of["generated_tokens"].name == "vllm:generation_tokens_total"
    assert found.rate("generated_tokens") == 30  # over one second
    assert found.edges() == "2 scrapes over 1.0 s within the window"


def test_a_counter_that_falls_was_started_anew() -> None:
    figure = between(*(f"vllm:num_preemptions_total{E0} {n}" for n in (5, 9, 2, 3))).of["preemptions"]
    assert (figure.value, figure.resets) == (4 + 2 + 1, 1)


def test_a_label_that_appears_counts_from_nothing() -> None:
    a = 'vllm:request_success_total{finished_reason="length"} 4\n'
    assert between(a, a + 'vllm:request_success_total{finished_reason="stop"} 3\n').value("requests_ended") == 3


TOKENS = "vllm:generation_tokens_total"


@pytest.mark.parametrize("values", [("NaN", "NaN"), ("1", "NaN"), ("NaN", "5")])
def test_a_counter_that_is_no_number_at_an_end_has_no_increase(values: tuple[str, str]) -> None:
    assert between(*(f"{TOKENS}{E0} {value}" for value in values)).of == {}
    beside = [f'{TOKENS}{E0} {value}\n{TOKENS}{{engine="1"}} 7' for value in values]
    assert between(*beside).of == {}  # of one of two engines it is not known: nor is the sum
    assert between(*(f"{TOKENS}{E0} {value}" for value in ("1", "NaN", "5"))).value("generated_tokens") == 4


@pytest.mark.parametrize("part", ["_sum", "_count"])
def test_a_histogram_whose_sum_or_count_is_no_number_has_no_mean(part: str) -> None:
    """10 observations of 0.5 s in all between the first two pages; at the third 20 more, and a sum that is NaN."""
    pages = [queue_page(1.0, 10, 10), queue_page(1.5, 20, 14), queue_page(9.0, 40, 14)]
    assert between(*pages).value("queue_time") == pytest.approx(8000 / 30)
    broken = re.sub(rf"({part}{{.*}}) .*", r"\1 NaN", pages[2])
    assert broken != pages[2]
    assert "queue_time" not in between(pages[0], pages[1], broken).of


def test_a_bucket_that_is_no_number_takes_the_quantiles_away_and_not_the_mean() -> None:
    first, last = queue_page(1.0, 10, 10), queue_page(1.5, 20, 14)
    figure = between(first, last.replace('le="0.01"} 14', 'le="0.01"} NaN')).of["queue_time"]
    assert (figure.value, figure.buckets) == (pytest.approx(50), ())


def test_a_histogram_is_the_mean_of_its_new_observations_and_its_quantiles_are_brackets() -> None:
    figure = between(queue_page(1.0, 10, 10), queue_page(1.5, 20, 14)).of["queue_time"]
    assert figure.value == pytest.approx(50)  # 0.5 s over 10 requests
    assert figure.observed == 10
    assert bracket(figure, 0.4) == (0, 10)  # 4 of the 10 lie up to 10 ms
    assert bracket(figure, 0.5) == (10, 100)


def test_without_new_observations_there_is_no_mean() -> None:
    figure = between(queue_page(1.0, 10, 10), queue_page(1.0, 10, 10)).of["queue_time"]
    assert figure.value is None
    assert bracket(figure, 0.5) is None


def test_a_gauge_is_its_time_average_with_its_extremes() -> None:
    points = [Point(at * S, {"vllm:num_requests_running": level}) for at, level in ((0, 0.0), (1, 4.0), (3, 4.0))]
    found = figures(points, 0, 4 * S)
    assert found is not None
    figure = found.of["running"]
    assert figure.value == pytest.approx((2 + 8) / 3)  # a ramp over 1 s, then 4 for 2 s
    assert (figure.least, figure.most) == (0, 4)


def test_engines_of_one_server_add_up_and_shares_are_averaged() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{k}"}} {n}\nvllm:kv_cache_usage_perc{{engine="{k}"}} {share}\n'
        for k, n, share in ((0, 3, 0.2), (1, 5, 0.6))
    )
    found = between(page, page)
    assert found.value("running") == 8
    assert found.value("kv_usage") == pytest.approx(0.4)
    assert found.of["kv_usage"].parts == 2
    both = total([found, between(*2 * ["vllm:kv_cache_usage_perc 0.5"])])
    assert both is not None
    assert both.of["kv_usage"].parts == 3
    assert both.value("kv_usage") == pytest.approx(1.3 / 3)


def test_braces_in_a_name_pick_samples_by_label() -> None:
    page = "".join(
        f'nv_trt_llm_request_metrics{{model="m",request_type="{kind}"}} {n}\n'
        for kind, n in (("active", 7), ("waiting", 2), ("max", 512))
    )
    found = between(page, page)
    assert (found.value("running"), found.value("waiting")) == (7, 2)


def test_the_span_is_inside_the_window_where_that_covers_it_and_else_around_it() -> None:
    points = [Point(at * S, {"vllm:generation_tokens_total": 10.0 * at}) for at in range(10)]
    inside = figures(points, round(2.5 * S), round(6.5 * S))
    assert inside is not None
    assert (inside.start_ns, inside.end_ns, inside.inside) == (3 * S, 6 * S, True)
    around = figures(points, round(2.5 * S), round(3.5 * S))
    assert around is not None
    assert (around.start_ns, around.end_ns, around.inside) == (2 * S, 4 * S, False)
    assert "around the window" in around.edges()
    ended = figures(points[:5], round(2.5 * S), round(8.5 * S))
    assert ended is not None
    assert ended.edges() == "3 scrapes over 2.0 s of a part of the window"
    assert figures(points[:1], 0, S) is None
    assert figures(points, 20 * S, 30 * S) is None


def test_replicas_as_one() -> None:
    a, b = (between(queue_page(0, 0, 0), queue_page(s, n, n)) for s, n in ((0.3, 3), (0.1, 1)))
    both = total([a, b])
    assert both is not None
    assert both.of["queue_time"].value == pytest.approx(100)  # 0.4 s over 4
    assert both.of["queue_time"].observed == 4
    assert bracket(both.of["queue_time"], 0.5) == (0, 10)
    assert total([]) is None


def scraped_to(end_s: int, *, tokens_a_second: float, running: float = 0.0, start_s: int = 0) -> Figures:
    """One replica, scraped each second of [start, end], of a window of 20 s."""
    points = [
        Point(t * S, {TOKENS: 7 + tokens_a_second * t, "vllm:num_requests_running": running})
        for t in range(start_s, end_s + 1)
    ]
    found = figures(points, 0, 20 * S + 1)
    assert found is not None
    return found


def test_rates_of_replicas_that_were_scraped_for_unequal_times_add_up() -> None:
    """100 tokens/s for 20 s and 300 tokens/s for 5 s: 2,000 + 1,500 tokens; 400/s, and not 3,500 / 20 s = 175/s."""
    both = total([scraped_to(20, tokens_a_second=100), scraped_to(5, tokens_a_second=300)])
    assert both is not None
    assert both.value("generated_tokens") == 3500
    assert both.rate("generated_tokens") == pytest.approx(400)
    assert both.apart
    assert both.edges() == "replicas scraped over 5.0 to 20.0 s, not at the same times, within the window"


def test_spans_one_after_the_other_are_no_rate_over_both() -> None:
    first, second = (scraped_to(end, tokens_a_second=50, start_s=start) for start, end in ((0, 8), (12, 20)))
    both = total([first, second])
    assert both is not None
    assert both.rate("generated_tokens") == pytest.approx(100)
    assert both.apart
    assert both.edges() == "replicas scraped over 8.0 s, not at the same times, within the window"


def test_a_scrape_that_just_missed_an_edge_is_of_the_same_time() -> None:
    """Spans of 19 s and 20 s: 1,900 / 19 + 2,000 / 20; over the union it would have been 195/s."""
    both = total([scraped_to(19, tokens_a_second=100), scraped_to(20, tokens_a_second=100)])
    assert both is not None
    assert both.rate("generated_tokens") == pytest.approx(200)
    assert not both.apart
    assert "19 scrapes" not in both.edges()
    assert both.edges().startswith("20 scrapes over 20.0 s")


def test_what_adds_up_is_bounded_by_the_sum_of_its_parts() -> None:
    """10 and 30 run: 40 together, and never more; a share is never more than that of the fullest."""
    pages = [
        f"vllm:num_requests_running{E0} {n}\nvllm:kv_cache_usage_perc{E0} {share}"
        for n, share in ((10, 0.2), (30, 0.6))
    ]
    both = total([between(page, page) for page in pages])
    assert both is not None
    running, kv = both.of["running"], both.of["kv_usage"]
    assert (running.value, running.least, running.most) == (40, 40, 40)
    assert (kv.value, kv.least, kv.most) == (pytest.approx(0.4), 0.2, 0.6)


def test_what_one_replica_does_not_say_is_not_said_of_all() -> None:
    page = f"vllm:num_requests_running{E0} 1"
    more = f"{page}\nvllm:num_requests_waiting{E0} 1"
    both = total([between(page, page), between(more, more)])
    assert both is not None
    assert set(both.of) == {"running"}


def test_the_json_of_trtllm_serve_is_the_mean_of_what_reading_took() -> None:
    first = {"numActiveRequests": 4, "numQueuedRequests": 0, "kvCacheStats": {"usedNumBlocks": 10, "maxNumBlocks": 40}}
    last = {"numActiveRequests": 8, "iterLatencyMS": 3.5, "kvCacheStats": {"usedNumBlocks": 30, "maxNumBlocks": 40}}
    assert read(json.dumps([first, last]).encode()) == {
        "json:numActiveRequests": 6,
        "json:numQueuedRequests": 0,
        "json:kvCacheUsage": 0.5,
    }
    assert read(b"[]") == {}


@pytest.mark.parametrize("page", [b"[1]", b'{"a": ', b"\xff", b"vllm:num_requests_running x", b"<!doctype html>"])
def test_what_is_no_page_of_metrics_is_refused(page: bytes) -> None:
    with pytest.raises(ValueError, match=r"expected|neither"):
        read(page)


@given(st.lists(st.floats(0, 1e9), min_size=2, max_size=20))
def test_an_increase_is_never_negative(values: list[float]) -> None:
    points = [Point(i * S, {"vllm:generation_tokens_total": v}) for i, v in enumerate(values)]
    found = figures(points, 0, len(values) * S)
    assert found is not None
    assert (found.value("generated_tokens") or 0) >= 0


def test_every_name_stands_once_for_each_metric_and_is_read() -> None:
    for metric in METRICS_OF.values():
        names = [name for of in metric.names.values() for name in of]
        assert len(set(names)) == len(names)
    assert "vllm:request_queue_time_seconds_bucket" in WANTED
    assert "vllm:request_queue_time_seconds_created" not in WANTED


@pytest.mark.parametrize(
    ("capture", "expected"),
    [
        ("vllm/metrics_before.txt", {"generated_tokens": 51, "prompt_tokens": 114, "running": 0, "kv_usage": 0}),
        ("llamacpp/metrics_before.txt", {"generated_tokens": 59, "cache_hits": 80, "steps": 56, "waiting": 0}),
        ("triton/metrics.txt", {"waiting": 0, "requests_ended": 9, "executions": 9}),
    ],
)
def test_pages_of_real_servers(capture: str, expected: dict[str, float]) -> None:
    if not CAPTURES.exists():
        pytest.skip("captures of real servers are not here")
    page = (CAPTURES / capture).read_text().split("\n\n", 1)[1].split("* Connection")[0]
    now = read(page.encode())
    zero = dict.fromkeys(now, 0.0)  # a server that had just started
    found = figures([Point(0, zero), Point(S, now)], 0, 2 * S)
    assert found is not None
    for metric, value in expected.items():
        assert found.value(metric) == pytest.approx(value), metric
