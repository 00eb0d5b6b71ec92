"""results.json of bench.client as the page reports/client/README.md."""

from typing import Any

from bench.ours import CONTROL, OURS

_HEAD = """# The client beside others

Written by `python -m bench.client`; do not edit. What each column means, and what each tool needed: `bench/README.md`.
"""

_ON_THE_WAY = {
    "read_after_sent": "from our sent stamp to the server's read of the request",
    "stamp_after_write": "from the server's write of an event to our stamp of it",
}


def render(facts: dict[str, Any]) -> str:
    machine = facts["machine"]
    lines = [_HEAD]
    lines.append(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; Python {machine['python']};"
        f" load average before: {machine['load_before']:.2f}, after: {machine['load_after']:.2f}."
        f" Server on one core, client on the other. Asked: `python -m bench.client {' '.join(facts['command'])}`."
    )
    for name, found in facts["summaries"].items():
        lines += ["", f"## {name}", "", *_table(found, facts["versions"], facts["missing"])]
        lines += _notes(found)
    lines += ["", "## Command lines", ""]
    commands = {run["client"]: run["command"] for run in facts["runs"]}
    lines += [f"- {name}: `{' '.join(command)}`" for name, command in commands.items()]
    return "\n".join(lines) + "\n"


def _table(found: dict[str, Any], versions: dict[str, str], missing: list[str]) -> list[str]:
    head = ["client", "CPU-s per 1k events", "× ours", "peak MiB", "× ours", "KiB per 1k events", "start s"]
    head += ["TTFT error p50 / p99 ms", "gap error p50 / p99 ms", "events/s", "claimed of asked", "exit"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    ours = found.get(OURS, {})
    for name in sorted(found, key=lambda n: _median(found[n]["cpu_s_per_1k"], 1e9)):
        row = found[name]
        cells = [
            name if name in (OURS, CONTROL) else f"{name} {versions.get(name, '')}".strip(),
            _spread(row["cpu_s_per_1k"], 4), _ratio(row, ours, "cpu_s_per_1k"),
            _spread(row["peak_mib"], 0), _ratio(row, ours, "peak_mib"), _spread(row["kib_per_1k"], 0),
            _spread(row["start_s"], 1), _pair(row, "ttft_error"), _pair(row, "gap_error") + _of(row),
            _spread(row["events_per_s"], 0), _claimed(row), " ".join(map(str, row["exit_codes"])),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    rows += [f"| {name} | not installed |" + " |" * (len(head) - 2) for name in missing]
    return rows


def _median(spread: list[float] | None, otherwise: float) -> float:
    return spread[0] if spread else otherwise


def _spread(spread: list[float] | None, digits: int) -> str:
    if not spread:
        return "–"
    median, least, greatest = (f"{v:.{digits}f}" for v in spread)
    return median if least == greatest else f"{median} [{least}, {greatest}]"


def _ratio(row: dict[str, Any], ours: dict[str, Any], name: str) -> str:
    mine, base = row.get(name), ours.get(name)
    return f"{mine[0] / base[0]:.2f}" if mine and base and base[0] > 0 else "–"


def _pair(row: dict[str, Any], name: str) -> str:
    pair = [row[f"{name}_{q}_ms"] for q in ("p50", "p99")]
    return " / ".join(f"{p[0]:+.2f}" if p else "–" for p in pair)


def _of(row: dict[str, Any]) -> str:
    return "" if row["gap_of"] == "events" else " (of means)"


def _claimed(row: dict[str, Any]) -> str:
    """Requests that the tool calls good, of those asked; in brackets what the server answered beyond that, or less."""
    claimed = "–" if None in row["claimed"] else str(sum(row["claimed"]))
    served, asked = sum(s or 0 for s in row["served"]), sum(row["asked"])
    extra = f" (served {served - asked:+d})" if served != asked else ""
    return f"{claimed} of {asked}{extra}"


def _notes(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    late = [_median(row["server_late_p99_ms"], 0.0) for row in found.values()]
    lines += ["", f"The server's own lateness, p99: {min(late):.2f} to {max(late):.2f} ms, whoever the client."]
    for name, row in found.items():
        for key, what in _ON_THE_WAY.items():
            if row.get(f"{key}_p99_ms"):
                p50, p99 = (row[f"{key}_{q}_ms"][0] for q in ("p50", "p99"))
                lines.append(f"{name}: {what}: {p50:.3f} / {p99:.3f} ms (p50 / p99).")
        lines += [f"{name}: {note}" for note in row["notes"]]
    return lines
