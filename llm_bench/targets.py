"""What is measured: names and URLs -> Target; and what one is asked before any load: reachable, models, usage, lengths.

Probes go through httpx and are read by the same dialect and answer code as the measurement.
"""

import os
import select
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import orjson

from llm_bench import answer, clock
from llm_bench.dialects import DIALECTS, Ask
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import CLOSED, COMPLETE, CONNECT_ERROR, Exchange
from llm_bench.prompts import Sizer, probe_text
from llm_bench.request import Request

# Targets that need no server of the user's: each is a process of its own that says on stdout where it listens.
BUILT_IN: dict[str, tuple[str, ...]] = {
    "reference": ("-m", "reference_engine", "--port", "0", "--exit-with-stdin"),
    "null": ("-m", "llm_bench.null_target", "--port", "0", "--exit-with-stdin"),
}
PINNED_PROBE_TOKENS = 32  # asked of a prompt whose natural answer is one word
RTT_PROBES = 20
ENGINE_NEEDS = ("torch", "aiohttp", "prometheus_client")
BUILT_IN_READY_S = 120.0  # importing torch on a busy machine takes tens of seconds


@dataclass(frozen=True)
class Target:
    """One server, as the user declares it. A key is named by its environment variable and never held here."""

    name: str
    url: str = ""  # base, e.g. http://127.0.0.1:8000/v1
    api: str = "openai-chat"  # a row of DIALECTS
    model: str = ""  # "": the first that /models lists
    key_env: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = ""  # path of a tokenizer.json
    max_model_len: int = 0  # 0: as probed
    revision: str = ""
    precision: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # into every request's body
    cafile: str = ""  # https with a private authority
    launch: tuple[str, ...] = ()  # arguments of a server of ours

    def public(self) -> dict[str, Any]:
        """As stored in headers: header values may be secrets, their names are not."""
        return asdict(self) | {"headers": sorted(self.headers)}


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
    ttft_ms: float | None  # of the short probe, alone
    tpot_ms: float | None
    alone_ms: float  # from sending to the end, of the short probe
    alone_tokens: int
    notes: list[str]

    def public(self) -> dict[str, Any]:
        return self._asdict() | {"ask": {**self.ask._asdict(), "extra": dict(self.ask.extra)}}

    @property
    def sizer(self) -> Sizer:
        return Sizer(self.base_tokens, self.tokens_per_word)


def parse(spec: str, file: Path, flags: Mapping[str, Any]) -> list[Target]:
    """`vllm,mine=http://host:8000/v1,reference` -> Targets; bare names are looked up in `file` or built in.

    `flags` are fields given on the command line: they hold for every target, over what the file declares.

    Raises BenchError for an unknown name, a URL that is none, an unknown api or key.
    """
    declared = _declared(file) if file.exists() else {}
    targets = []
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, sign, url = item.partition("=") if not item.startswith(("http://", "https://")) else ("", "=", item)
        if not sign and name not in declared and name not in BUILT_IN:
            known = ", ".join([*declared, *BUILT_IN])
            raise BenchError(
                f"--targets {name}: no such target (known: {known}). Write {file} with:  "
                f'targets.{name}.url = "http://127.0.0.1:8000/v1"   or give {name}=URL'
            )
        facts: dict[str, Any] = {**declared.get(name, {}), **flags}
        if url:
            facts["url"] = url
        elif name in BUILT_IN and name not in declared:
            facts["launch"] = BUILT_IN[name]
        targets.append(_checked(Target(name=name or urlsplit(url).netloc, **facts)))
    names = [t.name for t in targets]
    if not names:
        raise BenchError("--targets names no target; give e.g. reference, or mine=http://127.0.0.1:8000/v1")
    if twice := {n for n in names if names.count(n) > 1}:
        raise BenchError(f"--targets names {sorted(twice)} twice; give each its own name: a=URL,b=URL")
    return targets


