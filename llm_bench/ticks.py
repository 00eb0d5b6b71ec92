"""Stamps that stand on ticks (whole seconds, every 3 s), and what puts their requests back between the ticks."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.request import Request

LEAST_STEP_S = 0.1  # finer stamps than this say all that a load needs to know
FEW_INSTANTS = 8  # of fewer, a common factor of the gaps is chance: 0, 2, 6 s are as likely whole seconds as even ones
BULK, OFF = 0.9, 0.02  # of the gaps, this share is a whole multiple of the median one, to this share of it


def inter_arrival_cv(at_s: np.ndarray) -> float | None:
    """Standard deviation (of the population, ddof 0) over mean of the gaps of stamps (n,) in order.

    None for fewer than two gaps, and where all stamps are one.
    """
    gaps = np.diff(at_s)
    if len(gaps) < 2 or not gaps.any():
        return None
    return float(gaps.std() / gaps.mean())


def step_s(at_s: np.ndarray) -> float | None:
    """The step of the ticks that stamps (n,) in order stand on; None where they stand on none.

    Ticks: several rows share an instant, and the gaps between instants have a common factor of 0.1 s or more, or nine
    in ten of them are whole multiples of the median gap to 2%. The second rule is for ticks that shake: Mooncake's
    stamps are 2,997 to 3,003 ms apart, and their common factor is 1 ms. Of fewer than eight instants the common factor
    may be a multiple of the true step by chance: then 1 s at most, which spreads too little rather than too much.
    """
    micros = np.rint(np.asarray(at_s) * 1e6).astype(np.int64)
    instants = np.unique(micros)
    if not 2 <= len(instants) < len(micros):
        return None
    gaps = np.diff(instants)
    common = int(np.gcd.reduce(gaps)) / 1e6
    if common >= LEAST_STEP_S:
        return common if len(instants) >= FEW_INSTANTS else min(common, 1.0)
    median = float(np.median(gaps))
    times = gaps / median
    steady = (np.abs(times - np.rint(times)) <= OFF) & (times > 1 - OFF)
    return median / 1e6 if median >= LEAST_STEP_S * 1e6 and steady.mean() >= BULK else None


def spread(at_s: np.ndarray, step: float, seed: int | None = None) -> np.ndarray:
    """Stamps (n,) in order, those of one instant spread over [instant, instant + step), never past the next instant.

    seed None: evenly, request i of k at i/k of the step. A seed: at uniformly random places, sorted, as arrivals that
    are Poisson inside a tick would lie. Order is kept, the first stamp stays where it was, all are whole nanoseconds.
    """
    instants, first, which, k = np.unique(at_s, return_index=True, return_inverse=True, return_counts=True)
    room = np.minimum(np.append(np.diff(instants), step), step)[which]
    if seed is None:
        offsets = (np.arange(len(at_s)) - first[which]) / k[which] * room
    else:
        offsets = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).random(len(at_s)) * room
        offsets = offsets[np.lexsort((offsets, which))]
    moved = at_s + offsets
    return np.asarray(np.round(moved - (offsets[0] if len(offsets) else 0.0), 9))


def dejitter(requests: Sequence[Request], mode: str, seed: int = 0) -> tuple[list[Request], str]:
    """Requests in order of time, those that share a tick spread over it, and what was done in words ("": nothing).

    mode: "auto" (at random places, by `seed`, of the step that the stamps show, by step_s; none: nothing is done),
    "even" (the same step, evenly: a kinder load than any that users make), "off", or the step in seconds, "even:3" for
    an even one. Later turns with a time of their own move with their tick, and stay behind the turn before. Raises
    BenchError for any other mode.
    """
    timed = [i for i, request in enumerate(requests) if request.at_s is not None]
    at_s = np.array([requests[i].at_s for i in timed], float)
    moved, text = spread_as(at_s, mode, seed)
    made = list(requests)
    if moved is not None:
        for i, before, after in zip(timed, at_s.tolist(), moved.tolist(), strict=True):
            if after != before:
                made[i] = replace(made[i], at_s=after)
    return made, text


def spread_as(at_s: np.ndarray, mode: str, seed: int) -> tuple[np.ndarray | None, str]:
    """What dejitter makes of stamps (n,) in order, None where it leaves them; and what was done in words."""
    wanted, random = forced(mode), None if mode.startswith("even") else seed
    step = step_s(at_s) if wanted is None else wanted
    instants = len(np.unique(at_s))
    if not step or instants == len(at_s):
        return None, ""
    moved = spread(at_s, step, random)
    how = "evenly" if random is None else f"at random (seed {random})"
    text = f"timestamps {'stand' if wanted is None else 'taken to stand'} on {step:g} s ticks"
    text += f" ({len(at_s):,} requests on {instants:,} instants): spread {how} inside each tick"
    return moved, text + _cv_said(at_s, moved, step, random)


def forced(mode: str) -> float | None:
    """The step that a mode forces: 0 for "off", None for the one that the stamps show. Raises BenchError."""
    if mode in ("auto", "even", "off"):
        return 0.0 if mode == "off" else None
    try:
        step = float(mode.removeprefix("even:"))
    except ValueError:
        step = 0.0
    if not 0 < step < float("inf"):
        raise BenchError(f"--dejitter {mode!r}: expected auto, even, off, or the tick's length in seconds, more than 0")
    return step


def _cv_said(at_s: np.ndarray, moved: np.ndarray, step: float, seed: int | None) -> str:
    before, after = inter_arrival_cv(at_s), inter_arrival_cv(moved)
    if before is None or after is None:
        return ""
    text = f"; inter-arrival CV {before:.2f} -> {after:.2f}"
    random = inter_arrival_cv(spread(at_s, step, 0))
    if seed is None and random is not None and after < random:  # even spacing is kinder to a server than users are
        text += f" (at random places in the tick: {random:.2f})"
    return text
