"""What a target is asked before any load: is it there, models, usage, pinned lengths, costs of a prompt, round trip."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import httpx

from llm_bench import (
    answer,
    clock,
    mistaken,
    pins,
    probe_events,
    probe_management,
    probe_models,
    probe_prompts,
    talk,
    targets,
)
from llm_bench.bodies import Ask, Asked
from llm_bench.dialects import DIALECTS
from llm_bench.errors import TargetError
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.http1 import is_web_page
from llm_bench.printable import clean
from llm_bench.probe_prompts import Prompts
from llm_bench.prompts import Sizer
from llm_bench.request import Request
from llm_bench.targets import Target

Say = Callable[[str], None]

PINNED_PROBE_TOKENS = 32  # asked of a prompt whose natural answer is one word; a chatty model says twenty
_FIRST_TOKENS = 16  # of the first answer, which only shows what is taken: OpenAI's Responses ask no fewer
RTT_PROBES, RTT_LEAST = 20, 5
RTT_LONGEST_S = 5.0  # all of them together: a round trip is no reason to keep anyone waiting
RTT_SHORTLY_S = 0.1  # before a run; then RTT_LEAST do
MODELS_KEPT = 50  # names in a record's header
_DEFAULT = Timeouts()
# What compared targets are asked: their tokenizers show in what these cost, their weights in the answers.
AGREEMENT = (
    "Name the first four planets.",
    "Continue: once upon a time",
    "What is seven times eight?",
    "Write a line of Python that adds a and b.",
    "Translate to French: good morning.",
)
AGREED_TOKENS = 16  # of each: where two builds part, they mostly do so early
AFTERWARDS_S = 5.0  # a question when the load is over: who waits for a report waits for it too
# Two texts without a common block: the second probe must not be answered from the first one's cache.
_QUESTIONS = ("Answer with one word: is water wet?", "Is fire hot? Say it in a single word.")


class Probe(NamedTuple):
    """What the target turned out to be. None: could not be told."""

    models: list[str]
    model: str
    max_model_len: int | None
    usage_in_stream: bool
    lengths_pinned: bool
    finish_reason_seen: bool
    cached_reported: bool
    ask: Ask
    base_tokens: float  # tokens a prompt costs beyond its words: template, begin-of-text
    tokens_per_word: float
    rtt_ms: float | None  # median of small GETs on one connection
    connect_ms: float | None
    ttft_ms: float | None  # of a short probe, alone: the second, since a server's first request is slow
    tpot_ms: float | None
    alone_ms: float  # from sending to the end, of the same
    alone_tokens: int
    notes: list[str]
    agreement: Sequence[str] = ()  # hashes of its greedy answers to AGREEMENT, where targets are compared
    agreement_tokens: Sequence[int] = ()  # what those prompts cost, template included
    answers: Sequence[str] = ()  # the same answers as text; not stored
    told: Mapping[str, str] = {}  # of pins.FACTS, what the server says
    sized: bool = True  # are base_tokens and tokens_per_word the target's own count? Else it reports none
    prompts: Sequence[tuple[str, int]] = ()  # texts that were sent, and the tokens that each cost; not stored
    # Asked where `whole` is, in a run by `afterwards`: no figure and no doubt rests on these three.
    prefix_cache: str = ""  # on, off or undecided; "": not asked, as of a single pass
    prefix_cache_seen: str = ""  # what says so
    continuous_usage: str = ""  # a word of probe_events.CONTINUOUS; "": nothing is streamed
    # Of every probe.
    workers: str = ""  # that serve the model, where a management port tells
    rtt_probes: int = 0  # small GETs that rtt_ms is the median of

    def public(self) -> dict[str, Any]:
        ask = {**self.ask._asdict(), "extra": dict(self.ask.extra)}
        facts = self._asdict() | {"ask": ask, "models": self.models[:MODELS_KEPT], "told": dict(self.told)}
        del facts["answers"], facts["prompts"]
        return facts

    @property
    def sizer(self) -> Sizer:
        return Sizer(self.base_tokens, self.tokens_per_word)

    def template(self, count: Callable[[str], int]) -> int:
        """Tokens that the target puts around a text, where its tokenizer counts the text itself.

        Not by `base_tokens`: where words do not all cost the same, that is off by one.
        """
        beyond = sorted(tokens - count(text) for text, tokens in self.prompts)
        return max(0, beyond[len(beyond) // 2]) if beyond else 0


def probe(
    target: Target,
    say: Say,
    ready_s: float,
    *,
    stream: bool = True,
    timeouts: Timeouts = _DEFAULT,
    compared: bool = False,
    whole: bool = False,
) -> Probe:
    """Ask the target what every cell needs to know, with a few small requests and no load.

    `compared`: beside other targets; then its greedy answers to a fixed set of prompts are kept, as hashes.
    `whole`: with what a user may want to know and no cell needs, and each question alone, however long that takes.
    `timeouts` bound each request as they do a measured one. What it answers is said without the target's secrets.

    Raises TargetError when it is not reachable within `ready_s`, wants another key, or answers no request at all.
    """
    hide_ = targets.hider(target)

    def hide(text: str) -> str:
        """As it can be said: without secrets, and nothing of the server's acts in it."""
        return clean(hide_(text))

    def tell(text: str) -> None:
        say(hide(text))

    try:
        first, *others = (replace(target, url=url) for url in target.urls)
        found = _probe(first, tell, ready_s, stream, timeouts, compared, whole)
        waiting = [talk.aside(partial(_replica, other, ready_s, timeouts, tell)) for other in others]
        for replica in waiting:
            replica.exception()  # all have ended before one of them is refused: none says a word after that
        replicas = [replica.result() for replica in waiting]
        for other, (models, max_len, told) in zip(others, replicas, strict=True):  # each has to be the same
            pins.check_alike(first, found.told, other.url, told)
            if (models, other.max_model_len or max_len) != (found.models, found.max_model_len):
                found.notes.append(f"{other.url} lists other models or limits than {first.url}: not the same work")
    except TargetError as e:
        raise TargetError(hide(str(e))) from None
    return found._replace(notes=[hide(note) for note in found.notes])


