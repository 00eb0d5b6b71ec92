"""A Sequence: tokens, how many of them are computed, and the blocks that hold their keys and values."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the client asked of one choice."""

    max_tokens: int
    min_tokens: int = 0  # end tokens are masked out before this many
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # looked for in the text, by the server's detokenizer


@dataclass(slots=True, eq=False)
class Sequence:
    """There is no prefill or decode phase: `computed` chases `len(token_ids)`.

    A step computes positions [computed, computed + n); iff that reaches len(token_ids), one token is sampled.
    """

    id: int
    token_ids: list[int]  # prompt, then what was sampled
    prompt_len: int
    params: SamplingParams
    arrival: int  # order of submission
    priority: int = 0  # lower is served first
    client: str = ""  # between whom the policy `fair` shares
    share: float = 0.0  # start tag of that policy
    computed: int = 0  # tokens whose keys and values are in the blocks
    blocks: list[int] = field(default_factory=list)  # block table: position p is in blocks[p // block_size]
    hashes: list[bytes] = field(default_factory=list)  # chain over the full blocks of token_ids, as far as asked for
    published: int = 0  # leading blocks that were offered for reuse
    adapter: int = 0  # number of the LoRA adapter that is added to the model for it; 0: none. Its salt says it too
    salt: bytes = b""  # only sequences of one salt share blocks
    leader: "Sequence | None" = None  # has the same prompt and computes it first; this one waits to share its blocks
    cached: int = 0  # prompt tokens taken from the prefix cache at first admission
    preemptions: int = 0
    evicted_len: int = 0  # tokens it had when last preempted: until it has more, it is not preempted again
    slots: list[int] = field(default_factory=list)  # of the host's pool, while it waits swapped out
    swapped: int = 0  # tokens whose keys and values are there
    recompute_to: int = 0  # tokens that were computed once and were lost; below, a step computes again
    finish_reason: str = ""  # "" while alive; stop | length | abort | timeout | oom | error
    # CLOCK_MONOTONIC ns, 0 = not yet
    arrived_ns: int = 0
    scheduled_ns: int = 0  # first time it was given a token budget
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished_ns: int = 0
    evicted_ns: int = 0  # since when it waits again, having been preempted
    evicted_total_ns: int = 0  # time it waited so; part of prefill or decode, never of queue
    recompute_ns: int = 0  # since when it computes again what it had
    recompute_total_ns: int = 0  # time it computed so, to the end of the step that made the loss good
    lost_to_first_ns: int = 0  # of those two totals, what came before the first token

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len
