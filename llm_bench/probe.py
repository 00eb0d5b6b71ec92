"""What a target is asked before any load: is it there, models, usage, pinned lengths, what a prompt costs, round trip.

Probes go through httpx, straight to the target as the load does, and are read by the same dialect and answer code.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import orjson

from llm_bench import answer, clock, targets
from llm_bench.bodies import Ask, asked, whole
from llm_bench.dialects import DIALECTS
from llm_bench.errors import TargetError
from llm_bench.exchange import (
    CLOSED,
    COMPLETE,
    CONNECT_ERROR,
    CONNECT_TIMEOUT,
    TOTAL_TIMEOUT,
    TTFT_TIMEOUT,
    Exchange,
    Timeouts,
)
from llm_bench.printable import clean
from llm_bench.prompts import Sizer, probe_text
from llm_bench.request import Request
from llm_bench.targets import Target

Say = Callable[[str], None]

PINNED_PROBE_TOKENS = 32  # asked of prompts whose natural answer is one word
RTT_PROBES = 20
RTT_LONGEST_S = 5.0  # all of them together: a round trip is no reason to keep anyone waiting
MODELS_BYTES = 1 << 24  # of an answer of /models; what is longer is no list of models
SHOWN = 5  # of many models' names, in a sentence
MODELS_KEPT = 50  # names in a record's header
SETTLE_S = 10.0  # for a target to let go of what we have cut
_DEFAULT = Timeouts()
# Two texts without a common block: the second probe must not be answered from the first one's cache.
AGREEMENT = (
    "Name the first four planets.",
    "Continue: once upon a time",
    "What is seven times eight?",
    "Write a line of Python that adds a and b.",
    "Translate to French: good morning.",
)
AGREED_TOKENS = 16  # of each: where two builds part, they mostly do so early
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
    rtt_ms: float | None  # median of RTT_PROBES small GETs on one connection
    connect_ms: float | None
    ttft_ms: float | None  # of a short probe, alone: the second, since a server's first request is slow
    tpot_ms: float | None
    alone_ms: float  # from sending to the end, of the same
    alone_tokens: int
    notes: list[str]
    agreement: Sequence[str] = ()  # hashes of its greedy answers to AGREEMENT, where targets are compared

    def public(self) -> dict[str, Any]:
        ask = {**self.ask._asdict(), "extra": dict(self.ask.extra)}
        return self._asdict() | {"ask": ask, "models": self.models[:MODELS_KEPT]}

    @property
    def sizer(self) -> Sizer:
        return Sizer(self.base_tokens, self.tokens_per_word)


def probe(
    target: Target,
    say: Say,
    ready_s: float,
    *,
    stream: bool = True,
    timeouts: Timeouts = _DEFAULT,
    compared: bool = False,
) -> Probe:
    """Ask the target what every cell needs to know, with a few small requests and no load.

    `compared`: beside other targets; then its greedy answers to a fixed set of prompts are kept, as hashes.
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
        found = _probe(first, tell, ready_s, stream, timeouts, compared)
        for other in others:  # each has to be there, and to be the same
            with _client(other, timeouts) as client:
                models, max_len = _models(client, other, ready_s, tell)
            if (models, other.max_model_len or max_len) != (found.models, found.max_model_len):
                found.notes.append(f"{other.url} lists other models or limits than {first.url}: not the same work")
    except TargetError as e:
        raise TargetError(hide(str(e))) from None
    return found._replace(notes=[hide(note) for note in found.notes])


