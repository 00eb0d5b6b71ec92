"""Tokens from logits: the kernel's rule against a sort in float64 and against the engine's sampler."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tests.dense_kernels import Mutation, assert_caught, guarded, needs_triton, only_read, random
from tests.dense_kernels import few_programs as few_programs

# isort: split
from kernels import reference_dense, sampling
from reference_engine import sampler

pytestmark = [pytest.mark.engine, needs_triton]
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 9, "top_p": 0.6, "min_p": 0.01, "temperature": 1.7},
]


def asked(rows: int, **changes: Any) -> sampling.Settings:
    """Every row asks for the same; seeds and positions differ."""
    wanted = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    values = [
        torch.full((rows,), wanted[n], dtype=d)
        for n, d in zip(sampling.Settings._fields[:4], sampling.TYPES[:4], strict=True)
    ]
    return sampling.Settings(*values, torch.arange(rows) * 2**33 - 3, torch.arange(rows) * 7)


def uniforms(count: int) -> torch.Tensor:
    """From 0 nearly to 1: beyond 1 - 1e-6 float32's rounding decides between the last tokens."""
    return torch.linspace(0.0, 0.9999, count, dtype=torch.float64)


def right(logits: torch.Tensor, us: torch.Tensor, **changes: Any) -> list[int]:
    wanted = {"temperature": 1.0} | changes
    return [reference_dense.draw(row, float(u), **wanted) for row, u in zip(logits.float().numpy(), us, strict=True)]


def rows(count: int, vocabulary: int = 100) -> torch.Tensor:
    """One row of logits, many times: equal ones among its greatest and within, zeros of both signs, some masked."""
    logits = 3 * random(1, vocabulary, seed=5)
    logits[0, [3, 70, 71, 90]] = logits.max()
    logits[0, [10, 50, 51]] = 2.5
    logits[0, [20, 21]] = torch.tensor([0.0, -0.0])
    logits[0, [30, 99]] = float("-inf")
    return logits.repeat(count, 1)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks to a row, the last not full; few passes, which is what the interpreter's time goes by."""
    monkeypatch.setattr(sampling, "BLOCK", 64)
    monkeypatch.setattr(sampling, "WAYS", 256)


def check(module: ModuleType, us: torch.Tensor | int = 3, **changes: Any) -> None:
    """`us`: what to draw at, or how many of them."""
    module.BLOCK, module.WAYS = sampling.BLOCK, sampling.WAYS  # type: ignore[attr-defined]  # of a broken copy too
    us = uniforms(us) if isinstance(us, int) else us.double()
    count = len(us)
    logits, settings = guarded(rows(count)), asked(count, **changes)
    tokens = guarded(torch.full((1, count), -1))
    with only_read(logits.view, *settings, us):
        found = module.sample(logits.view, settings, us, tokens.view[0])
    assert found.tolist() == right(logits.view, us, **changes)
    tokens.assert_whole()


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_a_draw_is_the_one_that_a_sort_would_give(changes: dict[str, Any]) -> None:
    check(sampling, 6, **changes)


def test_a_search_of_few_ways_ends_where_one_of_many_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WAYS", 8)
    check(sampling, **FILTERS[-1])


