"""Other hosts' clocks: what an exchange proves, and that no figure depends on them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import client, host_checks, host_clock, metrics, records, windows
from llm_bench.columns import Cell
from llm_bench.facts import Facts
from llm_bench.host_clock import Reading
from llm_bench.records import Record, Writer
from llm_bench.series import SERIES

MINUTES_21_NS = 21 * 60 * 10**9
WAYS = st.integers(0, 10**9)


@given(st.integers(-(10**15), 10**15), WAYS, WAYS, WAYS)
def test_the_true_offset_lies_within_the_error_however_unlike_the_ways_are(offset, there, thinking, back):
    asked = 10**16
    received = asked + there + offset
    heard = asked + there + thinking + back
    found = host_clock.reading(asked, received, received + thinking, heard)
    assert abs(found.offset_ns - offset) <= found.error_ns
    assert asked <= found.at_ns <= heard


def test_a_clock_that_drifts_is_seen_to_and_one_that_may_not_is_not_said_to():
    def at(second: float, offset_ns: int, error_ns: int = 1000) -> Reading:
        return Reading(round(second * 1e9), offset_ns, error_ns)

    steady = host_clock.clock(at(0, 500), [at(5, 900, 10_000)], at(10, 700))
    assert (steady.drift_ppm, steady.moved_ns, steady.off_ns) == (None, 0, 1000)
    drifting = host_clock.clock(at(0, 500), [at(5, 100_500)], at(10, 200_500))
    assert drifting.drift_ppm == 20.0
    assert drifting.moved_ns == 198_000  # what the errors of both readings leave
    stepped = host_clock.clock(at(0, 0), [at(5, 9_000_000), at(6, 0)], at(10, 0))
    assert (stepped.drift_ppm, stepped.moved_ns) == (None, 8_998_000)
    assert host_clock.clock(at(0, 5), [], None) == host_clock.Clock(5, 1000, None, 0)
    assert host_clock.best([at(0, 1, 30), at(1, 2, 10), at(2, 3, 20)]).offset_ns == 2


# ---- records


def record(index: int, at_ms: float) -> Record:
    ns = round(at_ms * 1e6) + 10**12
    events = [ns + 30_000_000 + 9_000_000 * i + 100_000 * index for i in range(index % 5 + 2)]
    return Record(
        index, f"r{index}", "ok", due_ns=ns, ready_ns=ns, sent_ns=ns + 50_000, connect_ns=10_000,
        first_byte_ns=events[0] - 1000, end_ns=events[-1] + 2000, event_ns=events, first_answer_ns=events[0],
        finish_reason="length", planned_in=8, asked_out=len(events), tokens_in=8, tokens_out=len(events),
        tokens_out_from="usage", retry_wait_ns=7, prompt_hash=index + 1, labels=["x"] * (index % 2),
    )  # fmt: skip


def failed(index: int, at_ms: float) -> Record:
    ns = round(at_ms * 1e6) + 10**12
    return Record(index, f"r{index}", "failed", due_ns=ns, ready_ns=ns, sent_ns=ns + 9, end_ns=ns + 10**6,
                  error_kind="http_5xx", error="no", status=500)  # fmt: skip


ALL = [record(i, 10.0 * i) if i % 11 else failed(i, 10.0 * i) for i in range(400)]
HEADER: dict[str, Any] = {
    "run_id": "ab", "cell": "c", "plan": {"hash": "h"}, "workers": 2, "target": {"name": "t"},
    "load": {"kind": "open", "rate": 100.0, "label": "rate=100/s"}, "start_ns": 10**12,
}  # fmt: skip


def shifted(r: Record, by_ns: int) -> Record:
    """On a clock that is ahead by so much: written by hand, not by what is tested."""
    moved = {name: getattr(r, name) + by_ns if getattr(r, name) else 0 for name in host_clock.STAMPS}
    return replace(r, **moved, event_ns=[ns + by_ns for ns in r.event_ns])


def gauge_of(part: list[Record]) -> np.ndarray:
    ends = sorted([(r.sent_ns, 1) for r in part] + [(r.end_ns, -1) for r in part])
    return np.array([[ns for ns, _ in ends], np.cumsum([step for _, step in ends])], np.int64).T


def stream_of(part: list[Record], path: Path) -> bytes:
    writer = Writer(path, HEADER)
    for at, r in enumerate(part):
        writer.write(r)
        if at % 7 == 0:
            writer.flush()
    writer.close()
    return path.read_bytes()


def fetched(stream: bytes, by_ns: int, step: int) -> bytes:
    """As an agent tells a growing file, `step` bytes at a time."""
    out, at, schema = b"", 0, None
    for there in [*range(step, len(stream), step), len(stream)]:
        begin = at
        for end, message in host_clock.messages(stream[begin:there]):
            data = stream[at : begin + end]
            if message is not None and schema is None:
                schema = pa.ipc.read_schema(message)
            elif message is not None:
                batch = pa.ipc.read_record_batch(message, schema)
                data = bytes(host_clock.moved(batch, by_ns).serialize())
            out, at = out + data, begin + end
    assert at == len(stream)
    return out


def test_a_stream_is_cut_into_whole_messages_wherever_it_breaks_off(tmp_path):
    stream = stream_of(ALL[:40], tmp_path / "a.arrow")
    whole = [end for end, _ in host_clock.messages(stream)]
    assert whole[-1] == len(stream)
    for length in range(0, len(stream) + 1, 97):
        assert [end for end, _ in host_clock.messages(stream[:length])] == [end for end in whole if end <= length]


def two_hosts(folder: Path, ahead_ns: int) -> Cell:
    """A cell of two hosts whose clocks are so far apart, as the parent has it."""
    folder.mkdir()
    for k, by_ns in enumerate((0, ahead_ns)):
        part = [shifted(r, by_ns) for r in ALL[k::2]]
        raw = stream_of(part, folder / "raw")
        (folder / f"c.w{k}.arrow").write_bytes(fetched(raw, -by_ns, 1500))
        np.save(folder / f"c.w{k}.gauge.npy", host_clock.moved_gauge(gauge_of(part), -by_ns))
    (folder / "raw").unlink()
    return records.read_cell(folder, "c")


@pytest.mark.parametrize("ahead_ns", [MINUTES_21_NS, -MINUTES_21_NS // 2, 1])
def test_two_clocks_21_minutes_apart_change_no_figure(tmp_path, ahead_ns):
    one, other = two_hosts(tmp_path / "one", 0), two_hosts(tmp_path / "other", ahead_ns)
    told = [name for name in one.table.column_names if not name.startswith("server_")]  # those are nan, and equal none
    assert one.table.select(told).equals(other.table.select(told))
    assert (one.gauge == other.gauge).all()
    end = {"reason": "exhausted", "start_ns": 10**12, "window_open_ns": 10**12, "window_close_ns": 10**12 + 4 * 10**9}
    names = [*metrics.WHOLE, *(f"{name}_{of}" for name in SERIES for of in ("mean", "p50", "p99"))]
    names = [name for name in names if name not in ("slo_attainment", "goodput")]  # of an SLO, which there is none of
    one_s, others = (
        [repr(v) for v in metrics.compute_all(names, cell, windows.of(cell, end))] for cell in (one, other)
    )
    assert one_s == others
    assert sum("value=None" not in said for said in one_s) > 40


def test_unmoved_such_a_host_would_not_be_on_the_timeline(tmp_path):
    """What the test above would not see, were its hosts' clocks the same in the first place."""
    raw = stream_of([shifted(r, MINUTES_21_NS) for r in ALL[1::2]], tmp_path / "raw")
    (tmp_path / "c.w0.arrow").write_bytes(stream_of(ALL[::2], tmp_path / "x"))
    (tmp_path / "c.w1.arrow").write_bytes(raw)
    cell = records.read_cell(tmp_path, "c")
    assert np.ptp(cell["due_ns"]) > MINUTES_21_NS


