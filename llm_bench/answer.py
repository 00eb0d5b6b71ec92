"""What one exchange amounts to: outcome, token stamps, counts. METRICS.md "Outcomes" and "Clock and stamps" in code.

Runs after the stream has ended, on bytes and stamps alone: it can be run again on kept bytes with tomorrow's rule.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llm_bench import exchange as ends
from llm_bench.exchange import Exchange
from llm_bench.framing import FRAMINGS
from llm_bench.http1 import Events, is_web_page
from llm_bench.plain import plain_reader
from llm_bench.protocol import NOTHING, Chunk, Comes, Delta, Dialect, Usage

REJECTED = (429, 503)
SHOWN_BYTES = 300  # of a body, in an error's text
# How the socket's end decides the outcome alone: it was our doing, or nothing that came can be trusted.
_DECIDED = {ends.CANCELLED: "cancelled", ends.CUT: "cut_at_end"} | dict.fromkeys(
    (
        ends.CONNECT_ERROR,
        ends.CONNECT_TIMEOUT,
        ends.TTFT_TIMEOUT,
        ends.STALL_TIMEOUT,
        ends.TOTAL_TIMEOUT,
        ends.PROTOCOL_ERROR,
    ),
    "failed",
)


class Answer(NamedTuple):
    """The fields of a Record that the response decides. Stamps ns, 0 = never; counts -1 = unknown."""

    outcome: str
    error_kind: str  # "" unless failed
    error: str  # never empty when failed
    status: int
    labels: list[str]
    choices: int  # that were seen: the highest index and one
    finish_reason: str  # of choice 0
    event_ns: list[int]  # token-bearing events; none where the answer was not streamed
    event_tokens: list[int]  # beside event_ns, or empty: then the wire does not say, or contradicts itself
    event_choice: list[int]  # beside event_ns, or empty: all are choice 0
    first_answer_ns: int
    tokens_in: int
    tokens_cached: int
    tokens_out: int  # all choices
    tokens_out_from: str  # usage | tokenizer | events | ""; token ids on the wire count under "events"
    tokens_reasoning: int  # of tokens_out, where the server says so
    tokens_counted: int  # of the same text by the tokenizer, where it was asked to check the usage; else -1
    text_bytes: int  # UTF-8, all choices, reasoning and tool calls too
    comments: int
    server_ms: Mapping[str, float]
    text: str  # content of choice 0, for a session's next turn


def read(
    exchange: Exchange,
    dialect: Dialect,
    *,
    streamed: bool,
    asked_out: int | None,
    pinned: bool,
    finish_expected: bool = True,
    choices: int = 1,
    count_tokens: Callable[[str], int] | None = None,
    check_usage: bool = False,
) -> Answer:
    """The Answer in a finished exchange.

    `streamed`: an event stream was asked for. `asked_out`: max_tokens of each of `choices`. `pinned`: the probe showed
    that the end token can be ignored, so fewer tokens are a failure. `finish_expected`: False for a target that a
    probe showed never to send finish_reason. `count_tokens`: a tokenizer, for answers without usage, and with
    `check_usage` beside it.
    """
    assert exchange.ended, "the exchange has not ended"
    body = read_body(exchange, dialect, streamed)
    tally = body.tally
    tokens_out, source = tally.tokens_out(count_tokens, body.is_stream, dialect.comes.counts_events)
    sizes = tally.event_tokens if tally.event_ns else []
    if any(n <= 0 for n in sizes) or sum(sizes) != tokens_out:
        sizes = []
    labels: list[str] = []
    if streamed and not body.is_stream and tally.choices:
        labels.append("not streamed")
    comes = dialect.comes._replace(ends_by_framing=True) if dialect.comes.single_pass else dialect.comes
    outcome, kind, error = _outcome(
        exchange, body, (tokens_out, source), (asked_out, choices), finish_expected, comes, labels
    )
    if outcome == "ok" and pinned and asked_out is not None:
        asked = asked_out * max(choices, len(tally.choices))
        exact = source == "usage" or sizes  # an estimate can be short where the answer is not
        if exact and tokens_out < asked:
            outcome, kind, error = "failed", "short_output", f"{tokens_out} of {asked} tokens"
    return Answer(
        outcome,
        kind,
        error,
        exchange.status,
        labels,
        max(tally.choices, default=-1) + 1,
        tally.finish.get(0, ""),
        tally.event_ns,
        sizes,
        tally.event_choice if tally.event_ns and any(tally.event_choice) else [],
        tally.first_answer_ns,
        tally.tokens_in,
        tally.tokens_cached,
        tokens_out,
        source,
        tally.tokens_reasoning,
        tally.counted(count_tokens) if check_usage and source == "usage" else -1,
        tally.text_bytes,
        body.comments,
        tally.server_ms,
        joined(tally.text),
    )


@dataclass(slots=True)
class _Tally:
    """The sum of the chunks so far.

    Usage belongs to the choice whose event it rides on: with n > 1, llama.cpp ends each choice with its own, and vLLM's
    continuous usage counts each choice for itself. On an event with no choice or several it is the whole answer's. It
    is the last value that counts, never the sum; and a value is stale as soon as a token comes without one.
    """

    event_ns: list[int] = field(default_factory=list)  # empty for a whole body
    event_tokens: list[int] = field(default_factory=list)  # of each token-bearing delta; -1: unknown
    event_choice: list[int] = field(default_factory=list)
    first_answer_ns: int = 0
    choices: set[int] = field(default_factory=set)
    finish: dict[int, str] = field(default_factory=dict)
    bore: bool = False  # a token was seen, streamed or not
    text: list[str] = field(default_factory=list)
    all_text: dict[int, list[str]] = field(default_factory=dict)  # by choice, whatever kind, for a tokenizer
    text_bytes: int = 0
    used: dict[int, int] = field(default_factory=dict)  # completion tokens of a choice by its usage; -1: stale
    used_total: int = -1
    tokens_in: int = -1
    tokens_cached: int = -1
    tokens_reasoning: int = -1
    error: str = ""
    done: bool = False
    server_ms: dict[str, float] = field(default_factory=dict)

    def add(self, ns: int, chunk: Chunk) -> None:
        """One chunk read at `ns`; 0: a whole body, which has no events."""
        if chunk.error and not self.error:  # the first is the cause
            self.error = f"{chunk.error} (code {chunk.error_code})" if chunk.error_code else chunk.error
        self.done = self.done or chunk.done
        if chunk.server_ms:
            self.server_ms.update(chunk.server_ms)
        usage = chunk.usage
        alone = usage is not None and usage.completion_tokens >= 0 and len(chunk.deltas) == 1
        for delta in chunk.deltas:
            rise = self._rise(delta, usage) if alone and usage is not None else -1
            self._delta(ns, delta, rise)
        if usage is not None:
            self._usage(usage, chunk.deltas)

    def add_plain(self, stamps: Sequence[int], texts: list[str]) -> None:
        """As `add` of so many events with nothing but content of choice 0, for a tenth of the time."""
        text = "".join(texts)
        self.choices.add(0)
        self.bore = True
        self.used_total = self.used[0] = -1
        self.all_text.setdefault(0, []).append(text)
        self.text_bytes += len(text) if text.isascii() else len(text.encode())
        self.text.append(text)
        self.event_tokens += [-1] * len(texts)
        self.event_choice += [0] * len(texts)
        self.event_ns += stamps
        self.first_answer_ns = self.first_answer_ns or stamps[0]

    def _rise(self, delta: Delta, usage: Usage) -> int:
        """Tokens by which this choice's cumulative usage grew; -1: what it was before is not known."""
        before = self.used.get(delta.choice, 0)
        if before < 0 or usage.completion_tokens < before:
            return -1
        if not delta.bears_token and delta.finish_reason and delta.choice not in self.used:
            return -1  # the one usage at the end of an answer is a sum, and no sign of a token in this event
        return usage.completion_tokens - before

    def _delta(self, ns: int, delta: Delta, rise: int) -> None:
        choice = delta.choice
        self.choices.add(choice)
        if delta.finish_reason:
            self.finish[choice] = delta.finish_reason
        if not delta.bears_token and rise <= 0:
            return
        self.bore = True
        self.used_total = -1
        if rise < 0:
            self.used[choice] = -1
        if text := delta.text or delta.reasoning or delta.tool:
            if delta.reasoning or delta.tool:
                text = delta.reasoning + delta.text + delta.tool
            self.all_text.setdefault(choice, []).append(text)
            self.text_bytes += len(text) if text.isascii() else len(text.encode(errors="surrogateescape"))
            if choice == 0 and delta.text:
                self.text.append(delta.text)
        self.event_tokens.append(delta.token_ids if delta.token_ids >= 0 else rise)
        self.event_choice.append(choice)
        if ns:
            self.event_ns.append(ns)
            if delta.text and not self.first_answer_ns:
                self.first_answer_ns = ns

    def _usage(self, usage: Usage, deltas: tuple[Delta, ...]) -> None:
        # Nothing out of something is no count: some gateways fill the field with zeros.
        if usage.completion_tokens > 0 or (usage.completion_tokens == 0 and not self.bore):
            if len(deltas) == 1:
                self.used[deltas[0].choice] = usage.completion_tokens
            else:
                self.used_total = usage.completion_tokens
        # The prompt is computed once, however many choices repeat its count.
        self.tokens_in = max(self.tokens_in, usage.prompt_tokens)
        self.tokens_cached = max(self.tokens_cached, usage.cached_tokens)
        self.tokens_reasoning = max(self.tokens_reasoning, usage.reasoning_tokens)

    def tokens_out(
        self, count_tokens: Callable[[str], int] | None, is_stream: bool, counts_events: bool = False
    ) -> tuple[int, str]:
        """Output tokens of all choices and where the figure is from: the weakest source among the choices'."""
        if self.used_total >= 0:
            return self.used_total, "usage"
        if not self.choices:
            return 0, ""
        if all(self.used.get(choice, -1) >= 0 for choice in self.choices):
            return sum(self.used[choice] for choice in self.choices), "usage"
        if self.event_tokens and min(self.event_tokens) >= 0:
            return sum(self.event_tokens), "usage" if counts_events else "events"
        if count_tokens is not None and self.all_text:
            return self.counted(count_tokens), "tokenizer"
        if not is_stream:
            return -1, ""  # a whole body is one event of any number of tokens
        events_of = Counter(self.event_choice)
        return sum(max(self.used.get(c, -1), 0) or events_of[c] for c in self.choices), "events"

    def counted(self, count_tokens: Callable[[str], int] | None) -> int:
        """Tokens of all text by a tokenizer; -1 without one, or without text."""
        if count_tokens is None or not self.all_text:
            return -1
        return sum(count_tokens(joined(text)) for text in self.all_text.values())


