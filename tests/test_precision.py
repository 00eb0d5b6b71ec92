"""Eight bits in weights, activations and the KV cache: how far from float32, and the same tokens in any company."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine import attention, linear, quant, weights
from reference_engine.config import EngineConfig
from reference_engine.families import Shape
from reference_engine.runner import ModelRunner
from reference_engine.scheduler import Scheduler
from tests.engine_models import drive, family, logits_at, outputs, prompts, runner, save, sequence
from tests.native_builds import KERNELS, needs_compiler

pytestmark = pytest.mark.engine

MODES = [("none", "auto"), ("none", "int8"), ("int8-weights", "auto"), ("int8", "auto"), ("int8", "int8")]
# Nothing a multiple of 16, and hardly anything of 8.
ODD = Shape(264, 70, 102, 2, 3, 1, 80, 1e-5, 10_000.0, 512, tied=False)
TIED = Shape(264, 72, 96, 2, 4, 2, 18, 1e-5, 10_000.0, 512, tied=True)
WINDOWED = Shape(264, 64, 96, 3, 4, 2, 64, 1e-5, 1e4, 512, False, window=9, windowed=frozenset({1}), qk_norm=True)
SHAPES = {"odd": ODD, "tied": TIED, "windowed": WINDOWED}


def model_of(shape: Shape, kernels: str, quantization: str, kv: str, **knobs: Any) -> ModelRunner:
    made = weights.tiny(3, shape=shape)
    if shape.qk_norm:
        norm = torch.linspace(0.5, 1.5, shape.head_dim)
        layers = tuple(layer._replace(q_norm=norm, k_norm=norm.flip(0)) for layer in made.layers)
        made = weights.Weights(shape, made.embedding, layers, made.norm, made.head)
    precision = {"cpu_kernels": kernels, "quantization": quantization, "kv_cache_dtype": kv}
    return runner(made, **precision, **knobs)


def answers(engine: ModelRunner, asked: list[list[int]], **how: Any) -> list[list[int]]:
    together = [sequence(p, i) for i, p in enumerate(asked)]
    drive(engine, together, **how)
    return outputs(together)


@given(
    st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.integers(0, 4),
)
@settings(deadline=None)
def test_rows_of_integers_are_within_half_a_step_and_of_their_row_alone(values: list[list[float]], row: int) -> None:
    x = torch.tensor(values)
    integers, scales = quant.rows(x)
    assert integers.abs().max() <= quant.LEVELS
    assert ((integers.double() * scales - x).abs() <= scales.double() * 0.5001 + 1e-40).all()
    row %= len(x)
    alone, scale = quant.rows(x[row])
    assert torch.equal(alone, integers[row])
    assert torch.equal(scale, scales[row])


def test_a_product_of_int8_is_exact_up_to_its_scales() -> None:
    x, weight = torch.randn(5, 2500), torch.randn(7, 2500)  # three parts of at most EXACT inputs
    (left, rows), (right, columns) = quant.rows(x), quant.rows(weight)
    sums = left.long() @ right.long().T
    out = quant.product(x, right, columns[:, 0], None)
    assert torch.equal(out, sums.float() * (rows * columns[:, 0]))
    worst = torch.full((1, 2500), -127, dtype=torch.int8)
    assert (
        quant.product(torch.full((2, 2500), 127.0), worst, torch.ones(1), None).tolist() == [[-127.0 * 127 * 2500]] * 2
    )


FORMS = [pytest.param(form, marks=needs_compiler if form[1] == "native" else ()) for form in linear.FORMS]


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_every_form_of_a_matrix_is_near_the_float64_product(form: tuple[str, str]) -> None:
    torch.manual_seed(0)
    for rows, width, height, biased in ((1, 70, 33, True), (2, 33, 16, False), (4, 64, 48, True), (9, 17, 5, True)):
        weight, x = torch.randn(height, width), torch.randn(rows, width)
        bias = torch.randn(height) if biased else None
        matrix = linear.FORMS[form](weight, bias)
        right = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        worst = {"none": 1e-5, "int8-weights": 0.03 * width**0.5, "int8": 0.04 * width**0.5}[form[0]]
        assert (matrix.times(x) - right).abs().max() < worst
        least = height * width * {"none": 4, "int8-weights": 1, "int8": 1}[form[0]]
        assert least <= matrix.bytes() <= 1.2 * least + 64 * width + 8 * height  # panels are filled up to 16 outputs


@needs_compiler
@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_native_logits_have_the_same_bits_however_a_prompt_is_cut(shape: Shape, mode: tuple[str, str]) -> None:
    tokens = prompts(1, 264, seed=5)[0] + list(range(40, 71))
    engine = model_of(shape, "native", *mode)
    whole = logits_at(engine, tokens, 1)
    for chunk in (2, 7, 16, len(tokens)):
        assert torch.equal(logits_at(engine, tokens, chunk), whole[chunk - 1 :: chunk]), chunk


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_are_the_same_alone_batched_chunked_and_preempted(kernels: str, mode: tuple[str, str]) -> None:
    asked = prompts(12, 264)
    engine = model_of(ODD, kernels, *mode)
    alone = [answers(engine, [p])[0] for p in asked]
    for budget, every in ((10_000, 0), (1, 0), (7, 0), (16, 3), (64, 2)):
        assert answers(engine, asked, budget=budget, preempt_every=every) == alone, (budget, every)


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_cached_prefix_and_the_scheduler_change_no_token(kernels: str, mode: tuple[str, str]) -> None:
    shared = prompts(1, 264, seed=2)[0] + list(range(30))
    asked = [shared + p for p in prompts(6, 264, longest=9)] + [shared] * 2
    knobs = {"block_size": 4, "num_blocks": 60, "max_model_len": 200, "device": "cpu", "max_num_batched_tokens": 24}
    engine = model_of(TIED, kernels, *mode, **knobs)
    alone = [answers(model_of(TIED, kernels, *mode), [p])[0] for p in asked]
    scheduler = Scheduler(EngineConfig(**knobs), frozenset())
    sequences = [sequence(p, i) for i, p in enumerate(asked)]
    for s in sequences:
        scheduler.submit(s)
    while scheduler.busy:
        work = scheduler.step(24, 0)
        scheduler.commit(work, engine.execute(work), 0)
    assert outputs(sequences) == alone
    assert sum(s.cached for s in sequences) > 0


@needs_compiler
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_native_and_torch_say_the_same_in_each_precision(mode: tuple[str, str]) -> None:
    """A model of peaked choices: rounding that falls the other way once in a while turns none of them."""
    asked = prompts(8, 264)
    ours, theirs = (answers(model_of(WINDOWED, kernels, *mode), asked) for kernels in ("native", "torch"))
    assert ours == theirs


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("mode", "most"), list(zip(MODES[1:], (0.02, 0.04, 0.06, 0.06), strict=True)))
def test_what_eight_bits_cost_is_small_and_not_nothing(
    kernels: str, mode: tuple[str, str], most: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Relative to the logits' spread, on random weights."""
    read = weights.read(save(family("qwen3"), tmp_path_factory.mktemp("q")))
    tokens = prompts(1, seed=3)[0] + list(range(20))
    exact = logits_at(runner(read), tokens, 1)
    eight = logits_at(runner(read, cpu_kernels=kernels, quantization=mode[0], kv_cache_dtype=mode[1]), tokens, 1)
    apart = float((eight - exact).pow(2).mean().sqrt() / exact.std())
    assert 1e-4 < apart < most