def test_what_a_drive_says_of_itself_moves_with_its_stamps():
    end = {"start_ns": 10, "window_open_ns": 0, "window_close_ns": 30, "loop_stalls": [[12, 1.5]], "cut": 3}
    assert host_clock.moved_end(end, -5) == {
        "start_ns": 5, "window_open_ns": 0, "window_close_ns": 25, "loop_stalls": [[7, 1.5]], "cut": 3,
    }  # fmt: skip


# ---- doubts


def host(worker: int, **facts: Any) -> dict[str, Any]:
    quiet = {"worker": worker, "name": f"10.0.0.{worker}", "offset_ns": 0, "error_ns": 20_000, "drift_ppm": None}
    quiet |= {"moved_ns": 0, "loop_lag_p99_ms": 1.0, "client_cpu_share": 0.1, "calibrated": True, "lost": False}
    return {**quiet, **facts}


def found(*hosts: dict[str, Any]) -> dict[str, str]:
    cell = records.from_records(ALL[:3], HEADER)
    facts = Facts(cell, windows.whole(cell), [], [], {"hosts": list(hosts)})
    checked = {kind: check(facts) for kind, check in host_checks.HOST_CHECKS.items()}
    return {kind: finding.text for kind, finding in checked.items() if finding}


def test_doubts_name_the_host():
    assert found(host(0), host(1)) == {}
    assert found() == {}
    off = found(host(0), host(1, error_ns=2_000_000, moved_ns=6_000_000, drift_ppm=41.2))
    assert list(off) == ["host clocks"]
    assert "worker 1 (10.0.0.1) lie up to 8.0 ms off" in off["host clocks"]
    assert "drift 41.2 ppm" in off["host clocks"]
    late = found(host(0), host(3, loop_lag_p99_ms=client.MAX_LAG_MS + 1), host(4, client_cpu_share=0.97))
    assert late == {
        "host lateness": "worker 3 (10.0.0.3) ran 11.0 ms late (p99); worker 4 (10.0.0.4) used 97% of a core"
    }
    never = found(*(host(k, calibrated=False) for k in range(5)))
    assert "worker 2 (10.0.0.2) and 2 more can carry was never measured" in never["host not calibrated"]
    gone = host(1, lost=True, error_ns=10**9, loop_lag_p99_ms=None, client_cpu_share=None, calibrated=False)
    assert found(host(0), gone) == {}  # it is named by the reason that the cell ended by
