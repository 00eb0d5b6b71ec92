"""One target at one load: its plan is made, driven, and every flight becomes a Record on disk as it ends."""

import asyncio
import errno
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_bench import answer, clock, driver, plan, prompts, targets, wire
from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError
from llm_bench.exchange import CONNECT_ERROR, Exchange
from llm_bench.plan import Load, Plan
from llm_bench.records import Record, Writer
from llm_bench.targets import Probe, Target
from llm_bench.trace import Request

if TYPE_CHECKING:
    from llm_bench.run import Options

GONE_AFTER = 20  # refused connections in a row, none answered between: then the target is asked whether it lives
TICK_S = 0.25  # progress, at 4 Hz
MAX_RAMP_S = 10.0  # a first wave is spread over one request's time, but no longer than this
RAW_LIMIT = 65536  # bytes of a failed response that are kept


class Cell:
    """The state of one cell: what each request said and what became of it."""

    def __init__(
        self,
        options: "Options",
        run_id: str,
        number: int,
        target: Target,
        found: Probe,
        requests: list[Request],
        load: Load,
    ) -> None:
        self.options, self.target, self.found, self.load = options, target, found, load
        slug = "".join(c if c.isalnum() or c in "=.-" else "-" for c in f"{target.name}-{load.label}")
        self.name = f"{number:03d}-{slug}"
        self.dialect = DIALECTS[target.api]
        self.alone_s = _alone_s(found, requests)
        self.requests, laps = plan.select(
            requests,
            load,
            count=options.requests,
            duration_s=options.duration_s,
            loop=options.loop_trace,
            alone_s=self.alone_s or 0.05,
        )
        # No cell meets the cache of the one before: the salt decides the first words of every prompt.
        salt = f"seed {options.seed}" if options.reuse_prompts else f"{run_id} {number}"
        self.salts = [f"{salt} lap {lap}" for lap in laps]
        self.sizer = prompts.Sizer.from_tokenizer(target.tokenizer) if target.tokenizer else found.sizer
        self.request_ids = f"{run_id}-{number}-"
        self.hashes = [0] * len(self.requests)
        self.said: dict[int, Request] = {}  # the filled request of each conversation's latest turn
        self.texts: dict[int, str] = {}  # answers that a next turn will hold
        self.kept_bytes = 0
        self.refused_in_a_row = 0
        self.counts = {"ok": 0, "failed": 0, "cancelled": 0, "cut_at_end": 0, "dropped": 0}
        self.tokens = 0

    def load_facts(self) -> dict[str, Any]:
        options, load = self.options, self.load
        return {"kind": load.kind, "label": load.label, **asdict(load)} | {
            "warmup": options.warmup,
            "duration_s": options.duration_s,
        }

    # ---- before the clock starts

    def payload(self, index: int, request: Request) -> bytes:
        """The rest of the HTTP head and the body. What stands before it, keys included, is the wire's."""
        ask = self.found.ask._replace(model=request.model) if request.model else self.found.ask
        body = self.dialect.encode(request, ask)
        self.hashes[index] = prompts.prompt_hash(body)
        return b"X-Request-Id: %b%d\r\nContent-Length: %d\r\n\r\n%b" % (
            self.request_ids.encode(),
            index,
            len(body),
            body,
        )

    def first_payloads(self, live: Callable[[str], None]) -> Iterator[bytes]:
        for index, request in enumerate(self.requests):
            if index % 500 == 0:
                live(f"{self.name}: writing prompts, {index} of {len(self.requests)}")
            if request.turn and not _has_text(request):
                yield b""
                continue
            filled = prompts.fill(request, self.salts[index], index, self.sizer)
            if request.session:
                self.said[index] = filled
            yield self.payload(index, filled)

    def next_payload(self, index: int, previous: int) -> bytes:
        """A turn that holds the server's own last answer; its making is in `lag`, and is why it is not made before."""
        before, text = self.said.pop(previous), self.texts.pop(previous, "")
        request = self.requests[index]
        new = prompts.turn_text(request, self.salts[index], index, self.sizer)
        if self.target.api == "openai-completions":
            filled = replace(request, prompt=f"{before.prompt or ''}{text}\n{new}")
        else:
            history = before.messages or ({"role": "user", "content": before.prompt or ""},)
            turn = ({"role": "assistant", "content": text}, {"role": "user", "content": new})
            filled = replace(request, messages=(*history, *turn))
        self.said[index] = filled
        return self.payload(index, filled)

    # ---- measuring

    def measure(
        self, header: Mapping[str, Any], say: Callable[[str], None], live: Callable[[str], None]
    ) -> dict[str, Any]:
        """Plan, drive, write. Returns how the cell ended, for run.json. Raises BenchError where the disk is full."""
        options = self.options
        spool = options.out / f"{self.name}.spool"
        due = plan.due_times(self.requests, self.load, options.seed)
        work = Plan(self.requests, due, spool, self.next_payload)
        try:
            _check_disk(options.out, self.requests)
            work.write(self.first_payloads(live))
            return self._drive(work, header, say, live)
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
            raise BenchError(f"{options.out}: the disk is full; what was measured before is readable there") from None
        finally:
            work.close()

    def _drive(
        self, work: Plan, header: Mapping[str, Any], say: Callable[[str], None], live: Callable[[str], None]
    ) -> dict[str, Any]:
        for line in self._announcement():
            say(line)
        facts = {
            "cell": self.name,
            "target": self.target.public(),
            "probe": self.found.public(),
            "load": self.load_facts(),
            "plan": {"hash": work.hash, "requests": len(work), "shares": any(r.hash_ids for r in self.requests)}
            | {"sessions": any(r.session for r in self.requests)},
            "anchor": list(clock.anchor()),
            "start_ns": clock.now_ns(),
        }
        writer = Writer(self.options.out / f"{self.name}.arrow", {**header, **facts})
        try:
            end = wire.run(self._loop(work, writer, live))
        finally:
            writer.close()
        if end["turns_not_sent"]:
            say(f"{self.name}: {end['turns_not_sent']} later turns were not sent, since a turn before them failed or was cut")
        return end

    async def _loop(self, work: Plan, writer: Writer, live: Callable[[str], None]) -> dict[str, Any]:
        options, load, target = self.options, self.load, self.target
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        reason: list[str] = []

        def interrupt() -> None:
            reason.append("interrupted")
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        line = wire.Wire(
            target.url,
            self.dialect.path,
            targets.auth_headers(target),
            options.timeouts,
            self.dialect.is_token if options.stream else None,
            cafile=target.cafile or None,
        )
        send = wire.retrying(line.send, options.retries)
        gauge = driver.Gauge()

        def done(flight: driver.Flight) -> None:
            record = self.record(flight)
            writer.write(record)
            if self.refused_in_a_row >= GONE_AFTER:
                self.refused_in_a_row = 0
                if not targets.reachable(target):
                    reason.append("target gone")
                    stop.set()

        ticker = asyncio.create_task(self._ticks(work, gauge, writer, live))
        cpu_ns, begun_ns = time.process_time_ns(), clock.now_ns()
        drain_s = options.drain_s if options.drain_s is not None else options.timeouts.total_s
        try:
            if load.concurrency is not None:
                drive = await driver.closed_loop(
                    work,
                    send,
                    done,
                    concurrency=load.concurrency,
                    warmup=self.warmup_requests(),
                    ramp_s=self.ramp_s(),
                    duration_s=options.duration_s,
                    drain_s=drain_s,
                    stop=stop,
                    gauge=gauge,
                    cut=line.cut,
                )
            else:
                drive = await driver.open_loop(
                    work,
                    send,
                    done,
                    max_in_flight=load.max_in_flight,
                    duration_s=options.duration_s,
                    drain_s=drain_s,
                    stop=stop,
                    gauge=gauge,
                    cut=line.cut,
                )
        finally:
            ticker.cancel()
            line.close()
        live("")
        np.save(options.out / f"{self.name}.gauge.npy", gauge.steps())
        wall_ns = clock.now_ns() - begun_ns
        return {
            "reason": reason[0] if reason else drive.reason,
            "start_ns": drive.start_ns,
            "turns_not_sent": drive.turns_not_sent,
            "cut": drive.cut,
            "peak_in_flight": gauge.peak,
            "client_cpu_share": (time.process_time_ns() - cpu_ns) / max(wall_ns, 1),
            "loop_lag_p99_ms": float(np.percentile(self.lags or [0.0], 99)),
            "counts": self.counts,
        }

    async def _ticks(self, work: Plan, gauge: driver.Gauge, writer: Writer, live: Callable[[str], None]) -> None:
        """Progress at 4 Hz, records to disk, and how late the event loop is: a tick that comes late says so."""
        self.lags: list[float] = []
        begun = time.monotonic()
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.lags.append((now - due) * 1e3)
            writer.flush()
            ended = sum(self.counts.values())
            left = (now - begun) / ended * (len(work) - ended) if ended else 0.0
            rate = self.tokens / (now - begun)
            live(
                f"{self.name}: {ended} of {len(work)} done, {gauge.now} in flight, {self.counts['failed']} failed, "
                f"{rate:,.0f} tokens/s so far, {f'about {left:.0f} s left' if ended else 'waiting for the first answer'}"
            )

    # ---- after each flight

    def record(self, flight: driver.Flight) -> Record:
        index = flight.index
        request = self.requests[index]
        exchange = flight.tried.exchange if flight.tried else Exchange()
        got = answer.read(
            exchange,
            self.dialect,
            streamed=self.options.stream,
            asked_out=request.tokens_out,
            pinned=self.found.lengths_pinned,
            finish_expected=self.found.finish_reason_seen,
            count_tokens=self.sizer.count if self.target.tokenizer else None,
        )
        outcome = got.outcome if flight.tried else "dropped"
        self.counts[outcome] += 1
        self.tokens += max(got.tokens_out, 0) if outcome == "ok" else 0
        self.refused_in_a_row = self.refused_in_a_row + 1 if exchange.ended == CONNECT_ERROR else 0
        if request.session:
            self.texts[index] = got.text
        raw = b""
        if outcome == "failed" or self.kept_bytes < self.options.keep_bytes:
            raw = b"".join(exchange.pieces)[:RAW_LIMIT]
            self.kept_bytes += len(raw) if outcome != "failed" else 0
        first = flight.tried.first if flight.tried else exchange
        server = got.server_ms
        return Record(
            index=index,
            request_id=f"{self.request_ids}{index}",
            outcome=outcome,
            error_kind=got.error_kind if flight.tried else "",
            error=got.error if flight.tried else "",
            status=exchange.status,
            finish_reason=got.finish_reason,
            labels=list(got.labels),
            due_ns=flight.due_ns,
            ready_ns=flight.ready_ns,
            sent_ns=exchange.sent_ns,
            first_byte_ns=exchange.first_byte_ns,
            end_ns=exchange.end_ns,
            event_ns=got.event_ns,
            event_tokens=got.event_tokens,
            event_choice=got.event_choice,
            first_answer_ns=got.first_answer_ns,
            planned_in=request.tokens_in,
            asked_out=-1 if request.tokens_out is None else request.tokens_out,
            tokens_in=got.tokens_in,
            tokens_cached=got.tokens_cached,
            tokens_out=got.tokens_out,
            tokens_out_from=got.tokens_out_from,
            text_bytes=got.text_bytes,
            bytes_in=exchange.bytes_in,
            comments=got.comments,
            reconnects=exchange.reconnects,
            attempts=flight.tried.attempts if flight.tried else 0,
            first_attempt="ok" if first.status // 100 == 2 else f"http_{first.status}" if first.status else first.ended,
            retry_wait_ns=flight.tried.retry_wait_ns if flight.tried else 0,
            priority=request.priority,
            turn=request.turn,
            session=request.session,
            request_class=request.request_class,
            prompt_hash=self.hashes[index],
            server_ttft_ms=server.get("server_ttft_ms", np.nan),
            server_tpot_ms=server.get("server_tpot_ms", np.nan),
            server_queue_ms=server.get("server_queue_ms", np.nan),
            server_prefill_ms=server.get("server_prefill_ms", np.nan),
            server_decode_ms=server.get("server_decode_ms", np.nan),
            raw=raw,
        )

    # ---- effective settings

    def warmup_requests(self) -> int:
        """Closed loop: by default two rounds of the slots; the driver also waits for the whole first wave."""
        return round(self.options.warmup) if self.options.warmup is not None else 2 * (self.load.concurrency or 0)

    def ramp_s(self) -> float:
        """The first wave is spread over what one request takes alone, so that the slots do not march in step."""
        return min(self.alone_s or 1.0, MAX_RAMP_S)

    def _announcement(self) -> list[str]:
        options, load = self.options, self.load
        limits = ", ".join(f"{k[:-2]} {'none' if v is None else f'{v:g} s'}" for k, v in asdict(options.timeouts).items())
        lines = [f"{self.name}: {self.target.name} at {load.label}, {len(self.requests)} requests; time-outs: {limits}"]
        if load.concurrency is not None:
            warmup = self.warmup_requests()
            lines.append(f"{self.name}: warm-up {warmup} requests, first wave spread over {self.ramp_s():.2f} s")
            if len(self.requests) < warmup + 6 * load.concurrency:
                lines.append(
                    f"{self.name}: {len(self.requests)} requests are few for {load.concurrency} slots: its window needs "
                    f"{5 * load.concurrency} after {warmup} of warm-up, or the cell is `too short`"
                )
        elif load.rate is not None:
            due = plan.due_times(self.requests, load, options.seed)
            span_s = max(float(due.max()) / 1e9, 1e-9)
            sent = int((due >= 0).sum())
            lines.append(f"{self.name}: realised rate of the plan {(sent - 1) / span_s:.4g}/s over {span_s:.1f} s, seed {options.seed}")
        return lines


def _has_text(request: Request) -> bool:
    return request.prompt is not None or request.messages is not None or request.prompt_token_ids is not None


def _alone_s(found: Probe, requests: list[Request]) -> float | None:
    """Seconds that a mean request would take alone, from the probe; None when it could not be told."""
    if found.ttft_ms is None:
        return None
    outs = [r.tokens_out for r in requests if r.tokens_out] or [1]
    return (found.ttft_ms + (found.tpot_ms or 0.0) * float(np.mean(outs))) / 1e3


def _check_disk(folder: Any, requests: list[Request]) -> None:
    """Refuse before writing: prompts at 6 bytes a token, records at 16 bytes a token and 1 kB a request."""
    need = sum(6 * r.tokens_in + 16 * (r.tokens_out or 256) + 1500 for r in requests)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise BenchError(f"{folder}: the plan and its records need about {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
