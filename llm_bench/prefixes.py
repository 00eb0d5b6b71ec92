"""Prompts as paths in a tree of hash blocks: what a prefix cache of any size hits, and ids that cannot be right."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

BITS = 32  # engines and tools have kept ids in so many: two ids with equal low halves become one text there


class Prompt(Protocol):
    """What of a Request is looked at."""

    @property
    def tokens_in(self) -> int: ...
    @property
    def hash_ids(self) -> tuple[int, ...]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def line(self) -> int: ...


class Blocks(NamedTuple):
    """Every block of every prompt in order of arrival, (n,) each. A node is a block behind the same blocks."""

    nodes: np.ndarray  # int64; equal nodes are equal whole prefixes up to and with that block
    tokens: np.ndarray  # int64; of this block: the block size, or what is left for the last one
    full: np.ndarray  # bool
    prompt_tokens: int  # of all prompts, those without blocks too


def blocks(requests: Iterable[Prompt]) -> Blocks:
    """The tree of the prompts' hash ids, of any number of bits. Equal ids behind different blocks are different."""
    tree: dict[tuple[int, int], int] = {}
    nodes, tokens, full = array("q"), array("q"), array("b")  # as large as the arrays that they become
    total = 0
    for request in requests:
        size, left, node = request.block_size, request.tokens_in, 0
        total += left
        for i in request.hash_ids:
            node = tree.setdefault((node, i), len(tree) + 1)
            nodes.append(node)
            tokens.append(size if left >= size else max(left, 0))
            full.append(left >= size)
            left -= size
    return Blocks(np.array(nodes, np.int64), np.array(tokens, np.int64), np.array(full, bool), total)


def saved(request: Prompt, tree: dict[tuple[int, int], int]) -> int:
    """Of a prompt's tokens those in full blocks that `tree` has; its own blocks are put there."""
    node, known, left = 0, 0, request.tokens_in
    for i in request.hash_ids:
        fresh = len(tree) + 1
        node = tree.setdefault((node, i), fresh)
        known += request.block_size if node != fresh and left >= request.block_size else 0
        left -= request.block_size
    return known


def findable(requests: Iterable[Prompt], roots: Iterable[str]) -> Iterator[int]:
    """Of each prompt's tokens those in blocks that one before it has behind the same blocks and the same root.

    Partial last blocks count: an engine's own blocks may be smaller, so that this is what none can exceed. `roots`: one
    a prompt; prompts of different roots are different texts from the first token on.
    """
    tree: dict[tuple[str | int, int], int] = {}
    for request, root in zip(requests, roots, strict=True):
        node: str | int = root
        known, left = 0, request.tokens_in
        for i in request.hash_ids:
            fresh = len(tree) + 1
            node = tree.setdefault((node, i), fresh)
            known += min(request.block_size, left) if node != fresh else 0
            left -= request.block_size
        yield known


class Bound(NamedTuple):
    """What an endless prefix cache hits when requests come one after the other, each cached before the next."""

    blocks: int
    blocks_hit: int  # partial last blocks among them, where an earlier prompt ended or ran alike
    distinct: int  # blocks that such a cache ends up with
    tokens: int  # of all prompts, those without blocks too
    tokens_hit: int  # in all blocks hit
    tokens_hit_full: int  # in full blocks only: what an engine that caches nothing else could save


def infinite(found: Blocks) -> Bound:
    """The bound of prefix hits that no cache of these blocks can exceed in this order of arrival."""
    hit = _previous(found.nodes) >= 0
    return Bound(
        blocks=len(hit),
        blocks_hit=int(hit.sum()),
        distinct=int((~hit).sum()),
        tokens=found.prompt_tokens,
        tokens_hit=int(found.tokens[hit].sum()),
        tokens_hit_full=int(found.tokens[hit & found.full].sum()),
    )


def prefix_bound(requests: Iterable[Prompt]) -> tuple[int, int]:
    """(prompt tokens that an endless prefix cache of full blocks would save, all prompt tokens), in arrival order."""
    bound = infinite(blocks(requests))
    return bound.tokens_hit_full, bound.tokens


def lru_curve(found: Blocks, capacities: Sequence[int]) -> list[float]:
    """The share of all blocks hit under an LRU of so many blocks, for each capacity; 0 < len(found.nodes).

    A prompt touches its blocks from first to last; each is looked up, then is the newest, and puts out the oldest where
    the cache is full. Partial blocks count and are kept as full ones are. A block is hit just when its stack distance
    (Mattson et al., IBM Syst. J. 9(2), 1970) is less than the capacity, so that one pass serves all capacities. No
    block is touched without its parent just before it: its distance is never below its parent's, and what is hit of a
    prompt is always a prefix of it.
    """
    distances = np.sort(stack_distances(found.nodes))
    never = int(np.searchsorted(distances, 0))  # -1: a first touch
    return [float(np.searchsorted(distances, c) - never) / len(distances) for c in capacities]


