"""Reasons to distrust a cell: figures, likely effect on latencies, and what to do about it; CHECKS is the table."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from llm_bench import faults, same_work, windows
from llm_bench.client import CLIENT_CHECKS, CLIENT_LIMITED
from llm_bench.columns import Cell
from llm_bench.facts import EITHER_WAY, NO_END, TOO_HIGH, TOO_LOW, Effect, Facts, Finding, stopped
from llm_bench.host_checks import HOST_CHECKS
from llm_bench.identities import identities
from llm_bench.metrics import WHOLE, Value
from llm_bench.outcomes import failures, retried
from llm_bench.same_work import MAX_RTT_SHARE as MAX_RTT_SHARE
from llm_bench.same_work import MAX_TOKENS_OFF as MAX_TOKENS_OFF
from llm_bench.same_work import Side
from llm_bench.series import NOTHING, ONE_STAMP, SERIES, outcome_in, single_pass
from llm_bench.steady import DRIFT_BATCHES
from llm_bench.windows import Settling, Window

MAX_CACHED_SHARE = 0.01
MAX_OVER_PLAN = 0.1  # of the prompt tokens: a target's template and its count of tokens are not the plan's
MAX_BURST_SHARE = 0.5
MAX_FAILED_SHARE = 0.01  # all failures are listed; above this the ok ones are no longer the whole story
MAX_WAITING_SHARE = 0.2
QUIET_GAPS = 10  # mean gaps without an arrival: by chance once in 20,000 times

LIKELY = {
    TOO_LOW: "Latencies are likely too low",
    TOO_HIGH: "Latencies are likely too high",
    EITHER_WAY: "Figures may be off either way",
}


class Doubt(NamedTuple):
    """`text`: the evidence. `effect`: on latencies; rates err the other way. `advice`: "" where there is none."""

    kind: str
    text: str
    effect: Effect = EITHER_WAY
    advice: str = ""

    @property
    def sentence(self) -> str:
        """Evidence, effect and advice, for people."""
        return ". ".join(filter(None, [self.text, LIKELY[self.effect], self.advice]))


def doubts(
    cell: Cell,
    window: Window,
    siblings: Sequence[Cell] = (),
    values: Sequence[Value] = (),
    end: Mapping[str, Any] | None = None,
) -> list[Doubt]:
    """Every doubt that the records, the header and the driver's last word give rise to, in the order of CHECKS."""
    facts = Facts(cell, window, siblings, values, end or {})
    return [Doubt(kind, *found) for kind, check in CHECKS.items() if (found := check(facts))]


# ---- the sample ----


def _incomplete(f: Facts) -> Finding | None:
    if f.cell.complete:
        return None
    if f.cell.absent:
        named = f"{', '.join(f.cell.absent)} of {f.cell.header.get('workers')} workers' files"
        return Finding(f"{named} is not there: what is in it is missing from rates and counts", EITHER_WAY, "Repeat it")
    found = f"the record file ends in the middle (a crash?): {f.cell.n} whole requests, later ones are lost"
    return Finding(found, EITHER_WAY, "Repeat it")


def _faults(f: Facts) -> Finding | None:
    log = faults.of_end(f.end)
    many = sum(bool(done.begun_ns) for done in log.done) if log else 0
    if not many:
        return None
    found = f"{many} {'were' if many > 1 else 'was'} done to this cell (--fault)"
    return Finding(
        f"{found}: its figures are of a target in trouble", EITHER_WAY, "Do not compare it with a cell without faults"
    )


def _fault_proxy(f: Facts) -> Finding | None:
    log = faults.of_end(f.end)
    if log is None or log.added_ms is None:
        return None
    return Finding(f"it adds about {log.added_ms:.3g} ms a round trip", TOO_HIGH)


