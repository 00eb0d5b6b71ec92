"""What every format of a report says of faults: the verdict on each, its evidence, how requests were turned away."""

from functools import partial

from llm_bench import faults, recovery
from llm_bench.client import CLIENT_LIMITED, LATE
from llm_bench.recovery import Recovery
from llm_bench.results import Sheet

# Ways of Queue to turn a request away -> in words.
TURNED = {"busy": "429", "unavailable": "503", "other_5xx": "other 5xx", "timeouts": "time-outs"}
TURNED |= {"refused": "refused", "cut": "cut"}


# Two times of a recovery agree within so much of the longer one, or so many seconds.
AGREE, AGREE_S = 0.05, 0.1


def recoveries(sheet: Sheet) -> list[Recovery]:
    """Each fault that was done in a cell, and what became of it; no verdict where this client decided the figures.

    How late this client was with each request is known: a verdict that stands with all of it taken off is given.
    """
    m = sheet.measured
    limits = [judged.limit for judged in sheet.judged]
    of = partial(recovery.of, m.cell, m.window, faults.of_end(m.end), limits, str(m.end.get("reason") or ""))
    found = of()
    if not sheet.client_limited:
        return found
    if {doubt.kind for doubt in sheet.doubts} & set(CLIENT_LIMITED) != {LATE}:
        return [_of_client(r) for r in found]
    return [r if _agree(r, other) else _of_client(r) for r, other in zip(found, of(lateness=False), strict=True)]


def _agree(a: Recovery, b: Recovery) -> bool:
    if a.verdict != b.verdict or a.after_s is None or b.after_s is None:
        return a.verdict == b.verdict and a.after_s is b.after_s
    return abs(a.after_s - b.after_s) <= max(AGREE * max(a.after_s, b.after_s), AGREE_S)


def _of_client(r: Recovery) -> Recovery:
    if r.verdict == recovery.UNDECIDED or r.why == recovery.GONE:  # no client makes a target refuse
        return r
    after = "" if r.after_s is None else f" after {r.after_s:.3f} s"
    return r._replace(verdict=recovery.UNDECIDED, why=f"{r.verdict}{after} as measured, but this client was the limit")


def fault_lines(sheet: Sheet) -> list[str]:
    """The verdict on each fault of a cell with its evidence."""
    found = recoveries(sheet)
    lines = []
    for i, r in enumerate(found, 1):
        after = f" after {r.after_s:.3f} s" if r.verdict == recovery.RECOVERED else ""
        at = "not begun" if r.at_s is None else f"at {r.at_s:.3f} s"
        lines.append(f"fault {i} {at}, {r.done.what}: {r.verdict}{after}: {'; '.join(_evidence(r))}")
    if any(r.before for r in found):
        seconds = next(r.before.window_s for r in found if r.before)
        lines.append(
            f"faults: judged by rolling windows of {seconds:g} s: a rise that is shorter, or of under 5% of such a "
            "window's requests, may not show; answers given twice are not known, no server log is read"
        )
    return lines


def _evidence(r: Recovery) -> list[str]:
    said = [r.why] if r.why else []
    if r.first_error_s is not None:
        said.append(f"first error after {r.first_error_s:.3f} s, {r.failed} failed ({'; '.join(r.errors)})")
    said += [f"{r.lost} sent and never answered"] if r.lost else []
    if r.before is not None and r.worst_ms is not None:
        said.append(f"{r.name}_p95 at worst {r.worst_ms:,.4g} ms, {r.before.ttft_p95_ms:,.4g} ms before")
    if r.before is not None and r.silence_s > r.before.silence_s:
        what = "answer" if r.name == "e2e" else "token"
        said.append(f"no {what} for {r.silence_s:.3f} s, {r.before.silence_s:.3f} s before")
    if r.before is not None and r.backlog > r.before.in_system:
        drained = "never drained" if r.drained_s is None else f"drained after {r.drained_s:.3f} s"
        said.append(f"in the system at most {r.backlog}, {r.before.in_system} before, {drained}")
    if r.attempts > r.requests:
        said.append(f"{r.attempts} attempts of {r.requests} request{'s' * (r.requests != 1)}")
    return said + turned_away(r) + ([r.done.result] if r.done.result and r.done.result not in r.why else [])


def turned_away(r: Recovery) -> list[str]:
    """How the target treated its queue while the fault lasted."""
    if r.queue is None:
        return []
    counts = [f"{said} x{n}" for name, said in TURNED.items() if (n := getattr(r.queue, name))]
    if not counts:
        return []
    again = f", {r.queue.again} tried again, {r.queue.saved} of them ok" if r.queue.again else ""
    return [f"turned away {', '.join(counts)}{again}; Retry-After: {r.queue.retry_after}"]
