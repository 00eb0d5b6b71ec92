"""Where the time of a cell's answers went: client lag, network, queue, prefill, decode; and what nobody accounts for.

The client's own part and the sum are measured by this client. Between them stands the server's account: of each answer
where it says so in it, else the means of its histograms, which are of all requests that ended between two scrapes. What
is in neither is not made up: it is the rest, and its share is the error of the whole.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llm_bench.columns import Cell
from llm_bench.series import NOTHING, SERIES, due_in, outcome_in, single_pass
from llm_bench.server_metrics import Figures
from llm_bench.windows import Window

LEAST_SAID = 0.9  # of the requests have to bear a server's figure, for it to stand for them all
POPULATION_APART = 0.2  # a histogram that counted so much more or fewer requests is of other requests too
ADDS_UP, ADDS_UP_MS = 0.1, 5.0  # of e2e: a rest larger than both is said to be one
IN_ANSWERS, SCRAPED, STAMPS = "the server, in its answers", "the server's histogram", "this client's stamps"


class Part(NamedTuple):
    """A part of the mean time from due to the last token. `ms`: None where it is not known, and `why`."""

    name: str
    ms: float | None
    source: str = ""
    why: str = ""


class Decomposition(NamedTuple):
    """`parts` and `rest_ms` add up to `e2e_ms`, the mean of the ok requests that were due in the window."""

    e2e_ms: float
    requests: int
    parts: list[Part]
    rest_ms: float  # e2e less the parts: tokenizing, HTTP, the way back; below 0: the accounts overlap
    notes: list[str]

    @property
    def error(self) -> float:
        """The rest as a share of the whole."""
        return abs(self.rest_ms) / self.e2e_ms if self.e2e_ms else 0.0

    @property
    def unknown(self) -> list[str]:
        """Parts that nobody says: they are in the rest."""
        return [p.name for p in self.parts if p.ms is None]

    @property
    def adds_up(self) -> bool:
        return not self.unknown and abs(self.rest_ms) <= max(ADDS_UP * self.e2e_ms, ADDS_UP_MS)

    def ms(self, name: str) -> float | None:
        return next((p.ms for p in self.parts if p.name == name), None)


class Account(NamedTuple):
    """The server's mean of one of its parts, None where it says nothing of it."""

    ms: float | None
    source: str = ""


def decompose(cell: Cell, window: Window, scraped: Figures | None = None) -> Decomposition | None:
    """The mean e2e of a cell in parts; None where no request of the window was ok."""
    ok = due_in(cell, window) & outcome_in(cell, "ok")
    e2e = SERIES["e2e"].of(cell, NOTHING).values
    ok &= ~np.isnan(e2e)
    if not ok.any():
        return None
    mean = {name: float(np.mean(SERIES[name].of(cell, NOTHING).values[ok])) for name in ("e2e", "lag", "ttft_sent")}
    parts = [Part("client lag", mean["lag"], STAMPS), _network(cell)]
    parts += _before_decode(cell, ok, scraped)
    decode = account(cell, ok, scraped, "decode")
    if decode.ms is not None:
        parts.append(Part("decode", decode.ms, decode.source))
    elif not np.isnan(mean["ttft_sent"]):
        between_ms = float((cell.last_ns - cell.first_ns)[ok].mean()) / 1e6
        parts.append(Part("decode", between_ms, f"{STAMPS}, first to last token"))
    elif not single_pass(cell):  # which decodes nothing
        parts.append(Part("decode", None, why="the server does not say it, and nothing was streamed"))
    rest = mean["e2e"] - sum(p.ms for p in parts if p.ms is not None)
    notes = _notes(cell, window, scraped) if any(p.source.startswith(SCRAPED) for p in parts) else []
    return Decomposition(mean["e2e"], int(ok.sum()), parts, rest, notes)


