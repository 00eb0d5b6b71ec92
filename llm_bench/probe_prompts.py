"""What prompts cost a target and whether it keeps them: tokens of a text, what stands around it, the prefix cache."""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import httpx

from llm_bench import clock, talk
from llm_bench.answer import Answer
from llm_bench.bodies import Ask
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.prompts import Sizer, probe_text
from llm_bench.request import Request
from llm_bench.targets import Target

SHORT = 16  # words
LONG = 256  # words: several blocks of any cache, and still a short prompt
SHORT_PASS, LONG_PASS = 8, 64  # encoders of a single pass take 512 tokens, most of them; a word may be five
TRIPLES = 5  # short, long, the same long one again; the first of them warms the server up and is not timed
LONGEST_S = 4.0  # all of them: a cache is no reason to keep anyone waiting
ONE_A_WORD = "prompts are sized at one token a word"  # of a target that does not count them
ON, OFF, UNDECIDED = "on", "off", "undecided"
# Of a repeated prompt's tokens, said to be cached; and of the time that its length costs, saved.
_MOST, _LEAST = 0.5, 0.1
_SHOWS = 1.5  # a long prompt takes this many times as long as a short one, or its time says nothing of a cache


class Sent(NamedTuple):
    """A prompt and what became of it; counts -1: not said."""

    words: int
    text: str
    tokens: int
    cached: int
    wait_ns: int  # from sending to the first token, or to the end of an answer that comes whole
    failed: str = ""


class Triple(NamedTuple):
    short: Sent
    fresh: Sent  # a long one that was never sent before
    again: Sent  # the same


class Prompts(NamedTuple):
    """What was learnt of them."""

    sizer: Sizer = Sizer()  # a token a word, where the target counts none
    sized: bool = False
    sent: Sequence[tuple[str, int]] = ()  # texts, and what they cost with all that the target puts around them
    cached_reported: bool = False
    cache: str = ""  # ON, OFF, UNDECIDED; "": nothing to ask, as of a single pass
    cache_seen: str = ""  # what says so


def sizing(target: Target, limit: int | None) -> list[Request]:
    """A short and a long prompt. The same at every target, so that equal tokenizers count the same.

    `limit`: tokens of prompt and answer that the target takes, if known.
    """
    return [_request(words, probe_text(words, "sizes")) for words in _words(target, limit)]


def sized(requests: Sequence[Request], answers: Sequence[tuple[Answer, Exchange]], notes: list[str]) -> Prompts:
    """What prompts cost, by what the target counted in `requests`, those of `sizing`."""
    sent = [_sent(request, *found) for request, found in zip(requests, answers, strict=True)]
    return _sized(sent, notes)._replace(cached_reported=any(one.cached >= 0 for one in sent))


def learn(
    client: httpx.Client, target: Target, ask: Ask, timeouts: Timeouts, notes: list[str], limit: int | None
) -> Prompts:
    """What prompts cost and whether they are kept, by a few new ones one after the other: their times count."""
    once, words = target.dialect.comes.single_pass, _words(target, limit)

    def send(words: int, text: str = "") -> Sent:
        request = _request(words, text or probe_text(words, f"probe {clock.now_ns()}"))
        return _sent(request, *talk.ask(client, target, request, ask, timeouts))

    begun_s = time.monotonic()
    fresh = [send(count) for count in words]
    triples: list[Triple] = []
    slow = time.monotonic() - begun_s > LONGEST_S  # a repeat would come too late to say anything
    while not once and not slow and not fresh[-1].failed and not fresh[-2].failed:
        triples.append(Triple(fresh[-2], fresh[-1], send(words[1], fresh[-1].text)))
        over = time.monotonic() - begun_s > LONGEST_S or len(triples) == TRIPLES
        if over or triples[-1].again.failed or settled(triples):
            break
        fresh += [send(count) for count in words]
    cache, seen = prefix_cache(triples) if triples else (UNDECIDED, "too slow to be timed") if slow else ("", "")
    reported = any(sent.cached >= 0 for sent in (*fresh, *(triple.again for triple in triples)))
    return _sized(fresh, notes)._replace(cached_reported=reported, cache=cache, cache_seen=seen)


