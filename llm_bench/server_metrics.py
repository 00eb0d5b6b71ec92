"""What serving engines say of themselves: a page read, and figures over a window under the names of METRICS_OF.

A figure is what the server exported and nothing else: a counter's increase, the mean of a histogram's new observations,
a gauge's time average, each between two scrapes; quantiles only as the bucket that holds them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import orjson

from llm_bench import prometheus
from llm_bench.printable import counted
from llm_bench.server_names import CONFIGS, METRICS_OF, WANTED

FELL = "the server was started anew, or several answer at this URL"  # of a counter, which never falls by itself
APART = 1.5  # scrape intervals, by which two replicas' spans may begin or end apart and still be of one time
LEAST_COVERED = 2 / 3  # of a window, by the scrapes inside it; below that those around it are taken


Values = dict[str, float]  # a sample's name and labels, as `prometheus.written` has them -> its value


class Point(NamedTuple):
    """One scrape: what a page said at a moment that lies between asking and the answer."""

    at_ns: int
    values: Mapping[str, float]


class Figure(NamedTuple):
    """One canonical metric between two scrapes. `name`: as on the wire."""

    metric: str
    name: str
    value: float | None  # counter: increase; gauge: time average; histogram: mean; None where nothing was observed
    observed: float = 0.0  # of a histogram: observations
    least: float | None = None  # of a gauge
    most: float | None = None
    buckets: tuple[tuple[float, float], ...] = ()  # of a histogram: (upper bound, observations up to it), in its unit
    resets: int = 0  # times that a counter fell: the server was started anew, or several take turns at the URL
    parts: int = 1  # of a gauge: engines and replicas that it is the sum or the mean of

    @property
    def fell(self) -> str:
        """Why an increase is not known, in words; "" where the counter never fell."""
        return f"{self.name} fell {counted(self.resets, 'time')}: {FELL}" if self.resets else ""


class Figures(NamedTuple):
    """What was scraped of one URL between `start_ns` and `end_ns`; of several, from the first start to the last end."""

    of: Mapping[str, Figure]
    start_ns: int
    end_ns: int
    scrapes: int  # from the one to the other, both counted
    inside: bool  # neither begins before the window nor ends after it
    part: bool = False  # begins before it or ends after it, and not both: of some of it and of some time beside it
    each: tuple["Figures", ...] = ()  # of several replicas: those of each, over its own span

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def apart(self) -> bool:
        """Do the replicas' spans begin or end farther apart than a scrape that just missed an edge explains?"""
        if not self.each:
            return False
        every_ns = min((f.end_ns - f.start_ns) / max(f.scrapes - 1, 1) for f in self.each)
        starts, ends = [f.start_ns for f in self.each], [f.end_ns for f in self.each]
        return max(max(starts) - min(starts), max(ends) - min(ends)) > APART * every_ns

    def value(self, metric: str) -> float | None:
        found = self.of.get(metric)
        return None if found is None else found.value

    def rate(self, metric: str) -> float | None:
        """A counter's increase a second; of several replicas each over its own span, added up."""
        found = self.value(metric)
        if found is None:
            return None
        return sum(f.rate(metric) or 0.0 for f in self.each) if self.each else found / self.seconds

    def edges(self) -> str:
        """Which part of a window the figures are of, in words."""
        where = "of a part of" if self.part else "within" if self.inside else "around"
        if self.apart:
            spans = sorted(f.seconds for f in self.each)
            shown = " to ".join(dict.fromkeys(f"{s:.1f}" for s in (spans[0], spans[-1])))  # one where both are equal
            return f"replicas scraped over {shown} s, not at the same times, {where} the window"
        return f"{self.scrapes} scrapes over {self.seconds:.1f} s {where} the window"


def read(page: bytes) -> Values:
    """Every sample of METRICS_OF on a page: Prometheus text, or trtllm-serve's JSON. Raises ValueError for neither."""
    if page.lstrip()[:1] in (b"[", b"{"):
        return _read_json(page)
    try:
        text = page.decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"byte {e.start} is not UTF-8, expected Prometheus text") from None
    found: Values = {}
    for sample in prometheus.parse(text, WANTED):
        if sample.name in CONFIGS:
            found |= _cache_of(dict(sample.labels))
        else:
            found[prometheus.written(sample.name, sample.labels)] = sample.value
    return found


