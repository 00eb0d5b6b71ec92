"""Does a stream count its tokens as it goes: by itself, when asked, or not?"""

import httpx

from llm_bench import talk
from llm_bench.answer import Answer
from llm_bench.bodies import Ask
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.framing import FRAMINGS
from llm_bench.protocol import Dialect
from llm_bench.request import Request
from llm_bench.targets import Target

_FEW = 8  # tokens, where only the events' shape is asked
_LONG_ANSWER = "Count from one to twenty."  # of several tokens even where lengths are not held
# Is the usage so far in every event that bears a token? Then the tokens of each event are known.
CONTINUOUS = ("yes", "when asked", "no", "undecided")
_ASKED_FOR = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # vLLM's, as SGLang has it


def ask(client: httpx.Client, target: Target, asked: Ask, first: Answer, exchange: Exchange, timeouts: Timeouts) -> str:
    """A word of CONTINUOUS of a target that answered `first`; "" where nothing is streamed."""
    row = target.dialect
    if not asked.stream or not first.event_ns:
        return ""
    seen = counts_in_events(exchange, row)
    if seen:
        return CONTINUOUS[0]
    if row.takes.usage_option and asked.include_usage and first.tokens_out_from == "usage":
        request = Request(tokens_in=8, tokens_out=_FEW, prompt=_LONG_ANSWER, extra=_ASKED_FOR)
        got, answered = talk.ask(client, target, request, asked, timeouts)
        seen = counts_in_events(answered, row) if got.outcome == "ok" else False
        if seen:
            return CONTINUOUS[1]
    return CONTINUOUS[3] if seen is None else CONTINUOUS[2]


def counts_in_events(exchange: Exchange, row: Dialect) -> bool | None:
    """Says each of several token-bearing events of a whole answer how many tokens there were so far, or are in it?

    None: there was one such event at most, and its count may be the whole answer's.
    """
    events = FRAMINGS[row.comes.framing].events(exchange.read_ns, exchange.pieces, exchange.chunk_ends)
    try:
        chunks = [row.decode(data) for data in events.data]
    except ValueError:
        return False
    bearing = [chunk for chunk in chunks if any(delta.bears_token for delta in chunk.deltas)]
    if len(bearing) < 2:
        return None
    return all(
        (chunk.usage is not None and chunk.usage.completion_tokens >= 0)
        or (row.comes.counts_events and all(delta.token_ids >= 0 for delta in chunk.deltas))
        for chunk in bearing
    )
