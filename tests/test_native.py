"""Each native kernel against float64 and against its form in torch; bits that do not change with company."""

import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine import attention, batch, model, native, quant, weights
from reference_engine.batch import Pages
from reference_engine.families import Shape
from reference_engine.sequence import Sequence
from tests.engine_models import sequence
from tests.native_builds import BUILDS, built, needs_compiler

pytestmark = [pytest.mark.engine, needs_compiler]
EPS = 2.0**-24  # of a float32 operation
few = settings(max_examples=40, deadline=None)


@pytest.fixture(autouse=True, params=BUILDS, scope="module")
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs on each build."""
    patch = pytest.MonkeyPatch()
    patch.setattr(native, "library", lambda: built(request.param))
    native.set_threads(1)
    yield
    patch.undo()


def numbers(*size: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale


# Rows of each tile (1 to 12), beyond one (6 or 12), beyond a pass (96); inputs and outputs off 2, 8 and 16.
SIZES = [(1, 1, 1), (1, 768, 64), (2, 17, 15), (3, 9, 16), (4, 33, 48), (5, 64, 16), (6, 7, 17), (7, 80, 100),
         (8, 20, 33), (9, 5, 16), (10, 40, 31), (11, 3, 17), (12, 64, 16), (13, 72, 33), (96, 24, 16), (97, 31, 40),
         (200, 8, 31)]  # fmt: skip


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_float64(rows: int, inputs: int, outputs: int, biased: bool) -> None:
    x, weight = numbers(rows, inputs), numbers(outputs, inputs, seed=1)
    bias = numbers(outputs, seed=2) if biased else None
    out = native.product(x, native.pack(weight), outputs, bias)
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Each of the sum's roundings is half a unit of a partial sum, which the sum of magnitudes bounds.
    bound = (inputs + 1) * EPS * (x.abs().double() @ weight.abs().double().T + (0 if bias is None else bias.abs()))
    assert ((out - right).abs() <= bound).all()


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_a_row_of_a_product_has_the_same_bits_alone_and_on_any_threads(rows: int, inputs: int, outputs: int) -> None:
    x, weight, bias = numbers(rows, inputs), numbers(outputs, inputs, seed=1), numbers(outputs, seed=2)
    integers, scales = quant.rows(weight)
    panels, panels_int8 = native.pack(weight), native.pack_int8(integers)
    whole = native.product(x, panels, outputs, bias)
    whole_int8 = native.product_int8(x, panels_int8, scales[:, 0].contiguous(), bias)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(native.product(x[row : row + 1], panels, outputs, bias)[0], whole[row])
    try:
        native.set_threads(3)
        assert torch.equal(native.product(x, panels, outputs, bias), whole)
        assert torch.equal(native.product_int8(x, panels_int8, scales[:, 0].contiguous(), bias), whole_int8)
    finally:
        native.set_threads(1)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [*SIZES, (3, 3001, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_an_int8_product_has_the_bits_of_its_form_in_torch(rows: int, inputs: int, outputs: int, biased: bool) -> None:
    integers, scales = quant.rows(numbers(outputs, inputs, seed=1))
    by_output, bias = scales[:, 0].contiguous(), numbers(outputs, seed=2) if biased else None
    for x in (numbers(rows, inputs), numbers(rows, inputs).sign(), torch.zeros(rows, inputs)):
        out = native.product_int8(x, native.pack_int8(integers), by_output, bias)
        assert torch.equal(out, quant.product(x, integers, by_output, bias))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_8_bit_weights_is_that_of_float64(rows: int, inputs: int, outputs: int, biased: bool) -> None:
    x, (integers, scales) = numbers(rows, inputs), quant.rows(numbers(outputs, inputs, seed=1))
    by_output, bias = scales[:, 0].contiguous(), numbers(outputs, seed=2) if biased else None
    panels, weight = native.pack(integers), integers.double() * scales.double()
    out = native.product_weights8(x, panels, by_output, bias)
    right = F.linear(x.double(), weight, None if bias is None else bias.double())
    bound = (inputs + 3) * EPS * (x.abs().double() @ weight.abs().T + (0 if bias is None else bias.abs()))
    assert ((out - right).abs() <= bound).all()
    assert ((quant.product_of_weights(x, integers, by_output, bias) - right).abs() <= bound).all()
    assert torch.equal(native.product_weights8(x[-1:], panels, by_output, bias)[0], out[-1])


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_machines_with_more_lanes_give_the_same_bits(rows: int, inputs: int, outputs: int) -> None:
    if "avx2" not in BUILDS:
        pytest.skip("this machine has no more than AVX2")
    x, panels = numbers(rows, inputs), native.pack(numbers(outputs, inputs, seed=1))
    found = []
    for name in ("avx2", "vectors"):
        out, packed = torch.empty(rows, outputs), torch.empty(built(name).product_scratch(rows, inputs))
        built(name).product_float32(
            out.data_ptr(), x.data_ptr(), rows, inputs, outputs, panels.data_ptr(), None, packed.data_ptr()
        )
        found.append(out)
    assert torch.equal(*found)


def test_an_int8_product_of_the_largest_numbers_does_not_overflow() -> None:
    inputs = 3000  # 127 · 127 · 3000 is 11 times what float32 counts exactly
    weight = torch.full((20, inputs), -127, dtype=torch.int8)
    ones = torch.ones(20)
    out = native.product_int8(torch.full((6, inputs), 127.0), native.pack_int8(weight), ones, None)
    assert (out == -127.0 * 127 * inputs).all()


NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


@pytest.mark.parametrize("size", [1, 7, 16, 21])
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_row_that_is_not_finite_is_not_finite_in_eight_bits_and_alone_so(size: int, bad: float) -> None:
    """At every place: among eight that are looked at together, and in the tail."""
    integers, scales = quant.rows(numbers(5, size, seed=1))
    by_output, panels = scales[:, 0].contiguous(), native.pack_int8(integers)
    x = numbers(size + 1, size)
    right = native.product_int8(x, panels, by_output, None)
    x[torch.arange(size), torch.arange(size)] = bad  # another place in each row but the last
    for out in (native.product_int8(x, panels, by_output, None), quant.product(x, integers, by_output, None)):
        assert not out[:size].isfinite().any()
        assert torch.equal(out[size], right[size])


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("heads", [(2, 1, 12, 4), (1, 1, 80, 16)], ids=str)
def test_keys_and_values_that_are_not_finite_are_read_back_as_such_from_eight_bits(
    heads: tuple[int, ...], bad: float
) -> None:
    shape, block_size = shape_of(*heads[:3]), heads[3]
    for paged, store in ((True, attention.store_native), (False, attention.store)):
        qkv, cache, laid_out = step(shape, block_size, "int8", [(0, 9)], 0, paged)
        assert cache.scales is not None
        cache.scales.fill_(1.0)
        qkv[4, shape.heads :, -1] = bad
        store(cache, 0, qkv, (None, None), laid_out)
        finite = read_back(cache).isfinite().all(-1)
        assert int((~finite).sum()) == 2 * shape.kv_heads


@pytest.mark.parametrize("kv", attention.KV_DTYPES)
@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_key_that_is_not_finite_is_seen_by_all_who_look_at_it_and_by_nobody_else(kv: str, bad: float) -> None:
    """Its value may be: a share of almost nothing would hide it."""
    shape = shape_of(2, 1, 16)
    qkv, cache, laid_out = step(shape, 4, kv, [(0, 27)], 0, True)
    attention.store_native(cache, 0, qkv, (None, None), laid_out)
    right = attention.attend_native(cache, 0, qkv, laid_out)
    assert isinstance(laid_out.layout, batch.Paged)
    for place in range(27):
        block = int(laid_out.layout.tables[0, place // 4])
        harmed = cache.pool if cache.scales is None else cache.scales
        kept = harmed[0, 0, block, 0, place % 4].clone()
        harmed[0, 0, block, 0, place % 4] = bad
        out = attention.attend_native(cache, 0, qkv, laid_out)
        harmed[0, 0, block, 0, place % 4] = kept
        assert torch.equal(out[:place], right[:place])
        assert not out[place:].isfinite().any()


@few
@given(rows=st.integers(1, 9), size=st.integers(1, 40), seed=st.integers(0, 99), scale=st.sampled_from([1e-3, 1, 1e3]))
def test_a_norm_and_a_gate_are_those_of_float64(rows: int, size: int, seed: int, scale: float) -> None:
    x, weight = numbers(rows, 2 * size, seed=seed, scale=scale), numbers(2 * size, seed=seed + 1)
    wide = x.double()
    right = F.rms_norm(wide, (2 * size,), weight.double(), 1e-5)
    assert torch.allclose(native.rms_norm(x, weight, 1e-5).double(), right, rtol=1e-6 + size * EPS, atol=1e-12)
    gate, up = wide.chunk(2, -1)
    # Below -87 the exponential stays at its end: what is lost is less than 1e-34 of a gate.
    assert torch.allclose(native.silu_mul(x).double(), F.silu(gate) * up, rtol=1e-6, atol=1e-28)


def test_the_gate_is_right_to_three_units_over_the_exponentials_range() -> None:
    gate = torch.cat([torch.linspace(-86, 86, 20_000), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 86.9, -86.9])])
    size = len(gate)
    out = native.silu_mul(torch.cat([gate, torch.ones(size)])[None])[0].double()
    right = gate.double() * torch.sigmoid(gate.double())
    assert ((out - right).abs() <= 5 * EPS * right.abs() + 1e-40).all()


# Head sizes with a tail, generic, 64 and 128; blocks that are no multiple of eight keys.
HEADS = [(1, 1, 12, 4), (2, 1, 12, 16), (4, 2, 16, 5), (6, 2, 80, 16), (12, 4, 64, 16), (2, 2, 128, 8), (8, 1, 24, 1)]


def shape_of(heads: int, kv_heads: int, dim: int, **differs: Any) -> Shape:
    plain = Shape(64, 32, 48, 1, heads, kv_heads, dim, 1e-5, 10_000.0, 256, tied=False)
    return replace(plain, **differs)


def step(shape: Shape, block_size: int, kv: str, lengths: list[tuple[int, int]], window: int, paged: bool) -> Any:
    """One step of sequences (computed, n) over a pool that holds what is computed: rows, cache, batch."""
    blocks = [-(-(computed + n) // block_size) for computed, n in lengths]
    numbered = list(range(sum(blocks) + 3))
    Random(1).shuffle(numbered)
    work: list[tuple[Sequence, int]] = []
    for i, ((computed, n), count) in enumerate(zip(lengths, blocks, strict=True)):
        s = sequence([0] * (computed + n), i)
        s.computed, s.blocks = computed, [numbered.pop() for _ in range(count)]
        work.append((s, n))
    pages = Pages(sum(blocks) + 3, block_size, shape.kv_heads, window)
    like = torch.zeros(0)
    cache = attention.make_cache(shape, pages, like, model.rotation(shape, 256), kv)
    if cache.scales is None:
        cache.pool.copy_(numbers(*cache.pool.shape, seed=3))
    else:
        cache.pool.random_(-127, 128, generator=torch.Generator().manual_seed(3))
        cache.scales.uniform_(0.001, 0.02, generator=torch.Generator().manual_seed(4))
    laid_out = batch.build(work, pages, torch.device("cpu"), torch.float32, paged)
    rows = sum(n for _, n in lengths)
    return numbers(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, seed=5), cache, laid_out


def read_back(cache: attention.Cache) -> torch.Tensor:
    """The pool in float64."""
    pool = cache.pool.double()
    return pool if cache.scales is None else pool * cache.scales.double()[..., None]


def by_hand(cache: attention.Cache, qkv: torch.Tensor, laid_out: batch.Batch, window: int) -> torch.Tensor:
    """Attention in float64, a query at a time, from the pool's numbers."""
    assert isinstance(laid_out.layout, batch.Paged)
    shape, size, pool = cache.shape, cache.pages.block_size, read_back(cache)[0]
    group, out = shape.heads // shape.kv_heads, []
    for row, position in enumerate(laid_out.positions.tolist()):
        table = laid_out.layout.tables[laid_out.layout.table_of_row[row]].long()
        seen = torch.arange(max(0, position + 1 - window) if window else 0, position + 1)
        keys, values = pool[:, table[seen // size], :, seen % size].unbind(1)  # [seen, kv_heads, dim] each
        for head in range(shape.heads):
            scores = keys[:, head // group] @ qkv[row, head].double() * shape.head_dim**-0.5
            out.append(scores.softmax(0) @ values[:, head // group])
    return torch.stack(out).view(len(qkv), -1)


STEPS = [[(0, 1)], [(0, 40)], [(7, 1), (30, 1), (3, 1), (100, 1)], [(9, 14), (0, 5), (50, 1), (15, 1), (16, 1)]]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kv", attention.KV_DTYPES)
def test_attention_is_that_of_float64_and_of_its_form_in_torch(heads: tuple[int, ...], kv: str) -> None:
    shape, block_size = shape_of(*heads[:3]), heads[3]
    for lengths in STEPS:
        for window in (0, 9):
            shape = replace(shape, window=window, windowed=frozenset({0}) if window else frozenset())
            found = {}
            for paged in (True, False):
                qkv, cache, laid_out = step(shape, block_size, kv, lengths, window, paged)
                kernels = model.KERNELS["native" if paged else "torch"]
                kernels.store(cache, 0, qkv, (None, None), laid_out)
                found[paged] = kernels.attend(cache, 0, qkv, laid_out)
                if paged:
                    exact = by_hand(cache, qkv, laid_out, window)
                    assert (found[True] - exact).abs().max() < 2e-6
            # int8: a value between two integers may go to either, a hundredth of its head's largest number away
            assert (found[True] - found[False]).abs().max() < (4e-6 if kv == "auto" else 2e-2)


@pytest.mark.parametrize("sign", [0, 1, -1])
def test_scores_of_hundreds_are_no_overflow_and_no_tie(sign: int) -> None:
    """Of both signs, all far above 0, and all far below."""
    shape = shape_of(4, 2, 16)
    for lengths in STEPS:
        qkv, cache, laid_out = step(shape, 16, "auto", lengths, 0, True)
        attention.store_native(cache, 0, qkv, (None, None), laid_out)
        queries = qkv[:, : shape.heads]
        queries *= 100
        if sign:
            queries.abs_().mul_(sign)
            cache.pool[:, 0].abs_()
        exact = by_hand(cache, qkv, laid_out, 0)
        assert (attention.attend_native(cache, 0, qkv, laid_out) - exact).abs().max() < 2e-3


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kv", attention.KV_DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rows_are_stored_as_torch_stores_them_and_nowhere_else(heads: tuple[int, ...], kv: str, normed: bool) -> None:
    shape, block_size = shape_of(*heads[:3]), heads[3]
    norms = (numbers(shape.head_dim, seed=8), numbers(shape.head_dim, seed=9)) if normed else (None, None)
    lengths = STEPS[3]
    ours, theirs = (step(shape, block_size, kv, lengths, 0, paged) for paged in (True, False))
    before = ours[1].pool.clone()
    attention.store_native(ours[1], 0, ours[0], norms, ours[2])
    attention.store(theirs[1], 0, theirs[0], norms, theirs[2])
    assert torch.allclose(ours[0][:, : shape.heads], theirs[0][:, : shape.heads], rtol=1e-5, atol=1e-6)
    changed = (ours[1].pool != before).any(-1)  # [layers, kind, block, head, place]
    assert int(changed.sum()) <= len(ours[0]) * 2 * shape.kv_heads
    if kv == "auto":
        assert torch.allclose(ours[1].pool, theirs[1].pool, rtol=1e-5, atol=1e-6)
        return
    assert torch.allclose(ours[1].scales, theirs[1].scales, rtol=1e-5)
    apart = (ours[1].pool.int() - theirs[1].pool.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 1e-3


@pytest.mark.parametrize("kv", attention.KV_DTYPES)
def test_a_row_of_attention_has_the_same_bits_however_its_prompt_was_cut(kv: str) -> None:
    shape = shape_of(6, 2, 80)
    qkv, cache, laid_out = step(shape, 5, kv, [(0, 43)], 0, True)
    attention.store_native(cache, 0, qkv, (None, None), laid_out)
    whole = attention.attend_native(cache, 0, qkv, laid_out)
    assert isinstance(laid_out.layout, batch.Paged)
    for start in range(0, 43, 4):
        rows = slice(start, start + 4)
        layout = batch.Paged(laid_out.layout.tables, laid_out.layout.table_of_row[rows])
        part = replace(laid_out, positions=laid_out.positions[rows], layout=layout)
        assert torch.equal(attention.attend_native(cache, 0, qkv[rows], part), whole[rows])


@pytest.mark.parametrize("kv", attention.KV_DTYPES)
@pytest.mark.parametrize("quantization", ["none", "int8-weights", "int8"])
@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("threads", [1, 3])
def test_all_layers_at_once_have_the_bits_of_the_layers_in_parts(
    kv: str, quantization: str, window: int, threads: int
) -> None:
    """All rows, those that sample, and none of them, which is not all. The parts are computed by one thread."""
    read = weights.tiny(0)
    shape = replace(read.shape, window=window, windowed=frozenset({1}) if window else frozenset())
    biased = [layer._replace(qkv_bias=numbers(len(layer.qkv))) for layer in read.layers]
    read = replace(read, shape=shape, layers=tuple(biased))
    whole = model.make(read, 64, 4, 128, "native", quantization, kv)
    parts = replace(whole, stack=None)
    assert whole.stack is not None
    work = []
    for i, (computed, n) in enumerate([(9, 14), (0, 5), (50, 1), (15, 1)]):
        s = sequence(list(range(computed + n)), i)
        s.computed, s.blocks = computed, list(range(16 * i, 16 * i + 16))
        work.append((s, n))
    laid_out = model.lay_out(whole, work)
    try:
        for kept in (slice(None), torch.tensor([3, 0, 17]), torch.empty(0, dtype=torch.int64)):
            found = []
            for each, by in ((whole, threads), (parts, 1)):
                native.set_threads(by)
                each.cache.pool.zero_()
                found.append((model.hidden(each, laid_out, kept), each.cache.pool.clone()))
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])
    finally:
        native.set_threads(1)


def test_scratch_grows_and_stays() -> None:
    asked: list[int] = []
    scratch = native.Scratch()

    def kernel(wanted: int, place: int, given: int) -> int:
        asked.append(given)
        return wanted if given < wanted else 0

    for wanted in (100, 50, 300):
        scratch.lent(kernel, wanted)
    assert asked == [0, 100, 100, 100, 300]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("kv", attention.KV_DTYPES)
def test_nothing_is_written_beyond_the_scratch_that_was_asked_for(heads: tuple[int, ...], kv: str) -> None:
    shape, block_size = shape_of(*heads[:3], vocab_size=weights.TINY.vocab_size, layers=2), heads[3]
    whole = model.make(weights.tiny(0, shape=shape), 90, block_size, 256, "native", kv_cache_dtype=kv)
    s = sequence([3] * 81, 0)
    s.computed, s.blocks = 31, list(range(-(-81 // block_size)))
    laid_out = model.lay_out(whole, [(s, 50)])
    native.set_threads(3)
    try:
        right = model.hidden(whole, laid_out, slice(None))
        asked = len(whole.cache.scratch.place)
        whole.cache.scratch.place = torch.full((asked + 64,), float("nan"))
        assert torch.equal(
            model.hidden(whole, laid_out, slice(None)), right
        )  # nor is anything read before it is written
        assert whole.cache.scratch.place[asked:].isnan().all()
    finally:
        native.set_threads(1)


def test_kernels_take_no_array_that_is_not_what_it_seems() -> None:
    """Its address is all that they get."""
    weight = numbers(16, 16)
    panels, x = native.pack(weight), numbers(3, 16)
    wrong: list[Any] = [
        lambda: native.product(x.double(), panels, 16, None),
        lambda: native.product(x, panels.half(), 16, None),
        lambda: native.product(x, panels, 16, numbers(32)[::2]),
        lambda: native.rms_norm(x, weight[:, 0], 1e-5),
        lambda: native.silu_mul(x.double()),
    ]
    whole = model.make(weights.tiny(0), 8, 16, 128, "native")
    s = sequence([3] * 5, 0)
    s.blocks = [0]
    laid_out = model.lay_out(whole, [(s, 5)])
    assert isinstance(laid_out.layout, batch.Paged)
    changes: list[dict[str, Any]] = [
        {"positions": laid_out.positions.int()},
        {"slots": laid_out.slots.repeat_interleave(2)[::2]},
        {"layout": laid_out.layout._replace(tables=laid_out.layout.tables.long())},
    ]
    wrong += [partial(model.hidden, whole, replace(laid_out, **change), laid_out.sample_rows) for change in changes]
    kinds = (torch.zeros(6, dtype=torch.int64), torch.tensor([0], dtype=torch.int32), slice(0, 2), None)
    wrong += [partial(model.hidden, whole, laid_out, kept) for kept in kinds]
    for call in wrong:
        with pytest.raises(AssertionError):
            call()
    assert model.hidden(whole, laid_out, slice(None)).shape == (5, whole.shape.hidden_size)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_large_zeros_begin_where_a_huge_page_may_and_are_zeros() -> None:
    for count in (1, native.HUGE // 4 - 1, native.HUGE // 4, native.HUGE + 3):
        found = native.zeros(count, 1, dtype=torch.float32)
        assert found.shape == (count, 1)
        assert not found.any()
        assert count * 4 < native.HUGE or found.data_ptr() % native.HUGE == 0
        found.fill_(1.0)
