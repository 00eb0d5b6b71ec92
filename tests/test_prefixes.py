"""Prefix trees: the bound, the LRU curve against a cache that is really kept, and ids that cannot be right."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.prefixes import blocks, faults, infinite, lru_curve, stack_distances
from llm_bench.request import Request


def prompt(tokens: int, *ids: int, size: int = 512, line: int = 0) -> Request:
    return Request(tokens, 1, hash_ids=ids, block_size=size, line=line)


FOUR = [prompt(1100, 1, 2, 3), prompt(1536, 1, 2, 9), prompt(1024, 1, 2), prompt(600, 4294967301, 5)]


def test_the_bound_counts_full_blocks_behind_the_same_blocks_in_order_of_arrival():
    bound = infinite(blocks(FOUR))
    assert (bound.tokens_hit_full, bound.tokens) == (2048, 4260)
    assert (bound.blocks, bound.blocks_hit, bound.distinct) == (10, 4, 6)
    assert bound.tokens_hit == 2048


def test_a_partial_last_block_is_a_block_hit_but_no_full_one():
    bound = infinite(blocks([prompt(600, 1, 2), prompt(600, 1, 2)]))
    assert (bound.blocks_hit, bound.tokens_hit, bound.tokens_hit_full) == (2, 600, 512)


def test_an_equal_id_behind_another_block_is_no_hit():
    assert infinite(blocks([prompt(1024, 1, 7), prompt(1024, 2, 7)])).blocks_hit == 0


def test_ids_keep_all_their_bits():
    wide = [prompt(512, 5), prompt(512, 5 + 2**32), prompt(512, 5 + 2**80), prompt(512, 5 + 2**80)]
    assert infinite(blocks(wide)).blocks_hit == 1


def test_prompts_without_blocks_count_as_tokens_only():
    bound = infinite(blocks([Request(100, 1), prompt(512, 1)]))
    assert (bound.blocks, bound.tokens, bound.tokens_hit) == (1, 612, 0)
    assert infinite(blocks([])).blocks == 0


def test_stack_distances_by_hand():
    #                                        a  b  c  b  a  a
    assert stack_distances(np.array([1, 2, 3, 2, 1, 1])).tolist() == [-1, -1, -1, 1, 2, 0]


def kept(requests: list[Request], capacity: int) -> tuple[int, int, bool]:
    """(blocks hit, blocks, whether hits were always a prefix) of an LRU cache of whole prefixes, block by block."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hit = total = 0
    prefix = True
    for request in requests:
        going = True
        for at in range(1, len(request.hash_ids) + 1):
            key = request.hash_ids[:at]
            total += 1
            found = key in cache
            hit += found
            prefix &= going or not found
            going = found
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hit, total, prefix


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=25))
def test_the_curve_is_that_of_a_cache_really_kept_and_hits_are_always_a_prefix(prompts):
    requests = [prompt(4 * len(ids), *ids, size=4) for ids in prompts]
    capacities = [1, 2, 3, 5, 8, 13, 1000]
    curve = lru_curve(blocks(requests), capacities)
    for capacity, share in zip(capacities, curve, strict=True):
        hit, total, prefix = kept(requests, capacity)
        assert prefix
        assert share == hit / total
    bound = infinite(blocks(requests))
    assert curve[-1] == bound.blocks_hit / bound.blocks
    assert curve == sorted(curve)


def test_sound_ids_have_no_faults_and_ids_over_32_bits_are_only_counted():
    assert faults([prompt(1100, 1, 2, 3, line=1), prompt(1024, 1, 2, line=2)]) == (0, "", 0, "", 0, "", 0, 0)
    assert faults([prompt(512, 2**40)]).wide == 1


@pytest.mark.parametrize(
    ("requests", "name", "example"),
    [
        (
            [prompt(1024, 1, 2, line=1), prompt(1024, 3, 2, line=2), prompt(512, 2, line=3)],
            "several_parents",
            "id 2 follows id 1 in line 1, id 3 in line 2",
        ),
        (
            [prompt(600, 1, 3, line=1), prompt(1024, 1, 3, line=6)],
            "partial_reused",
            "id 3 is 88 tokens in line 1, 512 in line 6",
        ),
        ([prompt(20, 1, 2, line=5)], "miscounted", "line 5: 20 tokens need 1 of 512, got 2"),
    ],
)
def test_a_fault_is_counted_once_an_id_with_its_lines(requests, name, example):
    found = faults(requests)
    at = found._fields.index(name)
    assert (found[at], found[at + 1]) == (1, example)


def test_ids_that_a_tool_of_32_bits_would_take_for_one():
    found = faults(FOUR)
    assert (found.wide, found.aliased) == (1, 1)  # 2^32 + 5 is 5 in its low half
