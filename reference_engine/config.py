"""Every knob of the engine in one frozen dataclass; the server prints the effective values at start."""

from dataclasses import dataclass, field, fields
from typing import TypeVar

T = TypeVar("T")


def knob(default: T, text: str) -> T:
    """A dataclass field whose text becomes the flag's help: each knob is described once."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes in tokens, blocks or sequences. Names are vLLM's where the knob is the same. Raises ValueError."""

    model: str = knob("tiny", "tiny | smollm2 | a Hugging Face directory | FILE.gguf | sim:NAME")
    served_name: str = knob("", "model name on the wire; empty: the model's own")
    dtype: str = knob("float32", "float32 | bfloat16")
    device: str = knob("auto", "auto | cpu | cuda")
    block_size: int = knob(16, "tokens of a KV block")
    num_blocks: int = knob(2048, "KV blocks in the pool")
    max_model_len: int = knob(0, "longest prompt + answer; 0: the model's own limit")
    max_num_seqs: int = knob(64, "most sequences that run at once")
    max_num_batched_tokens: int = knob(512, "token budget of a step")
    chunked_prefill: bool = knob(True, "off: a prompt is computed in one step or waits")
    prefix_caching: bool = knob(True, "keep the KV of finished prompts for equal beginnings")
    batching: str = knob("continuous", "static | dynamic | continuous: when who waits may join who runs")
    max_wait_ms: int = knob(50, "static, dynamic: longest that a batch waits to be filled")
    policy: str = knob("fcfs", "who is served first: fcfs | priority | fair (by the client that `user` names)")
    max_queue: int = knob(0, "most sequences that wait for a seat, later ones get 429; 0: no limit")
    queue_timeout: int = knob(0, "seconds in the queue until 503; 0: no limit")
    drain_timeout: int = knob(30, "seconds that requests in flight have to end after SIGTERM")
    threads: int = knob(1, "torch threads; a second spinning one loses 4x beside a busy neighbour")
    seed: int = knob(0, "of random weights and of requests that bring none")

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; would be right: 1 or more")
        for name in ZERO_TOO:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; would be right: 0 or more")

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def context(self) -> int:
        """The longest prompt + answer that can be served: what the model may and the pool can hold."""
        return min(self.max_model_len or self.pool_tokens, self.pool_tokens)


# A seed may be anything; 0 of these says: no such limit, or not at all.
ZERO_TOO = ("max_model_len", "max_wait_ms", "max_queue", "queue_timeout", "drain_timeout")
POSITIVE = [f.name for f in fields(EngineConfig) if f.type is int and f.name not in ("seed", *ZERO_TOO)]
