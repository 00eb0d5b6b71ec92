"""The SLO grammar refuses what could be meant in two ways; a verdict is given only where the data carry it."""

from contextlib import suppress
from math import nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import objectives, windows
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.objectives import PRESETS, Slo, judge, parse
from llm_bench.records import Record
from llm_bench.series import Bound
from llm_bench.slo import attainment
from llm_bench.windows import Window
from tests.sample import cell, ns, record, stood_still

ALL = Window(ns(0), ns(1e6), 0, 0, "")


def spread(n: int, slow: int, *, failed: int = 0, cut: int = 0, slow_ms: float = 900, name: str = "") -> Cell:
    """n requests a second apart: `slow` of them, evenly among the others, take 900 ms to a first token; others 100."""
    rows = []
    for i in range(n):
        late = (i * slow) // n != ((i + 1) * slow) // n
        rows.append(record(i, 1000 * i, events=[1000 * i + (slow_ms if late else 100)], request_class=name))
    rows += [record(n + i, 1000 * n / failed * i, end=1e6, outcome="failed") for i in range(failed)]
    rows += [record(n + failed + i, 600, end=650, outcome="cut_at_end") for i in range(cut)]
    return cell(rows)


def verdicts(c: Cell, text: str, window: Window = ALL, **more: bool) -> list[str]:
    return [j.verdict for j in judge(c, window, parse(text), **more)]


# ---- the grammar


@pytest.mark.parametrize(("text", "bound"), [
    ("ttft_p95<800ms", Bound("ttft", "<", 800.0)),
    ("ttft_p95<=0.8s", Bound("ttft", "<=", 800.0)),
    (" tpot_p99 <= 50 ms ", None),
    ("tpot_p99<=50000us", Bound("tpot", "<=", 50.0)),
    ("output_speed_p90>=20tokens/s", Bound("output_speed", ">=", 20.0)),
    ("fluidity_p90>=90%", Bound("fluidity", ">=", 0.9)),
])  # fmt: skip
def test_a_limit_is_a_metric_a_direction_and_a_value_with_its_unit(text, bound):
    if bound is None:
        with pytest.raises(BenchError):
            parse(text)
        return
    (limit,) = parse(text).limits
    assert limit.bound == bound


@pytest.mark.parametrize(("text", "said"), [
    ("ttft_p95<0.8", "a number without its unit, expected 800ms or 0.8s"),
    ("ttft_p95<800", "a number without its unit"),
    ("ttft_p95<800tokens/s", "the unit 'tokens/s', expected 800ms"),
    ("error_rate<1", "a number without its unit, expected 1%"),
    ("error_rate<101%", "more than it can be"),
    ("tokens_per_second>1000ms", "the unit 'ms'"),
    ("ttft_p95>800ms", "lower is better, expected < or <="),
    ("tokens_per_second<1000", "higher is better, expected > or >="),
    ("ttft_p95=800ms", "expected [class:]metric<value"),
    ("ttft_p95", "a limit such as ttft_p95<800ms, or a preset: mlperf-llama2-70b"),
    ("mlperf-llama3", "or a preset: mlperf-llama2-70b"),
    ("goodput>1", "counts requests within limits, expected one too, such as ttft_p95<800ms"),
    ("slo_attainment>=99%,error_rate<1%", "counts requests within limits"),
    ("ttft<800ms", "a series needs a reducer: ttft_p95"),
    ("tftf_p95<800ms", "nearest: ttft_p95"),
    ("ttft_std<8ms", "a spread has no limit"),
    ("ttft_p95<nanms", "is not a number"),
    ("ttft_p95<-3ms", "is not a number"),
    ("ttft_p95<1e999s", "more than it can be"),
    ("ttft_p95<800ms,ttft_p95<900ms", "ttft_p95 has two limits"),
    ("ttft_p95<800ms<3", "expected [class:]metric<value"),
])  # fmt: skip
def test_what_could_be_meant_in_two_ways_or_none_is_refused_in_words(text, said):
    with pytest.raises(BenchError) as refused:
        parse(text)
    assert said in str(refused.value)
    assert refused.value.exit_code == 2