def _stopped(f: Facts) -> Finding | None:
    planned = f.header("plan").get("requests") or f.cell.n
    if f.reason == NO_END:
        found = f"{f.stopped}; {f.cell.n} of at most {planned} requests are recorded"
        return Finding(found, EITHER_WAY, "Run it again")
    if stopped(f.reason):
        lost = int(f.cell.labelled("lost with its worker").sum())
        left = f"; {lost} requests that it had begun are lost with it" if lost else ""
        return Finding(f"{f.stopped}{left}", EITHER_WAY, "Run it again")
    if f.reason != "exhausted" or not _fell_short(f):
        return None
    if f.header("settings").get("loop_trace"):
        found = f"the {planned} requests planned at most ran out before --duration was over"
        return Finding(found, EITHER_WAY, "Give --requests above that")
    found = f"the {planned} requests ran out before --duration was over"
    return Finding(found, EITHER_WAY, "Give more, or --loop-trace")


def _fell_short(f: Facts) -> bool:
    """Of --duration: a closed loop that ran out, or an open one whose last request came long before its end."""
    duration_s, n = f.header("load").get("duration_s"), f.cell.n
    if not duration_s or f.header("load").get("kind") == "closed" or n < 2:
        return bool(duration_s)
    due = f.cell["due_ns"]
    ran_s = (int(due[-1]) - (f.end.get("start_ns") or int(due[0]))) / 1e9
    return bool(duration_s - ran_s > QUIET_GAPS * (due[-1] - due[0]) / 1e9 / (n - 1))


def _too_short(f: Facts) -> Finding | None:
    if f.window.state != windows.TOO_SHORT:
        return None
    slots = f.header("load").get("concurrency")
    least = windows.LEAST_WAVES * slots if slots else windows.LEAST_OPEN
    found = f"{f.window.requests} requests in the window, at least {least} are needed"
    effect = EITHER_WAY
    if not f.ok.any():
        found = "no ok request was due in the window: its latencies are of nothing"
    elif f.window.settling:
        found = f"{_begins(f.window.settling)}: what is left is too little to tell how much later"
    elif f.window.requests >= least:
        found = f"the first requests took longer than the {f.window.seconds:.1f} s of the window: load was still rising"
        effect = TOO_LOW
    if not f.window.opened:
        found = "the window never opened, so the figures are of the whole run, its ramp and drain included"
    if f.stopped:
        return Finding(f"{found}; {f.stopped}", effect)
    return Finding(found, effect, "Give more --requests or a longer --duration")


def _begins(settling: Settling) -> str:
    return (
        f"steady state begins after {settling.after} of {settling.requests} requests, "
        f"the warm-up was of {settling.warmup}"
    )


def _warming(f: Facts) -> Finding | None:
    """By MSER-5 on the latencies of warm-up and window: what it would cut is slower or faster than what it leaves."""
    settling = f.window.settling
    if settling is None or f.window.state != windows.WARMING:
        return None
    early_ms, rest_ms = settling.early_ms, settling.rest_ms
    found = f"{_begins(settling)}; e2e is {early_ms:.1f} ms on average between the two and {rest_ms:.1f} ms after"
    if _faults(f):
        return Finding(found, EITHER_WAY, "The faults that were asked for may be why: see what each did")
    longer = "--warmup, in requests" if f.header("load").get("concurrency") else "--warmup, in seconds"
    return Finding(found, TOO_HIGH if early_ms > rest_ms else TOO_LOW, f"Give a longer {longer}")


def _drift(f: Facts) -> Finding | None:
    """The slopes are Sen's: of the means of equal parts of a closed loop's window."""
    drift = f.window.drift
    if drift is None or not drift.drifting:
        return None
    steps = DRIFT_BATCHES - 1
    found = (
        f"from the first to the last twentieth of the window e2e changed by {steps * drift.latency.slope:+.3g} ms and "
        f"completions by {steps * drift.rate.slope:+.3g}/s (p = {drift.p:.2g})"
    )
    effect = TOO_LOW if drift.latency.slope > 0 else TOO_HIGH
    return Finding(found, effect, "Look for what changes with time: heat, a filling cache, neighbours; run longer")


