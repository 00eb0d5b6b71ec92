"""Who is served first: one key per policy. The smallest key is scheduled first, the largest is preempted first."""

from collections.abc import Callable

from reference_engine.sequence import Sequence

POLICIES: dict[str, Callable[[Sequence], tuple[float, ...]]] = {
    "fcfs": lambda s: (s.arrival,),
    "priority": lambda s: (s.priority, s.arrival),
    "fair": lambda s: (s.share, s.arrival),
}

# When who waits may join who runs:
#   static      a batch is filled, has the blocks of its longest answers, keeps them to its end; then the next begins
#   dynamic     a batch is what has come within the wait; who ends gives up memory, the seat stays empty to the end
#   continuous  at every step
BATCHING = ("static", "dynamic", "continuous")

# What becomes of the keys and values of who gives way: computed again, or copied to the host's memory and back.
PREEMPTIONS = ("recompute", "swap")


class Shares:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996): each client's work begins where its last one would have ended.

    Virtual time is the start tag of what was scheduled last. A client that was idle has no credit: its next tag is now.
    """

    MOST_CLIENTS = 1024  # kept before those that are not ahead of the others are forgotten

    def __init__(self) -> None:
        self.now = 0.0
        self._ends: dict[str, float] = {}

    def tag(self, client: str, tokens: int) -> float:
        """Start tag of a request of so many tokens."""
        start = max(self.now, self._ends.get(client, 0.0))
        if len(self._ends) >= self.MOST_CLIENTS:
            self._ends = {c: end for c, end in self._ends.items() if end > self.now}
        self._ends[client] = start + tokens
        return start

    def scheduled(self, share: float) -> None:
        self.now = max(self.now, share)
