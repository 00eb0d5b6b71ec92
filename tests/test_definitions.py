"""Every name that a report can show is defined, once."""

import pytest

from llm_bench import metrics
from llm_bench.definitions import TERMS, definitions


def test_every_metric_has_a_meaning_and_is_said_once() -> None:
    found = list(definitions(metrics.names()))
    assert len({d.name for d in found}) == len(found)
    assert {metrics.parse(name).of for name in metrics.names()} < {d.name for d in found}
    assert all(d.meaning for d in found)
    assert {"mean", "std", "min", "max", "p50, p90, p95, p99, p99_9"} < {d.name for d in found}


@pytest.mark.parametrize(("names", "said"), [
    (["ttft_p50", "ttft_p95", "ttft_mean"], ["ttft", "p50, p95", "mean"]),
    (["error_rate", "in_flight"], ["error_rate", "in_flight"]),
])  # fmt: skip
def test_only_what_is_shown_is_defined(names: list[str], said: list[str]) -> None:
    found = list(definitions(names))
    assert [d.name for d in found] == [*said, *TERMS]
    assert {d.name: d.unit for d in found}[said[0]] == {"ttft": "ms", "error_rate": "share"}[said[0]]
