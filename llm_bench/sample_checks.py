"""Checks of a cell as a sample: whether it ran to its end, for long enough, in a steady state, and what failed."""

from collections.abc import Callable

from llm_bench import faults, windows
from llm_bench.client import CLIENT_CHECKS, CLIENT_LIMITED
from llm_bench.facts import EITHER_WAY, NO_END, TOO_HIGH, TOO_LOW, Facts, Finding, stopped
from llm_bench.identities import identities
from llm_bench.outcomes import failures, retried
from llm_bench.series import outcome_in
from llm_bench.steady import DRIFT_BATCHES
from llm_bench.windows import Settling

MAX_FAILED_SHARE = 0.01  # all failures are listed; above this the ok ones are no longer the whole story
MAX_WAITING_SHARE = 0.2
QUIET_GAPS = 10  # mean gaps without an arrival: by chance once in 20,000 times


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


def _identities(f: Facts) -> Finding | None:
    broken = "; ".join(identities(f.cell, f.window, f.end))
    return Finding(broken, EITHER_WAY, "Trust no figure of this cell and repeat it") if broken else None


SAMPLE_CHECKS: dict[str, Callable[[Facts], Finding | None]] = {
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
}
