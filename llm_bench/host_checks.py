"""Checks of the hosts that drove a cell together: their clocks, how late and how busy each was, what each can carry."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llm_bench.client import MAX_CPU_SHARE, MAX_LAG_MS
from llm_bench.facts import EITHER_WAY, TOO_HIGH, Facts, Finding

_SAID = {"worker", "name", "error_ns", "moved_ns", "drift_ppm", "calibrated", "lost"}  # of each host, by `hosts`
MAX_OFF_MS = 5.0  # of a host's requests on the cell's timeline: rates by the second do not feel it, nor any latency


def _clocks(f: Facts) -> Finding | None:
    """No latency is moved by an offset; a window's edge, a timeline and the requests in flight at a moment are."""
    off = [h for h in _hosts(f) if (h["error_ns"] + h["moved_ns"]) / 1e6 > MAX_OFF_MS]
    if not off:
        return None
    worst = max(off, key=lambda h: h["error_ns"] + h["moved_ns"])
    drift = "" if worst["drift_ppm"] is None else f", drift {worst['drift_ppm']:.1f} ppm"
    found = (
        f"requests of {_names(off)} lie up to {(worst['error_ns'] + worst['moved_ns']) / 1e6:.1f} ms off on the "
        f"timeline (its clock is known to {worst['error_ns'] / 1e6:.1f} ms{drift}); latencies are of one clock each"
    )
    return Finding(found, EITHER_WAY, "Let the hosts' clocks be kept by NTP, or give shorter cells")


def _late(f: Facts) -> Finding | None:
    late = [h for h in _hosts(f) if (h.get("loop_lag_p99_ms") or 0) > MAX_LAG_MS]
    busy = [h for h in _hosts(f) if (h.get("client_cpu_share") or 0) > MAX_CPU_SHARE]
    said = [f"{_name(h)} ran {h['loop_lag_p99_ms']:.1f} ms late (p99)" for h in late]
    said += [f"{_name(h)} used {h['client_cpu_share']:.0%} of a core" for h in busy]
    return Finding("; ".join(said), TOO_HIGH, "Leave those hosts out, or use more --workers") if said else None


def _unknown(f: Facts) -> Finding | None:
    never = [h for h in _hosts(f) if not h["calibrated"]]
    found = f"what {_names(never)} can carry was never measured there, so that nothing says when it is the limit"
    return Finding(found, TOO_HIGH, "Run llm-bench selfcheck on every host") if never else None


def _hosts(f: Facts) -> Sequence[Mapping[str, Any]]:
    found = f.end.get("hosts")
    whole = [h for h in found if isinstance(h, Mapping) and h.keys() >= _SAID] if isinstance(found, list) else []
    return [h for h in whole if not h["lost"]]


def _name(host: Mapping[str, Any]) -> str:
    return f"worker {host['worker']} ({host['name']})"


def _names(hosts: Sequence[Mapping[str, Any]]) -> str:
    names = [_name(h) for h in hosts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


HOST_CHECKS: dict[str, Callable[[Facts], Finding | None]] = {
    "host clocks": _clocks,
    "host lateness": _late,
    "host not calibrated": _unknown,
}