@given(st.text(max_size=40) | st.from_regex(r"[a-z0-9_]{1,9}[<>=]{1,2}[0-9a-z%./]{1,9}", fullmatch=True))
@settings(max_examples=300)
def test_no_text_is_a_traceback(text):
    for arguments in ((text,), ("", text)):
        with suppress(BenchError):
            assert isinstance(parse(*arguments), Slo)


def test_deadlines_are_given_or_follow_from_limits_on_ttft_and_tpot():
    assert parse("", "ttft=0.8s,tpot=50ms").deadlines == (800.0, 50.0)
    assert parse("ttft_p95<800ms,ttft_p50<300ms,tpot_p95<50ms").deadlines == (300.0, 50.0)
    assert parse("ttft_p95<800ms").deadlines is None
    for text in ("ttft=1s", "ttft=1s,tpot=0ms", "ttft=1s,tpot=5", "ttft=1s,ttft=2s", "tpot"):
        with pytest.raises(BenchError, match="--deadlines"):
            parse("", text)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_two_limits(name):
    found = parse(name)
    assert [(limit.metric.name, limit.op) for limit in found.limits] == [("ttft_p99", "<="), ("tpot_p99", "<=")]
    assert found.deadlines is not None


def test_presets_are_those_of_mlperf():
    assert [x.value for x in parse("mlperf-llama2-70b").limits] == [2000, 200]
    assert [x.value for x in parse("mlperf-deepseek-r1-interactive").limits] == [1500, 15]


# ---- verdicts


def test_met_missed_or_undecided_by_the_interval_and_not_by_the_share():
    assert verdicts(spread(2000, 20), "ttft_p95<800ms") == ["MET"]  # 99%
    assert verdicts(spread(2000, 200), "ttft_p95<800ms") == ["MISSED"]  # 90%
    assert verdicts(spread(50, 3), "ttft_p95<800ms") == ["UNDECIDED"]  # 47 of 50: Wilson 84% to 98%
    assert verdicts(spread(50, 0), "ttft_p95<800ms") == ["UNDECIDED"]  # 50 of 50: not under 92.9%
    assert verdicts(spread(50, 20), "ttft_p95<800ms") == ["MISSED"]


def test_an_undecided_limit_says_how_many_requests_would_decide_it():
    (found,) = judge(spread(50, 0), ALL, parse("ttft_p95<800ms"))
    assert found.why == (
        "50 of 50 met ttft<800ms: 100.00%, 95% interval 92.87% to 100.00% (ESS 50), 95% asked; "
        "about 100 requests would decide it"
    )


def test_failures_miss_every_limit_and_the_limit_itself_is_as_typed():
    c = spread(1000, 0, failed=100)
    assert verdicts(c, "ttft_p95<800ms") == ["MISSED"]
    assert verdicts(spread(1000, 0), "ttft_p95<100ms") == ["MISSED"]
    assert verdicts(spread(1000, 0), "ttft_p95<=100ms") == ["MET"]


def test_cut_requests_are_met_for_the_upper_bound_and_missed_for_the_lower():
    (found,) = judge(spread(1000, 0, cut=100), ALL, parse("ttft_p95<800ms"))
    assert found.verdict == "UNDECIDED"
    assert "100 cut ones are undecided" in found.why
    assert found.attained == 1.0
    assert found.low < 0.95 < found.high


def test_a_limit_on_what_burst_delivery_hid_is_neither_met_nor_missed():
    c = cell([record(i, 10 * i, events=[10 * i + 5] * 3) for i in range(500)])
    (found,) = judge(c, ALL, parse("tpot_p95<50ms"))
    assert (found.verdict, found.attained) == ("UNDECIDED", None)
    assert "of 500 it is hidden" in found.why
    assert attainment(c, ALL, [Bound("tpot", "<", 50.0)]).hidden == 500
    assert attainment(c, ALL, [Bound("tpot", "<", 50.0), Bound("ttft", "<", 1.0)]).hidden == 0  # missed all the same


def whole(i: int, **more: Any) -> Record:
    return record(i, 10 * i, events=[], end=10 * i + 5, tokens_out=20, **more)


