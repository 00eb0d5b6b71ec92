"""The work of one step as index tensors: which token stands in which row, where its K and V go, what it attends to."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from reference_engine.sequence import Sequence

Work = Items[tuple[Sequence, int]]
LayOut = Callable[[list[Sequence], list[int]], object]  # sequences, and how many tokens each computes -> a layout

# Decode rows of similar length are attended to together, padded to the longest. Few rows and a small gather stay in
# the cache of a CPU core; a GPU wants few launches.
GROUP_ROWS = {"cpu": 8, "cuda": 256}
GROUP_POSITIONS = {"cpu": 2048, "cuda": 1 << 22}


class Pages(NamedTuple):
    """The KV pool's geometry: [layer][2][num_blocks, kv_heads, block_size, head_dim], and how far back layers look.

    Seen as rows of block_size·head_dim, the keys of block b for KV head h are row b·kv_heads + h: gathering the rows of
    a sequence head by head yields matrices that attention takes as they are.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    window: int = 0  # positions that a query of a windowed layer sees, its own among them; 0: all


class Group(NamedTuple):
    """Decode rows [start, end): one query each, padded to `blocks` blocks."""

    start: int
    end: int
    blocks: int
    pool_rows: torch.Tensor  # [rows · kv_heads · blocks]
    masks: tuple[torch.Tensor, torch.Tensor]  # plain and windowed layers': [rows, 1, 1, blocks · block_size], 0 or -inf


class Chunk(NamedTuple):
    """Rows [start, end) of one sequence, at positions [computed, computed + end - start)."""

    start: int
    end: int
    computed: int
    pool_rows: torch.Tensor  # [kv_heads · blocks]; empty if computed is 0: then all keys are in these rows
    # Plain and windowed layers': [end - start, computed + end - start], True where a query sees a key; None: causal
    masks: tuple[torch.Tensor | None, torch.Tensor | None]


class Grouped(NamedTuple):
    """For attention in torch: what is gathered together, and masks for what is too much in it."""

    pool_slots: (
        torch.Tensor
    )  # [rows · 2 · kv_heads] rows of head_dim in a layer's pool, keys' then values' of each token
    groups: list[Group]
    chunks: list[Chunk]


class Paged(NamedTuple):
    """For kernels that follow a block table themselves."""

    tables: torch.Tensor  # [sequences, blocks] int32
    table_of_row: torch.Tensor  # [rows] int32


