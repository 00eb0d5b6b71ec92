"""Rules of a gate: `ttft_p95<=+5%` -> Rule: how far a candidate's figure may be from the baseline's.

The grammar is METRICS.md's, section Statistics, comparison of two arms. Beside it: which doubts concern which metrics.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench import metrics, pairs
from llm_bench.client import BUSY, LATE, LIMITED, STALLED
from llm_bench.errors import BenchError
from llm_bench.metrics import WHOLE, Metric
from llm_bench.series import SERIES

_RULE = re.compile(
    r"(?P<name>[a-z0-9_]+)\s*(?P<op><=|>=)\s*(?P<change>[+-](?:\d+(?:\.\d+)?|\.\d+))\s*(?P<unit>%|pp)", re.A
)
MOST_PERCENT = 1000.0  # a rule that allows eleven times as much is a slip of the keyboard
NEEDS_SLO = ("slo_attainment", "goodput")


class Rule(NamedTuple):
    """What a candidate's figure may be, relative to the baseline's. `change`: 0.05 of +5% and of +5pp."""

    text: str  # as typed, without blanks
    metric: Metric
    op: pairs.Rule
    change: float
    points: bool  # percentage points of a share, which may be 0; else percent

    @property
    def side(self) -> int:
        """1 where a larger difference is worse, -1 where a smaller one is."""
        return 1 if self.op == "<=" else -1

    @property
    def margin(self) -> float:
        """The change as a difference."""
        return self.change if self.points else math.log1p(self.change)

    def differences(self, baseline: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        """Of figures (n,) of n pairs: log ratios, in points plain ones. ValueError for a figure without logarithm."""
        return candidate - baseline if self.points else pairs.log_ratios(baseline, candidate)

    def as_change(self, difference: float) -> float:
        """A difference as a share: 0.05 for +5% or for +5 percentage points."""
        return difference if self.points else math.expm1(difference)

    def in_words(self, difference: float) -> str:
        return changed(self.as_change(difference), points=self.points)

    def middle(self, figures: np.ndarray) -> float:
        """The mean (n,) that goes with the mean difference: geometric for percent."""
        return float(np.mean(figures)) if self.points else math.exp(float(np.mean(np.log(figures))))


def free(name: str) -> Rule:
    """No rule: only how the differences of a metric are taken. Raises BenchError for an unknown metric."""
    metric = metrics.parse(name)
    return Rule(name, metric, "<=" if metric.better == "lower" else ">=", 0.0, metric.unit == "share")


def changed(share: float, *, points: bool) -> str:
    """`+5.92%`, `-0.5pp`: three digits, and nothing under a thousandth of a percent."""
    percent = round(float(f"{100 * share:.3g}"), 3) + 0.0  # no -0
    return f"{percent:+g}{'pp' if points else '%'}"


def parse(texts: Sequence[str]) -> list[Rule]:
    """`ttft_p95<=+5%`, `tokens_per_second>=-3%`, `error_rate<=+0.5pp`; several in a text are divided by commas.

    Raises BenchError for what is no rule, for a direction in which a figure gets better, and for two rules on one.
    """
    parts = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    rules = [_rule(part) for part in parts]
    names = [rule.metric.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(f"--rule: {name} has two rules, expected one")
    return rules


def _rule(text: str) -> Rule:
    match = _RULE.fullmatch(text)
    if match is None:
        raise BenchError(
            f"--rule {text!r}: expected metric<=+x%, metric>=-x% or metric<=+xpp with its sign, such as "
            "ttft_p95<=+5%, tokens_per_second>=-3%, error_rate<=+0.5pp"
        )
    metric, points, percent = metrics.parse(match["name"]), match["unit"] == "pp", float(match["change"])
    expected = "<=" if metric.better == "lower" else ">="
    if match["op"] != expected:
        raise BenchError(f"--rule {text!r}: of {metric.name} {metric.better} is better, expected {expected}")
    if points != (metric.unit == "share"):
        right = f"points, {match['change']}pp" if metric.unit == "share" else f"percent, {match['change']}%"
        raise BenchError(f"--rule {text!r}: {metric.name} is in {metric.unit}, expected a change in {right}")
    least, most = (-100.0, 100.0) if points else (-99.9, MOST_PERCENT)
    if not least <= percent <= most:
        raise BenchError(f"--rule {text!r}: expected a change from {least:g} to {most:+g}{match['unit']}")
    return Rule("".join(text.split()), metric, match["op"], percent / 100, points)  # type: ignore[arg-type]


# ---- which doubts concern which metrics

NOT_INTERLEAVED, OTHER_WORK, MISSING = "not interleaved", "not the same work", "missing cell"
TARGETS, NETWORK, WARMING, DRIFT, BURST = "targets differ", "network path", "warming", "drift", "burst streams"
FAILED, IDLE = "failed requests", "idle slots"

# Doubts about a cell that are no reason against comparing it with another, and why.
HARMLESS: Mapping[str, str] = {
    "too few requests": "it is about the interval of one run; here the spread between pairs decides",
    "lengths not pinned": "what the arms delivered is compared itself",
    "end unproven": "a server that never says it is the same in both arms, and what they delivered is compared",
    "retries": "latency runs from the first attempt, so that it holds them",
    "trace changed": "what the arms sent is compared itself",
}
# Doubts that a user may accept as intended. Others are about the figures themselves.
ACCEPTABLE: tuple[str, ...] = (NOT_INTERLEAVED, TARGETS, NETWORK, "delivered tokens", "prompt tokens")
ACCEPTABLE += ("repeated prompts", "cached prompts")

COUNTED = ("error_rate", "first_attempt_success", "cancel_rate", "drop_rate")  # how many, whatever the time
OF_GAPS = ("tpot", "tpot_decode", "itl", "stall", "output_speed", "fluidity", "on_time_share", "zero_gap_share")
OF_SERVER = ("queue", "prefill", "decode", "server_ttft", "server_tpot")  # no stamp of the client's is in them


def _timed(metric: Metric) -> bool:
    return metric.name not in COUNTED


def _stamped(metric: Metric) -> bool:
    return _timed(metric) and metric.of not in OF_SERVER


def _token_counting(metric: Metric) -> bool:
    return bool(SERIES[metric.of].counts_tokens if metric.reducer else WHOLE[metric.of].tokens_of)


def _prompt_counting(metric: Metric) -> bool:
    return not metric.reducer and WHOLE[metric.of].prompts


# What a kind of doubt is about; one that is not here is about every metric.
CONCERNS: Mapping[str, Callable[[Metric], bool]] = {
    FAILED: lambda metric: metric.name not in (*COUNTED, *NEEDS_SLO),  # of others the failed are left out
    "estimated tokens": _token_counting,
    "usage disputed": _token_counting,
    "planned prompt tokens": _prompt_counting,
    **dict.fromkeys((LATE, STALLED, BUSY, LIMITED, IDLE, "host lateness"), _stamped),
    **dict.fromkeys((WARMING, DRIFT), _timed),
    NETWORK: lambda metric: _stamped(metric) and metric.of not in OF_GAPS,  # the same way for every token is in no gap
    BURST: lambda metric: metric.of in (*OF_GAPS, *NEEDS_SLO),
}


def counts(kind: str, metric: Metric, accepted: Sequence[str] = ()) -> bool:
    """Whether a doubt of a kind is about a metric, and neither harmless nor accepted. A kind not known here is."""
    if kind in HARMLESS or kind in accepted:
        return False
    return CONCERNS[kind](metric) if kind in CONCERNS else True
