"""An HTTP answer that is no success, in words: what it says of itself, and what would be right."""

import re
from typing import NamedTuple
from urllib.parse import urljoin

from llm_bench.exchange import Exchange
from llm_bench.grpc_frames import GRPC_STATUS
from llm_bench.http1 import is_web_page
from llm_bench.protocol import Headers, error_in, in_words, json_of
from llm_bench.target import Target

SHOWN = 160  # characters of what a server says, in a sentence
_TITLE = re.compile(rb"<title>\s*(.*?)\s*</title>", re.I | re.S)
# Of an answer's head what says why it was given, and what would be right (RFC 9110).
_TELLING = ("Location", "WWW-Authenticate", "Proxy-Authenticate", "Allow", "Retry-After")
NOT_FOLLOWED = "redirects are not followed"
_RIGHT = {
    407: "a proxy on the way wants a user and password: --proxy http://USER:PASSWORD@HOST:PORT",
    429: "it takes no more requests now: wait {wait}, or have its limit raised for this key",
    500: "the fault is the server's own: its log says more",
    502: "a proxy before the server does not reach it: start the server, or correct the URL",
    503: "it is overloaded, or not up yet: wait {wait}",
    504: "a proxy before the server waits no longer for its answer: see whether the server is up",
}


class Said(NamedTuple):
    """An answer, as far as a sentence needs it."""

    status: int
    headers: Headers  # names in lower case
    body: bytes

    def head(self, name: str) -> str:
        wanted = name.lower().encode()
        return next((value.decode("latin-1")[:SHOWN] for key, value in self.headers if key == wanted), "")


def of(exchange: Exchange) -> Said:
    return Said(exchange.status, exchange.headers, b"".join(exchange.pieces))


def number(target: Target, status: int) -> str:
    """`HTTP 429`; of gRPC its own name: there the number is only the one of the same meaning."""
    if target.dialect.transport == "grpc":
        return next((name for name, http in GRPC_STATUS.values() if http == status), "another status")
    return f"HTTP {status}"


def words(target: Target, said: Said, but: str = "") -> str:
    """`HTTP 429 (Retry-After: 7; it says: slow down)`, without what stands in `but`, which was said before."""
    facts = told(said, but)
    return number(target, said.status) + (f" ({facts})" if facts else "")


def told(said: Said, but: str = "") -> str:
    """What an answer that is no success says of itself; "" where that is nothing beyond `but`."""
    if said.status // 100 == 2:
        return ""
    heads = [f"{name}: {said.head(name)}" for name in _TELLING if said.head(name)]
    return "; ".join(filter(None, [*heads, _text_of(said.body, but)]))


def _text_of(body: bytes, but: str) -> str:
    """Of an error's body, in each of the shapes that servers send; of a page its title."""
    if is_web_page(body):
        title = _TITLE.search(body)
        return "a web page (HTML)" + (f" {title[1].decode(errors='replace')[:SHOWN]!r}" if title else "")
    page = json_of(body)
    text = (error_in(page)[0] or in_words(page.get("message")) or body.decode(errors="replace").strip())[:SHOWN]
    return f"it says: {text}" if text and text not in but else ""


def right(said: Said, address: str, path: str) -> str:
    """What would be right, of an answer by its status alone; "" where that tells nothing.

    `path`: what the protocol has added to the target's URL to make `address`.
    """
    if 300 <= said.status < 400:
        return _moved(said, address, path)
    return _RIGHT.get(said.status, "").format(wait=_wait(said.head("Retry-After")))


def _wait(retry_after: str) -> str:
    """RFC 9110 10.2.3: seconds, or a date."""
    if not retry_after:
        return "a while"
    return f"{retry_after} s" if retry_after.isdigit() else f"until {retry_after}"


def _moved(said: Said, address: str, path: str) -> str:
    try:
        to = urljoin(address, said.head("Location"))
    except ValueError:  # half an IPv6 address
        to = ""
    return (
        f"{NOT_FOLLOWED}: give {to.removesuffix(path)} as the URL"
        if to != address and to.endswith(path)
        else NOT_FOLLOWED
    )