@pytest.mark.parametrize("changes", FILTERS, ids=str)
def test_the_greatest_u_draws_what_is_kept(changes: dict[str, Any]) -> None:
    logits, wanted = rows(1), {"temperature": 1.0} | changes
    token = sampling.sample(logits, asked(1, **changes), torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item()
    assert reference_dense.kept(logits[0].numpy(), **wanted)[token] > 0


@pytest.mark.parametrize("filters", ["", "top_k", "top_p", "min_p", "top_k top_p min_p"])
@examples(max_examples=6, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32) | st.just(float("-inf")) | st.just(1.5), min_size=1, max_size=90),
    temperature=st.floats(0.05, 50),
    top_k=st.integers(1, 12),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_never_far_from_where_it_belongs(
    filters: str, logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, u: float
) -> None:
    """Within float32's rounding of u and of the filters: one of the tokens drawn from as far as 1e-5 to either side."""
    top_k, top_p, min_p = (
        drawn if name in filters else none
        for name, drawn, none in (("top_k", top_k, 0), ("top_p", top_p, 1.0), ("min_p", min_p, 0.0))
    )
    logits.append(0.0)
    one = torch.tensor([logits])
    settings = asked(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = sampling.sample(one, settings, torch.tensor([u], dtype=torch.float64)).item()
    nearby = {
        reference_dense.draw(one[0].numpy(), min(max(u + du, 0), 1 - 2.0**-53), temperature, top_k, p, m)
        for du in (-1e-5, 0, 1e-5)
        for p in ({1.0} if top_p == 1 else {top_p, min(top_p * (1 + 1e-5), 1 - 1e-12), top_p * (1 - 1e-5)})
        for m in ({0.0} if min_p == 0 else {min_p, min(min_p * (1 + 1e-5), 1.0), min_p * (1 - 1e-5)})
    }
    assert token in nearby or logits[token] in {logits[t] for t in nearby}


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.8, "temperature": 0.7}], ids=str)
def test_a_draw_is_the_engines(changes: dict[str, Any]) -> None:
    """sampler.draw is the CPU engine's: the same token for the same u."""
    logits, us = rows(7), uniforms(7)
    wanted = {"temperature": 1.0, "top_p": 1.0} | changes
    engine = [sampler.draw(row, u=float(u), **wanted) for row, u in zip(logits.numpy(), us, strict=True)]
    assert sampling.sample(logits, asked(7, **changes), us).tolist() == engine


@pytest.mark.parametrize("changes", [{}, {"top_k": 6, "top_p": 0.9}], ids=str)
def test_frequencies_are_probabilities(changes: dict[str, Any]) -> None:
    """A grid of u inverts the distribution: the reference's own frequencies are the softmax to a step of the grid."""
    row, n = rows(1)[0, :40].numpy(), 4000
    weights = reference_dense.kept(row, 1.0, **changes)
    drawn = [reference_dense.draw(row, (i + 0.5) / n, 1.0, **changes) for i in range(n)]
    assert np.abs(np.bincount(drawn, minlength=40) / n - weights / weights.sum()).max() < 1.5 / n


def test_temperature_0_is_the_argmax_and_the_lowest_id_among_equals() -> None:
    check(sampling, temperature=0.0)
    assert sampling.sample(rows(1), asked(1, temperature=0.0)).tolist() == [3]


def test_as_temperature_falls_the_draw_becomes_the_argmax() -> None:
    logits = random(4, 150)
    for temperature in (1e-6, 1e-30):
        assert sampling.sample(logits, asked(4, temperature=temperature)).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, FILTERS[-1]], ids=str)
def test_a_row_of_no_numbers_ends_with_some_id_and_harms_no_other(changes: dict[str, Any]) -> None:
    """The engine looks for such rows itself; the kernel must come to an end."""
    logits, us = rows(5), torch.full((5,), 0.4, dtype=torch.float64)
    logits[0, 17] = float("nan")
    logits[1] = float("nan")
    logits[1, ::50] = float("-inf")  # a block of nothing but NaN is a warning of the interpreter's
    logits[2, 40] = float("inf")
    logits[3] = float("-inf")
    found = sampling.sample(logits, asked(5, **changes), us)
    assert all(0 <= token < 100 for token in found.tolist())
    assert found[4] == right(logits[4:], us[4:], **changes)[0]


def test_without_uniforms_seed_and_position_decide_and_nothing_else() -> None:
    logits, settings = rows(4), asked(4)
    us = torch.tensor(
        [reference_dense.uniform(int(s), int(p)) for s, p in zip(settings.seed, settings.position, strict=True)]
    )
    together = sampling.sample(logits, settings).tolist()
    assert together == right(logits, us)
    backwards = sampling.sample(logits, sampling.Settings(*(s.flip(0) for s in settings)))
    assert backwards.tolist() == together[::-1]
    assert sampling.sample(logits[2:3], sampling.Settings(*(s[2:3] for s in settings))).tolist() == together[2:3]


