"""What the engine asks of a runner: compute this much of these sequences, give back the sampled tokens."""

from typing import Protocol

from reference_engine.sequence import Sequence


class Runner(Protocol):
    """`runner.Runner` computes; `cost_model.CostModel` only takes the time. Blocks are the scheduler's to give."""

    name: str
    vocab_size: int
    eos_ids: frozenset[int]
    max_positions: int  # the longest sequence the model was made for

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        """For each (sequence, n): compute positions [computed, computed + n); a token iff that reaches the end.

        Reads sequences, never changes them; sequence.blocks already covers computed + n positions.
        """
        ...
