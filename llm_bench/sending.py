"""What the client was asked to offer and what it did: rates, lateness and its trend, requests in flight."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llm_bench.columns import Cell
from llm_bench.identities import Little
from llm_bench.series import due_in
from llm_bench.server_metrics import Figures
from llm_bench.windows import Window

LEAST_REQUESTS = 3  # a slope through two points is no trend


class Sending(NamedTuple):
    """Of the requests due in the window that were sent. Rates are over the span of their due times and of their sends.

    A client that sleeps relatively shows here: its sent rate is below the one due, and its lag grows from request to
    request (vllm-project/vllm#21104: 183.5 of 200 a second).
    """

    requests: int
    due_per_s: float
    sent_per_s: float
    lag_p50_ms: float  # sent - due
    lag_p99_ms: float
    lag_max_ms: float
    lag_slope: float  # least squares of lag over due time, milliseconds a second

    @property
    def text(self) -> str:
        return (
            f"sent {self.sent_per_s:.6g} requests/s where {self.due_per_s:.6g} were due; lag p50 {self.lag_p50_ms:.3g} "
            f"ms, p99 {self.lag_p99_ms:.3g} ms, max {self.lag_max_ms:.3g} ms, "
            f"{'growing' if self.lag_slope >= 0 else 'falling'} by {abs(self.lag_slope):.2g} ms a second"
        )


def sending(cell: Cell, window: Window) -> Sending | None:
    """None in a closed loop, where answers decide when requests are due, and of too few requests to have a rate."""
    if (cell.header.get("load") or {}).get("kind") == "closed":
        return None
    rows = due_in(cell, window) & (cell["sent_ns"] > 0)
    due, sent = cell["due_ns"][rows], cell["sent_ns"][rows]
    n = len(due)
    if n < LEAST_REQUESTS or due[-1] == due[0] or sent.max() == sent.min():
        return None
    lag_ms = (sent - due) / 1e6
    due_s = (due - due[0]) / 1e9
    apart = due_s - due_s.mean()
    p50, p99, most = np.quantile(lag_ms, (0.5, 0.99, 1)).tolist()
    return Sending(
        n,
        float((n - 1) / due_s[-1]),
        float((n - 1) / ((sent.max() - sent.min()) / 1e9)),
        p50,
        p99,
        most,
        float(apart @ lag_ms / (apart @ apart)),
    )


def in_flight(cell: Cell, law: Little, servers: Sequence[Figures]) -> str:
    """The client's time average beside its setting and what the servers' gauges said; "" where neither is known.

    `servers`: a replica each. A scrape sees a request a round trip later than its sender, and only every so often;
    where the window is too short for two of them, those around it count, and it is said.
    """
    slots = (cell.header.get("load") or {}).get("concurrency")
    said = [(of.value("running"), of.value("waiting")) for of in servers]
    known = [running + (waiting or 0.0) for running, waiting in said if running is not None]
    if slots is None and not known:
        return ""
    mean = law.records if law.gauge is None else law.gauge
    line = f"in flight: {mean:.4g} on average at the client" + (f", where {slots} were asked for" if slots else "")
    if not known:
        return line
    of = f" (of {len(known)} of {len(said)} URLs)" if len(known) < len(said) else ""
    queued = ", those in its queue too" if any(waiting is not None for _, waiting in said) else ""
    around = next((f", {of_.edges()}" for of_ in servers if of_.value("running") is not None and not of_.inside), "")
    return f"{line}; {sum(known):.4g} by the server's gauge{queued}{of}{around}"
