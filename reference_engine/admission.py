"""Whether a request may join the queue, and when it is worth another try. Pure: the caller has the clock."""

import math
from typing import NamedTuple

MEMORY_S = 10.0  # busy seconds after which a step's weight in the recent rate has fallen to 1/e
LONGEST_RETRY_S = 600


class Line(NamedTuple):
    """The queue as the step loop left it; one object, so that another thread reads figures of one moment."""

    left: int = 0  # sequences that have left the queue since the start: scheduled, or ended in it
    left_tokens: int = 0  # their prompts and longest answers
    seats: int = 0  # that those who come now could take at once


class Refused(Exception):  # noqa: N818 - says what happened to the request
    """No place now. `reason`: queue_full | draining | timeout | oom | bodies."""

    def __init__(self, reason: str, text: str, retry_after_s: int) -> None:
        super().__init__(text)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Rate:
    """Tokens computed a second of stepping, lately: idle time says nothing about what the engine can do."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """One step."""
        keep = math.exp(-seconds / MEMORY_S)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    def per_s(self) -> float | None:
        """None before the first step that took time."""
        return self._tokens / self._seconds if self._seconds else None


def retry_after_s(queued_tokens: int, tokens_per_s: float | None) -> int:
    """Whole seconds until who waits now will have been served, if all answers are as long as they may be; at least 1.

    1, too, where nothing was measured yet.
    """
    if not tokens_per_s:
        return 1
    return min(LONGEST_RETRY_S, max(1, math.ceil(queued_tokens / tokens_per_s)))


def is_full(queued: int, seats: int, max_queue: int) -> bool:
    """Whether one more would have `max_queue` waiting before it, beyond those that find a seat."""
    return bool(max_queue) and queued - seats >= max_queue
