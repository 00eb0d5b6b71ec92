"""Joules that the GPUs of this machine drew while a cell was measured, against what was answered meanwhile.

NVML's counter of energy where the GPU has one, else the mean of its power over the time. Untried on a real GPU.
"""

from dataclasses import replace
from typing import NamedTuple

from llm_bench.columns import Cell
from llm_bench.metrics import tokens_in_window
from llm_bench.scrape import GPU, Scrape
from llm_bench.series import outcome_in
from llm_bench.server_metrics import Figures
from llm_bench.windows import Window


class Energy(NamedTuple):
    """Between two scrapes. All of each GPU's: what it draws idle, and for others, is in it."""

    joules: float
    seconds: float
    answers: int  # ok ones that ended between them
    tokens: float | None  # output tokens that came between them, of ok and cut answers; None where not all are known
    source: str

    @property
    def watts(self) -> float:
        return self.joules / self.seconds

    @property
    def per_answer(self) -> float | None:
        """J an ok answer."""
        return self.joules / self.answers if self.answers else None

    @property
    def per_thousand_tokens(self) -> float | None:
        """J per 1,000 output tokens."""
        return 1e3 * self.joules / self.tokens if self.tokens else None

    @property
    def text(self) -> str:
        parts = [f"{self.joules:,.0f} J in {self.seconds:.1f} s ({self.watts:,.0f} W)"]
        if self.per_thousand_tokens is not None:
            parts.append(f"{self.per_thousand_tokens:,.4g} J per 1k output tokens")
        if self.per_answer is not None:
            parts.append(f"{self.per_answer:,.4g} J an answer")
        return f"energy of this machine's GPUs: {', '.join(parts)}; by {self.source}, idle draw and others' work in it"


def of(cell: Cell, window: Window, scraped: Scrape | None) -> Energy | None:
    """Of a cell as a run keeps it, with what was scraped beside it."""
    if scraped is None:
        return None
    return spent(cell, window, scraped.figures(window.start_ns, window.end_ns).get(GPU))


def spent(cell: Cell, window: Window, gpu: Figures | None) -> Energy | None:
    """`gpu`: what was scraped of the GPUs in or around the window; None where that has neither energy nor power."""
    if gpu is None or not gpu.seconds:
        return None
    counted, power = gpu.of.get("gpu_energy"), gpu.of.get("gpu_power")
    if counted is not None and counted.value and not counted.resets:
        joules, source = counted.value, "NVML's energy counter"
    elif power is not None and power.value is not None:
        joules = power.value * gpu.seconds
        source = f"the mean of NVML's power over {gpu.scrapes} scrapes"
    else:
        return None
    span = replace(window, start_ns=gpu.start_ns, end_ns=gpu.end_ns)
    ended = outcome_in(cell, "ok") & (cell["end_ns"] >= gpu.start_ns) & (cell["end_ns"] < gpu.end_ns)
    tokens = tokens_in_window(cell, span, outcome_in(cell, "ok", "cut_at_end"))
    return Energy(joules, gpu.seconds, int(ended.sum()), None if isinstance(tokens, str) else tokens, source)