def test_philox_is_the_published_one() -> None:
    """The known answers of Random123: key and counter 0, and all ones."""
    assert reference_dense.uniform(0, 0) == (0x6627E8D5E169C58D >> 11) * 2.0**-53
    draws = np.sort([reference_dense.uniform(seed, k) for seed in (0, -1, 2**40) for k in range(1000)])
    assert len(np.unique(draws)) == len(draws)
    assert np.abs(draws - (np.arange(3000) + 0.5) / 3000).max() < 1.95 / 3000**0.5  # Kolmogorov: once in a thousand


def test_rows_of_one_batch_may_ask_for_different_things() -> None:
    wanted = [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {}]
    logits, us = rows(4), torch.tensor([0.1, 0.9, 0.9, 0.7], dtype=torch.float64)
    each = [asked(1, **w) for w in wanted]
    together = sampling.Settings(*(torch.cat(parts) for parts in zip(*each, strict=True)))
    alone = [right(logits[:1], us[i : i + 1], **w)[0] for i, w in enumerate(wanted)]
    assert sampling.sample(logits, together, us).tolist() == alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_widened(dtype: torch.dtype) -> None:
    logits, us = rows(4).to(dtype), uniforms(4)
    assert sampling.sample(logits, asked(4, top_p=0.9), us).tolist() == right(logits, us, top_p=0.9)


def test_an_empty_batch_launches_nothing() -> None:
    assert sampling.sample(torch.empty(0, 50), asked(0)).tolist() == []


def test_what_the_kernel_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logits is \[3, 0\]"):
        sampling.sample(torch.empty(3, 0), asked(3))
    with pytest.raises(ValueError, match=r"temperature is \[2\].*\[3\]"):
        sampling.sample(torch.empty(3, 9), asked(2))
    with pytest.raises(ValueError, match=r"top_p is float32.*float64"):
        sampling.sample(torch.empty(3, 9), asked(3)._replace(top_p=torch.ones(3)))
    with pytest.raises(ValueError, match=r"uniforms is float32.*float64"):
        sampling.sample(torch.empty(3, 9), asked(3), torch.ones(3))
    with pytest.raises(ValueError, match=r"out is int32.*int64"):
        sampling.sample(torch.empty(3, 9), asked(3), out=torch.zeros(3, dtype=torch.int32))


def check_seeded(module: ModuleType) -> None:
    """Eight tokens of nearly equal logits: every bit of u counts."""
    settings = asked(8)
    us = torch.tensor(
        [reference_dense.uniform(int(s), int(p)) for s, p in zip(settings.seed, settings.position, strict=True)]
    )
    logits = random(8, 300, seed=1) / 10
    assert module.sample(logits, settings).tolist() == right(logits, us)


def check_top_k(module: ModuleType) -> None:
    """The four greatest are equal: of these two, in the first block, or one more."""
    check(module, top_k=2)
    check(module, top_k=7)


def check_ties(module: ModuleType) -> None:
    """Draws of each of the three equal logits in the midst, one of which is in the second block; some are below 0."""
    flat = {"temperature": 50.0, "top_k": 95}
    logits = rows(1)
    logits[0, [80]] = 2.5
    us = torch.linspace(0, 1, 500, dtype=torch.float64)[:-1]
    drawn = dict(zip(right(logits.repeat(len(us), 1), us, **flat), us.tolist(), strict=True))
    least = right(logits, torch.tensor([0.9999]), **flat)[0]
    assert logits[0, least] < 0
    chosen = torch.tensor([drawn[token] for token in (10, 51, 80, least)], dtype=torch.float64)
    module.BLOCK, module.WAYS = sampling.BLOCK, sampling.WAYS  # type: ignore[attr-defined]
    assert module.sample(logits.repeat(4, 1), asked(4, **flat), chosen).tolist() == [10, 51, 80, least]


def check_top_p(module: ModuleType) -> None:
    """The nucleus ends within the four equal ones, or by one token after them."""
    check(module, torch.tensor([0.9]), top_p=0.3)
    check(module, torch.tensor([0.9]), top_p=0.75)


def check_nucleus_within_ties(module: ModuleType) -> None:
    """Twenty-five tokens of 0.528 in all, then three equal ones of 0.0116 each: the nucleus ends with the second."""
    end = 0.52836 + 2 * 0.0116
    check(
        module, torch.tensor([0.1, 0.5, 0.52836 / end - 1e-3, 0.534 / end, 0.546 / end]), top_p=0.545, temperature=5.0
    )