def _cache_of(labels: Mapping[str, str]) -> Values:
    """Tokens of the pool and of a block, by vLLM's labels; nothing while they are "None"."""
    blocks, size = (labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
    if not (blocks.isdecimal() and size.isdecimal()):
        return {}
    mine: prometheus.Labels = (("engine", labels["engine"]),) if "engine" in labels else ()
    written = prometheus.written("cache:pool_tokens", mine), prometheus.written("cache:block_tokens", mine)
    return dict(zip(written, (float(blocks) * float(size), float(size)), strict=True))


def _read_json(page: bytes) -> Values:
    """trtllm-serve's /metrics: statistics of the iterations since it was last read, which reading takes away.

    The mean over those iterations stands for the moment. Prometheus text, which can be read twice, is at
    /prometheus/metrics.
    """
    try:
        rows = orjson.loads(page)
    except orjson.JSONDecodeError as e:
        raise ValueError(f"neither Prometheus text nor JSON: {e}") from None
    rows = rows if isinstance(rows, list) else [rows]
    found: dict[str, list[float]] = {}
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"an item of type {type(row).__name__}, expected objects, one an iteration")
        for key in ("numActiveRequests", "numQueuedRequests"):
            if _is_count(row.get(key)):
                found.setdefault(f"json:{key}", []).append(float(row[key]))
        blocks = row.get("kvCacheStats")
        if isinstance(blocks, dict) and _is_count(blocks.get("usedNumBlocks")) and blocks.get("maxNumBlocks"):
            found.setdefault("json:kvCacheUsage", []).append(blocks["usedNumBlocks"] / blocks["maxNumBlocks"])
    return {key: sum(values) / len(values) for key, values in found.items()}