def pooled(of: Sequence[Decomposition]) -> Decomposition | None:
    """One or more runs of a load as one, each by its requests; None where they do not have the same parts."""
    names = [[p.name for p in one.parts] for one in of]
    if any(mine != names[0] for mine in names):
        return None
    weights = [one.requests for one in of]
    total = sum(weights)

    def mean(values: Sequence[float]) -> float:
        return sum(w * v for w, v in zip(weights, values, strict=True)) / total

    parts = []
    for same in zip(*(one.parts for one in of), strict=True):
        known = [p.ms for p in same if p.ms is not None]
        why = next((p.why for p in same if p.ms is None), "")
        sources = " or ".join(dict.fromkeys(p.source for p in same if p.source))
        parts.append(Part(same[0].name, mean(known) if not why else None, "" if why else sources, why))
    e2e = mean([one.e2e_ms for one in of])
    rest = e2e - sum(p.ms for p in parts if p.ms is not None)
    return Decomposition(e2e, total, parts, rest, list(dict.fromkeys(note for one in of for note in one.notes)))


def account(cell: Cell, ok: np.ndarray, scraped: Figures | None, name: str) -> Account:
    """The server's mean of a part (queue, prefill, decode, ttft) over the requests `ok` (n,)."""
    said = cell[f"server_{name}_ms"][ok]
    known = said[~np.isnan(said)]
    if len(known) and len(known) >= LEAST_SAID * len(said):
        return Account(float(known.mean()), IN_ANSWERS)
    metric = "server_ttft" if name == "ttft" else f"{name}_time"
    figure = scraped.of.get(metric) if scraped else None
    if figure is None or figure.value is None or not np.isfinite(figure.value) or figure.resets:
        return Account(None)
    return Account(figure.value, f"{SCRAPED} {figure.name}")


def prefill_account(cell: Cell, ok: np.ndarray, scraped: Figures | None) -> Account:
    """The server's mean prefill over the requests `ok` (n,), by its word; where it gives, as vLLM does in its answers,
    queue and time to the first token alone, what is between the two.
    """
    said, queue, both = (account(cell, ok, scraped, name) for name in ("prefill", "queue", "ttft"))
    if said.ms is not None or queue.ms is None or both.ms is None or both.ms < queue.ms:
        return said
    return Account(both.ms - queue.ms, f"{both.source}: to the first token, less the queue")


def _network(cell: Cell) -> Part:
    rtt_ms = (cell.header.get("probe") or {}).get("rtt_ms")
    if rtt_ms is None:
        return Part("network", None, why="no probe has measured a round trip")
    return Part("network", float(rtt_ms), "a round trip, by the probe before the load")


def _before_decode(cell: Cell, ok: np.ndarray, scraped: Figures | None) -> list[Part]:
    """Queue and prefill; where the server tells only both together, or one of them, so is it said."""
    queue, both = (account(cell, ok, scraped, name) for name in ("queue", "ttft"))
    prefill = prefill_account(cell, ok, scraped)
    if queue.ms is None and prefill.ms is None and both.ms is not None:
        return [Part("queue and prefill", both.ms, both.source)]
    return [
        Part(name, of.ms, of.source, "" if of.ms is not None else _silent(name, scraped))
        for name, of in (("queue", queue), ("prefill", prefill))
    ]


def _silent(name: str, scraped: Figures | None) -> str:
    figure = scraped.of.get(f"{name}_time") if scraped else None
    if figure is not None and figure.resets:
        return figure.fell
    return "the server says nothing of it: no answers that do, and no histogram that was scraped"


def _notes(cell: Cell, window: Window, scraped: Figures | None) -> list[str]:
    """Of which requests the histograms are."""
    assert scraped is not None
    notes = [f"histograms: {scraped.edges()}, of the requests that ended between them"]
    if scraped.apart:
        return notes  # how many of ours ended at each replica meanwhile is not known
    ended = cell["end_ns"][outcome_in(cell, "ok")]
    mine = int(((ended >= scraped.start_ns) & (ended < scraped.end_ns)).sum())
    figure = next((scraped.of[m] for m in ("queue_time", "decode_time", "server_ttft") if m in scraped.of), None)
    if figure is not None and abs(figure.observed - mine) > POPULATION_APART * max(mine, 1):
        notes.append(
            f"{figure.name} counted {figure.observed:.0f} requests where this client had {mine} end: others' are in "
            "the server's means, or some of ours are not"
        )
    return notes