def joined(parts: Sequence[str]) -> str:
    """The text of its parts, the bytes of a character that was cut between two of them put together again.

    A dialect whose texts are bare bytes reads them with `surrogateescape`, which keeps such a byte as half of a pair
    that no JSON can hold. What is no UTF-8 as a whole is U+FFFD.
    """
    text = "".join(parts)
    return text if text.isascii() else text.encode(errors="surrogateescape").decode(errors="replace")


class Body(NamedTuple):
    tally: _Tally
    is_stream: bool
    comments: int
    leftover: bytes  # of half an event
    garbage: str  # the first thing that the dialect could not read


def read_body(exchange: Exchange, dialect: Dialect, streamed: bool) -> Body:
    """All events of a finished exchange, or its whole body, summed up; what cannot be read is in `garbage`."""
    tally = _Tally()
    garbage = ""
    framing, comes = FRAMINGS[dialect.comes.framing], dialect.comes
    is_stream = framing.is_stream(streamed, exchange.status, exchange.headers, exchange.pieces)
    if is_stream is None:  # a body of nothing but blanks is judged by what was asked
        is_stream = streamed
    before: dict[int, str] = {}  # by choice, of a protocol whose events repeat it

    def read_event(ns: int, data: bytes, name: str | None) -> None:
        nonlocal garbage
        try:
            chunk = dialect.decode(data)
        except ValueError as e:
            garbage = garbage or f"cannot be read: {e}: {_shown(data, 80)}"
            chunk = NOTHING
        if comes.cumulative and chunk.deltas:
            chunk = _added(chunk, before)
        if name == "error" and not chunk.error:  # said by the event's name alone
            chunk = chunk._replace(error=_shown(data, SHOWN_BYTES) or "an error event without data")
        tally.add(ns, chunk)

    place, pieces, read_ns = 0, exchange.pieces, exchange.read_ns
    if is_stream and (event_in := framing.event_in) is not None:  # as far as each piece is an event none need be cut
        texts_from = plain_reader(dialect, event_in)
        while place < len(pieces) and (data := event_in(pieces[place])):
            if texts := texts_from(pieces, place):
                tally.add_plain(read_ns[place : place + len(texts)], texts)
            else:
                read_event(read_ns[place], data, None)
            place += len(texts) or 1
    if is_stream:
        found = framing.events(read_ns[place:], pieces[place:], exchange.chunk_ends)
    else:
        body = b"".join(pieces)
        found = Events([0], [body], 0, b"", {}) if body else Events([], [], 0, b"", {})
    texts_from, place = plain_reader(dialect), 0
    while place < len(found.data):
        texts = texts_from(found.data, place) if is_stream else []
        if texts:
            tally.add_plain(found.ns[place : place + len(texts)], texts)
        else:  # not plain: there their run ended
            read_event(found.ns[place], found.data[place], found.names.get(place))
        place += len(texts) or 1
    if comes.of_headers is not None and not is_stream:  # after the body: its token would make the head's usage stale
        tally.add(0, comes.of_headers(exchange.headers))
    return Body(tally, is_stream, found.comments, found.leftover, garbage)