def afterwards(target: Target, found: Probe, timeouts: Timeouts = _DEFAULT) -> dict[str, str]:
    """What a reader of a run may want to know of its target and no cell needs: asked when the load is over.

    Facts as of `probe(..., whole=True)`. None of them is worth a long wait: a question has AFTERWARDS_S, and what the
    target does not answer is not among them.
    """
    timeouts = replace(timeouts, ttft_s=AFTERWARDS_S, total_s=AFTERWARDS_S)
    first = replace(target, url=target.urls[0])
    row, limit = target.dialect, target.max_model_len or found.max_model_len
    with talk.client_of(first, timeouts) as client:
        facts: dict[str, str] = {}
        if not row.comes.single_pass:
            kept = probe_prompts.learn(client, first, found.ask, timeouts, [], limit)
            facts = {"prefix_cache": kept.cache, "prefix_cache_seen": kept.cache_seen}
            got, exchange = talk.ask(client, first, _question(0, _FIRST_TOKENS), found.ask, timeouts)
            if got.outcome == "ok":
                facts["continuous_usage"] = probe_events.ask(client, first, found.ask, got, exchange, timeouts)
    return {name: clean(targets.hider(target)(fact)) for name, fact in facts.items() if fact}


def sized_alike(found: Mapping[str, Probe]) -> dict[str, Probe]:
    """Of compared targets, by name: what counts no prompt tokens gets texts as long as the first that does.

    What they cost it stays unknown, but two servers that differ in nothing else are asked the same.
    """
    like = next((name for name, of in found.items() if of.sized), "")
    return {name: of if of.sized or not like else _sized_as(of, like, found[like]) for name, of in found.items()}


def _sized_as(found: Probe, name: str, like: Probe) -> Probe:
    notes = [note.replace(probe_prompts.ONE_A_WORD, f"prompts are as long as those of {name}") for note in found.notes]
    return found._replace(base_tokens=like.base_tokens, tokens_per_word=like.tokens_per_word, notes=notes)


def _replica(
    target: Target, ready_s: float, timeouts: Timeouts, say: Say
) -> tuple[list[str], int | None, Mapping[str, str]]:
    with talk.client_of(target, timeouts) as client:
        models, max_len, _ = probe_models.listed(client, target, ready_s, say)
        return models, max_len, pins.told(client, target)


