"""Reasons to distrust a cell: figures, likely effect on latencies, and what to do about it; CHECKS is the table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llm_bench import same_work
from llm_bench.client import CLIENT_CHECKS
from llm_bench.columns import Cell
from llm_bench.facts import EITHER_WAY, TOO_HIGH, TOO_LOW, Effect, Facts, Finding
from llm_bench.host_checks import HOST_CHECKS
from llm_bench.metrics import Value
from llm_bench.same_work import Side
from llm_bench.sample_checks import SAMPLE_CHECKS
from llm_bench.series import single_pass
from llm_bench.windows import Window
from llm_bench.work_checks import WORK_CHECKS

LIKELY = {
    TOO_LOW: "Latencies are likely too low",
    TOO_HIGH: "Latencies are likely too high",
    EITHER_WAY: "Figures may be off either way",
}


class Doubt(NamedTuple):
    """`text`: the evidence. `effect`: on latencies; rates err the other way. `advice`: "" where there is none."""

    kind: str
    text: str
    effect: Effect = EITHER_WAY
    advice: str = ""

    @property
    def sentence(self) -> str:
        """Evidence, effect and advice, for people."""
        return ". ".join(filter(None, [self.text, LIKELY[self.effect], self.advice]))


def doubts(
    cell: Cell,
    window: Window,
    siblings: Sequence[Cell] = (),
    values: Sequence[Value] = (),
    end: Mapping[str, Any] | None = None,
) -> list[Doubt]:
    """Every doubt that the records, the header and the driver's last word give rise to, in the order of CHECKS."""
    facts = Facts(cell, window, siblings, values, end or {})
    return [Doubt(kind, *found) for kind, check in CHECKS.items() if (found := check(facts))]


# ---- other targets of the run ----


def _targets_differ(f: Facts) -> Finding | None:
    found = _differences(f, same_work.OF_WORK)
    advice = "Give all targets one model, tokenizer and precision, and pin lengths; or compare none of their figures"
    return Finding(f"{'; '.join(found)}: not the same work", EITHER_WAY, advice) if found else None


def _round_trips(f: Facts) -> Finding | None:
    found = _differences(f, same_work.OF_NETWORK)
    return Finding("; ".join(found), EITHER_WAY, "Measure both over the same path") if found else None


def _differences(f: Facts, checks: same_work.Checks) -> list[str]:
    """Against each other target of the same kind of work, at the same load."""
    mine, others = Side(_name(f.cell), f.cell), dict[str, Side]()
    passed = single_pass(f.cell)
    for cell in f.siblings:
        side = Side(_name(cell), cell)
        if side.name != mine.name and side.load == mine.load and cell.n and single_pass(cell) is passed:
            others.setdefault(side.name, side)
    return [d.text for other in others.values() for d in same_work.differences(mine, other, checks)]


def _name(cell: Cell) -> str:
    return str((cell.header.get("target") or {}).get("name", ""))


# The order of a report.
CHECKS: dict[str, Callable[[Facts], Finding | None]] = {
    **SAMPLE_CHECKS,
    **CLIENT_CHECKS,
    **HOST_CHECKS,
    **WORK_CHECKS,
    "targets differ": _targets_differ,
    "network path": _round_trips,
}
