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
from reference_engine.cost_model import load_of, step_line
from reference_engine.faults import Fault, WorkerCrash, held_share, trouble
from reference_engine.runner_api import NOT_FINITE, Runner
from reference_engine.scheduler import Copies, Output, Scheduler, check_fits, demand
from reference_engine.sequence import SamplingParams, Sequence
from reference_engine.telemetry import Telemetry

T = TypeVar("T")
Sink = Callable[[Output], None]  # called in the event loop
Work = list[tuple[Sequence, int]]
Computed = tuple[Work, list[int | None], list[Sequence]]  # what of a step was computed, its tokens; who could not be

BACKOFF_S = 0.1  # before the first restart, doubled at each that follows: 3.1 s before the fifth
MOST_CRASHES = 5  # within CRASH_WINDOW_S; one more, and a restart is no remedy
CRASH_WINDOW_S = 60


class EngineDownError(RuntimeError):
    """The step loop does not run: for good, or (`retry_after_s`) until it was restarted. The text says why."""

    def __init__(self, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Engine:
    """All methods are for the event loop's thread. What the scheduler and the runner hold belongs to the step loop's.

    A fault in a step ends that life of the loop: every open request gets an output with finish reason "error", blocks
    and queues, in an unknown state now, are replaced, and another life begins after a pause. From the second fault
    within a minute on, the runner is loaded anew (`reload`); after the sixth the engine has `stopped` for good.
    An allocation that fails is no fault: see `_compute`. What kills the process itself (a segmentation fault, the
    kernel's OOM killer) is beyond this: the loop is a thread of it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        eos_ids: frozenset[int],
        model_name: str,
        now_ns: Callable[[], int] = time.monotonic_ns,
        *,
        reload: Callable[[], Runner] | None = None,
        tell: Callable[[str], object] = lambda text: None,
        on_end: Callable[[], object] = lambda: None,
        backoff_s: float = BACKOFF_S,
        copy: Callable[[Runner, Copies], object] | None = None,
        log_step: Callable[[bytes], object] | None = None,
    ) -> None:
        """`tell`: takes a line about each restart. `on_end`: called once, when the engine has stopped for good.

        `copy`: moves blocks of a runner to and from host memory, where preemption is by swap. `log_step`: takes a line
        of what each step had to do and of the seconds that it took, as `now_ns` counts them.
        """
        self.config = config
        self.eos_ids = eos_ids
        self.scheduler = Scheduler(config, eos_ids)
        self.telemetry = Telemetry(self.scheduler, model_name)
        self.now_ns = now_ns
        self.down = ""  # why the loop does not run now
        self.stopped = ""  # why it never will again
        self.faults: list[Fault] = []  # replaced, never changed: the step loop reads it
        self.crashes: list[int] = []  # when, those within the window
        self._reload, self._tell, self._on_end, self._backoff_s, self._copy = reload, tell, on_end, backoff_s, copy
        self._log_step = log_step
        self.on_crash: Callable[[], object] = lambda: None  # called before the runner may be loaded anew
        self._rate = Rate()
        self._submitted = self._submitted_tokens = 0
        self._runner: Runner | None = runner  # None: it could not be loaded anew
        self._inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # None: stop
        self._sinks: dict[Sequence, Sink] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._failing_calls = 0  # of the runner, by a planted fault
        self._halt = threading.Event()  # ends a planted stall early
        self._thread: threading.Thread | None = None
        self._restart: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin a life of the step loop."""
        self._restart = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
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
        adapter: int = 0,
    ) -> Sequence:
        """A sequence to submit. Raises TooLong, in the caller's thread, for what can never be served."""
        check_fits(self.config, len(token_ids), params.max_tokens)
        number = next(self._ids)
        return Sequence(number, list(token_ids), len(token_ids), params, number, priority, client,
                        adapter=adapter, salt=salt, leader=leader, arrived_ns=arrived_ns)  # fmt: skip

    @property
    def runner(self) -> Runner | None:
        """None while, or because, it could not be loaded anew. For what changes nothing of it."""
        return self._runner

    @property
    def queued(self) -> int:
        """Sequences that were submitted and not yet scheduled, those in the inbox too."""
        return self._submitted - self.scheduler.line.left

    def check_alive(self) -> None:
        """Raises EngineDownError."""
        if self.down:
            raise self.down_error()

    def down_error(self) -> EngineDownError:
        """Of a loop that does not run."""
        return EngineDownError(self.down, None if self.stopped else 1 + round(self._pause_s()))

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
        self.check_alive()
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
        self.check_alive()
        future: asyncio.Future[T] = self._loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)

        def answer(value: T) -> None:
            if not future.done():
                future.set_result(value)

        self._inbox.put(lambda: self._loop.call_soon_threadsafe(answer, question()))
        return await future

    def plant(self, fault: Fault) -> None:
        """From the next step or request on."""
        self.faults = [*(f for f in self.faults if f.active), fault]

    async def clear_faults(self) -> None:
        """Also gives back what memory pressure holds, which an idle engine would do at its next step only."""
        self.faults = []
        if not self.down:
            await self.ask(lambda: self.scheduler.blocks.hold(0))

    async def stop(self) -> None:
        """End the loop after the step it is in; open requests get an error."""
        if self._restart:
            self._restart.cancel()
        self._halt.set()
        self._inbox.put(None)
        if self._thread:
            await asyncio.to_thread(self._thread.join)
        self._end("the engine is shutting down")

    def _abort(self, sequence: Sequence, reason: str) -> None:
        if self.scheduler.abort(sequence, reason, self.now_ns()):
            self.telemetry.observe_end(sequence)

    def _run(self) -> None:
        """One life, in its thread."""
        why = ""
        try:
            if self.down:
                if self._reload and len(self.crashes) > 1:
                    self._runner = None  # else both models would be in memory
                    self._runner = self._reload()
                self._loop.call_soon_threadsafe(self._up)
            while self._drain():
                self._step()
            return
        except WorkerCrash as crash:
            why = str(crash)
        finally:  # any other fault goes on to threading.excepthook, which prints its traceback
            fault = sys.exc_info()[1]
            if fault or why:
                self._loop.call_soon_threadsafe(self._crashed, why or f"{type(fault).__name__}: {fault}")

    def _step(self) -> None:
        scheduler, begun_ns = self.scheduler, self.now_ns()
        if self.faults:
            scheduler.blocks.hold(round(held_share(self.faults) * self.config.num_blocks))
        outputs = scheduler.expire(begun_ns)
        work = scheduler.step(self.config.max_num_batched_tokens, begun_ns)
        for output in outputs:
            self.telemetry.observe_end(output.sequence)
        if scheduler.copies.out or scheduler.copies.into:
            assert self._runner and self._copy
            self._copy(self._runner, scheduler.copies)
        if work:
            ends: list[tuple[str, Sequence]] = []  # who ends without a token of this step, and why
            computed, tokens, failed = self._troubled(work) if self.faults else self._compute(work)
            now_ns = self.now_ns()
            if self._log_step:
                self._log_step(step_line(load_of(work), (now_ns - begun_ns) / 1e9))
            if NOT_FINITE in tokens:
                ends = [("nonfinite", s) for (s, _), token in zip(computed, tokens, strict=True) if token == NOT_FINITE]
                whole = [i for i, token in enumerate(tokens) if token != NOT_FINITE]
                computed, tokens = [computed[i] for i in whole], [tokens[i] for i in whole]
            made = scheduler.commit(computed, tokens, now_ns)
            self._rate.observe(sum(n for _, n in work), (now_ns - begun_ns) / 1e9)
            self.telemetry.observe(made)
            outputs += made
            for _, sequence in ends:  # it may come from an earlier chunk, of it or of whoever offered its blocks
                scheduler.blocks.withdraw(sequence)
            for reason, sequence in [*ends, *(("oom", s) for s in failed)]:
                self._abort(sequence, reason)
                outputs.append(Output(sequence, -1, now_ns, 0, reason))
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _compute(self, work: Work) -> Computed:
        """One failed allocation costs nobody anything: a step that memory does not hold is computed in halves.

        Nothing was committed, and positions that it may have written are those that it writes again. Only who fails
        alone has to end.
        """
        try:
            return work, self._execute(work), []
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        self.telemetry.failed_allocations += 1  # out here the traceback, and with it the step's tensors, are gone
        if len(work) == 1:
            return [], [], [work[0][0]]
        middle = len(work) // 2
        first, second = self._compute(work[:middle]), self._compute(work[middle:])
        return first[0] + second[0], first[1] + second[1], first[2] + second[2]

    def _execute(self, work: Work) -> list[int | None]:
        if self._failing_calls:
            self._failing_calls -= 1
            raise MemoryError("a planted fault")
        assert self._runner
        return self._runner.execute(work)

    def _troubled(self, work: Work) -> Computed:
        """A step with what was planted for it."""
        planned, begun_ns = trouble(self.faults), self.now_ns()
        if planned.crash:
            raise WorkerCrash("a planted crash")
        self._halt.wait(planned.stall_s)
        self._failing_calls = planned.failing_calls
        computed = self._compute(work)
        self._failing_calls = 0
        real_s = (self.now_ns() - begun_ns) / 1e9 * self.config.time_scale
        self._halt.wait((planned.factor - 1) * real_s if planned.factor > 1 else 0)
        return computed

    def _drain(self) -> bool:
        """Take in what came since the last step, blocking while there is nothing to do; False: stop."""
        while True:
            timeout_s = None
            if self._inbox.empty():
                wait_ns = self.scheduler.wait_ns(self.now_ns())
                if wait_ns == 0:
                    return True
                timeout_s = None if wait_ns is None else wait_ns / 1e9 * self.config.time_scale
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

    def _crashed(self, why: str) -> None:
        """A life of the loop has ended by a fault: all that was open ends, all is made new, the next is due."""
        if self.stopped:
            return
        now_ns = self.now_ns()
        self.crashes = [ns for ns in self.crashes if now_ns - ns < CRASH_WINDOW_S * 1e9] + [now_ns]
        if len(self.crashes) > MOST_CRASHES:
            times = f"{len(self.crashes)} times within {CRASH_WINDOW_S} s"
            self._end(f"the engine failed {times}, at last by {why}; it is not restarted any more")
            self._tell(self.stopped)
            return
        self._fail_open(f"the engine failed: {why}; it is being restarted")
        self.on_crash()
        self._inbox = SimpleQueue()  # what is in the old one speaks of the old scheduler
        counts = self.scheduler.counts
        self.scheduler = self.telemetry.scheduler = Scheduler(self.config, self.eos_ids)
        self.scheduler.counts = counts  # counters only ever grow
        self._submitted = self._submitted_tokens = 0
        self.telemetry.restarts += 1
        pause_s = self._pause_s()
        self._tell(f"{self.down}, for the {_nth(len(self.crashes))} time in {CRASH_WINDOW_S} s, in {pause_s:g} s")
        self._restart = self._loop.call_later(pause_s, self.start)

    def _pause_s(self) -> float:
        return float(self._backoff_s * 2 ** (len(self.crashes) - 1))

    def _up(self) -> None:
        if not self.stopped:
            self.down = ""

    def _end(self, why: str) -> None:
        """For good."""
        if self.stopped:
            return
        self.stopped = why
        self._fail_open(why)
        self._on_end()

    def _fail_open(self, why: str) -> None:
        """Whoever waits for something hears that it will not come."""
        self.down = why
        for future in list(self._asked):
            future.set_exception(self.down_error())
        while self._sinks:
            sequence, sink = self._sinks.popitem()
            self.telemetry.finished["error"] += 1
            sink(Output(sequence, -1, self.now_ns(), 0, "error"))


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; torch says so on a GPU by a type (no torch is imported here), on a CPU in words."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or any(words in text for words in ("can't allocate memory", "CUDA out of memory", "ALLOC_FAILED"))
    )


def _nth(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")
