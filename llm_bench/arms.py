"""In which order the cells of a run are measured: repeats, and arms that take turns pair by pair; pure, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
class Rounds:
    """How often each target is measured at each load, and whether the targets take turns."""

    repeat: int = 1
    interleave: bool = False  # at each load pair after pair, all targets in each; else round after round of all cells
    same_salt: bool = False  # the arms of a pair send the same prompts: for servers that share no cache

    @property
    def several(self) -> bool:
        """Whether a target at a load has more than one cell, or is an arm."""
        return self.repeat > 1 or self.interleave


class Place(NamedTuple):
    """Where a cell stands in its run; each is a number from 0."""

    load: int
    pair: int  # a round of all arms; without arms that take turns, which repeat it is
    arm: int  # the target, by its place on the command line
    order: int  # its position in the pair


def schedule(arms: int, loads: int, rounds: Rounds) -> list[Place]:
    """Every cell of a run in the order in which they are measured.

    Interleaved, the pairs of a load follow each other, so that the arms of a pair, and the halves of A B B A, are as
    close in time as they can be. Otherwise the rounds stand outermost, so that repeats are as far apart as they can be
    and their spread holds the machine's drift too.
    """
    if not rounds.interleave:
        return [Place(load, k, arm, arm) for k in range(rounds.repeat) for arm in range(arms) for load in range(loads)]
    turns = orders(arms)
    return [
        Place(load, pair, arm, order)
        for load in range(loads)
        for pair in range(rounds.repeat)
        for order, arm in enumerate(turns[pair % len(turns)])
    ]


def orders(arms: int) -> list[list[int]]:
    """Orders of the arms, one a pair, then again from the first: A B, B A for two.

    A Williams design (Aust. J. Sci. Res. A 2, 1949): over all of them each arm stands equally often in each position,
    and behind each other arm; an odd number of arms needs each order backwards too. 0 < arms.
    """
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(arms)]
    rows = [[(step + row) % arms for step in zigzag] for row in range(arms)]
    return rows + [row[::-1] for row in rows] if arms % 2 and arms > 1 else rows


def arrivals_seed(seed: int, pair: int) -> int:
    """The seed of a pair's arrivals: one for both arms, another for each pair, so that the spread has chance in it.

    The first pair has the run's own.
    """
    return int(np.random.SeedSequence([seed, pair]).generate_state(1)[0]) if pair else seed


def salt(origin: str, place: Place, attempt: int, *, same: bool) -> str:
    """Of the prompts of one arm: by its pair and arm, always of one length. `origin`: of the whole run.

    `attempt`, earlier tries at the pair, is in it, so that a pair measured anew never meets the cache of its first try.
    """
    arm = 0 if same else place.arm
    return f"{origin} load {place.load:04d} pair {place.pair:04d} arm {arm:04d} attempt {attempt:04d}"


def pairs_of(places: Sequence[Place], names: Sequence[str]) -> list[list[str]]:
    """The names of the cells of each pair, in their order: they are one measurement."""
    found: dict[tuple[int, int], list[str]] = {}
    for place, name in zip(places, names, strict=True):
        found.setdefault((place.load, place.pair), []).append(name)
    return list(found.values())