def _probe(target: Target, say: Say, ready_s: float, stream: bool, timeouts: Timeouts, compared: bool) -> Probe:
    notes: list[str] = []
    if line := targets.proxy_line(target):
        say(line)
    with _client(target, timeouts) as client:
        models, max_len = _models(client, target, ready_s, say)
        model = target.model or (models[0] if models else "")
        if not model:
            raise TargetError(
                f"target {target.name}: {target.url}/models lists no model; give --model, or correct the URL: "
                "that of an OpenAI-compatible server ends in /v1"
            )
        if models and model not in models:
            notes.append(f"model {model!r} is not among those that /models lists: {_some(models)}")
        rtt_ms, connect_ms = _round_trip(target, timeouts)
        say(f"{target.name}: probing {model}")
        ask, first, exchange = _ladder(client, target, Ask(model, stream=stream, extra=target.extra), timeouts, notes)
        want = asked(_question(1), ask)
        got_as_asked = want.out is not None and first.tokens_out == want.out * want.choices
        pinned = want.pinned and got_as_asked and first.finish_reason == "length"
        if want.pinned and not pinned:
            notes.append(f"lengths are not pinned: asked {want.out} tokens with ignore_eos, got {first.tokens_out}")
        elif ask.pin_lengths and not pinned:
            notes.append("lengths are not pinned: `extra` of the target says otherwise")
        if first.tokens_out_from != "usage":
            notes.append("no usage in answers: output tokens are estimated")
        base, per_word, cached = _sizes(client, target, ask, timeouts, notes)
        greedy = [_greedy(client, target, text, ask, timeouts) for text in AGREEMENT] if compared else []
    span_ms = (first.event_ns[-1] - first.event_ns[0]) / 1e6 if len(first.event_ns) > 1 else None
    gaps = first.tokens_out - 1 if want.choices == 1 else 0
    return Probe(
        models=models,
        model=model,
        max_model_len=target.max_model_len or max_len,
        usage_in_stream=first.tokens_out_from == "usage",
        lengths_pinned=pinned,
        finish_reason_seen=bool(first.finish_reason),
        cached_reported=cached,
        ask=ask,
        base_tokens=base,
        tokens_per_word=per_word,
        rtt_ms=rtt_ms,
        connect_ms=connect_ms,
        ttft_ms=(first.event_ns[0] - exchange.sent_ns) / 1e6 if first.event_ns else None,
        tpot_ms=span_ms / gaps if span_ms is not None and gaps > 0 else None,
        alone_ms=(exchange.end_ns - exchange.sent_ns) / 1e6,
        alone_tokens=max(first.tokens_out, 1),
        notes=notes,
        agreement=greedy if all(greedy) else (),
    )


def _greedy(client: httpx.Client, target: Target, text: str, ask: Ask, timeouts: Timeouts) -> str:
    """A hash of the answer at temperature 0; "" where there is none. Engines may differ in it: a figure, no check."""
    request = Request(tokens_in=8, tokens_out=AGREED_TOKENS, prompt=text, extra={"temperature": 0})
    got, _ = _ask(client, target, request, ask, timeouts)
    return hashlib.blake2b(got.text.encode(), digest_size=8).hexdigest() if got.outcome == "ok" and got.text else ""


# Gauges of requests at work, of servers that tell: vLLM and the bundled engine, llama.cpp, TGI.
_RUNNING = ("vllm:num_requests_running", "llamacpp:requests_processing", "tgi_batch_current_size")


def settle(target: Target, say: Say, limit_s: float = SETTLE_S) -> None:
    """Wait until the target has let go of the requests we have cut, or say that this could not be checked.

    What it still computes for nobody would slow the next cell.
    """
    with _client(target, _DEFAULT) as client:
        for url in (f"{url.removesuffix('/v1')}/metrics" for url in target.urls):
            deadline_s = time.monotonic() + limit_s
            while (running := _running(client, url)) and time.monotonic() < deadline_s:
                time.sleep(0.1)
            if running is None:
                say(f"{target.name}: whether it still works on requests that were cut could not be checked ({url})")
            elif running:
                say(f"{target.name}: after {limit_s:g} s it still works on {running:g} requests that were cut")


def _running(client: httpx.Client, url: str) -> float | None:
    """Requests that a server says it works on; None where it does not say."""
    try:
        status, body = _get(client, url, 5.0)
        lines = body.decode(errors="replace").splitlines() if status == 200 else []
        found = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(_RUNNING)]
        return sum(map(float, found)) if found else None
    except (httpx.HTTPError, ValueError, IndexError):
        return None


def _client(target: Target, timeouts: Timeouts) -> httpx.Client:
    """One that says what the load says: same headers, no proxy of the environment, nothing compressed."""
    headers = targets.auth_headers(target)
    ours = {"User-Agent": "llm-bench", "Accept": "*/*", "Accept-Encoding": "identity"}
    ours["Content-Type"] = "application/json"
    theirs = {name.lower() for name, _ in headers}
    headers += [(name, value) for name, value in ours.items() if name.lower() not in theirs]
    answer_s = min((s for s in (timeouts.ttft_s, timeouts.total_s) if s is not None), default=None)
    limits = httpx.Timeout(answer_s, connect=timeouts.connect_s)
    return httpx.Client(
        headers=headers, timeout=limits, verify=targets.tls(target), trust_env=False, proxy=targets.httpx_proxy(target)
    )


