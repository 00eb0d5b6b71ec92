"""What a cell plans by: how long its requests take alone."""

import pytest

from llm_bench.bodies import Ask
from llm_bench.cell import seconds_alone
from llm_bench.probe import Probe
from llm_bench.request import Request

STREAMED = Probe(["m"], "m", None, True, True, True, False, Ask("m"), 4.0, 1.0, 1.0, 1.0, 50.0, 10.0, 400.0, 32, [])
LONG = [Request(tokens_in=9, tokens_out=64), Request(tokens_in=9, tokens_out=0), Request(tokens_in=9, tokens_out=128)]


def test_a_mean_answer_takes_as_much_longer_as_it_is_longer() -> None:
    assert seconds_alone(LONG, STREAMED) == pytest.approx(0.4 * 96 / 32)
    estimated = STREAMED._replace(usage_in_stream=False)  # by its events
    assert seconds_alone(LONG, estimated) == pytest.approx(0.4 * 96 / 32)


def test_an_answer_that_nobody_counts_is_not_taken_for_one_token() -> None:
    """A pass of 2 ms would be planned at 34 times that: its cell of 10 s would run out of requests in 0.3 s."""
    once = STREAMED._replace(usage_in_stream=False, ttft_ms=None, tpot_ms=None, alone_ms=2.0, alone_tokens=1)
    assert seconds_alone(LONG, once) == pytest.approx(0.002)
