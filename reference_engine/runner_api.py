"""What the engine asks of a runner: compute this much of these sequences, give back the sampled tokens."""

from array import array
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from reference_engine.sequence import Sequence

# Token ids of each text -> its vector, of length 1 unless it is 0; empty where it would be no finite numbers. What is
# computed at once is one batch.
Pass = Callable[[list[list[int]]], list["array[float]"]]
NOT_FINITE = -1  # in the place of a token: the logits that it would be taken from are no finite numbers


class Runner(Protocol):
    """`runner.Runner` computes; `cost_model.CostModel` only takes the time. Blocks are the scheduler's to give."""

    name: str
    vocab_size: int
    eos_ids: frozenset[int]
    max_positions: int  # the longest sequence the model was made for

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        """For each (sequence, n): compute positions [computed, computed + n); a token iff that reaches the end, or
        NOT_FINITE.

        Reads sequences, never changes them; sequence.blocks already covers computed + n positions.
        """
        ...


@runtime_checkable
class Encoder(Protocol):
    """What a runner has beside, if it can make vectors of texts."""

    embedding_size: int

    def single_pass(self, pooling: str) -> Pass:
        """For one thread, which may run beside the one that executes; memory that it needs is its own."""
        ...
