"""Did two cells ask the same of the same model, and get as much? What differs is named with the figures of both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from llm_bench import metrics, windows
from llm_bench.columns import Cell
from llm_bench.protocol import same_build
from llm_bench.series import exactly_counted, outcome_in, single_pass

MAX_TOKENS_OFF = 0.02  # a request, prompt or answer; tokens a word of the probe's text
MAX_BYTES_OFF, MAX_HEAD_OFF = 0.1, 64  # of a request; bytes that names of hosts and models may be apart
MAX_SHARE_APART = 0.02  # of answers, by what ended them
MAX_CACHED_APART = 0.05  # of prompt tokens
MAX_RTT_SHARE = 0.1  # of the smaller TTFT

# What the protocols call the two ways in which a whole answer ends: TGI's details, Triton's and Ollama's words.
ENDS = {"eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop", "eos": "stop", "max_tokens": "length"}


class Difference(NamedTuple):
    """What of the work of two cells is not the same: a key of CHECKS, and the figures of both by name."""

    check: str
    text: str


@dataclass
class Side:
    """One of two cells, under the name that a reader knows it by: of its target, or of its run."""

    name: str
    cell: Cell

    def said(self, section: str) -> Mapping[str, Any]:
        found = self.cell.header.get(section)
        return found if isinstance(found, Mapping) else {}

    @property
    def load(self) -> str:
        said = self.said("load")
        return str(said.get("label") or [said.get(key) for key in ("kind", "concurrency", "rate", "speed")])

    @cached_property
    def ok(self) -> np.ndarray:
        """Rows of the ok requests, in due order."""
        return np.flatnonzero(outcome_in(self.cell, "ok"))

    @cached_property
    def ttft_ms(self) -> float | None:
        return metrics.compute("ttft_p50", self.cell, windows.of(self.cell)).value


Checks = Mapping[str, Callable[[Side, Side], str]]  # the figures of both where they differ, else ""


def same_work(sides: Sequence[Side]) -> list[Difference]:
    """What differs between the first name and each other, load by load; of several cells of one name in turn."""
    by_load: dict[str, dict[str, list[Side]]] = {}
    for side in sides:
        by_load.setdefault(side.load, {}).setdefault(side.name, []).append(side)
    found: list[Difference] = []
    for by_name in by_load.values():
        first, *others = by_name.values()
        found += [d for other in others for pair in zip(first, other, strict=False) for d in differences(*pair)]
    return list(dict.fromkeys(found))


def differences(a: Side, b: Side, checks: Checks | None = None) -> list[Difference]:
    """In the order of `checks`, all by default. What only one of them says is no difference.

    Of a single pass and an answer made token by token it is the one difference: nothing else of them can be compared.
    """
    checks = CHECKS if checks is None else checks
    if KIND in checks and (other := _kind(a, b)):
        return [Difference(KIND, other)]
    return [Difference(name, text) for name, check in checks.items() if (text := check(a, b))]


def first_line(found: Sequence[Difference]) -> str:
    """What a comparison says before its figures; "" where nothing differs. Of each check the first finding stands."""
    if not found:
        return ""
    first = {d.check: d.text for d in reversed(found)}
    texts = [first[check] for check in CHECKS if check in first]
    more = f" ({len(found) - len(texts)} more)" if len(found) > len(texts) else ""
    return f"not the same work: {'; '.join(texts)}{more}"


def agreement(a: Side, b: Side) -> tuple[int, int] | None:
    """(prompts with the same greedy answer, prompts), where both probes recorded their answers to the fixed prompts.

    A figure and no check: engines that round differently part ways though they do the same work.
    """
    mine, theirs = (side.said("probe").get("agreement") for side in (a, b))
    if not isinstance(mine, list) or not isinstance(theirs, list) or not mine or len(mine) != len(theirs):
        return None
    return sum(x == y for x, y in zip(mine, theirs, strict=True)), len(mine)


def parting(x: str, y: str) -> int | None:
    """The character at which two answers part; None: they are the same."""
    if x == y:
        return None
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def costs_apart(x: Sequence[int], y: Sequence[int]) -> str:
    """What the same prompts cost in tokens on two sides, where more than a template is between them; else ""."""
    if not x or len(x) != len(y) or len({b - a for a, b in zip(x, y, strict=True)}) == 1:
        return ""
    return f"the same prompts cost {', '.join(map(str, x))} tokens here, {', '.join(map(str, y))} there"


def _kind(a: Side, b: Side) -> str:
    x, y = (single_pass(side.cell) for side in (a, b))
    if x is y or not len(a.ok) or not len(b.ok):
        return ""
    said = {True: "comes of a single pass", False: "is decoded token by token"}
    return f"an answer {said[x]} at {a.name}, {said[y]} at {b.name}"


def _declared(a: Side, b: Side) -> str:
    """Of the model the name that was asked for: what the server said where the user did not; so of its build."""
    found = []
    for key in ("model", "revision", "precision", "tokenizer"):
        x, y = (side.said("target").get(key) for side in (a, b))
        if key == "model":
            x, y = (side.said("probe").get(key) or of for side, of in ((a, x), (b, y)))
        elif key in ("revision", "precision"):
            x, y = (of or _told(side, key) for side, of in ((a, x), (b, y)))
            if isinstance(x, str) and isinstance(y, str) and same_build(x, y):
                continue
        if x and y and x != y:
            found.append(f"{key} {x!r} at {a.name}, {y!r} at {b.name}")
    return "; ".join(found)


def _told(side: Side, key: str) -> Any:
    told = side.said("probe").get("told")
    return told.get(key) if isinstance(told, Mapping) else None


def _tokenizer(a: Side, b: Side) -> str:
    x, y = (of.get("tokens_per_word") if of.get("sized", True) else None for of in (s.said("probe") for s in (a, b)))
    if isinstance(x, int | float) and isinstance(y, int | float) and min(x, y) > 0 and not _near(x, y):
        return f"a word costs {x:.3g} tokens at {a.name}, {y:.3g} at {b.name}"
    mine, theirs = (side.said("probe").get("agreement_tokens") for side in (a, b))
    if not isinstance(mine, list) or not isinstance(theirs, list):
        return ""
    return costs_apart(mine, theirs) if all(isinstance(n, int) for n in (*mine, *theirs)) else ""


def _prompt_tokens(a: Side, b: Side) -> str:
    return _a_request(a, b, "tokens_in", "prompt tokens") or _bytes_sent(a, b)


def _bytes_sent(a: Side, b: Side) -> str:
    """Where one side counts no prompt tokens: in two runs a word was taken for one there; in one both get a length."""
    silent = [side.name for side in (a, b) if not (side.cell["tokens_in"][side.ok] > 0).any()]
    sent = [side.cell["bytes_out"][rows] for side, rows in zip((a, b), _both(a, b), strict=True)]
    if not silent or any(not len(bytes_) or bytes_.min() < 0 for bytes_ in sent):
        return ""
    x, y = (float(bytes_.mean()) for bytes_ in sent)
    if abs(x - y) <= max(MAX_BYTES_OFF * min(x, y), MAX_HEAD_OFF):
        return ""
    return (
        f"bytes sent a request {x:,.0f} at {a.name}, {y:,.0f} at {b.name} ({y / x - 1:+.1%}), and "
        f"{' and '.join(silent)} counts no prompt tokens"
    )


def _delivered(a: Side, b: Side) -> str:
    return _a_request(a, b, "tokens_out", "delivered tokens")


def _a_request(a: Side, b: Side, field: str, name: str) -> str:
    """Tokens a request that the server counted, of the requests that are ok on either side."""
    means = []
    for side, rows in zip((a, b), _both(a, b), strict=True):
        counts = side.cell[field][rows]
        counted = counts > 0
        if field == "tokens_out":
            counted &= (exactly_counted(side.cell) | ~side.cell.among("tokens_out_from", "events"))[rows]
        if not counted.any():
            return ""
        means.append(float(counts[counted].mean()))
    x, y = means
    if _near(x, y):
        return ""
    return f"{name} a request {x:.4g} at {a.name}, {y:.4g} at {b.name} ({y / x - 1:+.1%})"


def _both(a: Side, b: Side) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the requests that are ok on both sides, by their place in the plan; all that are ok where plans differ.

    A place means one request only where both have as many: a trace loses rows that are too long for a target.
    """
    if a.said("plan").get("requests") != b.said("plan").get("requests"):
        return a.ok, b.ok
    mine, theirs = (side.cell["index"][side.ok] for side in (a, b))
    _, left, right = np.intersect1d(mine, theirs, return_indices=True)
    return a.ok[left], b.ok[right]


