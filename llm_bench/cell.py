"""One target at one load, as data: what each request says, how its answer is read, and the Record it becomes."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llm_bench import answer, arms, plan, prompts, selection, targets
from llm_bench.answer import Answer
from llm_bench.arms import Place, Rounds
from llm_bench.bodies import Asked
from llm_bench.exchange import Exchange, Timeouts
from llm_bench.flights import Flight
from llm_bench.plan import Load
from llm_bench.probe import Probe
from llm_bench.records import OUTCOMES, Record
from llm_bench.request import Request
from llm_bench.retry import Tried
from llm_bench.targets import Target
from llm_bench.transport import TRANSPORTS

HISTORIES = ("live", "recorded")  # what a later turn holds of the answers before it: the server's, or made-up ones
CLASS_IN_NAME = 30  # characters of a class in the name of a file, which has 255 bytes; the number tells cells apart
USAGE_CHECKED = 64  # answers of a cell whose usage is held against the tokenizer: to count one takes milliseconds
RAW_LIMIT = 65536  # bytes of a failed response that are kept
RAW_TOTAL = 1_000_000  # of all failed responses of a cell: a hundred of them explain as much as a million

Messages = tuple[Mapping[str, Any], ...]


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
    too_long: str = "refuse"  # of selection.TOO_LONG
    scale_lengths: str = ""  # a factor, as 1/32, for all lengths of the trace
    history: str = "live"  # of HISTORIES
    token_ids: bool = False  # prompts made up as ids of the declared tokenizer, not as text
    keep_model: bool = False  # a row that names a model asks for it; otherwise each asks for the target's
    reuse_prompts: bool = False
    stream: bool = True
    keep_bytes: int = 0
    connect_per_request: bool = False
    metrics_url: str = ""  # as Target.metrics, for targets that declare none
    scrape_every_s: float = 1.0
    gpu: bool = False  # read this machine's GPUs beside the run
    faults: tuple[str, ...] = ()  # as typed, WHEN:WHAT, done in each cell
    spin_us: float = 0.0  # open loop: the last so many microseconds before a due time are waited for on the clock
    ready_s: float = 30.0
    timeouts: Timeouts = field(default_factory=Timeouts)
    rounds: Rounds = field(default_factory=Rounds)
    slo: str = ""  # as typed, with the deadlines: what a report of the run judges by where it is told nothing else
    deadlines: str = ""

    def public(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}


def cell_name(number: int, target: Target, load: Load, pair: int | None = None) -> str:
    """Of a cell and its files. `pair`: where the target has several cells at the load."""
    label = replace(load, class_alone=load.class_alone[:CLASS_IN_NAME]).label
    slug = "".join(c if c.isalnum() or c in "=.-" else "-" for c in f"{target.name}-{label}")
    return f"{number:03d}-{slug}".rstrip("-") + ("" if pair is None else f"-p{pair}")


class Cell:
    """The state of one cell. `number` is its place in the run, `run_id` random: no two cells have equal prompts.

    `exact`: the target's tokenizer, where one is declared. `attempt`: earlier tries at this cell, or at its pair, that
    were set aside. `place`: in a run of several rounds. `pace`: the probe that says what a request takes alone, where
    it is not the target's own: the arms of a pair are planned and driven alike.
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
        place: Place | None = None,
        pace: Probe | None = None,
    ) -> None:
        self.options, self.target, self.found, self.load, self.place = options, target, found, load, place
        self.name = cell_name(number, target, load, None if place is None else place.pair)
        self.dialect = target.dialect
        self.streamed = options.stream and self.dialect.comes.streams
        self._frame = TRANSPORTS[self.dialect.transport].frame
        rows, laps = plan.select(
            requests,
            load,
            count=options.requests,
            duration_s=options.duration_s,
            loop=options.loop_trace,
            alone_s=seconds_alone(requests, pace or found),
        )
        self.arrivals_seed = arms.arrivals_seed(options.seed, place.pair) if place else options.seed
        due_ns = plan.due_times(rows, load, self.arrivals_seed)
        kept = plan.within(rows, due_ns, options.duration_s)
        if load.class_alone:  # last, so that its requests are those of the mix, and due when they are due there
            kept = plan.of_class(rows, kept, load.class_alone)
        self.requests, self.due_ns = [rows[i] for i in kept], due_ns[kept]
        self.alone_s = seconds_alone(self.requests, pace or found)
        self._numbers = kept  # a request's place in the whole plan decides its text, as its salt does
        self._before = {after: row for row, after in selection.successive(self.requests)}
        self._go_on = set(self._before.values())
        # No cell meets the cache of the one before: the salt decides the first words of every prompt.
        salt = f"seed {options.seed}" if options.reuse_prompts else f"{run_id} {number} {attempt}"
        if place and options.rounds.interleave:
            origin = f"seed {options.seed}" if options.reuse_prompts else run_id
            salt = arms.salt(origin, place, attempt, same=options.rounds.same_salt)
        self._salts = [f"{salt} lap {laps[i]}" for i in kept]
        self._request_ids = f"{run_id}-{number}-" + (f"{attempt}-" if attempt else "")
        self._sizer = found.sizer
        self._count_tokens: Callable[[str], int] | None = None
        self._ids = None if exact is None else exact.ids
        if exact is not None:
            # What the probe cost beyond its own text is the target's template, which a tokenizer cannot know.
            self._sizer = replace(exact.sizer, template=found.template(exact.count))
            self._count_tokens = exact.count
        self._hide = targets.hider(target)
        self._hashes = [0] * len(self.requests)
        self._said: dict[int, Request] = {}  # the filled request of each turn that waits for the next one
        self._kept_bytes = self._kept_failed_bytes = 0
        self.counts = dict.fromkeys(OUTCOMES, 0)
        self.tokens = 0  # of ok requests so far, for the progress line

    def load_facts(self) -> dict[str, Any]:
        facts = {"kind": self.load.kind, "label": self.load.label, **asdict(self.load)}
        return facts | {"warmup": self.options.warmup, "duration_s": self.options.duration_s}

    def sharing(self) -> dict[str, Any]:
        return plan.sharing(self.requests, self._salts)

    def round_facts(self) -> dict[str, Any]:
        """What a header says of a cell in a run of several rounds: cells of one pair have one `work_hash`."""
        if self.place is None:
            return {}
        facts = {"pair": self.place.pair, "arm": self.target.name, "order": self.place.order}
        facts |= {"repeat": self.options.rounds.repeat, "arrivals_seed": self.arrivals_seed}
        return facts | {"work_hash": self.work_hash()}

    def work_hash(self) -> str:
        """Of the rows as they are sent and when each is due: lengths, sharing, sessions, given texts; no salt."""
        digest = hashlib.blake2b(self.due_ns.tobytes(), digest_size=8)
        for request in self.requests:
            digest.update(repr(request).encode())
        return digest.hexdigest()

    # ---- what is said

    def first_payloads(self, live: Callable[[str], None]) -> Iterator[bytes]:
        """The bytes of each request, in order; b"" of a turn that holds an answer which is still to come."""
        for index in range(len(self.requests)):
            if index % 500 == 0:
                live(f"{self.name}: writing prompts, {index} of {len(self.requests)}")
            yield b"" if self._waits(index) else self._payload(index, self._known(index))

    def next_payload(self, index: int, previous: Exchange) -> bytes:
        """A turn that holds the server's own last answer; its making is in `lag`, and is why it is not made before."""
        before = self._said.pop(self._before[index])
        said = self._read(self._asked(before), previous).text
        new = self._filled(index, self.requests[index])
        if not self.dialect.takes.chat:
            filled = replace(new, prompt=f"{_text(before)}{said}\n{_text(new)}", messages=None)
        else:
            _, added = self._added(index, new)
            answered = {"role": "assistant", "content": said}
            filled = replace(new, messages=(*_messages(before), answered, *added), prompt=None)
        return self._payload(index, filled)

    def _waits(self, index: int) -> bool:
        """Does it hold the server's answer to the turn before? What a trace gives as a whole is sent as it stands."""
        return self.options.history == "live" and index in self._before and not _is_whole(self.requests[index])

    def _known(self, index: int) -> Request:
        request, before = self.requests[index], self._said.pop(self._before.get(index, plan.NEVER), None)
        if before is None or _is_whole(request):
            return self._filled(index, request)
        if request.hash_ids:  # the blocks describe the whole prompt, history included
            return self._filled(index, replace(request, turn=0))
        return self._recorded(index, request, before)

    def _recorded(self, index: int, request: Request, before: Request) -> Request:
        """A later turn whose history has an answer of the recorded length, or the recorded text where there is one."""
        last, salt = self._before[index], self._salts[index]
        places = (self._numbers[last], self._numbers[index])
        if self._ids is not None:
            return prompts.continued_ids(before, request, salt, places, self._ids)
        if not self.dialect.takes.chat and request.prompt is None and before.tokens_in:
            return prompts.continued(before, request, salt, places, self._sizer)
        new, answer = self._filled(index, request), prompts.answer_text(before, salt, places[0], self._sizer)
        if not self.dialect.takes.chat:
            return replace(new, prompt=f"{_text(before)} {answer}\n{_text(new)}")
        recorded, added = self._added(index, new)
        answered = recorded or ({"role": "assistant", "content": answer},)
        return replace(new, messages=(*_messages(before), *answered, *added), prompt=None)

    def _added(self, index: int, new: Request) -> tuple[Messages, Messages]:
        """Of a later turn's messages: the recorded answer to the turn before, where there is one, and what is new.

        A trace gives in each turn what was added, or the whole conversation so far.
        """
        own, earlier = _messages(new), self.requests[self._before[index]].messages or ()
        if earlier and own[: len(earlier)] == earlier:
            own = own[len(earlier) :]
        answers = next((k for k, m in enumerate(own) if m.get("role") != "assistant"), len(own))
        return own[:answers], own[answers:]

    def _filled(self, index: int, request: Request) -> Request:
        number, salt = self._numbers[index], self._salts[index]
        if self._ids is not None and not selection.brings_text(request):
            return prompts.fill_ids(request, salt, number, self._ids)
        return prompts.fill(request, salt, number, self._sizer)

    def _payload(self, index: int, request: Request) -> bytes:
        """What the plan holds of a request: its body, as the transport frames it."""
        if index in self._go_on:
            self._said[index] = request
        model = request.model or _model_of(request.body) if self.options.keep_model else ""
        ask = self.found.ask._replace(model=model) if model else self.found.ask
        body = self.dialect.encode(request, ask)
        self._hashes[index] = prompts.prompt_hash(body)
        return self._frame(f"{self._request_ids}{index}", body)

    # ---- what became of it

    def _asked(self, request: Request) -> Asked:
        return self.dialect.takes.asked(request, self.found.ask)

    def _read(self, asked: Asked, exchange: Exchange) -> Answer:
        return answer.read(
            exchange,
            self.dialect,
            streamed=self.streamed,
            asked_out=asked.out,
            pinned=self.found.lengths_pinned and asked.pinned,
            finish_expected=self.found.finish_reason_seen,
            choices=asked.choices,
            count_tokens=self._count_tokens,
            check_usage=self.counts["ok"] < USAGE_CHECKED,
        )

    def record(self, flight: Flight) -> Record:
        """The Record of a request that has ended, or was dropped; counts it."""
        index, request, tried = flight.index, self.requests[flight.index], flight.tried
        asked = self._asked(request)
        record = Record(
            index=index,
            request_id=f"{self._request_ids}{index}",
            outcome="dropped",
            due_ns=flight.due_ns,
            ready_ns=flight.ready_ns,
            planned_in=request.tokens_in or -1,
            asked_out=-1 if asked.out is None else asked.out,
            priority=request.priority,
            turn=request.turn,
            session=request.session,
            request_class=request.request_class,
        )
        if tried is not None:
            self._fill(record, asked, tried)
        self.counts[record.outcome] += 1
        self.tokens += record.tokens_out if record.outcome == "ok" else 0
        return record

    def _fill(self, record: Record, asked: Asked, tried: Tried) -> None:
        exchange, first = tried.exchange, tried.first
        got = self._read(asked, exchange)
        record.sent_ns, record.connect_ns = exchange.sent_ns, exchange.connect_ns
        record.first_byte_ns, record.end_ns = exchange.first_byte_ns, exchange.end_ns
        record.bytes_in, record.bytes_out = exchange.bytes_in, exchange.bytes_out
        record.reconnects, record.url_index = exchange.reconnects, exchange.url_index
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


def seconds_alone(requests: Sequence[Request], found: Probe) -> float:
    """Seconds that a mean request would take alone, by the one short probe: good enough to spread a first wave.

    An answer whose tokens nobody counts, as a single pass's or a whole one's without usage, takes what the probe took.
    """
    outs = [r.tokens_out for r in requests if r.tokens_out] or [1]
    counted = found.usage_in_stream or found.ttft_ms is not None
    return found.alone_ms / 1e3 * (float(np.mean(outs)) / found.alone_tokens if counted else 1.0)


def _is_whole(request: Request) -> bool:
    """Does it bring its whole prompt, history included?"""
    return request.body is not None or request.prompt_token_ids is not None


def _model_of(body: Mapping[str, Any] | None) -> str:
    model = (body or {}).get("model")
    return model if isinstance(model, str) else ""


def _messages(request: Request) -> Messages:
    captured = (request.body or {}).get("messages")
    given = request.messages if captured is None else tuple(captured)
    return given or ({"role": "user", "content": _text(request)},)


def _text(request: Request) -> str:
    captured = (request.body or {}).get("prompt")
    return captured if isinstance(captured, str) else request.prompt or ""