def check_draw_within_ties(module: ModuleType) -> None:
    """Each of the same three."""
    end = 0.52836 + 3 * 0.0116
    check(module, torch.tensor([0.534, 0.546, 0.5575]) / end, top_p=0.56, temperature=5.0)


def check_plain(module: ModuleType) -> None:
    check(module)


def check_greedy(module: ModuleType) -> None:
    check(module, 2, temperature=0.0)


def check_min_p(module: ModuleType) -> None:
    check(module, torch.tensor([0.9999]), min_p=0.2)


def check_min_p_warm(module: ModuleType) -> None:
    """The floor is of probabilities after the temperature."""
    check(module, torch.tensor([0.9999]), min_p=0.2, temperature=2.0)


def check_min_p_1(module: ModuleType) -> None:
    check(module, torch.tensor([0.9999]), min_p=1.0)


def check_at_0(module: ModuleType) -> None:
    """u = 0 is the first possible token, and no masked one before it."""
    logits = torch.tensor([[float("-inf"), 1.0, 2.0]])
    assert module.sample(logits, asked(1), torch.zeros(1, dtype=torch.float64)).tolist() == [1]


def check_zeros(module: ModuleType) -> None:
    """-0 and 0 are equal: the lower id comes first, whichever it is."""
    logits = torch.tensor([[-0.0, 0.0, -0.0, -9.0]])
    us = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert module.sample(logits.repeat(3, 1), asked(3, top_k=3), us).tolist() == [0, 1, 2]


def check_below_0(module: ModuleType) -> None:
    """The greatest of negative logits: nothing that stands in for one may be greater."""
    logits = guarded(-1 - random(2, 100, seed=3).abs())
    found = module.sample(logits.view, asked(2, temperature=0.0))
    assert found.tolist() == logits.view.argmax(-1).tolist()


def check_hot(module: ModuleType) -> None:
    """At a temperature at which all logits are equal, a masked one is still none."""
    logits = torch.tensor([[float("-inf"), 1.0, 2.0, float("-inf")]])
    us = torch.tensor([0.1, 0.9], dtype=torch.float64)
    for more in ({}, {"top_k": 3}):
        found = module.sample(logits.repeat(2, 1), asked(2, temperature=1e12, **more), us)
        assert found.tolist() == ([1, 2] if not more else [2, 1])


def check_cold(module: ModuleType) -> None:
    """Temperatures below what is usual are meant as well; one that float32 has not is the argmax."""
    logits, us = torch.tensor([[0.0, -0.002]]), torch.tensor([0.6], dtype=torch.float64)
    assert module.sample(logits, asked(1, temperature=0.003), us).tolist() == [0]
    assert module.sample(logits, asked(1, temperature=1e-300), us).tolist() == [0]
    assert module.sample(logits, asked(1, temperature=0.05), us).tolist() == [1]


def check_adjacent(module: ModuleType) -> None:
    """Floats next to each other below 0, each of its own weight at a temperature of one step: 1, and twice 1/e."""
    logits = torch.tensor([[-1.0, -1 + 2.0**-24, -1.0]])
    us = torch.tensor([0.55, 0.7, 0.9], dtype=torch.float64)
    for top_k, tokens in ((3, [1, 0, 2]), (2, [1, 1, 0]), (1, [1, 1, 1])):
        asks = {"temperature": 2.0**-24, "top_k": top_k}
        assert right(logits.repeat(3, 1), us, **asks) == tokens
        assert module.sample(logits.repeat(3, 1), asked(3, **asks), us).tolist() == tokens


def check_tail(module: ModuleType) -> None:
    """A block of weights 1 and one of a millionth: what float32's sums of both would lose decides."""
    module.BLOCK, module.WAYS = sampling.BLOCK, sampling.WAYS  # type: ignore[attr-defined]
    logits = torch.zeros(1, 100)
    logits[0, 64:] = float(np.log(1e-6))
    us = torch.tensor([0.4, 18.3, 30.6], dtype=torch.float64) * 1e-6
    us = (64 + us) / (64 + 36e-6)
    for more in ({}, {"top_k": 99}, {"min_p": 1e-7}):
        assert module.sample(logits.repeat(3, 1), asked(3, **more), us).tolist() == right(
            logits.repeat(3, 1), us, **more
        )