def _models(client: httpx.Client, target: Target, ready_s: float, say: Say) -> tuple[list[str], int | None]:
    """Model names and the context limit where the server says it; waits for a server that is still starting."""
    deadline_s, waited = time.monotonic() + ready_s, False
    while True:
        try:
            status, body = _get(client, f"{target.url}/models", max(deadline_s - time.monotonic(), 0.1))
            if status not in (502, 503, 504):
                break
            why = f"HTTP {status}"
        except httpx.HTTPError as e:
            why = f"{type(e).__name__}: {e}"
        if time.monotonic() >= deadline_s:
            raise TargetError(
                f"target {target.name}: {target.url} is not ready after {ready_s:g} s ({why}); "
                "start the server or correct the URL; --ready-timeout waits longer"
            )
        if not waited:
            say(f"waiting for {target.name} at {target.url}, up to {ready_s:g} s ({why})")
            waited = True
        time.sleep(min(0.5, max(deadline_s - time.monotonic(), 0)))
    if status in (401, 403):
        raise TargetError(
            f"target {target.name}: HTTP {status}: "
            + ("its key was refused" if target.key_env else "it wants a key; name its variable with --key-env")
        )
    rows = _listed(body) if status // 100 == 2 else []
    limits = [limit for name, limit in rows if not target.model or name == target.model]
    return [name for name, _ in rows], limits[0] if limits else None


def _get(client: httpx.Client, url: str, limit_s: float) -> tuple[int, bytes]:
    """Status and body, read for `limit_s` in all. Raises httpx.HTTPError."""
    begun_s, body = time.monotonic(), b""
    with client.stream("GET", url, timeout=limit_s) as response:
        for piece in response.iter_bytes():
            body += piece
            if time.monotonic() - begun_s > limit_s:
                raise httpx.ReadTimeout(f"the answer has not ended after {limit_s:g} s")
            if len(body) > MODELS_BYTES:
                return response.status_code, b""
    return response.status_code, body


def _listed(body: bytes) -> list[tuple[str, int | None]]:
    """(name, context limit) of each model in an answer of /models, whatever its shape; no list: no models."""
    try:
        rows = orjson.loads(body)["data"]
    except (ValueError, LookupError, TypeError):
        return []
    if not isinstance(rows, list):
        return []
    return [(row["id"], _limit(row)) for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]


def _limit(row: Mapping[str, Any]) -> int | None:
    for holder, name in ((row, "max_model_len"), (row.get("meta"), "n_ctx")):  # vLLM, llama.cpp
        value = whole(holder.get(name)) if isinstance(holder, dict) else None
        if value:
            return value
    return None


