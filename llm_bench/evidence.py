"""What a diagnosis may look at: a cell, what was scraped beside it, how its tokens came, what its cache gave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Literal, NamedTuple

import numpy as np

from llm_bench import metrics
from llm_bench.columns import Cell
from llm_bench.decompose import Decomposition, decompose
from llm_bench.dialects import DIALECTS
from llm_bench.energy import Energy, spent
from llm_bench.printable import clean
from llm_bench.series import NOTHING, SERIES, due_in, outcome_in
from llm_bench.server_metrics import LEAST_COVERED, Figures, total
from llm_bench.windows import Window

LEAST_FLUSHES = 30
LEAST_BINS = 10  # of anything, before its spread says something
IN_USAGE = "usage in the answers"

LEAST_TOKENS = 1.5  # of a mean answer, under which a run was one pass a request, and no decoding

Sure = Literal["sure", "likely", "possible"]
SUREST: tuple[Sure, ...] = ("sure", "likely", "possible")


Work = Literal["decoding", "single pass", "unknown"]
# What a kind of work means for the choice of server.
SERVERS: dict[Work, str] = {
    "decoding": (
        "LLM decoding: answers grow token by token and hold KV memory while they do. A server with continuous "
        "batching and a paged cache fits (vLLM, SGLang, TensorRT-LLM, TGI, llama.cpp)"
    ),
    "single pass": (
        "single pass: one result a request, nothing is decoded. A server that gathers batches for some milliseconds "
        "fits (Triton, TorchServe, MLServer); KV memory plays no part"
    ),
    "unknown": (
        "answers came whole and do not say how many tokens they have: LLM decoding and a single pass look alike. "
        "Stream them, or ask the server for usage"
    ),
}


class Finding(NamedTuple):
    """What was seen, how sure that makes it and by whose word, and what to look at or try next."""

    seen: str
    sure: Sure
    sources: str
    check: str


@dataclass
class Case:
    """One cell with all that is known of it. `scraped`: by source, as far as its scrape covers the window."""

    name: str
    target: str
    load: str
    cell: Cell
    window: Window
    end: Mapping[str, object] = field(default_factory=dict)
    replicas: Mapping[str, Figures] = field(default_factory=dict)  # metrics URL -> what it said
    silent: Sequence[str] = ()  # metrics URLs that were asked and said too little, or nothing
    host: Figures | None = None
    gpu: Figures | None = None
    urls: Sequence[str] = ()  # of the target, as its records count them
    every_s: float | None = None  # of the scrapes
    siblings: Sequence["Case"] = ()  # the other cells of the target

    @cached_property
    def server(self) -> Figures | None:
        return total(self.replicas.values())

    @cached_property
    def ok(self) -> np.ndarray:
        """Mask (n,) of the ok requests due in the window."""
        return np.asarray(due_in(self.cell, self.window) & outcome_in(self.cell, "ok"))

    @cached_property
    def parts(self) -> Decomposition | None:
        return decompose(self.cell, self.window, self.server)

    def values(self, series: str) -> np.ndarray:
        """Of the ok requests due in the window, those that have one."""
        found = SERIES[series].of(self.cell, NOTHING).values[self.ok]
        return np.asarray(found[~np.isnan(found)])

    @cached_property
    def work(self) -> Work:
        return work_of(self.cell, self.window)

    @cached_property
    def energy(self) -> Energy | None:
        """Of this machine's GPUs."""
        return spent(self.cell, self.window, self.gpu)

    def metric(self, name: str) -> float | None:
        return metrics.compute(name, self.cell, self.window).value

    def said(self, metric: str) -> float | None:
        """What the server's own metrics say, all replicas together; None of a counter that fell."""
        return self.server.value(metric) if self.server and not self.fell(metric) else None

    def fell(self, metric: str) -> str:
        """Why a counter's increase is not known: it fell between two scrapes; "" where it never did."""
        found = self.server.of.get(metric) if self.server else None
        return found.fell if found else ""

    def scraped_part(self) -> str:
        """Of how much of the window the server's metrics are, where that is not most of it; "" where it is, or without.

        Of several replicas it is when all of them told: one that was not looked at may have had the trouble.
        """
        if self.replicas and self.silent:
            return f"{clean(self.silent[0])}: too few scrapes in or around the window"
        return self._part("the server's metrics were scraped", *self.replicas.values())

    def gpus_part(self) -> str:
        """The same of the GPUs, as `gpus` has them."""
        return self._part("the GPUs were looked at", self.gpu) if self.gpu else self.scraped_part()

    def _part(self, what: str, *of: Figures) -> str:
        start_ns = max([self.window.start_ns, *(figures.start_ns for figures in of)])
        seconds = max(min([self.window.end_ns, *(figures.end_ns for figures in of)]) - start_ns, 0) / 1e9
        whole = self.window.seconds
        return "" if seconds >= LEAST_COVERED * whole else f"{what} over {seconds:.1f} of the window's {whole:.1f} s"

    def most(self, metric: str) -> float | None:
        return self.server.of[metric].most if self.server and metric in self.server.of else None

    def gpus(self, metric: str) -> float | None:
        """Of this machine's GPUs, or of the server's where it exports them."""
        of = self.gpu or self.server
        return of.value(metric) if of else None

    def names(self, *wanted: str) -> str:
        """The metrics a finding rests on, as they are called on the wire, with the interval of the scrapes."""
        found = [self.server.of[m].name for m in wanted if self.server and m in self.server.of]
        every = "" if self.every_s is None else f", scraped every {self.every_s:g} s"
        return f"{', '.join(found)}{every}"

    @cached_property
    def prompt_tokens(self) -> np.ndarray:
        """Of every request, as the server counted them, else as planned; -1 where neither is known."""
        return np.asarray(np.where(self.cell["tokens_in"] >= 0, self.cell["tokens_in"], self.cell["planned_in"]))