def check_three_blocks(module: ModuleType) -> None:
    """Of equal tokens one in each block: what stands before the third is the sum of two."""
    module.BLOCK, module.WAYS = sampling.BLOCK, sampling.WAYS  # type: ignore[attr-defined]
    us = torch.tensor([20.5, 75.5, 140.5], dtype=torch.float64) / 150
    for more in ({}, {"min_p": 0.5}):
        assert module.sample(torch.zeros(3, 150), asked(3, **more), us).tolist() == [20, 75, 140]


def check_end(module: ModuleType) -> None:
    """Where a row's two sums differ by their rounding, which a u of 1 stands for: the last token that can be."""
    logits = -1 - random(2, 50, seed=9).abs()
    logits[:, 45:] = float("-inf")
    assert module.sample(logits, asked(2), torch.ones(2, dtype=torch.float64)).tolist() == [44, 44]


def check_bits(module: ModuleType) -> None:
    """Of 4,000 equal tokens the one at u · 4,000 = 2670.99996: in 24 bits it would be the next."""
    settings = asked(1)._replace(seed=torch.tensor([4351]), position=torch.tensor([1]))
    assert reference_dense.uniform(4351, 1) * 4000 < 2671 <= float(np.float32(reference_dense.uniform(4351, 1))) * 4000
    module.BLOCK = 2048  # type: ignore[attr-defined]
    assert module.sample(torch.zeros(1, 4000), settings).tolist() == [2670]


