"""synth: new requests that are like the model's, the same for the same seed, and a file that the reader takes."""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import prefixes
from llm_bench.errors import BenchError
from llm_bench.fit import AGAIN, NEW, NEXT, NO_BLOCKS, OWN, Arrivals, Conversation, Model, Stream, Turn, fit
from llm_bench.law import uniforms
from llm_bench.prefixes import prefix_bound
from llm_bench.request import Request, Trace
from llm_bench.synth import arrivals, beta_shares, synth, unit_gaps
from llm_bench.ticks import inter_arrival_cv
from llm_bench.trace import read, write
from llm_bench.workload import dispersion, stamps


def trace(requests: list[Request]) -> Trace:
    return Trace(requests, "llm-bench", "t.jsonl", [], {})


def turn(tokens: int = 100, out: int = 10, source: str = NO_BLOCKS, shared: int = 0, lag: float = 0.0) -> Turn:
    return Turn(tokens, out, None, None, source, shared, lag)


def model_of(*turns: Turn, rate: float = 2.0, span_s: float = 100.0, block_size: int = 0) -> Model:
    rows = tuple(Conversation(0, "", 0, (t,)) for t in turns)
    flat = Arrivals(span_s, (rate,) * 4, (), 1.0)
    return Model(block_size, len(rows), len(rows), (Stream(flat, rows),), ())


# -- randomness -------------------------------------------------------------------------------------------------------


def test_uniforms_are_the_53_high_bits_of_pcg64_and_each_key_has_its_own() -> None:
    """The first words are pinned: a change of them is a change of every load that was ever made."""
    words = np.random.PCG64(np.random.SeedSequence(7, spawn_key=(1, 0))).random_raw(4)
    assert uniforms(4, 7, 1, 0).tolist() == [(int(word) >> 11) / 2**53 for word in words]
    assert uniforms(3, 7, 1, 0).tolist() == [0.5898074907472937, 0.5065164278777952, 0.7669367642185954]
    assert not set(uniforms(100, 7, 1, 0)) & set(uniforms(100, 7, 2, 0))


def test_shares_are_symmetric_beta_with_the_variance_asked_for() -> None:
    for rho in (0.0, 0.01, 1 / 3, 0.7, 0.97, 1.0):
        shares = beta_shares(uniforms((2, 200_000), 1, 2), np.full(200_000, rho))
        assert shares.mean() == pytest.approx(0.5, abs=0.004)
        assert 4 * shares.var() == pytest.approx(rho, rel=0.02, abs=1e-6)
    even = beta_shares(uniforms((2, 200_000), 1, 2), np.full(200_000, 1 / 3))  # a = 1: uniform
    assert np.quantile(even, [0.1, 0.25, 0.9]) == pytest.approx([0.1, 0.25, 0.9], abs=0.005)


@pytest.mark.parametrize("shape", [1.0, 1.3, 2.0, 3.7, 64.0])
def test_gaps_have_mean_one_and_the_cv_of_their_shape(shape: float) -> None:
    gaps = unit_gaps(100_000, shape, 3, 1)
    assert gaps.mean() == pytest.approx(1, abs=0.02)
    assert gaps.std() == pytest.approx(1 / math.sqrt(shape), rel=0.02)


# -- when -------------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    model = model_of(*(turn(tokens) for tokens in range(50, 250)))
    assert synth(model, seed=5) == synth(model, seed=5)
    assert synth(model, seed=5) != synth(model, seed=6)
    pinned = [(r.at_s, r.tokens_in) for r in synth(model, seed=5)[:3]]
    assert pinned == [(0.0, 52), (2.412592, 54), (2.8835, 58)]


def test_without_a_wish_there_are_as_many_conversations_as_were_fitted() -> None:
    before = [Request(10 + i, 5, i * 0.5 + i % 3 * 0.1) for i in range(1000)]
    model = fit(trace(before))
    for seed in range(3):
        made = synth(model, seed=seed)
        assert len(made) == 1000 and made[0].at_s == 0
        assert made[-1].at_s == pytest.approx(500, rel=0.1)
        assert synth(model, seed=seed, rate=20)[-1].at_s == pytest.approx(50, rel=0.1)