def work_of(cell: Cell, window: Window) -> Work:
    """What the ok requests due in a window were to the server, by how their answers came.

    Text that came whole without a count may be of any number of tokens; an answer without text or tokens, as
    embeddings and scores are, is one pass.
    """
    ok = due_in(cell, window) & outcome_in(cell, "ok")
    if not ok.any():
        return "unknown"
    tokens = cell["tokens_out"][ok]
    said = tokens[tokens >= 0]
    if (cell.counts[ok] > 1).any() or (len(said) and said.mean() >= LEAST_TOKENS):
        return "decoding"
    dialect = DIALECTS.get(str((cell.header.get("target") or {}).get("api")))
    passes = dialect is not None and dialect.comes.single_pass
    return "single pass" if len(said) or passes or not cell["text_bytes"][ok].any() else "unknown"


def related(cases: Sequence[Case]) -> list[Case]:
    """Each case with the others of its target as siblings."""
    for a, b in combinations(cases, 2):
        if a.target == b.target:
            a.siblings, b.siblings = (*a.siblings, b), (*b.siblings, a)
    return list(cases)


def cached_share(case: Case) -> tuple[float, str] | None:
    """Share of prompt tokens from the cache, and by whose word; None where nobody says it."""
    rows = case.ok & (case.cell["tokens_cached"] >= 0) & (case.cell["tokens_in"] > 0)
    if rows.any():
        cached, all_ = (float(case.cell[name][rows].sum()) for name in ("tokens_cached", "tokens_in"))
        return cached / all_, IN_USAGE
    hits, queries = case.said("cache_hits"), case.said("cache_queries")
    if hits is None or not queries:
        return None
    return hits / queries, case.names("cache_hits", "cache_queries")


class Flushes(NamedTuple):
    """Events that came together, request by request."""

    every_ms: float  # median time from one flush to the next
    spread: float  # quartiles of it apart, as a share
    tokens: float  # mean tokens a flush
    varies: float  # standard deviation of them, as a share
    events: float  # mean events a flush
    observed: int


def flushes(cell: Cell, rows: np.ndarray) -> Flushes | None:
    """Of the requests `rows` (n,); first and last flush of each left out. None where there are too few."""
    row, ns = np.repeat(np.arange(cell.n), cell.counts), cell.event_ns
    weight = np.maximum(cell.event_tokens, 1) if cell.event_tokens.any() else _even_tokens(cell)
    keep = rows[row]
    row, ns, weight = row[keep], ns[keep], weight[keep]
    if len(ns) < 2:
        return None
    gap_ms = np.diff(ns) / 1e6
    within = row[1:] == row[:-1]
    if not within.any():
        return None
    apart = max(float(np.quantile(gap_ms[within], 0.9)) * 0.2, 1e-6)  # below this they came with one flush
    begins = np.concatenate([[True], ~within | (gap_ms > apart)])
    at = np.flatnonzero(begins)
    tokens, of = np.add.reduceat(weight, at), row[at]
    events = np.diff(np.append(at, len(ns)))
    inner = np.concatenate([[False], of[1:] == of[:-1]]) & np.concatenate([of[1:] == of[:-1], [False]])
    every = np.concatenate([[0.0], np.diff(ns[at]) / 1e6])[inner]
    tokens, events = tokens[inner], events[inner]
    if len(every) < LEAST_FLUSHES:
        return None
    low, middle, high = (float(x) for x in np.quantile(every, (0.25, 0.5, 0.75)))
    return Flushes(
        middle,
        (high - low) / middle,
        float(tokens.mean()),
        float(tokens.std() / tokens.mean()),
        float(events.mean()),
        len(every),
    )


def _even_tokens(cell: Cell) -> np.ndarray:
    """Where the wire does not say, an answer's tokens are shared out evenly over its events."""
    return np.repeat(np.maximum(cell["tokens_out"], cell.counts) / np.maximum(cell.counts, 1), cell.counts)
