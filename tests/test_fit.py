"""fit: what a model says of traffic whose truth is known, and files that are no model."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.errors import BenchError
from llm_bench.fit import AGAIN, NEW, NEXT, NO_BLOCKS, OWN, Model, Turn, fit, fit_arrivals
from llm_bench.model_file import load, save
from llm_bench.request import Request, Trace
from llm_bench.synth import synth


def trace(*requests: Request) -> Trace:
    return Trace(list(requests), "llm-bench", "t.jsonl", [], {})


def timed(*at_s: float) -> Trace:
    return trace(*(Request(100 + i, 10 + i, float(at), line=i + 1) for i, at in enumerate(at_s)))


def rng(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def poisson(rate: float, span_s: float, seed: int) -> np.ndarray:
    return np.sort(rng(seed).random(round(rate * span_s)) * span_s)


# -- arrivals ---------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_no_bursts_and_a_flat_profile() -> None:
    model = fit_arrivals(poisson(5, 2000, 1), 2000)
    assert model.shape == 1
    assert max(max(level) for level in model.splits) < 0.05
    assert len(model.rates) == round(2 * 10_000 ** (1 / 3))
    assert sum(model.rates) / len(model.rates) == pytest.approx(5, rel=1e-4)
    assert max(model.rates) < 5.6  # the counts' own noise, sqrt(232) of 232, is taken out


def test_even_arrivals_have_gaps_of_a_large_shape() -> None:
    assert fit_arrivals(np.arange(2000) * 0.25, 500).shape == 64
    gaps = rng(2).gamma(4, 0.05, 5000)  # squared CV 1/4
    times = np.cumsum(gaps)
    assert fit_arrivals(times, float(times[-1])).shape == pytest.approx(4, rel=0.1)


def test_a_rate_that_doubles_is_found_where_it_does() -> None:
    times = np.concatenate([poisson(2, 1000, 3), 1000 + poisson(4, 1000, 4)])
    rates = fit_arrivals(times, 2000, bin_s=100).rates
    assert len(rates) == 20
    assert np.mean(rates[:10]) == pytest.approx(2, rel=0.05)
    assert np.mean(rates[10:]) == pytest.approx(4, rel=0.05)


def test_arrivals_in_pairs_are_bursts_of_the_finest_scale() -> None:
    model = fit_arrivals(np.repeat(poisson(2, 1000, 5), 2), 1000)
    parts = len(model.rates) * 2 ** (len(model.splits) - 1)  # those that the last level halves
    # Of k pairs in a part, 2k of 2k(2k - 1) ordered twos are at one instant: 1 / (1 + mean) for Poisson k.
    assert model.splits[-1][0] == pytest.approx(1 / (1 + 4000 / parts), abs=0.02)
    assert max(model.splits[0]) < 0.1


def test_bins_and_parts_stay_within_their_limits() -> None:
    model = fit_arrivals(poisson(50, 1000, 6), 1000, bin_s=0.001)
    assert len(model.rates) == 100_000
    assert len(model.rates) * 2 ** len(model.splits) <= 2**22
    with pytest.raises(BenchError, match="bins of 0"):
        fit(timed(0, 1, 2), bin_s=0)


def test_ticks_are_spread_before_anything_is_fitted_and_the_model_says_so() -> None:
    ticked = np.floor(poisson(4, 1200, 7) / 3) * 3
    model = fit(timed(*ticked))
    assert "spread at random" in model.notes[0]
    assert model.streams[0].arrivals is not None and model.streams[0].arrivals.shape == 1


def test_clients_with_enough_requests_have_rates_of_their_own() -> None:
    many = [Request(10, 10, float(t), client="ann") for t in poisson(1, 600, 8)]
    more = [Request(500, 90, float(t), client="bob") for t in poisson(2, 600, 9)]
    few = [Request(70, 70, float(t), client=f"c{t:.0f}") for t in poisson(0.2, 600, 10)]
    model = fit(trace(*sorted([*many, *more, *few], key=lambda r: r.at_s or 0)))
    rates = [sum(s.arrivals.rates) / len(s.arrivals.rates) for s in model.streams if s.arrivals]
    assert rates == pytest.approx([2, 1, 0.2], rel=0.02)  # the largest first, all small ones together last
    assert [{c.turns[0].tokens for c in s.conversations} for s in model.streams] == [{500}, {10}, {70}]
    assert [{c.client for c in s.conversations} for s in model.streams[:2]] == [{1}, {2}]
    assert "2 of" in model.notes[-1]


# -- conversations and prefixes ---------------------------------------------------------------------------------------


def test_whose_prompt_a_turn_repeats_is_told_with_depth_and_lag() -> None:
    def row(at: float, tokens: int, *ids: int, session: str = "", turn: int = 0, new: int = 0) -> Request:
        return Request(tokens, 5, at, hash_ids=ids, block_size=10, session=session, turn=turn, tokens_new=new)

    model = fit(
        trace(
            row(0, 25, 1, 2, 3),  # 1 and 2 are whole, 3 holds 5 tokens
            row(1, 30, 1, 4, 5),  # a part of the first: one block, one request ago
            row(3, 40, 1, 2, 6, 7),  # the whole of the first, 3 s ago
            row(4, 20, 8, 9, session="s"),
            row(9, 40, 8, 9, 10, 11, session="s", turn=1, new=15),
            replace(row(10, 40), block_size=0),
        )
    )
    turns = [turn for c in model.streams[0].conversations for turn in c.turns]
    assert [(t.source, t.shared, t.lag) for t in turns] == [
        (NEW, 0, 0),
        (AGAIN, 1, 1),
        (NEXT, 2, 3),
        (NEW, 0, 0),
        (OWN, 2, 0),
        (NO_BLOCKS, 0, 0),
    ]
    assert turns[4] == Turn(15, 5, None, 5.0, OWN, 2, 0)  # 15 new tokens, 5 s after its turn before began
    assert (model.requests, model.conversations, model.block_size) == (6, 5, 10)


def test_pauses_of_people_and_classes_are_kept() -> None:
    first = Request(10, 5, 0.0, session="x", request_class="chat", priority=2)
    second = Request(25, 7, None, session="x", turn=1, tokens_new=10, think_s=2.5)
    model = fit(trace(first, second, Request(9, 9, 4.0, request_class="batch")))
    chat, batch = model.streams[0].conversations
    assert (chat.request_class, chat.priority, batch.request_class) == ("chat", 2, "batch")
    assert chat.turns[1] == Turn(10, 7, 2.5, None, NO_BLOCKS, 0, 0)


def test_a_long_trace_is_thinned_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_bench.fit.MOST_CONVERSATIONS", 50)
    model = fit(timed(*range(1000)))
    kept = [c.turns[0].tokens for c in model.streams[0].conversations]
    assert kept == list(range(100, 1100, 20))
    assert model.notes == ("50 of 1,000 conversations kept, evenly taken: extremes may be lost",)
    assert model.rate == pytest.approx(1)


def test_no_name_of_the_trace_is_in_the_model(tmp_path: Path) -> None:
    rows = [
        Request(20, 3, float(i), prompt="secret", hash_ids=(77_000_001, 88_000_000 + i), block_size=10, client="acme")
        for i in range(9)
    ]
    save(fit(trace(*rows, Request(9, 9, 9.0, session="ses-1", client="zeta"))), tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    assert not [word for word in ("secret", "77000001", "88000000", "acme", "zeta", "ses-1") if word in text]


def test_what_cannot_be_fitted_is_refused_in_words() -> None:
    with pytest.raises(BenchError, match=r"t\.jsonl:7: a prompt of unknown length"):
        fit(trace(Request(0, 5, 0.0, prompt="x", line=7)))
    with pytest.raises(BenchError, match="all 2 requests at one time"):
        fit(timed(1, 1))
    other = Request(8, 5, 1.0, hash_ids=(9,), block_size=8)
    with pytest.raises(BenchError, match=r"blocks of \[8, 16\] tokens"):
        fit(trace(Request(16, 5, 0.0, hash_ids=(1,), block_size=16), other))


def test_a_short_trace_has_a_note_that_its_profile_is_chance() -> None:
    assert "too few to show a rate profile" in fit(timed(*(t * 1.01 for t in range(199)))).notes[0]
    assert fit(timed(*(t * 1.01 for t in range(200)))).notes == ()


def test_a_trace_without_times_has_a_model_without_arrivals() -> None:
    model = fit(trace(Request(10, 5), Request(20, 6)))
    assert model.rate is None and model.span_s is None and model.streams[0].arrivals is None


# -- files ------------------------------------------------------------------------------------------------------------


def some_model() -> Model:
    rows = [
        Request(40 + i % 7, 5 + i % 3, i * 1.5 + i % 2, hash_ids=(1, 100 + i, 200 + i), block_size=20)
        for i in range(40)
    ]
    return fit(
        trace(*rows, Request(10, None, 70.0, session="s"), Request(30, 2, None, session="s", turn=1, think_s=1.0))
    )


def test_a_model_read_back_is_the_same(tmp_path: Path) -> None:
    for name, model in (("a.json", some_model()), ("b.json", fit(trace(Request(10, 5), Request(20, None))))):
        save(model, tmp_path / name)
        assert load(tmp_path / name) == model


HOSTILE = {
    "": "Expecting value",
    "[1]": "llm_bench_model is None",
    "[" * 100_000: "nested too deeply",
    '{"llm_bench_model": 2}': "llm_bench_model is 2, expected 1",
    '{"llm_bench_model": 1}': "the file has",
    '{"llm_bench_model": NaN}': "NaN is not a JSON number",
}


@pytest.mark.parametrize("content", HOSTILE, ids=[*map(str, range(len(HOSTILE)))])
def test_what_is_no_model_is_refused_with_its_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(content)
    with pytest.raises(BenchError) as e:
        load(path)
    assert str(e.value).startswith(f"{path}: ") and HOSTILE[content] in str(e.value)


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (["block_size"], -1, "block_size is -1, expected a whole number, 0 to"),
        (["block_size"], True, "block_size is True"),
        (["turn"], ["tokens"], 'turn is ["tokens"]'),
        (["notes"], [3], "notes[0] is 3, expected text"),
        (["streams"], [], "streams is empty"),
        (["streams"], "x" * 400, "streams is 'xxx"),
        (["streams", 0, "arrivals", "span_s"], 1e300, "streams[0].arrivals.span_s is 1e+300"),
        (["streams", 0, "arrivals", "rates"], [0.0], "rates give 0 arrivals in span_s, expected 1 to"),
        (["streams", 0, "arrivals", "rates"], [1e9], "arrivals in span_s, expected 1 to"),
        (["streams", 0, "arrivals", "rates", 0], "9", "rates[0] is '9', expected a number, 0 to"),
        (["streams", 0, "arrivals", "splits", 0], [0.1, 0.2], "splits[0] has 2 numbers, expected 3"),
        (["streams", 0, "arrivals", "splits"], [[0, 0, 0]] * 20, "parts, expected 4,194,304 at most"),
        (["streams", 0, "arrivals", "shape"], 0.5, "shape 0.5; expected"),
        (["streams", 0, "conversations"], [], "streams[0].conversations is empty"),
        (["streams", 0, "conversations", 3], [0, "", 0], "conversations[3] has 3 values"),
        (["streams", 0, "conversations", 3, 2], 1.5, "conversations[3][2] is 1.5, expected a priority"),
        (["streams", 0, "conversations", 3, 3], [], "conversations[3] has no turn"),
        (["streams", 0, "conversations", 3, 3, 0, 0], 0, "[3][0][0] is 0, expected a prompt of one token"),
        (["streams", 0, "conversations", 3, 3, 0, 1], 10**30, "[3][0][1] is 1000"),
        (["streams", 0, "conversations", 3, 3, 0, 4], "steal", "[4] is 'steal', expected one of none, new"),
        (["streams", 0, "conversations", 3, 3, 0, 6], -1, "[3][0][6] is -1, expected a number"),
    ],
)
def test_a_model_that_cannot_be_right_is_refused_with_its_key(
    tmp_path: Path, keys: list[str | int], value: object, words: str
) -> None:
    path = tmp_path / "m.json"
    save(some_model(), path)
    values = json.loads(path.read_text())
    at = values
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    path.write_text(json.dumps(values))
    with pytest.raises(BenchError) as e:
        load(path)
    assert str(e.value).startswith(f"{path}: ") and words in str(e.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_model_with_any_byte_changed_is_refused_or_makes_a_load(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("m") / "m.json"
    save(some_model(), path)
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b'0919-e."[]{},:nx\xff'))
    path.write_bytes(content)
    with suppress(BenchError):  # and nothing else
        assert len(synth(load(path), count=20)) == 20


def test_a_missing_file_and_an_unwritable_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.json: cannot be read"):
        load(tmp_path / "none.json")
    with pytest.raises(BenchError, match="cannot be written"):
        save(some_model(), tmp_path / "no" / "m.json")