def test_rate_duration_and_count_are_kept() -> None:
    model = model_of(*[turn()] * 50)
    made = synth(model, rate=40, duration_s=250)
    assert len(made) == pytest.approx(10_000, rel=0.05)
    assert 249 < (made[-1].at_s or 0) < 250
    assert len(synth(model, count=777)) == 777
    assert len(synth(model, count=5000, duration_s=10)) == pytest.approx(20, abs=20)  # the first reached ends it
    assert synth(model, count=100) == synth(model, count=777)[:100]


def test_a_longer_load_repeats_the_profile_with_new_requests() -> None:
    rows = tuple(Conversation(0, "", 0, (turn(tokens),)) for tokens in range(100, 300))
    model = Model(0, 200, 200, (Stream(Arrivals(100.0, (1.0, 9.0), (), 1.0), rows),), ())
    at = np.array([r.at_s for r in synth(model, duration_s=400)])
    counts = np.histogram(at, 8, (0, 400))[0]
    assert counts[::2] == pytest.approx(50, abs=30) and counts[1::2] == pytest.approx(450, abs=90)
    assert not set(np.round(at[at < 100], 6)) & set(np.round(at[(at >= 100) & (at < 200)] - 100, 6))


def test_another_rate_stretches_time_and_keeps_the_bursts() -> None:
    bursty = fit(trace([Request(9, 9, float(t)) for t in _on_and_off(3)]))
    slow, fast = (stamps(synth(bursty, rate=rate, count=4000, seed=2)) for rate in (1.0, 10.0))
    assert inter_arrival_cv(slow) == pytest.approx(inter_arrival_cv(fast), rel=1e-3)
    assert dispersion(slow, 100) == pytest.approx(dispersion(fast, 10), rel=0.02)
    assert (inter_arrival_cv(slow) or 0) > 2
    assert fast[-1] == pytest.approx(slow[-1] / 10, rel=1e-6)


def _on_and_off(seed: int) -> np.ndarray:
    """Poisson at 10/s for 10 s on average, then silence for 40 s on average."""
    rng = np.random.Generator(np.random.PCG64(seed))
    now, times = 0.0, []
    for _ in range(80):
        on = rng.exponential(10)
        times.append(now + np.sort(rng.random(rng.poisson(10 * on))) * on)
        now += on + rng.exponential(40)
    at = np.concatenate(times)
    return np.asarray(at - at[0])


def test_bursts_at_every_scale_survive_fit_and_synth() -> None:
    for seed in (3, 4):
        before = _on_and_off(seed)
        model = fit(trace([Request(9, 9, float(t)) for t in before]))
        for again in (1, 2):
            now = stamps(synth(model, seed=again))
            for window in (1, 10, 60):
                assert dispersion(now, window) == pytest.approx(dispersion(before, window), rel=0.5)


def test_arrivals_lie_in_their_span_and_in_no_silent_bin() -> None:
    at = arrivals(Arrivals(60.0, (0.0, 5.0, 0.0), ((0.5, 0.5, 0.5),) * 6, 2.0), 1)
    assert len(at) == pytest.approx(100, abs=50)
    assert (np.diff(at) >= 0).all() and at.min() >= 20 and at.max() <= 40


