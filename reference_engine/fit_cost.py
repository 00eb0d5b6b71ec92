"""`python -m reference_engine.fit_cost LOG -o profile.json`: the five costs of the cost model, from an engine's steps.

LOG is what `--log-steps` writes: a JSON object a step, of what it had to do and the seconds it took. The five costs are
the non-negative ones with the least squares of *relative* error, so that a step of 5 ms weighs as much as one of 500; a
few steps that something else held up pull with limited force. `sim:profile.json` then takes the time of that engine.
A few hundred steps of all kinds are needed: long prompts, short ones, many and few sequences; what never varies cannot
be told apart (a note says so). Log on an idle machine: what others take of it is in every figure.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reference_engine.cost_model import Costs, Load

LEAST_STEPS = 20
KNEES = 30  # first candidates for the tokens at which computing takes as long as reading the weights
NARROWINGS = 30  # of the range around the best of them, by a third each
PASSES = 4  # of weighing by what was fitted
FAR = 3.0
CLEARLY = 1e-9  # above 0, and not by rounding
NOTHING = 1e-13  # of the sum of squares: rounding
BETTER = 1e-3  # a knee must take away this share of the squared error, else there is none
KEYS = (*Load._fields, "seconds")


class Fit(NamedTuple):
    """Costs of all steps. Errors are of half the steps by costs of the other half: those had not been seen."""

    costs: Costs
    steps: int
    error_p50: float  # |took / fitted - 1|
    error_p95: float
    bias: float  # sum of fitted seconds / sum of those taken - 1
    notes: list[str]


def read_steps(lines: Iterable[str], where: str) -> tuple[np.ndarray, np.ndarray]:
    """((n, 3) of tokens, context, pairs; (n,) seconds). Raises ValueError that names the line."""
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
            row = [float(said[key]) for key in KEYS]
        except (ValueError, TypeError, LookupError):
            raise ValueError(f"{where}:{number}: found {line[:80]!r}; would be right: {', '.join(KEYS)}") from None
        if not all(0 <= value < math.inf for value in row) or row[-1] == 0:
            raise ValueError(f"{where}:{number}: found {row}; would be right: numbers of 0 or more, seconds above 0")
        rows.append(row)
    if len(rows) < LEAST_STEPS:
        raise ValueError(f"{where}: has {len(rows)} steps; would be right: {LEAST_STEPS} or more")
    found = np.array(rows)
    return found[:, :3], found[:, 3]


def fit(loads: np.ndarray, seconds: np.ndarray) -> Fit:
    """`loads` (n, 3): tokens, context, pairs of each step; `seconds` (n,)."""
    even, odd = slice(0, None, 2), slice(1, None, 2)
    errors = np.concatenate([_errors(_costs(loads[a], seconds[a]), loads[b], seconds[b]) for a, b in
                             ((even, odd), (odd, even))])  # fmt: skip
    costs = _costs(loads, seconds)
    fitted = predicted(costs, loads)
    jitter = _spread(seconds, fitted)
    absolute = np.abs(errors)
    return Fit(
        costs._replace(jitter=jitter),
        len(seconds),
        float(np.percentile(absolute, 50)),
        float(np.percentile(absolute, 95)),
        float(fitted.sum() / seconds.sum() - 1),
        _notes(costs, loads),
    )


def predicted(costs: Costs, loads: np.ndarray) -> np.ndarray:
    """Seconds (n,) of steps (n, 3), without jitter: `Costs.step_s` of them all."""
    tokens, context, pairs = loads.T
    linear = np.maximum(costs.weights_s, costs.token_s * tokens)
    return np.asarray(costs.overhead_s + linear + costs.context_s * context + costs.pair_s * pairs)


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """(the w >= 0 (k,) that is best for x (n, k) @ w = y (n,), its sum of squares). Every support is tried: k is small.

    The best non-negative solution is the unbounded one of some support (Karush, Kuhn, Tucker). By normal equations of
    scaled columns, so that a log of a million steps is read once a call.
    """
    scale = np.sqrt((x * x).sum(axis=0))
    scale[scale == 0] = 1.0
    gram, toward, whole = (x / scale).T @ (x / scale), (x / scale).T @ y, float(y @ y)
    free = np.linalg.lstsq(gram, toward, rcond=None)[0]
    if (free > CLEARLY * abs(free).max()).all():  # as most often: nothing is at its bound
        return free / scale, max(0.0, float(whole - 2 * free @ toward + free @ gram @ free))
    best, least = np.zeros(x.shape[1]), whole
    for size in range(1, x.shape[1] + 1):
        for support in map(list, itertools.combinations(range(x.shape[1]), size)):
            part = gram[np.ix_(support, support)]
            w = np.linalg.lstsq(part, toward[support], rcond=None)[0]
            squares = max(0.0, float(whole - 2 * w @ toward[support] + w @ part @ w))
            if (w >= 0).all() and squares < least - NOTHING * whole:
                best, least = np.zeros(x.shape[1]), squares
                best[support] = w
    return best / scale, least


def _costs(loads: np.ndarray, seconds: np.ndarray) -> Costs:
    """Steps are weighed by the seconds that are fitted: those that were taken would favour the ones that came short.

    What lies beyond FAR spreads pulls no harder than that (Huber, 1964): a step that something else held up.
    """
    weigh = seconds
    for _ in range(PASSES):
        costs = _weighted(loads, seconds, weigh)
        fitted = np.maximum(predicted(costs, loads), 1e-3 * seconds)
        apart = np.abs(seconds / fitted - 1)
        weigh = fitted * np.sqrt(np.maximum(1.0, apart / max(FAR * _spread(seconds, fitted), 1e-6)))
    return costs


def _spread(seconds: np.ndarray, fitted: np.ndarray) -> float:
    """Sigma of log(taken / fitted) by its middle two thirds: a few steps that something held up are no jitter."""
    low, high = np.percentile(np.log(seconds / fitted), (15.87, 84.13))
    return float(high - low) / 2


def _weighted(loads: np.ndarray, seconds: np.ndarray, weigh: np.ndarray) -> Costs:
    """max(weights, token · n) is linear once the n is known where the two are equal: many are tried.

    Where no step shows a flat part, reading the weights takes no time that could be seen: it is in the overhead.
    """
    tokens, context, pairs = loads.T
    knees = np.geomspace(1, max(float(tokens.max()), 2.0), KNEES).tolist()

    def solve(knee: float) -> tuple[np.ndarray, float]:
        x = np.column_stack([np.ones_like(tokens), np.maximum(tokens, knee), context, pairs])
        return least_squares(x / weigh[:, None], seconds / weigh)

    none = solve(0.0)
    # Beyond the largest step all is flat: the last candidate would only move overhead into weights.
    at = min(range(KNEES - 1), key=lambda i: solve(knees[i])[1])
    low, high = knees[max(0, at - 1)], knees[at + 1]
    for _ in range(NARROWINGS):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if solve(a)[1] <= solve(b)[1] else (a, high)
    knee = (low + high) / 2
    w, squares = solve(knee)
    if squares > none[1] * (1 - BETTER):
        knee, w = 0.0, none[0]
    overhead, token, context_s, pair = map(float, w)
    return Costs(overhead, token * knee, token, context_s, pair)


def _errors(costs: Costs, loads: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    return np.asarray(seconds / predicted(costs, loads) - 1)


def _notes(costs: Costs, loads: np.ndarray) -> list[str]:
    """What these steps cannot tell."""
    tokens, context, pairs = loads.T
    notes = []
    if np.ptp(tokens) == 0:
        notes.append(f"every step has {tokens[0]:.0f} tokens: what a token costs is in the overhead or in the context")
    if not costs.weights_s:
        notes.append("no step shows a flat part: reading the weights, if it takes time, is in the overhead")
    for name, values, cost in (("context", context, costs.context_s), ("pairs", pairs, costs.pair_s)):
        if not cost:
            notes.append(f"{name}: no cost was found")
        elif np.ptp(values) == 0:
            notes.append(f"{name}: the same in every step")
    return notes


def document(found: Fit, source: str) -> dict[str, Any]:
    """The profile's file: costs, and where they come from."""
    said = found._asdict()
    costs: Costs = said.pop("costs")
    return costs._asdict() | {"about": {"fitted_from": source, **said}}


