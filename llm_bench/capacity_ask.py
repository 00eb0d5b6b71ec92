"""What a capacity plan is asked, and what its answer is made of: sections of figures, each with its arithmetic."""

import datetime
from collections.abc import Sequence
from typing import NamedTuple

from llm_bench.accelerators import Accelerator
from llm_bench.capacity import Growth, Prices
from llm_bench.kv_cache import KvShape, Memory
from llm_bench.objectives import NO_SLO, Slo


class Figure(NamedTuple):
    """One number of the report. `value` None: `how` says why there is none."""

    key: str
    name: str
    value: float | None
    unit: str
    how: str = ""


class Table(NamedTuple):
    heads: tuple[str, ...]
    rows: list[tuple[str | float | None, ...]]


class Section(NamedTuple):
    key: str
    title: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


# ---- what is given


class Hardware(NamedTuple):
    """What a replica runs on and what its cache is made of. `held`: bytes of a token, where no shape is known."""

    memory: Memory
    memory_text: str
    weights_text: str
    accelerators: int
    accelerator: Accelerator | None
    shape: KvShape | None
    held: float | None
    kv_bytes: float  # of one cached number
    copies: float  # of the cache over the replica's accelerators
    block_size: int
    context: int | None  # limit of the model


class Demand(NamedTuple):
    """What the fleet is for. `target`: mean requests/s; `peak`: times it at the worst moment planned for."""

    target: float | None = None
    peak: float = 1.0
    peak_text: str = "no --peak-to-mean: the target rate is taken as the peak"
    spares: int = 0
    warmup_s: float | None = None
    growth: Growth | None = None
    as_of: datetime.date | None = None


class WhatIf(NamedTuple):
    """Figures assumed instead of measured."""

    tokens_per_second: float | None = None
    tokens_out: float | None = None
    stay_s: float | None = None
    in_flight: float | None = None
    resident_tokens: float | None = None


class Ask(NamedTuple):
    slo: Slo = NO_SLO
    hardware: Hardware | None = None
    demand: Demand = Demand()
    prices: Prices | None = None
    money: str = ""  # the currency as typed
    utilization: float = 0.7
    at_loads: tuple[float, ...] = ()  # where the curves are to be read
    delays_ms: tuple[float, ...] = ()  # batch window of each run, in their order


def digits(value: float | None) -> str:
    """Four digits or so, whole where it is."""
    if value is None:
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
