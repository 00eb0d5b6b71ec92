"""Every program of a step reads what it must and nothing else; steps of an engine attend to what was written before."""

from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.dense_kernels import Mutation, assert_caught, needs_triton
from tests.dense_kernels import few_programs as few_programs

# isort: split
from kernels import attention_api, reference
from kernels.attention_api import Tile, attend, lay_out, plan, tiles_for, write

pytestmark = pytest.mark.engine
SMALL = {"few": Tile(16, 16, 16), "many": Tile(32, 16, 64)}


def check_plan(
    counts: list[int], lengths: list[int], group: int, window: int, tiles: dict[str, Tile], api: ModuleType
) -> None:
    """Each query meets each key that it sees once, no item reads what none of its queries sees, no results meet."""
    work = api.plan(counts, lengths, group, window=window, tiles=tiles)
    assert work.merges.dtype == torch.int32
    starts = np.cumsum([0, *counts])
    met = [np.zeros((count, length), int) for count, length in zip(counts, lengths, strict=True)]
    direct, used = np.zeros(starts[-1], int), np.zeros(work.slots, int)
    parts: dict[int, set[int]] = {}  # slots by row
    for tile, items in work.launches:
        sizes = (items[:, 5] - items[:, 4]).tolist()
        assert sizes == sorted(sizes, reverse=True), "the longest do not start first"
        for sequence, row, queries, position, begin, end, place, _ in items.tolist():
            first = row - starts[sequence]
            assert 0 <= first < first + queries <= counts[sequence]
            assert queries * group <= tile.rows
            assert position == lengths[sequence] - counts[sequence] + first
            last = position + queries - 1
            assert (max(position + 1 - window, 0) if window else 0) <= begin < end <= last + 1
            assert window or begin % tile.keys == 0, "loads without masks begin at a tile"
            for k in range(queries):
                met[sequence][first + k, begin : min(end, position + k + 1)] += 1
                slot, taken = (row + k, direct) if place < 0 else (place + k, used)
                assert slot < len(taken), "a result has no place"
                taken[slot] += 1
                if place >= 0:
                    parts.setdefault(row + k, set()).add(slot)
    for of_sequence, count, length in zip(met, counts, lengths, strict=True):
        at, key = np.arange(length - count, length)[:, None], np.arange(length)
        sees = (key <= at) & (key > at - window if window else key >= 0)
        assert (of_sequence[sees] == 1).all(), "a key is missed or met twice"
    merged = {row: set(range(slot, slot + step * splits, step)) for row, slot, step, splits in work.merges.tolist()}
    assert merged == parts
    assert (used == 1).all()
    assert [row for row, n in enumerate(direct) if not n] == sorted(parts)
    assert direct.max(initial=0) <= 1


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, dict[str, Tile]]:
    counts = draw(st.lists(st.integers(0, 70) | st.integers(0, 2), max_size=5))
    lengths = [n + draw(st.integers(0, 150)) for n in counts]
    keys = draw(st.sampled_from([16, 32]))
    few, many = (Tile(rows, keys, keys * draw(st.integers(1, 4))) for rows in (16, draw(st.sampled_from([16, 64]))))
    return counts, lengths, draw(st.integers(1, 40)), draw(st.integers(0, 40)), {"few": few, "many": many}


@given(steps())
def test_every_query_meets_every_key_once(step: tuple[list[int], list[int], int, int, dict[str, Tile]]) -> None:
    check_plan(*step, attention_api)


@given(steps())
def test_what_a_sequence_gets_depends_on_itself_alone(step: tuple) -> None:
    counts, lengths, group, window, tiles = step
    together, starts = plan(counts, lengths, group, window=window, tiles=tiles), np.cumsum([0, *counts])
    for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        alone = plan([count], [length], group, window=window, tiles=tiles)
        mine = [(tile, items[items[:, 0] == number]) for tile, items in together.launches]
        mine = [(tile, items) for tile, items in mine if len(items)]
        assert [tile for tile, _ in mine] == [tile for tile, _ in alone.launches]
        for (_, found), (_, right) in zip(mine, alone.launches, strict=True):
            assert torch.equal(found[:, 1] - int(starts[number]), right[:, 1])
            assert torch.equal(found[:, 2:6], right[:, 2:6])
            assert torch.equal(found[:, 6] >= 0, right[:, 6] >= 0)


