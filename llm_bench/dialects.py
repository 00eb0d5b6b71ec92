"""How each protocol of the field says the same things: encode(Request) -> body, decode(event) -> Chunk.

No I/O and no clock. A new protocol is a new row of DIALECTS.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llm_bench.trace import Request


class Ask(NamedTuple):
    """What is sent with every request of a cell, decided by the target's probe and the user."""

    model: str
    stream: bool = True
    include_usage: bool = True  # stream_options.include_usage, where the target takes it
    pin_lengths: bool = True  # ignore_eos + min_tokens, where the target takes them
    extra: Mapping[str, Any] = {}  # put into every body


class Usage(NamedTuple):
    prompt_tokens: int = -1  # -1: not said
    completion_tokens: int = -1
    cached_tokens: int = -1


class Delta(NamedTuple):
    """One choice of one event."""

    choice: int = 0
    text: str = ""  # content of the answer
    reasoning: str = ""
    tool: str = ""  # tool-call names and arguments
    token_ids: int = -1  # how many, where the wire lists them; -1: it does not
    finish_reason: str = ""
    bears_token: bool = False  # by METRICS.md's rule for this protocol


class Chunk(NamedTuple):
    """One event (or one whole body, when not streamed) in the words all protocols share."""

    deltas: tuple[Delta, ...] = ()
    usage: Usage | None = None  # cumulative, as the wire has it
    error: str = ""  # text of an error object; such an answer has failed whatever its status
    error_code: str = ""
    done: bool = False  # the protocol's own last word, e.g. [DONE]; proves nothing alone
    server_ms: Mapping[str, float] = {}  # keys of Record: server_ttft_ms, server_queue_ms, ...


class Dialect(NamedTuple):
    path: str  # appended to the target's base URL
    encode: Callable[[Request, Ask], bytes]  # the body; request.prompt or .messages or .prompt_token_ids is filled in
    decode: Callable[[bytes], Chunk]  # one event's data, or a whole body; raises ValueError on what is no such thing
    is_token: Callable[[bytes], bool]  # does this event's data bear a token? Cheap: run until the first that does
