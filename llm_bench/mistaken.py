"""A target that does not answer as its protocol would: one sentence that names the mistake and what is right."""

import re
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx

from llm_bench import statuses, talk, targets
from llm_bench.answer import Answer
from llm_bench.bodies import Ask
from llm_bench.dialects import DIALECTS
from llm_bench.exchange import Exchange
from llm_bench.http1 import is_web_page
from llm_bench.printable import clean
from llm_bench.protocol import json_of
from llm_bench.statuses import Said
from llm_bench.targets import Target

SHOWN = 5  # of many models' names, in a sentence
_PAGE_BYTES = 1000
GUESSES_S = 5.0  # all of them together
_NOT_THERE = (404, 405, 501)
_OTHER_BODY = (415, 422)  # a body of another type, or with other fields
_INSECURE = ", or believe any with --insecure"  # which gRPC cannot
_TLS = {  # OpenSSL's words
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not trusted ({}); name its authority with --ca FILE" + _INSECURE,
    "WRONG_VERSION_NUMBER": "it does not speak TLS; use http:// instead of https://",
}
# The server's own word for why it ended a handshake, as OpenSSL has it and as gRPC's BoringSSL. What it says of no
# certificate and of a wrong one differs from server to server: TLS 1.2 has one word for any handshake it refuses.
_ALERT = re.compile(r"(?:ALERT|TLSV1)_(?!ALERT)(\w+)")
_OF_CERTIFICATES = re.compile("certificate|handshake failure|unknown ca")
_NO_CERTIFICATE = "it asks for a client certificate; name its files by `cert` and `key` of its table in targets.toml"
_WRONG_CERTIFICATE = (
    "it refused the client certificate of `cert` ({}); give one that its authority has signed and that is valid today"
)
_PAGE = re.compile(rb"SSL certificate (was sent|error)")  # nginx's
_CLOSED = re.compile("UNEXPECTED_EOF|disconnected without|Connection reset|Socket closed")  # OpenSSL, HTTP, TCP, gRPC
_NO_HANDSHAKE = "it ended the TLS handshake ({}); correct the URL"


def some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(clean, names[:SHOWN])) + more


def wants_key(status: int, body: bytes) -> bool:
    """Is an answer that of a server to a request without its key, or with another? TorchServe's has status 400."""
    return status in (401, 403) or (status == 400 and b"InvalidKeyException" in body)


def of_key(target: Target, address: str, said: Said) -> str:
    """Of an answer of `address` that wants another key."""
    name, form = DIALECTS[target.api].site.key_header
    headers, offered = f"[targets.{target.name}.headers] of targets.toml", statuses.schemes(said)
    given = next((own for own in target.headers if own.lower() in (name.lower(), "authorization")), "")
    what = "it wants a key; name its variable with --key-env"
    if target.key_env:
        what = f"its key was refused; correct the value of the variable {target.key_env}"
    elif given:
        what = f"the {given} of its headers was refused; correct it in {headers}"
    ours = form.partition(" ")[0].lower()
    if offered and name == "Authorization" and not given and ours not in map(str.lower, offered):
        what = f"it wants {' or '.join(offered)} and no key; give Authorization in {headers}"
    shown = statuses.number(target, said)
    facts = statuses.told(said, shown)
    return f"target {target.name}: {address} answers {shown}: {what}" + (f" ({facts})" if facts else "")


def of_tls(target: Target, e: Exception) -> str:
    """Of a handshake that will fail for ever; "" for what may pass."""
    text = str(e)
    said = next((said for word, said in _TLS.items() if word in text), "")
    why = text.rpartition("certificate verify failed: ")[2].partition(" (_ssl")[0]
    if not said and (alert := _ALERT.search(text)):
        why = alert[1].lower().replace("_", " ")
        certificates = _WRONG_CERTIFICATE if target.cert else _NO_CERTIFICATE
        said = certificates if _OF_CERTIFICATES.search(why) else _NO_HANDSHAKE
    if DIALECTS[target.api].transport == "grpc":
        said = said.removesuffix(_INSECURE)
    return f"target {target.name}: {target.url}: {said.format(why)}" if said else ""


def of_page(target: Target, body: bytes) -> str:
    """Of a page that a server sends where it wants another client certificate; "" for any other page."""
    if not _PAGE.search(body[:_PAGE_BYTES]):
        return ""
    said = _WRONG_CERTIFICATE if target.cert else _NO_CERTIFICATE
    return f"target {target.name}: {target.url}: {said.format('by a page that says so')}"


def of_name(target: Target, models: list[str]) -> str:
    """Of a model that requests cannot name, under another name than its server's; "" where a part of it is the same.

    Its answers would be reported as another model's.
    """
    said = target.model.lower()
    if not said or not models or any(said in name.lower() or name.lower() in said for name in models):
        return ""
    return (
        f"target {target.name}: model {target.model!r} is not what {target.url} serves, {some(models)}, and a request "
        f"of {target.api} names none; leave --model out, or give the server's name for it"
    )


def of_close(target: Target, why: str) -> str:
    """What is added where a server of TLS ends each connection without an alert, as asyncio's do; "" elsewhere."""
    if not _CLOSED.search(why):
        return ""
    if not target.url.startswith("https"):
        grpc = target.dialect.transport == "grpc"
        return "; it closes without a word, as a TLS server does: try https://" if grpc else ""
    likely = (
        "the client certificate of `cert` is not one of its authority's, or has expired"
        if target.cert
        else ("a client certificate is asked for: `cert` and `key` of its table in targets.toml")
    )
    return f"; it closes without a word, as where {likely}"


