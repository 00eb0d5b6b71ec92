"""Single passes beside the engine's steps: the batcher on the event loop, its batches in threads, accounts."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from reference_engine.admission import Rate, Refused, retry_after_s
from reference_engine.answer import FAILURES, Entry
from reference_engine.batcher import Batch, Batcher, Job, Limits, spent
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine, EngineDownError, out_of_memory
from reference_engine.openai_api import ApiError
from reference_engine.runner_api import Encoder, Pass, Runner


def limits_of(config: EngineConfig) -> Limits:
    return Limits(
        config.max_batch,
        min(config.max_num_batched_tokens, config.context),
        round(config.batch_wait_ms * 1e6),
        config.max_queue,
        config.queue_timeout * 1_000_000_000,
        config.instances,
    )


class Instance:
    """One worker: its pass through the runner that the engine has, made again when that is another one."""

    def __init__(self, pooling: str) -> None:
        self.pooling = pooling
        self._made: tuple[Runner, Pass] | None = None

    def compute(self, runner: Runner, inputs: list[list[int]]) -> list[Any]:
        """In a thread; one call at a time."""
        if self._made is None or self._made[0] is not runner:
            assert isinstance(runner, Encoder)
            self._made = (runner, runner.single_pass(self.pooling))
        return self._made[1](inputs)

    def forget(self) -> None:
        """Let go of a runner that the engine has no more: two models are not to be in memory."""
        self._made = None


class SinglePass:
    """All methods are for the event loop's thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.limits = limits_of(engine.config)
        self.batcher = Batcher(self.limits)
        self.idle = [Instance(engine.config.pooling) for _ in range(self.limits.instances)]
        self._vectors: dict[Job, list[Any]] = {}
        self._waits: dict[Job, asyncio.Future[None]] = {}
        self._rate = Rate()
        self._queue_ns = 0  # of the jobs that have ended
        self._pool = ThreadPoolExecutor(self.limits.instances, "single-pass")  # its threads start when they are needed
        self._timer: asyncio.TimerHandle | None = None
        engine.telemetry.registry.register(self)
        engine.on_crash = self._forget

    def encoder(self) -> Encoder:
        """Raises EngineDownError, and ApiError where the runner makes no vectors."""
        self.engine.check_alive()
        runner = self.engine.runner
        if not isinstance(runner, Encoder):
            raise ApiError(
                400, f"the model {self.engine.telemetry.labels['model_name']!r} makes no embeddings", "model"
            )
        return runner

    async def compute(self, job: Job) -> list[Any]:
        """The vectors of its inputs. Raises Refused, EngineDownError or ApiError; a caller that leaves ends the job."""
        self.encoder()
        if self.batcher.full:
            text = f"the queue is full: {len(self.batcher.waiting)} inputs wait already"
            raise Refused("queue_full", text, self._retry_after_s())
        self._vectors[job] = [None] * len(job.inputs)
        done = self._waits[job] = asyncio.get_running_loop().create_future()
        self.batcher.submit(job)
        self._pump()
        try:
            await done
            return self._vectors[job]
        finally:
            self.batcher.drop(job)
            del self._vectors[job], self._waits[job]

    async def close(self) -> None:
        """Whoever waits hears that nothing will come. Batches that are being computed are waited for: theirs is a
        thread, which cannot be ended."""
        if self._timer:
            self._timer.cancel()
        for job in list(self._waits):
            self._fail(job, EngineDownError("the engine is shutting down"))
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    def _pump(self) -> None:
        """Begin what can begin, end what waited too long, and look again when the next of either is due."""
        now_ns = self.engine.now_ns()
        for job in self.batcher.expire(now_ns):
            text = f"not begun within {self.engine.config.queue_timeout} s in the queue"
            self._fail(job, Refused("timeout", text, self._retry_after_s()))
        while batch := self.batcher.take(now_ns):
            self._begin(batch)
        if self._timer:
            self._timer.cancel()
        due_ns = self.batcher.due_ns()
        if due_ns is not None:
            delay_s = max(0, due_ns - now_ns) / 1e9 * self.engine.config.time_scale
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._pump)

    def _begin(self, batch: Batch) -> None:
        instance, runner = self.idle.pop(), self.engine.runner
        if runner is None:  # being loaded anew
            self._ended(batch, instance, self.engine.down_error(), [])
            return
        future = self._pool.submit(instance.compute, runner, batch.inputs)
        future.add_done_callback(partial(self._hand_over, asyncio.get_running_loop(), batch, instance))

    def _hand_over(self, loop: asyncio.AbstractEventLoop, batch: Batch, instance: Instance, future: Any) -> None:
        """In the worker's thread."""
        if not future.cancelled():
            error = future.exception()
            loop.call_soon_threadsafe(self._done, batch, instance, error, [] if error else future.result())

    def _done(self, batch: Batch, instance: Instance, error: BaseException | None, vectors: list[Any]) -> None:
        self._ended(batch, instance, None if error is None else self._told(error), vectors)
        self._pump()

    def _told(self, error: BaseException) -> Exception:
        """What clients are told of a pass that failed."""
        if out_of_memory(error):
            self.engine.telemetry.failed_allocations += 1
            return Refused("oom", "memory did not suffice for the batch", self._retry_after_s())
        asyncio.get_running_loop().call_exception_handler({"message": "a single pass failed", "exception": error})
        return ApiError(500, f"the pass failed: {type(error).__name__}: {error}")

    def _ended(self, batch: Batch, instance: Instance, error: Exception | None, vectors: list[Any]) -> None:
        self.idle.append(instance)
        now_ns = self.engine.now_ns()
        ended = self.batcher.end(batch, now_ns)
        if error:
            for job, _ in batch.members:
                self._fail(job, error)
            return
        self._rate.observe(batch.tokens, (now_ns - batch.begun_ns) / 1e9)
        for (job, i), vector in zip(batch.members, vectors, strict=True):
            if not vector:
                self._fail(job, FAILURES["nonfinite"](self.engine))
            elif job in self._vectors:  # else its client has left
                self._vectors[job][i] = vector
        for job in ended:
            self._queue_ns += spent(job).queue
            if (wait := self._waits.get(job)) and not wait.done():
                wait.set_result(None)

    def _fail(self, job: Job, error: Exception) -> None:
        self.batcher.drop(job)
        if (wait := self._waits.get(job)) and not wait.done():
            wait.set_exception(error)

    def _forget(self) -> None:
        for instance in self.idle:
            instance.forget()

    def _retry_after_s(self) -> int:
        waiting = sum(len(job.inputs[i]) for job, i in self.batcher.waiting)
        rate = self._rate.per_s()
        return retry_after_s(waiting, rate and rate * self.limits.instances)

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client asks of a collector."""
        labels, counts = self.engine.telemetry.labels, self.batcher.counts
        for name, text, level in (
            ("reference_engine:pass_inputs_waiting", "Inputs that wait for a batch.", len(self.batcher.waiting)),
            (
                "reference_engine:pass_instances_busy",
                "Workers with a batch.",
                self.limits.instances - self.batcher.idle,
            ),
        ):
            gauge = GaugeMetricFamily(name, text, labels=list(labels))
            gauge.add_metric(list(labels.values()), level)
            yield gauge
        for name, text, total in (
            ("reference_engine:pass_batches", "Batches computed.", counts.batches),
            ("reference_engine:pass_inputs", "Inputs computed.", counts.inputs),
            ("reference_engine:pass_tokens", "Tokens of those inputs.", counts.tokens),
            ("reference_engine:pass_compute_seconds", "Of batches, all workers together.", counts.compute_ns / 1e9),
            ("reference_engine:pass_queue_seconds", "Of requests that have ended.", self._queue_ns / 1e9),
        ):
            counter = CounterMetricFamily(name, text, labels=list(labels))
            counter.add_metric(list(labels.values()), total)
            yield counter


class PassAccount(NamedTuple):
    """Nanoseconds between stamps that follow each other: the sum is from headers read to answer made."""

    http_in: int  # headers were read -> handed to the batcher: body, JSON, tokens
    queue: int  # none of its inputs was being computed
    compute: int  # at least one was
    http_out: int  # its last batch had ended -> these figures are written

    @property
    def total(self) -> int:
        return sum(self)


class PassEntry(Entry):
    """A request of single passes, as a line of the log."""

    job: Job | None = None
    tokens = 0
    sent_ns = 0

    def account(self) -> PassAccount:
        """Of a job that has ended; closed at the first call."""
        assert self.job
        queue, compute = spent(self.job)
        in_ns = self.job.arrived_ns - self.received_ns
        return PassAccount(in_ns, queue, compute, self.sent_ns - self.received_ns - in_ns - queue - compute)

    def said(self, now_ns: int) -> dict[str, Any]:
        """What the answer says of its batches; this closes the account."""
        assert self.job
        self.sent_ns = now_ns
        parts = self.account()
        return {
            "batch_size": max(len(batch.members) for batch in self.job.batches),
            "batches": len(self.job.batches),
            "queue_ms": parts.queue / 1e6,
            "compute_ms": parts.compute / 1e6,
            "e2e_ms": parts.total / 1e6,
            "parts_ns": parts._asdict(),
            "total_ns": parts.total,
        }

    def line(self, now_ns: int) -> bytes:
        said: dict[str, Any] = {"request_id": self.request_id, "received_ns": self.received_ns}
        said |= {"outcome": self.outcome or ("stop" if self.sent_ns else "abort"), "stream": False}
        if self.job is None:
            parts = PassAccount(now_ns - self.received_ns, 0, 0, 0)
        elif not self.sent_ns:  # it ended in its queue or in its batches, and that part takes the rest
            at_ns = self.job.arrived_ns
            begun_ns = self.job.batches[0].begun_ns if self.job.batches else now_ns
            parts = PassAccount(at_ns - self.received_ns, begun_ns - at_ns, now_ns - begun_ns, 0)
        else:
            parts = self.account()
            said |= {
                "inputs": len(self.job.inputs),
                "prompt_tokens": self.tokens,
                "batches": len(self.job.batches),
                "batch_size": max(len(batch.members) for batch in self.job.batches),
            }
        return orjson.dumps(said | {"parts_ns": parts._asdict(), "total_ns": parts.total}) + b"\n"


def headers_of(entry: PassEntry) -> dict[str, str]:
    """W3C Server Timing in milliseconds, and the largest batch that it was in."""
    assert entry.job
    timing = ", ".join(f"{name};dur={ns / 1e6:.3f}" for name, ns in entry.account()._asdict().items())
    return {"Server-Timing": timing, "X-Batch-Size": str(max(len(batch.members) for batch in entry.job.batches))}
