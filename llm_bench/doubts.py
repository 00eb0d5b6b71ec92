"""Reasons to distrust a cell, each with its figures and what to do about it; CHECKS is the table."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llm_bench import metrics, windows
from llm_bench.client import CLIENT_CHECKS
from llm_bench.columns import Cell
from llm_bench.facts import NO_END, Facts, stopped
from llm_bench.identities import identities
from llm_bench.metrics import Value
from llm_bench.outcomes import failures, retried
from llm_bench.series import NOTHING, ONE_STAMP, SERIES, outcome_in
from llm_bench.windows import Window

MAX_TOKENS_OFF = 0.02  # delivered against asked, prompt tokens against planned
MAX_CACHED_SHARE = 0.01
MAX_BURST_SHARE = 0.5
MAX_FAILED_SHARE = 0.01  # all failures are listed; above this the ok ones are no longer the whole story
MAX_WAITING_SHARE = 0.2
MAX_RTT_SHARE = 0.1  # of the smaller TTFT
QUIET_GAPS = 10  # mean gaps without an arrival: by chance once in 20,000 times


class Doubt(NamedTuple):
    kind: str
    text: str


def doubts(
    cell: Cell,
    window: Window,
    siblings: Sequence[Cell] = (),
    values: Sequence[Value] = (),
    end: Mapping[str, Any] | None = None,
) -> list[Doubt]:
    """Every doubt that the records, the header and the driver's last word give rise to, in the order of CHECKS."""
    facts = Facts(cell, window, siblings, values, end or {})
    return [Doubt(kind, text) for kind, check in CHECKS.items() if (text := check(facts))]


# ---- the sample ----


def _incomplete(f: Facts) -> str:
    if f.cell.complete:
        return ""
    if f.cell.absent:
        named = f"{', '.join(f.cell.absent)} of {f.cell.header.get('workers')} workers' files"
        return f"{named} is not there: what is in it is missing from rates and counts. Repeat it"
    return f"the record file ends in the middle (a crash?): {f.cell.n} whole requests, later ones are lost. Repeat it"


def _stopped(f: Facts) -> str:
    planned = f.header("plan").get("requests") or f.cell.n
    if f.reason == NO_END:
        return f"{f.stopped}; {f.cell.n} of at most {planned} requests are recorded. Run it again"
    if stopped(f.reason):
        lost = int(f.cell.labelled("lost with its worker").sum())
        left = f"; {lost} requests that it had begun are lost with it" if lost else ""
        return f"{f.stopped}{left}. Run it again"
    if f.reason != "exhausted" or not _fell_short(f):
        return ""
    if f.header("settings").get("loop_trace"):
        return f"the {planned} requests planned at most ran out before --duration was over. Give --requests above that"
    return f"the {planned} requests ran out before --duration was over. Give more, or --loop-trace"


def _fell_short(f: Facts) -> bool:
    """Of --duration: a closed loop that ran out, or an open one whose last request came long before its end."""
    duration_s, n = f.header("load").get("duration_s"), f.cell.n
    if not duration_s or f.header("load").get("kind") == "closed" or n < 2:
        return bool(duration_s)
    due = f.cell["due_ns"]
    ran_s = (int(due[-1]) - (f.end.get("start_ns") or int(due[0]))) / 1e9
    return bool(duration_s - ran_s > QUIET_GAPS * (due[-1] - due[0]) / 1e9 / (n - 1))


def _too_short(f: Facts) -> str:
    if f.window.state != windows.TOO_SHORT:
        return ""
    slots = f.header("load").get("concurrency")
    least = windows.LEAST_WAVES * slots if slots else windows.LEAST_OPEN
    found = f"{f.window.requests} requests in the window, at least {least} are needed"
    if f.window.requests >= least:
        found = f"the first requests took longer than the {f.window.seconds:.1f} s of the window: load was still rising"
    if not f.window.opened:
        found = "the window never opened, so the figures are of the whole run, its ramp and drain included"
    return f"{found}; {f.stopped}" if f.stopped else f"{found}. Give more --requests or a longer --duration"


