import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from reference_engine import cost_model, faults
from reference_engine.config import EngineConfig
from reference_engine.cost_model import PROFILES, CostModel, Profile, step_s
from reference_engine.engine import Engine, EngineDownError
from reference_engine.scheduler import Output, TooLong
from reference_engine.sequence import SamplingParams, Sequence
from tests.quiet import undisturbed
from tests.stub_runner import PagedStub, alone

CONFIG = EngineConfig(block_size=4, num_blocks=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
P = [1, 2, 3, 4, 5, 6, 7, 8]


class Client:
    """Collects one sequence's outputs."""

    def __init__(self, engine: Engine, prompt: list[int], max_tokens: int = 8) -> None:
        self.sequence = engine.sequence(prompt, SamplingParams(max_tokens), arrived_ns=engine.now_ns())
        self.outputs: list[Output] = []
        self.ended = asyncio.Event()
        engine.submit(self.sequence, self.sink)

    def sink(self, output: Output) -> None:
        self.outputs.append(output)
        if output.finish_reason:
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [o.token for o in self.outputs]


def engine(config: EngineConfig = CONFIG, before: Callable[[], object] | None = None) -> tuple[Engine, PagedStub]:
    """A started engine over a stub."""
    runner = PagedStub(config.block_size, before=before)
    made = Engine(config, runner, runner.eos_ids, "stub")
    runner.pool = made.scheduler.blocks
    made.start()
    return made, runner


async def idle_check(e: Engine) -> None:
    await e.ask(e.scheduler.check)
    assert await e.ask(lambda: len(e.scheduler.blocks.free)) == e.config.num_blocks


def test_every_token_arrives_once_and_in_order() -> None:
    async def main() -> None:
        e, _ = engine()
        prompts = [[i, *P] for i in range(10)]
        clients = [Client(e, p) for p in prompts]
        for client, prompt in zip(clients, prompts, strict=True):
            await client.ended.wait()
            assert client.tokens == alone(CONFIG, prompt, 8)[0]
            assert [o.finish_reason for o in client.outputs] == [""] * 7 + ["length"]
        await idle_check(e)
        await e.stop()

    asyncio.run(main())


def test_the_event_loop_is_called_once_a_step() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        e, runner = engine(before=gate.acquire)
        calls: list[str] = []
        loop = asyncio.get_running_loop()
        call_soon_threadsafe = loop.call_soon_threadsafe

        def counting(callback, *args, **kw):  # type: ignore[no-untyped-def]
            calls.append(getattr(callback, "__name__", ""))
            return call_soon_threadsafe(callback, *args, **kw)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        clients = [Client(e, [i, *P]) for i in range(4)]
        gate.release(100)
        for client in clients:
            await client.ended.wait()
        assert calls.count("_deliver") <= len(runner.steps) < sum(len(c.tokens) for c in clients)
        await e.stop()

    asyncio.run(main())


def test_an_abort_takes_effect_before_the_next_step() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        e, runner = engine(replace(CONFIG, max_num_seqs=1), gate.acquire)
        leaver, waiting, queued = Client(e, P), Client(e, [9, *P]), Client(e, [7, *P])
        gate.release(3)
        while len(leaver.outputs) < 3:
            await asyncio.sleep(0.001)
        e.abort(leaver.sequence)
        e.abort(queued.sequence)
        gate.release(100)
        await waiting.ended.wait()
        ran = [number for step in runner.steps for number, _ in step]
        assert ran.count(leaver.sequence.id) <= 4  # three steps and the one that was under way
        assert ran.count(queued.sequence.id) == 0
        assert waiting.tokens == alone(CONFIG, [9, *P], 8)[0]
        assert (len(leaver.outputs), e.telemetry.finished["abort"]) == (3, 2)
        await idle_check(e)
        await e.stop()

    asyncio.run(main())


def test_too_long_is_refused_where_it_is_submitted() -> None:
    async def main() -> None:
        e, runner = engine()
        with pytest.raises(TooLong, match="needs 17 blocks, pool has 16"):
            Client(e, [1] * 65, 1)
        assert runner.steps == []
        await e.stop()

    asyncio.run(main())


def failing(*steps: int, error: Exception) -> Callable[[], None]:
    """Raises in these steps, counted from 0."""
    numbers = itertools.count()

    def before() -> None:
        if next(numbers) in steps:
            raise error

    return before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@undisturbed
def test_after_a_fault_in_a_step_everything_open_has_ended_and_everything_new_is_served() -> None:
    async def main() -> None:
        said: list[str] = []
        runner = PagedStub(CONFIG.block_size, before=failing(3, error=RuntimeError("device lost")))
        e = Engine(CONFIG, runner, runner.eos_ids, "stub", tell=said.append, backoff_s=0.05)
        e.start()
        clients = [Client(e, P), Client(e, [9, *P])]
        for client in clients:
            await client.ended.wait()
            assert client.outputs[-1].finish_reason == "error"
        assert e.down == "the engine failed: RuntimeError: device lost; it is being restarted"
        with pytest.raises(EngineDownError, match="device lost") as down:
            Client(e, P)
        assert down.value.retry_after_s == 1
        with pytest.raises(EngineDownError):
            await e.ask(lambda: None)
        while e.down:
            await asyncio.sleep(0.005)
        (line,) = said
        assert line.endswith("it is being restarted, for the 1st time in 60 s, in 0.05 s")
        before = e.scheduler.counts.generation_tokens
        assert before >= 3  # those of the life before
        later = Client(e, P)
        await later.ended.wait()
        assert later.tokens == alone(CONFIG, P, 8)[0]
        assert e.scheduler.counts.generation_tokens == before + 8  # a counter never goes back
        assert (e.telemetry.finished["error"], e.telemetry.finished["length"]) == (2, 1)
        await idle_check(e)
        await e.stop()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_was_said_to_a_dying_engine_is_not_said_to_the_next() -> None:
    async def main() -> None:
        gate = threading.Semaphore(0)
        fail = failing(0, error=RuntimeError("device lost"))
        runner = PagedStub(CONFIG.block_size, before=lambda: (gate.acquire(), fail()))
        e = Engine(CONFIG, runner, runner.eos_ids, "stub", backoff_s=0.001)
        e.start()
        leaver, late = Client(e, P), Client(e, [9, *P])
        while not e.scheduler.running:
            await asyncio.sleep(0.001)
        e.abort(leaver.sequence)  # in the step that fails: neither it nor `late` is known to the next scheduler
        later = Client(e, [8, *P])
        gate.release(1000)
        for client in (late, later):
            await client.ended.wait()
            assert client.outputs[-1].finish_reason == "error"
        while e.down:
            await asyncio.sleep(0.001)
        await idle_check(e)
        last = Client(e, P)
        await last.ended.wait()
        assert last.tokens == alone(CONFIG, P, 8)[0]
        assert (len(e.crashes), e.queued, e.telemetry.restarts) == (1, 0, 1)
        await e.stop()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_that_comes_again_and_again_ends_the_engine_after_the_runner_was_loaded_anew() -> None:
    async def main() -> None:
        said: list[str] = []
        loads: list[PagedStub] = []
        ended: list[str] = []

        def load() -> PagedStub:
            if len(loads) == 1:
                loads.append(loads[0])
                raise OSError("the file is gone")  # a load that fails is a fault as well
            loads.append(PagedStub(CONFIG.block_size, before=failing(*range(100), error=ValueError("again"))))
            return loads[-1]

        e = Engine(
            CONFIG, load(), frozenset(), "stub", reload=load, tell=said.append, backoff_s=0.001,
            on_end=lambda: ended.append(e.stopped),
        )  # fmt: skip
        e.start()
        while not e.stopped:
            if not e.down:
                client = Client(e, P)
                await asyncio.wait_for(client.ended.wait(), 60)
                assert client.outputs[-1].finish_reason == "error"
            await asyncio.sleep(0.001)
        assert "6 times within 60 s, at last by ValueError: again; it is not restarted any more" in e.stopped
        assert [line.rpartition(" in ")[2] for line in said[:-1]] == [
            "0.001 s",
            "0.002 s",
            "0.004 s",
            "0.008 s",
            "0.016 s",
        ]
        assert (said[-1], ended) == (e.stopped, [e.stopped])
        assert len(loads) == 5  # the first, one that failed, three more; the first restart kept the runner it had
        with pytest.raises(EngineDownError) as down:
            Client(e, P)
        assert down.value.retry_after_s is None
        await e.stop()

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_faults_that_are_far_apart_are_forgiven() -> None:
    async def main() -> None:
        ahead_s = 0

        def now_ns() -> int:
            return time.monotonic_ns() + ahead_s * 1_000_000_000

        runner = PagedStub(CONFIG.block_size, before=failing(*range(20), error=RuntimeError("device lost")))
        e = Engine(CONFIG, runner, runner.eos_ids, "stub", now_ns, backoff_s=0.001)
        e.start()
        for _ in range(20):
            await Client(e, P).ended.wait()
            ahead_s += 30
            while e.down:
                await asyncio.sleep(0.001)
        assert len(e.crashes) <= 2
        assert not e.stopped
        await e.stop()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["stall", "slow_step"])
