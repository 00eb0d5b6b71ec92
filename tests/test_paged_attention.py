"""Paged attention against float64: every page that must not be read is NaN, everything beside the result a canary.

On a GPU, TRITON_INTERPRET=0 runs the same cases on compiled kernels; only there does bfloat16 compute in bfloat16.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from tests.dense_kernels import Mutation, assert_caught, guarded_scratch, needs_triton, only_read
from tests.dense_kernels import few_programs as few_programs

# isort: split
from kernels import attention_api, paged_attention, reference
from kernels.attention_api import Tile, Work
from kernels.interpret import interpreted

pytestmark = [pytest.mark.engine, needs_triton]
DEVICE = "cuda" if torch.cuda.is_available() and not interpreted() else "cpu"

# Largest error of an element x, in units of 1 + |x|. float32: sums of up to 300 products in another order than the
# reference's, seen 5e-7. 16 bits: weights and the result are rounded once each, by half of 2**-10 or 2**-7; bfloat16
# doubled since the interpreter cuts off where a GPU rounds.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}
CANARY = 12344.0  # exact in all three
SMALL = {"few": Tile(16, 16, 16), "many": Tile(32, 16, 64)}  # many tiles and splits of few tokens


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small arrays in turn: a second thread of torch's would only spin, for twice the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case(NamedTuple):
    """Sequence i computes the last counts[i] of lengths[i] tokens."""

    counts: list[int]
    lengths: list[int]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 64
    block_size: int = 16
    window: int = 0
    soft_cap: float = 0.0
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None  # of pages; None: dtype
    tiles: dict[str, Tile] = attention_api.TILES[2, "roomy"]
    shared: int = 0  # blocks that all sequences begin with
    merged: int = paged_attention.MERGED
    slots_first: bool = False  # pages are [num_blocks, block_size, kv_heads, head_dim] in memory


class Made(NamedTuple):
    """A case's tensors. `keys` and `values` hold NaN wherever nothing must be read."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    scales: dict[str, torch.Tensor]


