"""A trace in figures: known answers of whole public traces, and each figure by hand on a few rows."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from llm_bench.request import Request, Trace
from llm_bench.trace import read
from llm_bench.workload import describe, dispersion, quantiles, spearman, window_cv

SHARED = Path(__file__).parents[2] / "shared"


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    return path


def trace(requests: list[Request]) -> Trace:
    return Trace(requests, "llm-bench", "trace.jsonl", [], {})


# What is known of the whole files, to the digits given (rate, CV, CV in windows, dispersion, quantiles, correlation).
KNOWN = {
    "AzureLLMInferenceTrace_code.csv": (
        (8819, 3436, 2.567, 13.15, (1.04, 3.16, 6.43), (13.2, 71.6, 164)),
        ((1469, 7303, 7436, 7437, 2048), (13, 90, 251, 1899, 27.9), -0.02),
    ),
    "AzureLLMInferenceTrace_conv.csv": (
        (19366, 3502, 5.530, 1.094, (0.96, 1.02, 1.09), (1.4, 3.9, 16.1)),
        ((1020, 4083, 4142, 14050, 1155), (129, 451, 601, 1000, 211), 0.07),
    ),
    "mooncake_conversation_trace.jsonl": (
        (12031, 3537, 3.401, 3.034, (2.85, 3.13, 3.36), (7.9, 2.1, 2.9)),
        ((6909, 39550, 85400, 126195, 12035), (350, 698, 1118, 2000, 343), 0.07),
    ),
}


def same(value: float | None, known: float) -> bool:
    """Whether the value is the known one where rounded to the digits that it has."""
    digits = len(str(known).partition(".")[2]) if isinstance(known, float) else 0
    return value is not None and abs(value - known) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("name", KNOWN)
def test_whole_public_traces_have_their_known_figures(name):
    w = describe(read(shared(f"traces/full/{name}")))
    (n, span, rate, cv, windows, counts), (tokens_in, tokens_out, rho) = KNOWN[name]
    a = w.arrivals
    assert (w.n, round(a.span_s)) == (n, span)
    assert same(a.rate, rate)
    assert same(a.cv, cv)
    assert all(map(same, a.cv_window, windows))
    assert all(map(same, a.dispersion.values(), counts))
    for q, known in ((w.tokens_in, tokens_in), (w.tokens_out, tokens_out)):
        # A known 251 is 251.46, a known 7303 is 7303.3: the table cuts or rounds, so half a token either way.
        assert all(map(same, (q.p50, q.p95, q.p99, q.max, q.mean), known))
    assert same(w.spearman, rho)


def test_mooncake_inside_its_ticks_is_poisson_and_its_caches_hit_what_is_known():
    w = describe(read(shared("traces/full/mooncake_conversation_trace.jsonl")))
    a = w.arrivals
    assert (a.instants, a.tick_s) == (1180, 3)
    assert same(a.cv_spread, 1.009)
    assert all(map(same, a.cv_window_spread, (0.91, 0.99, 1.08)))
    assert same(100 * w.sharing.block_hits, 36.6)
    assert same(100 * w.sharing.token_hits, 37.4)
    lru = dict(w.sharing.lru)
    for blocks, known in {1000: 4.4, 3000: 6.5, 10_000: 21.1, 30_000: 32.6, 50_000: 35.5}.items():
        assert same(100 * lru[blocks], known), blocks


EXCERPTS = {
    "azure2023_code_first2000.csv": 2000,
    "azure2023_conv_first2000.csv": 2000,
    "azure2023_conv_tail200_no_eol.csv": 200,
    "mooncake_conversation_first1000.jsonl": 1000,
    "mooncake_synthetic_first1000.jsonl": 1000,
}


@pytest.mark.parametrize(("name", "n"), EXCERPTS.items())
def test_excerpts_are_described_whole_and_as_strict_json(name, n):
    w = describe(read(shared(f"traces/{name}")))
    assert w.n == n
    assert json.loads(json.dumps(asdict(w), allow_nan=False))["tokens_in"]["n"] == n


def test_every_figure_of_a_few_rows_by_hand():
    requests = [
        Request(100, 10, at_s=0.0, client="a", request_class="chat", session="s"),
        Request(300, 30, at_s=1.0, client="a", request_class="chat"),
        Request(200, 20, at_s=4.0, client="b", request_class="batch"),
        Request(400, None, session="s", turn=1, think_s=2.5),
        Request(0, 40, at_s=10.0, prompt="of unknown length"),
    ]
    w = describe(trace(requests))
    assert (w.n, w.arrivals.n, w.arrivals.span_s, w.arrivals.rate) == (5, 4, 10, 0.4)
    assert w.arrivals.rates == [1, 1, 0, 0, 1, 0, 0, 0, 0, 1]
    # gaps 1, 3, 6: mean 10/3, mean of squares 46/3
    assert w.arrivals.cv == pytest.approx((46 / 3 - 100 / 9) ** 0.5 / (10 / 3))
    assert w.arrivals.dispersion == {"1": pytest.approx(0.7), "10": None, "60": None}  # three ones in ten: 0.21 / 0.3
    assert (w.tokens_in.n, w.tokens_in.p50, w.tokens_in.p95, w.tokens_in.mean) == (4, 250, pytest.approx(385), 250)
    assert (w.tokens_out.n, w.tokens_out.p50, w.tokens_out.max) == (4, 25, 40)
    assert w.spearman == pytest.approx(1)
    assert (w.clients, w.top_client_share) == (2, 0.4)
    assert w.classes == {"chat": 2, "batch": 1}
    assert (w.sessions.sessions, w.sessions.several, w.sessions.turns.max, w.sessions.think_s.p50) == (1, 1, 2, 2.5)
    assert w.sharing is None
    assert {"sharing", "cv_window", "dispersion 10 s"} <= w.reasons.keys()


@pytest.mark.parametrize(
    "requests",
    [
        [Request(5, 5)],
        [Request(5, 5, at_s=0.0)],
        [Request(5, 5, at_s=0.0)] * 3,
        [Request(0, None, prompt="x")],
        [Request(0, None, prompt="x", session="s"), Request(0, 1, messages=(), session="s", turn=1)],
    ],
)
def test_what_is_not_defined_is_none_with_a_reason(requests):
    w = describe(trace(requests))
    assert w.arrivals.rate is None
    assert w.arrivals.cv is None
    assert w.spearman is None
    assert {"rate", "cv", "spearman"} <= w.reasons.keys()
    json.dumps(asdict(w), allow_nan=False)


def test_ranks_of_ties_are_their_average():
    # ranks 1 2.5 2.5 4 against 1 2 3 4: covariance 4.5 of sqrt(4.5 * 5)
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4])) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman(np.array([1.0, 2, 3]), np.array([9.0, 4, 1])) == pytest.approx(-1)
    assert spearman(np.array([1.0, 1, 1]), np.array([1.0, 2, 3])) is None


def test_dispersion_counts_whole_windows_and_the_empty_ones_among_them():
    at_s = np.repeat(np.arange(0, 22, 2), 3).astype(float)  # 3 0 3 0 ... over 20 s: mean 1.5, variance 2.25
    assert dispersion(at_s, 1) == pytest.approx(1.5)
    assert dispersion(at_s, 2) == pytest.approx(0)
    assert dispersion(at_s, 3) is None  # six windows are too few
    assert dispersion(np.array([]), 1) is None


def test_a_cv_in_windows_does_not_see_a_rate_that_varies_between_them():
    rng = np.random.default_rng(5)
    gaps = np.concatenate([rng.exponential(mean, round(600 / mean)) for mean in (0.05, 1.0, 0.1)])
    at_s = np.cumsum(gaps)
    low, middle, high = window_cv(at_s)
    assert gaps.std() / gaps.mean() > 1.5
    assert 0.8 < low < middle < high < 1.2
    assert window_cv(np.arange(0, 600, 10.0)) is None  # six arrivals a window


def test_quantiles_are_linear_and_of_nothing_none():
    assert quantiles(np.array([])) is None
    q = quantiles(np.array([1.0, 2, 3, 4]))
    assert (q.n, q.min, q.p50, q.p95, q.p99, q.max, q.mean) == (
        4,
        1,
        2.5,
        pytest.approx(3.85),
        pytest.approx(3.97),
        4,
        2.5,
    )
