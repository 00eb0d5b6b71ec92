"""What a check of a cell may look at when it asks for reasons to distrust it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from llm_bench import metrics
from llm_bench.columns import Cell
from llm_bench.metrics import Value
from llm_bench.series import due_in, outcome_in
from llm_bench.windows import Window

NO_END = "no end"  # the reason of a cell that run.json lists and says no more of
STOPPED = {
    "interrupted": "the run was interrupted",
    "target gone": "the target no longer answered",
    NO_END: "it has no end: killed, or stopped by an error",
}


def stopped(reason: str) -> str:
    """What ended a cell early, in words: `worker 1 killed by signal 9`, or of STOPPED. "" for other reasons."""
    if reason.startswith("worker "):
        _, number, how = (*reason.split(maxsplit=2), "died")[:3]
        return f"worker {number} died ({how})"
    return STOPPED.get(reason, "")


Effect = Literal["too low", "too high", "either way"]
TOO_LOW: Effect = "too low"  # latencies flatter the target
TOO_HIGH: Effect = "too high"
EITHER_WAY: Effect = "either way"


class Finding(NamedTuple):
    """What a check found: its evidence with figures, what that likely does to latencies, and what to do about it.

    Rates err the other way: where latencies are too low, tokens/s and requests/s are too high.
    """

    text: str
    effect: Effect
    advice: str = ""


class Facts(NamedTuple):
    """What a check may look at. `end`: how the driver says the cell ended, {} after a crash."""

    cell: Cell
    window: Window
    siblings: Sequence[Cell]  # the other cells of the run
    values: Sequence[Value]  # the figures asked for
    end: Mapping[str, Any]

    @property
    def due(self) -> np.ndarray:
        return due_in(self.cell, self.window)

    @property
    def ok(self) -> np.ndarray:
        return np.asarray(self.due & outcome_in(self.cell, "ok"))

    @property
    def stopped(self) -> str:
        """What ended the cell before its time, in words: no setting of the user's would have helped."""
        return stopped(self.reason) or ("" if self.cell.complete else "the records break off")

    @property
    def reason(self) -> str:
        """What the driver says that the cell ended by, "" where it says nothing."""
        return str(self.end.get("reason") or "")

    def ended(self, name: str) -> float:
        """A number of the driver's last word, 0 where it did not say it."""
        return float(self.end.get(name) or 0)

    def header(self, section: str) -> Mapping[str, Any]:
        found = self.cell.header.get(section)
        return found if isinstance(found, Mapping) else {}

    def figure(self, name: str) -> float | None:
        return metrics.compute(name, self.cell, self.window).value
