"""An HTTP answer that is no success, in words: what it says of itself, and what would be right."""

import re
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

import orjson

from llm_bench.exchange import Exchange
from llm_bench.grpc_frames import GRPC_STATUS, read_frames
from llm_bench.http1 import is_web_page
from llm_bench.protocol import Headers, error_in, in_words, json_of
from llm_bench.target import Target

SHOWN = 160  # characters of what a server says, in a sentence
_TITLE = re.compile(rb"<title>\s*(.*?)\s*</title>", re.I | re.S)
# Of an answer's head what says why it was given, and what would be right (RFC 9110).
_TELLING = ("Location", "WWW-Authenticate", "Proxy-Authenticate", "Allow", "Retry-After")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
# The first word of a challenge, and none of its parameters `name=value` (RFC 9110 11.6.1)
_SCHEME = re.compile(r"(?:^|,)\s*([\w!#$%&'*+.^`|~-]+)(?=\s+[^\s=,]|\s*(?:,|$))")
NOT_FOLLOWED = "redirects are not followed"
_RIGHT = {
    407: "a proxy on the way wants a user and password: --proxy http://USER:PASSWORD@HOST:PORT",
    429: "it takes no more requests now: wait {wait}, or have its limit raised for this key",
    500: "the fault is the server's own: its log says more",
    502: "a proxy in front of the server cannot reach it: start the server, or correct the URL",
    503: "it is overloaded, or not up yet: wait {wait}",
    504: "a proxy in front of the server gave up waiting: see whether the server is up",
}
# Of gRPC the others tell too little: RESOURCE_EXHAUSTED is a message that is too long as well, and no proxy answers.
_RIGHT_OF_GRPC = {status: _RIGHT[status] for status in (500, 503)}


class Said(NamedTuple):
    """An answer, as far as a sentence needs it."""

    status: int
    headers: Headers  # names in lower case
    body: bytes  # of a gRPC call that failed its words as `grpc_frames.Status.page` has them

    def heads(self, name: str) -> list[str]:
        """Each line of that name that says something, in its order."""
        wanted = name.lower().encode()
        return [value.decode("latin-1") for key, value in self.headers if key == wanted and value]

    def head(self, name: str) -> str:
        return next(iter(self.heads(name)), "")[:SHOWN]


def of(target: Target, exchange: Exchange) -> Said:
    body = b"".join(exchange.pieces)
    if target.dialect.transport == "grpc":
        body = _page_of(body)
    return Said(exchange.status, exchange.headers, body)


def _page_of(frames: bytes) -> bytes:
    """How a gRPC call ended, as a page; what holds no status, such as the page of a probe, as it is."""
    try:
        status = read_frames(frames)[1]
    except ValueError:
        return frames
    return frames if status is None else orjson.dumps(status.page)


def number(target: Target, said: Said) -> str:
    """`HTTP 429`; of gRPC its own name, else those that share the number."""
    if target.dialect.transport != "grpc":
        return f"HTTP {said.status}"
    name = json_of(said.body).get("code")
    alike = [one for one, http in GRPC_STATUS.values() if http == said.status]
    return name if isinstance(name, str) else " or ".join(alike) or "another status"


def schemes(said: Said) -> list[str]:
    """The ways to say who asks that an answer offers, in one line or in several: `Basic`, `Bearer`."""
    lines = (_QUOTED.sub('""', line) for line in said.heads("WWW-Authenticate"))
    return list(dict.fromkeys(scheme for line in lines for scheme in _SCHEME.findall(line)))


def words(target: Target, said: Said, but: str = "") -> str:
    """`HTTP 429 (Retry-After: 7; it says: slow down)`, without what stands in `but`, which was said before."""
    shown = number(target, said)
    facts = told(said, f"{but} {shown}")
    return shown + (f" ({facts})" if facts else "")


def listed(target: Target, said: Said) -> str:
    """`HTTP 429, Retry-After: 7; it says: slow down`."""
    shown = number(target, said)
    return ", ".join(filter(None, [shown, told(said, shown)]))


def told(said: Said, but: str = "") -> str:
    """What an answer that is no success says of itself; "" where that is nothing beyond `but`."""
    if said.status // 100 == 2:
        return ""
    lines = ((name, ", ".join(said.heads(name))[:SHOWN]) for name in _TELLING)
    heads = [f"{name}: {value}" for name, value in lines if value]
    return "; ".join(filter(None, [*heads, _text_of(said.body, but)]))


def _text_of(body: bytes, but: str) -> str:
    """Of an error's body, in each of the shapes that servers send; of a page its title."""
    if is_web_page(body):
        title = _TITLE.search(body)
        return "a web page (HTML)" + (f" {title[1].decode(errors='replace')[:SHOWN]!r}" if title else "")
    page = json_of(body)
    text = (error_in(page)[0] or in_words(page.get("message")) or body.decode(errors="replace").strip())[:SHOWN]
    return f"it says: {text}" if text and text not in but else ""


def right(target: Target, said: Said, address: str, path: str) -> str:
    """What would be right, of an answer by its status alone; "" where that tells nothing.

    `path`: what the protocol has added to the target's URL to make `address`.
    """
    if 300 <= said.status < 400:
        return _moved(said, address, path)
    rows = _RIGHT_OF_GRPC if target.dialect.transport == "grpc" else _RIGHT
    return rows.get(said.status, "").format(wait=_wait(said.head("Retry-After")))


def _wait(retry_after: str) -> str:
    """RFC 9110 10.2.3: seconds, or a date."""
    if not retry_after:
        return "a while"
    return f"{retry_after} s" if retry_after.isdigit() else f"until {retry_after}"


def _moved(said: Said, address: str, path: str) -> str:
    try:
        to = urljoin(address, said.head("Location"))
        scheme = urlsplit(to).scheme
    except ValueError:  # half an IPv6 address
        return NOT_FOLLOWED
    # A page to log in at has the path in its query, and is no URL of a target.
    if to == address or not to.endswith(path) or scheme not in ("http", "https") or re.search("[?#@]", to):
        return NOT_FOLLOWED
    return f"{NOT_FOLLOWED}: give {to.removesuffix(path)} as the URL"
