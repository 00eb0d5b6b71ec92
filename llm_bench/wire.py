"""A target as seen from one event loop: requests in, Exchanges out, each on a connection of its own.

What the connections stamp is theirs to say (`connection`); here is what is sent, where to, and when it is sent again.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from llm_bench import clock
from llm_bench.clock import now_ns
from llm_bench.connection import NEVER_NS, Connection, Pool
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import CONNECT_ERROR, CONNECT_TIMEOUT, CUT, TRUNCATED, Exchange, Timeouts
from llm_bench.framing import SSE
from llm_bench.limits import client_limit
from llm_bench.proxy import Proxy, tunnel

run = clock.run
_PORTS = {"http": 80, "https": 443}
_ROUNDED_S = 0.001  # by so much uvloop's timers, which are of whole milliseconds, may ring early


def request_head(url: str, path: str, headers: Sequence[tuple[str, str]], proxy: Proxy | None = None) -> bytes:
    """The head's start, up to and without X-Request-Id, Content-Length and the empty line: a plan holds those.

    A `proxy` is told the whole URL; under https it sees nothing of this, and the head is the target's own. Keys stand
    here and never in a plan file. Raises BenchError for a header that would break the head's lines.
    """
    target = _split(url)
    host = target.netloc.rpartition("@")[2]
    lines = [
        f"POST {f'http://{host}' if proxy and target.scheme == 'http' else ''}{target.path.rstrip('/') + path or '/'}"
        f"{'?' + target.query if target.query else ''} HTTP/1.1",
        f"Host: {host}",
    ]
    own = {"user-agent": "llm-bench", "content-type": "application/json", "accept": "*/*"}
    lines += [f"{name}: {value}" for name, value in own.items() if name not in {n.lower() for n, _ in headers}]
    if proxy and proxy.authorization and target.scheme == "http":
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    for name, value in headers:
        if any(c in "\r\n\0" for c in name + value) or not name.strip() or ":" in name:
            raise BenchError(f"header {name!r}: expected a name without colon and a value of one line")
        lines.append(f"{name}: {value}")
    return "".join(f"{line}\r\n" for line in lines).encode()


def _split(url: str) -> SplitResult:
    try:
        target = urlsplit(url)
        sound = target.scheme in _PORTS and bool(target.hostname) and target.port != 0
    except ValueError:  # a port that is no number
        sound = False
    if not sound:
        raise BenchError(f"{url!r} is not the address of a server; expected http://HOST:PORT/v1")
    return target


class Wire:
    """`send` gives one Exchange. As many connections as requests in flight.

    `is_token` tells whether an event's data bears a token; None: answers are not streamed. `framing`, a row of
    FRAMINGS, says how events follow each other. `cafile` replaces the system's certificates, `insecure` believes
    any. Without `reuse` each request has a connection of its own, and says so to the server. Through a `proxy`, https
    goes in a tunnel, http as requests to the proxy. The host's name, or the proxy's, is resolved once, here. Raises
    BenchError for a bad URL or header, TargetError for a name that cannot be resolved.
    """

    def __init__(
        self,
        url: str,
        path: str,
        headers: Sequence[tuple[str, str]],
        timeouts: Timeouts,
        is_token: Callable[[bytes], bool] | None,
        *,
        cafile: str | None = None,
        insecure: bool = False,
        reuse: bool = True,
        proxy: Proxy | None = None,
        framing: str = SSE,
    ) -> None:
        target = _split(url)
        self.pool = Pool(timeouts, is_token, reuse, framing)
        self._head = request_head(url, path, headers if reuse else [*headers, ("Connection", "close")], proxy)
        self._name, port = target.hostname or "", target.port or _PORTS[target.scheme]
        self._tls: ssl.SSLContext | None = None
        if target.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=cafile)
            except OSError as e:
                raise BenchError(f"{cafile}: not a file of certificates: {e}") from None
            if insecure:
                self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._proxy = proxy
        self._behind = f"[{self._name}]:{port}" if ":" in self._name else f"{self._name}:{port}"
        if proxy is None:
            self._addresses = _addresses(url, self._name, port)
        else:
            self._addresses = _addresses(f"the proxy {proxy.shown}", proxy.host, proxy.port)

    @property
    def idle(self) -> list[Connection]:
        """The connections that rest."""
        return self.pool.idle

    @property
    def stamps(self) -> str:
        """Who stamps what arrives: the kernel, or the clock when it is read; of 100 reads one may differ."""
        of = self.pool.arrivals
        return "kernel" if of is not None and 100 * of.by_clock <= of.reads else "clock"

    async def send(self, payload: bytes, cancel_after_s: float | None = None) -> Exchange:
        """POST `payload`, the rest of the head and the body, and wait for the end. What fails is in the Exchange.

        A cancelled task gets its Exchange too: CUT, the connection closed. `cancel_after_s` runs from `sent_ns`.
        """
        exchange = Exchange()
        connection = self.pool.take()
        reused = connection is not None
        try:
            while True:
                if connection is None:
                    connection = await self._connect(exchange)
                if connection is None:
                    return exchange
                await connection.ask(self._head + payload, exchange, cancel_after_s)
                if not (reused and exchange.ended == TRUNCATED and connection.closed_unread(exchange)):
                    return exchange
                # Once more on a new one. Sent is when it was first sent, so that no latency is too short.
                sent_ns = exchange.sent_ns or connection.begun_ns
                exchange = Exchange(
                    sent_ns,
                    bytes_out=exchange.bytes_out,
                    reconnects=exchange.reconnects + 1,
                    connect_ns=exchange.connect_ns,
                )
                connection, reused = None, False
        except asyncio.CancelledError:
            if exchange.ended:  # in this very turn of the loop; its connection may be another request's by now
                return exchange
            if connection is None:
                _give_up(exchange, CUT, "not connected yet when the run ended")
            else:
                connection.end(CUT, "closed by the client: the run ended")
            return exchange

    def close(self) -> None:
        """Close what is idle, and cut what is in flight. The loop's next turn finishes it."""
        self.pool.close()

    async def _connect(self, exchange: Exchange) -> Connection | None:
        """A new connection to the address that answered last; None when none does: `exchange` says why.

        Raises ClientLimit when it is this machine that has none to give.
        """
        pool = self.pool
        if pool.lost:
            pool.lost -= 1
            exchange.reconnects += 1
        limit_s, begun_ns = pool.timeouts.connect_s, now_ns()
        scope = asyncio.timeout(None if limit_s is None else limit_s + _ROUNDED_S)
        error: OSError | None = None
        try:
            async with scope:
                for i, address in enumerate(self._addresses):
                    asked_ns = now_ns()
                    try:
                        connection = await self._open(address, limit_s)
                    except OSError as e:
                        limit = client_limit(e, address[0], pool.fastest_connect_ns < NEVER_NS)
                        if limit is not None:
                            raise limit from None
                        error = e
                        continue
                    pool.fastest_connect_ns = min(pool.fastest_connect_ns, now_ns() - asked_ns)
                    if i:  # a name with several addresses, of which the server listens on some
                        self._addresses.insert(0, self._addresses.pop(i))
                    return connection
        except TimeoutError:
            assert scope.expired()
            by = f" through the proxy {self._proxy.shown}" if self._proxy else ""
            _give_up(exchange, CONNECT_TIMEOUT, f"not connected to {self._name}{by} within {limit_s:g} s")
            return None
        finally:
            if not exchange.sent_ns:  # a reopening comes after it: no part of what passed before the request left
                exchange.connect_ns += now_ns() - begun_ns
        _give_up(exchange, CONNECT_ERROR, f"{type(error).__name__}: {error}")
        return None

    async def _open(self, address: tuple[str, int], limit_s: float | None) -> Connection:
        """A connection to the target by way of one address, its own or the proxy's. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._tls is None:
            sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                _, connection = await loop.create_connection(lambda: Connection(self.pool), sock=sock)
            except BaseException:
                with suppress(OSError):  # the loop may have closed it already
                    sock.close()
                raise
            try:
                connection.read_stamped(sock)
            except BaseException:
                connection.transport.abort()
                raise
            return connection
        to: dict[str, Any] = {"host": address[0], "port": address[1]}
        if self._proxy is not None:
            to = {"sock": await tunnel(address, self._proxy, self._behind)}
        # The loop's own limit on handshakes, 60 s, would be a hidden one.
        to |= {"ssl": self._tls, "server_hostname": self._name, "ssl_handshake_timeout": limit_s or 86400.0}
        _, connection = await loop.create_connection(lambda: Connection(self.pool), **to)
        return connection


def _addresses(whose: str, host: str, port: int) -> list[tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as e:
        raise TargetError(f"{whose}: the name {host!r} cannot be resolved: {e.strerror}") from None
    return [(str(a[4][0]), port) for a in found]


def _give_up(exchange: Exchange, ended: str, error: str) -> None:
    exchange.ended, exchange.error, exchange.end_ns = ended, error, now_ns()
