"""A target that does not answer as its protocol would: one sentence that names the mistake and what is right."""

import time
from collections.abc import Callable

import httpx

from llm_bench import talk, targets
from llm_bench.answer import Answer
from llm_bench.dialects import DIALECTS
from llm_bench.exchange import Exchange
from llm_bench.printable import clean
from llm_bench.protocol import json_of
from llm_bench.targets import Target

SHOWN = 5  # of many models' names, in a sentence
GUESSES_S = 5.0  # all of them together
_NOT_THERE = (404, 405, 501)
_TLS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted ({}); name its authority with --ca FILE, or believe "
    "any with --insecure",
    "WRONG_VERSION_NUMBER": "it speaks no TLS; http:// in place of https:// would be right",
}


def some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(clean, names[:SHOWN])) + more


def of_key(target: Target, status: int) -> str:
    """Of an answer that wants another key."""
    if target.key_env:
        return f"target {target.name}: HTTP {status}: its key was refused"
    return f"target {target.name}: HTTP {status}: it wants a key; name its variable with --key-env"


def of_tls(target: Target, e: Exception) -> str:
    """Of a handshake that will fail for ever; "" for what may pass."""
    for word, said in _TLS.items():
        if word in str(e):
            why = str(e).rpartition("certificate verify failed: ")[2].partition(" (_ssl")[0]
            return f"target {target.name}: {target.url}: " + said.format(why)
    return ""


def of_list(client: httpx.Client, target: Target, status: int, body: bytes) -> str:
    """Of a target that names no model, where one has to be named."""
    _, address = targets.asked_first(target, target.url)
    if DIALECTS[target.api].site.models:
        where = f"{address} lists no model ({_found(status, body) or 'no list in its answer'})"
    else:
        where = f"{target.api} has no list of models" + (f" ({found})" if (found := _found(status, body)) else "")
    return f"target {target.name}: {where}; give --model, or correct the URL: {_right(target)}" + (
        guess(client, target)
    )


def of_answer(
    client: httpx.Client, target: Target, model: str, models: list[str], got: Answer, exchange: Exchange
) -> str:
    """Of a first small request that failed."""
    if exchange.status in (401, 403):
        return of_key(target, exchange.status)
    body = b"".join(exchange.pieces)
    said = f"{got.error_kind}: {got.error}" if got.outcome != "ok" else "ok"
    text = f"target {target.name}: a small probe request failed ({said})"
    if talk.is_web_page(body):
        where = target.url + DIALECTS[target.api].path_of(model, stream=True)
        text = f"target {target.name}: {where} answers HTTP {exchange.status} with a web page (HTML), not {target.api}"
        return f"{text}; {_right(target)}{guess(client, target)}"
    if model and models and model not in models:
        return f"{text}; model {model!r} is not among those that it lists: {some(models)}"
    if exchange.status in _NOT_THERE or got.error_kind == "protocol_error":
        there = f"is there a model {model!r}, and " if DIALECTS[target.api].takes.model == "path" else ""
        return f"{text}; {there}is it {target.api}? {_right(target)}{guess(client, target)}"
    return text


def _found(status: int, body: bytes) -> str:
    if talk.is_web_page(body):
        return f"HTTP {status}, a web page (HTML)"
    return "" if status // 100 == 2 else f"HTTP {status}"


def _right(target: Target) -> str:
    base = DIALECTS[target.api].site.base
    if base:
        return f"that of an OpenAI-compatible server ends in {base}"
    return f"that of a {target.api} server is what stands before {DIALECTS[target.api].path or 'no path: its route'}"


def guess(client: httpx.Client, target: Target) -> str:
    """As which other protocol, or where else, the same server would answer; "" where none is found."""
    deadline_s = time.monotonic() + GUESSES_S
    tried: set[str] = set()
    for name, row in DIALECTS.items():
        url = targets.root_of(target.url) + row.site.base
        address, says = _sign(name, url)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            break
        if address in tried or (name == target.api and url == target.url):
            continue
        tried.add(address)
        try:
            status, body = talk.page(client, "GET", address, left_s)
        except httpx.HTTPError:
            continue
        if status // 100 == 2 and says(body):
            return f"; it answers as --api {name} would at {url}"
    return ""


def _sign(api: str, url: str) -> tuple[str, Callable[[bytes], object]]:
    """An address that may be read without harm, and whether what it answers is a sign of the protocol."""
    site = DIALECTS[api].site
    method, address = targets.asked_first(Target("", api=api), url)
    if method == "GET":
        return address, site.listed if site.models else site.is_ready
    path, read = site.about[0]
    return targets.root_of(url) + path, lambda body: read(json_of(body))
