"""Requests + a load -> Shots: when each is due and its final bytes, all made before the clock starts.

The bytes lie in a memory-mapped spool file, so that a plan of a million requests costs little memory. They start in the
middle of the HTTP head (request id, length, body): what comes before may hold a key, which belongs in no file.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llm_bench import prefixes
from llm_bench.errors import BenchError
from llm_bench.exchange import Exchange
from llm_bench.request import LONGEST_S, Request
from llm_bench.sheet import says_its_own

ALONE_MARGIN = 5.0  # short requests, and later ones, are faster than the probe's first
LEAST_ALONE_S = 0.0003  # no server of the field answers faster, and no client of ours asks faster
MOST_PLANNED = 5_000_000  # requests of a loop: each has its place in memory and on disk
NEVER = -1  # in due_ns and think_ns: the driver decides, when a slot or the turn before is done


@dataclass(frozen=True)
class Load:
    """One load of a sweep. Exactly one of concurrency, rate, speed is given."""

    concurrency: int | None = None  # closed loop: this many slots
    rate: float | None = None  # open loop: requests per second
    burstiness: float | None = 1.0  # gamma shape of the arrivals: 1 Poisson, 0.25 gaps with CV 2; None: evenly spaced
    speed: float | None = None  # replay: the trace's own times, this many times as fast
    max_in_flight: int | None = None  # open loop's only cap: late ones queue, due-time latency shows it
    class_alone: str = ""  # of a mixed trace only this class's requests, at the times that they have in the mix

    @property
    def kind(self) -> str:
        return "closed" if self.concurrency is not None else "open" if self.rate is not None else "replay"

    @property
    def label(self) -> str:
        alone = f" [{self.class_alone} alone]" if self.class_alone else ""
        if self.concurrency is not None:
            return f"c={self.concurrency}{alone}"
        cap = f" cap={self.max_in_flight}" if self.max_in_flight else ""
        return (f"rate={self.rate:g}/s" if self.rate is not None else f"replay x{self.speed:g}") + cap + alone


def arrivals(count: int, rate: float, burstiness: float | None, seed: int) -> np.ndarray:
    """Due times in ns (count,) of an open loop: gamma gaps of mean 1/rate and shape `burstiness`, first at 0.

    Shape 1 is Poisson; the gaps' coefficient of variation is 1/sqrt(shape). None spaces them evenly. Their mean is made
    exactly 1/rate: as drawn, 200 Poisson arrivals are off the rate that was asked for by 7% (standard deviation), and
    so would be every capacity read from them. Where they fall stays random.
    """
    if burstiness is None:
        due = np.arange(count) * (1e9 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (burstiness * rate), max(count - 1, 0))
        gaps *= len(gaps) / (rate * max(gaps.sum(), 1e-300)) if len(gaps) else 1.0
        due = np.concatenate([[0.0], np.cumsum(gaps)])[:count] * 1e9
    _check_span(count, float(due.max(initial=0.0)) / 1e9)
    return due.astype(np.int64)


def _check_span(count: int, last_s: float) -> None:
    if not last_s <= LONGEST_S:
        raise BenchError(
            f"the last of {count} requests would be due after {last_s:.3g} s, expected {LONGEST_S:,} s (10 years) at "
            "most; give a higher --rate or --speed, or fewer --requests"
        )


def due_times(requests: Sequence[Request], load: Load, seed: int) -> np.ndarray:
    """Offsets from the cell's start in ns, one a request; NEVER where the driver decides.

    Later turns of a session are NEVER in a closed loop and under a rate, and "not before" their own time in a replay.
    """
    due = np.full(len(requests), NEVER, np.int64)
    if load.rate is not None:
        starts = [i for i, r in enumerate(requests) if r.turn == 0]
        due[starts] = arrivals(len(starts), load.rate, load.burstiness, seed)
    elif load.speed is not None:
        _check_span(len(requests), max((r.at_s or 0.0 for r in requests), default=0.0) / load.speed)
        for i, request in enumerate(requests):
            if request.at_s is not None:
                due[i] = round(request.at_s * 1e9 / load.speed)
            elif request.turn == 0:
                raise BenchError(
                    f"the trace's row at line {request.line} has no time, so it cannot be replayed; "
                    "give --concurrency or --rate"
                )
    return due


def within(requests: Sequence[Request], due_ns: np.ndarray, duration_s: float | None) -> list[int]:
    """The rows of an open loop that are due within its duration, and the later turns of their conversations."""
    if duration_s is None:
        return list(range(len(requests)))
    late = {r.session or i for i, r in enumerate(requests) if r.turn == 0 and due_ns[i] > duration_s * 1e9}
    kept = [i for i, r in enumerate(requests) if (r.session or i) not in late]
    if not kept:
        raise BenchError(f"--duration {duration_s:g}: no request is due in it")
    return kept


def of_class(requests: Sequence[Request], rows: Sequence[int], name: str) -> list[int]:
    """Those of `rows` whose requests are of a class. Raises BenchError where there is none."""
    kept = [i for i in rows if requests[i].request_class == name]
    if not kept:
        raise BenchError(f"--alone-too: none of the {len(rows)} requests of a cell is of the class {name!r}")
    return kept


class Plan:
    """The shots of one cell, in the order of the trace. `driver` reads it, and nothing else of the bench."""

    def __init__(
        self,
        requests: Sequence[Request],
        due_ns: np.ndarray,
        spool: Path,
        next_payload: Callable[[int, Exchange], bytes],
    ) -> None:
        self.requests = requests
        self.due_ns: list[int] = due_ns.tolist()
        self.first, self.next_turn = _conversations(requests)
        self.think_ns = [NEVER if r.think_s is None else round(r.think_s * 1e9) for r in requests]
        self.hash = ""  # of all bodies made before the clock starts: two cells with one hash did the same work
        self._spool = spool
        self._offsets = np.zeros(len(requests) + 1, np.int64)
        self._map: mmap.mmap | None = None
        self._next_payload = next_payload

    def __len__(self) -> int:
        return len(self.requests)

    def write(self, payloads: Iterable[bytes]) -> None:
        """Spool the bytes of each request, in order; b"" is one that is made when the turn before it has ended."""
        digest = hashlib.blake2b(digest_size=8)
        with self._spool.open("wb") as file:
            for i, payload in enumerate(payloads):
                digest.update(payload.rpartition(b"\r\n\r\n")[2])  # the head has an id of this run's own
                file.write(payload)
                self._offsets[i + 1] = self._offsets[i] + len(payload)
        self.hash = digest.hexdigest()
        if self._offsets[-1]:
            with self._spool.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def payload(self, index: int, previous: Exchange | None) -> bytes:
        begin, end = self._offsets[index : index + 2]
        if begin == end:
            assert previous is not None, "bytes that need an answer, and there is none"
            return self._next_payload(index, previous)
        assert self._map is not None, "payload before write"
        return self._map[begin:end]

    def cancel_s(self, index: int) -> float | None:
        return self.requests[index].cancel_after_s

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
        self._spool.unlink(missing_ok=True)


def _conversations(requests: Sequence[Request]) -> tuple[list[int], list[int]]:
    """First turns in order, and for each request the index of the turn that follows it (NEVER: none)."""
    first: list[int] = []
    following = [NEVER] * len(requests)
    last_of: dict[str, int] = {}
    for i, request in enumerate(requests):
        if request.session and request.session in last_of:
            following[last_of[request.session]] = i
        else:
            first.append(i)
        if request.session:
            last_of[request.session] = i
    return first, following


def sharing(requests: Sequence[Request], salts: Sequence[str]) -> dict[str, Any]:
    """What a plan says of prefixes that its prompts have in common, for the header of a run.

    "shares", "sessions": whether there are hash ids, conversations. "shareable", where one of them is so: [[k, the
    share of the first k prompts' tokens that an endless cache can find], ...], k halved from all of them down to one,
    as a cell may end anywhere: a block is found behind the same blocks of a prompt of the same salt, of a later turn
    all but what its user adds. Left out where a request brings its own text, which may share with any other.
    """
    said: dict[str, Any] = {"shares": any(r.hash_ids for r in requests), "sessions": any(r.session for r in requests)}
    if not any(said.values()) or any(map(says_its_own, requests)):
        return said
    in_blocks = prefixes.findable(requests, salts)
    history = (r.tokens_in - r.tokens_new if r.turn else 0 for r in requests)
    found = np.cumsum([max(known) for known in zip(in_blocks, history, strict=True)])
    shares = found / np.maximum(np.cumsum([r.tokens_in for r in requests]), 1)
    parts = sorted({len(requests) >> i for i in range(len(requests).bit_length())})
    return said | {"shareable": [[k, float(shares[k - 1])] for k in parts]}


def repeat(requests: Sequence[Request], count: int) -> tuple[list[Request], list[int]]:
    """`count` requests by going round the trace, and the lap of each: a lap has its own salt and its own sessions.

    A replay's later laps start one mean gap after the last request of the lap before.
    """
    times = [r.at_s for r in requests if r.at_s is not None]
    period = (max(times) * len(times) / max(len(times) - 1, 1)) if times else 0.0
    out: list[Request] = []
    laps: list[int] = []
    while len(out) < count:
        lap = len(out) // len(requests)
        for request in requests[: count - len(out)]:
            if lap and (request.session or request.at_s is not None):
                at_s = None if request.at_s is None else request.at_s + lap * period
                session = f"{request.session}/{lap}" if request.session else ""
                request = replace(request, at_s=at_s, session=session)
            out.append(request)
            laps.append(lap)
    return out, laps


def select(
    requests: Sequence[Request], load: Load, *, count: int | None, duration_s: float | None, loop: bool, alone_s: float
) -> tuple[list[Request], list[int]]:
    """As many requests as the load can use, and each one's lap: the trace once, or round and round with `loop`.

    A closed loop with a duration plans an upper count, from what one request took alone (`alone_s` seconds) in a single
    probe: hence the margin. Running out all the same is a doubt. `count` is a cap in every case.
    """
    if not loop:
        return list(requests), [0] * len(requests)
    wanted = count or 0
    if duration_s is not None:
        span_s = max((r.at_s or 0.0 for r in requests), default=0.0)
        per_s = (
            load.concurrency / max(alone_s / ALONE_MARGIN, LEAST_ALONE_S)
            if load.concurrency is not None
            else load.rate * 1.5
            if load.rate is not None
            else len(requests) * (load.speed or 1.0) / (span_s or 1.0)
        )
        enough = int(per_s * duration_s) + 2 * (load.concurrency or 50)
        wanted = enough if count is None else min(count, enough)
        if wanted > MOST_PLANNED and load.concurrency is None:
            raise BenchError(
                f"{load.label} for {duration_s:g} s would be {wanted:,} requests, expected {MOST_PLANNED:,} at most; "
                "give a shorter --duration, or --requests"
            )
        wanted = min(wanted, MOST_PLANNED)
    if not wanted:
        raise BenchError("--loop-trace needs an end: give --duration or --requests")
    return repeat(requests, wanted)
