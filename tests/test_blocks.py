import pytest

from reference_engine.blocks import Blocks
from reference_engine.sequence import SamplingParams, Sequence


def sequence(tokens: list[int], salt: bytes = b"") -> Sequence:
    return Sequence(0, tokens, len(tokens), SamplingParams(1), 0, salt=salt)


def compute(blocks: Blocks, tokens: list[int], salt: bytes = b"") -> Sequence:
    """A sequence that was admitted and computed to its end."""
    s = sequence(tokens, salt)
    assert blocks.admit(s, blocks.match(s))
    s.computed = len(tokens)
    blocks.publish(s)
    return s


def hit(blocks: Blocks, tokens: list[int], salt: bytes = b"") -> int:
    return len(blocks.match(sequence(tokens, salt))) * blocks.block_size


@pytest.mark.parametrize(
    ("again", "reused"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 4),  # its last token must be computed, and blocks are reused whole
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([1, 2, 3, 4, 5], 4),
        ([1, 2, 3, 4], 0),
        ([9, 2, 3, 4, 5, 6, 7, 8, 9], 0),
        ([1, 2, 3, 4, 9, 6, 7, 8, 9], 4),
    ],
)
def test_a_full_prefix_is_reused_but_for_the_last_token(again: list[int], reused: int) -> None:
    blocks = Blocks(8, 4)
    blocks.release(compute(blocks, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert hit(blocks, again) == reused


def test_an_equal_block_after_another_beginning_is_no_hit() -> None:
    blocks = Blocks(8, 2)
    compute(blocks, [1, 1, 7, 7, 7, 7])
    assert hit(blocks, [2, 2, 7, 7, 7, 7]) == 0
    assert hit(blocks, [7, 7, 7, 7]) == 0


def test_a_salt_keeps_its_blocks_to_itself() -> None:
    blocks = Blocks(8, 2)
    compute(blocks, [1, 2, 3], b"alice")
    assert [hit(blocks, [1, 2, 3], salt) for salt in (b"", b"bob", b"alice")] == [0, 0, 2]


def test_a_block_is_offered_only_once_it_is_computed() -> None:
    blocks = Blocks(8, 2)
    first = sequence([1, 2, 3, 4, 5])
    assert blocks.admit(first, [])
    assert hit(blocks, [1, 2, 3, 4, 5]) == 0
    first.computed = 3
    blocks.publish(first)
    assert hit(blocks, [1, 2, 3, 4, 5]) == 2


def computed_twice() -> tuple[Blocks, Sequence, Sequence]:
    """Two sequences of equal tokens, admitted before either had offered a block."""
    blocks = Blocks(8, 2)
    first, second = sequence([1, 2, 3]), sequence([1, 2, 3])
    for s in (first, second):
        assert blocks.admit(s, blocks.match(s))
    for s in (first, second):
        s.computed = 3
        blocks.publish(s)
        blocks.check([first, second])
    return blocks, first, second


def test_two_that_compute_the_same_keep_their_own_blocks() -> None:
    blocks, first, second = computed_twice()
    assert not set(first.blocks) & set(second.blocks)
    assert blocks.match(sequence([1, 2, 3])) == first.blocks[:1]
    assert [blocks.writable(s.blocks[0]) for s in (first, second)] == [False, True]


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    blocks = Blocks(8, 2)
    first = compute(blocks, [1, 2, 3])
    second = compute(blocks, [1, 2, 4])
    assert first.blocks[0] == second.blocks[0]
    assert blocks.refs[first.blocks[0]] == 2
    shared = first.blocks[0]
    blocks.release(first)
    assert shared not in blocks.free
    blocks.release(second)
    blocks.check([])
    assert len(blocks.free) == 8


def test_blocks_go_empty_ones_first_then_tails_of_the_longest_unused() -> None:
    blocks = Blocks(6, 2)
    old, new = compute(blocks, [1, 1, 2, 2, 3]), compute(blocks, [5, 5, 6, 6, 7])
    blocks.release(old)
    blocks.release(new)
    compute(blocks, [8, 8, 9])  # the two that held only half a block
    assert (hit(blocks, [1, 1, 2, 2, 3]), hit(blocks, [5, 5, 6, 6, 7])) == (4, 4)
    compute(blocks, [4])
    assert (hit(blocks, [1, 1, 2, 2, 3]), hit(blocks, [5, 5, 6, 6, 7])) == (2, 4)


def test_a_hit_is_safe_from_eviction_while_held() -> None:
    blocks = Blocks(3, 2)
    blocks.release(compute(blocks, [1, 1, 2]))
    holder = compute(blocks, [1, 1, 3])
    compute(blocks, [9])
    assert not blocks.free
    assert blocks.match(sequence([1, 1, 4])) == holder.blocks[:1]


def test_an_admission_that_fails_changes_nothing() -> None:
    blocks = Blocks(4, 2)
    blocks.release(compute(blocks, [1, 1, 2, 2, 3]))
    keeper = compute(blocks, [9])
    order = list(blocks.free)
    late = sequence([1, 1, 2, 2, 3, 3, 4])
    assert len(blocks.match(late)) == 2
    assert not blocks.admit(late, blocks.match(late))  # 2 more wanted; of the 3 free ones 2 are the hits themselves
    assert (late.blocks, list(blocks.free)) == ([], order)
    blocks.check([keeper])


def test_contents_of_one_hash_are_told_apart() -> None:
    blocks = Blocks(8, 2, hasher=lambda content: b"%d" % (len(content) > 0))  # everything collides
    first = compute(blocks, [1, 1, 2])
    second = compute(blocks, [3, 3, 4, 4, 5])
    assert blocks.match(sequence([1, 1, 9])) == first.blocks[:1]
    assert hit(blocks, [3, 3, 9]) == 0
    blocks.check([first, second])


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = Blocks(8, 2, prefix_caching=False)
    blocks.release(compute(blocks, [1, 1, 2]))
    assert hit(blocks, [1, 1, 2]) == 0


def test_the_check_finds_a_leak_and_a_stolen_block() -> None:
    blocks = Blocks(4, 2)
    s = compute(blocks, [1, 1, 2])
    with pytest.raises(AssertionError, match="reference counts"):
        blocks.check([])
    s.token_ids[0] = 7
    s.hashes.clear()
    with pytest.raises(AssertionError, match="other tokens"):
        blocks.check([s])


def test_what_is_withdrawn_is_given_to_nobody_and_kept_by_its_holders() -> None:
    blocks = Blocks(8, 2)
    first = compute(blocks, [1, 1, 2, 2, 3])
    other = compute(blocks, [5, 5, 6])
    second = compute(blocks, [1, 1, 4, 4, 5])
    shared = first.blocks[0]
    assert (second.blocks[0], blocks.refs[shared]) == (shared, 2)
    blocks.withdraw(second)
    blocks.check([first, other, second])
    assert [hit(blocks, p) for p in ([1, 1, 2, 2, 3], [1, 1, 4, 4, 5], [5, 5, 6])] == [0, 0, 2]
    assert blocks.refs[shared] == 2
    blocks.withdraw(second)  # nothing is left to withdraw
    for s in (second, first, other):
        blocks.release(s)
    blocks.check([])
    again = compute(blocks, [1, 1, 2, 2, 3])
    assert hit(blocks, [1, 1, 2, 2, 9]) == 4
    blocks.check([again])


def test_what_is_withdrawn_is_taken_before_what_may_be_reused() -> None:
    blocks = Blocks(4, 2)
    kept, gone = compute(blocks, [1, 1, 2]), compute(blocks, [5, 5, 6])
    (withdrawn, _) = gone.blocks
    blocks.withdraw(gone)
    blocks.release(kept)
    blocks.release(gone)
    assert list(blocks.free).index(withdrawn) == 0
    compute(blocks, [7, 7, 8, 8, 9])
    assert hit(blocks, [1, 1, 2]) == 2


def test_of_two_that_compute_the_same_only_who_offered_it_withdraws_it() -> None:
    blocks, first, second = computed_twice()
    blocks.withdraw(second)
    assert hit(blocks, [1, 2, 3]) == 2
    blocks.withdraw(first)
    assert hit(blocks, [1, 2, 3]) == 0
    blocks.check([first, second])
