"""Identities that every cell is checked against: its records and what the plan, the driver and its gauge counted."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llm_bench import windows
from llm_bench.columns import Cell
from llm_bench.records import OUTCOMES
from llm_bench.series import due_in, outcome_in
from llm_bench.server_metrics import Point, figures
from llm_bench.windows import Window

LITTLE_TOLERANCE = 0.001
SHOWN_APART = 0.01  # the gauge counts from the hand-over, the client's own lateness included
HEARD_NS = 5_000_000  # a driver hears of an end some turns of its event loop after what was stamped


def identities(cell: Cell, window: Window, end: Mapping[str, Any] | None = None) -> list[str]:
    """What does not add up, in words with figures; empty when all does (METRICS.md, Identities).

    `end`: how the driver says the cell ended; its `counts` by outcome are held against the records.
    """
    end = end or {}
    broken = []
    total = {o: int(outcome_in(cell, o).sum()) for o in OUTCOMES}
    if sum(total.values()) != cell.n:
        odd = sorted(set(cell["outcome"]) - set(OUTCOMES))
        broken.append(f"{cell.n} due, {sum(total.values())} with a known outcome; others: {', '.join(odd)}")
    ghosts = int((outcome_in(cell, "dropped") & (cell["sent_ns"] > 0)).sum())
    unsent = int((outcome_in(cell, "ok") & (cell["sent_ns"] <= 0)).sum())
    if ghosts or unsent:
        broken.append(f"{ghosts} dropped requests were sent, {unsent} ok requests never were")
    repeated = cell.n - len(np.unique(cell["index"]))
    if repeated:
        broken.append(f"{repeated} requests of the plan are recorded twice")
    lost = [text for text in (_lost_of_plan(cell, end), _lost_of_driver(total, end), _lost_of_gauge(cell)) if text]
    if lost:
        broken.append(f"records are incomplete: {'; '.join(lost)}")
    law = little(cell, window)
    if abs(law.mismatch) > LITTLE_TOLERANCE and (lost or not law.agrees):
        averages = (
            f"over the window the driver had {law.gauge:.4g} in flight on average, "
            f"the records account for {law.records:.4g} ({abs(law.mismatch):.1%} apart)"
        )
        late = "though none is lost by its count: it heard late of starts or ends, or its stamps are wrong"
        broken.append(averages if lost else f"{averages}, {late}")
    return broken


def _lost_of_plan(cell: Cell, end: Mapping[str, Any]) -> str:
    """A cell that went on until its plan was exhausted has a record of every request but the turns it never sent."""
    plan = cell.header.get("plan")
    planned = plan.get("requests") if isinstance(plan, Mapping) else None
    unsent = end.get("turns_not_sent") or 0
    if planned is None or (end.get("reason") != "exhausted" and cell.n <= planned) or planned - unsent == cell.n:
        return ""
    turns = f", of which {unsent} turns never became due" if unsent else ""
    return f"{planned} requests were planned{turns}, {cell.n} are recorded"


def _lost_of_driver(total: Mapping[str, int], end: Mapping[str, Any]) -> str:
    driver = end.get("counts")
    if not isinstance(driver, Mapping) or dict(driver) == total:
        return ""
    return f"the driver counted {dict(driver)}, recorded are {dict(total)}"


def _lost_of_gauge(cell: Cell) -> str:
    """The gauge counts starts and ends as they happen, so a lost record is missed however short its request was."""
    change = np.diff(cell.gauge[:, 1], prepend=0)
    began, ended = int(change[change > 0].sum()), int(-change[change < 0].sum())
    tried = int(windows.attempted(cell).sum())
    if not len(cell.gauge) or began == ended == tried:
        return ""
    return f"the driver's gauge saw {began} requests begin and {ended} end, {tried} are recorded"


class Little(NamedTuple):
    """L = λ·W over the window. In flight is from the last byte sent to the last read, as the records have it."""

    rate: float  # λ: attempted requests due in the window, 1/s
    stay_s: float  # W: the mean of their whole stays
    records: float  # L: the time average that the records account for
    gauge: float | None  # L as the driver counted it, None without a gauge
    mismatch: float  # of gauge and records, a share of the larger
    agrees: bool  # the gauge lies between the two readings of when a request left and ended

    @property
    def text(self) -> str:
        product = self.rate * self.stay_s
        counted = {"gauge": self.gauge, "records": self.records}
        if self.gauge is None or abs(self.mismatch) <= SHOWN_APART:
            del counted["gauge" if self.gauge is None else "records"]
        averages = " and ".join(f"{average:.4g} on average ({by})" for by, average in counted.items())
        edges = f", edges {product / self.records - 1:+.1%}" if self.records else ""
        return f"Little: {self.rate:.4g}/s x {self.stay_s:.4g} s = {product:.4g}, in flight {averages}{edges}"


def little(cell: Cell, window: Window) -> Little:
    """A driver counts a request from handing it over until it hears of the end, its record from the last byte sent to
    the last that came: a gauge between both readings of the records agrees with them.

    One that never left (refused, or cut in its connect) has no last byte sent: it was handed over at some moment from
    when it might have left to its end, so that all of its stay is between the two readings, and none is owed.
    """
    tried = windows.attempted(cell)
    sent, end = windows.left_ns(cell)[tried], cell["end_ns"][tried]
    low = windows.overlap_s(sent, end, window)
    mine = due_in(cell, window)[tried]
    stay_s = float((end - sent)[mine].mean()) / 1e9 if mine.any() else 0.0
    rate, records = int(mine.sum()) / window.seconds, low / window.seconds
    if not len(cell.gauge):
        return Little(rate, stay_s, records, None, 0.0, True)
    left = cell["sent_ns"][tried] > 0
    owed = windows.overlap_s(sent[left], end[left], window)
    ready = np.where(cell["ready_ns"][tried] > 0, np.minimum(cell["ready_ns"][tried], sent), sent)
    gauge, high = (
        windows.integral_s(cell.gauge[:, 0], cell.gauge[:, 1], window),
        windows.overlap_s(ready, end + HEARD_NS, window),
    )
    agrees = owed * (1 - LITTLE_TOLERANCE) <= gauge <= high * (1 + LITTLE_TOLERANCE)
    mismatch = (gauge - low) / max(gauge, low) if max(gauge, low) else 0.0
    return Little(rate, stay_s, records, gauge / window.seconds, mismatch, agrees)


COUNTER_TOLERANCE = 0.02  # as usage against a tokenizer


def counter_mismatch(cell: Cell, replicas: Sequence[Sequence[Point]]) -> str:
    """Tokens of the records against what the server's counters rose by, in words; "" where they agree or none tell.

    Only where scrapes stand before the first request and after the last one's end, at every replica, no counter fell,
    and every request was answered whole: of one that was cut the server may have made more than came.
    """
    if not cell.n or not all(replicas) or not replicas or not cell.among("outcome", "ok").all():
        return ""
    first, last = int(windows.left_ns(cell).min()), int(cell["end_ns"].max())
    made = 0.0
    for points in replicas:
        found = figures(points, points[0].at_ns, points[-1].at_ns + 1)
        figure = found.of.get("generated_tokens") if found else None
        if figure is None or figure.value is None or figure.resets:
            return ""
        if points[0].at_ns > first or points[-1].at_ns < last:
            return ""
        made += figure.value
    got = int(cell["tokens_out"].sum()) if (cell["tokens_out"] >= 0).all() else 0
    if not got or abs(made - got) <= COUNTER_TOLERANCE * got:
        return ""
    return f"the server counted {made:,.0f} tokens made meanwhile, the records hold {got:,} ({made / got - 1:+.1%})"
