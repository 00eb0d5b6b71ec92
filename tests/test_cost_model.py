"""The cost model: shapes on cards, jitter, profiles from files, the scaled clock."""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.accelerators import ACCELERATORS
from reference_engine import cost_model
from reference_engine.config import EngineConfig
from reference_engine.cost_model import (
    CARDS,
    OPTIONS,
    PROFILES,
    SHAPES,
    CostModel,
    Costs,
    Load,
    costs_of,
    fewest_cards,
    load_of,
)
from reference_engine.sequence import SamplingParams, Sequence
from reference_engine.virtual import Arrival, Clock, Simulation

COSTS = {"overhead_s": 1e-3, "weights_s": 6e-3, "token_s": 3e-5, "context_s": 5e-8, "pair_s": 1e-9}


def sequence(tokens: int, computed: int) -> Sequence:
    return Sequence(0, [1] * tokens, tokens, SamplingParams(9), 0, computed=computed)


def test_a_steps_load_is_counted_off_by_hand() -> None:
    # One decodes at position 99 (100 keys), one computes positions 2, 3, 4, which see 3, 4 and 5 keys.
    assert load_of([(sequence(100, 99), 1), (sequence(5, 2), 3)]) == Load(4, 100 + 5, 100 + 3 + 4 + 5)


@given(
    st.builds(Load, st.integers(0, 4096), st.integers(0, 10**6), st.floats(0, 1e9)),
    st.sampled_from(sorted(PROFILES)),
)
def test_more_to_do_never_takes_less(load: Load, name: str) -> None:
    costs = PROFILES[name].costs
    for more in (load._replace(tokens=load.tokens + 1), load._replace(context=load.context + 1)):
        assert costs.step_s(more) >= costs.step_s(load)


def test_shapes_have_the_parameters_that_are_published() -> None:
    """Llama-3.1-8B: 8.03e9, of which the embedding table, 0.53e9, is only looked up; Llama-3.2-1B ties it: 1.24e9."""
    assert SHAPES["8b"].parameters == pytest.approx(8.03e9 - 0.525e9, rel=1e-3)
    assert SHAPES["1b"].parameters == pytest.approx(1.236e9, rel=1e-3)
    assert SHAPES["70b"].parameters == pytest.approx(70.55e9 - 1.05e9, rel=1e-3)
    assert SHAPES["7b"].parameters == pytest.approx(7.616e9 - 0.545e9, rel=1e-3)
    assert SHAPES["8b"].kv_values * 2 == 131_072  # bytes of a token


@pytest.mark.parametrize("name", CARDS)
def test_cards_are_those_of_the_benchs_own_table(name: str) -> None:
    ours, theirs = CARDS[name], ACCELERATORS[name.upper()]
    assert (ours.memory_bytes, ours.bytes_per_s) == (theirs.memory_bytes, theirs.bandwidth)
    assert ours.flop_per_s == theirs.flops["bf16"]
    assert ours.source == theirs.source


def test_a_shape_stands_on_as_few_cards_as_hold_it() -> None:
    assert fewest_cards(SHAPES["8b"], CARDS["l4"]) == 1
    assert fewest_cards(SHAPES["32b"], CARDS["l4"]) is None  # cards without a link are not put together
    assert fewest_cards(SHAPES["70b"], CARDS["h100"]) == 2
    assert {"70b-tp2-h100", "8b-h100", "1b-l4"} <= PROFILES.keys()
    assert not any(name.startswith("32b") and name.endswith("l4") for name in PROFILES)


def test_a_token_alone_takes_overhead_and_one_reading_of_the_weights() -> None:
    seconds = costs_of("sim:8b-h100").step_s(Load(1, 1, 1))
    assert seconds == pytest.approx(1.5e-3 + 2 * 7.504e9 / (0.75 * 3350e9), rel=1e-3)