def _overload(f: Facts) -> str:
    if not f.window.growth:
        return ""
    grows = f"backlog grows {f.window.growth:.2f} requests/s where {f.figure('arrival_rate'):.2f}/s arrive"
    if f.stopped:
        return f"{grows}; but records that are lost look like a backlog, and {f.stopped}"
    return f"{grows}, so all other figures depend on how long the run was. Lower --rate or --speed"


def _not_sustained(f: Facts) -> str:
    """Requests that the cap still holds back at the last due time: the offered rate was never sent."""
    tried = windows.attempted(f.cell)
    due, ready = f.cell["due_ns"], f.cell["ready_ns"]
    if f.header("load").get("kind") == "closed" or f.cell.n < 2 or due[-1] == due[0]:
        return ""
    waiting = int(((due < due[-1]) & ((ready > due[-1]) | ~tried)).sum()) + int(ready[-1] > due[-1] + 1e6)
    if waiting < 2 or waiting <= MAX_WAITING_SHARE * f.cell.n:
        return ""
    ok, last = outcome_in(f.cell, "ok"), int(f.cell["end_ns"].max())
    offered = (f.cell.n - 1) / ((due[-1] - due[0]) / 1e9)
    span_s = (last - int(due[0])) / 1e9
    cap = f.header("load").get("max_in_flight")
    held = f"the cap of {cap} in flight" if cap else "the client"
    return (
        f"offered {offered:.2f}/s, completed {int(ok.sum()) / span_s:.2f}/s over {span_s:.1f} s; "
        f"{waiting} of {f.cell.n} requests were still held back by {held} at the last due time. "
        "Lower the rate or raise the cap"
    )


def _few(f: Facts) -> str:
    short = [v for v in f.values if v.few]
    if not short:
        return ""
    found = f"{', '.join(v.name for v in short)}: {'; '.join(dict.fromkeys(v.refusal for v in short))}"
    return f"{found}. {'Read' if f.stopped else 'Give more --requests, or read'} a lower percentile"


def _cut(f: Facts) -> str:
    cut = int((f.due & outcome_in(f.cell, "cut_at_end")).sum())
    if not cut:
        return ""
    cause = "" if f.reason == NO_END else stopped(f.reason)
    when = f"when {cause}" if cause else "at the end"
    advice = ". Raise --drain" if f.reason in ("exhausted", "duration") else ""
    return f"{cut} of {int(f.due.sum())} were in flight {when}: neither slow nor fast, left out{advice}"


def _identities(f: Facts) -> str:
    return "; ".join(identities(f.cell, f.window, f.end))


# ---- the work ----


def _delivered(f: Facts) -> str:
    rows = f.ok & (f.cell["asked_out"] > 0) & (f.cell["tokens_out"] >= 0) & ~f.cell.among("tokens_out_from", "events")
    asked, got = int((f.cell["asked_out"] * f.cell.choices)[rows].sum()), int(f.cell["tokens_out"][rows].sum())
    if not asked or abs(got / asked - 1) <= MAX_TOKENS_OFF:
        return ""
    pinned = f.header("probe").get("lengths_pinned")
    cause = "although a probe showed that lengths can be pinned" if pinned else "the server ends answers itself"
    if got > asked:
        cause = "the server goes on past max_tokens, or its usage counts more than the answer"
    return f"{got} of {asked} asked ({got / asked:.1%}): {cause}. Compare tokens, not requests"


def _not_pinned(f: Facts) -> str:
    if f.header("probe").get("lengths_pinned", True) or not (f.ok & (f.cell["asked_out"] > 0)).any():
        return ""
    return "the target may end answers where it likes: other targets may be doing other work. Compare tokens/s"


