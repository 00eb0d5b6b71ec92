"""`long_prefill_token_threshold`: one prompt's part of a step has an end, and nothing else of the scheduler changes."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.config import EngineConfig
from reference_engine.virtual import Arrival, Simulation
from tests.stub_runner import Drive, alone, answer

SMALL = EngineConfig(block_size=4, num_blocks=6, max_num_batched_tokens=64)
LONG, SHORT = list(range(40)), [1, 2, 3, 4]
ROOMY = replace(SMALL, num_blocks=40, max_num_batched_tokens=8)


def capped(threshold: int) -> EngineConfig:
    return replace(ROOMY, long_prefill_token_threshold=threshold)


def test_who_comes_behind_a_long_prompt_shares_its_steps() -> None:
    for threshold, first_step in ((0, 5), (5, 0), (8, 5), (100, 5)):  # a cap of the whole step is none
        drive = Drive(capped(threshold))
        drive.submit(LONG, 1)
        drive.submit(SHORT[:3], 1)
        drive.finish()
        steps = drive.runner.steps
        assert next(i for i, step in enumerate(steps) if any(number == 1 for number, _ in step)) == first_step
        assert sum(n for step in steps for number, n in step if number == 0) == len(LONG)


def test_a_known_schedule() -> None:
    drive = Drive(capped(3))
    drive.submit(LONG[:7], 2)
    drive.submit(LONG[10:17], 1)
    drive.submit(SHORT, 1)
    drive.finish()
    # The third gets what the first two leave of a step of eight; a decode is one token and knows no cap.
    assert drive.runner.steps == [
        [(0, 3), (1, 3), (2, 2)], [(0, 3), (1, 3), (2, 2)], [(0, 1), (1, 1)], [(0, 1)],
    ]  # fmt: skip


@pytest.mark.parametrize(("longs", "first_step"), [(1, 0), (2, 3), (4, 6)])
def test_the_cap_is_each_prompts_own_so_that_several_long_ones_still_fill_a_step(longs: int, first_step: int) -> None:
    """Half a step each: two leave nothing over until one of them ends, as with vLLM's knob of this name."""
    drive = Drive(capped(4))
    for i in range(longs):
        drive.submit(LONG[i : i + 12], 1)
    drive.submit(SHORT[:3], 1)
    drive.finish()
    steps = drive.runner.steps
    assert steps[0][:2] == [(0, 4), (1, 3 if longs == 1 else 4)]
    assert next(i for i, step in enumerate(steps) if any(number == longs for number, _ in step)) == first_step


def test_who_decodes_has_its_token_before_any_long_prompt_that_came_later() -> None:
    drive = Drive(capped(4))
    drive.submit(SHORT, 9)
    drive.step()
    for i in range(3):
        drive.submit(LONG[i : i + 12], 1)
    for _ in range(8):
        drive.step()
        assert drive.runner.steps[-1][0] == (0, 1)


loads = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    load=loads,
    threshold=st.integers(1, 12),
    budget=st.integers(1, 16),
    batching=st.sampled_from(["static", "dynamic", "continuous"]),
    blocks=st.integers(13, 40),
)
def test_no_step_gives_one_more_than_its_part_and_every_request_ends_with_its_tokens(
    load: list[tuple[int, int, int]], threshold: int, budget: int, batching: str, blocks: int
) -> None:
    config = replace(
        SMALL, num_blocks=blocks, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold,
        batching=batching, max_wait_ms=0,
    )  # fmt: skip
    drive, coming = Drive(config), sorted(enumerate(load), key=lambda item: item[1][2])
    prompts: dict[int, list[int]] = {}
    for _ in range(2_000):  # far more than are needed: one who starved would still be there
        while coming and coming[0][1][2] <= len(drive.runner.steps):
            number, (prompt, made, _) = coming.pop(0)
            prompts[len(drive.submitted)] = Random(number).choices(range(50), k=prompt)
            drive.submit(prompts[len(drive.submitted)], made)
        if not coming and not drive.scheduler.busy:
            break
        drive.step()  # checks the invariants of pool and queues
        step = drive.runner.steps[-1] if drive.runner.steps else []
        assert all(n <= threshold for _, n in step)
        assert sum(n for _, n in step) <= budget
        if not drive.scheduler.busy and coming:
            coming[0] = (coming[0][0], (*coming[0][1][:2], 0))  # nothing runs: the next comes now
    assert not drive.scheduler.busy
    assert [s.finish_reason for s in drive.submitted] == ["length"] * len(load)
    for sequence in drive.submitted:
        own = alone(config, prompts[sequence.id], sequence.params.max_tokens)[0]
        assert answer(sequence) == own, "a cap changed a token"


def test_short_prompts_do_not_wait_for_a_long_one_to_end() -> None:
    """reports/interference in small: 20,000 tokens take a second, and the chat comes in the middle of it."""
    base = EngineConfig(model="sim:8b-h100", num_blocks=4096, max_num_batched_tokens=512, prefix_caching=False)
    arrivals = [Arrival(0.0, [1] * 20_000, 4), *(Arrival(0.1 + i / 50, [i + 2] * 150, 30) for i in range(20))]
    waited = {}
    for threshold in (0, 256):
        sequences = Simulation(replace(base, long_prefill_token_threshold=threshold)).run(arrivals)
        waited[threshold] = [(s.first_token_ns - s.arrived_ns) / 1e9 for s in sequences]
    assert max(waited[256][1:]) < 0.2 * max(waited[0][1:])
    assert waited[0][0] < waited[256][0]  # it is the long one that pays


def test_a_cap_without_chunks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="long_prefill_token_threshold is 8 and chunked prefill is off"):
        EngineConfig(long_prefill_token_threshold=8, chunked_prefill=False)
    with pytest.raises(ValueError, match="long_prefill_token_threshold is -1; would be right: 0 or more"):
        EngineConfig(long_prefill_token_threshold=-1)