def test_int8_takes_a_quarter_of_the_memory() -> None:
    plain, eight = (model_of(WINDOWED, "torch", *mode).facts() for mode in (MODES[0], MODES[-1]))
    assert eight["kv_bytes"] == int(plain["kv_bytes"]) * (1 / 4 + 1 / 64)  # a float32 scale for each 64 numbers
    embedding = 264 * 64 * 4
    assert 0.25 < (int(eight["weights_bytes"]) - embedding) / (int(plain["weights_bytes"]) - embedding) < 0.29
    assert (eight["quantization"], eight["kv_cache_dtype"]) == ("int8", "int8")
    assert eight["parameters"] == plain["parameters"]


@pytest.mark.parametrize("mode", MODES[1:], ids="-".join)
def test_eight_bits_go_with_bfloat16(mode: tuple[str, str]) -> None:
    made = weights.tiny(3, torch.bfloat16, ODD)
    engine = runner(made, quantization=mode[0], kv_cache_dtype=mode[1])
    assert all(len(answer) == 12 for answer in answers(engine, prompts(3, 264), budget=20))


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"quantization": "int4"}, "quantization 'int4': would be right: int8 or int8-weights or none"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8': would be right: auto or int8"),
        ({"cpu_kernels": "cuda"}, "cpu_kernels 'cuda': would be right: auto or native or torch"),
    ],
)
def test_an_unknown_precision_is_named_with_the_known_ones(knobs: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        runner(weights.tiny(0, shape=ODD), **knobs)
    assert attention.KV_DTYPES == ("auto", "int8")
