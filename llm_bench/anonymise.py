"""A trace without its texts and names: lengths, times, and keyed hashes that keep which prompts begin alike.

Whoever has the output and not the key learns no text, no name and no id of the input, and cannot check a guess of one:
every pseudonym and every block id is an HMAC-SHA256 (RFC 2104).
"""

import hmac
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.request import MOST_TOKENS, Request, Trace
from llm_bench.workload import Workload, describe

MIN_KEY_BYTES = 16  # 128 bits: no list of keys can be gone through
ID_BITS = 63  # of a block's hash: fits an int64; ten million blocks collide once in 200,000 files
NAME_DIGITS = 16  # of a pseudonym, hexadecimal
TOKEN_BYTES = 4  # UTF-8 bytes that count as one token where nobody counts; a token's id is hashed as so many, too

# Kept of `extra` and of captured bodies, and only as numbers and booleans: they decide how long a server works on a
# request and name nobody. A seed, a user, stop texts, tools, biases of token ids and metadata can say who asked what.
# Each within what a sampler can mean: a number beyond it may be anything, a telephone number among them.
SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0, 10),
    **dict.fromkeys(("top_p", "min_p", "typical_p", "ignore_eos"), (0, 1)),
    "top_k": (-1, 1e6),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), (-10, 10)),
    **dict.fromkeys(("n", "best_of"), (1, 1000)),
    **dict.fromkeys(("logprobs", "top_logprobs"), (-1, 1000)),
}
PRIORITIES = (-1000, 1000)
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")  # kept too, in buckets like every length

_SYSTEM = ("tools", "functions", "system", "instructions")  # of a body: what servers put before all messages
_SAID = ("messages", "prompt", "input", "inputs", "text_input", "contents")  # the first of them is the prompt


class _Text(NamedTuple):
    """A request's own text, ready to be cut into blocks."""

    content: bytes  # TOKEN_BYTES a token
    marks: list[tuple[int, str]]  # (place in content, what begins there: a role, a tool's name, an image)
    counted: bool  # by a tokenizer, or given as ids
    media: bool = False  # parts that are no text: hashed, not counted


_ESTIMATED = f"lengths are estimated: {TOKEN_BYTES} bytes of UTF-8 a token"
_LENGTHENED = "turns are lengthened to hold the prompt and answer before them"
_MEDIA = "rows hold parts that are no text: their tokens are not counted"
_BEYOND = "rows had a priority or sampling values beyond all use: left out, as they may be someone's numbers"
_EXTRA = "rows had other entries in extra: left out"
_MODELS = "models are pseudonyms, which no target serves: give the target's, or keep them"


def key_from_env(name: str) -> bytes:
    """The secret in the environment variable `name`. Raises BenchError where it is missing or too short."""
    value = os.environ.get(name)
    if value is None:
        raise BenchError(f"--key-env {name}: no such variable is set, expected {_right_key()}")
    _check_key(os.fsencode(value), f"--key-env {name}")
    return os.fsencode(value)


def _right_key() -> str:
    return f"a secret of {MIN_KEY_BYTES} bytes or more, such as `openssl rand -hex 32` gives"


def _check_key(key: bytes, name: str) -> None:
    if len(key) < MIN_KEY_BYTES:
        raise BenchError(f"{name}: a key of {len(key)} bytes, expected {_right_key()}")