def test_a_planted_wait_does_not_keep_the_engine_from_stopping(kind: str) -> None:
    async def main() -> None:
        e, _ = engine(before=lambda: time.sleep(0.1))
        e.plant(faults.read({"kind": "stall", "seconds": 600} if kind == "stall" else {"kind": kind, "factor": 1000}))
        client = Client(e, P)
        await asyncio.sleep(0.05)
        assert not client.outputs
        await asyncio.wait_for(e.stop(), 60)
        assert client.ended.is_set()

    asyncio.run(main())


TORCH_OOM = type("OutOfMemoryError", (RuntimeError,), {})
NO_MEMORY = [
    MemoryError(),
    TORCH_OOM("CUDA out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda e: type(e).__name__)
def test_a_failed_allocation_costs_nobody_a_token(error: Exception) -> None:
    async def main() -> None:
        e, runner = engine(before=failing(2, 5, 6, error=error))
        clients = [Client(e, [i, *P]) for i in range(4)]
        for i, client in enumerate(clients):
            await client.ended.wait()
            assert client.tokens == alone(CONFIG, [i, *P], 8)[0]
        assert e.telemetry.failed_allocations == 3
        assert not e.crashes
        assert max(len(step) for step in runner.steps) == 4
        await idle_check(e)
        await e.stop()

    asyncio.run(main())


def test_who_needs_more_memory_than_there_is_ends_alone() -> None:
    class Small(PagedStub):
        """Has memory for so many contexts a call that one long one is too much."""

        def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
            if sum(len(s.token_ids) for s, _ in work) > 30:
                raise MemoryError
            return super().execute(work)

    async def main() -> None:
        config = replace(CONFIG, num_blocks=40)
        runner = Small(config.block_size)
        e = Engine(config, runner, runner.eos_ids, "stub")
        runner.pool = e.scheduler.blocks
        e.start()
        long = Client(e, [3] * 25)  # 25 + 8 tokens: over 30 at its sixth
        others = [Client(e, [i, *P]) for i in range(3)]
        for i, other in enumerate(others):
            await other.ended.wait()
            assert other.tokens == alone(config, [i, *P], 8)[0]
        await long.ended.wait()
        assert [o.finish_reason for o in long.outputs] == [""] * 6 + ["oom"]
        assert long.tokens[:-1] == alone(config, [3] * 25, 8)[0][:6]
        assert e.telemetry.finished == {"length": 3, "oom": 1}
        await idle_check(e)
        await e.stop()

    asyncio.run(main())


def test_a_shutdown_ends_open_requests_with_an_error() -> None:
    async def main() -> None:
        gate = threading.Semaphore(1)
        e, _ = engine(before=gate.acquire)
        client = Client(e, P)
        while not client.outputs:
            await asyncio.sleep(0.001)
        gate.release()
        await e.stop()
        assert client.outputs[-1].finish_reason in ("error", "")
        assert client.ended.is_set()
        assert "shutting down" in e.stopped

    asyncio.run(main())


def test_an_idle_engine_takes_no_steps_and_no_time() -> None:
    async def main() -> None:
        e, runner = engine()
        await Client(e, P).ended.wait()
        steps = len(runner.steps)
        await asyncio.sleep(0.05)
        assert (len(runner.steps), e.scheduler.counts.steps) == (steps, steps)
        await e.stop()

    asyncio.run(main())


def test_the_parts_of_a_request_add_up_to_its_whole() -> None:
    async def main() -> None:
        e, _ = engine(replace(CONFIG, num_blocks=6))
        clients = [Client(e, [i, *P]) for i in range(5)]
        for client in clients:
            await client.ended.wait()
        assert e.scheduler.counts.preemptions > 0
        parts = {name.split(":")[1]: histogram for name, histogram in e.telemetry.histograms.items()}
        whole = parts["e2e_request_latency_seconds"]
        names = ["request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"]
        assert sum(parts[n].sum for n in names) == pytest.approx(whole.sum, rel=1e-9)
        assert [sum(parts[n].counts) for n in names] == [5, 5, 5]
        assert sum(parts["inter_token_latency_seconds"].counts) == 5 * 7
        assert parts["inter_token_latency_seconds"].sum == pytest.approx(parts[names[2]].sum, rel=1e-9)
        text = e.telemetry.text().decode()
        for line in (
            'vllm:request_success_total{engine="0",finished_reason="length",model_name="stub"} 5.0',
            'vllm:generation_tokens_total{engine="0",model_name="stub"} 40.0',
            'vllm:prompt_tokens_total{engine="0",model_name="stub"} 45.0',
            'vllm:kv_cache_usage_perc{engine="0",model_name="stub"} 0.0',
            'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="stub"} 5.0',
        ):
            assert sorted_labels(line) in {sorted_labels(row) for row in text.splitlines()}
        await e.stop()

    asyncio.run(main())


def sorted_labels(line: str) -> str:
    name, _, rest = line.partition("{")
    labels, _, value = rest.partition("}")
    return f"{name}{sorted(labels.split(','))}{value}"


def sequence(tokens: int, computed: int, seed: int | None = None) -> Sequence:
    return Sequence(0, [1] * tokens, tokens, SamplingParams(9, seed=seed), 0, computed=computed)


def test_a_step_takes_the_time_of_the_roofline() -> None:
    # Overhead 1 ms; weights 1 GB at 100 GB/s are 10 ms; 2 x 1e9 x n / 1e12 FLOP/s are 2 ms a token; 1 MB of KV a token.
    profile = Profile(1e-3, 1e9, 1e6, 1e9, 1e11, 1e12)
    assert step_s(profile, [(sequence(100, 99), 1)]) == pytest.approx(1e-3 + 10e-3 + 100e6 / 1e11)
    assert step_s(profile, [(sequence(50, 0), 50), (sequence(10, 9), 1)]) == pytest.approx(1e-3 + 102e-3 + 60e6 / 1e11)


def test_steps_that_follow_at_once_do_not_add_the_hosts_time() -> None:
    now = [0]

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9) + 70_000  # wakes late

    model = CostModel("sim:fast", 0, lambda: now[0], sleep)
    for step in range(1, 11):
        assert model.execute([(sequence(5, 4), 1)]) != [None]
        assert now[0] == step * 1_000_000 + 70_000
        now[0] += 200_000  # the engine's own work
    now[0] += 5_000_000  # nothing to do
    before = now[0]
    model.execute([(sequence(5, 4), 1)])
    assert now[0] == before + 1_070_000


def test_simulated_tokens_depend_on_seed_and_position_only() -> None:
    def answer(seed: int | None, config_seed: int = 0) -> list[int | None]:
        model = CostModel("sim:null", config_seed)
        return [model.execute([(sequence(n, 0, seed), n)])[0] for n in range(10, 40)]

    assert answer(1) == answer(1, config_seed=5) != answer(2)
    assert answer(None, 2) == answer(2)
    assert set(answer(1)) <= set(range(ord("a"), ord("z") + 1))
    assert len(set(answer(1))) > 10
    assert CostModel("sim:null").execute([(sequence(10, 0), 9)]) == [None]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_loads_and_runs(profile: str) -> None:
    runner, tokenizer = cost_model.load(EngineConfig(model=f"sim:{profile}"))
    assert runner.name == f"sim:{profile}"
    (token,) = runner.execute([(sequence(3, 0), 3)])
    assert token is not None
    assert tokenizer.decode([token]).islower()


def test_an_unknown_profile_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"model is 'sim:8b'.*sim:fast"):
        CostModel("sim:8b")


def test_a_count_below_one_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0; would be right: 1 or more"):
        EngineConfig(num_blocks=0)