# One line broken; each fails for a step of STEPS.
MUTATIONS = {
    "key too few": ("end = position + queries\n", "end = position + queries - 1\n"),
    "key too many": ("end = position + queries\n", "end = position + queries + 1\n"),
    "window too short": ("position + 1 - window", "position + 2 - window"),
    "window too long": ("position + 1 - window", "position - window"),
    "no window": ("if window else np.zeros_like(end)", "if window < 0 else np.zeros_like(end)"),
    "position of the chunk": ("lengths[sequence] - counts[sequence] + first", "lengths[sequence] - counts[sequence]"),
    "last tile too long": ("np.minimum(counts[sequence] - first, per_tile)", "np.full_like(first, per_tile)"),
    "splits overlap": ("np.minimum(end[piece], at + tile.split)", "np.minimum(end[piece], at + tile.split + 1)"),
    "splits from the start": ("np.maximum(begin[piece], at)", "begin[piece]"),
    "one split missing": (
        "splits = np.where(cuts, -(-end // tile.split) - low, 1)",
        "splits = np.where(cuts, end // tile.split - low, 1)",
    ),
    "slots of one query": ("splits * queries, 0)", "splits, 0)"),
    "slots again": ("slots + np.cumsum(taken) - taken", "np.cumsum(taken) - taken"),
    "merges the neighbour": ("queries[split], splits[split]]", "np.ones_like(split), splits[split]]"),
    "merges rows of the chunk": ("np.stack([row[split] + query,", "np.stack([row[split],"),
    "shortest first": ("items[:, 4] - items[:, 5]", "items[:, 5] - items[:, 4]"),
    "rows of another": ("starts[sequence] + first, lengths", "first, lengths"),
}  # fmt: skip
STEPS = [([3, 1, 40, 2], [40, 60, 100, 3], 4, window) for window in (0, 20)]


def check_steps(api: ModuleType) -> None:
    for step in STEPS:
        check_plan(*step, SMALL, api)
    check_plan([3, 9], [40, 140], 4, 0, {"few": Tile(16, 16, 16), "many": Tile(64, 16, 64)}, api)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_plan_is_caught(name: str, tmp_path: Path) -> None:
    check_steps(attention_api)
    assert_caught(attention_api, Mutation(*MUTATIONS[name], check_steps), tmp_path)