def _round_trip(target: Target, timeouts: Timeouts) -> tuple[float | None, float | None]:
    """(median ms of a small GET on a warm connection, ms of the first on a new one minus that)."""
    samples: list[float] = []
    begun_s = time.monotonic()
    try:
        with _client(target, timeouts) as fresh:
            while len(samples) <= RTT_PROBES and time.monotonic() - begun_s < RTT_LONGEST_S:
                begun_ns = clock.now_ns()
                _get(fresh, f"{target.url}/models", RTT_LONGEST_S)
                samples.append((clock.now_ns() - begun_ns) / 1e6)
    except httpx.HTTPError:
        return None, None
    if len(samples) < 2:
        return None, None
    median = sorted(samples[1:])[len(samples) // 2 - 1]
    return median, max(samples[0] - median, 0.0)


# What a strict server may refuse, dropped in this order: lengths first, since usage matters more.
_LADDER = (  # pin_lengths, include_usage, what is then said
    (True, True, ""),
    (False, True, "it refuses ignore_eos/min_tokens: lengths are not pinned"),
    (True, False, "it refuses stream_options.include_usage"),
    (False, False, "it refuses ignore_eos/min_tokens and stream_options: lengths are not pinned"),
)


def _question(number: int) -> Request:
    return Request(tokens_in=8, tokens_out=PINNED_PROBE_TOKENS, prompt=_QUESTIONS[number])


def _ladder(
    client: httpx.Client, target: Target, ask: Ask, timeouts: Timeouts, notes: list[str]
) -> tuple[Ask, answer.Answer, Exchange]:
    """What the server takes, and its answer to the second such request: a server's first one tells of no other."""
    refused = ""
    for pin_lengths, include_usage, note in _LADDER:
        tried = ask._replace(pin_lengths=pin_lengths, include_usage=include_usage)
        got, exchange = _ask(client, target, _question(0), tried, timeouts)
        if got.outcome == "ok":
            if note:
                notes.append(note)
            again, warm = _ask(client, target, _question(1), tried, timeouts)
            if again.outcome == "ok":
                return tried, again, warm
            notes.append(f"of two probes the second failed ({again.error_kind}: {again.error}): the first one counts")
            return tried, got, exchange
        refused = refused or f"{got.error_kind}: {got.error}"
        if exchange.status not in (400, 422):
            break
    raise TargetError(f"target {target.name}: a small probe request failed ({refused})")


def _ask(
    client: httpx.Client, target: Target, request: Request, ask: Ask, timeouts: Timeouts
) -> tuple[answer.Answer, Exchange]:
    """One probe request, stamped as `wire` would."""
    dialect = DIALECTS[target.api]
    exchange = Exchange()
    body = dialect.encode(request, ask)
    exchange.sent_ns = clock.now_ns()
    last_ns = None if timeouts.total_s is None else exchange.sent_ns + round(timeouts.total_s * 1e9)
    try:
        # A connection of its own: one kept alive may be closed by the server just now (llama.cpp after each stream).
        with client.stream(
            "POST", target.url + dialect.path, content=body, headers={"Connection": "close"}
        ) as response:
            exchange.status = response.status_code
            exchange.headers = [(k.lower(), v) for k, v in response.headers.raw]
            exchange.ended = COMPLETE if response.headers.get("transfer-encoding") else CLOSED
            for piece in response.iter_raw():
                exchange.read_ns.append(clock.now_ns())
                exchange.pieces.append(piece)
                if last_ns is not None and exchange.read_ns[-1] > last_ns:
                    exchange.ended, exchange.error = TOTAL_TIMEOUT, f"not ended within {timeouts.total_s:g} s"
                    break
    except httpx.ConnectTimeout:
        exchange.ended, exchange.error = CONNECT_TIMEOUT, f"not connected within {timeouts.connect_s:g} s"
    except httpx.TimeoutException:
        exchange.ended, exchange.error = TTFT_TIMEOUT, f"no answer within {client.timeout.read:g} s"
    except httpx.HTTPError as e:
        exchange.ended, exchange.error = CONNECT_ERROR, f"{type(e).__name__}: {e}"
    exchange.end_ns = clock.now_ns()
    want = asked(request, ask)
    got = answer.read(
        exchange,
        dialect,
        streamed=ask.stream,
        asked_out=want.out,
        pinned=False,
        finish_expected=False,
        choices=want.choices,
    )
    return got, exchange


def _sizes(
    client: httpx.Client, target: Target, ask: Ask, timeouts: Timeouts, notes: list[str]
) -> tuple[float, float, bool]:
    """(tokens beyond the words, tokens a word, is the cache reported), from two prompts of known word counts."""
    points, cached = [], False
    for count in (16, 256):
        request = Request(tokens_in=count, tokens_out=1, prompt=probe_text(count, f"probe {clock.now_ns()}"))
        got, _ = _ask(client, target, request, ask, timeouts)
        if got.tokens_in < 0:  # whatever the one token was: a server that counts has counted
            notes.append("prompt tokens are not reported: prompts are sized at one token a word, unchecked")
            return 0.0, 1.0, False
        points.append((count, got.tokens_in))
        cached = cached or got.tokens_cached >= 0
    if points[1][1] <= points[0][1]:
        notes.append(f"prompt tokens do not grow with the prompt ({points}): prompts are sized at one token a word")
        return 0.0, 1.0, cached
    sizer = Sizer.fit(points)
    return sizer.base, sizer.per_word, cached


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(clean, names[:SHOWN])) + more


def check_rows(target: Target, found: Probe) -> list[tuple[str, str]]:
    """What `llm-bench targets check` prints of one target: question, answer."""
    yes = {True: "yes", False: "no"}
    return [
        ("url", target.url),
        ("protocol (api)", target.api),
        ("models", _some(found.models) or "none listed"),
        ("context limit", str(found.max_model_len or "not said; declare max_model_len")),
        ("usage in streams", yes[found.usage_in_stream]),
        ("lengths can be pinned", yes[found.lengths_pinned]),
        ("says finish_reason", yes[found.finish_reason_seen]),
        ("reports cached tokens", yes[found.cached_reported]),
        ("tokens of a prompt", f"{found.tokens_per_word:.3g} a word, {found.base_tokens:+.1f} for the template"),
        ("round trip", "unknown" if found.rtt_ms is None else f"{found.rtt_ms:.2f} ms (median of {RTT_PROBES})"),
        ("connect", "unknown" if found.connect_ms is None else f"{found.connect_ms:.2f} ms"),
        ("TTFT of a short probe", "not streamed" if found.ttft_ms is None else f"{found.ttft_ms:.1f} ms"),
        ("TPOT of a short probe", "unknown" if found.tpot_ms is None else f"{found.tpot_ms:.2f} ms"),
        *[("note", note) for note in found.notes],
    ]