def _declared(file: Path) -> dict[str, dict[str, Any]]:
    try:
        document = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BenchError(f"{file}: not TOML: {e}") from None
    known = {f.name for f in fields(Target)} - {"name", "launch"}
    tables = document.get("targets", {})
    if not isinstance(tables, dict) or set(document) - {"targets"}:
        raise BenchError(f"{file}: expected only tables [targets.NAME], found {sorted(document)}")
    out: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise BenchError(f"{file}: targets.{name} is not a table; write [targets.{name}]")
        facts = {key.replace("-", "_"): value for key, value in table.items()}
        if unknown := set(facts) - known:
            raise BenchError(f"{file}: [targets.{name}] has unknown keys {sorted(unknown)}; known: {sorted(known)}")
        for key, value in facts.items():
            want = {"headers": dict, "extra": dict, "max_model_len": int}.get(key, str)
            if not isinstance(value, want):
                raise BenchError(f"{file}: [targets.{name}] {key} = {value!r} is not a {want.__name__}")
        out[name] = facts
    return out


def _checked(target: Target) -> Target:
    if target.api not in DIALECTS:
        raise BenchError(f"target {target.name}: unknown api {target.api!r}; known: {', '.join(DIALECTS)}")
    if not target.launch:
        parts = urlsplit(target.url)
        if "@" in parts.netloc:  # it would be stored with the command line and shown in `ps`
            raise BenchError(f"target {target.name}: the URL holds a user or key; name the key's variable: --key-env")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"target {target.name}: {target.url!r} is no URL; right: http://host:8000/v1")
    if target.key_env and target.key_env not in os.environ:
        raise BenchError(f"target {target.name}: the environment variable {target.key_env} (its key) is not set")
    for name, value in target.headers.items():
        if not isinstance(value, str) or any(c in name + value for c in "\r\n\0"):
            raise BenchError(f"target {target.name}: header {name!r} is not one line of text")
    return replace(target, url=target.url.rstrip("/"))


def auth_headers(target: Target) -> list[tuple[str, str]]:
    """Extra headers of every request, the key among them. Never stored, never printed."""
    headers = list(target.headers.items())
    if target.key_env:
        headers.append(("Authorization", f"Bearer {os.environ[target.key_env]}"))
    return headers