def _prompt_tokens(f: Facts) -> str:
    rows = f.ok & (f.cell["tokens_in"] >= 0) & (f.cell["planned_in"] > 0)
    planned, got = int(f.cell["planned_in"][rows].sum()), int(f.cell["tokens_in"][rows].sum())
    if not planned or abs(got / planned - 1) <= MAX_TOKENS_OFF:
        return ""
    return (
        f"the server counted {got} where {planned} were planned ({got / planned - 1:+.1%}). "
        "Give --tokenizer, so that prompts are sized exactly"
    )


def _repeated(f: Facts) -> str:
    """The same bodies sent twice to one server: a prefix cache answers the second."""
    if _sharing_planned(f):
        return ""
    mine = _hashes(f.cell)
    within = len(mine) - len(np.unique(mine))
    url, began = f.header("target").get("url"), int(f.cell["due_ns"][0]) if f.cell.n else 0
    earlier = [
        c for c in f.siblings if c.n and c["due_ns"][0] < began and (c.header.get("target") or {}).get("url") == url
    ]
    across = int(np.isin(mine, np.concatenate([_hashes(c) for c in earlier])).sum()) if earlier else 0
    if not within and not across:
        return ""
    return (
        f"{within} within the cell and {across} of an earlier cell of the run: a prefix cache makes them faster. "
        "Use a trace with distinct ones"
    )


def _hashes(cell: Cell) -> np.ndarray:
    hashes = cell["prompt_hash"][windows.attempted(cell)]
    return np.asarray(hashes[hashes != 0])


def _sharing_planned(f: Facts) -> bool:
    """By the trace. Prompts reused because the user asked for it are no such plan: their cells are not comparable."""
    plan = f.header("plan")
    return bool(plan.get("shares") or plan.get("sessions") or windows.has_sessions(f.cell))


def _cached(f: Facts) -> str:
    """Cached tokens beyond the chat template, which stands before every prompt and which any prefix cache keeps."""
    rows = f.ok & (f.cell["tokens_cached"] >= 0) & (f.cell["tokens_in"] > 0)
    if not rows.any() or _sharing_planned(f):
        return ""
    template = math.ceil(max(f.header("probe").get("base_tokens") or 0.0, 0.0))
    share = float(np.maximum(f.cell["tokens_cached"][rows] - template, 0).sum() / f.cell["tokens_in"][rows].sum())
    if share <= MAX_CACHED_SHARE:
        return ""
    return (
        f"the server took {share:.1%} of their tokens from its cache, the template's {template} left out, and the "
        "trace plans no sharing. TTFT and throughput are not comparable with a cold run; restart the server"
    )


def _estimated(f: Facts) -> str:
    rows = int((f.ok & ~f.cell.among("tokens_out_from", "usage")).sum())
    if not rows:
        return ""
    return f"the server sent no usage for {rows} of {int(f.ok.sum())} requests. Ask it to"


def _end_unproven(f: Facts) -> str:
    rows = int((f.ok & f.cell.labelled("end unproven")).sum())
    return f"{rows} answers ended without a finish_reason: a cut answer would look the same" if rows else ""


def _unreadable(f: Facts) -> str:
    rows = int((f.ok & f.cell.labelled("unreadable event")).sum())
    if not rows:
        return ""
    return f"a part of {rows} of {int(f.ok.sum())} answers could not be read: tokens may be missing from them"


def _burst(f: Facts) -> str:
    zero = f.figure("zero_gap_share")
    hidden = f.ok & SERIES["tpot"].of(f.cell, NOTHING).why[ONE_STAMP] & (f.cell["tokens_out"] >= 2)
    share = int(hidden.sum()) / max(int(f.ok.sum()), 1)
    if (zero or 0.0) <= MAX_BURST_SHARE and share <= MAX_BURST_SHARE:
        return ""
    return (
        f"{zero or 0.0:.0%} of the gaps are 0 and {share:.0%} of the answers came at once: "
        "ITL and TPOT say how they were delivered, not made. Look for a proxy that buffers, or a stream interval"
    )