def make(case: Case, seed: int = 0) -> Made:
    draw = torch.Generator().manual_seed(seed)
    needed = [-(-length // case.block_size) for length in case.lengths]
    own = [max(n - case.shared, 0) for n in needed]
    # Blocks in any order. Block 0 is all poison: it is in no sequence, stands wherever a table has an entry that none
    # needs, and is what a lookup finds that is masked.
    numbers = [1 + n for n in torch.randperm(case.shared + sum(own), generator=draw).tolist()]
    common, rest = numbers[: case.shared], iter(numbers[case.shared :])
    tables = torch.zeros(len(needed), max(needed, default=0), dtype=torch.int32)
    seen = torch.zeros(len(numbers) + 1, case.block_size, dtype=torch.bool)
    for table, count, length, n in zip(tables, case.counts, case.lengths, needed, strict=True):
        blocks = [*common, *(next(rest) for _ in range(n - case.shared))][:n]
        first = max(length - count + 1 - case.window, 0) if case.window else 0
        for position in range(first, length if count else 0):
            table[position // case.block_size] = blocks[position // case.block_size]
            seen[blocks[position // case.block_size], position % case.block_size] = True
    pool = torch.randn(2, len(seen), case.kv_heads, case.block_size, case.dim, generator=draw)
    scales = torch.full(pool.shape[:4], float("nan"))
    if case.stored is None:
        pages = torch.where(seen[:, None, :, None], pool, float("nan")).to(case.dtype)
    else:
        pages, scales = reference.quantise(pool, case.stored)
        # Each scale apart, so that one taken for another shows; int8 has no NaN, but a poisoned scale does as well.
        scales = torch.where(seen[:, None], scales * (1 + torch.rand(scales.shape, generator=draw)), float("nan"))
    if case.slots_first:
        pages = pages.transpose(2, 3).contiguous().transpose(2, 3)
    # As the engine has them: beside keys and values, here poison, that the same product made.
    qkv = torch.full((sum(case.counts), case.heads + 2 * case.kv_heads, case.dim), float("nan")).to(case.dtype)
    qkv[:, : case.heads] = torch.randn(len(qkv), case.heads, case.dim, generator=draw) * 2
    found = {} if case.stored is None else {"key_scales": scales[0].to(DEVICE), "value_scales": scales[1].to(DEVICE)}
    pages, qkv = pages.to(DEVICE), qkv.to(DEVICE)
    return Made(qkv[:, : case.heads], pages[0], pages[1], tables.to(DEVICE), found)


def canaries(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """A place for the result that is NaN, in the middle of a larger buffer of canaries."""
    whole = torch.full((sum(case.counts) + 160, case.heads + 2, case.dim + 16), CANARY, dtype=case.dtype)
    whole = whole.to(DEVICE)
    out = whole[16 : 16 + sum(case.counts), 1 : 1 + case.heads, : case.dim]
    out.fill_(float("nan"))
    return whole, out


def laid_out(case: Case, api: ModuleType = attention_api) -> Work:
    group = case.heads // case.kv_heads
    work: Work = api.plan(case.counts, case.lengths, group, window=case.window, tiles=case.tiles)
    return work.to(DEVICE)


def run(case: Case, made: Made, kernels: ModuleType = paged_attention, api: ModuleType = attention_api) -> torch.Tensor:
    whole, out = canaries(case)
    work = laid_out(case, api)
    given = [*made[:4], *made.scales.values(), work.merges, *(items for _, items in work.launches)]
    with pytest.MonkeyPatch.context() as patch, guarded_scratch(), only_read(*given):
        patch.setattr(kernels, "MERGED", case.merged)
        kernels.paged_attention(out, *made[:4], work, soft_cap=case.soft_cap, scale=case.scale, **made.scales)
    result = out.clone()
    out.fill_(CANARY)
    assert bool((whole == CANARY).all()), "a canary is dead"
    return result


def check(case: Case, kernels: ModuleType = paged_attention, api: ModuleType = attention_api) -> None:
    made = make(case)
    found = run(case, made, kernels, api)
    double = [t.double() if case.stored is None else t for t in made[1:3]]
    right = reference.paged_attention(
        made.query.double(), *double, made.tables, case.counts, case.lengths,
        window=case.window, soft_cap=case.soft_cap, scale=case.scale, **made.scales,
    )  # fmt: skip
    # Quantised pages meet float16 queries in bfloat16, see the wrapper.
    rounds = torch.bfloat16 if case.stored and case.dtype == torch.float16 else case.dtype
    error = (found.double() - right).abs() / (1 + right.abs())
    assert bool((error <= TOLERANCE[rounds]).all()), f"off by {error.max()}"


CASES = {
    "one token": Case([1], [1]),
    "decodes": Case([1, 1, 1, 1], [70, 1, 16, 33]),
    "prompt": Case([37], [37], tiles=SMALL),
    "chunk": Case([20], [53], tiles=SMALL),
    "chunk of several tiles": Case([150], [170]),
    "mix": Case([1, 5, 40, 1], [40, 5, 62, 33]),
    "nothing to do for one": Case([1, 0, 3], [20, 30, 3]),
    "one head": Case([1, 9], [30, 20], heads=1),
    "groups of 3": Case([1, 7], [50, 20], heads=6, kv_heads=2),
    "groups of 20": Case([2], [21], heads=20, tiles=SMALL),
    "no groups": Case([1, 3], [20, 30], heads=4, kv_heads=4),
    "head_dim 8": Case([1, 20], [20, 40], dim=8),
    "head_dim 80": Case([1, 20], [20, 40], dim=80),
    "head_dim 96": Case([1, 20], [20, 40], dim=96),
    "head_dim 128": Case([1, 20], [20, 40], dim=128),
    "8 splits": Case([1], [120], heads=1, tiles=SMALL),
    "8 splits, 4 at a time": Case([1], [120], heads=1, tiles=SMALL, merged=4),
    "splits for several heads": Case([1], [33], heads=4, kv_heads=2, tiles={**SMALL, "few": Tile(16, 16, 32)}),
    "head_dim 80, splits": Case([1], [40], dim=80, tiles=SMALL),
    "splits that some queries do not see": Case([4], [34], heads=1, tiles=SMALL),
    "a cut chunk": Case([3], [100], heads=1, tiles={"few": Tile(2, 16, 16), "many": Tile(16, 16, 64)}),
    "window": Case([1, 1, 3], [70, 5, 40], window=20),
    "window, chunk": Case([30], [90], window=20, tiles=SMALL),
    "window of one": Case([3, 1], [40, 1], window=1),
    "window, splits": Case([1], [100], heads=1, window=50, tiles=SMALL),
    "a scale": Case([1, 5], [40, 20], scale=0.3),
    "soft cap": Case([1, 5], [40, 20], soft_cap=3.0),
    "float16": Case([1, 20], [40, 30], dtype=torch.float16),
    "bfloat16": Case([1, 20], [40, 30], dtype=torch.bfloat16),
    "int8": Case([1, 20], [40, 30], heads=4, kv_heads=2, stored=torch.int8),
    "int8, float16": Case([1, 20], [40, 30], stored=torch.int8, dtype=torch.float16),
    "int8, window, splits": Case([1], [60], stored=torch.int8, window=40, tiles=SMALL),
    "fp8": Case([1, 20], [40, 30], stored=torch.float8_e4m3fn),
    "fp8, bfloat16": Case([1, 20], [40, 30], stored=torch.float8_e4m3fn, dtype=torch.bfloat16),
    "shared blocks": Case([1, 3, 1], [40, 50, 64], shared=2),
    "other strides": Case([1, 9], [30, 20], heads=4, kv_heads=2, slots_first=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_result_is_float64s_and_nothing_else_is_touched(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256, 24])
def test_lengths_at_a_blocks_edge(block_size: int) -> None:
    edges = [block_size - 1, block_size, block_size + 1, 2 * block_size]
    check(Case([1] * 4, edges, block_size=block_size, dim=16))
    check(Case([2] * 4, edges, block_size=block_size, dim=16, window=block_size))


@pytest.mark.parametrize("pieces", [1, 8])
def test_in_one_piece_and_in_8_it_is_the_same_up_to_rounding(pieces: int) -> None:
    """As the reference's, to half of what the two may differ by."""
    case = Case([1], [128], heads=1, tiles={**SMALL, "few": Tile(16, 16, 128 // pieces)})
    work = laid_out(case)
    assert (len(work.launches[0][1]), len(work.merges)) == (pieces, int(pieces > 1))
    made = make(case)
    right = reference.paged_attention(
        made.query.double(), made.keys.double(), made.values.double(), made.tables, [1], [128]
    )
    assert (run(case, made) - right).abs().max() < 5e-7


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 0, 1]], ids=str)
@pytest.mark.parametrize("k", range(4))
def test_a_sequence_has_the_same_bits_in_any_batch(k: int, order: list[int]) -> None:
    """Alone, among others, and elsewhere among them: splits, tiles and their order are its own."""
    counts, lengths = [1, 4, 1, 20], [40, 34, 70, 30]
    sizes = {"heads": 1, "tiles": {"few": Tile(16, 16, 64), "many": Tile(32, 16, 64)}}
    made = make(Case(counts, lengths, **sizes))
    starts = [0, 1, 5, 6, 26]

    def attended(order: list[int]) -> list[torch.Tensor]:
        rows = [i for k in order for i in range(starts[k], starts[k + 1])]
        part = made._replace(query=made.query[rows], tables=made.tables[order])
        found = run(Case([counts[k] for k in order], [lengths[k] for k in order], **sizes), part)
        return list(found.split([counts[k] for k in order]))

    assert torch.equal(attended([k])[0], attended(order)[order.index(k)])


def test_small_values_of_integers_are_mixed_in_a_type_that_has_them() -> None:
    """A weight times a scale of 1e-6 is nothing that float16 has many digits of; the result is."""
    case = Case([1], [60], stored=torch.int8, dtype=torch.float16)
    made = make(case)
    made.scales["value_scales"].mul_(2**-13)
    found = run(case, made).double()
    right = reference.paged_attention(
        made.query.double(), made.keys, made.values, made.tables, case.counts, case.lengths, **made.scales
    )
    assert (found - right).abs().max() <= 1e-2 * right.abs().max()


@pytest.mark.parametrize("kind", ["key_scales", "value_scales"])
@pytest.mark.parametrize("position", [0, 21, 27, 29])
def test_what_sees_a_vector_that_is_no_numbers_is_none_and_nothing_else(position: int, kind: str) -> None:
    """kv_write says so by the scale. Rows of the same tile that come before it are what they were, bit for bit."""
    case = Case([1, 8], [19, 30], stored=torch.int8)
    made = make(case)
    right = run(case, made)
    made.scales[kind][made.tables[1, position // case.block_size], :, position % case.block_size] = float("nan")
    found = run(case, made)
    first_to_see = 1 + max(position - 22, 0)  # row 1 is position 22 of the second sequence
    assert torch.equal(found[:first_to_see], right[:first_to_see])
    assert bool(found[first_to_see:].isnan().all())


def test_an_empty_batch_launches_nothing() -> None:
    case = Case([], [])
    assert laid_out(case).launches == ()
    assert run(case, make(case)).shape == (0, 2, 64)
    assert torch.isnan(run(Case([0], [5]), make(Case([0], [5])))).all()


def test_places_left_free_for_more_work_do_nothing() -> None:
    """A CUDA graph launches as many programs as its bucket has room for."""
    case = Case([1], [17], heads=1, tiles=SMALL)
    made, work = make(case), laid_out(case)
    idle = torch.full((2, 8), -1, dtype=torch.int32, device=DEVICE)
    launches = tuple((tile, torch.cat([idle, items])) for tile, items in work.launches)
    merges = torch.cat([work.merges, torch.zeros(1, 4, dtype=torch.int32, device=DEVICE)])
    whole, out = canaries(case)
    with guarded_scratch():
        paged_attention.paged_attention(out, *made[:4], work._replace(launches=launches, merges=merges))
    assert torch.equal(out, run(case, made))
    out.fill_(CANARY)
    assert bool((whole == CANARY).all())


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "shape": (lambda a: {"query": a["query"][0]}, r"query is \[2, 64\].*\[rows, heads, head_dim\]"),
    "work of others": (
        lambda a: {"work": laid_out(Case([1, 1], [5, 5], kv_heads=2))},
        "work is of 2 rows of 2 sequences",
    ),
    "work of more rows": (
        lambda a: {"work": laid_out(Case([5], [20], kv_heads=2))},
        "work is of 5 rows of 1 sequences",
    ),
    "out": (lambda a: {"out": a["out"][:, :1]}, r"out is \[4, 1, 64\]; would be right: \[4, 2, 64\]"),
    "out's dtype": (lambda a: {"out": a["out"].half()}, "out is float16; would be right: float32"),
    "float64": (lambda a: {"query": a["query"].double()}, "query is float64"),
    "heads": (lambda a: {"query": a["query"][:, :1]}, r"query is \[4, 1, 64\]; would be right: \[4, 2, 64\]"),
    "head_dim": (lambda a: {"keys": a["keys"][..., :32]}, "keys is .*32.*would be right: .*64"),
    "values": (lambda a: {"values": a["values"][1:]}, "values is"),
    "mixed pages": (lambda a: {"values": a["values"].half()}, "values is float16; would be right: float32"),
    "other pages": (lambda a: {"keys": a["keys"].half()}, "keys is float16"),
    "page strides": (
        lambda a: {"values": a["values"].transpose(1, 2).contiguous().transpose(1, 2)},
        "values has strides.*as its keys have",
    ),
    "element stride": (lambda a: {"query": a["query"].mT.contiguous().mT}, "query has stride"),
    "heads far apart": (
        lambda a: {"query": torch.empty_strided((4, 2, 64), (64, 2**31, 1), device="meta"), "out": a["out"].to("meta")},
        "query has strides .*within",
    ),
    "tables": (lambda a: {"tables": a["tables"].long()}, "tables is int64; would be right: int32"),
    "one table": (lambda a: {"tables": a["tables"][0]}, "tables is"),
    "no scales": (
        lambda a: {"keys": a["keys"].to(torch.int8), "values": a["values"].to(torch.int8)},
        "key_scales is None; would be right",
    ),
    "elsewhere": (lambda a: {"tables": a["tables"].to("meta")}, "tables is on meta"),
    "work elsewhere": (lambda a: {"work": a["work"].to("meta")}, "work is on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_cannot_take_is_refused(name: str) -> None:
    case, pages = Case([4], [20], kv_heads=2), torch.zeros(4, 2, 16, 64, device=DEVICE)
    query = torch.zeros(4, 2, 64, device=DEVICE)
    right = {"query": query, "out": torch.empty_like(query), "keys": pages, "values": pages.clone()}
    right |= {"tables": make(case).tables, "work": laid_out(case)}
    change, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        paged_attention.paged_attention(**{**right, **change(right)})


# One line broken, and the case that must fail for it.
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "sees the next token": ("<= asks_at[:, None])", "<= asks_at[:, None] + 1)", "prompt"),
    "sees no own key": ("<= asks_at[:, None])", "< asks_at[:, None])", "chunk"),
    "no mask where only some see": ("position + 1) // KEYS", "position + queries) // KEYS", "chunk"),
    "window too short": (
        "column[None, :] > asks_at[:, None] - WINDOW", "column[None, :] - 1 > asks_at[:, None] - WINDOW", "window",
    ),
    "window too long": (
        "column[None, :] > asks_at[:, None] - WINDOW", "column[None, :] >= asks_at[:, None] - WINDOW",
        "window, chunk",
    ),
    "reads before the beginning": ("(column >= begin) & (column < end) if masked", "column < end if masked", "window"),
    "reads beyond the end": ("(column >= begin) & (column < end) if masked", "column >= begin if masked", "decodes"),
    "no scale": ("PRECISION) * scale", "PRECISION) * 1.0", "decodes"),
    "the scale asked for": ("dim**-0.5 if scale is None else scale", "dim**-0.5", "a scale"),
    "scale without log2(e)": ("scale = LOG2_E * (", "scale = (", "decodes"),
    "no scale of keys": ("score *= tl.load(key_scale_at", "score += 0 * tl.load(key_scale_at", "int8"),
    "no scale of values": ("weight *= tl.where(visible, times", "weight += 0 * tl.where(visible, times", "int8"),
    "values take keys' scales": ("tl.load(value_scale_at +", "tl.load(key_scale_at +", "fp8"),
    "scales of another head": ("key_scales + kv_head * scale_head", "key_scales + 0 * scale_head", "int8"),
    "scales of another slot": ("page * scale_page + in_page", "page * scale_page", "int8"),
    "cap in the wrong base": ("soft_cap * LOG2_E", "soft_cap", "soft cap"),
    "cap twice as flat": ("(2 * 1.4426950408889634)", "1.4426950408889634", "soft cap"),
    "no cap": ("CAPPED=soft_cap > 0", "CAPPED=False", "soft cap"),
    "keys of another head": ("keys + kv_head * page_head", "keys + 0 * page_head", "groups of 3"),
    "values of another head": ("values + kv_head * page_head", "values + 0 * page_head", "groups of 3"),
    "values are the keys": ("tl.load(value_at + at", "tl.load(key_at + at", "decodes"),
    "queries of another head": ("head * query_head", "row % GROUP * query_head", "groups of 3"),
    "rows of the first query": ("row // GROUP, kv_head", "row // ROWS, kv_head", "prompt"),
    "slot of the tile": ("in_page = column % BLOCK_SIZE", "in_page = column % KEYS % BLOCK_SIZE", "block of 24"),
    "first block again": ("table + ahead // BLOCK_SIZE", "table + column // BLOCK_SIZE", "prompt"),
    "blocks beyond the table": (
        "BLOCK_SIZE, mask=(column >= begin) & (column < high), other=0)", "BLOCK_SIZE)", "one token",
    ),
    "blocks ahead beyond the table": ("BLOCK_SIZE, mask=ahead < high, other=0)", "BLOCK_SIZE)", "a full table"),
    "one block ahead beyond the table": ("mask=ahead < high,", "mask=ahead <= high,", "a full table"),
    "another's table": ("sequence.to(tl.int64) * table_stride", "0 * table_stride", "decodes"),
    "old weights not faded": (
        "total = total * faded + tl.sum(weight, 1)", "total = total + tl.sum(weight, 1)", "prompt",
    ),
    "old sums not faded": ("mixed * faded[:, None], input", "mixed, input", "prompt"),
    "not divided": ("mixed / total[:, None]", "mixed", "decodes"),
    "-inf - -inf": (
        'tl.where(risen == float("-inf"), 0.0, risen) if masked else risen', "risen",
        "splits that some queries do not see",
    ),
    "stores rows beyond its queries": (
        "held = (number < queries)[:, None] &", "held = (number < queries + 1)[:, None] &", "decodes",
    ),
    "stores beyond head_dim": (
        "mixed / total[:, None]).to(out.dtype.element_ty), mask=held",
        "mixed / total[:, None]).to(out.dtype.element_ty), mask=(number < queries)[:, None]", "head_dim 8",
    ),
    "a split stores beyond head_dim": (
        "dim[None, :], mixed, mask=held)", "dim[None, :], mixed, mask=(number < queries)[:, None])",
        "head_dim 80, splits",
    ),
    "a split stores rows beyond its queries": (
        "dim[None, :], mixed, mask=held)", "dim[None, :], mixed, mask=(dim < DIM)[None, :])", "head_dim 80, splits",
    ),
    "a split stores peaks beyond its queries": (
        "slot * 2, highest, mask=number < queries)", "slot * 2, highest, mask=number < queries + 1)",
        "head_dim 80, splits",
    ),
    "a split stores sums beyond its queries": (
        "total, mask=number < queries)", "total, mask=number < queries + 1)", "head_dim 80, splits",
    ),
    "a merge stores beyond head_dim": (
        "mask=dim < DIM)\n\n\ndef", "mask=dim < DIM_PADDED)\n\n\ndef", "head_dim 80, splits",
    ),
    "merges without weights": ("tl.exp2(peak - level), tl.exp2", "tl.exp2(0 * (peak - level)), tl.exp2", "8 splits"),
    "merges all but the last": ("there = number < splits", "there = number < splits - 1", "8 splits"),
    "merges another query's": ("number * step).to", "number).to", "splits that some queries do not see"),
    "merges and forgets": ("mixed = mixed * faded + tl.sum(part", "mixed = tl.sum(part", "8 splits, 4 at a time"),
    "merges one head": ("* HEADS + head\n        peak", "* HEADS\n        peak", "splits for several heads"),
    "splits one head": (
        "(place + number).to(tl.int64) * HEADS + head", "(place + number).to(tl.int64) * HEADS",
        "splits for several heads",
    ),
}  # fmt: skip
BESIDE = {
    "block of 24": Case([1], [60], block_size=24, tiles=SMALL),
    "a full table": Case([1], [64], dim=16),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="a broken kernel may end the CUDA context that the other tests use")
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_caught(name: str, tmp_path: Path) -> None:
    old, new, case = MUTATIONS[name]
    cases = {**CASES, **BESIDE}
    assert_caught(paged_attention, Mutation(old, new, lambda broken: check(cases[case], kernels=broken)), tmp_path)


@pytest.mark.parametrize("case", BESIDE.values(), ids=BESIDE)
def test_what_only_broken_kernels_are_tried_on_passes_too(case: Case) -> None:
    check(case)
