"""What this client did beside what it was asked: relative sleeps (vllm#21104) must show, an even pace must not."""

import pytest

from llm_bench.columns import Cell
from llm_bench.identities import little
from llm_bench.sending import in_flight, sending
from llm_bench.server_metrics import Figure, Figures
from llm_bench.windows import whole
from tests.sample import cell, closed_loop, gauge_of, record

GAP_MS, STEP_MS = 5.0, 0.45  # 200 a second; what a dispatch costs


def paced(*, relative: bool) -> Cell:
    """1,000 requests at 200/s, each sending 0.45 ms of work: slept to absolute times, or so long after each."""
    rows = []
    for i in range(1000):
        sent = i * (GAP_MS + STEP_MS) if relative else i * GAP_MS + STEP_MS
        rows.append(record(i, i * GAP_MS, sent, events=[sent + 20]))
    return cell(rows, load={"kind": "open", "rate": 200.0, "warmup": 0.0})


def test_absolute_times_keep_the_rate_and_the_lag() -> None:
    of = paced(relative=False)
    found = sending(of, whole(of))
    assert found is not None
    assert (found.due_per_s, found.sent_per_s) == pytest.approx((200, 200))
    assert found.lag_max_ms == pytest.approx(STEP_MS)
    assert found.lag_slope == pytest.approx(0, abs=1e-9)
    assert found.text.startswith("sent 200 requests/s where 200 were due; lag p50 0.45 ms, p99 0.45 ms, max 0.45 ms")


def test_relative_sleeps_are_seen_in_the_rate_and_in_the_trend() -> None:
    of = paced(relative=True)
    found = sending(of, whole(of))
    assert found is not None
    assert found.due_per_s == pytest.approx(200)
    assert found.sent_per_s == pytest.approx(1000 / 5.45, rel=1e-3)  # 183.5
    assert found.lag_slope == pytest.approx(90)  # 0.45 ms each 5 ms
    assert "growing by 90 ms a second" in found.text


def test_a_closed_loop_and_a_single_moment_have_no_rate() -> None:
    of = closed_loop(40, 4)
    assert sending(of, whole(of)) is None
    at_once = cell([record(i, 0, events=[5]) for i in range(10)])
    assert sending(at_once, whole(at_once)) is None


def figures(**gauges: float) -> Figures:
    return Figures({name: Figure(name, name, value) for name, value in gauges.items()}, 0, 10**9, 3, True)


def test_the_setting_the_clients_mean_and_the_servers_stand_together() -> None:
    rows = [record(i, 100 * (i // 4), events=[100 * (i // 4) + 100]) for i in range(400)]
    of = cell(rows, gauge_of(rows), load={"kind": "closed", "concurrency": 4, "warmup": None})
    law = little(of, whole(of))
    assert in_flight(of, law, []) == "in flight: 4 on average at the client, where 4 were asked for"
    both = [figures(running=2.5, waiting=0.5), figures(running=1.0, waiting=0.0)]
    assert in_flight(of, law, both).endswith("; 4 by the server's gauge, those in its queue too")
    assert in_flight(of, law, [*both, figures(kv_usage=0.5)]).endswith("too (of 2 of 3 URLs)")


def test_a_gauge_from_around_a_window_is_said_to_be() -> None:
    """A window of half a second between two scrapes in which nothing ran."""
    rows = [record(i, 100 * (i // 4), events=[100 * (i // 4) + 100]) for i in range(400)]
    of = cell(rows, gauge_of(rows), load={"kind": "closed", "concurrency": 4, "warmup": None})
    around = figures(running=0.0)._replace(scrapes=2, inside=False)
    said = in_flight(of, little(of, whole(of)), [around])
    assert said.endswith("; 0 by the server's gauge, 2 scrapes over 1.0 s around the window")


def test_an_open_loop_without_a_scrape_says_nothing_of_it() -> None:
    of = paced(relative=False)
    assert in_flight(of, little(of, whole(of)), []) == ""
    said = in_flight(of, little(of, whole(of)), [figures(running=4.0)])
    assert said.endswith("at the client; 4 by the server's gauge")