def test_options_change_what_they_name() -> None:
    plain = costs_of("sim:8b-h100")
    assert costs_of("sim:8b-w8-h100") == plain._replace(weights_s=plain.weights_s / 2)
    assert costs_of("sim:8b-w4-h100") == plain._replace(weights_s=plain.weights_s / 4)
    assert costs_of("sim:8b-kv8-h100") == plain._replace(context_s=plain.context_s / 2)
    two = costs_of("sim:8b-tp2-h100")
    assert two.weights_s == pytest.approx(plain.weights_s / 2)
    assert two.token_s == pytest.approx(plain.token_s / 2)
    assert two.overhead_s == pytest.approx(plain.overhead_s + 2 * 32 * cost_model.ALL_REDUCE_S)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_applies_to_every_shape(shape: str, option: str) -> None:
    assert all(math.isfinite(value) and value >= 0 for value in costs_of(f"sim:{shape}-{option}-h200"))


@pytest.mark.parametrize("name", ["8b", "9b-h100", "8b-h900", "8b-tp3-h100", "8b-w8", "", "-", "h100-8b"])
def test_an_unknown_name_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=rf"model is 'sim:{name}'; would be right: sim:fast.*70b.*h200.*kv8"):
        costs_of(f"sim:{name}")


def test_cards_without_a_link_are_not_put_together() -> None:
    with pytest.raises(ValueError, match="l4 has no NVLink; would be right: one card, or one of a100, h100, h200"):
        costs_of("sim:8b-tp2-l4")


# ---- profiles from files


def test_a_profile_is_read_from_a_file_and_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(COSTS | {"jitter": 0.1, "about": {"fitted_from": "steps.jsonl"}}))
    model = CostModel(f"sim:{path}")
    assert (model.name, model.costs) == ("sim:mine", Costs(**COSTS, jitter=0.1))
    path.write_text(json.dumps(COSTS))
    assert costs_of(f"sim:{path}").jitter == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "found a list; would be right: an object of overhead_s"),
        ("{}", "has no key; would be right: overhead_s, weights_s"),
        (json.dumps(COSTS | {"kv_bytes": 1}), "kv_bytes.*would be right: overhead_s"),
        (json.dumps({k: v for k, v in COSTS.items() if k != "pair_s"}), "would be right: .*pair_s"),
        (json.dumps(COSTS | {"pair_s": -1}), "pair_s is -1; would be right: a number, 0 or more"),
        (json.dumps(COSTS | {"pair_s": True}), "pair_s is True"),
        (json.dumps(COSTS | {"pair_s": "1"}), "pair_s is '1'"),
        (json.dumps(COSTS | {"pair_s": math.nan}), "pair_s is nan"),
        (json.dumps(COSTS | {"pair_s": math.inf}), "pair_s is inf"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"p\.json: .*{said}"):
        costs_of(f"sim:{path}")


def test_a_file_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(OSError, match=r"nowhere\.json"):
        costs_of("sim:nowhere.json")


# ---- jitter


def steps_s(model: str, seed: int, n: int = 2000) -> np.ndarray:
    clock = Clock()
    runner = CostModel(model, seed, clock.now_ns, clock.sleep)
    ends = [clock.ns]
    for _ in range(n):
        runner.execute([(sequence(100, 99), 1)])
        ends.append(clock.ns)
    return np.diff(ends) / 1e9


def test_jitter_is_lognormal_of_mean_1_and_has_its_seed() -> None:
    seconds = steps_s("sim:8b-h100", 3)
    assert np.array_equal(seconds, steps_s("sim:8b-h100", 3))
    assert not np.array_equal(seconds, steps_s("sim:8b-h100", 4))
    ratio = seconds / costs_of("sim:8b-h100").step_s(Load(1, 100, 100))
    assert ratio.mean() == pytest.approx(1, abs=4 * cost_model.JITTER / math.sqrt(2000))
    assert np.log(ratio).std() == pytest.approx(cost_model.JITTER, rel=0.1)


@pytest.mark.parametrize("name", ["fast", "null"])
def test_known_times_have_no_jitter(name: str) -> None:
    assert PROFILES[name].jitter == 0


# ---- clocks