@contextmanager
def running(target: Target, say: Callable[[str], None], log: Path | None = None) -> Iterator[Target]:
    """The target with its URL; a built-in one is started, its stderr kept in `log`, and ended when the block is left.

    The child watches its stdin: if this process dies in any way, the pipe closes and the child ends.
    """
    if not target.launch:
        yield target
        return
    missing = [name for name in ENGINE_NEEDS if "reference_engine" in target.launch and find_spec(name) is None]
    if missing:
        raise TargetError(
            f"target {target.name}: the bundled engine needs {', '.join(missing)}: in the project's folder, "
            "pip install --constraint constraints.txt '.[engine]'"
        )
    say(f"starting {target.name}: python {' '.join(target.launch)}" + (f", its log in {log}" if log else ""))
    with log.open("wb") if log else tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, *target.launch],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is ours to handle: the engine must live until the run is cut and written
        )
    try:
        yield replace(target, url=_announced(child, target, log))
    finally:
        assert child.stdin and child.stdout
        child.stdin.close()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def _announced(child: "subprocess.Popen[bytes]", target: Target, log: Path | None) -> str:
    """The URL that a server of ours prints as one JSON line once it listens."""
    assert child.stdout
    ready, _, _ = select.select([child.stdout], [], [], BUILT_IN_READY_S)
    line = child.stdout.readline() if ready else b""
    try:
        return str(orjson.loads(line)["listening"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        said = log.read_text(errors="replace").strip().splitlines()[-1:] if log else []
        raise TargetError(f"target {target.name}: did not start ({''.join(said) or 'no word from it'})") from None


def probe(target: Target, say: Callable[[str], None], ready_s: float, *, stream: bool = True) -> Probe:
    """Ask the target what every cell needs to know, with a few small requests and no load.

    Raises TargetError when it is not reachable within `ready_s`, wants another key, or answers no request at all.
    """
    verify: Any = True
    if target.cafile:
        import ssl

        verify = ssl.create_default_context(cafile=target.cafile)
    notes: list[str] = []
    # trust_env off: a proxy of the environment would be on the probe's path and not on the measurement's.
    with httpx.Client(headers=auth_headers(target), timeout=120.0, verify=verify, trust_env=False) as client:
        models, max_len = _models(client, target, ready_s, say)
        model = target.model or (models[0] if models else "")
        if not model:
            raise TargetError(
                f"target {target.name}: {target.url}/models lists no model; give --model, or correct the URL: "
                "that of an OpenAI-compatible server ends in /v1"
            )
        if models and model not in models:
            notes.append(f"model {model!r} is not among those that /models lists: {', '.join(models[:5])}")
        rtt_ms, connect_ms = _round_trip(client, target, verify)
        say(f"{target.name}: probing {model}")
        ask, first, exchange = _ladder(client, target, Ask(model, stream=stream, extra=target.extra), notes)
        pinned = ask.pin_lengths and first.tokens_out == PINNED_PROBE_TOKENS and first.finish_reason == "length"
        if ask.pin_lengths and not pinned:
            notes.append(
                f"lengths are not pinned: asked {PINNED_PROBE_TOKENS} tokens with ignore_eos, got {first.tokens_out}"
            )
        if first.tokens_out_from != "usage":
            notes.append("no usage in answers: output tokens are estimated")
        base, per_word, cached = _sizes(client, target, ask, notes)
    span_ms = (first.event_ns[-1] - first.event_ns[0]) / 1e6 if len(first.event_ns) > 1 else None
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
        tpot_ms=span_ms / (first.tokens_out - 1) if span_ms is not None and first.tokens_out > 1 else None,
        alone_ms=(exchange.end_ns - exchange.sent_ns) / 1e6,
        alone_tokens=max(first.tokens_out, 1),
        notes=notes,
    )


def reachable(target: Target) -> bool:
    """Does anything still listen there? Asked when a run meets one refused connection after another."""
    try:
        httpx.get(f"{target.url}/models", timeout=5.0, verify=False, trust_env=False)
    except httpx.TransportError:
        return False
    return True


def _models(
    client: httpx.Client, target: Target, ready_s: float, say: Callable[[str], None]
) -> tuple[list[str], int | None]:
    """Model names and the context limit where the server says it; waits for a server that is still starting."""
    deadline, waited = time.monotonic() + ready_s, False
    while True:
        try:
            response = client.get(f"{target.url}/models")
            if response.status_code not in (502, 503, 504):
                break
            why = f"HTTP {response.status_code}"
        except httpx.TransportError as e:
            why = f"{type(e).__name__}: {e}"
        if time.monotonic() >= deadline:
            raise TargetError(
                f"target {target.name}: {target.url} is not ready after {ready_s:g} s ({why}); "
                "start the server or correct the URL; --ready-timeout waits longer"
            )
        if not waited:
            say(f"waiting for {target.name} at {target.url}, up to {ready_s:g} s ({why})")
            waited = True
        time.sleep(min(0.5, max(deadline - time.monotonic(), 0)))
    if response.status_code in (401, 403):
        raise TargetError(
            f"target {target.name}: HTTP {response.status_code}: "
            + ("its key was refused" if target.key_env else "it wants a key; name its variable with --key-env")
        )
    try:
        rows = [row for row in response.json()["data"] if isinstance(row.get("id"), str)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return [], None  # no list of models: --model is needed, the first request will tell the rest
    limits = [row.get("max_model_len") or (row.get("meta") or {}).get("n_ctx") for row in rows]
    mine = [lim for row, lim in zip(rows, limits, strict=True) if not target.model or row["id"] == target.model]
    return [row["id"] for row in rows], mine[0] if mine and isinstance(mine[0], int) else None


def _round_trip(client: httpx.Client, target: Target, verify: Any) -> tuple[float | None, float | None]:
    """(median ms of a small GET on a warm connection, ms of the first on a new one minus that)."""
    samples = []
    try:
        with httpx.Client(headers=client.headers, timeout=10.0, verify=verify, trust_env=False) as fresh:
            for _ in range(RTT_PROBES + 1):
                begun = clock.now_ns()
                fresh.get(f"{target.url}/models")
                samples.append((clock.now_ns() - begun) / 1e6)
    except httpx.TransportError:
        return None, None
    median = sorted(samples[1:])[RTT_PROBES // 2]
    return median, max(samples[0] - median, 0.0)


# What a strict server may refuse, dropped in this order: lengths first, since usage matters more.
_LADDER = (  # pin_lengths, include_usage, what is then said
    (True, True, ""),
    (False, True, "it refuses ignore_eos/min_tokens: lengths are not pinned"),
    (True, False, "it refuses stream_options.include_usage"),
    (False, False, "it refuses ignore_eos/min_tokens and stream_options: lengths are not pinned"),
)


def _ladder(client: httpx.Client, target: Target, ask: Ask, notes: list[str]) -> tuple[Ask, answer.Answer, Exchange]:
    request = Request(tokens_in=8, tokens_out=PINNED_PROBE_TOKENS, prompt="Answer with one word: is water wet?")
    refused = ""
    for pin_lengths, include_usage, note in _LADDER:
        tried = ask._replace(pin_lengths=pin_lengths, include_usage=include_usage)
        got, exchange = _ask(client, target, request, tried)
        if got.outcome == "ok":
            if note:
                notes.append(note)
            return tried, got, exchange
        refused = refused or f"{got.error_kind}: {got.error}"
        if exchange.status not in (400, 422):
            break
    raise TargetError(f"target {target.name}: a small probe request failed ({refused})")


def _ask(client: httpx.Client, target: Target, request: Request, ask: Ask) -> tuple[answer.Answer, Exchange]:
    """One probe request, stamped as `wire` would."""
    dialect = DIALECTS[target.api]
    exchange = Exchange()
    body = dialect.encode(request, ask)
    try:
        exchange.sent_ns = clock.now_ns()
        with client.stream(
            "POST", target.url + dialect.path, content=body, headers={"Content-Type": "application/json"}
        ) as response:
            exchange.status = response.status_code
            exchange.headers = [(k.lower(), v) for k, v in response.headers.raw]
            for piece in response.iter_bytes():
                exchange.read_ns.append(clock.now_ns())
                exchange.pieces.append(piece)
        exchange.ended = COMPLETE if response.headers.get("transfer-encoding") else CLOSED
    except httpx.TransportError as e:
        exchange.ended, exchange.error = CONNECT_ERROR, f"{type(e).__name__}: {e}"
    exchange.end_ns = clock.now_ns()
    got = answer.read(
        exchange,
        dialect,
        streamed=ask.stream,
        asked_out=request.tokens_out,
        pinned=False,
        finish_expected=False,
    )
    return got, exchange


def _sizes(client: httpx.Client, target: Target, ask: Ask, notes: list[str]) -> tuple[float, float, bool]:
    """(tokens beyond the words, tokens a word, is the cache reported), from two prompts of known word counts."""
    points, cached = [], False
    for count in (16, 256):
        request = Request(tokens_in=count, tokens_out=1, prompt=probe_text(count, f"probe {clock.now_ns()}"))
        got, _ = _ask(client, target, request, ask)
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


def check_rows(target: Target, found: Probe) -> list[tuple[str, str]]:
    """What `llm-bench targets check` prints of one target: question, answer."""
    yes = {True: "yes", False: "no"}
    return [
        ("url", target.url),
        ("protocol (api)", target.api),
        ("models", ", ".join(found.models) or "none listed"),
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