def _overload(f: Facts) -> Finding | None:
    if not f.window.growth:
        return None
    grows = f"backlog grows {f.window.growth:.2f} requests/s where {f.figure('arrival_rate'):.2f}/s arrive"
    if f.stopped:
        return Finding(f"{grows}; but records that are lost look like a backlog, and {f.stopped}", EITHER_WAY)
    limited = any(CLIENT_CHECKS[kind](f) for kind in CLIENT_LIMITED)
    if windows.by_client(f.cell, f.window, limited):
        return Finding(f"{grows}, {windows.BY_CLIENT}", EITHER_WAY)
    found = f"{grows}, so all other figures depend on how long the run was"
    return Finding(found, TOO_LOW, "Lower --rate or --speed")


def _not_sustained(f: Facts) -> Finding | None:
    """Requests that the cap still holds back at the last due time: the offered rate was never sent."""
    tried = windows.attempted(f.cell)
    due, ready = f.cell["due_ns"], f.cell["ready_ns"]
    if f.header("load").get("kind") == "closed" or f.cell.n < 2 or due[-1] == due[0]:
        return None
    waiting = int(((due < due[-1]) & ((ready > due[-1]) | ~tried)).sum()) + int(ready[-1] > due[-1] + 1e6)
    if waiting < 2 or waiting <= MAX_WAITING_SHARE * f.cell.n:
        return None
    ok, last = outcome_in(f.cell, "ok"), int(f.cell["end_ns"].max())
    offered = (f.cell.n - 1) / ((due[-1] - due[0]) / 1e9)
    span_s = (last - int(due[0])) / 1e9
    cap = f.header("load").get("max_in_flight")
    held = f"the cap of {cap} in flight" if cap else "the client"
    return Finding(
        f"offered {offered:.2f}/s, completed {int(ok.sum()) / span_s:.2f}/s over {span_s:.1f} s; "
        f"{waiting} of {f.cell.n} requests were still held back by {held} at the last due time",
        TOO_LOW,
        "Lower the rate or raise the cap",
    )


def _few(f: Facts) -> Finding | None:
    short = [v for v in f.values if v.few]
    if not short:
        return None
    found = f"{', '.join(v.name for v in short)}: {'; '.join(dict.fromkeys(v.refusal for v in short))}"
    return Finding(found, EITHER_WAY, f"{'Read' if f.stopped else 'Give more --requests, or read'} a lower percentile")


def _cut(f: Facts) -> Finding | None:
    cut = int((f.due & outcome_in(f.cell, "cut_at_end")).sum())
    if not cut:
        return None
    cause = "" if f.reason == NO_END else stopped(f.reason)
    when = f"when {cause}" if cause else "at the end"
    advice = "Raise --drain" if f.reason in ("exhausted", "duration") else ""
    found = f"{cut} of {int(f.due.sum())} were in flight {when}: neither slow nor fast, left out"
    return Finding(found, TOO_LOW, advice)


def _identities(f: Facts) -> Finding | None:
    broken = "; ".join(identities(f.cell, f.window, f.end))
    return Finding(broken, EITHER_WAY, "Trust no figure of this cell and repeat it") if broken else None


# ---- the work ----


def _delivered(f: Facts) -> Finding | None:
    rows = f.ok & (f.cell["asked_out"] > 0) & (f.cell["tokens_out"] >= 0) & ~f.cell.among("tokens_out_from", "events")
    asked, got = int((f.cell["asked_out"] * f.cell.choices)[rows].sum()), int(f.cell["tokens_out"][rows].sum())
    if not asked or abs(got / asked - 1) <= MAX_TOKENS_OFF:
        return None
    pinned = f.header("probe").get("lengths_pinned")
    cause = "although a probe showed that lengths can be pinned" if pinned else "the server ends answers itself"
    if got > asked:
        cause = "the server goes on past max_tokens, or its usage counts more than the answer"
    effect = TOO_LOW if got < asked else TOO_HIGH
    return Finding(f"{got} of {asked} asked ({got / asked:.1%}): {cause}", effect, "Compare tokens, not requests")