def anonymise(
    trace: Trace,
    key: bytes,
    *,
    block_size: int = 16,
    bucket: int = 0,
    encode: Callable[[str], Sequence[int]] | None = None,
    keep_class: bool = False,
    keep_model: bool = False,
) -> Trace:
    """The trace as lengths, times and keyed hashes. With one key, what two traces share stays shared.

    block_size: tokens of a block of a text; where the trace has hash ids, theirs counts. bucket: lengths are rounded up
    to multiples of so many tokens, 0 keeps them exact; a turn stays long enough for the prompt and answer before it.
    encode: token ids of a text, by the target's tokenizer; without it a token is TOKEN_BYTES bytes of UTF-8, and the
    notes say how many lengths are such estimates. A length that the trace gives is kept, whatever its text.
    keep_class, keep_model: these names stay as they are.

    Ids of blocks are hashes of (the block before, tokens in the block, its text or old id): equal beginnings have equal
    ids, equal blocks behind different beginnings do not, as in an engine's prefix cache. What a later turn's user adds
    gets no ids: the live answer stands before it. Times are those of the trace, from 0 on: no date survives.

    Raises BenchError for a key of fewer than MIN_KEY_BYTES.
    """
    _check_key(key, "--key-env VARIABLE")
    assert block_size > 0 <= bucket, "checked by the command line"

    @cache
    def pseudonym(kind: str, name: str) -> str:
        return name and hmac.digest(key, f"{kind}\0{name}".encode(), "sha256").hex()[:NAME_DIGITS]

    def up(tokens: int) -> int:
        return min(-(-tokens // bucket) * bucket, MOST_TOKENS) if bucket else tokens

    size = max((r.block_size for r in trace.requests if r.hash_ids), default=block_size)
    zero_ns = min((round(r.at_s * 1e9) for r in trace.requests if r.at_s is not None), default=0)
    said: Counter[str] = Counter()
    ends: dict[str, _End] = {}
    requests: list[Request] = []
    for r in trace.requests:
        text = _text(r, encode)
        length = _length(r, text, ends, up)
        hash_ids: tuple[int, ...] = ()
        if r.hash_ids:
            hash_ids = _hashes(key, length.tokens_in, r.block_size, (b"id %d" % i for i in r.hash_ids))
        elif text is not None and not length.added:
            hash_ids = _hashes(key, length.tokens_in, size, _blocks(text, length.tokens_in, size))
        extra = _sampling(r, up)
        requests.append(
            Request(
                tokens_in=length.tokens_in,
                tokens_out=length.tokens_out,
                at_s=None if r.at_s is None else (round(r.at_s * 1e9) - zero_ns) / 1e9,
                hash_ids=hash_ids,
                block_size=(r.block_size or size) if hash_ids else 0,
                session=pseudonym("session", r.session),
                turn=length.turn,
                tokens_new=length.tokens_new,
                think_s=r.think_s,
                request_class=r.request_class if keep_class else pseudonym("class", r.request_class),
                priority=r.priority if _within(r.priority, PRIORITIES) else 0,
                cancel_after_s=r.cancel_after_s,
                model=r.model if keep_model else pseudonym("model", r.model),
                extra=extra,
                client=pseudonym("client", r.client),
                line=len(requests) + 2,  # of the file that `trace.write` makes: a header stands before the rows
            )
        )
        said[_ESTIMATED] += not (r.tokens_in or text is None or text.counted)
        said[_LENGTHENED] += length.lengthened and not bucket
        said[_MEDIA] += text is not None and text.media
        beyond = _beyond(r)
        said[_BEYOND] += bool(beyond)
        said[_EXTRA] += bool(r.extra.keys() - extra.keys() - beyond)
        said[_MODELS] += bool(r.model) and not keep_model
    kept = sorted({name for r in requests for name in r.extra})
    notes = [
        "anonymised: texts are lengths and keyed block hashes; names are keyed pseudonyms; times begin at 0",
        f"kept: times, pauses, cancellations, priorities; of extra and bodies {', '.join(kept) or 'nothing'}",
        *([f"lengths are rounded up to multiples of {bucket} tokens"] if bucket else []),
        *(f"{count:,} {what}" for what, count in said.items() if count),
    ]
    return Trace(requests, "llm-bench", "", notes, dict(trace.skipped))  # no facts: the file's own zero may be a date


# -- before and after -------------------------------------------------------------------------------------------------

# What the output is for: each is equal before and after, where it was defined before and lengths stay exact.
STATISTICS = {  # name -> where it stands in a Workload
    "requests": "n",
    "span, s": "arrivals.span_s",
    "rate, 1/s": "arrivals.rate",
    "CV of inter-arrivals": "arrivals.cv",
    "dispersion in 1 s": "arrivals.dispersion.1",
    "dispersion in 10 s": "arrivals.dispersion.10",
    "dispersion in 60 s": "arrivals.dispersion.60",
    "prompt tokens, mean": "tokens_in.mean",
    "prompt tokens, p50": "tokens_in.p50",
    "prompt tokens, p99": "tokens_in.p99",
    "answer tokens, mean": "tokens_out.mean",
    "answer tokens, p50": "tokens_out.p50",
    "answer tokens, p99": "tokens_out.p99",
    "Spearman correlation of lengths": "spearman",
    "clients": "clients",
    "top client's share": "top_client_share",
    "conversations": "sessions.sessions",
    "turns, mean": "sessions.turns.mean",
    "turns, max": "sessions.turns.max",
    "pause before a turn, p50, s": "sessions.think_s.p50",
    "distinct blocks": "sharing.distinct",
    "endless cache: share of blocks hit": "sharing.block_hits",
    "endless cache: share of tokens hit, full blocks": "sharing.token_hits_full",
}


def before_after(before: Trace, after: Trace) -> list[tuple[str, str, str]]:
    """(statistic, value before, value after) of STATISTICS; "-" where undefined, left out where undefined in both.

    Prefix sharing of texts is not known before they are hashed.
    """
    one, other = describe(before), describe(after)
    rows = [(name, _shown(figure(one, at)), _shown(figure(other, at))) for name, at in STATISTICS.items()]
    return [row for row in rows if row[1:] != ("-", "-")]


def figure(workload: Workload, at: str) -> float | None:
    """The number at a dotted place; None where it, or what should hold it, is not defined."""
    value: Any = workload
    for name in at.split("."):
        value = None if value is None else value[name] if isinstance(value, dict) else getattr(value, name)
    number: float | None = value
    return number


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


# -- lengths ----------------------------------------------------------------------------------------------------------


class _End(NamedTuple):
    """Where a conversation stands: its turns so far, and the tokens of its last prompt and answer."""

    turns: int = 0
    tokens: int = 0


class _Length(NamedTuple):
    tokens_in: int
    tokens_out: int | None
    tokens_new: int
    turn: int
    added: bool  # its text is what the turn's user adds, not the whole prompt
    lengthened: bool


def _length(r: Request, text: _Text | None, ends: dict[str, _End], up: Callable[[int], int]) -> _Length:
    """Lengths that `trace.read` takes for cumulative; `ends`, by session, is brought up to date."""
    turn, floor = ends.get(r.session, _End()) if r.session else _End()
    added = turn > 0 and text is not None and r.body is None
    if not r.tokens_in:
        assert text is not None, "every row has a length or a text"
        tokens_in = up(max(-(-len(text.content) // TOKEN_BYTES), 1)) + floor * added
    else:  # a turn behind one of unknown length has said only what it adds
        tokens_in = up(r.tokens_in) + floor * (turn > 0 and r.tokens_new == r.tokens_in)
    tokens_out = r.tokens_out if r.tokens_out is None else up(r.tokens_out)
    lengthened, tokens_in = tokens_in < floor, max(tokens_in, floor)
    if r.session:
        ends[r.session] = _End(turn + 1, tokens_in + (tokens_out or 0))
    return _Length(tokens_in, tokens_out, tokens_in - floor if turn else 0, turn, added, lengthened)


# -- blocks -----------------------------------------------------------------------------------------------------------


def _hashes(key: bytes, tokens: int, size: int, blocks: Iterable[bytes]) -> tuple[int, ...]:
    """ceil(tokens / size) ids, each of ID_BITS. A partial block's tokens are hashed too: an id has one length.

    Blocks that `blocks` does not reach (lengths in buckets, a text shorter than its length) are those of empty text.
    """
    ids: list[int] = []
    digest = bytes(32)
    text = chain(blocks, iter(lambda: b"", None))
    for start in range(0, tokens, size):
        held = min(size, tokens - start).to_bytes(4, "big")
        digest = hmac.digest(key, b"block\0" + digest + held + next(text), "sha256")
        ids.append(int.from_bytes(digest[:8], "big") >> (64 - ID_BITS))
    return tuple(ids)


def _blocks(text: _Text, tokens: int, size: int) -> Iterator[bytes]:
    """The text in so many blocks as `tokens` need, each with what begins in it; the last one has all that is left."""
    width, count, beyond = size * TOKEN_BYTES, -(-tokens // size), len(text.content) + tokens * TOKEN_BYTES + size
    marks = iter([*text.marks, (2 * beyond, "")])
    place, mark = next(marks)
    for k in range(count):
        start, end = k * width, (k + 1) * width if k < count - 1 else beyond
        begun = []
        while place < end:
            begun.append((place - start, mark))
            place, mark = next(marks)
        yield b"%d" % text.counted + json.dumps(begun).encode() + b"\0" + text.content[start:end]


# -- what a request says ----------------------------------------------------------------------------------------------


def _text(r: Request, encode: Callable[[str], Sequence[int]] | None) -> _Text | None:
    """Its prompt, messages, token ids or body; None where the text is to be made up."""
    said: Any = r.prompt_token_ids or r.prompt
    system: list[tuple[str, str]] = []
    if r.messages is not None:
        said = list(r.messages)
    elif r.body is not None:
        system = [(name, _plain(r.body[name])) for name in _SYSTEM if r.body.get(name)]
        said = next((r.body[name] for name in _SAID if r.body.get(name)), None)
        said = r.body if said is None else said
    elif said is None:
        return None
    if isinstance(said, list | tuple) and said and all(type(x) is int and 0 <= x < 2**32 for x in said):
        return _Text(np.array(said, "<u4").tobytes(), [], counted=True)
    if isinstance(said, list) and all(isinstance(m, Mapping) for m in said):
        pieces = [_message(m) for m in said]
    else:
        pieces = [("", _plain(said))]
    return _joined([*system, *pieces], encode, any("\0" in mark for mark, _ in pieces))


def _joined(pieces: list[tuple[str, str]], encode: Callable[[str], Sequence[int]] | None, media: bool) -> _Text:
    marks: list[tuple[int, str]] = []
    parts: list[bytes] = []
    place = 0
    for mark, text in pieces:
        part = text.encode("utf-8", "surrogatepass") if encode is None else np.array(encode(text), "<u4").tobytes()
        if mark:
            marks.append((place, mark))
        parts.append(part)
        place += len(part)
    return _Text(b"".join(parts), marks, encode is not None, media)


def _message(message: Mapping[str, Any]) -> tuple[str, str]:
    """(all of it that is not text, its text). Tool calls are text: the model wrote them, and reads them again."""
    if "content" not in message:  # another protocol's: all of it is text
        return "", _plain(message)
    content = message["content"]
    rest = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
    mark = json.dumps(rest, sort_keys=True, default=str)
    if isinstance(content, list):
        texts = [p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
        media = [p for p in content if not (isinstance(p, Mapping) and isinstance(p.get("text"), str))]
        mark += "\0" + json.dumps(media, sort_keys=True, default=str) if media else ""
        text = "".join(texts)
    else:
        text = "" if content is None else _plain(content)
    return mark, text + (_plain(message["tool_calls"]) if message.get("tool_calls") else "")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _sampling(r: Request, up: Callable[[int], int]) -> dict[str, Any]:
    """What is kept of `extra` and of a body; its limit of length is dropped where the answer's own length is known."""
    of_body = {} if r.body is None else {k: r.body[k] for k in (*SAMPLING, *LENGTHS) if k in r.body}
    if r.tokens_out is not None:
        of_body = {name: value for name, value in of_body.items() if name not in LENGTHS}
    given = {**of_body, **r.extra}
    kept = {name: given[name] for name, bounds in SAMPLING.items() if _within(given.get(name), bounds)}
    lengths = {name: up(given[name]) for name in LENGTHS if _within(given.get(name), (0, MOST_TOKENS))}
    return kept | {name: value for name, value in lengths.items() if type(value) is int}


def _within(value: object, bounds: tuple[float, float]) -> bool:
    return isinstance(value, (int, float)) and bounds[0] <= value <= bounds[1]


def _beyond(r: Request) -> set[str]:
    """The names of those of the request's numbers that no sampler or scheduler can use."""
    given = {**(r.body or {}), **r.extra}
    bounds = {**SAMPLING, **dict.fromkeys(LENGTHS, (0, MOST_TOKENS))}
    numbers = {name for name in bounds if isinstance(given.get(name), (int, float))}
    beyond = {name for name in numbers if not _within(given[name], bounds[name])}
    return beyond if _within(r.priority, PRIORITIES) else beyond | {"priority"}