@pytest.mark.parametrize(("text", "rows", "why"), [
    ("ttft_p95<300ms", [whole(i) for i in range(500)], "not streamed"),
    ("tpot_p95<50ms", [whole(i) for i in range(500)], "not streamed"),
    ("queue_p95<5ms", [record(i, 10 * i, events=[10 * i, 10 * i + 6]) for i in range(500)], "not said by the server"),
    ("tpot_decode_p95<5ms", [record(i, 10 * i, events=[10 * i, 10 * i + 6]) for i in range(500)],
     "size of the first event unknown"),
    ("fluidity_p90>=90%", [record(i, 10 * i, events=[10 * i, 10 * i + 6]) for i in range(500)],
     "no deadlines were given: --deadlines"),
    ("ttfo_p95<1s", [record(i, 10 * i, events=[10 * i, 10 * i + 6], first_answer_ns=0) for i in range(500)],
     "no answer token"),
])  # fmt: skip
def test_a_limit_on_what_no_answer_says_is_neither_met_nor_missed(text: str, rows: list[Record], why: str) -> None:
    (found,) = judge(cell(rows), ALL, parse(text))
    assert (found.verdict, found.attained) == ("UNDECIDED", None)
    assert f"of 500 it is hidden ({why})" in found.why


def test_a_limit_on_what_some_answers_say_is_decided_by_none_of_the_others():
    """300 of 600 say 1 ms: the others may have waited for longer."""
    rows = [record(i, 10 * i, events=[10 * i + 5], server_queue_ms=1.0 if i % 2 else nan) for i in range(600)]
    (found,) = judge(cell(rows), ALL, parse("queue_p95<5ms"))
    assert (found.verdict, found.attained) == ("UNDECIDED", 1.0)
    assert "300 of 300 met" in found.why
    assert "of 300 it is hidden (not said by the server)" in found.why


def test_deadlines_that_were_given_are_judged_by():
    (found,) = judge(spread(1000, 0), ALL, parse("fluidity_p90>=90%", "ttft=800ms,tpot=50ms"))
    assert found.verdict == "MET"


@pytest.mark.parametrize(("n", "unsaid", "said"), [
    # 98 of 98 and 2 hidden: 98% were these to miss, of which 294 have a lower bound of 95.7%, and 196 one of 94.9%.
    (100, 2, "about 300 requests would decide it"),
    (100, 10, "no number of requests would decide it while so many are hidden"),
    (100, 50, "no number of requests would decide it while so many are hidden"),
])  # fmt: skip
def test_what_is_hidden_stays_hidden_however_many_requests_there_are(n: int, unsaid: int, said: str) -> None:
    every = n // unsaid
    rows = [record(i, 10 * i, events=[10 * i + 5], server_queue_ms=1.0 if i % every else nan) for i in range(n)]
    (found,) = judge(cell(rows), ALL, parse("queue_p95<5ms"))
    assert found.verdict == "UNDECIDED"
    assert found.why.endswith(f"of {unsaid} it is hidden (not said by the server); {said}")


@pytest.mark.parametrize("limit", [
    "tpot_p95<50ms", "tpot_decode_p95<50ms", "itl_p95<50ms", "stall_p95<50ms", "output_speed_p90>20",
    "normalized_latency_p95<50ms", "server_tpot_p95<50ms",
])  # fmt: skip
def test_a_single_pass_has_no_time_between_tokens_to_limit(limit: str) -> None:
    rows = [record(i, 10 * i, events=[], end=10 * i + 5, tokens_out=-1, asked_out=-1, text_bytes=0) for i in range(500)]
    assert verdicts(cell(rows), limit) == ["MET"]
    assert verdicts(cell(rows), "ttft_p95<50ms") == ["UNDECIDED"]  # e2e is what it has


def test_a_limit_that_does_not_apply_is_met():
    assert verdicts(spread(1000, 0), "tpot_p95<1ms") == ["MET"]  # answers of one token
    assert verdicts(spread(1000, 0), "server_tpot_p95<1ms") == ["MET"]
    two = cell([record(i, 10 * i, events=[10 * i, 10 * i + 6]) for i in range(500)])
    assert verdicts(two, "server_tpot_p95<1ms") == ["UNDECIDED"]  # it has one, and the server does not say it