LOAD = 'mask=ids < vocabulary, other=float("-inf")).to(tl.float32)\n        '  # four times, by what comes after it
BEYOND = LOAD.replace("<", "<=")
MUTATIONS = [
    Mutation(LOAD + "greatest", BEYOND + "greatest", check_greedy),
    Mutation(
        LOAD + "weights = _weigh(values, highest, inverse, floor)",
        BEYOND + "weights = _weigh(values, highest, inverse, floor)",
        check_plain,
    ),
    Mutation(LOAD + "equal", BEYOND + "equal", check_ties),
    Mutation(
        LOAD + "weights = _weigh(values, highest, inverse, 0",
        BEYOND + "weights = _weigh(values, highest, inverse, 0",
        check_plain,
    ),
    Mutation(
        "first = tl.min(tl.where(values == greatest, ids,",
        "first = tl.max(tl.where(values == greatest, ids,",
        check_greedy,
    ),
    Mutation("tl.where(greatest > highest, first,", "tl.where(greatest >= highest, first,", check_greedy),
    Mutation(
        'highest = tl.full([], float("-inf"), tl.float32)', "highest = tl.full([], 0.0, tl.float32)", check_below_0
    ),
    Mutation(
        LOAD + "greatest",
        LOAD.replace('float("-inf")', "0.0") + "greatest",
        check_below_0,
    ),
    Mutation("(bits >> 11).to(tl.float64)", "(bits >> 11).to(tl.float32)", check_bits),
    Mutation("tl.maximum(temperature, 1e-20)", "tl.maximum(temperature, 1e-2)", check_cold),
    Mutation("tl.maximum(temperature, 1e-20)", "temperature", check_cold),
    Mutation('(values > float("-inf")) &', "(values == values) &", check_hot),
    Mutation("tl.where(bits < 0, bits ^ 0x7FFFFFFF,", "tl.where(bits < 0, bits ^ 0x7FFFFFFE,", check_adjacent),
    Mutation("tl.where(key < 0, key ^ 0x7FFFFFFF,", "tl.where(key < 0, key ^ 0x7FFFFFFE,", check_adjacent),
    Mutation("return sums\n", "return sums.to(tl.float32)\n", check_tail),
    Mutation("found = before + sums.to(tl.float64) >", "found = before.to(tl.float32) + sums >", check_tail),
    Mutation("(first.to(tl.uint64) << 32) | second", "(second.to(tl.uint64) << 32) | first", check_seeded),
    Mutation("tl.load(seeds + number)", "tl.load(seeds)", check_seeded),
    Mutation(
        "    tl.store(out + number, token.to(tl.int64))",
        "    tl.store(out + number, token.to(tl.int64))\n    tl.store(positions + number, number)",
        check_plain,
    ),
    Mutation("tl.load(positions + number)", "tl.load(positions)", check_seeded),
    Mutation("u = tl.load(uniforms + number)", "u = tl.load(uniforms)", check_plain),
    Mutation("row = logits + number * stride", "row = logits + number * vocabulary", check_plain),
    Mutation("(1.0 / tl.maximum(temperature, 1e-20))", "tl.maximum(temperature, 1e-20)", check_ties),
    Mutation("& (weights >= floor)", "& (weights > floor)", check_min_p_1),
    Mutation("floor = min_p.to(tl.float32)", "floor = min_p.to(tl.float32) * 0", check_min_p),
    Mutation("floor = min_p.to(tl.float32)", "floor = min_p.to(tl.float32) * inverse", check_min_p_warm),
    Mutation("tl.where(values == 0, 0.0, values).to", "values.to", check_zeros),
    Mutation("tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)", "bits", check_ties),
    Mutation("tl.where(key < 0, key ^ 0x7FFFFFFF, key)", "key", check_ties),
    Mutation("top_k < count", "top_k < 0", check_top_k),
    Mutation("(top_k.to(tl.float64) - beyond) * each", "each", check_top_k),
    Mutation("tl.minimum(low + 1, 2147483647)", "low", check_top_k),
    Mutation("tl.minimum(low + 1, 2147483647)", "low + 2", check_adjacent),
    Mutation("target = top_p * kept", "target = top_p", check_top_p),
    Mutation("tl.ceil((target - above) / each)", "tl.floor((target - above) / each)", check_top_p),
    Mutation("high, target, False, False, BLOCK", "high, target, True, False, BLOCK", check_nucleus_within_ties),
    Mutation("tl.ceil((target - above) / each)", "tl.ceil((target + above) / each)", check_nucleus_within_ties),
    Mutation("tl.ceil((target - above) / each)", "tl.ceil((target - above) * each)", check_nucleus_within_ties),
    Mutation("tl.floor((target - above) / each)", "tl.floor((target - above) * each)", check_draw_within_ties),
    Mutation("target, False, True, BLOCK, WAYS)", "target * 0, False, True, BLOCK, WAYS)", check_ties),
    Mutation("(target - above) / each), 0.0)", "target / each), 0.0)", check_ties),
    Mutation("ranks = seen + tl.cumsum", "ranks = tl.cumsum", check_ties),
    Mutation(
        LOAD + "weights = _weigh(values, highest, inverse, 0",
        LOAD.replace('float("-inf")', "0.0") + "weights = _weigh(values, highest, inverse, 0",
        check_end,
    ),
    Mutation("token < 0, last, token", "token < 0, vocabulary, token", check_end),
    Mutation("last = tl.maximum(last, tl.max(", "last = tl.minimum(last, tl.max(", check_end),
    Mutation("last = tl.maximum(last, tl.max(", "last = tl.maximum(last, tl.min(", check_end),
    Mutation("tl.where(weights > 0, ids, 0)", "tl.where(weights >= 0, ids, 0)", check_end),
    Mutation("seen += tl.sum", "seen = tl.sum", check_three_blocks),
    Mutation("before += tl.max(sums", "before = tl.max(sums", check_three_blocks),
    Mutation("sums += tl.sum(", "sums = tl.sum(", check_three_blocks),
    Mutation("(ranks <= rank)", "(ranks < rank)", check_ties),
    Mutation("before += tl.max(sums, 0).to(tl.float64)", "before = 0 * before", check_plain),
    Mutation("before + sums.to(tl.float64) > target", "before + sums.to(tl.float64) >= target", check_at_0),
]


@pytest.mark.parametrize("passes", sorted({m.check for m in MUTATIONS}, key=lambda c: c.__name__))
def test_the_kernel_as_it_is_passes(passes: Any) -> None:
    passes(sampling)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.new)
def test_a_broken_kernel_fails(mutation: Mutation, tmp_path: Path) -> None:
    assert_caught(sampling, mutation, tmp_path)
