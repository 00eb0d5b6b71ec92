"""What neighbours do to a class of requests: its figures beside them over its figures alone, with bounds."""

from collections.abc import Sequence
from typing import NamedTuple

from llm_bench import metrics
from llm_bench.metrics import Value
from llm_bench.stats import Interval

ONE_RUN, SEVERAL_RUNS = "at least 90%", "95%"  # how sure an interval is


class Factor(NamedTuple):
    """One metric of a class together with the others, over the same metric of the class alone.

    Of series alone: rates of the two are of windows that need not be as long, and a share of 0 has no factor.
    """

    name: str
    unit: str
    together: float | None
    alone: float | None
    value: float | None
    reason: str = ""  # why there is no value
    interval: Interval | None = None  # of `confidence`, or the refusal says why not
    refusal: str = ""
    confidence: str = ONE_RUN
    runs: int = 1


def factors(together: Sequence[Value], alone: Sequence[Value]) -> tuple[Factor, ...]:
    """Of one run: a factor for each series that both have."""
    own = {v.name: v for v in alone}
    return tuple(factor(v, own[v.name]) for v in together if v.name in own and metrics.parse(v.name).reducer)


def factor(together: Value, alone: Value) -> Factor:
    """Of one run. Its bounds are those of the ratio while each figure is anywhere in its own 95% interval.

    Both intervals hold at once in 90% of all runs at least, however the two depend on each other (Bonferroni), and
    where they do the ratio is within these bounds: so they hold at least as often, and mostly more.
    """
    head = (together.name, together.unit, together.value, alone.value)
    why = [f"{where}: {v.reason}" for where, v in (("together", together), ("alone", alone)) if v.value is None]
    if together.value is None or alone.value is None or not alone.value:
        return Factor(*head, None, "; ".join(why) or "alone it is 0")
    value = together.value / alone.value
    if refusal := _no_interval(together, "together") or _no_interval(alone, "alone"):
        return Factor(*head, value, refusal=refusal)
    mine, own = together.interval, alone.interval
    assert mine is not None and own is not None, "each has an interval or a refusal"
    if own.low <= 0:
        return Factor(*head, value, refusal="alone: its interval begins at 0")
    return Factor(*head, value, interval=Interval(mine.low / own.high, mine.high / own.low))


def _no_interval(v: Value, where: str) -> str:
    if v.interval:
        return ""
    return f"{where}: {v.refusal}" if v.refusal else f"a {metrics.parse(v.name).reducer} of one run has none"