def at(*wakes_late_ns: int) -> tuple[list[int], list[int]]:
    """Ends of steps of 1 ms that serve one sequence, where the n-th sleep is so late: (they were, real moments)."""
    now, late, ends = [10**9], list(wakes_late_ns), []
    model = CostModel(
        "sim:fast", 0, lambda: now[0], lambda s: now.__setitem__(0, now[0] + round(s * 1e9) + late.pop(0))
    )
    for _ in wakes_late_ns:
        model.execute([(sequence(5, 4), 1)])
        ends.append(now[0] - 10**9)
    return ends, now


def test_a_late_wake_up_does_not_add_up() -> None:
    assert at(0, 700_000, 0, 0)[0] == [10**6, 2_700_000, 3 * 10**6, 4 * 10**6]


def test_a_machine_that_stood_still_is_not_made_up_for() -> None:
    ends, _ = at(100_000_000, *[0] * 25)
    assert ends[0] == 101_000_000
    assert ends[-1] == 101_000_000 - cost_model.CATCH_UP_NS + 25 * 10**6


def test_who_comes_to_an_idle_machine_waits_for_a_whole_step() -> None:
    now = [10**9]
    model = CostModel("sim:fast", 0, lambda: now[0], lambda s: now.__setitem__(0, now[0] + round(s * 1e9)))
    model.execute([(sequence(5, 4), 1)])
    now[0] += 400_000  # idle for less than the overhead
    other = sequence(5, 4)
    other.id = 1
    model.execute([(other, 1)])
    assert now[0] == 10**9 + 2_400_000


def test_real_time_is_the_machines_own_clock() -> None:
    assert cost_model.clock(1.0) == (time.monotonic_ns, time.sleep)


def test_a_scaled_clock_runs_faster_and_sleeps_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    real_ns, slept = 10**15 + 7, []
    monkeypatch.setattr(time, "monotonic_ns", lambda: real_ns)
    monkeypatch.setattr(time, "sleep", slept.append)
    now_ns, sleep = cost_model.clock(0.1)
    before = now_ns()
    real_ns += 1_000
    assert now_ns() - before == 10_000  # to the nanosecond, however long the machine has been up
    sleep(2.0)
    assert slept == [pytest.approx(0.2)]


def test_a_model_in_scaled_time_takes_a_tenth_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real_ns = [10**9]
    monkeypatch.setattr(time, "monotonic_ns", lambda: real_ns[0])
    monkeypatch.setattr(time, "sleep", lambda s: real_ns.__setitem__(0, real_ns[0] + math.ceil(s * 1e9)))
    runner, _ = cost_model.load(EngineConfig(model="sim:fast", time_scale=0.1))
    for _ in range(20):
        runner.execute([(sequence(5, 4), 1)])
    assert real_ns[0] - 10**9 == pytest.approx(20 * 100_000, abs=20)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"time_scale": 0.0}, "time_scale is 0.0; would be right: 0.001 to 1000"),
        ({"time_scale": math.nan}, "time_scale is nan"),
        ({"model": "tiny", "time_scale": 0.5}, "the model 'tiny'; would be right: sim:NAME"),
    ],
)
def test_a_scale_that_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EngineConfig(**{"model": "sim:fast"} | fields)


def test_the_virtual_clock_gives_the_models_own_seconds() -> None:
    """A lone request of 300 tokens in and 5 out: one step for the prompt, one for each token after the first."""
    profile = PROFILES["110m-cpu"]  # without jitter
    simulation = Simulation(EngineConfig(model="sim:110m-cpu"))
    (request,) = simulation.run([Arrival(0.0, [0] * 300, 5)])
    prefill = profile.costs.step_s(Load(300, 300, 300 * 301 / 2))
    decode = sum(profile.costs.step_s(Load(1, length, length)) for length in range(301, 305))
    assert (request.first_token_ns - request.arrived_ns) / 1e9 == pytest.approx(prefill, abs=2e-9)
    assert (request.finished_ns - request.first_token_ns) / 1e9 == pytest.approx(decode, abs=10e-9)
