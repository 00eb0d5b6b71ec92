"""Throughput and latency against load: two forms fitted by least squares, chosen by AICc, with their intervals.

Residuals are of logarithms, since measured rates scatter by a share of themselves. Intervals are 95%, by the delta
method: Student's t times the square root of g' s² (J'J)^-1 g, with J at the fit (Seber and Wild, Nonlinear Regression,
1989, section 5.1). Numpy only, no I/O.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from llm_bench.errors import BenchError
from llm_bench.printable import counted

REACH = 2.0  # times the largest load measured: further out a fit says what its form says, and no longer the data
LEAST_POINTS = {"usl": 6, "two segments": 5}  # AICc is defined from parameters + 3 on
LEAST_LOADS = 4  # different ones
FEW = 8  # with fewer points AICc takes the form of fewer parameters, whatever made the data (simulated)
APART = 2.0  # of AICc: forms nearer than this are not told apart (Burnham and Anderson, 2002, section 2.6)
EXACT = 1e-9  # relative scatter below which data are taken for exact: rounding, not noise
_NAMES = {"usl": "Universal Scalability Law", "two segments": "two segments"}

# Two-sided 95% of Student's t by degrees of freedom; above 30 it is 1.96 + 2.4 / df to three digits.
_T = """12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131 2.120 2.110 2.101
2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042""".split()


def student_t(df: int) -> float:
    """Two-sided 95% quantile of Student's t. 0 < df."""
    return float(_T[df - 1]) if df <= len(_T) else 1.96 + 2.4 / df


class Estimate(NamedTuple):
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


class Fit(NamedTuple):
    """One form fitted to points. Throughput X against load N, or latency y as N / y, of which the form is the same.

    usl: X = r N / (1 + s (N - 1) + k N (N - 1)) (Gunther, Guerrilla Capacity Planning, 2007), s and k not negative.
    two segments: X = min(r N, c), or r N alone where no flat part was seen.
    """

    form: str
    theta: np.ndarray  # log r, s, k; or log r, log c
    covariance: np.ndarray
    params: dict[str, Estimate]  # rate_per_load, contention, coherence; or rate_per_load, ceiling
    ceiling: Estimate | str  # the most it carries, or why that is not known
    knee: Estimate | str  # the load where the rising line meets the ceiling
    sse: float
    n: int
    df: int  # points minus parameters
    aicc: float
    largest: float  # load measured
    latency: bool

    @property
    def name(self) -> str:
        straight = self.form == "two segments" and "ceiling" not in self.params
        return "straight line" if straight else _NAMES[self.form]

    @property
    def scatter(self) -> float:
        """Standard deviation of the points about the curve, as a share."""
        return math.sqrt(self.sse / self.df)


class Chosen(NamedTuple):
    """The form of the smaller AICc, the others that could be fitted, and what is to be said of the choice."""

    best: Fit
    others: tuple[Fit, ...]
    text: str


def fit_throughput(
    loads: Sequence[float], rates: Sequence[float], forms: Sequence[str] = ("usl", "two segments")
) -> Chosen:
    """Curves through (load, throughput); loads as slots or sequences in flight for the usl, of any unit for the other.

    Raises BenchError for too few points, too few different loads, or values that have no logarithm.
    """
    return _fit(loads, rates, forms, latency=False)


def fit_latency(
    loads: Sequence[float], latencies: Sequence[float], forms: Sequence[str] = ("usl", "two segments")
) -> Chosen:
    """Curves through (load, latency). By Little's law X = N / R, so a latency rises as its form's throughput bends:
    usl: y0 (1 + s (N - 1) + k N (N - 1)); two segments: y0 up to the knee, in proportion to the load from there.
    """
    given = np.asarray(latencies, float)
    if not (np.isfinite(given) & (given > 0)).all():
        raise BenchError("curve: a latency that is not above 0 has no place on it")
    return _fit(loads, np.asarray(loads, float) / given, forms, latency=True)


def predict(fit: Fit, load: float) -> Estimate:
    """The curve at a load. Raises BenchError past REACH times the largest load measured."""
    if not 0 < load <= REACH * fit.largest:
        raise BenchError(
            f"curve: load {load:g} is refused: the largest measured is {fit.largest:g}, and past {REACH:g} times that "
            "a curve says what its form says, not what was seen. Measure there"
        )
    value = _estimate(fit, lambda theta: math.log(_model(fit.form, theta, np.array([load]))[0]))
    return Estimate(load / value.value, load / value.high, load / value.low) if fit.latency else value


# ---- the forms


def _model(form: str, theta: np.ndarray, n: np.ndarray) -> np.ndarray:
    if form == "usl":
        return np.asarray(math.exp(theta[0]) * n / (1 + theta[1] * (n - 1) + theta[2] * n * (n - 1)))
    return np.asarray(np.minimum(math.exp(theta[0]) * n, math.exp(theta[1])))


