"""fit_cost: known costs are found again, errors are of steps that were not fitted, a bad log is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.cost_model import PROFILES, Costs, Load, costs_of, step_line
from reference_engine.fit_cost import LEAST_STEPS, fit, least_squares, main, predicted, read_steps


def steps(n: int, seed: int = 1) -> np.ndarray:
    """(n, 3) loads as a server has them: mostly decodes, now and then a prompt among them."""
    random = np.random.default_rng(seed)
    running = random.integers(1, 64, n)
    context = running * random.integers(50, 2000, n)
    prompt = np.where(random.random(n) < 0.3, random.integers(1, 2048, n), 0)
    return np.column_stack([running + prompt, context + prompt, context + prompt * (prompt + 1) / 2]).astype(float)


@pytest.mark.parametrize("name", ["8b-h100", "1b-l4", "70b-tp2-h100", "110m-cpu"])
def test_exact_steps_give_their_costs_back(name: str) -> None:
    true = PROFILES[name].costs
    loads = steps(400)
    found = fit(loads, predicted(true, loads))
    assert found.costs.token_s == pytest.approx(true.token_s, rel=0.02)
    assert found.costs.context_s == pytest.approx(true.context_s, rel=0.02)
    assert found.costs.pair_s == pytest.approx(true.pair_s, rel=0.05)
    assert found.costs.weights_s == pytest.approx(true.weights_s, rel=0.02)
    assert found.costs.overhead_s == pytest.approx(true.overhead_s, rel=0.05)
    assert found.error_p95 < 0.001


@pytest.mark.parametrize("jitter", [0.03, 0.3])
def test_noise_makes_no_bias_and_is_found_as_jitter(jitter: float) -> None:
    true = PROFILES["8b-h100"].costs
    loads = steps(3000)
    noise = np.random.default_rng(2).lognormal(-(jitter**2) / 2, jitter, len(loads))
    found = fit(loads, predicted(true, loads) * noise)
    assert found.costs.jitter == pytest.approx(jitter, rel=0.1)
    assert found.error_p50 == pytest.approx(0.6745 * jitter, rel=0.15)  # the median of |a normal deviate|
    whole = predicted(found.costs, loads).sum() / predicted(true, loads).sum()
    assert whole == pytest.approx(1, abs=0.02)  # squares of relative error by the seconds taken would give 0.83


def test_a_few_steps_that_were_held_up_change_little() -> None:
    true = PROFILES["8b-h100"].costs
    loads = steps(1000)
    seconds = predicted(true, loads)
    seconds[::40] *= 10
    found = fit(loads, seconds)
    assert predicted(found.costs, loads).sum() == pytest.approx(predicted(true, loads).sum(), rel=0.02)
    assert found.costs.jitter < 0.01


def test_a_step_of_known_time_is_all_overhead_and_that_is_said() -> None:
    loads = steps(100)
    found = fit(loads, np.full(100, 1e-3))
    assert found.costs == pytest.approx(Costs(1e-3, 0, 0, 0, 0, 0), abs=1e-9)
    assert len(found.notes) == 3
    assert "reading the weights, if it takes time, is in the overhead" in found.notes[0]


def test_what_never_varies_is_said() -> None:
    loads = np.column_stack([np.full(50, 8.0), np.arange(50) * 100.0, np.arange(50) * 100.0])
    notes = fit(loads, 5e-3 + loads[:, 1] * 1e-6).notes
    assert any("every step has 8 tokens" in note for note in notes)


@given(st.integers(0, 10**6), st.integers(1, 4))
@settings(max_examples=50)
def test_least_squares_keeps_to_what_cannot_be_improved(seed: int, columns: int) -> None:
    """Karush, Kuhn and Tucker: no gradient where a weight is free, none that pulls up where it is 0."""
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((30, columns)), random.standard_normal(30)
    w, squares = least_squares(x, y)
    gradient = x.T @ (y - x @ w)
    assert (w >= 0).all()
    assert squares == pytest.approx(float(((y - x @ w) ** 2).sum()), rel=1e-6)
    assert gradient[w > 0] == pytest.approx(0, abs=1e-6)
    assert (gradient[w == 0] <= 1e-6).all()


def test_a_log_becomes_a_profile_that_the_cost_model_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, profile = tmp_path / "steps.jsonl", tmp_path / "mine.json"
    true = PROFILES["8b-h100"].costs
    lines = [step_line(load, true.step_s(load)) for load in (Load(*map(int, row)) for row in steps(200).tolist())]
    log.write_bytes(b'{"tokens": 1, "context": 1, "pairs": 1, "seconds": 90}\n' + b"".join(lines))
    assert main([str(log), "-o", str(profile), "--skip", "1"]) == 0
    costs = costs_of(f"sim:{profile}")
    assert costs.step_s(Load(8, 4000, 4000)) == pytest.approx(true.step_s(Load(8, 4000, 4000)), rel=0.02)
    about = json.loads(profile.read_text())["about"]
    assert (about["fitted_from"], about["steps"]) == ("steps.jsonl", 200)
    said = capsys.readouterr().out
    assert said.startswith("200 steps. A step: ")
    assert "Error of a step that was not fitted: p50 0." in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x", "log:2: found 'x'; would be right: tokens, context, pairs, seconds"),
        ('{"tokens": 1}', "log:2: found"),
        ("[1, 2]", "log:2: found"),
        ('{"tokens": 1, "context": 1, "pairs": 1, "seconds": 0}', "log:2: .*seconds above 0"),
        ('{"tokens": NaN, "context": 1, "pairs": 1, "seconds": 1}', "log:2: .*numbers of 0 or more"),
        ('{"tokens": 1, "context": 1, "pairs": null, "seconds": 1}', "log:2: found"),
    ],
)
def test_a_line_that_is_no_step_is_named(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_steps(["", line], "log")


def test_too_few_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "steps.jsonl"
    log.write_bytes(step_line(Load(1, 1, 1), 1e-3) * (LEAST_STEPS - 1))
    assert main([str(log)]) == 2
    assert f"has {LEAST_STEPS - 1} steps; would be right: {LEAST_STEPS} or more" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