def words(found: Fit) -> str:
    costs = found.costs
    lines = [
        f"{found.steps:,} steps. A step: {costs.overhead_s * 1e3:.3f} ms, weights {costs.weights_s * 1e3:.3f} ms,",
        f"  {costs.token_s * 1e6:.3f} µs a token, {costs.context_s * 1e9:.2f} ns a token of context, "
        f"{costs.pair_s * 1e9:.4f} ns a pair; jitter {costs.jitter:.3f}",
        f"Error of a step that was not fitted: p50 {found.error_p50:.1%}, p95 {found.error_p95:.1%}; "
        f"all steps together {found.bias:+.1%}",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for what the user can mend."""
    parser = argparse.ArgumentParser(prog="python -m reference_engine.fit_cost", description=__doc__)
    parser.add_argument("log", type=Path, help="what --log-steps wrote")
    parser.add_argument("-o", "--out", type=Path, help="profile to write, for --model sim:FILE.json")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N steps: warming up")
    options = parser.parse_args(argv)
    try:
        with options.log.open() as lines:
            loads, seconds = read_steps(itertools.islice(lines, max(0, options.skip), None), str(options.log))
        found = fit(loads, seconds)
        if options.out:
            options.out.write_text(json.dumps(document(found, options.log.name), indent=1) + "\n")
    except (OSError, ValueError) as error:
        print(f"fit_cost: {error}", file=sys.stderr)
        return 2
    print(words(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
