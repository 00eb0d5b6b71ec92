"""Watches an open loop of a search while it runs: is it clear already that its backlog grows without bound?"""

import numpy as np

from llm_bench import steady, windows
from llm_bench.search_evidence import OVERLOADED


class Backlog:
    """Watches an open loop while it runs: is it clear already that its backlog grows without bound?

    The rule that a window is judged by (steady.growth) is asked at each quarter of the plan, so that chance has three
    looks at most, and what has piled up has to be PILED of what arrived: a load of a third above capacity, or more.
    """

    PILED = 0.25
    QUARTERS = (0.25, 0.5, 0.75)

    def __init__(self, due_ns: np.ndarray, cap: int | None = None) -> None:
        """`due_ns` (n,): when each request is due, from the cell's start; all known before it."""
        self._due_s = np.sort(due_ns) / 1e9
        self._cap = cap
        self._marks = [q * float(self._due_s[-1]) for q in self.QUARTERS] if len(self._due_s) else []
        self._at_s: list[float] = [0.0]
        self._levels: list[tuple[int, int]] = [(0, 0)]

    def __call__(self, at_s: float, in_flight: int, ended: int) -> str:
        """At `at_s` since the start. Returns OVERLOADED when it is clear, else ""."""
        due = int(np.searchsorted(self._due_s, at_s, "right"))
        self._at_s.append(at_s)
        self._levels.append((in_flight, due - ended))
        if not self._marks or at_s < self._marks[0]:
            return ""
        self._marks.pop(0)
        return OVERLOADED if self._grows(self._due_s[:due]) else ""

    def _grows(self, due_s: np.ndarray) -> bool:
        if len(np.unique(due_s)) < windows.GROWTH_INSTANTS:
            return False
        seen_s, levels = np.array(self._at_s), np.array(self._levels)
        at_s = np.linspace(windows.OPEN_WARMUP_SHARE * seen_s[-1], seen_s[-1], steady.SAMPLES)
        # A level that is known at few moments would be a staircase, whose steps look like dependence.
        in_flight, in_system = (np.interp(at_s, seen_s, levels[:, i]) for i in (0, 1))
        inside = due_s[due_s >= at_s[0]]
        found = steady.growth(at_s, in_flight, in_system, inside, limit=self._cap)
        return found.growing and found.gained >= self.PILED * len(inside)
