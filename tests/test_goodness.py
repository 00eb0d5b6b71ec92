"""goodness: figures recomputed by hand, a warning for each way to be far off, and what full traces must give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llm_bench.errors import BenchError
from llm_bench.fit import fit
from llm_bench.goodness import Goodness, Pair, compare, distribution, text
from llm_bench.goodness_plot import plot
from llm_bench.request import Request, Trace
from llm_bench.synth import synth
from llm_bench.trace import read

SHARED = Path(__file__).parents[2] / "shared"


def trace(requests: list[Request]) -> Trace:
    return Trace(requests, "llm-bench", "t.jsonl", [], {})


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def requests(n: int = 3000, seed: int = 1, rate: float = 5.0) -> list[Request]:
    """Poisson; lognormal lengths, ranks unrelated; a common first block, and 40% go on from an earlier prompt."""
    numbers = rng(seed)
    at = np.cumsum(numbers.exponential(1 / rate, n))
    at -= at[0]
    made: list[Request] = []
    fresh = 1
    for i in range(n):
        parent = (
            made[-int(numbers.integers(1, min(i, 300) + 1))].hash_ids[:-1] if i and numbers.random() < 0.4 else (0,)
        )
        tokens = len(parent) * 16 + max(1, round(numbers.lognormal(4, 0.8)))
        own = -(-tokens // 16) - len(parent)
        ids = (*(parent or (0,)), *range(fresh, fresh + own - (not parent)))
        fresh += own
        made.append(Request(tokens, max(1, round(numbers.lognormal(3, 1))), float(at[i]), hash_ids=ids, block_size=16))
    return made


def synthetic(before: list[Request], **wishes: float) -> Trace:
    return trace(synth(fit(trace(before)), **wishes))  # type: ignore[arg-type]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_distance_of_two_distributions_is_the_largest_difference_of_shares() -> None:
    found = distribution(np.array([1.0, 2, 3, 4]), np.array([3.0, 3, 5, 6, 7]))
    assert found is not None
    # Up to 2: 2/4 and 0/5. Up to 3: 3/4 and 2/5. Up to 4: 4/4 and 2/5.
    assert found.ks == pytest.approx(0.6)
    assert found.n == (4, 5) and found.quantiles["p50"] == Pair(2.5, 5.0)
    assert distribution(np.array([]), np.array([1.0])) is None


def test_a_trace_is_no_different_from_itself() -> None:
    before = trace(requests(1200))
    same = compare(before, before)
    assert same.warnings == () and same.stretched == 1
    for d in (same.tokens_in, same.tokens_out):
        assert d is not None and d.ks == 0
    assert same.profile_error == 0
    assert all(
        pair.original == pair.synthetic for pair in (same.spearman, same.cv, same.token_hits, *same.lru.values())
    )
    assert len(same.lru) == 5


def test_figures_of_a_few_rows_are_those_of_hand() -> None:
    def row(at: float, tokens: int, *ids: int, **more: str) -> Request:
        return Request(tokens, 5 + int(at), at, hash_ids=ids, block_size=10, **more)  # type: ignore[arg-type]

    before = trace([row(0, 20, 1, 2, client="a"), row(1, 25, 1, 2, 3, client="a"), row(2, 20, 4, 5, client="b")])
    now = trace(
        [row(0, 20, 1, 2, client="a"), row(2, 25, 1, 3, 4, client="b"), row(4, 20, 1, 3, client="b"), row(5, 9, 9)]
    )
    found = compare(before, now)
    assert found.requests == (3, 4)
    assert found.rate == Pair(1.5, 0.8)
    assert found.stretched == 1  # of so few rows the rates may differ by chance
    # Of the first three of each: 2 blocks of 10 in 65 tokens; 1 and then 2 blocks.
    assert found.token_hits == Pair(20 / 65, 30 / 65)
    assert found.top_client == Pair(2 / 3, 2 / 4)
    assert found.class_distance is None and found.turns is None


def test_the_profile_is_compared_in_twentieths() -> None:
    even = trace([Request(9, 9, float(t)) for t in range(2001)])
    late = trace(
        [Request(9, 9, t / 2) for t in range(0, 2000, 2)] + [Request(9, 9, 1000 + t / 1.5) for t in range(1501)]
    )
    found = compare(even, late)
    assert found.profile_error == pytest.approx(0.2, abs=0.01)  # 1,000 of 2,500 in the first half: 0.8 and 1.2 of 1


# -- warnings ---------------------------------------------------------------------------------------------------------


def _longer(rows: list[Request]) -> list[Request]:
    return [replace(r, tokens_out=(r.tokens_out or 0) * 2) for r in rows]


def _sorted(rows: list[Request]) -> list[Request]:
    lengths = sorted(r.tokens_in for r in rows)
    outs = sorted(r.tokens_out or 0 for r in rows)
    return [
        Request(i, o, r.at_s, hash_ids=r.hash_ids and tuple(range(-(-i // 16))), block_size=16)
        for r, i, o in zip(rows, lengths, outs, strict=True)
    ]


def _unshared(rows: list[Request]) -> list[Request]:
    first = np.cumsum([0, *(len(r.hash_ids) for r in rows)])
    return [
        replace(r, hash_ids=tuple(range(int(a), int(a) + len(r.hash_ids))))
        for r, a in zip(rows, first[:-1], strict=True)
    ]


def _clumped(rows: list[Request]) -> list[Request]:
    return [replace(r, at_s=(r.at_s or 0) // 20 * 20 + (r.at_s or 0) % 20 / 4) for r in rows]


def _rising(rows: list[Request]) -> list[Request]:
    last = rows[-1].at_s or 1
    return [replace(r, at_s=last * ((r.at_s or 0) / last) ** 0.5) for r in rows]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_longer, "output tokens: distributions differ by"),
        (_longer, "output tokens: p99 is"),
        (_sorted, "correlation of input and output lengths is 1.00, was"),
        (_unshared, "prefix hits of an endless cache are 0.0%, was"),
        (_unshared, "prefix hits of an LRU cache of"),
        (_clumped, "bursts of 10 s: index of dispersion is"),
        (_clumped, "CV of the gaps inside windows of 60 s is"),
        (_rising, "the rate profile is"),
        (lambda rows: [replace(r, request_class="x") for r in rows[:400]] + rows[400:], "of another class or priority"),
        (lambda rows: [replace(r, hash_ids=(), block_size=0) for r in rows], "is not defined in the synthetic trace"),
    ],
)
def test_each_way_to_be_far_off_has_its_warning(change: Callable[[list[Request]], list[Request]], words: str) -> None:
    before = requests(2000)
    found = compare(trace(before), trace(change(before)))
    assert any(words in warning for warning in found.warnings), found.warnings
    assert f"poor fit: {found.warnings[0]}" in text(found)


# -- what a fit must reach --------------------------------------------------------------------------------------------


def close(g: Goodness, *, quantile: float = 0.05, rho: float = 0.05, bursts: float = 1.8, cv: float = 1.15) -> None:
    """Length quantiles within `quantile`, correlation within `rho`, dispersion and CV within these factors."""
    for d in (g.tokens_in, g.tokens_out):
        assert d is not None
        for name, pair in d.quantiles.items():
            assert pair.synthetic == pytest.approx(pair.original, rel=quantile, abs=1), name
    assert g.spearman.synthetic == pytest.approx(g.spearman.original, abs=rho)
    for pair in (pair for pair in g.dispersion.values() if pair != (None, None)):  # too short for windows of 60 s
        assert pair.original and pair.synthetic and 1 / bursts < pair.synthetic / pair.original < bursts, g.dispersion
    pair = g.cv_window["p50"]
    assert pair.original and pair.synthetic and 1 / cv < pair.synthetic / pair.original < cv, g.cv_window


@pytest.mark.parametrize("seed", [1, 2])
def test_a_generated_trace_is_met_in_every_figure(seed: int) -> None:
    before = requests(seed=seed)
    found = compare(trace(before), synthetic(before, seed=seed))
    close(found, bursts=1.5)
    assert found.token_hits.synthetic == pytest.approx(found.token_hits.original, abs=0.03)
    for pair in found.lru.values():
        assert pair.synthetic == pytest.approx(pair.original, abs=0.05)
    assert found.warnings == ()


def test_another_rate_is_compared_in_the_original_time() -> None:
    before = requests()
    found = compare(trace(before), synthetic(before, rate=20.0))
    assert found.stretched == pytest.approx(4, rel=0.1)
    close(found, bursts=1.5)
    assert "times are multiplied by" in text(found)
    assert all("the same pauses hold more requests" in warning for warning in found.warnings)


def test_conversations_are_met_in_turns_and_pauses() -> None:
    numbers = rng(9)
    before: list[Request] = []
    now = 0.0
    for session in range(300):
        now += float(numbers.exponential(2))
        whole = 0
        for turn in range(int(numbers.integers(1, 7))):
            new, out = int(numbers.integers(5, 60)), int(numbers.integers(5, 90))
            at, think = (None, float(numbers.exponential(3))) if turn else (now, None)
            before.append(
                Request(
                    whole + new, out, at, session=f"s{session}", turn=turn, tokens_new=new * (turn > 0), think_s=think
                )
            )
            whole += new + out
    made = [r if r.session else replace(r, session=f"x{i}") for i, r in enumerate(synthetic(before).requests)]
    found = compare(trace(before), trace(made))
    for d in (found.turns, found.think_s, found.tokens_new):
        assert d is not None and d.ks < 0.05
    assert found.warnings == ()


FULL = {
    "AzureLLMInferenceTrace_code.csv": {"bursts": 1.8, "cv": 1.35},
    "AzureLLMInferenceTrace_conv.csv": {"bursts": 1.25, "cv": 1.05},
    "mooncake_conversation_trace.jsonl": {"bursts": 1.6, "cv": 1.05},
}


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("seed", [1, 2])
def test_full_public_traces_are_met(name: str, seed: int) -> None:
    path = SHARED / "traces/full" / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    before = read(path)
    found = compare(before, trace(synth(fit(before), seed=seed)))
    close(found, quantile=0.02, rho=0.01, **FULL[name])
    assert found.warnings == ()
    if name.startswith("mooncake"):
        assert found.token_hits.original == pytest.approx(0.374, abs=0.001)
        assert found.token_hits.synthetic == pytest.approx(0.374, abs=0.03)
        for pair in found.lru.values():
            assert pair.synthetic == pytest.approx(pair.original, abs=0.03)


# -- pictures ---------------------------------------------------------------------------------------------------------


def test_the_page_is_drawn_and_is_the_same_file_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = requests(400)
    now = synthetic(before)
    for suffix, head in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        paths = [tmp_path / f"{k}{suffix}" for k in range(2)]
        for path in paths:
            plot(trace(before), now, path)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        assert paths[0].read_bytes().startswith(head)


def test_traces_without_times_or_blocks_have_a_page_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = trace([Request(10 + i, 5) for i in range(50)])
    plot(before, before, tmp_path / "p.png")
    assert compare(before, before).warnings == ()


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = trace(requests(50))
    with pytest.raises(BenchError, match=r"expected a name that ends in \.png or \.svg"):
        plot(before, before, tmp_path / "p.gif")
    with pytest.raises(BenchError, match="cannot be written"):
        plot(before, before, tmp_path / "no" / "p.png")


def test_of_a_tiny_trace_no_fit_is_called_good() -> None:
    few = trace(requests(12))
    said = text(compare(few, few)).splitlines()[-1]
    assert said == "12 requests are too few to tell a poor fit from chance"
    many = trace(requests(300))
    assert text(compare(many, many)).splitlines()[-1] == "no poor fit found"