def _words(target: Target, limit: int | None) -> tuple[int, int]:
    if target.dialect.comes.single_pass:
        return SHORT_PASS, LONG_PASS
    return SHORT, min(LONG, max(2 * SHORT, limit // 8)) if limit else LONG


def _request(words: int, text: str) -> Request:
    return Request(tokens_in=words, tokens_out=1, prompt=text)


def _sent(request: Request, got: Answer, exchange: Exchange) -> Sent:
    end_ns = got.event_ns[0] if got.event_ns else exchange.end_ns
    # Whatever the one token was: a server that counts has counted.
    failed = "" if got.outcome == "ok" or got.tokens_in >= 0 else got.error[:120]
    text, words = request.prompt or "", request.tokens_in
    return Sent(words, text, got.tokens_in, got.tokens_cached, end_ns - exchange.sent_ns, failed)


def _sized(fresh: Sequence[Sent], notes: list[str]) -> Prompts:
    for sent in fresh[:2]:
        if sent.tokens < 0:
            unanswered = f"a prompt of {sent.words} words was not answered ({sent.failed})"
            why = unanswered if sent.failed else "prompt tokens are not reported"
            notes.append(f"{why}: {ONE_A_WORD}, unchecked")
            return Prompts()
    points = [(sent.words, sent.tokens) for sent in fresh if sent.tokens >= 0]
    texts = tuple((sent.text, sent.tokens) for sent in fresh if sent.tokens >= 0)
    short, long = (
        fmean(tokens for words, tokens in points if words == count) for count in (points[0][0], points[1][0])
    )
    if long <= short:
        notes.append(f"prompt tokens do not grow with the prompt ({points[:2]}): {ONE_A_WORD}")
        return Prompts()
    return Prompts(Sizer.fit(points), True, texts)


# ---- the prefix cache: by the server's own count, and by how long a repeated prompt takes beside new ones


def settled(triples: Sequence[Triple]) -> bool:
    """Would more of them change nothing? A count that the time speaks against is timed to the end."""
    return len(triples) > 1 and (not all(map(_shows, triples[1:])) or bool(_told(triples) and not _belied(triples)))


def prefix_cache(triples: Sequence[Triple]) -> tuple[str, str]:
    """(ON, OFF or UNDECIDED; what says so). Only ratios of times on one clock count, and all of them have to agree."""
    told, timed = _told(triples), _timed(triples[1:])
    cache = told or timed or UNDECIDED
    if _belied(triples):
        cache = UNDECIDED
    words = f"of a repeated prompt of {triples[0].fresh.words} words"
    shares = _shares(triples)
    parts = [f"{_span(shares, '.0%')} {words} from the cache, it says"] if shares else ["it counts no cached tokens"]
    late = triples[1:]
    if not late:
        parts.append("too slow to be timed")
    elif all(map(_shows, late)):
        ratios = [one.again.wait_ns / max(one.fresh.wait_ns, 1) for one in late]
        parts.append(f"its first token takes {_span(ratios, '.2f')} of a new one's time")
    else:
        parts.append("a prompt's length does not show in its time")
    return cache, "; ".join(parts)


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _shares(triples: Sequence[Triple]) -> list[float]:
    """Of the repeats' tokens, what the server says it had cached beyond what any prompt has: the template."""
    return [
        max(one.again.cached - max(one.fresh.cached, 0), 0) / one.again.tokens
        for one in triples
        if one.again.cached >= 0 and one.again.tokens > 0
    ]


def _told(triples: Sequence[Triple]) -> str:
    """One that says it kept a prompt is enough; a first one may come too soon to be kept."""
    shares = _shares(triples)
    if shares and min(shares) >= _MOST:
        return ON
    return OFF if len(shares) > 1 and max(shares) <= _LEAST else ""


def _belied(triples: Sequence[Triple]) -> bool:
    """Does it count nothing cached, while every timed repeat is as fast as one from a cache?"""
    late = triples[1:]
    return _told(triples) == OFF and all(map(_shows, late)) and min(_saved(late)) >= _MOST


def _shows(one: Triple) -> bool:
    return one.fresh.wait_ns >= _SHOWS * one.short.wait_ns


def _timed(triples: Sequence[Triple]) -> str:
    """By the share of what a prompt's length costs that its repeat has saved. Fewer than all triples decide nothing."""
    if len(triples) < TRIPLES - 1 or not all(map(_shows, triples)):
        return ""
    saved = _saved(triples)
    return ON if min(saved) >= _MOST else OFF if max(saved) <= _MOST / 2 else ""


def _saved(triples: Sequence[Triple]) -> list[float]:
    """Of what a prompt's length costs, the share that its repeat has saved; of triples where the length shows."""
    return [(one.fresh.wait_ns - one.again.wait_ns) / (one.fresh.wait_ns - one.short.wait_ns) for one in triples]
