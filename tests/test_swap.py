"""Preemption by swap: blocks go to the host's pool and come back, no token differs, none is computed twice."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine import kv_memory
from reference_engine.__main__ import main
from reference_engine.config import EngineConfig
from reference_engine.runner import ModelRunner, load
from reference_engine.scheduler import Copies, Output
from reference_engine.sequence import SamplingParams, Sequence
from tests.stub_runner import Drive, alone, answer
from tests.test_engine_server import COMPLETIONS, call, end, launch, metric

CONFIG = EngineConfig(
    block_size=4, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=32, prefix_caching=False, preemption="swap",
    swap_blocks=40,
)  # fmt: skip
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 4, 3, 2, 1], [3] * 9, [5, 5, 4]]


class Swapping(Drive):
    """A drive whose stub copies its memory as the scheduler says; what is in a block that was taken is gone."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.host: dict[tuple[int, int], int] = {}

    def step(self) -> list[Output]:
        self.now += 1
        work = self.scheduler.step(self.config.max_num_batched_tokens, self.now)
        memory, offsets = self.runner.memory, range(self.config.block_size)
        for block, slot in self.scheduler.copies.out:
            self.host |= {(slot, i): memory[block, i] for i in offsets if (block, i) in memory}
        for block, slot in self.scheduler.copies.into:
            assert self.runner.pool is not None
            assert self.runner.pool.writable(block)
            memory |= {(block, i): self.host[slot, i] for i in offsets if (slot, i) in self.host}
        outputs = self.scheduler.commit(work, self.runner.execute(work), self.now)
        self.scheduler.check()
        return outputs


def computed(drive: Drive) -> int:
    return sum(n for step in drive.runner.steps for _, n in step)


def test_who_was_swapped_out_computes_nothing_again() -> None:
    drive = Swapping(CONFIG)
    sequences = [drive.submit(prompt, 16) for prompt in PROMPTS]
    drive.finish()
    assert [answer(s) for s in sequences] == [alone(CONFIG, prompt, 16)[0] for prompt in PROMPTS]
    counts = drive.scheduler.counts
    assert counts.preemptions >= 2
    assert counts.swapped_out == counts.swapped_in > 5
    assert computed(drive) == sum(len(p) + 15 for p in PROMPTS)  # each position once
    assert not any(s.recompute_total_ns for s in sequences)
    assert sum(s.evicted_total_ns for s in sequences) > 0
    assert len(drive.scheduler.slots) == CONFIG.swap_blocks
    by_recompute = Drive(replace(CONFIG, preemption="recompute", swap_blocks=0))
    for prompt in PROMPTS:
        by_recompute.submit(prompt, 16)
    by_recompute.finish()
    assert computed(by_recompute) > computed(drive)


def test_without_room_in_the_host_it_is_computed_again() -> None:
    config = replace(CONFIG, swap_blocks=1)
    drive = Swapping(config)
    sequences = [drive.submit(prompt, 16) for prompt in PROMPTS]
    drive.finish()
    assert [answer(s) for s in sequences] == [alone(config, prompt, 16)[0] for prompt in PROMPTS]
    assert drive.scheduler.counts.preemptions >= 2
    assert computed(drive) > sum(len(p) + 15 for p in PROMPTS)


@pytest.mark.parametrize("reason", ["abort", "timeout"])
def test_one_that_ends_swapped_out_gives_its_slots_back(reason: str) -> None:
    drive = Swapping(CONFIG)
    for prompt in PROMPTS:
        drive.submit(prompt, 16)
    while not drive.scheduler.counts.preemptions:
        drive.step()
    (victim,) = [s for s in drive.submitted if s.slots]
    drive.scheduler.abort(victim, reason, drive.now)
    drive.scheduler.check()
    assert len(drive.scheduler.slots) == CONFIG.swap_blocks
    drive.finish()


def test_a_planted_leak_of_a_slot_is_found() -> None:
    drive = Swapping(CONFIG)
    drive.submit(PROMPTS[0], 4)
    drive.scheduler.slots.pop()
    with pytest.raises(AssertionError, match="a slot is missing"):
        drive.step()
    drive.scheduler.slots.append(0)
    with pytest.raises(AssertionError, match="held twice"):
        drive.step()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 14)), min_size=1,
             max_size=7),
    st.integers(0, 12), st.integers(7, 14), st.booleans(), st.sampled_from(["continuous", "dynamic", "static"]),
    st.lists(st.integers(0, 6), max_size=12),
)  # fmt: skip
def test_any_load_ends_with_its_tokens(
    asks: list[tuple[list[int], int]], slots: int, blocks: int, caching: bool, batching: str, held: list[int]
) -> None:
    """Also with a prefix cache, and with memory under pressure in the first steps."""
    config = EngineConfig(
        block_size=4, num_blocks=blocks, max_num_seqs=3, max_num_batched_tokens=16, prefix_caching=caching,
        max_wait_ms=0, batching=batching, preemption="swap" if slots else "recompute", swap_blocks=slots,
    )  # fmt: skip
    drive = Swapping(config)
    sequences = [drive.submit(prompt, made) for prompt, made in asks]
    pressure = iter(held)
    for _ in range(2000):
        if not drive.scheduler.busy:
            break
        drive.scheduler.blocks.hold(next(pressure, 0))
        drive.step()
    assert [answer(s) for s in sequences] == [alone(config, prompt, made)[0] for prompt, made in asks]
    assert len(drive.scheduler.slots) == slots