def _not_pinned(f: Facts) -> Finding | None:
    if f.header("probe").get("lengths_pinned", True) or not (f.ok & (f.cell["asked_out"] > 0)).any():
        return None
    found = "the target may end answers where it likes: other targets may be doing other work"
    return Finding(found, TOO_LOW, "Compare tokens/s")


def _prompt_tokens(f: Facts) -> Finding | None:
    rows = f.ok & (f.cell["tokens_in"] >= 0) & (f.cell["planned_in"] > 0)
    planned, got = int(f.cell["planned_in"][rows].sum()), int(f.cell["tokens_in"][rows].sum())
    if not planned or abs(got / planned - 1) <= MAX_TOKENS_OFF:
        return None
    found = f"the server counted {got} where {planned} were planned ({got / planned - 1:+.1%})"
    effect = TOO_LOW if got < planned else TOO_HIGH
    return Finding(found, effect, "Give --tokenizer, so that prompts are sized exactly")


def _planned_prompts(f: Facts) -> Finding | None:
    """Plans stand in for what the server did not count: beside a target that counts, that is another measure.

    A reason to distrust the figures that have prompt tokens in them: where others were asked for, what is unknown is in
    none of them. Where none was named (a gate asks so), any may be read: `rules.CONCERNS` says which this is about.
    """
    rows = f.ok & (f.cell["tokens_in"] < 0) & (f.cell["planned_in"] > 0)
    if single_pass(f.cell) or not rows.any() or (f.values and not any(map(_has_prompts, f.values))):
        return None
    found = (
        f"the server said no prompt tokens for {int(rows.sum())} of {int(f.ok.sum())} requests: planned ones stand in"
    )
    return Finding(found, EITHER_WAY, "Read tokens_per_second, which has none in it, or let it send usage")


def _has_prompts(value: Value) -> bool:
    return value.name in WHOLE and WHOLE[value.name].prompts


MAX_REPEATED = 0.01  # of the prompts: traces have a few of one word, which can be told apart by no salt


def _repeated(f: Facts) -> Finding | None:
    """The same bodies sent twice to one server: a prefix cache answers the second."""
    if _sharing_planned(f):
        return None
    mine = _hashes(f.cell)
    within = len(mine) - len(np.unique(mine))
    url, began = f.header("target").get("url"), int(f.cell["due_ns"][0]) if f.cell.n else 0
    earlier = [
        c for c in f.siblings if c.n and c["due_ns"][0] < began and (c.header.get("target") or {}).get("url") == url
    ]
    across = int(np.isin(mine, np.concatenate([_hashes(c) for c in earlier])).sum()) if earlier else 0
    if within + across <= MAX_REPEATED * len(mine):
        return None
    found = f"{within} within the cell and {across} of an earlier cell of the run: a prefix cache makes them faster"
    return Finding(found, TOO_LOW, "Use a trace with distinct ones")


def _hashes(cell: Cell) -> np.ndarray:
    hashes = cell["prompt_hash"][windows.attempted(cell)]
    return np.asarray(hashes[hashes != 0])


def _sharing_planned(f: Facts) -> bool:
    """By the trace. Prompts reused because the user asked for it are no such plan: their cells are not comparable."""
    plan = f.header("plan")
    return bool(plan.get("shares") or plan.get("sessions") or windows.has_sessions(f.cell))


