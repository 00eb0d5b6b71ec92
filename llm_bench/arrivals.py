"""What has come on the plain sockets of one event loop, each read with the time at which the kernel received it.

A loop reads one socket after another, so what came together is stamped one by one, and later still where the loop was
held up. Linux keeps the time at which a segment came and hands it out with its bytes (SO_TIMESTAMPNS, socket(7)): a
stamp then says when the server was heard and not when the client had time to listen. Elsewhere, and under TLS, whose
transport reads for itself, there is no such stamp and `data_received` takes the clock's.

Since the stamps do not depend on when the bytes are read, a busy loop leaves its sockets alone for a moment between two
rounds: half of what an event costs is waking up for it. What that delays is the request after an answer's end, as
lateness that is recorded like any other; so the moment is no more than a thousandth of an answer.
"""

import asyncio
import select
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress

from llm_bench.clock import Timer, Wall, now_ns

AVAILABLE = sys.platform == "linux"
LONGEST_PAUSE_NS = 500_000
SHORTEST_PAUSE_NS = 100_000  # below this a timer costs more than the wake-ups that it saves
PAUSES_AN_ANSWER = 1000
READ_BYTES = 65_536

_SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; socket.py has no name for it
_timespec = struct.Struct("qq").unpack_from
_ROOM = socket.CMSG_SPACE(16) if AVAILABLE else 0  # for one timespec
_TCP_INFO = getattr(socket, "TCP_INFO", 0)
_OOO_AT = 224  # of tcpi_rcv_ooopack in struct tcp_info, <linux/tcp.h>: segments that came before one sent earlier
_SURE_NS = 1_000_000  # a stamp no older than this is believed without a look at the connection


class Source:
    """One connected TCP socket, and how far its stamps can be believed."""

    def __init__(self, sock: socket.socket) -> None:
        """Raises OSError where the kernel stamps nothing."""
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.fd = sock.fileno()
        self._receive, self._option = sock.recvmsg, sock.getsockopt
        self._out_of_order = 0

    def read(self, ahead_ns: int, looked_ns: int) -> tuple[bytes, int]:
        """What has come, b"" at its end, and when the last byte of it did. Raises OSError.

        `ahead_ns`: of Wall, 0 after a step. `looked_ns`: a time at which nothing could be read from this socket.
        """
        data, extra, _, _ = self._receive(READ_BYTES, _ROOM)
        now = now_ns()
        if not (extra and ahead_ns):
            return data, now
        s, ns = _timespec(extra[0][2])
        came_ns = s * 1_000_000_000 + ns - ahead_ns
        if now - came_ns < _SURE_NS and looked_ns <= came_ns <= now:
            return data, came_ns
        return data, came_ns if looked_ns <= came_ns <= now and self._in_order() else now

    def _in_order(self) -> bool:
        """Has no segment overtaken another since this was last asked?

        The stamp of a read is that of its last segment. One that overtook another has lain there unreadable until that
        came, of which no stamp is left: then the time of the read is all that is sure.
        """
        before = self._out_of_order
        info = self._option(socket.IPPROTO_TCP, _TCP_INFO, _OOO_AT + 4)
        if len(info) < _OOO_AT + 4:
            return False  # Linux before 5.4 does not count them
        self._out_of_order = int.from_bytes(info[_OOO_AT:], sys.byteorder)
        return self._out_of_order == before


class Arrivals:
    """The plain sockets of one pool. Needs a running loop, and Linux."""

    def __init__(self) -> None:
        self.answer_ns = 0  # how long an answer takes: a mean over the last few
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[int, int], None]] = {}
        self._wall = Wall()
        self._timer = Timer()
        self._looked_ns = 0
        self._pausing = False
        self._loop.add_reader(self._epoll.fileno(), self.look)

    def add(self, fd: int, read: Callable[[int, int], None]) -> None:
        """Call `read(ahead_ns, looked_ns)`, Source.read's, whenever there is something to read from `fd`."""
        self._epoll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def drop(self, fd: int) -> None:
        """Before `fd` is closed: its number may soon be another's."""
        if self._readers.pop(fd, None) is not None and not self._epoll.closed:
            with suppress(OSError):  # closed already: the kernel has forgotten it
                self._epoll.unregister(fd)

    def close(self) -> None:
        if self._epoll.closed:
            return
        self._timer.close()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def ended(self, answer_ns: int) -> None:
        self.answer_ns += (answer_ns - self.answer_ns) >> 4

    def look(self) -> None:
        """Read what has come. The loop calls it."""
        looked_ns, begun_ns = self._looked_ns, now_ns()
        ahead_ns = 0 if self._wall.stepped() else self._wall.ahead_ns
        ready = self._epoll.poll(0, len(self._readers) or 1)  # all there are: who is not among them has nothing to read
        self._looked_ns = begun_ns
        readers = self._readers
        for fd, _ in ready:
            readers[fd](ahead_ns, looked_ns)
        pause_ns = min(LONGEST_PAUSE_NS, self.answer_ns // PAUSES_AN_ANSWER)
        again = bool(ready) and pause_ns >= SHORTEST_PAUSE_NS and not self._epoll.closed
        if again and (self._pausing or begun_ns - looked_ns < pause_ns):
            if not self._pausing:
                self._pausing = True
                self._loop.remove_reader(self._epoll.fileno())
            self._timer.call_at(begun_ns + pause_ns, self.look)
        elif self._pausing and not self._epoll.closed:
            self._pausing = False
            self._loop.add_reader(self._epoll.fileno(), self.look)
