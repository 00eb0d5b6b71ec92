"""What has come on the plain sockets of one event loop, each read with the time at which the kernel received it.

A loop reads one socket after another, so what came together is stamped one by one, and later still where the loop was
held up. Linux keeps the time at which a segment came and hands it out with its bytes (SO_TIMESTAMPNS, socket(7)): a
stamp then says when the server was heard and not when the client had time to listen. Elsewhere, and under TLS, whose
transport reads for itself, there is no such stamp and `data_received` takes the clock's.

A busy loop leaves its sockets alone for a moment between two rounds: half of what an event costs is waking up for it.
What came on one socket in that moment is one read with one stamp, its last segment's; an end by close has the time of
its reading. The request after an answer's end leaves half the moment later on average, as lateness that is recorded
like any other: so the moment is a thousandth of the mean answer at most, more of one that is shorter than most.
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
LONGEST_REST_NS = 1_000_000  # half of it saves half as much
SHORTEST_REST_NS = 200_000  # below this a timer costs more than the wake-ups that it saves
RESTS_AN_ANSWER = 1000
WORTH_A_REST = 4  # reads that are to be expected in it; below them the timer costs more
COUNTED = 64  # reads, after which it is looked at how fast they come
READ_BYTES = 65_536  # at most at once: a whole answer of some hundred tokens
MUCH_BYTES = 16_384  # a read of so much: its sender may be waiting for room
MOST_READS = 64  # of a socket that is read out

_SO_TIMESTAMPNS = 35  # <asm-generic/socket.h>; socket.py has no name for it
_timespec = struct.Struct("qq").unpack_from
_ROOM = socket.CMSG_SPACE(16) if AVAILABLE else 0  # for one timespec
_TCP_INFO = getattr(socket, "TCP_INFO", 0)
_OOO_AT = 224  # of tcpi_rcv_ooopack in struct tcp_info, <linux/tcp.h>: segments that came before one sent earlier
_SURE_NS = 2_000_000  # a stamp no older is believed without a look at the connection; too early by so much at most


class Source:
    """One connected TCP socket, who hears of what comes on it, and how far its stamps can be believed."""

    __slots__ = ("_option", "_out_of_order", "fd", "lost", "read_ns", "receive", "received")

    def __init__(
        self, sock: socket.socket, received: Callable[[bytes, int], None], lost: Callable[[Exception | None], None]
    ) -> None:
        """`received(data, came_ns)` at each read, `lost(why)` once: None at the peer's end, or what either raised.

        Raises OSError where the kernel stamps nothing.
        """
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.fd = sock.fileno()
        self.receive, self._option = sock.recvmsg, sock.getsockopt
        self.received, self.lost = received, lost
        self.read_ns = 0  # when last: what had come by then was taken
        self._out_of_order = 0

    def read_out(self) -> None:
        """Read what lies there still, stamped now: of a connection that is lost."""
        with suppress(OSError):
            for _ in range(MOST_READS):
                if not (data := self.receive(READ_BYTES)[0]):
                    return
                self.read_ns = now_ns()
                self.received(data, self.read_ns)

    def in_order(self) -> bool:
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
        self.answer_ns = 0  # how long an answer takes: a mean over the last few; 0: none has ended yet
        self.reads = self.by_clock = 0  # all, and those whose stamp is the clock's after all
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._sources: dict[int, Source] = {}
        self._wall = Wall()
        self._timer = Timer()
        self._looked_ns = 0
        self._begun_ns = self._counted_ns = now_ns()
        self._count = 0  # of reads since then
        self._found, self._much = 0, False  # of the last reading: how many could be read, was one of them large
        self._busy = self._resting = False
        self._loop.add_reader(self._epoll.fileno(), self.look)

    def add(self, source: Source) -> None:
        self._epoll.register(source.fd, select.EPOLLIN)
        self._sources[source.fd] = source

    def drop(self, source: Source) -> None:
        """Before its socket is closed: the number may soon be another's."""
        if self._sources.get(source.fd) is not source:
            return
        del self._sources[source.fd]
        if not self._epoll.closed:
            with suppress(OSError):  # its socket is closed already: the kernel has forgotten it
                self._epoll.unregister(source.fd)

    @property
    def closed(self) -> bool:
        return self._epoll.closed

    def close(self) -> None:
        if self._epoll.closed:
            return
        self._timer.close()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def ended(self, took_ns: int) -> None:
        """An answer has, which took so long."""
        self.answer_ns += (took_ns - self.answer_ns) >> 4 if self.answer_ns else took_ns

    def look(self) -> None:
        """The loop's: read what has come, and rest where many reads come."""
        try:
            self.read()
        finally:
            if not self._epoll.closed:
                self._rest()

    def read(self) -> None:
        """Read what has come, once a socket."""
        before_ns, begun_ns = self._looked_ns, now_ns()
        ahead_ns = 0 if self._wall.stepped() else self._wall.ahead_ns
        sources = self._sources
        ready = self._epoll.poll(0, len(sources) or 1)  # all there are: who is not among them has nothing to read
        self._looked_ns = begun_ns
        self.reads += len(ready)
        self._found, self._much = len(ready), False
        for fd, _ in ready:
            source, why = sources[fd], None
            try:
                data, extra, _, _ = source.receive(READ_BYTES, _ROOM)
                now = came_ns = now_ns()
                if extra and ahead_ns:
                    s, ns = _timespec(extra[0][2])
                    came_ns = s * 1_000_000_000 + ns - ahead_ns
                    # Older than a look or a read at which it was not there, or newer than now: no time of arrival.
                    if not max(before_ns, source.read_ns) <= came_ns <= now or (
                        now - came_ns > _SURE_NS and not source.in_order()
                    ):
                        came_ns = now
                source.read_ns = now
                if data:
                    self.by_clock += came_ns == now
                    self._much = self._much or len(data) >= MUCH_BYTES
                    source.received(data, came_ns)
                    continue
            except BlockingIOError:
                continue
            except Exception as e:  # noqa: BLE001 - the network's, or a mistake of ours: `lost` tells them apart
                why = e
            source.lost(why)

    def _rest(self) -> None:
        """Leave the sockets alone for a moment, where many reads come; after a look in vain, until something does."""
        begun_ns, found = self._looked_ns, self._found
        rest_ns = min(LONGEST_REST_NS, (self.answer_ns or begun_ns - self._begun_ns) // RESTS_AN_ANSWER)
        self._count += found
        if self._count >= COUNTED:
            expected = rest_ns * self._count / max(begun_ns - self._counted_ns, 1)
            self._busy = rest_ns >= SHORTEST_REST_NS and expected >= WORTH_A_REST
            self._count, self._counted_ns = 0, begun_ns
        if self._busy and found and not self._much:
            if not self._resting:
                self._resting = True
                self._loop.remove_reader(self._epoll.fileno())
            self._timer.call_at(begun_ns + rest_ns, self.look)
        elif self._resting:
            self._resting = False
            self._loop.add_reader(self._epoll.fileno(), self.look)