def _cached(f: Facts) -> Finding | None:
    """Cached tokens beyond the chat template, which stands before every prompt and which any prefix cache keeps, and
    beyond what the plan shares: that one is of all requests, those before the window too."""
    planned = _sharing_planned(f)
    counted = outcome_in(f.cell, "ok") if planned else f.ok
    rows = counted & (f.cell["tokens_cached"] >= 0) & (f.cell["tokens_in"] > 0)
    most = _shareable(f) if planned else 0.0
    if not rows.any() or most is None:
        return None
    template = math.ceil(max(f.header("probe").get("base_tokens") or 0.0, 0.0))
    share = float(np.maximum(f.cell["tokens_cached"][rows] - template, 0).sum() / f.cell["tokens_in"][rows].sum())
    if share <= most + (MAX_OVER_PLAN if planned else MAX_CACHED_SHARE):
        return None
    allowed = f"of the plan's an endless cache can find {most:.1%}" if planned else "the trace plans no sharing"
    return Finding(
        f"the server took {share:.1%} of their tokens from its cache, the template's {template} left out, and "
        f"{allowed}: TTFT and throughput are not comparable with a cold run",
        TOO_LOW,
        "Restart the server",
    )


def _shareable(f: Facts) -> float | None:
    """The most that the plan lets a cache find of as many requests as were sent; None where it does not say."""
    parts = f.header("plan").get("shareable")
    if not parts:
        return None
    sent = int(windows.attempted(f.cell).sum())
    last = next((i for i, (requests, _) in enumerate(parts) if requests >= sent), len(parts) - 1)
    return float(max(share for _, share in parts[max(last - 1, 0) : last + 1]))


def _estimated(f: Facts) -> Finding | None:
    if single_pass(f.cell):
        return None  # there is nothing to count
    rows = int((f.ok & ~f.cell.among("tokens_out_from", "usage")).sum())
    if not rows:
        return None
    return Finding(
        f"the server sent no usage for {rows} of {int(f.ok.sum())} requests",
        EITHER_WAY,
        "Let it send usage, or give --tokenizer",
    )


def _end_unproven(f: Facts) -> Finding | None:
    rows = int((f.ok & f.cell.labelled("end unproven")).sum())
    found = f"{rows} answers ended without a finish_reason: a cut answer would look the same"
    return Finding(found, TOO_LOW, "Compare their tokens with what was asked") if rows else None


def _unreadable(f: Facts) -> Finding | None:
    rows = int((f.ok & f.cell.labelled("unreadable event")).sum())
    if not rows:
        return None
    found = f"a part of {rows} of {int(f.ok.sum())} answers could not be read: tokens may be missing from them"
    return Finding(found, EITHER_WAY, "Look at their bytes: --keep-bytes")


def _burst(f: Facts) -> Finding | None:
    zero = f.figure("zero_gap_share")
    hidden = f.ok & SERIES["tpot"].of(f.cell, NOTHING).why[ONE_STAMP] & (f.cell["tokens_out"] >= 2)
    share = int(hidden.sum()) / max(int(f.ok.sum()), 1)
    if (zero or 0.0) <= MAX_BURST_SHARE and share <= MAX_BURST_SHARE:
        return None
    return Finding(
        f"{zero or 0.0:.0%} of the gaps are 0 and {share:.0%} of the answers came at once: "
        "ITL and TPOT say how they were delivered, not made",
        EITHER_WAY,
        "Look for a proxy that buffers, or a stream interval",
    )


def _too_long(f: Facts) -> Finding | None:
    effect = str(f.header("settings").get("too_long", ""))
    return (
        None
        if effect in ("", "refuse", "skip", "clip")
        else Finding(effect, TOO_LOW, "Use a trace that fits, or a target with a longer context")
    )


def _turns(f: Facts) -> Finding | None:
    lost = f.end.get("turns_not_sent") or 0
    causes = ["the duration was over"] if f.reason == "duration" else []
    if not causes or outcome_in(f.cell, "failed", "cut_at_end").any():
        causes.append("one before them failed or was cut")
    advice = "Give a longer --duration" if f.reason == "duration" else "Look at the failures first"
    return Finding(f"{lost}, since {' or '.join(causes)}", TOO_LOW, advice) if lost else None


