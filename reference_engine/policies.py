"""Who is served first: one key per policy. The smallest key is scheduled first, the largest is preempted first."""

from collections.abc import Callable

from reference_engine.sequence import Sequence

POLICIES: dict[str, Callable[[Sequence], tuple[int, ...]]] = {
    "fcfs": lambda s: (s.arrival,),
    "priority": lambda s: (s.priority, s.arrival),
}