def _added(chunk: Chunk, before: dict[int, str]) -> Chunk:
    """The event with what it adds to the text of its choice in `before`, which is brought up to it.

    One that repeats nothing adds its all.
    """
    return chunk._replace(deltas=tuple([_new_of(delta, before) for delta in chunk.deltas]))


def _new_of(delta: Delta, before: dict[int, str]) -> Delta:
    said = before.get(delta.choice, "")
    new = delta.text[len(said) :] if delta.text.startswith(said) else delta.text
    if new:
        before[delta.choice] = said + new
    return delta._replace(text=new, bears_token=bool(new))


def _outcome(
    exchange: Exchange,
    body: Body,
    count: tuple[int, str],
    asked: tuple[int | None, int],
    finish_expected: bool,
    comes: Comes,
    labels: list[str],
) -> tuple[str, str, str]:
    """(outcome, error kind, error text); adds to `labels`. The first rule that applies decides."""
    (tokens_out, source), (asked_out, choices) = count, asked
    ended, status, tally = exchange.ended, exchange.status, body.tally
    if ended in _DECIDED:
        outcome = _DECIDED[ended]
        if outcome != "failed":
            return outcome, "", exchange.error
        return outcome, ended, exchange.error or ended.replace("_", " ")
    if status and not 200 <= status < 300:
        kind = "rejected" if status in REJECTED else f"http_{status // 100}xx"
        given_up = f"; {exchange.error}" if exchange.error else ""  # why it was not tried again
        return "failed", kind, (tally.error or _body_text(exchange)) + given_up
    if tally.error:
        return "failed", "server_error_in_stream", tally.error
    if _is_page(exchange):
        return "failed", "protocol_error", f"a web page (HTML) and no answer: {_shown(b''.join(exchange.pieces), 80)}"
    whole = ended != ends.TRUNCATED
    finished = len(tally.choices) >= choices and tally.choices <= tally.finish.keys()
    if comes.proves:
        finished = tally.done or (not body.is_stream and whole)
        finish_expected = True  # a probe looks for finish reasons, and this answer owes another word
    if body.garbage and (body.is_stream or ended == ends.COMPLETE):
        if not (body.is_stream and finished and tally.bore):
            return "failed", "protocol_error", body.garbage
        labels.append("unreadable event")  # a gateway's `data: ping` in an answer that is whole without it
    # Framing cut after the last word loses nothing; finish_reason alone is not that word: a choice may be missing.
    framed = comes.ends_by_framing and ended == ends.COMPLETE
    heard_out = (
        (finished or framed or not finish_expected) if whole else (finished and (tally.done or source == "usage"))
    )
    if not heard_out:
        return "failed", "truncated_stream", _truncated(exchange, body, tokens_out)
    seen_by_usage_alone = tally.finish.get(0) == "length" and tokens_out > 0  # its tokens have no text of their own
    passed = comes.single_pass and bool(exchange.pieces)  # its decoder has seen that all is there
    if not tally.bore and asked_out != 0 and not seen_by_usage_alone and not passed:
        return "failed", "empty_output", f"HTTP {status} without a token, finish_reason {tally.finish.get(0, '')!r}"
    if not finished and not framed:
        labels.append("end unproven")
    elif finished and body.is_stream and not tally.done and comes.last_word:
        labels.append(f"no {comes.last_word}")
    if not whole:
        labels.append("closed without last chunk")
    return "ok", "", ""