@pytest.mark.parametrize(("text", "failed", "verdict"), [
    ("error_rate<1%", 0, "MET"), ("error_rate<1%", 11, "UNDECIDED"), ("error_rate<1%", 60, "MISSED"),
    ("drop_rate<1%", 0, "MET"),
])  # fmt: skip
def test_a_share_of_requests_has_a_wilson_interval(text, failed, verdict):
    rows = [record(i, i, events=[i + 5.0]) for i in range(1000)]
    rows = [record(i, i, end=i + 1, outcome="failed") if i % 17 == 3 and i < 17 * failed else r
            for i, r in enumerate(rows)]  # fmt: skip
    assert verdicts(cell(rows), text, Window(ns(0), ns(1000), 0, 0, "")) == [verdict]


def test_a_figure_of_the_cell_is_judged_by_the_spread_of_its_tenths():
    c = cell([record(i, 10 * i, events=[10 * i + 5.0]) for i in range(1000)])
    w = Window(ns(0), ns(10_000), 0, 0, "")
    assert verdicts(c, "tokens_per_second>=99", w) == ["MET"]
    assert verdicts(c, "tokens_per_second>=101", w) == ["MISSED"]
    uneven = cell([record(i, 10 * i, events=[10 * i + 5.0] * (1 + 5 * (i < 500))) for i in range(1000)])
    (found,) = judge(uneven, w, parse("tokens_per_second>=300"))
    assert found.verdict == "UNDECIDED"
    parts = np.repeat([600.0, 100.0], 5)
    half = 2.262 * parts.std(ddof=1) / np.sqrt(10)
    assert (found.low, found.high) == pytest.approx((350 - half, 350 + half))


def test_a_mean_is_judged_by_tenths_and_a_maximum_by_what_was_measured():
    c = spread(1000, 0)
    assert verdicts(c, "ttft_mean<101ms") == ["MET"]
    assert verdicts(c, "ttft_max<100ms") == ["MISSED"]
    (found,) = judge(c, ALL, parse("ttft_max<=100ms"))
    assert (found.verdict, found.why) == ("MET", "100 ms, of the 1,000 requests measured")
    few = Window(ns(0), ns(1e9), 0, 0, "")
    (found,) = judge(c, few, parse("ttft_mean<101ms"))
    assert (found.verdict, found.why.partition(":")[2]) == (
        "UNDECIDED", " a tenth of the window has no such figure, so that its spread is not known"
    )  # fmt: skip


def test_a_class_has_limits_of_its_own():
    rows = [record(i, i, events=[i + (50.0 if i % 2 else 500.0)], request_class="ab"[i % 2]) for i in range(2000)]
    assert verdicts(cell(rows), "a:ttft_p95<100ms,b:ttft_p95<100ms,ttft_p95<100ms") == ["MISSED", "MET", "MISSED"]
    (found,) = judge(cell(rows), ALL, parse("c:ttft_p95<100ms"))
    assert (found.verdict, found.n) == ("UNDECIDED", 0)


@pytest.mark.parametrize(("window", "met", "missed", "said"), [
    (Window(ns(0), ns(1e6), 0, 0, "", state=windows.GROWING, growth=4.0), "UNDECIDED", "MISSED", "a longer run"),
    (Window(ns(0), ns(1e6), 0, 0, "", state=windows.TOO_SHORT), "UNDECIDED", "UNDECIDED", "the window is too short"),
    (Window(ns(0), ns(1e6), 0, 0, "", opened=False), "UNDECIDED", "UNDECIDED", "the window never opened"),
])  # fmt: skip
def test_a_cell_that_is_not_steady_meets_nothing(window, met, missed, said):
    (good,) = judge(spread(2000, 0), window, parse("ttft_p95<800ms"))
    (bad,) = judge(spread(2000, 400), window, parse("ttft_p95<800ms"))
    assert (good.verdict, bad.verdict) == (met, missed)
    assert said in good.why


def test_a_backlog_that_the_client_made_meets_nothing_and_is_said_to_be_its_own():
    late = cell(stood_still(27), load={"kind": "open", "rate": 100.0, "warmup": 0.0})
    window = windows.open_(late)
    assert window.state == windows.GROWING
    for limited in (True, False):
        (found,) = judge(late, window, parse("error_rate<1%"), client_limited=limited)
        assert found.verdict == "UNDECIDED"
        assert (windows.BY_CLIENT in found.why) is limited
        assert ("a longer run would be slower" in found.why) is not limited


