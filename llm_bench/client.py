"""Checks of this client: whether it, and not the target, was the limit, and how far its stamps can be trusted."""

from collections.abc import Callable

import numpy as np

from llm_bench import windows
from llm_bench.facts import EITHER_WAY, TOO_HIGH, Facts, Finding
from llm_bench.series import NOTHING, SERIES, reads_in

MAX_LAG_MS = 10.0  # the client's own lateness, p99
MAX_LAG_SHARE = 0.05  # its mean, against the mean TTFT of the same requests
LEAST_SLOTS_SHARE = 0.9  # of a closed loop's slots that are at the server, on average
MAX_CPU_SHARE = 0.85
MAX_CEILING_SHARE = 0.8  # of what `selfcheck` found that a core of this machine can take

MIN_STALL_MS = 10.0  # shorter ones come with any operating system
MIN_STALL_SHARE = 0.005  # of the window: half of what a p99 is made of

LATE, STALLED, BUSY, LIMITED = "client lateness", "client stalled", "client busy", "client limited"
# Under any of these the figures are the client's as much as the target's.
CLIENT_LIMITED = (LATE, STALLED, BUSY, LIMITED)


def _lateness(f: Facts) -> Finding | None:
    """A share of means, of the same requests: both are sums, so the share is that of the time users waited."""
    lag = SERIES["lag_client"].of(f.cell, NOTHING).values
    sent = f.due & ~np.isnan(lag)
    if not sent.any():
        return None
    name = "e2e" if np.isnan(SERIES["ttft"].of(f.cell, NOTHING).values[f.ok]).all() else "ttft"
    waited = SERIES[name].of(f.cell, NOTHING).values
    both = f.ok & ~np.isnan(lag) & ~np.isnan(waited)
    mine, whole = (float(x[both].mean()) if both.any() else 0.0 for x in (lag, waited))
    p99, found = float(np.quantile(lag[sent], 0.99)), []
    if mine > MAX_LAG_SHARE * whole:
        found.append(f"{mine / whole:.0%} of {name.upper()} is this client's own (mean {mine:.2f} of {whole:.2f} ms)")
    if p99 > MAX_LAG_MS:
        found.append(f"p99 of its delay is {p99:.2f} ms")
    return Finding(", ".join(found), TOO_HIGH, "Lower the load, or use a quieter or faster machine") if found else None


def _idle_slots(f: Facts) -> Finding | None:
    """A slot is a request at the server, but where users think, and where requests left no record."""
    slots = f.header("load").get("concurrency")
    if not slots or not f.window.opened or not f.cell.complete:
        return None
    if windows.has_sessions(f.cell) or f.cell.among("outcome", "dropped").any():
        return None
    at_server = f.figure("in_flight") or 0.0
    if at_server >= LEAST_SLOTS_SHARE * slots:
        return None
    connecting = float(f.cell["connect_ns"][f.due].sum()) / 1e9 / f.window.seconds
    limit, advice = "the client", "Use a quieter or faster machine"
    if at_server + connecting >= LEAST_SLOTS_SHARE * slots:
        limit, advice = "connecting anew", "Let connections be kept alive"
    found = f"on average {at_server:.1f} of {slots} slots were at the server"
    return Finding(f"{found}: {limit}, not the target, was the limit", EITHER_WAY, advice)


def _busy(f: Facts) -> Finding | None:
    """Of several workers the one whose event loop was the latest: what it stamped is in the figures too."""
    lag = max([f.ended("loop_lag_p99_ms"), *(f.end.get("worker_loop_lag_ms") or [])])
    cpu = f.ended("client_cpu_share")
    found = [f"its event loop ran {lag:.1f} ms late (p99)"] if lag > MAX_LAG_MS else []
    found += [f"it used {cpu:.0%} of a core"] if cpu > MAX_CPU_SHARE else []
    late = "requests may have left late" if f.end.get("stamps") == "kernel" else "stamps may be late"
    return Finding(f"{' and '.join(found)}: {late}", TOO_HIGH, "Lower the load") if found else None


def _stalled(f: Facts) -> Finding | None:
    """Stalls of the event loop that touch the window and last longer than a typical gap between tokens.

    Over a whole run a p99 is blind to them: a loop that stands still for 1 s looks at itself once in that time.
    """
    stalls = [(at, at + round(ms * 1e6)) for at, ms in f.end.get("loop_stalls") or [] if ms > MIN_STALL_MS]
    stalls = [(at, end) for at, end in stalls if at < f.window.end_ns and end > f.window.start_ns]
    if not stalls:
        return None
    typical_ns = (f.figure("itl_p50") or 0.0) * 1e6
    begun_ns, ended_ns = np.array([(at, end) for at, end in stalls if end - at > typical_ns], np.int64).reshape(-1, 2).T
    if not len(begun_ns):
        return None
    at_ns, level = windows.steps(begun_ns, ended_ns)  # of several workers at once they count once
    share = windows.integral_s(at_ns, np.minimum(level, 1), f.window) / f.window.seconds
    if share < MIN_STALL_SHARE:
        return None
    times = "once" if len(begun_ns) == 1 else f"{len(begun_ns)} times"
    longest_ms = float((ended_ns - begun_ns).max()) / 1e6
    late = "left late" if f.end.get("stamps") == "kernel" else "was stamped late"
    return Finding(
        f"its event loop stood still {times} in the window, for up to {longest_ms:.0f} ms, "
        f"{share:.2%} of it: what was due or came meanwhile {late}",
        TOO_HIGH,
        "Use a quieter or faster machine, or lower the load",
    )


_SAID = {"events": "token events/s (those of one read count once)", "requests": "requests/s"}


def _limited(f: Facts) -> Finding | None:
    ceiling, workers = f.end.get("ceiling") or {}, int(f.ended("workers")) or 1
    ended = windows.attempted(f.cell) & (f.cell["end_ns"] >= f.window.start_ns) & (f.cell["end_ns"] < f.window.end_ns)
    counted = {"events": reads_in(f.cell, f.window), "requests": int(ended.sum())}
    found = []
    for what, count in counted.items():
        most, rate = workers * (ceiling.get(f"{what}_per_s") or 0.0), count / f.window.seconds
        if most and rate > MAX_CEILING_SHARE * most:
            found.append(f"{rate:,.0f} of at most {most:,.0f} {_SAID[what]} ({rate / most:.0%})")
    if not found:
        return None
    cores = "one core" if workers == 1 else f"{workers} cores"
    text = f"it took {' and '.join(found)} that selfcheck found {cores} of this machine to take"
    return Finding(text, TOO_HIGH, "Use more --workers")


CLIENT_CHECKS: dict[str, Callable[[Facts], Finding | None]] = {
    LATE: _lateness,
    "idle slots": _idle_slots,
    STALLED: _stalled,
    BUSY: _busy,
    LIMITED: _limited,
}