def _too_long(f: Facts) -> str:
    effect = str(f.header("settings").get("too_long", ""))
    return "" if effect in ("", "refuse", "skip", "clip") else effect


def _turns(f: Facts) -> str:
    lost = f.end.get("turns_not_sent") or 0
    causes = ["the duration was over"] if f.reason == "duration" else []
    if not causes or outcome_in(f.cell, "failed", "cut_at_end").any():
        causes.append("one before them failed or was cut")
    return f"{lost}, since {' or '.join(causes)}" if lost else ""


def _failed(f: Facts) -> str:
    failed = f.due & outcome_in(f.cell, "failed")
    share = f.figure("error_rate") or 0.0
    if share <= MAX_FAILED_SHARE:
        return ""
    listed = "; ".join(failure.text for failure in failures(f.cell, failed))
    left = "latencies are of the others. Read the all-requests figures" if f.ok.any() else "there is no latency to read"
    return f"{share:.1%} ({listed}): {left}"


def _retried(f: Facts) -> str:
    rows = int((f.ok & retried(f.cell)).sum())
    if not rows:
        return ""
    return f"{rows} of {int(f.ok.sum())} ok requests were not so at first; without --retries they would have failed"


# ---- other targets of the run ----


def _targets_differ(f: Facts) -> str:
    mine = _identity(f.cell)
    others = {_name(c): _identity(c) for c in f.siblings if _name(c) != _name(f.cell)}
    found = [
        f"{key} {mine[key]!r} here, {theirs[key]!r} at {name}"
        for name, theirs in others.items()
        for key in mine
        if mine[key] and theirs[key] and mine[key] != theirs[key]
    ]
    return f"{'; '.join(found)}: not the same work" if found else ""


def _round_trips(f: Facts) -> str:
    mine, ttft = f.header("probe").get("rtt_ms"), f.figure("ttft_p50")
    if mine is None or not ttft:
        return ""
    for other in f.siblings:
        theirs = (other.header.get("probe") or {}).get("rtt_ms")
        if theirs is None or _name(other) == _name(f.cell) or not other.n:
            continue
        their_ttft = metrics.compute("ttft_p50", other, windows.of(other)).value or ttft
        if abs(mine - theirs) > MAX_RTT_SHARE * min(ttft, their_ttft):
            return (
                f"a round trip takes {mine:.2f} ms here and {theirs:.2f} ms to {_name(other)}: over "
                f"{MAX_RTT_SHARE:.0%} of the smaller TTFT. Measure both over the same path"
            )
    return ""


def _name(cell: Cell) -> str:
    return str((cell.header.get("target") or {}).get("name", ""))


def _identity(cell: Cell) -> dict[str, Any]:
    target, probe = cell.header.get("target") or {}, cell.header.get("probe") or {}
    same = {key: target.get(key) for key in ("revision", "precision", "tokenizer")}
    return {"model": probe.get("model") or target.get("model")} | same


CHECKS: dict[str, Callable[[Facts], str]] = {
    "incomplete file": _incomplete,
    "ended early": _stopped,
    "broken identity": _identities,
    "too short": _too_short,
    "overloaded": _overload,
    "not sustained": _not_sustained,
    "too few requests": _few,
    "cut requests": _cut,
    "failed requests": _failed,
    "retries": _retried,
    **CLIENT_CHECKS,
    "delivered tokens": _delivered,
    "lengths not pinned": _not_pinned,
    "prompt tokens": _prompt_tokens,
    "repeated prompts": _repeated,
    "cached prompts": _cached,
    "estimated tokens": _estimated,
    "end unproven": _end_unproven,
    "unreadable events": _unreadable,
    "burst streams": _burst,
    "trace changed": _too_long,
    "turns not sent": _turns,
    "targets differ": _targets_differ,
    "network path": _round_trips,
}
