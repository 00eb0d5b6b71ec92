"""What the engine asks of the attention kernels: a step laid out on the host, then two calls a layer.

Everything here but `write` and `attend` is arithmetic on the CPU and needs no Triton. Where a sequence is cut, and so
how its sums are ordered, depends on its own count and length alone: its result is the same, bit for bit, in any batch.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
import torch


class Tile(NamedTuple):
    """How one launch cuts its work: `rows` (query, head) pairs times `keys` positions at a time."""

    rows: int
    keys: int
    split: int  # tokens that one program reads of a sequence that is one tile; a multiple of `keys`
    warps: int = 4
    stages: int = 3  # keys and values arrive in shared memory stages - 1 turns ahead


# "few": sequences whose queries fit 16 rows, decodes above all. 512 tokens are 8 turns of a program and 128 KiB each of
# K and V at 8B shapes; one sequence of 4,096 tokens still makes 64 programs. "many": chunks. Where one is a single tile
# it is cut too, rarely: else a short question after a long cached document would be read by one program a KV head.
# Keyed by bytes of a query's element, doubled for heads of more than 128, and by what a program may hold in shared
# memory. For sm_90 the compiler gives the first two 70 and 128 KiB, 128 and 190 registers a thread, no spills.
TILES: dict[tuple[int, str], dict[str, Tile]] = {
    (2, "roomy"): {"few": Tile(16, 64, 512), "many": Tile(128, 64, 4096, warps=8)},
    (2, "small"): {"few": Tile(16, 64, 512), "many": Tile(128, 64, 4096, warps=8, stages=2)},
    (4, "roomy"): {"few": Tile(16, 32, 512), "many": Tile(64, 32, 4096)},  # float32, in three products; or head_dim 256
    (4, "small"): {"few": Tile(16, 32, 512), "many": Tile(32, 32, 4096, stages=2)},
}
ROOMY_BYTES = 200 * 1024  # of shared memory a program: H100, H200 and B200 have 227 KiB, A100 163, L40S and 4090 99


def tiles_for(dtype: torch.dtype, head_dim: int, device: torch.device | str) -> dict[str, Tile]:
    """The tiles of queries of `dtype` on a GPU; where kernels are interpreted, those of the large GPUs.

    Raises ValueError for heads that no tile of any GPU holds.
    """
    device, size = torch.device(device), "roomy"
    if device.type == "cuda":
        has = torch.cuda.get_device_properties(device)  # what a program must ask for is no part of it in every torch
        held = getattr(has, "shared_memory_per_block_optin", has.shared_memory_per_block)
        size = "roomy" if held >= ROOMY_BYTES else "small"
    width = dtype.itemsize * max(-(-head_dim // 128), 1)
    if (width, size) not in TILES:
        raise ValueError(f"heads of {head_dim} elements of {dtype}; would be right: 512 bytes or less")
    return TILES[width, size]


class Work(NamedTuple):
    """What the programs of one step do, in layers that look `window` positions back (0: all the way)."""

    window: int
    group: int  # query heads of a KV head
    launches: tuple[tuple[Tile, torch.Tensor], ...]  # int32 [programs, 8]: a row of ITEM, sequence -1: nothing to do
    merges: torch.Tensor  # int32 [rows, 4]: a row of MERGE, splits 0: nothing to do
    slots: int  # results of splits, one a query each, that wait for the merge
    rows: int = 0  # of query that it is of, and sequences: what is given must have as many
    sequences: int = 0

    def to(self, device: torch.device | str) -> "Work":
        launches = tuple((tile, items.to(device)) for tile, items in self.launches)
        return self._replace(launches=launches, merges=self.merges.to(device))


# `row` is a row of query and out, `position` that row's in its sequence; keys [begin, end) of the sequence are read;
# `place` is the first slot of the result, -1: straight to out.
ITEM = ("sequence", "row", "queries", "position", "begin", "end", "place", "unused")
MERGE = ("row", "slot", "step", "splits")  # the splits of a query are `step` slots apart


def plan(
    counts: Items[int] | np.ndarray,
    lengths: Items[int] | np.ndarray,
    group: int,
    *,
    window: int = 0,
    tiles: Mapping[str, Tile] = TILES[2, "roomy"],
) -> Work:
    """Lay out a step: sequence i's last counts[i] of lengths[i] tokens are queries, in rows one after the other.

    `lengths` include the step's own tokens. Everything stays on the CPU; `Work.to` takes it to the device. A sequence
    is cut by its own count and length alone. Raises ValueError.
    """
    n, length = np.asarray(counts, np.int64).reshape(-1), np.asarray(lengths, np.int64).reshape(-1)
    if n.shape != length.shape or (n < 0).any() or (n > length).any():
        raise ValueError(f"counts {n.tolist()} of lengths {length.tolist()}; would be right: 0 <= count <= length each")
    starts = np.cumsum(n) - n
    few, many = (_fitting(tiles[name], group) for name in ("few", "many"))
    is_few = n <= few.rows // group
    launches, merges, slots = [], [np.empty((0, 4), np.int64)], 0
    for tile, chosen in ((few, (n > 0) & is_few), (many, ~is_few)):
        which = np.flatnonzero(chosen)
        if which.size:
            items, merge, slots = _cut(tile, which, starts, n, length, group, window, slots)
            launches.append((tile, _int32(items)))
            merges.append(merge)
    return Work(window, group, tuple(launches), _int32(np.concatenate(merges)), slots, int(n.sum()), len(n))


def _fitting(tile: Tile, group: int) -> Tile:
    """With rows for at least one query of all heads that share a KV head; a power of two, as Triton wants it."""
    if tile.split % tile.keys:
        raise ValueError(f"a split of {tile.split} tokens; would be right: a multiple of keys, {tile.keys}")
    return tile._replace(rows=max(tile.rows, 1 << (group - 1).bit_length()))


def _cut(
    tile: Tile,
    which: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    group: int,
    window: int,
    slots: int,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Sequences `which` as ITEM rows, longest first; MERGE rows; slots used so far."""
    per_tile = tile.rows // group
    tiles = -(-counts[which] // per_tile)
    sequence, first = np.repeat(which, tiles), _within(tiles) * per_tile
    queries = np.minimum(counts[sequence] - first, per_tile)
    row, position = starts[sequence] + first, lengths[sequence] - counts[sequence] + first
    end = position + queries
    begin = np.maximum(position + 1 - window, 0) if window else np.zeros_like(end)

    cuts = np.repeat(tiles == 1, tiles)  # one tile: few programs otherwise, so it is cut, at multiples of tile.split
    low = np.where(cuts, begin // tile.split, 0)
    splits = np.where(cuts, -(-end // tile.split) - low, 1)
    taken = np.where(splits > 1, splits * queries, 0)
    slot = slots + np.cumsum(taken) - taken

    piece, number = np.repeat(np.arange(len(end)), splits), _within(splits)
    at = (low[piece] + number) * tile.split
    cut = cuts[piece]
    items = np.stack(
        [
            *(sequence[piece], row[piece], queries[piece], position[piece]),
            np.where(cut, np.maximum(begin[piece], at), begin[piece]),
            np.where(cut, np.minimum(end[piece], at + tile.split), end[piece]),
            np.where(splits[piece] > 1, slot[piece] + number * queries[piece], -1),
            np.zeros_like(piece),
        ],
        axis=1,
    )
    split = np.repeat(np.flatnonzero(splits > 1), queries[splits > 1])
    query = _within(queries[splits > 1])
    merges = np.stack([row[split] + query, slot[split] + query, queries[split], splits[split]], axis=1)
    return items[np.argsort(items[:, 4] - items[:, 5], kind="stable")], merges, slots + int(taken.sum())


def _within(sizes: np.ndarray) -> np.ndarray:
    """[3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    numbers: np.ndarray = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return numbers


def _int32(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32))


class Step(NamedTuple):
    """One step's indices on the device: where its rows are written, and what they attend to."""

    slots: torch.Tensor  # int32 [rows]: block · block_size + place in it
    tables: torch.Tensor  # int32 [sequences, blocks]
    works: tuple[Work, Work]  # of layers that look all the way back, and of those with a window


def lay_out(
    counts: Items[int],
    computed: Items[int],
    blocks: Items[Items[int]],
    block_size: int,
    group: int,
    tiles: Mapping[str, Tile],
    device: torch.device | str,
    *,
    window: int = 0,
) -> Step:
    """A step in which sequence i computes counts[i] tokens after computed[i] others, in blocks blocks[i].

    Rows of the step are the sequences' tokens in this order. `group`: query heads a KV head; `tiles`: of `tiles_for`,
    asked once; `window`: of the layers that have one. One copy to the device, whatever the batch. Raises ValueError.
    """
    n, first = np.asarray(counts, np.int64).reshape(-1), np.asarray(computed, np.int64).reshape(-1)
    needed = -(-(first + n) // block_size)
    tables = np.zeros((len(n), max(needed, default=0)), np.int32)
    for row, held, width in zip(tables, blocks, needed.tolist(), strict=True):
        if len(held) < width:
            raise ValueError(f"{len(held)} blocks of {block_size} for a sequence; would be right: {width} or more")
        row[:width] = held[:width]
    sequence = np.repeat(np.arange(len(n)), n)
    at = first[sequence] + _within(n)
    slots = tables[sequence, at // block_size].astype(np.int64) * block_size + at % block_size
    plain = plan(n, first + n, group, tiles=tiles)
    near = plan(n, first + n, group, window=window, tiles=tiles) if window else plain
    return _sent(Step(_int32(slots), torch.from_numpy(tables), (plain, near)), device)


def _sent(step: Step, device: torch.device | str) -> Step:
    """The same on the device by one copy: small ones cost more to start than to do."""
    works = step.works[: 1 if step.works[0] is step.works[1] else 2]
    parts = [step.slots, step.tables]
    for work in works:
        parts += [work.merges, *(items for _, items in work.launches)]
    # Each part starts at a multiple of 16 bytes: Triton compiles another kernel for addresses that do not.
    sizes = [part.numel() for part in parts]
    starts = np.cumsum([0, *(-(-size // 4) * 4 for size in sizes)]).tolist()
    whole = np.zeros(starts[-1], np.int32)
    for part, start, size in zip(parts, starts, sizes, strict=False):
        whole[start : start + size] = part.numpy().reshape(-1)
    there = torch.from_numpy(whole).to(device, non_blocking=True)
    found = iter([there[a : a + n].view(part.shape) for part, a, n in zip(parts, starts, sizes, strict=False)])
    slots, tables = next(found), next(found)
    moved = []
    for work in works:
        merges = next(found)
        moved.append(work._replace(merges=merges, launches=tuple((tile, next(found)) for tile, _ in work.launches)))
    return Step(slots, tables, (moved[0], moved[-1]))


def write(step: Step, pool: torch.Tensor, qkv: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """The step's keys and values into their slots of one layer's pool, quantised where the pool is.

    `qkv` [rows, heads + 2 · kv_heads, head_dim], normed and rotated: queries, keys, values of each row. `pool`
    [2, num_blocks, kv_heads, block_size, head_dim], keys and values; `scales` [2, num_blocks, kv_heads, block_size],
    float32, of a pool of int8 or float8_e4m3fn. Nothing is copied, nothing waited for. Raises ValueError.
    """
    from kernels.kv_write import kv_write

    _, keys, values = _parts(qkv, pool)
    of_keys, of_values = (None, None) if scales is None else (scales[0], scales[1])
    kv_write(keys, values, pool[0], pool[1], step.slots, key_scales=of_keys, value_scales=of_values)


def attend(
    step: Step,
    pool: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None = None,
    *,
    windowed: bool = False,
    scale: float | None = None,
    soft_cap: float = 0.0,
) -> None:
    """What the step's queries find in one layer's pool, its own rows among it, to `out` [rows, heads, head_dim].

    The other arguments as `write` has them; `windowed`: the layer looks back only as far as the step's window; `scale`
    and `soft_cap` as in paged_attention. Raises ValueError.
    """
    from kernels.paged_attention import paged_attention

    queries, _, _ = _parts(qkv, pool)
    paged_attention(
        *(out, queries, pool[0], pool[1], step.tables, step.works[windowed]),
        scale=scale,
        soft_cap=soft_cap,
        key_scales=None if scales is None else scales[0],
        value_scales=None if scales is None else scales[1],
    )


def _parts(qkv: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kv_heads = pool.shape[2]
    return torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