def test_where_the_client_was_the_limit_nothing_is_called_missed():
    assert verdicts(spread(2000, 400), "ttft_p95<800ms", client_limited=True) == ["UNDECIDED"]
    assert verdicts(spread(2000, 0), "ttft_p95<800ms", client_limited=True) == ["MET"]


@pytest.mark.parametrize(("kind", "open_loop", "closed"), [
    ("connect_error", "MISSED", "MISSED"),  # nobody listens, however early or late one comes
    ("http_4xx", "MISSED", "MISSED"),
    ("rejected", "UNDECIDED", "MISSED"),  # a late open loop sends heaps, which the asked load has not
    ("http_5xx", "UNDECIDED", "MISSED"),
    ("ttft_timeout", "UNDECIDED", "UNDECIDED"),  # by this client's own, late clock
    ("truncated_stream", "UNDECIDED", "UNDECIDED"),  # it may have read too slowly
])  # fmt: skip
def test_failures_that_are_not_the_clients_doing_miss_a_limit_in_a_limited_client_too(kind, open_loop, closed):
    rows = [
        record(i, 10 * i, end=10 * i + 1, outcome="failed", error_kind=kind)
        if i % 10 == 0
        else record(i, 10 * i, events=[10 * i + 5.0])
        for i in range(1000)
    ]
    for load, verdict in (("open", open_loop), ("closed", closed)):
        c = cell(rows, load={"kind": load})
        for limit in ("error_rate<1%", "ttft_p95<800ms"):
            assert verdicts(c, limit, client_limited=True) == [verdict]
            assert verdicts(c, limit) == ["MISSED"]


@pytest.mark.parametrize(("status", "verdict"), [(408, "UNDECIDED"), (404, "MISSED")])
def test_a_server_that_waited_in_vain_for_the_request_tells_of_this_client(status, verdict):
    rows = [
        record(i, 10 * i, end=10 * i + 1, outcome="failed", error_kind="http_4xx", status=status)
        if i % 10 == 0
        else record(i, 10 * i, events=[10 * i + 5.0])
        for i in range(1000)
    ]
    assert verdicts(cell(rows, load={"kind": "closed"}), "error_rate<1%", client_limited=True) == [verdict]


def test_slow_answers_of_a_limited_client_stay_undecided_beside_some_failures():
    # 2% were refused, which p95 allows; the 20% that miss it are late, and that may be the client's doing.
    rows = [
        record(i, i, outcome="failed", error_kind="connect_error")
        if i % 50 == 0
        else record(i, i, events=[i + (900.0 if i % 5 == 0 else 100.0)])
        for i in range(2000)
    ]
    c = cell(rows, load={"kind": "open"})
    assert verdicts(c, "ttft_p95<800ms", client_limited=True) == ["UNDECIDED"]
    assert verdicts(c, "ttft_p95<800ms,error_rate<1%,tokens_per_second>1000000", client_limited=True) == [
        "UNDECIDED", "MISSED", "UNDECIDED",
    ]  # fmt: skip


def test_case_goodput_per_limit_and_in_all():
    """Eight requests, TTFT <= 200 ms and TPOT <= 30 ms, one of them cut: 3 of 7."""
    figures = [(150, 20), (200, 30), (250, 10), (100, None), (90, 31)]
    rows = [record(i, events=[t] if p is None else [t, t + p]) for i, (t, p) in enumerate(figures)]
    rows += [record(5, end=10, outcome="failed"), record(6, end=9000, outcome="failed")]
    rows += [record(7, events=[50], end=180, outcome="cut_at_end")]
    agreed = parse("ttft_p95<=200ms,tpot_p95<=30ms")
    found = judge(cell(rows), Window(ns(0), ns(10_000), 0, 0, ""), agreed)
    assert [(round(j.attained * j.n), j.n) for j in found] == [(4, 7), (4, 7)]  # one token: TPOT is met
    got = attainment(cell(rows), Window(ns(0), ns(10_000), 0, 0, ""), agreed.context().limits)
    assert (got.met, got.decided, got.undecided) == (3, 7, 1)


