"""Queues whose truth is known: FCFS on several servers, lognormal service of mean 1 and CV 1, open and closed loop.

Times are in units of the mean service time. A run is a function of its seed alone, on any machine.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

SERVERS = 16
CV = 1.0
WARMUP = 4000  # arrivals before the first kept one: 20 relaxation times of the queue at 90% load
TTFT_SHARE = 0.05  # of its service a request waits for its first token once it is served


@dataclass(frozen=True, slots=True)
class Stays:
    """Requests in due order, each array (n,): when due, when its service began and ended."""

    due_s: np.ndarray
    begin_s: np.ndarray
    end_s: np.ndarray

    @property
    def ttft_s(self) -> np.ndarray:
        """The wait and a little of the service."""
        return np.asarray(self.begin_s - self.due_s + TTFT_SHARE * (self.end_s - self.begin_s))

    @property
    def e2e_s(self) -> np.ndarray:
        return np.asarray(self.end_s - self.due_s)

    def after(self, n: int) -> "Stays":
        """Without the first n requests."""
        return Stays(self.due_s[n:], self.begin_s[n:], self.end_s[n:])


def rng(*seed: int) -> np.random.Generator:
    """One stream of random numbers for each tuple of small integers."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))


def services(random: np.random.Generator, n: int) -> np.ndarray:
    """(n,) lognormal of mean 1 and coefficient of variation CV."""
    variance = math.log1p(CV**2)
    return random.lognormal(-variance / 2, math.sqrt(variance), n)


def fcfs(due_s: np.ndarray, service_s: np.ndarray, servers: int = SERVERS) -> Stays:
    """First come, first served: who is due takes the server that is free first (Kiefer and Wolfowitz, 1955)."""
    free, begins = [-math.inf] * servers, list[float]()
    replace, put = heapq.heapreplace, begins.append
    for due, takes in zip(due_s.tolist(), service_s.tolist(), strict=True):
        first = free[0]
        begin = due if due > first else first
        replace(free, begin + takes)
        put(begin)
    begin_s = np.array(begins)
    return Stays(due_s, begin_s, begin_s + service_s)


def trace(random: np.random.Generator, n: int, load: float, servers: int = SERVERS) -> tuple[np.ndarray, np.ndarray]:
    """(due, service) of n Poisson arrivals that keep each server busy for `load` of its time."""
    return np.cumsum(random.exponential(1 / (load * servers), n)), services(random, n)


def open_loop(random: np.random.Generator, n: int, load: float, servers: int = SERVERS, warmup: int = WARMUP) -> Stays:
    """n requests of an M/G/k queue, those after the first `warmup`."""
    return fcfs(*trace(random, warmup + n, load, servers), servers).after(warmup)


def closed_loop(
    random: np.random.Generator, n: int, slots: int, servers: int = SERVERS, slowdown: float = 0.0
) -> Stays:
    """n requests of `slots` users who ask again as soon as they are answered, in the order in which they ask.

    Service takes longer and longer where `slowdown` is not 0: by that share over the run.
    """
    service = services(random, n) * (1 + slowdown * np.arange(n) / n)
    free, asks = [0.0] * servers, [0.0] * slots
    due, begins, ends = np.empty(n), np.empty(n), np.empty(n)
    for i, takes in enumerate(service.tolist()):
        at = heapq.heappop(asks)
        begin = max(at, free[0])
        heapq.heapreplace(free, begin + takes)
        heapq.heappush(asks, begin + takes)
        due[i], begins[i], ends[i] = at, begin, begin + takes
    return Stays(due, begins, ends)


def levels(stays: Stays, at_s: np.ndarray) -> np.ndarray:
    """How many requests are in the system at each moment."""
    ended = np.sort(stays.end_s)
    return np.searchsorted(stays.due_s, at_s, "right") - np.searchsorted(ended, at_s, "right")