def test_swap_and_its_memory_go_together() -> None:
    wrongs: list[dict[str, Any]] = [{"preemption": "swap"}, {"swap_blocks": 5}, {"swap_memory": "1GB"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="go together"):
            EngineConfig(**wrong)
    with pytest.raises(ValueError, match="preemption is 'flee'; would be right: recompute, swap"):
        Drive(EngineConfig(preemption="flee"))


# With keys and values


def generate(config: EngineConfig, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """(answers of 16 tokens, preemptions)."""
    runner, _ = load(config)
    assert isinstance(runner, ModelRunner)
    drive = Drive(config)
    pool = kv_memory.HostPool(runner, config.swap_blocks) if config.swap_blocks else None
    sequences = [Sequence(i, list(p), len(p), SamplingParams(16), i) for i, p in enumerate(prompts)]
    for sequence in sequences:
        drive.scheduler.submit(sequence)
    while drive.scheduler.busy:
        work = drive.scheduler.step(config.max_num_batched_tokens, 1)
        if pool:
            pool.copy(runner, drive.scheduler.copies)
        drive.scheduler.commit(work, runner.execute(work), 1)
        drive.scheduler.check()
    return [answer(s) for s in sequences], drive.scheduler.counts.preemptions


@pytest.mark.engine
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_a_models_tokens_are_the_same_swapped_and_alone(kind: str, kernels: str) -> None:
    config = replace(CONFIG, device="cpu", kv_cache_dtype=kind, cpu_kernels=kernels)
    prompts = [[(7 * i + j) % 200 for j in range(6 + 2 * i)] for i in range(4)]
    swapped, preemptions = generate(config, prompts)
    assert preemptions > 2
    one_by_one = [generate(config, [prompt])[0][0] for prompt in prompts]
    assert swapped == one_by_one


@pytest.mark.engine
def test_copies_are_of_whole_blocks_of_all_layers_there_and_back() -> None:
    runner, _ = load(replace(CONFIG, device="cpu", kv_cache_dtype="int8"))
    assert isinstance(runner, ModelRunner)
    cache = runner.model.cache
    assert cache.scales is not None
    cache.pool.random_(-127, 127)
    cache.scales.uniform_()
    pool, scales = cache.pool.clone(), cache.scales.clone()
    host = kv_memory.HostPool(runner, 5)
    host.copy(runner, Copies([(3, 1), (7, 4)], []))
    cache.pool[:, :, [3, 7]] = 0
    cache.scales[:, :, [3, 7]] = 0
    host.copy(runner, Copies([], [(0, 4), (3, 1)]))  # to another block, and to where it was
    for now, before in ((cache.pool, pool), (cache.scales, scales)):
        assert now[:, :, 0].equal(before[:, :, 7])
        assert now[:, :, 3].equal(before[:, :, 3])
        assert now[:, :, 1].equal(before[:, :, 1])
        assert not now[:, :, 7].any()
    host.copy(runner, Copies([(3, 2)], [(5, 2)]))  # out and back in one step
    assert cache.pool[:, :, 5].equal(pool[:, :, 3])


# Over HTTP


@pytest.mark.engine
def test_the_program_says_what_memory_went_where_and_swaps() -> None:
    async def main(port: int) -> None:
        prompts = [[i + 1] * 60 for i in range(6)]
        bodies = [{"prompt": p, "max_tokens": 40, "temperature": 0, "ignore_eos": True} for p in prompts]
        together = await asyncio.gather(*(call(port, COMPLETIONS, body) for body in bodies))
        apart = [await call(port, COMPLETIONS, body) for body in bodies]
        assert [r.json["choices"][0]["text"] for r in together] == [r.json["choices"][0]["text"] for r in apart]
        swapped = await metric(port, "reference_engine:swapped_out_blocks_total")
        assert swapped == await metric(port, "reference_engine:swapped_in_blocks_total") > 0
        state = (await call(port, "/v1/engine")).json
        assert (state["check"], state["free_blocks"]) == ("ok", 20)

    flags = ["--kv-memory", "640KiB", "--preemption", "swap", "--swap-memory", "4MiB", "--no-prefix-caching"]
    program = launch("--model", "tiny", *flags)
    assert program.process.stderr
    said = json.loads(program.process.stderr.readline())
    memory = said["runner"]["memory"]
    assert (memory["block_bytes"], memory["kv_bytes"], memory["swap_bytes"]) == (2**15, 20 * 2**15, 128 * 2**15)
    assert (said["config"]["num_blocks"], said["config"]["swap_blocks"]) == (20, 128)
    assert min(memory["weights_bytes"], memory["free_bytes"]) > 0
    asyncio.run(main(program.port))
    assert end(program) == 0


def test_a_simulated_model_has_nothing_to_swap() -> None:
    assert main(["--model", "sim:fast", "--preemption", "swap", "--swap-blocks", "5"]) == 2
