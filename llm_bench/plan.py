"""Requests + a load -> Shots: when each is due and its final bytes, all made before the clock starts.

The bytes lie in a memory-mapped spool file, so that a plan of a million requests costs little memory. They start in the
middle of the HTTP head (request id, length, body): what comes before may hold a key, which belongs in no file.
"""

import hashlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.exchange import Exchange
from llm_bench.request import LONGEST_S, Request

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

    @property
    def kind(self) -> str:
        return "closed" if self.concurrency is not None else "open" if self.rate is not None else "replay"

    @property
    def label(self) -> str:
        if self.concurrency is not None:
            return f"c={self.concurrency}"
        cap = f" cap={self.max_in_flight}" if self.max_in_flight else ""
        return (f"rate={self.rate:g}/s" if self.rate is not None else f"replay x{self.speed:g}") + cap


def arrivals(count: int, rate: float, burstiness: float | None, seed: int) -> np.ndarray:
    """Due times in ns (count,) of an open loop: gamma gaps of mean 1/rate and shape `burstiness`, first at 0.

    Shape 1 is Poisson; the gaps' coefficient of variation is 1/sqrt(shape). None spaces them evenly. The realised rate
    is random as the process is: it is printed, never rescaled away.
    """
    if burstiness is None:
        due = np.arange(count) * (1e9 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (burstiness * rate), max(count - 1, 0))
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
        self.hash = ""  # of all first-turn bytes: two cells with one hash did the same work
        self._spool = spool
        self._offsets = np.zeros(len(requests) + 1, np.int64)
        self._map: mmap.mmap | None = None
        self._next_payload = next_payload

    def __len__(self) -> int:
        return len(self.requests)

    def write(self, payloads: Iterator[bytes]) -> None:
        """Spool the first turns' bytes, in order; later turns get theirs when the turn before has ended."""
        digest = hashlib.blake2b(digest_size=8)
        first = set(self.first)
        with self._spool.open("wb") as file:
            for i in range(len(self.requests)):
                payload = next(payloads) if i in first else b""
                digest.update(payload)
                file.write(payload)
                self._offsets[i + 1] = self._offsets[i] + len(payload)
        self.hash = digest.hexdigest()
        if self._offsets[-1]:
            with self._spool.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def payload(self, index: int, previous: Exchange | None) -> bytes:
        if previous is not None:
            return self._next_payload(index, previous)
        assert self._map is not None, "payload before write"
        return self._map[self._offsets[index] : self._offsets[index + 1]]

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


def fit_context(requests: Sequence[Request], limit: int | None, policy: str) -> tuple[list[Request], str]:
    """Requests that fit a context of `limit` tokens, and what was done to the others in words ("" when nothing).

    policy: refuse | skip (with the whole conversation) | clip (the prompt is shortened, never the answer).
    Raises BenchError under `refuse`, and under `clip` where the answer alone is over the limit.
    """
    if limit is None:
        return list(requests), ""
    over = {i for i, r in enumerate(requests) if r.tokens_in + (r.tokens_out or 0) > limit}
    if not over:
        return list(requests), ""
    worst = max(over, key=lambda i: requests[i].tokens_in + (requests[i].tokens_out or 0))
    found = (
        f"{len(over)} of {len(requests)} requests ({len(over) / len(requests):.1%}) are over the target's context of "
        f"{limit} tokens (the longest, line {requests[worst].line}: {requests[worst].tokens_in} in + "
        f"{requests[worst].tokens_out or 0} out)"
    )
    if policy == "refuse":
        raise BenchError(f"{found}; --too-long skip or --too-long clip says what to do with them")
    if policy == "skip":
        gone = {requests[i].session for i in over} - {""}
        kept = [r for i, r in enumerate(requests) if i not in over and r.session not in gone]
        if not kept:
            raise BenchError(f"{found}; skipping them leaves no request")
        return kept, f"{found}: skipped, with the rest of their conversations: {len(requests) - len(kept)} requests"
    clipped = list(requests)
    for i in over:
        r = requests[i]
        room = limit - (r.tokens_out or 0)
        if room < 1 or r.prompt is not None or r.messages is not None or r.prompt_token_ids is not None or r.turn:
            why = "its answer alone is over it" if room < 1 else "its text is given or it is a session's later turn"
            raise BenchError(f"{found}; line {r.line} cannot be clipped: {why}; use --too-long skip")
        blocks = -(-room // r.block_size) if r.block_size else 0
        clipped[i] = replace(r, tokens_in=room, hash_ids=r.hash_ids[:blocks])
    return clipped, f"{found}: their prompts were clipped"


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