def _is_count(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def figures(points: Sequence[Point], start_ns: int, end_ns: int) -> Figures | None:
    """What was scraped in the window [start_ns, end_ns); None where fewer than two scrapes tell.

    Between the first and the last scrape inside the window, if these span LEAST_COVERED of it; else between the last
    before and the first after it. Nothing is interpolated: the span says what the figures are of.
    """
    inside = [p for p in points if start_ns <= p.at_ns < end_ns]
    covered = inside[-1].at_ns - inside[0].at_ns if inside else 0
    if covered >= LEAST_COVERED * (end_ns - start_ns):
        return _between(inside, True) if covered else None
    before = [p for p in points if p.at_ns < start_ns][-1:]
    after = [p for p in points if p.at_ns >= end_ns][:1]
    if before and after:
        return _between([*before, *inside, *after], False)
    around = [*before, *inside, *after]
    if not inside or len(around) < 2:
        return None
    return _between(around, not before and not after)._replace(part=bool(before or after))


def _between(points: Sequence[Point], inside: bool) -> Figures:
    keys = _by_name(points)
    found: dict[str, Figure] = {}
    for metric, known in METRICS_OF.items():
        for name in (n for names in known.names.values() for n in names):
            figure = _KINDS[known.kind](metric, name, points, keys)
            if figure is not None:
                found[metric] = figure
                break
    return Figures(found, points[0].at_ns, points[-1].at_ns, len(points), inside)


Keys = Mapping[str, Sequence[tuple[str, Mapping[str, str]]]]  # name of a sample -> its keys, with their labels


def _by_name(points: Sequence[Point]) -> Keys:
    found: dict[str, list[tuple[str, Mapping[str, str]]]] = {}
    for key in dict.fromkeys(key for point in points for key in point.values):
        name, labels = prometheus.split(key)
        found.setdefault(name, []).append((key, labels))
    return found


def _chosen(wanted: str, keys: Keys, part: str = "") -> list[tuple[str, Mapping[str, str]]]:
    name, asked = prometheus.split(wanted)
    return [(key, has) for key, has in keys.get(name + part, ()) if all(has.get(k) == v for k, v in asked.items())]


def _counter(metric: str, name: str, points: Sequence[Point], keys: Keys) -> Figure | None:
    rise = _increases(points, _chosen(name, keys))
    return None if rise is None else Figure(metric, name, rise[0], resets=rise[1])


def _increases(points: Sequence[Point], keys: Sequence[tuple[str, Mapping[str, str]]]) -> tuple[float, int] | None:
    """Of several samples together; None of none, or where one is not known, which the sum would lack."""
    steps = [step for key, _ in keys if (step := _increase(points, key)) is not None]
    if not steps or len(steps) < len(keys):
        return None
    return sum(rise for rise, _ in steps), max(falls for _, falls in steps)


def _increase(points: Sequence[Point], key: str) -> tuple[float, int] | None:
    """How much a counter rose, and how often it fell: from a fall on it counts from 0, as it does after a start.

    A sample that is not on a page stands at 0: counters with labels appear when they are first used. None where the
    first or the last page has NaN for it, so that the rise between the two is not known.
    """
    values = [p.values.get(key, 0.0) for p in points]
    if math.isnan(values[0]) or math.isnan(values[-1]):
        return None
    values = [v for v in values if not math.isnan(v)]
    pairs = list(pairwise(values))
    return sum(b - a if b >= a else b for a, b in pairs), sum(b < a for a, b in pairs)


def _gauge(metric: str, name: str, points: Sequence[Point], keys: Keys) -> Figure | None:
    mine = [key for key, _ in _chosen(name, keys)]
    at_ns, values, parts = [], [], 0
    for point in points:
        said = [v for key in mine if (v := point.values.get(key)) is not None and v == v]
        if said:
            parts = max(parts, len(said))
            at_ns.append(point.at_ns - points[0].at_ns)
            values.append(sum(said) / (len(said) if METRICS_OF[metric].over == "mean" else 1))
    if not values:
        return None
    mean = values[0]
    if len(values) > 1:  # a straight line from each scrape to the next
        between = zip(pairwise(at_ns), pairwise(values), strict=True)
        mean = sum((b - a) * (x + y) / 2 for (a, b), (x, y) in between) / (at_ns[-1] - at_ns[0])
    return Figure(metric, name, mean, least=min(values), most=max(values), parts=parts)


def _histogram(metric: str, name: str, points: Sequence[Point], keys: Keys) -> Figure | None:
    total, count = (_increases(points, _chosen(name, keys, part)) for part in ("_sum", "_count"))
    if total is None or count is None:
        return None
    scale = 1e3 if METRICS_OF[metric].unit == "ms" else 1.0  # all that are in use count seconds
    by_bound: dict[float, list[tuple[str, Mapping[str, str]]]] = {}
    for key, has in _chosen(name, keys, "_bucket"):
        bound = _bound(has.get("le", ""))
        if bound is not None:
            by_bound.setdefault(bound * scale, []).append((key, has))
    rises = [(bound, _increases(points, mine)) for bound, mine in sorted(by_bound.items())]
    buckets = tuple((bound, rise[0]) for bound, rise in rises if rise is not None)
    if len(buckets) < len(rises):
        buckets = ()  # a quantile would be looked for in the bucket above
    mean = total[0] / count[0] * scale if count[0] else None
    return Figure(metric, name, mean, count[0], buckets=buckets, resets=count[1])


_KINDS = {"counter": _counter, "gauge": _gauge, "histogram": _histogram}


def _bound(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def bracket(figure: Figure, q: float) -> tuple[float, float] | None:
    """Between which bounds of the histogram its quantile lies, (low, high]; None without observations or buckets.

    A value inside the bucket would be invented.
    """
    if not figure.buckets or not figure.observed:
        return None
    low = 0.0
    for bound, up_to in figure.buckets:
        if up_to >= q * figure.observed:
            return low, bound
        low = bound
    return low, float("inf")


def total(parts: Iterable[Figures]) -> Figures | None:
    """Several replicas as one: counters, observations and requests add up, shares are averaged; None of none.

    The least and the most of what adds up are bounds: not all replicas need have had theirs at one moment.
    """
    parts = list(parts)
    if len(parts) < 2:
        return parts[0] if parts else None
    found = {}
    for metric in METRICS_OF:
        mine = [p.of[metric] for p in parts if metric in p.of]
        if len(mine) == len(parts):  # where one says nothing, what the others say is not the whole
            found[metric] = _sum(mine)
    return Figures(
        found,
        min(p.start_ns for p in parts),
        max(p.end_ns for p in parts),
        min(p.scrapes for p in parts),
        all(p.inside for p in parts),
        any(p.part for p in parts),
        tuple(parts),
    )


def _sum(mine: Sequence[Figure]) -> Figure:
    first, kind = mine[0], METRICS_OF[mine[0].metric].kind
    resets = sum(f.resets for f in mine)
    said = [f for f in mine if f.value is not None]
    if kind == "counter":
        return first._replace(value=sum(f.value or 0.0 for f in mine), resets=resets)
    if kind == "gauge":
        shares = METRICS_OF[first.metric].over == "mean"
        least = [f.least for f in said if f.least is not None]
        most = [f.most for f in said if f.most is not None]
        weights = [f.parts if shares else 1 for f in said]
        total = sum((f.value or 0.0) * weight for f, weight in zip(said, weights, strict=True))
        return first._replace(
            value=total / (sum(weights) if shares else 1),
            least=min(least) if shares else sum(least),
            most=max(most) if shares else sum(most),
            parts=sum(f.parts for f in mine),
        )
    observed = sum(f.observed for f in mine)
    value = sum((f.value or 0.0) * f.observed for f in said) / observed if observed else None
    bounds = {tuple(bound for bound, _ in f.buckets) for f in mine}
    buckets: tuple[tuple[float, float], ...] = ()
    if len(bounds) == 1:
        buckets = tuple(
            (rows[0][0], sum(up_to for _, up_to in rows)) for rows in zip(*(f.buckets for f in mine), strict=True)
        )
    return first._replace(value=value, observed=observed, buckets=buckets, resets=resets)