def _is_page(exchange: Exchange) -> bool:
    """A gateway's page of 200. By its type too: a stream of bare text may be a model's own HTML."""
    typed = any(name == b"content-type" and value.lower().startswith(b"text/html") for name, value in exchange.headers)
    return typed and is_web_page(b"".join(exchange.pieces))


def _truncated(exchange: Exchange, body: Body, tokens_out: int) -> str:
    if not exchange.status:
        return exchange.error or "closed before a byte of the answer"
    text = f"ended without finish_reason after {tokens_out} tokens"
    if not body.is_stream:
        text = "half a body" if body.garbage or exchange.ended == ends.TRUNCATED else _unfinished(exchange)
    if len(body.tally.finish) > 0:
        text = f"ended after {len(body.tally.finish)} choices with a finish_reason, fewer than asked"
    if not exchange.pieces:
        text = "an empty body"
    if exchange.error:
        text += f"; {exchange.error}"
    if body.leftover:
        text += f"; left over: {_shown(body.leftover, 80)}"
    return text


def _unfinished(exchange: Exchange) -> str:
    return f"a whole body without finish_reason: {_shown(b''.join(exchange.pieces), 80)}"


def _body_text(exchange: Exchange) -> str:
    if 300 <= exchange.status < 400:
        to = next((value.decode("latin-1") for name, value in exchange.headers if name == b"location"), "no address")
        return f"HTTP {exchange.status} to {to[:SHOWN_BYTES]}: redirects are not followed; give that address as the URL"
    body = b"".join(exchange.pieces).strip()
    return _shown(body, SHOWN_BYTES) if body else exchange.error or f"HTTP {exchange.status} with an empty body"


def _shown(data: bytes, limit: int) -> str:
    return data[:limit].decode(errors="replace")
