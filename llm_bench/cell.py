"""One target at one load, as data: what each request says, how its answer is read, and the Record it becomes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llm_bench import answer, plan, probe, prompts, targets
from llm_bench.answer import Answer
from llm_bench.dialects import DIALECTS
from llm_bench.driver import Flight
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.plan import Load
from llm_bench.probe import Probe
from llm_bench.records import OUTCOMES, Record
from llm_bench.request import Request
from llm_bench.retry import Tried
from llm_bench.targets import Target

RAW_LIMIT = 65536  # bytes of a failed response that are kept
RAW_TOTAL = 1_000_000  # of all failed responses of a cell: a hundred of them explain as much as a million


@dataclass(frozen=True)
class Options:
    """How cells are measured, as the command line asked. Everything that can change a number is printed and stored."""

    out: Path
    requests: int | None = None
    duration_s: float | None = None
    warmup: float | None = None  # requests (closed loop) or seconds (open); None: the default of METRICS
    drain_s: float | None = None  # None: the total time-out
    loop_trace: bool = False
    seed: int = 0
    retries: int = 0
    too_long: str = "refuse"
    reuse_prompts: bool = False
    stream: bool = True
    keep_bytes: int = 0
    connect_per_request: bool = False
    spin_us: float = 0.0  # open loop: the last so many microseconds before a due time are waited for on the clock
    ready_s: float = 30.0
    timeouts: Timeouts = field(default_factory=Timeouts)

    def public(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}


def cell_name(number: int, target: Target, load: Load) -> str:
    """Of a cell and its files."""
    slug = "".join(c if c.isalnum() or c in "=.-" else "-" for c in f"{target.name}-{load.label}")
    return f"{number:03d}-{slug}"


class Cell:
    """The state of one cell. `number` is its place in the run, `run_id` random: no two cells have equal prompts.

    `exact`: the target's tokenizer, where one is declared. `attempt`: earlier tries at this cell that were set aside.
    """

    def __init__(
        self,
        options: Options,
        run_id: str,
        number: int,
        target: Target,
        found: Probe,
        requests: list[Request],
        load: Load,
        exact: prompts.Exact | None = None,
        attempt: int = 0,
    ) -> None:
        self.options, self.target, self.found, self.load = options, target, found, load
        self.name = cell_name(number, target, load)
        self.dialect = DIALECTS[target.api]
        outs = [r.tokens_out for r in requests if r.tokens_out] or [1]
        # What a mean request would take alone, by the one short probe: good enough to spread a first wave.
        self.alone_s = found.alone_ms / 1e3 * float(np.mean(outs)) / found.alone_tokens
        rows, laps = plan.select(
            requests,
            load,
            count=options.requests,
            duration_s=options.duration_s,
            loop=options.loop_trace,
            alone_s=self.alone_s,
        )
        due_ns = plan.due_times(rows, load, options.seed)
        kept = plan.within(rows, due_ns, options.duration_s)
        self.requests, self.due_ns = [rows[i] for i in kept], due_ns[kept]
        # No cell meets the cache of the one before: the salt decides the first words of every prompt.
        salt = f"seed {options.seed}" if options.reuse_prompts else f"{run_id} {number} {attempt}"
        self._salts = [f"{salt} lap {laps[i]}" for i in kept]
        self._request_ids = f"{run_id}-{number}-" + (f"{attempt}-" if attempt else "")
        self._sizer = found.sizer
        self._count_tokens: Callable[[str], int] | None = None
        if exact is not None:
            # What the probe cost beyond its own text is the target's template, which a tokenizer cannot know.
            self._sizer = replace(exact.sizer, template=max(0, round(found.base_tokens - exact.sizer.base)))
            self._count_tokens = exact.count
        self._hide = targets.hider(target)
        self._hashes = [0] * len(self.requests)
        self._said: dict[str, Request] = {}  # the filled request of each session's latest turn
        self._kept_bytes = self._kept_failed_bytes = 0
        self.counts = dict.fromkeys(OUTCOMES, 0)
        self.tokens = 0  # of ok requests so far, for the progress line

    def load_facts(self) -> dict[str, Any]:
        facts = {"kind": self.load.kind, "label": self.load.label, **asdict(self.load)}
        return facts | {"warmup": self.options.warmup, "duration_s": self.options.duration_s}

    # ---- what is said

    def first_payloads(self, live: Callable[[str], None]) -> Iterator[bytes]:
        """The bytes of each first turn, in order."""
        for index, request in enumerate(self.requests):
            if index % 500 == 0:
                live(f"{self.name}: writing prompts, {index} of {len(self.requests)}")
            if not request.turn:
                yield self._payload(index, prompts.fill(request, self._salts[index], index, self._sizer))

    def next_payload(self, index: int, previous: Exchange) -> bytes:
        """A turn that holds the server's own last answer; its making is in `lag`, and is why it is not made before."""
        request = self.requests[index]
        before = self._said[request.session]
        said = self._read(before, previous).text
        new = prompts.fill(request, self._salts[index], index, self._sizer)
        if self.target.api == "openai-completions":
            filled = replace(new, prompt=f"{before.prompt or ''}{said}\n{new.prompt or ''}", messages=None)
        else:
            answered = {"role": "assistant", "content": said}
            filled = replace(new, messages=(*_messages(before), answered, *_messages(new)), prompt=None)
        return self._payload(index, filled)

    def _payload(self, index: int, request: Request) -> bytes:
        """The rest of the HTTP head and the body. What stands before it, keys included, is the wire's."""
        if request.session:
            self._said[request.session] = request
        ask = self.found.ask._replace(model=request.model) if request.model else self.found.ask
        body = self.dialect.encode(request, ask)
        self._hashes[index] = prompts.prompt_hash(body)
        head = f"X-Request-Id: {self._request_ids}{index}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    # ---- what became of it

    def _read(self, request: Request, exchange: Exchange) -> Answer:
        asked = probe.asked(request, self.found.ask)
        return answer.read(
            exchange,
            self.dialect,
            streamed=self.options.stream,
            asked_out=asked.out,
            pinned=self.found.lengths_pinned and asked.pinned,
            finish_expected=self.found.finish_reason_seen,
            choices=asked.choices,
            count_tokens=self._count_tokens,
        )

    def record(self, flight: Flight) -> Record:
        """The Record of a request that has ended, or was dropped; counts it."""
        index, request, tried = flight.index, self.requests[flight.index], flight.tried
        asked_out = probe.asked(request, self.found.ask).out
        record = Record(
            index=index,
            request_id=f"{self._request_ids}{index}",
            outcome="dropped",
            due_ns=flight.due_ns,
            ready_ns=flight.ready_ns,
            planned_in=request.tokens_in or -1,
            asked_out=-1 if asked_out is None else asked_out,
            priority=request.priority,
            turn=request.turn,
            session=request.session,
            request_class=request.request_class,
        )
        if tried is not None:
            self._fill(record, request, tried)
        self.counts[record.outcome] += 1
        self.tokens += record.tokens_out if record.outcome == "ok" else 0
        return record

    def _fill(self, record: Record, request: Request, tried: Tried) -> None:
        exchange, first = tried.exchange, tried.first
        got = self._read(request, exchange)
        record.sent_ns, record.connect_ns = exchange.sent_ns, exchange.connect_ns
        record.first_byte_ns, record.end_ns = exchange.first_byte_ns, exchange.end_ns
        record.bytes_in, record.reconnects = exchange.bytes_in, exchange.reconnects
        record.attempts, record.retry_wait_ns = tried.attempts, tried.retry_wait_ns
        if exchange is first:
            record.first_attempt = got.error_kind or got.outcome
        else:
            record.first_attempt = f"http_{first.status}" if first.status else first.ended
        record.prompt_hash = self._hashes[record.index]
        for name in _FROM_ANSWER:
            setattr(record, name, getattr(got, name))
        for name, ms in got.server_ms.items():
            setattr(record, name, ms)
        record.error = self._hide(record.error)
        if got.outcome == "failed":
            record.raw = self._kept(exchange, RAW_TOTAL - self._kept_failed_bytes)
            self._kept_failed_bytes += len(record.raw)
        elif self._kept_bytes < self.options.keep_bytes:
            record.raw = self._kept(exchange, self.options.keep_bytes - self._kept_bytes)
            self._kept_bytes += len(record.raw)

    def _kept(self, exchange: Exchange, room: int) -> bytes:
        """The first bytes of a response without the secrets in it: cut first, half of one would stay."""
        if room <= 0:
            return b""
        return self._hide(b"".join(exchange.pieces).decode("latin-1")).encode("latin-1")[: min(room, RAW_LIMIT)]


_FROM_ANSWER = tuple(name for name in Answer._fields if name in Record.__dataclass_fields__)


def _messages(request: Request) -> tuple[Mapping[str, Any], ...]:
    return request.messages or ({"role": "user", "content": request.prompt or ""},)
