"""The step loop in a thread of its own: inbox, scheduler, runner, and one call into the event loop a step."""

import asyncio
import itertools
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from reference_engine.admission import Rate, Refused, is_full, retry_after_s
from reference_engine.config import EngineConfig
from reference_engine.runner_api import Runner
from reference_engine.scheduler import Output, Scheduler, check_fits, demand
from reference_engine.sequence import SamplingParams, Sequence
from reference_engine.telemetry import Telemetry

T = TypeVar("T")
Sink = Callable[[Output], None]  # called in the event loop


class EngineDownError(RuntimeError):
    """The step loop has ended, by a fault or by a shutdown; the text says which."""


class Engine:
    """All methods are for the event loop's thread. What the scheduler and the runner hold belongs to the step loop's.

    A fault in a step ends the loop for good: every open request gets an output with finish reason "error", every later
    one EngineDownError. A loop that went on would serve from blocks in an unknown state.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        eos_ids: frozenset[int],
        model_name: str,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, eos_ids)
        self.telemetry = Telemetry(self.scheduler, model_name)
        self.now_ns = now_ns
        self.stopped = ""  # why the loop has ended
        self._rate = Rate()
        self._submitted = self._submitted_tokens = 0
        self._runner = runner
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: stop
        self._sinks: dict[Sequence, Sink] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def sequence(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        arrived_ns: int,
        priority: int = 0,
        salt: bytes = b"",
        leader: Sequence | None = None,
        client: str = "",
    ) -> Sequence:
        """A sequence to submit. Raises TooLong, in the caller's thread, for what can never be served."""
        check_fits(self.config, len(token_ids), params.max_tokens)
        number = next(self._ids)
        return Sequence(number, list(token_ids), len(token_ids), params, number, priority, client,
                        salt=salt, leader=leader, arrived_ns=arrived_ns)  # fmt: skip

    @property
    def queued(self) -> int:
        """Sequences that were submitted and not yet scheduled, those in the inbox too."""
        return self._submitted - self.scheduler.line.left

    def check_queue(self) -> None:
        """Raises Refused if those who wait are as many as may. To be followed by the submission, without an await."""
        line = self.scheduler.line
        if is_full(self._submitted - line.left, line.seats, self.config.max_queue):
            text = f"the queue is full: {self.config.max_queue} wait already"
            raise Refused("queue_full", text, self.retry_after_s())

    def retry_after_s(self) -> int:
        """When those who wait now should have been served."""
        return retry_after_s(self._submitted_tokens - self.scheduler.line.left_tokens, self._rate.per_s())

    def submit(self, sequence: Sequence, sink: Sink) -> None:
        """`sink` gets every output until one has a finish reason. Raises EngineDownError."""
        self._check_alive()
        self._submitted += 1
        self._submitted_tokens += demand(sequence)
        self._sinks[sequence] = sink
        self._inbox.put(partial(self.scheduler.submit, sequence))

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """End it; its sink hears no more. Nothing happens if it has ended already."""
        if self._sinks.pop(sequence, None):
            self._inbox.put(partial(self._abort, sequence, reason))

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer of a function called between two steps, in the step loop's thread. Raises EngineDownError."""
        self._check_alive()
        future: asyncio.Future[T] = self._loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)

        def answer(value: T) -> None:
            if not future.done():
                future.set_result(value)

        self._inbox.put(lambda: self._loop.call_soon_threadsafe(answer, question()))
        return await future

    async def stop(self) -> None:
        """End the loop after the step it is in; open requests get an error."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._end("the engine is shutting down")

    def _check_alive(self) -> None:
        if self.stopped:
            raise EngineDownError(self.stopped)

    def _abort(self, sequence: Sequence, reason: str) -> None:
        if self.scheduler.abort(sequence, reason, self.now_ns()):
            self.telemetry.observe_end(sequence)

    def _run(self) -> None:
        clean = False
        try:
            while self._drain():
                begun_ns = self.now_ns()
                expired = self.scheduler.expire(begun_ns)
                work = self.scheduler.step(self.config.max_num_batched_tokens, begun_ns)
                outputs: list[Output] = []
                if work:
                    tokens = self._runner.execute(work)
                    now_ns = self.now_ns()
                    outputs = self.scheduler.commit(work, tokens, now_ns)
                    self._rate.observe(sum(n for _, n in work), (now_ns - begun_ns) / 1e9)
                    self.telemetry.observe(outputs)
                for output in expired:
                    self.telemetry.observe_end(output.sequence)
                if expired or outputs:
                    self._loop.call_soon_threadsafe(self._deliver, expired + outputs)
            clean = True
        finally:  # the fault itself goes on to threading.excepthook, which prints its traceback
            if not clean:
                fault = sys.exc_info()[1]
                self._loop.call_soon_threadsafe(self._end, f"the engine failed: {type(fault).__name__}: {fault}")

    def _drain(self) -> bool:
        """Take in what came since the last step, blocking while there is nothing to do; False: stop."""
        while True:
            timeout_s = None
            if self._inbox.empty():
                wait_ns = self.scheduler.wait_ns(self.now_ns())
                if wait_ns == 0:
                    return True
                timeout_s = None if wait_ns is None else wait_ns / 1e9
            try:
                message = self._inbox.get(timeout=timeout_s)
            except Empty:
                continue  # a batch has waited long enough
            if message is None:
                return False
            message()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            sequence = output.sequence
            sink = self._sinks.pop(sequence, None) if output.finish_reason else self._sinks.get(sequence)
            if sink:
                sink(output)

    def _end(self, why: str) -> None:
        if self.stopped:
            return
        self.stopped = why
        for future in list(self._asked):
            future.set_exception(EngineDownError(why))
        while self._sinks:
            sequence, sink = self._sinks.popitem()
            self.telemetry.finished["error"] += 1
            sink(Output(sequence, -1, self.now_ns(), 0, "error"))