def _usl(n: np.ndarray, log_x: np.ndarray) -> np.ndarray:
    """Least squares under contention, coherence >= 0: where the free fit leaves them, the best on an edge."""
    best, best_sse = np.zeros(3), math.inf
    for free in ((1, 2), (2,), (1,), ()):
        theta = _gauss_newton(n, log_x, free)
        sse = float((_residuals(n, log_x, theta) ** 2).sum())
        if (theta[1:] >= 0).all() and sse < best_sse:
            best, best_sse = theta, sse
            if free == (1, 2):
                break
    return best


def _residuals(n: np.ndarray, log_x: np.ndarray, theta: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(log_x - theta[0] - np.log(n) + np.log(1 + theta[1] * (n - 1) + theta[2] * n * (n - 1)))


def _usl_jacobian(n: np.ndarray, theta: np.ndarray) -> np.ndarray:
    """Of the residuals (n, 3)."""
    d = 1 + theta[1] * (n - 1) + theta[2] * n * (n - 1)
    return np.stack([-np.ones(len(n)), (n - 1) / d, n * (n - 1) / d], axis=1)


def _gauss_newton(n: np.ndarray, log_x: np.ndarray, free: tuple[int, ...]) -> np.ndarray:
    """Levenberg and Marquardt's damping about the linear solution of N / X = (1 + s (N - 1) + k N (N - 1)) / r."""
    columns = [0, *free]
    theta = np.zeros(3)
    x = np.exp(log_x)
    basis = np.stack([np.ones(len(n)), n - 1, n * (n - 1)], axis=1)[:, columns] * (x / n)[:, None]
    linear = np.linalg.lstsq(basis, np.ones(len(n)), rcond=None)[0]
    theta[0] = float(np.mean(log_x - np.log(n)))
    if linear[0] > 0:
        start = theta.copy()
        start[0] = -math.log(linear[0])
        start[list(free)] = linear[1:] / linear[0]
        theta = start if np.isfinite(_residuals(n, log_x, start)).all() else theta
    damping, r = 1e-3, _residuals(n, log_x, theta)
    for _ in range(200):
        j = _usl_jacobian(n, theta)[:, columns]
        normal = j.T @ j
        step = np.linalg.lstsq(normal + damping * np.diag(np.diag(normal)), -j.T @ r, rcond=None)[0]
        trial = theta.copy()
        trial[columns] += step
        r_trial = _residuals(n, log_x, trial)
        if np.isfinite(r_trial).all() and r_trial @ r_trial <= r @ r:
            gained = r @ r - r_trial @ r_trial
            theta, r, damping = trial, r_trial, damping / 10
            if gained <= 1e-15 * (r @ r) + 1e-30:
                break
        else:
            damping *= 10
            if damping > 1e12:
                break
    return theta


def _two_segments(n: np.ndarray, log_x: np.ndarray) -> list[np.ndarray]:
    """Least squares over every place of the knee, between two loads, where both lines are means, and at each load; and
    the line that rises throughout. One load alone is no flat segment: a knee leaves two of them at or above it.
    """
    different = np.unique(n)
    rise = float(np.mean(log_x - np.log(n)))
    line = np.array([rise, rise + math.log(2 * REACH * n[-1])])
    bent = []
    for least_flat in different[1:-1]:
        below = n < least_flat
        bent.append(np.array([np.mean((log_x - np.log(n))[below]), np.mean(log_x[~below])]))
    for knee in different[:-1]:
        top = float(np.mean(log_x - np.log(np.minimum(n / knee, 1))))
        bent.append(np.array([top - math.log(knee), top]))

    def sse(theta: np.ndarray) -> float:
        return float(((log_x - np.minimum(theta[0] + np.log(n), theta[1])) ** 2).sum())

    # A mean of points on the wrong side of its knee is no such fit.
    second_last = math.log(different[-2])
    bent = [theta for theta in bent if theta[1] - theta[0] <= second_last + EXACT]
    return [line, min(bent, key=sse)]


# ---- fitting and choosing


def _fit(loads: Sequence[float], rates: Sequence[float] | np.ndarray, forms: Sequence[str], latency: bool) -> Chosen:
    n, x = np.asarray(loads, float), np.asarray(rates, float)
    if n.shape != x.shape or not (np.isfinite(n) & np.isfinite(x) & (n > 0) & (x > 0)).all():
        raise BenchError("curve: every load and every figure has to be a number above 0")
    if len(set(n.tolist())) < LEAST_LOADS:
        raise BenchError(
            f"curve: {len(set(n.tolist()))} different loads were measured, at least {LEAST_LOADS} are needed for a form"
        )
    order = np.argsort(n, kind="stable")
    n, log_x = n[order], np.log(x[order])
    able = [form for form in forms if len(n) >= LEAST_POINTS[form] and (form != "usl" or n[0] >= 1)]
    if not able:
        least = min(LEAST_POINTS[form] for form in forms)
        raise BenchError(f"curve: {counted(len(n), 'point')}, at least {least} are needed to choose a form by AICc")
    fits = sorted((_one(form, n, log_x, latency) for form in able), key=lambda fit: fit.aicc)
    best, *others = fits
    left = [form for form in forms if form not in able]
    if not others:
        text = f"{best.name} alone" + (f": {len(n)} points are too few for the {_NAMES[left[0]]}" if left else "")
    else:
        apart = others[0].aicc - best.aicc
        text = f"{best.name}, AICc {apart:.1f} below {others[0].name}"
        text += ": the data do not tell them apart" if apart < APART else ""
        text += f"; of {len(n)} points it favours fewer parameters" if len(n) < FEW else ""
    return Chosen(best, tuple(others), text)


def _one(form: str, n: np.ndarray, log_x: np.ndarray, latency: bool) -> Fit:
    thetas = [_usl(n, log_x)] if form == "usl" else _two_segments(n, log_x)
    return min((_at(form, theta, n, log_x, latency) for theta in thetas), key=lambda fit: fit.aicc)


def _at(form: str, theta: np.ndarray, n: np.ndarray, log_x: np.ndarray, latency: bool) -> Fit:
    if form == "usl":
        r, j = _residuals(n, log_x, theta), _usl_jacobian(n, theta)
    else:
        rises = theta[0] + np.log(n) < theta[1]
        r, j = log_x - np.where(rises, theta[0] + np.log(n), theta[1]), np.stack([rises, ~rises], axis=1).astype(float)
    sse, p = float(r @ r), int(j.any(axis=0).sum())  # a segment without a point is no parameter
    sse = max(sse, len(n) * EXACT**2)  # exact data have a scatter too: that of their rounding
    k = p + 1  # the scatter is a parameter too
    aicc = len(n) * math.log(sse / len(n)) + 2 * k + 2 * k * (k + 1) / (len(n) - k - 1)
    covariance = sse / (len(n) - p) * np.linalg.pinv(j.T @ j)
    fit = Fit(form, theta, covariance, {}, "", "", sse, len(n), len(n) - p, aicc, float(n[-1]), latency)
    return _finish_usl(fit) if form == "usl" else _finish_segments(fit, bool(rises.any()), bool((~rises).any()))


def _finish_usl(fit: Fit) -> Fit:
    t = student_t(fit.df)
    params = {"rate_per_load": _estimate(fit, lambda theta: float(theta[0]))}
    for i, name in ((1, "contention"), (2, "coherence")):
        half = t * math.sqrt(fit.covariance[i, i])
        value = float(fit.theta[i])
        params[name] = Estimate(value, max(0.0, value - half), value + half)
    peak = _peak(fit.theta)
    if peak is None or peak > REACH * fit.largest:
        why = f"by its curve it is past {REACH:g} times the largest load measured ({fit.largest:g})"
        return fit._replace(params=params, ceiling=why, knee=why)

    def top(theta: np.ndarray) -> float:
        at = _peak(theta)
        return math.log(_model("usl", theta, np.array([at if at is not None else 1e12]))[0])

    ceiling = _estimate(fit, top)
    knee = _estimate(fit, lambda theta: top(theta) - theta[0])
    return fit._replace(params=params, ceiling=ceiling, knee=knee)


def _peak(theta: np.ndarray) -> float | None:
    """The load of the usl's largest throughput: sqrt((1 - s) / k), or 1; None where it has none."""
    if theta[2] <= 0:
        return None
    return max(1.0, math.sqrt(max(0.0, 1 - theta[1]) / theta[2]))


def _finish_segments(fit: Fit, rose: bool, flat: bool) -> Fit:
    params = {}
    if rose:
        params["rate_per_load"] = _estimate(fit, lambda theta: float(theta[0]))
    if flat:
        params["ceiling"] = _estimate(fit, lambda theta: float(theta[1]))
    what = "latency does not bend" if fit.latency else "throughput rises"
    still = f"{what} up to the largest load measured ({fit.largest:g})"
    ceiling: Estimate | str = params["ceiling"] if flat else still
    knee: Estimate | str = still if not flat else "throughput is flat from the smallest load measured on"
    if rose and flat:
        knee = _estimate(fit, lambda theta: float(theta[1] - theta[0]))
    return fit._replace(params=params, ceiling=ceiling, knee=knee)


def _estimate(fit: Fit, log_of: Callable[[np.ndarray], float]) -> Estimate:
    """A positive figure whose logarithm is a function of the parameters: the delta method on that logarithm."""
    at = log_of(fit.theta)
    gradient = np.zeros(len(fit.theta))
    for i, value in enumerate(fit.theta):
        # Forward: contention and coherence end at 0, and coherence may be as small as 1e-6.
        step = 1e-5 * max(abs(float(value)), 1e-5 if fit.form == "usl" and i else 1.0)
        moved = fit.theta.copy()
        moved[i] += step
        gradient[i] = (log_of(moved) - at) / step
    half = student_t(fit.df) * math.sqrt(max(0.0, float(gradient @ fit.covariance @ gradient)))
    half = min(half, 700.0)  # exp of more is no number; so wide an interval says nothing either way
    return Estimate(math.exp(at), math.exp(max(at - half, -700.0)), math.exp(min(at + half, 700.0)))