def _probe(
    target: Target, say: Say, ready_s: float, stream: bool, timeouts: Timeouts, compared: bool, whole: bool
) -> Probe:
    notes: list[str] = []
    if line := targets.proxy_line(target):
        say(line)
    row = target.dialect
    with talk.client_of(target, timeouts) as client:
        models, max_len, seen = probe_models.listed(client, target, ready_s, say)
        limit = target.max_model_len or max_len
        managed = probe_management.ask(target, say, ready_s, timeouts, notes)
        models = models or list(managed.models)
        model = target.model or (models[0] if models else "")
        if not model and row.takes.model:
            raise TargetError(mistaken.of_list(client, target, seen))
        if not row.takes.model and (said := mistaken.of_name(target, models)):
            raise TargetError(said)
        if models and model not in models:
            notes.append(f"model {model!r} is not among those that it lists: {mistaken.some(models)}")
        trip = talk.aside(partial(_round_trip, target, timeouts, RTT_LONGEST_S if whole else RTT_SHORTLY_S))
        if whole:
            trip.exception()  # waits: each question alone
        told = pins.told(client, target) | ({"revision": managed.version} if managed.version else {})
        rtt_ms, connect_ms, rtt_probes = trip.result()  # over before anything is generated, which would stretch it
        pins.check(target, told)
        say(f"{target.name}: probing {model or target.api}")
        extra = probe_models.described(client, target, model, models)
        wanted = Ask(model, stream=stream and row.comes.streams, extra=extra)
        ask, question, first, exchange = _ladder(client, target, wanted, models, timeouts, notes)
        want = row.takes.asked(question, ask)
        pinned = want.pinned and _ended_at(first, want.out, want.choices, row.comes.ends_by_framing)
        if not row.comes.single_pass:
            notes += _of_lengths(target.api, want, ask, pinned, first)
        counts = not row.comes.single_pass or first.tokens_in >= 0  # many a single pass has no tokens to count
        sized, continuous = Prompts(), ""
        agreed = [_greedy(text) for text in AGREEMENT] if compared else []
        if whole:
            sized = probe_prompts.learn(client, target, ask, timeouts, notes, limit) if counts else sized
            continuous = probe_events.ask(client, target, ask, first, exchange, timeouts)
            greedy = [talk.ask(client, target, request, ask, timeouts) for request in agreed]
        else:
            sizing = probe_prompts.sizing(target, limit) if counts else []
            answers = talk.ask_together(client, target, [*sizing, *agreed], ask, timeouts)
            sized = probe_prompts.sized(sizing, answers[: len(sizing)], notes) if counts else sized
            greedy = answers[len(sizing) :]
    span_ms = (first.event_ns[-1] - first.event_ns[0]) / 1e6 if len(first.event_ns) > 1 else None
    gaps = first.tokens_out - 1 if want.choices == 1 else 0
    return Probe(
        models=models,
        model=model,
        max_model_len=limit,
        usage_in_stream=first.tokens_out_from == "usage",
        lengths_pinned=pinned,
        finish_reason_seen=bool(first.finish_reason),
        cached_reported=sized.cached_reported or first.tokens_cached >= 0,
        ask=ask,
        base_tokens=sized.sizer.base,
        tokens_per_word=sized.sizer.per_word,
        rtt_ms=rtt_ms,
        connect_ms=connect_ms,
        ttft_ms=(first.event_ns[0] - exchange.sent_ns) / 1e6 if first.event_ns else None,
        tpot_ms=span_ms / gaps if span_ms is not None and gaps > 0 else None,
        alone_ms=(exchange.end_ns - exchange.sent_ns) / 1e6,
        alone_tokens=max(first.tokens_out, 1),
        notes=notes,
        told=told,
        sized=sized.sized,
        prompts=sized.sent,
        prefix_cache=sized.cache,
        prefix_cache_seen=sized.cache_seen,
        continuous_usage=continuous,
        workers=managed.workers,
        rtt_probes=rtt_probes,
        **_agreed([got for got, _ in greedy]),
    )


def _ended_at(got: answer.Answer, out: int | None, choices: int, ends_by_framing: bool) -> bool:
    """Is the answer as long as was asked, and not because the model happened to end there?"""
    as_long = out is not None and got.tokens_out == out * choices
    return as_long and (got.finish_reason == "length" or (ends_by_framing and not got.finish_reason))