def test_a_model_without_times_takes_a_rate_or_gives_none() -> None:
    model = fit(trace([Request(10 + i, 5) for i in range(100)]))
    assert {r.at_s for r in synth(model)} == {None}
    assert sorted(r.tokens_in for r in synth(model)) == list(range(10, 110))
    at = stamps(synth(model, rate=4, count=1000))
    assert len(at) / at[-1] == pytest.approx(4, rel=0.1)
    with pytest.raises(BenchError, match="expected --rate beside --duration"):
        synth(model, duration_s=5)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"rate": 0.0}, "rate 0.0, expected conversations a second"),
        ({"rate": math.nan}, "rate nan"),
        ({"duration_s": -1.0}, "duration -1.0"),
        ({"count": 0}, "count 0, expected 1 to"),
        ({"lengths": 0.0}, "lengths 0.0"),
        ({"seed": -1}, "seed -1"),
        ({"lengths": 900_000.0}, "expected 10,000,000 at most: lower --lengths"),
        ({"rate": 1e-7, "count": 100}, "over 10 years"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(wish: dict[str, float], words: str) -> None:
    with pytest.raises(BenchError) as e:
        synth(model_of(turn(), turn()), **wish)  # type: ignore[arg-type]
    assert words in str(e.value)


# -- what -------------------------------------------------------------------------------------------------------------


def test_each_conversation_is_drawn_once_a_pass_near_its_place() -> None:
    model = fit(trace([Request(1000 + i, 1 + i, float(i)) for i in range(1000)]))
    made = synth(model)
    assert len({r.tokens_in for r in made}) > 980  # a few arrivals fewer or more than there are rows
    assert all(r.tokens_out == r.tokens_in - 999 for r in made)  # pairs stay pairs
    moved = [abs(r.tokens_in - 1000 - i) for i, r in enumerate(made[:980])]
    assert max(moved) < 2 * 1000 / 32 + 20  # twice the distance: one goes up, others down; and the pass is not of 1000
    assert np.median(moved) > 5


def test_conversations_keep_their_turns_pauses_classes_and_clients() -> None:
    turns = (turn(50, 20), Turn(7, 30, 2.0, None, NO_BLOCKS, 0, 0.0), Turn(0, 5, None, 4.5, NO_BLOCKS, 0, 0.0))
    talk = Conversation(3, "chat", 1, turns)
    model = Model(0, 3, 1, (Stream(Arrivals(10.0, (1.0,), (), 1.0), (talk,)),), ())
    first, second, third = synth(model, count=3)
    assert (first.tokens_in, second.tokens_in, third.tokens_in) == (50, 50 + 20 + 7, 77 + 30)
    assert (second.tokens_new, second.think_s, second.at_s, third.at_s) == (7, 2.0, None, 4.5)
    assert {(r.session, r.request_class, r.priority, r.client) for r in (first, second, third)} == {
        ("c0", "chat", 1, "client-3")
    }
    assert [r.turn for r in (first, second, third)] == [0, 1, 2]


def test_blocks_are_shared_as_deep_and_as_long_ago_as_the_model_says() -> None:
    first, part = turn(45, 1, NEW), turn(45, 1, AGAIN, 2, 1.0)
    model = model_of(first, part, part, turn(95, 1, NEXT, 4, 1.0), block_size=10)
    made = synth(model, count=400, seed=3)
    found = prefixes.faults(made)
    assert not any((found.several_parents, found.partial_reused, found.miscounted, found.wide))
    shared = Counter()
    seen: set[int] = set()
    for r in made:
        whole = r.hash_ids[: r.tokens_in // 10]
        shared[r.tokens_in, sum(i in seen for i in whole)] += 1
        seen.update(whole)
    assert {key for key, n in shared.items() if n > 5} == {(45, 0), (45, 2), (95, 4)}
    assert sum(shared.values()) - sum(n for n in shared.values() if n > 5) <= 2  # before any prompt was there to share


def test_a_turn_of_a_conversation_goes_on_from_its_own_prompt() -> None:
    talk = Conversation(0, "", 0, (turn(45, 5, NEW), turn(20, 5, OWN, 4)))
    model = Model(10, 2, 1, (Stream(Arrivals(20.0, (1.0,), (), 1.0), (talk,)),), ())
    made = synth(model, count=40)
    sessions = {r.session: r for r in made if r.turn == 0}
    for r in (r for r in made if r.turn == 1):
        assert r.tokens_in == 70 and r.hash_ids[:4] == sessions[r.session].hash_ids[:4]
        assert not set(r.hash_ids[4:]) & set(sessions[r.session].hash_ids)


def test_shorter_lengths_keep_the_share_of_shared_tokens() -> None:
    rows = [
        Request(5000, 200, float(i), hash_ids=(1, 2, 3, *range(100 + i * 10, 107 + i * 10)), block_size=512)
        for i in range(200)
    ]
    model = fit(trace(rows))
    hits = {}
    for lengths in (0.01, 0.1, 1.0, 3.0):
        made = synth(model, lengths=lengths, count=200)
        shared, total = prefix_bound(made)
        hits[lengths] = shared / total
        assert {r.tokens_in for r in made} == {round(5000 * lengths)}
        assert {r.tokens_out for r in made} == {round(200 * lengths)}
        assert not prefixes.faults(made).miscounted
    assert list(hits.values()) == pytest.approx([3 * 512 / 5000] * 4, abs=0.01)


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Up to 40 requests with or without times, blocks, sessions; prompts go on from earlier ones."""
    size = draw(st.sampled_from([0, 1, 4, 16]))
    use_times = draw(st.booleans())
    made: list[Request] = []
    fresh, now = 0, 0.0
    talks: dict[str, Request] = {}
    for i in range(draw(st.integers(2, 40))):
        now += draw(st.sampled_from([0.0, 0.25, 3.0])) + (i == 1)
        session = draw(st.sampled_from(["", "", "a", "b"]))
        before = talks.get(session)
        new = draw(st.integers(1, 60))
        whole = before.tokens_in + (before.tokens_out or 0) + new if before else new
        parent = before or (draw(st.sampled_from(made)) if made and draw(st.booleans()) else None)
        ids: tuple[int, ...] = ()
        if size:
            most = min(whole, parent.tokens_in) // size if parent else 0
            ids = parent.hash_ids[: most if before else draw(st.integers(0, most))] if parent else ()
            need = -(-whole // size) - len(ids)
            ids += tuple(range(fresh, fresh + need))
            fresh += need
        request = Request(
            whole,
            draw(st.sampled_from([1, 7, 30])),
            now if use_times else None,
            hash_ids=ids,
            block_size=size,
            session=session,
            turn=before.turn + 1 if before else 0,
            tokens_new=new if before else 0,
            think_s=draw(st.sampled_from([None, 0.5])) if before else None,
        )
        made.append(request)
        if session:
            talks[session] = request
    return made


@settings(max_examples=80, deadline=None)
@given(traces(), st.sampled_from([0.1, 1.0, 2.5]), st.integers(0, 3))
def test_whatever_is_fitted_the_reader_takes_what_is_made(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Request], lengths: float, seed: int
) -> None:
    made = synth(fit(trace(requests)), lengths=lengths, seed=seed, count=60)
    assert len(made) == 60
    found = prefixes.faults(made)
    assert not any((found.several_parents, found.partial_reused, found.miscounted))
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    write(path, trace(made))
    back = read(path).requests
    assert [(r.at_s, r.tokens_in, r.tokens_out, r.hash_ids, r.turn, r.think_s) for r in back] == [
        (r.at_s, r.tokens_in, r.tokens_out, r.hash_ids, r.turn, r.think_s) for r in made
    ]


def test_a_file_of_it_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    model = model_of(*(turn(tokens, 9, NEW) for tokens in range(50, 90)), block_size=16)
    for name in ("a", "b"):
        write(tmp_path / name, trace(synth(model, seed=4)))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_rate_asked_for_is_that_of_the_duration_whatever_part_of_the_profile_it_takes() -> None:
    """A profile whose beginning is four times as busy as its end: at 20/s for 50 s, 1,000 requests come on average."""
    rows = tuple(Conversation(0, "", 0, (turn(),)) for _ in range(100))
    model = Model(0, 100, 100, (Stream(Arrivals(1000.0, (4.0, 4.0, 1.0, 1.0), (), 1.0), rows),), ())
    for rate, duration_s in ((20.0, 50.0), (20.0, 400.0), (1.0, 3000.0), (0.5, 700.0)):
        counts = [len(synth(model, rate=rate, duration_s=duration_s, seed=seed)) for seed in range(8)]
        asked = rate * duration_s
        assert np.mean(counts) == pytest.approx(asked, abs=1 + 4 * math.sqrt(asked / len(counts)))
    whole = synth(model, rate=5.0, duration_s=500.0, seed=3)  # just one pass: the profile shows
    early = sum(r.at_s is not None and r.at_s < 250 for r in whole)
    assert early / len(whole) == pytest.approx(0.8, abs=0.04)


def test_streams_of_different_spans_come_at_the_rate_of_both() -> None:
    rows = (Conversation(0, "", 0, (turn(),)),)
    parts = Arrivals(100.0, (10.0,), (), 1.0), Arrivals(50.0, (1.0, 7.0), (), 1.0)
    model = Model(0, 2, 2, tuple(Stream(part, rows) for part in parts), ())
    counts = [len(synth(model, rate=30.0, duration_s=10.0, seed=seed)) for seed in range(12)]
    assert np.mean(counts) == pytest.approx(300, abs=1 + 4 * math.sqrt(300 / 12))