@given(st.lists(st.sampled_from("ab "), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_a_class_alone_is_the_cell_of_its_rows_alone(names, random):
    rows = [record(i, i, events=[i + 1.0 + random.random() for _ in range(random.randint(0, 3))],
                   request_class=name.strip()) for i, name in enumerate(names)]  # fmt: skip
    for row in rows:
        row.event_ns.sort()
    for name in {name.strip() for name in names}:
        mine, alone = objectives.of_class(cell(rows), name), cell([r for r in rows if r.request_class == name])
        assert mine["index"].tolist() == alone["index"].tolist()
        assert mine.event_ns.tolist() == alone.event_ns.tolist()
        assert mine.counts.tolist() == alone.counts.tolist()
        assert (mine.first_ns.tolist(), mine.last_ns.tolist()) == (alone.first_ns.tolist(), alone.last_ns.tolist())
        assert mine.labelled("x").tolist() == alone.labelled("x").tolist()


def test_a_maximum_is_missed_where_a_request_failed():
    (found,) = judge(spread(1000, 0, failed=2), Window(ns(0), ns(2e6), 0, 0, ""), parse("ttft_max<=100ms"))
    assert (found.verdict, found.why) == ("MISSED", "2 failed or were dropped; 100 ms, of the 1,000 requests measured")


def test_a_limit_on_attainment_is_judged_by_its_own_interval_and_not_by_equal_tenths() -> None:
    half = cell([record(i, 10 * i, events=[10 * i + (50 if i % 2 else 500)]) for i in range(1000)])
    w = Window(ns(0), ns(10_000), 0, 0, "")
    first, second = judge(half, w, parse("ttft_p50<100ms,slo_attainment>=50%"))
    assert (first.verdict, second.verdict) == ("UNDECIDED", "UNDECIDED")
    assert (second.low, second.high) == pytest.approx((first.low, first.high))
    assert verdicts(half, "ttft_p50<100ms,slo_attainment>=40%", w)[1] == "MET"
    few = cell([record(i, 10 * i, events=[10 * i + 5.0]) for i in range(60)])
    w = Window(ns(0), ns(600), 0, 0, "")
    assert (
        verdicts(few, "ttft_p50<100ms,slo_attainment>=99.9%,first_attempt_success>=99.9%", w)[1:] == ["UNDECIDED"] * 2
    )


def test_attainment_of_all_requests_holds_each_class_to_its_own_limits() -> None:
    rows = [record(i, i, events=[i + 50.0], request_class="ab"[i % 2]) for i in range(100)]
    agreed = parse("ttft_p95<1s,b:ttft_p95<10ms")
    got = attainment(cell(rows), ALL, agreed.context().limits)
    assert (got.met, got.decided) == (50, 100)
    assert attainment(objectives.of_class(cell(rows), "a"), ALL, agreed.context("a").limits).met == 50
    assert attainment(objectives.of_class(cell(rows), "b"), ALL, agreed.context("b").limits).met == 0


def test_a_class_measured_alone_is_not_held_to_the_limits_of_another() -> None:
    rows = [record(i, i, events=[i + 50.0], request_class="a") for i in range(1000)]
    alone = cell(rows, load={"kind": "open", "rate": 5.0, "warmup": 0.0, "class_alone": "a"})
    found = judge(alone, ALL, parse("a:ttft_p95<1s,b:ttft_p95<1s,ttft_p95<2s"))
    assert [(j.limit.of_class, j.verdict) for j in found] == [("a", "MET"), ("", "MET")]


def test_an_undecided_share_says_how_many_requests_would_decide_it() -> None:
    rows = [record(i, i, events=[i + 5.0]) for i in range(100)]
    (found,) = judge(cell(rows), Window(ns(0), ns(100), 0, 0, ""), parse("error_rate<1%"))
    assert found.why == "0.00%, 95% interval 0.00% to 3.70%; about 400 requests would decide it"


def test_where_nothing_went_well_a_limit_is_missed_however_short_the_window():
    rows = [record(i, 10 * i, end=10 * i + 1, outcome="failed") for i in range(40)]
    c = cell(rows)
    w = windows.of(c)
    assert (w.state, w.evidence) == (windows.TOO_SHORT, "no ok request was due in it")
    assert verdicts(c, "error_rate<1%,ttft_p95<1s", w) == ["MISSED", "MISSED"]