def _ends(a: Side, b: Side) -> str:
    """Why answers ended: the same share by the limit and by the model's own word. Where one says nothing: unknown."""
    shares = [_end_shares(side.cell, rows) for side, rows in zip((a, b), _both(a, b), strict=True)]
    x, y = shares
    if not x or not y or sum(abs(x.get(end, 0.0) - y.get(end, 0.0)) for end in {*x, *y}) / 2 <= MAX_SHARE_APART:
        return ""
    said = [", ".join(f"{end} {of[end]:.0%}" for end in sorted(of, key=lambda end: -of[end])) for of in shares]
    return f"answers ended by {said[0]} at {a.name}, by {said[1]} at {b.name}"


def _end_shares(cell: Cell, rows: np.ndarray) -> dict[str, float]:
    counts: dict[str, int] = {}
    for word in sorted(filter(None, cell.table["finish_reason"].unique().to_pylist())):
        end = ENDS.get(word.lower(), word.lower())
        counts[end] = counts.get(end, 0) + int(cell.among("finish_reason", word)[rows].sum())
    total = sum(counts.values())
    return {end: count / total for end, count in counts.items() if count}


def _cached(a: Side, b: Side) -> str:
    x, y = _cached_share(a), _cached_share(b)
    if x is None or y is None or abs(x - y) <= MAX_CACHED_APART:
        return ""
    return f"{x:.1%} of prompt tokens from the cache at {a.name}, {y:.1%} at {b.name}"