def of_list(client: httpx.Client, target: Target, said: Said) -> str:
    """Of a target that names no model, where one has to be named."""
    _, address = targets.asked_first(target, target.url)
    found = _found(target, said)
    if DIALECTS[target.api].site.models:
        where = f"{address} lists no model ({found or 'no list in its answer'})"
    else:
        where = f"{target.api} has no list of models" + (f", and {address} answers {found}" if found else "")
    by_status = statuses.right(target, said, address, address.removeprefix(target.url))
    if by_status and by_status != statuses.NOT_FOLLOWED:
        return f"target {target.name}: {where}; {by_status}; or give --model"
    return f"target {target.name}: {where}; give --model, or correct the URL: {_right(target)}" + (
        guess(client, target)
    )


def of_answer(
    client: httpx.Client,
    target: Target,
    asked: Ask,
    models: list[str],
    got: Answer,
    exchange: Exchange,
    address: str = "",
) -> str:
    """Of a first small request that failed; `address`: where another page was asked than answers come from."""
    model, answered = asked.model, statuses.of(target, exchange)
    body = answered.body
    path = target.dialect.path_of(model, asked.stream)
    address = address or target.url + path
    if wants_key(exchange.status, body):
        return of_key(target, address, answered)
    said = f"{got.error_kind}: {got.error}" if got.outcome != "ok" else "ok"
    if exchange.status // 100 != 2 and (is_web_page(body) or 300 <= exchange.status < 400):
        said = got.error_kind  # a page is named by its title, and of a redirect the load offers the whole address
    by_status = statuses.right(target, answered, address, path)
    if is_web_page(body) and not by_status:
        answers = f"{address} answers HTTP {exchange.status} with a web page (HTML), not {target.api}"
        return f"target {target.name}: {answers}; {_right(target)}{guess(client, target)}"
    answers = (
        f"{address} answers {statuses.words(target, answered, said)}" if exchange.status else f"asked was {address}"
    )
    text = f"target {target.name}: a small probe request failed ({said}); {answers}"
    if by_status:
        text += f"; {by_status}" + (f"; {_right(target)}" if by_status == statuses.NOT_FOLLOWED else "")
    if model and models and model not in models:
        return f"{text}; model {model!r} is not among those that it lists: {some(models)}"
    if not target.model and len(models) > 1:
        text += f"; asked was {model!r}, the first of those that it lists ({some(models)}): --model names another"
    if exchange.status in _NOT_THERE or got.error_kind == "protocol_error":
        there = f"is there a model {model!r}, and " if DIALECTS[target.api].takes.model == "path" else ""
        return f"{text}; {there}is it {target.api}? {_right(target)}{guess(client, target)}"
    if exchange.status in _OTHER_BODY:
        extra = "; `extra` of its table goes into every body" if target.extra else ""
        return f"{text}; is it {target.api}? {_right(target)}{extra}"
    return text


def _found(target: Target, said: Said) -> str:
    if said.status // 100 == 2:
        return f"HTTP {said.status}, a web page (HTML)" if is_web_page(said.body) else ""
    return statuses.listed(target, said)


def _right(target: Target) -> str:
    """What a URL of the target's protocol looks like, by the one that was given."""
    row = DIALECTS[target.api]
    parts = urlsplit(target.url)
    origin = f"{parts.scheme}://{parts.netloc}"
    what = f"{'an' if target.api[0] in 'aeio' else 'a'} {target.api} URL"
    if row.transport == "grpc":
        return f"{what} is its gRPC port and no path, such as {origin}"
    if row.site.base:
        return f"{what} ends in {row.site.base}, such as {origin}{row.site.base}"
    if not row.path:
        return f"{what} is the whole address that requests are sent to, such as {origin}/ROUTE"
    return f"{what} is all that stands before {row.path}, such as {origin}"


def guess(client: httpx.Client, target: Target) -> str:
    """As which other protocol, or where else, the same server would answer; "" where none is found.

    Protocols that share a page are named together: it does not tell them apart.
    """
    deadline_s, calls = time.monotonic() + GUESSES_S, target.dialect.transport == "grpc"
    seen: dict[str, bytes] = {}  # address -> body of an answer 2xx, or b""
    alike: list[str] = []
    place = ("", "")  # URL and address at which those in `alike` would answer
    for name, row in DIALECTS.items():
        url = targets.root_of(target.url) + row.site.base
        address, says = _sign(name, url)
        # A gRPC client's pages are calls: they say nothing of HTTP, and pages of HTTP nothing of calls.
        if (name == target.api and url == target.url) or (row.transport == "grpc") != calls:
            continue
        if alike and (url, address) != place:
            continue
        if address not in seen:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                status, body = talk.page(client, "GET", address, left_s)
            except httpx.HTTPError:
                status, body = 0, b""
            seen[address] = body if status // 100 == 2 else b""
        if seen[address] and says(seen[address]):
            alike.append(name)
            place = (url, address)
    which = f"--api {alike[0]}" if len(alike) == 1 else f"one of --api {', '.join(alike)}"
    return f"; it answers as {which} would at {place[0]}" if alike else ""


def _sign(api: str, url: str) -> tuple[str, Callable[[bytes], object]]:
    """An address that may be read without harm, and whether what it answers is a sign of the protocol."""
    site = DIALECTS[api].site
    method, address = targets.asked_first(Target("", api=api), url)
    if method == "GET":
        return address, site.listed if site.models else site.is_ready
    path, read = site.about[0]

    def says(body: bytes) -> bool:
        page = json_of(body)
        return bool(read(page)) and site.speaks(page)

    return targets.root_of(url) + path, says
