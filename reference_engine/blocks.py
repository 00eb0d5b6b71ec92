"""Paged KV memory without tensors: who holds which block, which blocks are free, and which may be reused by prefix.

Blocks hold `block_size` tokens; a sequence's table maps position p to `blocks[p // block_size]`. Design of vLLM's
KV manager (docs/design/prefix_caching.md); PagedAttention, arXiv 2309.06180.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b

from reference_engine.sequence import Sequence


def digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


class Blocks:
    """Reference counts, an LRU list of the free, and a hash chain over full blocks.

    A block's content is its parent's digest and its own tokens (int32), so equal content means an equal prefix. It is
    offered for reuse only by `publish`, after its keys and values were computed. Two sequences that compute the same
    block at the same time both keep theirs; the first is offered. Tables only ever grow at the end.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        hasher: Callable[[bytes], bytes] = digest,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._hasher = hasher
        self.refs = [0] * num_blocks
        self.held: list[int] = []  # kept from everybody, to put the memory under pressure
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # first: the next to be taken
        self._content: list[bytes] = [b""] * num_blocks  # of published blocks, else b""
        self._by_hash: dict[bytes, int] = {}

    def match(self, sequence: Sequence) -> list[int]:
        """Published blocks that hold the beginning of the sequence; at least its last token is left to be computed."""
        hits: list[int] = []
        if not self.prefix_caching:
            return hits
        for i in range((len(sequence.token_ids) - 1) // self.block_size):
            block = self._by_hash.get(self._hash(sequence, i))
            # The tokens are compared too: a hash alone would serve one prompt the keys of another.
            if block is None or self._content[block] != self._content_of(sequence, i):
                break
            hits.append(block)
        return hits

    def admit(self, sequence: Sequence, hits: list[int], reserve: int = 0) -> bool:
        """Give a table that covers all its tokens, or `reserve` where that is more, beginning with `hits` of `match`.

        False changes nothing.
        """
        assert not sequence.blocks
        fresh = self.needed(max(len(sequence.token_ids), reserve)) - len(hits)
        if fresh + sum(not self.refs[b] for b in hits) > len(self.free):
            return False
        for block in hits:
            if not self.refs[block]:
                del self.free[block]
            self.refs[block] += 1
        sequence.blocks = hits + [self._take() for _ in range(fresh)]
        sequence.published = len(hits)
        sequence.computed = len(hits) * self.block_size
        return True

    def extend(self, sequence: Sequence, ahead: int = 0) -> bool:
        """Let the table cover all tokens of a running sequence, and `ahead` more if that takes nothing from anybody.

        False changes nothing.
        """
        fresh = self.needed(len(sequence.token_ids)) - len(sequence.blocks)
        if fresh > len(self.free):
            return False
        wanted = self.needed(len(sequence.token_ids) + ahead) - len(sequence.blocks)
        sequence.blocks += [self._take() for _ in range(min(max(fresh, wanted), len(self.free)))]
        return True

    def publish(self, sequence: Sequence) -> None:
        """Offer the blocks that are full and computed."""
        if not self.prefix_caching:
            return
        for i in range(sequence.published, sequence.computed // self.block_size):
            key, content = self._hash(sequence, i), self._content_of(sequence, i)
            holder = self._by_hash.setdefault(key, sequence.blocks[i])
            if holder == sequence.blocks[i]:
                self._content[holder] = content
            elif self._content[holder] != content:
                return  # two contents of one hash: this chain ends here, else its children would pass for the other's
            sequence.published = i + 1

    def withdraw(self, sequence: Sequence) -> None:
        """Offer no more what it has published or was given: who is admitted from now on does not get it.

        Whoever holds such a block keeps it, and does not offer it again. Later blocks of its chain stay published, but
        are found only once somebody has published an equal one in its place.
        """
        for block in sequence.blocks[: sequence.published]:
            if self._content[block]:
                self._forget(block)

    def release(self, sequence: Sequence) -> None:
        """Take the table back. The last block is freed and so reused first: a tail is useless without its head."""
        for block in reversed(sequence.blocks):
            self.refs[block] -= 1
            assert self.refs[block] >= 0
            if not self.refs[block]:
                self.free[block] = None
                if not self._content[block]:
                    self.free.move_to_end(block, last=False)  # nothing in it to reuse: take it before a cached one
        sequence.blocks = []
        sequence.computed = sequence.published = 0

    def hold(self, blocks: int) -> None:
        """Keep so many, or as many of them as are free, from everybody; 0 gives all back."""
        while len(self.held) > blocks:
            block = self.held.pop()
            self.refs[block] = 0
            self.free[block] = None
            self.free.move_to_end(block, last=False)  # nothing in it to reuse
        self.held += [self._take() for _ in range(min(blocks - len(self.held), len(self.free)))]

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def writable(self, block: int) -> bool:
        """Only its one holder may write to a block, and only until it is offered (or again when withdrawn)."""
        return self.refs[block] == 1 and not self._content[block]

    def check(self, holders: Iterable[Sequence]) -> None:
        """Every invariant of the pool, given all sequences alive; AssertionError says which one is broken."""
        refs = [0] * self.num_blocks
        for block in self.held:
            refs[block] += 1
        for sequence in holders:
            assert len(set(sequence.blocks)) == len(sequence.blocks), "a table holds a block twice"
            for i, block in enumerate(sequence.blocks):
                refs[block] += 1
                if self._content[block]:
                    assert self._content[block] == self._content_of(sequence, i), "a block holds other tokens"
        assert refs == self.refs, "reference counts differ from the tables"
        assert set(self.free) == {b for b in range(self.num_blocks) if not refs[b]}, "free list and counts differ"
        published = {self._hasher(c): b for b, c in enumerate(self._content) if c}
        assert published == self._by_hash, "hash map and published blocks differ"

    def _take(self) -> int:
        block, _ = self.free.popitem(last=False)
        self.refs[block] = 1
        if self._content[block]:
            self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        """That it was published."""
        del self._by_hash[self._hasher(self._content[block])]
        self._content[block] = b""

    def _hash(self, sequence: Sequence, i: int) -> bytes:
        """Chain digest of full block i; kept on the sequence, whose tokens never change."""
        while len(sequence.hashes) <= i:
            sequence.hashes.append(self._hasher(self._content_of(sequence, len(sequence.hashes))))
        return sequence.hashes[i]

    def _content_of(self, sequence: Sequence, i: int) -> bytes:
        parent = sequence.hashes[i - 1] if i else self._hasher(sequence.salt)
        return parent + array("i", sequence.token_ids[i * self.block_size : (i + 1) * self.block_size]).tobytes()