def stack_distances(nodes: np.ndarray) -> np.ndarray:
    """How many other nodes were touched since the last touch of the same node, (n,); -1 where there was none.

    Between the two touches lie i - previous - 1 others; one whose own previous touch lies in between too is a repeat,
    and those are the earlier positions with a previous touch later than this one's.
    """
    previous = _previous(nodes)
    distances = np.arange(len(nodes)) - previous - 1 - _larger_before(previous)
    return np.where(previous >= 0, distances, -1)


def _previous(nodes: np.ndarray) -> np.ndarray:
    """The position of the last equal value before each, (n,); -1 where there is none."""
    order = np.argsort(nodes, kind="stable")
    previous = np.full(len(nodes), -1)
    same = nodes[order[1:]] == nodes[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _larger_before(values: np.ndarray) -> np.ndarray:
    """How many earlier values are larger than each, (n,), in log2(n) passes over arrays.

    The positions, by falling value, are sorted back to 0 ... n - 1 bit by bit from the highest. Before the pass for a
    bit, positions that differ only in this bit and lower ones stand together, at their final place as a group; who has
    the bit set and stands behind one of the group without it is a smaller value at a later position, seen just once.
    """
    n = len(values)
    positions = np.argsort(-values, kind="stable")
    counts = np.zeros(n, np.int64)
    for bit in reversed(range(max(n - 1, 0).bit_length())):
        high = (positions >> bit & 1).astype(bool)
        group = positions >> (bit + 1) << (bit + 1)  # where the group starts, too
        low_before = np.cumsum(~high) - ~high
        low_before -= low_before[group]  # in the group: the first of a group counts from itself
        counts[positions[high]] += low_before[high]
        place = np.where(high, np.arange(n) - low_before + (1 << bit), group + low_before)
        sorted_more = np.empty(n, positions.dtype)
        sorted_more[place] = positions
        positions = sorted_more
    return counts


class Faults(NamedTuple):
    """Ids that break what hash ids are, each as a count and an example in words ("" for none)."""

    several_parents: int  # ids that follow different blocks in different prompts
    parents_example: str
    partial_reused: int  # ids of one size here and of another there
    partial_example: str
    miscounted: int  # prompts whose ids are not ceil(tokens / block size)
    miscounted_example: str
    wide: int  # distinct ids of more than 32 bits
    aliased: int  # distinct ids that are another id in their low 32 bits


def faults(requests: Iterable[Prompt]) -> Faults:
    """What is wrong with the hash ids of these prompts; a chain of hashes gives every id one parent and one size."""
    parents: dict[int, tuple[int | None, int]] = {}  # id -> (the id before it, the line that says so)
    sizes: dict[int, tuple[int, int]] = {}  # id -> (tokens, line)
    several: dict[int, str] = {}
    resized: dict[int, str] = {}
    miscounted: list[str] = []
    for request in requests:
        ids, size, line = request.hash_ids, request.block_size, request.line
        if not ids or size <= 0:
            continue
        need = -(-request.tokens_in // size)
        if len(ids) != need:
            miscounted.append(f"line {line}: {request.tokens_in} tokens need {need} of {size}, got {len(ids)}")
        before, left = None, request.tokens_in
        for i in ids:
            parent, where = parents.setdefault(i, (before, line))
            if parent != before and i not in several:
                several[i] = f"id {i} follows {_named(parent)} in line {where}, {_named(before)} in line {line}"
            now = min(size, left)
            tokens, where = sizes.setdefault(i, (now, line))
            if tokens != now and i not in resized:
                resized[i] = f"id {i} is {tokens} tokens in line {where}, {now} in line {line}"
            before, left = i, left - size
    low = {i & (1 << BITS) - 1 for i in parents}
    return Faults(
        len(several),
        next(iter(several.values()), ""),
        len(resized),
        next(iter(resized.values()), ""),
        len(miscounted),
        next(iter(miscounted), ""),
        sum(not 0 <= i < 1 << BITS for i in parents),
        len(parents) - len(low),
    )


def _named(parent: int | None) -> str:
    return "nothing" if parent is None else f"id {parent}"
