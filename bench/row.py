"""What a client is to this bench: the work it is given, how it is started, what it says of its own run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What a client is asked to do: a closed loop of `concurrency`, `requests` in all, `tokens` each."""

    url: str  # http://127.0.0.1:PORT/v1
    concurrency: int
    requests: int
    tokens: int
    prompt_tokens: int
    tokenizer: Path  # a Hugging Face folder, one token a word
    out: Path  # a folder of this run alone

    @property
    def base(self) -> str:
        return self.url.removesuffix("/v1")


Pair = tuple[float | None, float | None]  # p50, p99


class Claim(NamedTuple):
    """What a client says of its own run; None: it does not say."""

    ok: int | None
    ttft_ms: Pair = (None, None)
    gap_ms: Pair = (None, None)
    gap_of: str = "events"  # "requests": of each request's mean gap
    stamps: Mapping[str, tuple[int, Any]] | None = None  # request id -> when sent, when each event came, in ns


class Rival(NamedTuple):
    package: str  # whose version is printed
    pip: tuple[str, ...]  # arguments of `pip install`, one run each
    command: Callable[[Path, Work], list[str]]  # (its environment, the work) -> command line; may write into work.out
    read: Callable[[Path, str], Claim]  # (work.out, what it printed) -> Claim; raises OSError, ValueError, LookupError
    after: Callable[[Path], None] | None = None  # what pip cannot do
    env: Mapping[str, str] = {}
    least_python: tuple[int, int] = (3, 11)
