"""What the HTML page says of a run's circumstances: settings, targets, environment, trace."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from llm_bench.printable import clean
from llm_bench.results import Run

NOT_RECORDED = "not recorded"


def settings(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "loads", ", ".join(map(str, facts.get("loads") or [])) or NOT_RECORDED
    yield from _flat(facts.get("settings") or {})


def _flat(of: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in of.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", _said(value)


def _said(value: Any) -> str:
    """A value of run.json in words."""
    if value is None or value in ("", [], {}):
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def moment(anchor: Any) -> str:
    """The wall time of an anchor, [ns since 1970, ns of the monotonic clock]."""
    if not isinstance(anchor, Sequence) or len(anchor) != 2 or not all(isinstance(ns, int) for ns in anchor):
        return ""
    try:
        began = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=anchor[0] // 1000)
    except OverflowError:
        return ""
    return began.strftime("%Y-%m-%d %H:%M:%S UTC")


def environment(run: Run, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    host, trace, hashes = (facts.get(key) or {} for key in ("host", "trace", "hashes"))
    yield "folder", clean(str(run.path))
    yield "llm-bench", str(facts.get("version") or NOT_RECORDED)
    yield "run", str(facts.get("run_id") or NOT_RECORDED)
    yield "began", moment(facts.get("anchor")) or NOT_RECORDED
    yield "anchor (wall ns, monotonic ns)", _said(facts.get("anchor")) if facts.get("anchor") else NOT_RECORDED
    yield (
        "arrivals stamped by",
        ", ".join(sorted({m.end.get("stamps") or NOT_RECORDED for m in run.cells})) or NOT_RECORDED,
    )
    yield "command", " ".join(map(str, facts.get("command") or [])) or NOT_RECORDED
    for key, said in _flat(host):
        yield f"host: {key}", said
    yield "trace", str(trace.get("path") or NOT_RECORDED)
    for key, said in _flat({key: value for key, value in trace.items() if key not in ("path", "notes", "sha256")}):
        yield f"trace: {key}", said
    for note in trace.get("notes") or []:
        yield "trace: note", str(note)
    yield "trace: sha256 of the file", str(trace.get("sha256") or NOT_RECORDED)
    yield "trace: hash of the requests sent", str(hashes.get("trace") or NOT_RECORDED)
    for name, digest in (hashes.get("tokenizers") or {}).items():
        yield f"tokenizer of {name}: hash", str(digest)


def targets(run: Run, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of each target what was declared, and what was found before and after the load; "" and null are nothing."""
    declared = {str(d.get("name")): d for d in facts.get("declared") or [] if isinstance(d, Mapping)}
    for m in run.cells:
        declared.setdefault(m.target, m.cell.header.get("target") or {})
    probes = {m.target: m.cell.header.get("probe") or {} for m in reversed(run.cells)}
    learnt = facts.get("learnt") or {}
    for name, target in declared.items():
        for key, said in _flat({**target, "probe": probes.get(name) or {}, "after the load": learnt.get(name) or {}}):
            if said != "–" and key != "name":
                yield f"{name}: {key}", said