def _of_lengths(api: str, want: Asked, ask: Ask, pinned: bool, got: answer.Answer) -> list[str]:
    """What cannot be asked of the answers' lengths, or told from them."""
    notes, ways = [], " and ".join(DIALECTS[api].takes.pins)
    if not ways:
        notes.append(
            f"lengths are not pinned: {api} has no way to ask for it, and answers end where the model ends them"
        )
    elif want.pinned and not pinned:
        notes.append(f"lengths are not pinned: asked {want.out} tokens with {ways}, got {got.tokens_out}")
    elif ask.pin_lengths and not pinned:
        notes.append("lengths are not pinned: `extra` of the target says otherwise")
    if got.tokens_out_from != "usage":
        notes.append("no usage in answers: output tokens are estimated")
    return notes


def _greedy(text: str) -> Request:
    return Request(tokens_in=8, tokens_out=AGREED_TOKENS, prompt=text, extra={"temperature": 0})


def _agreed(greedy: Sequence[answer.Answer]) -> dict[str, Any]:
    """What is kept of the answers to AGREEMENT at temperature 0; nothing where one is missing.

    Engines may differ in them, and one engine beside other requests: a figure, no check.
    """
    texts = [got.text if got.outcome == "ok" else "" for got in greedy]
    costs = [got.tokens_in if got.outcome == "ok" else -1 for got in greedy]
    hashes = [hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest() for text in texts]
    known: dict[str, Any] = {"agreement": hashes, "answers": texts} if texts and all(texts) else {}
    return known | ({"agreement_tokens": costs} if costs and min(costs) >= 0 else {})


def _round_trip(target: Target, timeouts: Timeouts, longest_s: float) -> tuple[float | None, float | None, int]:
    """(median ms of a small GET on a warm connection, ms of the first on a new one minus that, GETs of the median)."""
    samples: list[float] = []
    begun_s = time.monotonic()
    method, address = targets.asked_first(target, target.url)
    try:
        with talk.client_of(target, timeouts) as fresh:
            while len(samples) <= RTT_PROBES:
                limit_s = longest_s if len(samples) > RTT_LEAST else RTT_LONGEST_S
                if time.monotonic() - begun_s > limit_s:
                    break
                begun_ns = clock.now_ns()
                talk.page(fresh, method, address, RTT_LONGEST_S)
                samples.append((clock.now_ns() - begun_ns) / 1e6)
    except httpx.HTTPError:
        return None, None, 0
    if len(samples) < 2:
        return None, None, 0
    median = sorted(samples[1:])[len(samples) // 2 - 1]
    return median, max(samples[0] - median, 0.0), len(samples) - 1


# What a strict server may refuse, dropped in this order: lengths first, since usage matters more.
_LADDER = (  # pin_lengths, include_usage, what is then said
    (True, True, ""),
    (False, True, "it refuses ignore_eos/min_tokens: lengths are not pinned"),
    (True, False, "it refuses stream_options.include_usage"),
    (False, False, "it refuses ignore_eos/min_tokens and stream_options: lengths are not pinned"),
)


def _question(number: int, tokens: int) -> Request:
    return Request(tokens_in=8, tokens_out=tokens, prompt=_QUESTIONS[number])


def _ladder(
    client: httpx.Client, target: Target, ask: Ask, models: list[str], timeouts: Timeouts, notes: list[str]
) -> tuple[Ask, Request, answer.Answer, Exchange]:
    """What the server takes, and a second such request with its answer: a server's first one tells of no other."""
    takes, opening, question = target.dialect.takes, _question(0, _FIRST_TOKENS), _question(1, PINNED_PROBE_TOKENS)
    first: tuple[answer.Answer, Exchange] | None = None
    for pin_lengths, include_usage, note in _LADDER:
        if (not pin_lengths and not takes.pins) or (not include_usage and not takes.usage_option):
            continue  # the protocol has no such field to leave out
        tried = ask._replace(pin_lengths=pin_lengths, include_usage=include_usage)
        got, exchange = talk.ask(client, target, opening, tried, timeouts)
        if got.outcome == "ok" and is_web_page(b"".join(exchange.pieces)):
            raise TargetError(mistaken.of_answer(client, target, ask, models, got, exchange))
        if got.outcome == "ok":
            if note:
                notes.append(note)
            again, warm = talk.ask(client, target, question, tried, timeouts)
            if again.outcome == "ok":
                return tried, question, again, warm
            notes.append(f"of two probes the second failed ({again.error_kind}: {again.error}): the first one counts")
            return tried, opening, got, exchange
        first = first or (got, exchange)
        if exchange.status not in (400, 422):
            break
    assert first is not None  # the ladder's first rung is every protocol's
    raise TargetError(mistaken.of_answer(client, target, ask, models, *first))