def _failed(f: Facts) -> Finding | None:
    failed = f.due & outcome_in(f.cell, "failed")
    share = f.figure("error_rate") or 0.0
    if share <= MAX_FAILED_SHARE:
        return None
    listed = "; ".join(failure.text for failure in failures(f.cell, failed))
    found = f"{share:.1%} ({listed})"
    if not f.ok.any():
        return Finding(f"{found}: there is no latency to read", EITHER_WAY)
    return Finding(f"{found}: latencies are of the others", TOO_LOW, "Read the all-requests figures")


def _retried(f: Facts) -> Finding | None:
    rows = int((f.ok & retried(f.cell)).sum())
    if not rows:
        return None
    found = f"{rows} of {int(f.ok.sum())} ok requests were not so at first; without --retries they would have failed"
    return Finding(found, EITHER_WAY, "Read first_attempt_success")


# ---- other targets of the run ----


def _targets_differ(f: Facts) -> Finding | None:
    found = _differences(f, same_work.OF_WORK)
    advice = "Give all targets one model, tokenizer and precision, and pin lengths; or compare none of their figures"
    return Finding(f"{'; '.join(found)}: not the same work", EITHER_WAY, advice) if found else None


def _round_trips(f: Facts) -> Finding | None:
    found = _differences(f, same_work.OF_NETWORK)
    return Finding("; ".join(found), EITHER_WAY, "Measure both over the same path") if found else None


def _differences(f: Facts, checks: same_work.Checks) -> list[str]:
    """Against each other target of the same kind of work, at the same load."""
    mine, others = Side(_name(f.cell), f.cell), dict[str, Side]()
    passed = single_pass(f.cell)
    for cell in f.siblings:
        side = Side(_name(cell), cell)
        if side.name != mine.name and side.load == mine.load and cell.n and single_pass(cell) is passed:
            others.setdefault(side.name, side)
    return [d.text for other in others.values() for d in same_work.differences(mine, other, checks)]


def _name(cell: Cell) -> str:
    return str((cell.header.get("target") or {}).get("name", ""))


def _usage(f: Facts) -> Finding | None:
    """Usage against the tokenizer, in the first answers of a cell. A server may count an end token that has no text."""
    rows = f.ok & (f.cell["tokens_counted"] > 0) & f.cell.among("tokens_out_from", "usage")
    said, counted = (int(f.cell[name][rows].sum()) for name in ("tokens_out", "tokens_counted"))
    if not counted or abs(said - counted) - int(rows.sum()) * (said > counted) <= MAX_TOKENS_OFF * counted:
        return None
    found = f"the server says {said:,} tokens where its tokenizer counts {counted:,} ({said / counted - 1:+.1%})"
    return Finding(found, EITHER_WAY, "Check that --tokenizer is the target's: throughput is in the server's tokens")


CHECKS: dict[str, Callable[[Facts], Finding | None]] = {
    "incomplete file": _incomplete,
    "ended early": _stopped,
    "faults on purpose": _faults,
    "fault proxy": _fault_proxy,
    "broken identity": _identities,
    "too short": _too_short,
    "warming": _warming,
    "drift": _drift,
    "overloaded": _overload,
    "not sustained": _not_sustained,
    "too few requests": _few,
    "cut requests": _cut,
    "failed requests": _failed,
    "retries": _retried,
    **CLIENT_CHECKS,
    **HOST_CHECKS,
    "delivered tokens": _delivered,
    "lengths not pinned": _not_pinned,
    "prompt tokens": _prompt_tokens,
    "planned prompt tokens": _planned_prompts,
    "repeated prompts": _repeated,
    "cached prompts": _cached,
    "estimated tokens": _estimated,
    "usage disputed": _usage,
    "end unproven": _end_unproven,
    "unreadable events": _unreadable,
    "burst streams": _burst,
    "trace changed": _too_long,
    "turns not sent": _turns,
    "targets differ": _targets_differ,
    "network path": _round_trips,
}