@pytest.mark.parametrize(
    ("counts", "lengths", "said"),
    [
        ([2], [1], "would be right: 0 <= count <= length"),
        ([-1], [1], "would be right"),
        ([1, 1], [2], "would be right"),
    ],
)
def test_counts_that_cannot_be_are_refused(counts: list[int], lengths: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan(counts, lengths, 1)


def test_a_split_ends_where_a_tile_ends() -> None:
    with pytest.raises(ValueError, match="a split of 24 tokens; would be right: a multiple of keys, 16"):
        plan([1], [1], 1, tiles={**SMALL, "few": Tile(16, 16, 24)})


def test_slots_tables_and_works_arrive_as_they_were_made() -> None:
    blocks = [[7, 3], [5, 0, 2, 9]]
    step = lay_out([1, 20], [8, 12], blocks, 8, 2, SMALL, "cpu", window=10)
    right = [3 * 8, *(blocks[1][p // 8] * 8 + p % 8 for p in range(12, 32))]
    assert step.slots.tolist() == right
    assert step.tables.tolist() == [[7, 3, 0, 0], [5, 0, 2, 9]]
    for found, window in zip(step.works, (0, 10), strict=True):
        wanted = plan([1, 20], [9, 32], 2, window=window, tiles=SMALL)
        assert (found.window, found.slots) == (window, wanted.slots)
        assert torch.equal(found.merges, wanted.merges)
        assert [tile for tile, _ in found.launches] == [tile for tile, _ in wanted.launches]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found.launches, wanted.launches, strict=True))
    parts = [step.slots, step.tables, *(items for work in step.works for _, items in work.launches)]
    assert {(part.data_ptr() - step.slots.data_ptr()) % 16 for part in parts} == {0}


def test_a_sequence_with_too_few_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="1 blocks of 8 for a sequence; would be right: 2 or more"):
        lay_out([1], [8], [[4]], 8, 1, SMALL, "cpu")


def test_an_empty_step_is_laid_out() -> None:
    step = lay_out([], [], [], 8, 1, SMALL, "cpu")
    assert (step.slots.shape, step.tables.shape, step.works[0].launches) == ((0,), (0, 0), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tiles_hold_heads_of_512_bytes(dtype: torch.dtype) -> None:
    largest = 512 // dtype.itemsize
    for head_dim in (8, 128, largest):
        assert tiles_for(dtype, head_dim, "cpu").keys() == {"few", "many"}
    with pytest.raises(ValueError, match="would be right: 512 bytes or less"):
        tiles_for(dtype, largest + 1, "cpu")


@pytest.mark.parametrize(("kib", "stages"), [(227, 3), (200, 3), (163, 2), (99, 2)])
def test_the_tile_of_a_gpu_goes_by_its_shared_memory(kib: int, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    has = SimpleNamespace(shared_memory_per_block=48 * 1024, shared_memory_per_block_optin=kib * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: has)
    assert tiles_for(torch.bfloat16, 128, "cuda")["many"].stages == stages


@pytest.mark.parametrize(("count", "name"), [(1, "few"), (4, "few"), (5, "many"), (16, "many")])
def test_few_are_those_whose_queries_and_heads_are_one_tile(count: int, name: str) -> None:
    tiles = {"few": Tile(16, 16, 16), "many": Tile(64, 16, 64)}  # four query heads a KV head: four queries fit 16 rows
    ((tile, _),) = plan([count], [40], 4, tiles=tiles).launches
    assert tile == tiles[name]


# Steps as an engine would make them, counts and tokens computed before: of the last one the result is asked for.
ROUNDS = {
    "a prompt": [([5], [0])],
    "its next chunk": [([3], [0]), ([2], [3])],
    "a decode beside a chunk": [([3, 0], [0, 0]), ([1, 1], [3, 0])],
    "decodes": [([2, 1], [0, 0]), ([1, 1], [2, 1])],
}


@needs_triton
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("steps", ROUNDS.values(), ids=ROUNDS)
def test_steps_attend_to_what_steps_before_wrote(steps: list[tuple[list[int], list[int]]], window: int) -> None:
    """Against torch's own attention over rows that never saw a page."""
    heads, kv_heads, dim = 4, 2, 16
    draw = torch.Generator().manual_seed(window)
    pool = torch.full((2, 6, kv_heads, 4, dim), float("nan"))
    blocks = [[4, 0], [2, 5]][: len(steps[0][0])]
    history = [torch.empty(0, heads + 2 * kv_heads, dim) for _ in blocks]
    for counts, computed in steps:
        step = lay_out(counts, computed, blocks, 4, heads // kv_heads, SMALL, "cpu", window=window)
        qkv = torch.randn(sum(counts), heads + 2 * kv_heads, dim, generator=draw)
        write(step, pool, qkv)
        history = [torch.cat(pair) for pair in zip(history, qkv.split(counts), strict=True)]
    out = torch.full((len(qkv), heads, dim), float("nan"))
    attend(step, pool, qkv, out, windowed=window > 0)
    right = [attended(rows.double(), n, kv_heads, window) for rows, n in zip(history, counts, strict=True)]
    assert (out - torch.cat(right)).abs().max() < 1e-5
    written = {(held[p // 4], p % 4) for held, rows in zip(blocks, history, strict=True) for p in range(len(rows))}
    found = {(b, p) for b in range(6) for p in range(4) if not pool[:, b, :, p].isnan().any()}
    assert found == written


def attended(rows: torch.Tensor, count: int, kv_heads: int, window: int) -> torch.Tensor:
    """Of the last `count` rows [heads + 2 · kv_heads, head_dim] of a sequence: [count, heads, head_dim]."""
    length, heads = len(rows), rows.shape[1] - 2 * kv_heads
    queries, keys, values = torch.split(rows.transpose(0, 1)[None], [heads, kv_heads, kv_heads], 1)
    at, key = torch.arange(length - count, length)[:, None], torch.arange(length)
    seen = (key <= at) & (key > at - window if window else key >= 0)
    out = torch.nn.functional.scaled_dot_product_attention(
        queries[:, :, -count:], keys, values, attn_mask=seen, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@needs_triton
def test_a_pool_of_integers_is_read_with_the_scales_it_was_written_with() -> None:
    draw = torch.Generator().manual_seed(0)
    pool, scales = torch.zeros(2, 3, 2, 4, 16, dtype=torch.int8), torch.full((2, 3, 2, 4), float("nan"))
    step = lay_out([6], [0], [[2, 1]], 4, 2, SMALL, "cpu")
    qkv, out = torch.randn(6, 8, 16, generator=draw), torch.empty(6, 4, 16)
    write(step, pool, qkv, scales)
    attend(step, pool, qkv, out, scales)
    error = (out - attended(qkv.double(), 6, 2, 0)).abs().max()
    assert 0 < error < 0.05  # half of 1/127 of the largest of 16 normal values, in keys and in values


@needs_triton
@pytest.mark.parametrize("asked", [{"scale": 0.9}, {"soft_cap": 0.7}])
def test_scores_are_scaled_and_capped_as_asked(asked: dict[str, float]) -> None:
    draw = torch.Generator().manual_seed(0)
    pool, out = torch.zeros(2, 3, 2, 4, 16), torch.empty(6, 4, 16)
    step = lay_out([6], [0], [[2, 1]], 4, 2, SMALL, "cpu")
    qkv = torch.randn(6, 8, 16, generator=draw)
    write(step, pool, qkv)
    attend(step, pool, qkv, out, **asked)
    right = reference.paged_attention(qkv[:, :4].double(), *pool.double(), step.tables, [6], [6], **asked)
    assert (out - right).abs().max() < 1e-5
