"""Dynamic batching of single passes: who joins which batch, and how long a batch waits. Pure: the caller has the clock.

The knobs are those of Triton's dynamic batcher and of Ray Serve's: most inputs of a batch, longest wait for it to be
filled, most inputs that may wait, longest that a request may wait, and instances that compute a batch each at a time.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class Limits(NamedTuple):
    max_batch: int  # inputs
    max_tokens: int  # of a batch's inputs together; no single input has more
    max_wait_ns: int = 0  # of the oldest for others to join it; 0: whoever waits when an instance is idle
    max_queue: int = 0  # inputs that wait while no instance is idle; 0: no limit
    timeout_ns: int = 0  # of a request none of whose inputs was begun; 0: no limit
    instances: int = 1


@dataclass(slots=True, eq=False)
class Job:
    """A request: inputs that are computed in order, in one batch or, where they are too many, in several."""

    inputs: list[list[int]]
    arrived_ns: int
    batches: list["Batch"] = field(default_factory=list)  # in the order in which they began

    @property
    def ended(self) -> bool:
        computed = sum(sum(job is self for job, _ in batch.members) for batch in self.batches if batch.ended_ns)
        return computed == len(self.inputs)


@dataclass(slots=True, eq=False)
class Batch:
    """What an instance computes at once. No member's input is empty."""

    members: list[tuple[Job, int]]  # (job, number of its input)
    begun_ns: int
    ended_ns: int = 0  # 0: not yet

    @property
    def inputs(self) -> list[list[int]]:
        return [job.inputs[i] for job, i in self.members]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.inputs))


class Spent(NamedTuple):
    """Where a request's time went, ns; the sum is that from its arrival to the end of its last batch."""

    queue: int  # none of its inputs was being computed
    compute: int  # at least one was


def spent(job: Job) -> Spent:
    """Of a job whose batches have all ended."""
    compute, until_ns = 0, job.arrived_ns
    for batch in job.batches:
        compute += max(0, batch.ended_ns - max(batch.begun_ns, until_ns))
        until_ns = max(until_ns, batch.ended_ns)
    return Spent(until_ns - job.arrived_ns - compute, compute)


@dataclass(slots=True)
class Counts:
    """Totals since the start, of batches that have ended."""

    batches: int = 0
    inputs: int = 0
    tokens: int = 0
    compute_ns: int = 0


class Batcher:
    """Inputs that wait, in the order of arrival: none overtakes another, so a batch is always the head of the line."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: deque[tuple[Job, int]] = deque()
        self.idle = limits.instances
        self.counts = Counts()

    @property
    def full(self) -> bool:
        """Whether a request that comes now is to be refused. Who finds an idle instance waits for no one's end."""
        most = self.limits.max_queue
        return bool(most) and not self.idle and len(self.waiting) >= most

    def submit(self, job: Job) -> None:
        """It enters whole, to be followed by `take`: a queue that is not full may so be outgrown by one request."""
        assert job.inputs
        assert all(0 < len(ids) <= self.limits.max_tokens for ids in job.inputs)
        self.waiting += [(job, i) for i in range(len(job.inputs))]

    def take(self, now_ns: int) -> Batch | None:
        """The batch that begins now, if one does: to be called until it gives none."""
        if not self.idle or not self.waiting:
            return None
        size, filled = self._head()
        if not filled and now_ns < self.waiting[0][0].arrived_ns + self.limits.max_wait_ns:
            return None
        batch = Batch([self.waiting.popleft() for _ in range(size)], now_ns)
        for job in dict.fromkeys(job for job, _ in batch.members):
            job.batches.append(batch)
        self.idle -= 1
        return batch

    def end(self, batch: Batch, now_ns: int) -> list[Job]:
        """Its instance is idle again; jobs that have thereby ended."""
        batch.ended_ns = now_ns
        self.idle += 1
        assert self.idle <= self.limits.instances
        self.counts.batches += 1
        self.counts.inputs += len(batch.members)
        self.counts.tokens += batch.tokens
        self.counts.compute_ns += now_ns - batch.begun_ns
        return [job for job in dict.fromkeys(job for job, _ in batch.members) if job.ended]

    def drop(self, job: Job) -> None:
        """What of it still waits is not computed."""
        if any(other is job for other, _ in self.waiting):
            self.waiting = deque((other, i) for other, i in self.waiting if other is not job)

    def expire(self, now_ns: int) -> list[Job]:
        """Drop those that waited too long. Whose first input has begun may wait for the rest."""
        if not self.limits.timeout_ns:
            return []
        late = [j for j, i in self.waiting if i == 0 and now_ns - j.arrived_ns >= self.limits.timeout_ns]
        for job in late:
            self.drop(job)
        return late

    def due_ns(self) -> int | None:
        """When `take` or `expire` will have something to do if nothing else happens; None: never."""
        dues = [self.waiting[0][0].arrived_ns + self.limits.max_wait_ns] if self.idle and self.waiting else []
        if self.limits.timeout_ns:
            dues += [job.arrived_ns + self.limits.timeout_ns for job, i in self.waiting if i == 0][:1]
        return min(dues, default=None)

    def _head(self) -> tuple[int, bool]:
        """How many the next batch would have, and whether it is filled: one more would be too many."""
        size = tokens = 0
        for job, i in self.waiting:
            tokens += len(job.inputs[i])
            if size == self.limits.max_batch or tokens > self.limits.max_tokens:
                return size, True
            size += 1
        return size, size == self.limits.max_batch or tokens == self.limits.max_tokens
