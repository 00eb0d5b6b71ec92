"""What the names in a report mean, in words: METRICS.md's, as the tables of `series` and `metrics` have them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llm_bench import metrics
from llm_bench.metrics import QUANTILES, REDUCERS, WHOLE
from llm_bench.series import SERIES
from llm_bench.words import GOOD_AND_ALL

_OK = "ok requests due in the window"
REDUCED = {
    "mean": f"arithmetic mean, of {_OK}",
    "std": f"standard deviation of the sample, of {_OK}",
    "min": f"smallest value, of {_OK}",
    "max": f"largest value, of {_OK}",
}
TERMS = {
    "n": "values that a figure is of; for a figure of a whole cell, requests due in its window",
    "ESS": "effective sample size: requests queue behind each other, so n of them say as much as ESS independent ones",
    "interval": "95%, from batch means in due order; none under an ESS of 150, or where it has no bound",
    "all:": "the percentile with failed and dropped requests ranked above every latency; error: it is one of them",
    "window": "the measured part of a cell: requests belong to it by due time, tokens by the time of their event",
    "due": "when the plan says that a request is to leave; in a closed loop when its slot became free",
    "MET": "the whole 95% interval, of the share that met a limit or of the figure, is as the limit asks",
    "MISSED": "the whole interval is not as the limit asks",
    "UNDECIDED": "neither of them, or a cell's state allows no verdict",
    "ok": "status 2xx, no error in the stream, the protocol's own end, at least one token",
    "cut": "in flight when the cell ended: its age is a lower bound, neither a success nor a fast sample",
    "dropped": "due, and never attempted",
    "–": "undefined, for the reason given beside the cell; never 0",
}


class Definition(NamedTuple):
    name: str
    unit: str  # "" for what has none
    meaning: str


def definitions(names: Sequence[str]) -> Iterator[Definition]:
    """Of every metric in `names`, a series once however many of its reducers are asked for; then TERMS."""
    parsed = [metrics.parse(name) for name in dict.fromkeys(names)]
    for of in dict.fromkeys(m.of for m in parsed):
        row = SERIES.get(of) or WHOLE[of]
        yield Definition(of, "" if row.unit == "1" else row.unit, row.meaning)
    if {"goodput", "requests_per_second"} <= {m.of for m in parsed}:
        yield Definition("goodput, requests_per_second", "", GOOD_AND_ALL)
    used = {m.reducer for m in parsed}
    if quantiles := [q for q in QUANTILES if q in used]:
        yield Definition(", ".join(quantiles), "", f"percentiles of {_OK}, by linear interpolation")
    for reducer in REDUCERS:
        if reducer in used & set(REDUCED):
            yield Definition(reducer, "", REDUCED[reducer])
    for name, meaning in TERMS.items():
        yield Definition(name, "", meaning)
