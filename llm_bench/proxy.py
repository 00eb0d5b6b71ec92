"""HTTP proxies: which one a URL is asked through, and the way through it. None is used unless the user says so."""

import asyncio
import base64
import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from llm_bench.errors import BenchError
from llm_bench.http1 import ProtocolError, Response

_RIGHT = "http://HOST:PORT"
_OTHER_KINDS = ("https", "socks", "socks4", "socks4a", "socks5", "socks5h")
_HEAD_BYTES = 1 << 16  # of an answer to CONNECT: what is longer is no answer


class Proxy(NamedTuple):
    """An HTTP proxy. Its user and password are in `authorization` alone."""

    host: str
    port: int
    authorization: str  # value of Proxy-Authorization (RFC 7617), "" for none: never stored, never printed
    variable: str = ""  # the environment variable that named it

    @property
    def shown(self) -> str:
        """http://host:port."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def password(self) -> str:
        return base64.b64decode(self.authorization.partition(" ")[2]).decode().partition(":")[2]


def read(url: str, who: str, variable: str = "") -> Proxy:
    """`http://[USER:PASSWORD@]HOST[:PORT]` -> Proxy; the default port is 80. In a `variable` the scheme may be missing.

    Raises BenchError that begins with `who`; the URL itself is not repeated, since it may hold a password.
    """
    if variable and "://" not in url:
        url = f"http://{url}"
    scheme = url.partition("://")[0].lower()
    if scheme in _OTHER_KINDS:
        raise BenchError(f"{who} is a proxy of {scheme}://, which is not supported; expected an HTTP proxy, {_RIGHT}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # a port that is no number, half an IPv6 address
        host, port = "", None
    sound = scheme == "http" and host.isascii() and host.isprintable() and " " not in host and port != 0
    if not sound or not host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise BenchError(f"{who} is not the URL of a proxy; expected {_RIGHT}")
    user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    said = f"Basic {base64.b64encode(user.encode()).decode()}" if user != ":" else ""
    return Proxy(host, 80 if port is None else port, said, variable)


def variable(url: str) -> str:
    """The environment's variable that names a proxy for this URL, "" for none. Hosts of NO_PROXY have none."""
    parts = urlsplit(url)
    proxies = getproxies_environment()
    name = next((scheme for scheme in (parts.scheme, "all") if proxies.get(scheme)), "")
    return f"{name.upper()}_PROXY" if name and not proxy_bypass(parts.netloc) else ""


def of_environment(url: str) -> Proxy | None:
    """The proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names for this URL; None: NO_PROXY, or none is named.

    Variables count in small letters too. Raises BenchError for a value that names no HTTP proxy.
    """
    name = variable(url)
    if not name:
        return None
    return read(getproxies_environment()[name.lower().removesuffix("_proxy")], f"what {name} holds", name)


def is_local(url: str) -> bool:
    """Does this URL name this very machine, which no proxy elsewhere could mean?"""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


async def tunnel(address: tuple[str, int], proxy: Proxy, to: str) -> socket.socket:
    """A socket to `to` (HOST:PORT) through `proxy`, which listens at `address` (RFC 9110 9.3.6).

    Raises OSError where the proxy is not reached or refuses, then with its status.
    """
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        authorization = f"Proxy-Authorization: {proxy.authorization}\r\n" if proxy.authorization else ""
        await loop.sock_sendall(sock, f"CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{authorization}\r\n".encode())
        status = await _status(loop, sock, proxy)
        if status // 100 != 2:
            wants = ": it wants a user and password, http://USER:PASSWORD@HOST:PORT" if status == 407 else ""
            raise ConnectionError(f"the proxy {proxy.shown} refused CONNECT {to} with HTTP {status}{wants}")
    except BaseException:
        sock.close()
        raise
    return sock


async def _status(loop: asyncio.AbstractEventLoop, sock: socket.socket, proxy: Proxy) -> int:
    """Of the answer to CONNECT. Nothing behind its head is lost: in TLS it is the client that speaks first."""
    response, taken = Response(), 0
    while not response.head_done:
        piece = await loop.sock_recv(sock, _HEAD_BYTES)
        taken += len(piece)
        if not piece or taken > _HEAD_BYTES:
            raise ConnectionError(f"the proxy {proxy.shown} ended without an answer to CONNECT")
        try:
            response.feed(piece)
        except ProtocolError as e:
            if not response.head_done:  # what stands behind the head of a tunnel has no meaning in HTTP
                raise ConnectionError(f"the proxy {proxy.shown} answered CONNECT with what is {e}") from None
    return response.status
