"""How the requests of a cell ended: failures by kind and HTTP status, and what retries hid."""

from typing import NamedTuple

import numpy as np

from llm_bench.columns import Cell
from llm_bench.series import outcome_in


class Failure(NamedTuple):
    kind: str
    requests: int
    statuses: dict[int, int]  # HTTP statuses that are errors, the most frequent first
    first_error: str

    @property
    def text(self) -> str:
        """`http_5xx 500 x3, 502 x1`; a kind that no status explains has its count alone."""
        listed = ", ".join(f"{status} x{n}" for status, n in self.statuses.items())
        if sum(self.statuses.values()) == self.requests:
            return f"{self.kind} {listed}"
        return f"{self.kind} {self.requests}" + (f" ({listed})" if listed else "")


def failures(cell: Cell, rows: np.ndarray | None = None) -> list[Failure]:
    """Of the failed requests, or of those in mask `rows`; by kind."""
    failed = np.flatnonzero(outcome_in(cell, "failed") & (True if rows is None else rows))
    found = []
    for kind in np.unique(cell["error_kind"][failed].astype(str)):
        mine = failed[cell["error_kind"][failed] == kind]
        statuses, counts = np.unique(cell["status"][mine], return_counts=True)
        often = np.argsort(-counts, kind="stable")
        said = {int(statuses[i]): int(counts[i]) for i in often if statuses[i] >= 400}
        found.append(Failure(str(kind), len(mine), said, str(cell.at("error", mine[0]))))
    return found


class Attempts(NamedTuple):
    """What retries hid. A retry is a new attempt; the wait before it is as Retry-After asked, where the server did."""

    requests: int  # ok and failed ones
    first_ok: int
    attempts: int
    waited_s: float

    @property
    def text(self) -> str:
        return (
            f"{self.first_ok} of {self.requests} ok at the first attempt; {self.attempts} attempts in all, "
            f"{self.waited_s:.4g} s of waiting between them (Retry-After included)"
        )


def attempts(cell: Cell, rows: np.ndarray) -> Attempts | None:
    """Of the requests in mask `rows`; None where nothing in the cell was tried twice."""
    if not retried(cell).any():
        return None
    judged = rows & outcome_in(cell, "ok", "failed")
    first_ok = int((judged & cell.among("first_attempt", "ok")).sum())
    waited_s = float(cell["retry_wait_ns"][judged].sum()) / 1e9
    return Attempts(int(judged.sum()), first_ok, int(cell["attempts"][judged].sum()), waited_s)


def retried(cell: Cell) -> np.ndarray:
    """Mask of the requests with more than one attempt."""
    return np.asarray(cell["attempts"] > 1)