def _cached_share(side: Side) -> float | None:
    cached, tokens = (side.cell[name][side.ok] for name in ("tokens_cached", "tokens_in"))
    known = (cached >= 0) & (tokens > 0)
    return float(cached[known].sum() / tokens[known].sum()) if known.any() else None


def _round_trip(a: Side, b: Side) -> str:
    x, y = (side.said("probe").get("rtt_ms") for side in (a, b))
    if x is None or y is None or x == y:
        return ""
    ttft = [side.ttft_ms for side in (a, b) if side.ttft_ms is not None]
    if not ttft or abs(x - y) <= MAX_RTT_SHARE * min(ttft):
        return ""
    over = f"over {MAX_RTT_SHARE:.0%} of the smaller TTFT apart"
    return f"a round trip takes {x:.2f} ms to {a.name}, {y:.2f} ms to {b.name}: {over}"


def _near(x: float, y: float) -> bool:
    return abs(x - y) <= (MAX_TOKENS_OFF + 1e-9) * min(x, y)  # 2.04 - 2 is more than 0.04


KIND = "kind of work"
OF_WORK: Checks = {
    KIND: _kind,
    "declared": _declared,
    "tokenizer": _tokenizer,
    "prompt tokens": _prompt_tokens,
    "delivered tokens": _delivered,
    "finish reasons": _ends,
    "cached share": _cached,
}
OF_NETWORK: Checks = {"network path": _round_trip}
CHECKS: Checks = {**OF_WORK, **OF_NETWORK}