class AdapterRows(NamedTuple):
    """What an adapter is added to."""

    adapter: int
    rows: torch.Tensor
    sampled: torch.Tensor  # the same among the rows that sample, as places in `sample_rows`


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows are the tokens of the step, decodes first, shortest first. `sampled` are the work items that get a token."""

    token_ids: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows]: block · block_size + place in it
    layout: object  # Grouped, Paged, or what kernels/ read (gpu.Layout)
    sample_rows: torch.Tensor  # [len(sampled)]
    sampled: list[int]
    adapters: tuple[AdapterRows, ...] = ()


def build(
    work: Work,
    pages: Pages,
    device: torch.device,
    dtype: torch.dtype,
    paged: bool = False,
    lay_out: LayOut | None = None,
) -> Batch:
    """Lay out one step; dtype: of masks. n >= 1, and sequence.blocks covers computed + n: the scheduler's promise.

    `paged`: for kernels that read block tables, instead of for gathers. `lay_out`: makes the layout of others.
    """
    decodes = sorted((i for i, (_, n) in enumerate(work) if n == 1), key=lambda i: work[i][0].computed)
    order = decodes + [i for i, (_, n) in enumerate(work) if n > 1]
    counts = [work[i][1] for i in order]
    starts = [0, *np.cumsum(counts).tolist()]
    rows = starts[-1]

    token_ids, positions = np.empty(rows, np.int64), np.empty(rows, np.int64)
    blocks = np.empty(rows, np.int64)
    for i, start, n in zip(order, starts, counts, strict=False):
        sequence = work[i][0]
        first = sequence.computed
        assert n >= 1, "a sequence without work in a step"
        assert len(sequence.blocks) * pages.block_size >= first + n, "the scheduler gave too few blocks"
        if n == 1:  # the common case, without temporary arrays
            token_ids[start], positions[start] = sequence.token_ids[first], first
            blocks[start] = sequence.blocks[first // pages.block_size]
            continue
        token_ids[start : start + n] = sequence.token_ids[first : first + n]
        at = positions[start : start + n] = np.arange(first, first + n)
        blocks[start : start + n] = np.asarray(sequence.blocks)[at // pages.block_size]

    ends = [i for i, (s, n) in enumerate(work) if s.computed + n == len(s.token_ids)]
    row_of = {i: start + n - 1 for i, start, n in zip(order, starts, counts, strict=False)}
    offsets = positions % pages.block_size
    layout: object
    if lay_out is not None:
        layout = lay_out([work[i][0] for i in order], counts)
    elif paged:
        layout = _paged([work[i][0] for i in order], counts, pages, device)
    else:
        groups = _groups([work[i][0] for i in decodes], pages, device, dtype)
        chunks = [_chunk(*work[i], starts[k], pages, device) for k, i in enumerate(order) if work[i][1] > 1]
        layout = Grouped(_on(device, _slots(blocks, offsets, pages)), groups, chunks)
    sample_rows = np.array([row_of[i] for i in ends], np.int64)
    owners = [work[i][0].adapter for i in order]
    return Batch(
        token_ids=_on(device, token_ids),
        positions=_on(device, positions),
        slots=_on(device, blocks * pages.block_size + offsets),
        layout=layout,
        sample_rows=_on(device, sample_rows),
        sampled=ends,
        adapters=_adapter_rows(owners, counts, sample_rows, device) if any(owners) else (),
    )


def _adapter_rows(
    owners: list[int], counts: list[int], sample_rows: np.ndarray, device: torch.device
) -> tuple[AdapterRows, ...]:
    of_row = np.repeat(owners, counts)
    of_sample = of_row[sample_rows]
    return tuple(
        AdapterRows(
            number, _on(device, np.flatnonzero(of_row == number)), _on(device, np.flatnonzero(of_sample == number))
        )
        for number in sorted(set(owners) - {0})
    )


def _paged(sequences: list[Sequence], counts: list[int], pages: Pages, device: torch.device) -> Paged:
    """Tables as wide as the longest sequence needs after this step; beyond a shorter one's end nothing is read."""
    widths = [-(-(s.computed + n) // pages.block_size) for s, n in zip(sequences, counts, strict=True)]
    tables = np.zeros((len(sequences), max(widths, default=0)), np.int32)
    for row, sequence, width in zip(tables, sequences, widths, strict=True):
        row[:width] = sequence.blocks[:width]
    return Paged(_on(device, tables), _on(device, np.repeat(np.arange(len(counts), dtype=np.int32), counts)))


def _slots(blocks: np.ndarray, offsets: np.ndarray, pages: Pages) -> np.ndarray:
    """Rows of head_dim in one layer's pool seen as [2 · num_blocks · kv_heads · block_size, head_dim]."""
    kv, heads = np.arange(2)[None, :, None], np.arange(pages.kv_heads)[None, None, :]
    block = kv * pages.num_blocks + blocks[:, None, None]
    slots: np.ndarray = ((block * pages.kv_heads + heads) * pages.block_size + offsets[:, None, None]).reshape(-1)
    return slots


def _pool_rows(tables: np.ndarray, kv_heads: int) -> np.ndarray:
    """[sequences, blocks] -> the pool's rows in the order sequence, head, block."""
    rows: np.ndarray = (tables[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]).reshape(-1)
    return rows


def _groups(decodes: list[Sequence], pages: Pages, device: torch.device, dtype: torch.dtype) -> list[Group]:
    """Neighbours in the order of length, as many as the limits allow."""
    groups, start = [], 0
    while start < len(decodes):
        end = start + 1
        while end < len(decodes) and end - start < GROUP_ROWS[device.type]:
            positions = (decodes[end].computed + 1) * (end + 1 - start)
            if positions > GROUP_POSITIONS[device.type]:
                break
            end += 1
        group = decodes[start:end]
        width = -(-(group[-1].computed + 1) // pages.block_size)
        tables = np.zeros((len(group), width), np.int64)  # block 0 fills up: the mask hides it
        for row, sequence in zip(tables, group, strict=True):
            held = sequence.blocks[:width]
            row[: len(held)] = held
        queries, keys = np.array([s.computed for s in group]), np.arange(width * pages.block_size)
        seen, near = _seen(queries, keys, pages.window)
        plain = _additive(seen, device, dtype)
        masks = (plain, plain if near is None else _additive(near, device, dtype))
        rows = _on(device, _pool_rows(tables, pages.kv_heads))
        groups.append(Group(start, end, width, rows, masks))
        start = end
    return groups


def _chunk(sequence: Sequence, n: int, start: int, pages: Pages, device: torch.device) -> Chunk:
    computed = sequence.computed
    if not computed and not 0 < pages.window < n:
        return Chunk(start, start + n, 0, torch.empty(0, dtype=torch.int64), (None, None))
    seen, near = _seen(np.arange(computed, computed + n), np.arange(computed + n), pages.window)
    plain = _on(device, seen) if computed else None
    masks = (plain, plain if near is None else _on(device, near))
    if not computed:
        return Chunk(start, start + n, 0, torch.empty(0, dtype=torch.int64), masks)
    width = -(-(computed + n) // pages.block_size)
    table = np.array(sequence.blocks[:width], np.int64)[None]
    return Chunk(start, start + n, computed, _on(device, _pool_rows(table, pages.kv_heads)), masks)


def _seen(queries: np.ndarray, keys: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray | None]:
    """[queries, keys], True where the query at one position sees the key at another; in windowed layers, if another."""
    seen: np.ndarray = keys <= queries[:, None]
    if not window or queries.max() < window:
        return seen, None
    return seen, seen & (keys > queries[:, None] - window)


def _additive(seen: np.ndarray, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return _on(device, np.where(seen, np.float32(0), np.float32(-np.inf))).to(dtype)[:, None, None, :]


def _on(device: torch.device, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
