"""Each cause, made up or injected into the reference engine, is named; a healthy run has none."""

import dataclasses
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from llm_bench import diagnose_queue, diagnose_report, results, scrape, targets, windows
from llm_bench.columns import Cell
from llm_bench.diagnose import CAUSES, RULES, Diagnosis, diagnose
from llm_bench.diagnose_client import untouched
from llm_bench.diagnose_failures import CHECKS
from llm_bench.diagnose_server import cache
from llm_bench.evidence import Case, flushes, related
from llm_bench.server_metrics import Figure, Figures
from llm_bench.server_names import METRICS_OF
from reference_engine.config import EngineConfig
from tests.bench import command, environment, rows, trace_file
from tests.quiet import undisturbed
from tests.sample import START_NS, cell, closed_loop, header, ns, record, stood_still
from tests.simulated import poisson, served

OPEN = {"kind": "open", "rate": 10.0, "warmup": 0.0}
FAILURES = (  # of METRICS.md, Outcomes
    "empty_output short_output truncated_stream server_error_in_stream http_4xx http_5xx rejected connect_error "
    "connect_timeout ttft_timeout stall_timeout total_timeout protocol_error"
).split()
SERVER = {"server_queue_ms": 5.0, "server_prefill_ms": 40.0, "server_decode_ms": 80.0}


def stream(i: int, due: float, ttft: float = 50.0, tokens: int = 5, gap: float = 20.0, **fields: Any) -> Any:
    return record(i, due, events=[due + ttft + gap * k for k in range(tokens)], asked_out=tokens, **fields)


def healthy(n: int = 100, url_index: int = 0, **parts: Any) -> Cell:
    rows_ = [stream(i, 100 * i, url_index=url_index, **SERVER) for i in range(n)]
    return cell(rows_, **({"load": OPEN} | parts))


def scraped(**values: float | tuple[float, float]) -> Figures:
    """Figures over ten seconds; of a gauge (mean, most)."""
    of = {}
    for metric, value in values.items():
        mean, most = value if isinstance(value, tuple) else (value, value)
        of[metric] = Figure(metric, f"x:{metric}", mean, 50, least=0.0, most=most)
        assert metric in METRICS_OF
    return Figures(of, START_NS, START_NS + 10_000_000_000, 11, True)


CALM = {"running": 3.0, "waiting": 0.0, "kv_usage": 0.3, "preemptions": 0.0, "generated_tokens": 500.0}


def case(c: Cell, server: dict[str, Any] | None = None, load: str = "10/s", **fields: Any) -> Case:
    replicas = {"http://a/metrics": scraped(**(CALM | server))} if server is not None else {}
    made = Case("000-a", "a", load, c, windows.of(c), {"reason": "exhausted"}, replicas, every_s=1.0)
    return dataclasses.replace(made, **fields)


def kinds(of: Case) -> list[str]:
    return list(diagnose(of).findings)


# ---- causes, made up: kind -> a case that has it, and what its evidence says


def late_client() -> Case:
    rows_ = [stream(i, 100 * i, 90, sent=100 * i + 40, ready_ns=ns(100 * i)) for i in range(100)]
    return case(cell(rows_, load=OPEN))


PROBED_SLOWLY = header()["probe"] | {"rtt_ms": 30.0}


def far_away() -> Case:
    """35 ms of a TTFT of 50 are not the server's."""
    said = SERVER | {"server_prefill_ms": 10.0}
    return case(cell([stream(i, 100 * i, **said) for i in range(100)], load=OPEN, probe=PROBED_SLOWLY))


def backlog() -> Case:
    rows_ = [stream(k, 200 * k, 800 * k + 1000) for k in range(30)]
    rows_ += [record(k, 200 * k, end=30_000, outcome="cut_at_end") for k in range(30, 150)]
    return case(cell(rows_, load={"kind": "open", "rate": 5.0, "warmup": None}))


def seats() -> Case:
    return case(closed_loop(200, 16), {"running": (2.0, 2.0), "waiting": (14.0, 14.0), "kv_usage": (0.1, 0.12)})


def full() -> Case:
    return case(closed_loop(200, 16), {"running": (4.0, 5.0), "waiting": (12.0, 12.0), "kv_usage": (0.95, 0.99)})


def few_large() -> Case:
    return case(closed_loop(200, 8), {"running": (1.0, 1.0), "waiting": (7.0, 7.0), "kv_usage": (0.56, 0.62)})


def storm() -> Case:
    rows_ = [stream(i, 100 * i, tokens_in=100 + 10 * i) for i in range(100)]
    return case(cell(rows_, load=OPEN), {"preemptions": 30.0, "kv_usage": (0.8, 1.0)})


def refused() -> Case:
    """A third fails, some by kind and status, evenly all through it."""
    kinds = [{"error_kind": "rejected", "status": 429, "error": "HTTP 429: \x1b[31mslow down"}] * 2
    kinds += [{"error_kind": "connect_error", "status": 0, "error": "refused"}]
    rows_ = [
        record(i, 100 * i, outcome="failed", **kinds[i // 3 % 3]) if i % 3 == 0 else stream(i, 100 * i)
        for i in range(90)
    ]
    return case(cell(rows_, load=OPEN))


def memory_gone() -> Case:
    rows_ = [stream(i, 100 * i) for i in range(80)]
    rows_ += [record(i, 100 * i, outcome="failed", error="CUDA error: out of memory") for i in range(80, 100)]
    return case(cell(rows_, load=OPEN))


def one_blocks_all(stop: float, **fields: Any) -> Case:
    """Four streams of 20 ms a token; every 2 s a prompt of 4,000 tokens comes, and all stand still for `stop` ms."""
    halts = [2000.0 * k + 1000 for k in range(1, 8)]

    def moved(at: float) -> float:
        return at + sum(stop for halt in halts if at > halt)

    rows_ = [
        record(i, moved(100.0 * i), events=[moved(100.0 * i + 30 + 20 * k) for k in range(15)], tokens_in=100, **fields)
        for i in range(160)
    ]
    rows_ += [
        record(
            160 + k, moved(halt), events=[moved(halt) + stop + 25 + 20 * j for j in range(5)], tokens_in=4000, **fields
        )
        for k, halt in enumerate(halts)
    ]
    return case(cell(rows_, load=OPEN))


def busy_queue(server: dict[str, Any] | None = None, said: bool = False) -> Case:
    """208/s at a server with one seat: 0.9 ms a short prompt, 3 ms a long one (1.1 on average), 3.5 ms of tokens after.

    Nine short ones to a long one; who comes while others are there waits for them, whatever their length.
    """
    rng = np.random.Generator(np.random.PCG64(4))
    due, free, rows_ = np.cumsum(rng.exponential(1000 / 208, 3000)).tolist(), 0.0, []
    for i, at in enumerate(due):
        prefill = 3.0 if i % 10 == 3 else 0.9
        start = max(free, at)
        free = start + prefill + 3.5
        told = {"server_prefill_ms": prefill} if said else {}
        rows_.append(record(i, at, events=[start + prefill, free], tokens_in=800 if i % 10 == 3 else 100, **told))
    return case(cell(rows_, load=OPEN), server)


def bursts() -> Case:
    """Every 2 s a heap of 20 at once, which are served one after another, and between them one every 200 ms."""
    dues = sorted([2000.0 * h + 1000 for h in range(10) for _ in range(20)] + [200.0 * k for k in range(100)])
    free, rows_ = 0.0, []
    for i, due in enumerate(dues):
        free = max(free, due) + 20
        rows_.append(record(i, due, events=[free + 20 + 5 * k for k in range(5)]))
    return case(cell(rows_, load={"kind": "replay", "speed": 1.0, "warmup": 0.0}))


def queue() -> Case:
    rows_ = [stream(i, 100 * i, 150, **(SERVER | {"server_queue_ms": 110.0})) for i in range(100)]
    return case(cell(rows_, load=OPEN))


def spikes() -> Case:
    return case(cell([stream(i, 100 * i, 900 if i % 12 == 0 else 50) for i in range(240)], load=OPEN))


GPU_IDLE = scraped(gpu_busy=0.2, gpu_memory_busy=0.1)
GPU_FULL = scraped(gpu_busy=0.98, gpu_memory_busy=0.85)


def cpu_bound() -> Case:
    return case(closed_loop(200, 16), {}, gpu=GPU_IDLE, host=scraped(server_cpu=11.0))


def slow_front_end() -> Case:
    rows_ = [stream(i, 100 * i, 150, **SERVER) for i in range(100)]  # 105 ms before the first token that are nobody's
    return case(cell(rows_, load=OPEN))


def bandwidth() -> Case:
    low = case(closed_loop(200, 8, stay=100), {"running": (8.0, 8.0)}, "c=8")
    high = case(closed_loop(400, 16, stay=195), {"running": (16.0, 16.0)}, "c=16", gpu=GPU_FULL)
    return related([low, high])[1]


def flushed(sizes: Sequence[int], every: float, n: int = 60, apart: float = 0.0) -> Cell:
    """Streams whose tokens come `every` ms, `sizes` at a time, each token an event."""
    made = []
    for i in range(n):
        due, events = 500.0 * i, list[float]()
        for k, size in enumerate([sizes[(i + j) % len(sizes)] for j in range(8)]):
            events += [due + 40 + every * k + apart * e for e in range(size)]
        made.append(record(i, due, events=events))
    return cell(made, load=OPEN)


def timer() -> Case:
    return case(flushed((3, 5, 2, 6), 50, apart=0.2))


def packed() -> Case:
    return related([case(flushed((4,), 40), load="c=1"), case(flushed((4,), 90), load="c=8")])[1]


def warm() -> Case:
    cold, hot = (
        case(cell([stream(i, 100 * i, ttft, tokens_cached=cached) for i in range(100)], load=OPEN), load=load)
        for load, ttft, cached in (("c=1", 50.0, 0), ("c=8", 20.0, 60))
    )
    return related([cold, hot])[1]


def hot() -> Case:
    replicas = {f"http://{n}/metrics": scraped(**(CALM | {"generated_tokens": t})) for n, t in (("a", 900), ("b", 90))}
    return case(healthy(), replicas=replicas, urls=("http://a", "http://b"))


TROUBLE: dict[str, tuple[Callable[[], Case], str]] = {
    "failed requests": (refused, "30 of 90 requests due in the window failed (33.3%): rejected 429 x20 (67% of them)"),
    "client limited": (late_client, "p99 of its delay is 40.00 ms"),
    "network limited": (far_away, "a round trip takes 30.0 ms, 60% of the median TTFT of 50.0 ms"),
    "overload": (backlog, "the backlog grows by"),
    "small batches": (seats, "2.0 requests ran and 14.0 waited, on average; never more than 2 ran"),
    "KV memory full": (full, "KV memory was 95% full, by 4.0 requests, on average (at most 99%) while 12.0"),
    "preemption storm": (storm, "30 preemptions where 100 requests ended; KV memory was up to 100% full; requests of"),
    "out of memory": (memory_gone, "20 of 20 failed requests say so, first: CUDA error: out of memory"),
    "long prefills": (lambda: one_blocks_all(600.0), "of 7 prompts of 400 tokens or more is computed, other streams"),
    "arrival bursts": (bursts, "times the variance of Poisson's"),
    "queueing": (queue, "110 ms of a mean TTFT of 150 ms are waiting in the server's queue"),
    "TTFT spikes": (spikes, "p95 TTFT is 900 ms, p50 50 ms"),
    "server CPU": (cpu_bound, "the GPU was busy 20% of the time, the server's processes used 1.1 cores"),
    "server front end": (slow_front_end, "of a mean e2e of 230 ms, 105 ms are neither"),
    "memory bandwidth": (bandwidth, "from c=8 to c=16 tokens/s went from"),
    "timer-batched stream": (timer, "tokens come every 50.0 ms (quartiles 0% apart), 4.0 at a time"),
    "events of several tokens": (packed, "the same number at another interval at another load"),
    "cache effects": (warm, "60% of the prompt tokens were in the cache, 0% at c=1; median TTFT: c=1 50 ms, c=8 20 ms"),
    "hot replica": (hot, "http://a/metrics has 1.8 times the generated tokens a second of the mean replica"),
}


def test_every_rule_has_its_trouble() -> None:
    assert list(TROUBLE) == list(RULES)
    assert set(CAUSES) <= set(RULES)


def of_lag(lag: float, tokens: int = 5, gap: float = 20.0, **end: Any) -> Case:
    """Sent `lag` ms late; 5 ms to the first token from then on."""
    rows_ = [
        record(i, 500 * i, 500 * i + lag, [500 * i + lag + 5 + gap * k for k in range(tokens)], ready_ns=ns(500 * i))
        for i in range(100)
    ]
    made = case(cell(rows_, load=OPEN))
    return dataclasses.replace(made, end={**made.end, **end})


def test_the_clients_part_is_graded_by_its_share_of_the_whole() -> None:
    # 7% of TTFT and 0.5% of e2e: a doubt of the report, and nothing that held the cell back.
    assert diagnose(of_lag(0.4)).findings == {}
    # 20 of 105 ms: it is said, and the rest is believed.
    some = diagnose(of_lag(20.0)).findings["client limited"]
    assert some.sure == "possible"
    assert "its lag is 19% of e2e" in some.seen
    assert "other findings stand" in some.check
    much = diagnose(of_lag(60.0)).findings["client limited"]
    assert (much.sure, "until then, trust no other finding" in much.check) == ("sure", True)


def test_a_client_that_stood_still_for_a_moment_or_for_long() -> None:
    first = of_lag(0.0)
    window = first.window

    def stalled(share: float) -> list[tuple[int, float]]:
        return [(window.start_ns + 10, share * window.seconds * 1e3)]

    assert kinds(of_lag(0.0, loop_stalls=stalled(0.01))) == []
    assert diagnose(of_lag(0.0, loop_stalls=stalled(0.1))).findings["client limited"].sure == "possible"
    assert diagnose(of_lag(0.0, loop_stalls=stalled(0.4))).findings["client limited"].sure == "sure"
    assert kinds(of_lag(0.0, loop_lag_p99_ms=11.0, gap=200.0)) == []  # of 805 ms
    assert diagnose(of_lag(0.0, loop_lag_p99_ms=11.0)).findings["client limited"].sure == "possible"
    assert diagnose(of_lag(0.0, client_cpu_share=0.95)).findings["client limited"].sure == "sure"


def test_stalls_shorter_than_a_gap_between_tokens_are_no_limit_however_many() -> None:
    window = of_lag(0.0).window
    short = [(window.start_ns + k * 200_000_000, 50.0) for k in range(200)]  # a quarter of the time
    long = [(window.start_ns + k * 4_000_000_000, 250.0) for k in range(10)]  # a twentieth
    assert kinds(of_lag(0.0, gap=200.0, loop_stalls=[*short, *long[:1]])) == []
    some = diagnose(of_lag(0.0, gap=200.0, loop_stalls=[*short, *long])).findings["client limited"]
    assert some.sure == "possible"
    assert diagnose(of_lag(0.0, gap=20.0, loop_stalls=short)).findings["client limited"].sure == "sure"


def test_what_was_not_judged_explains_no_queue_away() -> None:
    blind = diagnose(queue()).findings["queueing"].check
    assert "rerun with --metrics-url auto" in blind
    assert "small batches, KV memory full, preemption storm could not be judged" in blind
    assert "long prefills were looked for and not seen" in blind
    assert "do not explain" not in blind
    seen = dataclasses.replace(queue(), replicas={"http://a/metrics": scraped(**CALM)})
    told = diagnose(seen).findings["queueing"].check
    assert (
        "small batches, KV memory full, preemption storm, long prefills were looked for and do not explain it" in told
    )
    assert "rerun" not in told
    partly = diagnose(in_part(seen)).findings["queueing"].check
    assert "small batches, KV memory full, preemption storm could not be judged: see why below (the server's" in partly
    assert "scraped over 4.0 of the window's" in partly
    assert "long prefills were looked for and not seen" in partly


def test_one_of_anything_is_said_as_one(tmp_path: Path) -> None:
    one = cell([record(0, 0, outcome="failed", error="x")], load=OPEN)
    assert "1 of 1 request of the whole cell (none was due in a window) failed" in (
        diagnose(case(one, window=windows.Window(ns(5000), ns(6000), 0, 0, ""))).findings["failed requests"].seen
    )
    lost = [
        record(0, 0, outcome="failed", error="\x1b[31mCUDA out of memory"),
        *(stream(i, 9 * i) for i in range(1, 99)),
    ]
    assert diagnose(case(cell(lost, load=OPEN))).findings["out of memory"].seen == (
        "1 of 1 failed request says so, first: \\x1b[31mCUDA out of memory"
    )
    alone = cell([stream(0, 0)], load=OPEN)
    measured = [results.Measured("000-a", "a", "10/s", alone, windows.of(alone), {"reason": "exhausted"}, ())]
    made = results.Run(tmp_path, {}, measured, [])
    assert "mean of 1 ok request:" in diagnose_report.text(made, diagnose_report.diagnosed(made))


def test_a_link_that_carries_half_a_gigabit_may_be_the_limit() -> None:
    # 25 streams of 300,000 bytes each every 100 ms: 600 Mbit/s, 0.4% of it text.
    made = [stream(i, 4 * i, bytes_in=300_000, text_bytes=1200) for i in range(2500)]
    found = diagnose(case(cell(made, load=OPEN))).findings["network limited"]
    assert found.sure == "possible"
    assert found.seen.endswith("Mbit/s were received, 0% of it text of tokens")


def test_a_queue_of_single_passes_has_one_cause_to_look_for() -> None:
    made = [record(i, 100 * i, end=100 * i + 90, tokens_out=-1, text_bytes=0, server_queue_ms=60.0) for i in range(100)]
    found = diagnose(case(cell(made, load=OPEN))).findings["queueing"]
    assert "60 ms of a mean e2e of 90 ms are waiting in the server's queue" in found.seen
    assert found.check.startswith("small batches could not be judged: rerun with --metrics-url auto")


def test_what_vllm_says_of_its_prefill_is_its_time_to_the_first_token_less_its_queue() -> None:
    found = diagnose(one_blocks_all(600.0, server_ttft_ms=640.0, server_queue_ms=0.5)).findings
    assert "computing one takes about 640 ms" in found["long prefills"].seen
    assert found["long prefills"].sources == (
        "records; prefill: the server, in its answers: to the first token, less the queue"
    )
    assert "long prefills" not in kinds(one_blocks_all(600.0, server_ttft_ms=60.0, server_queue_ms=0.5))


def stopped(of: Case, *stalls: tuple[float, float]) -> Case:
    """The case of a client whose loop also stood still: (from ms, for ms)."""
    return dataclasses.replace(of, end={**of.end, "loop_stalls": [(ns(at), for_ms) for at, for_ms in stalls]})


def test_a_backlog_that_the_client_alone_can_have_made_is_no_overload() -> None:
    made = stopped(case(cell(stood_still(27), load=OPEN | {"rate": 100.0})), (8000, 2500))
    assert made.window.state == windows.GROWING
    found = diagnose(made)
    assert list(found.findings) == ["client limited"]
    assert found.findings["client limited"].sure == "sure"
    assert "overload" not in found.judged
    why = found.unjudged["overload"]
    assert "what it held up can look so by itself: the backlog grows by 3.03 requests/s" in why


def test_a_backlog_far_larger_than_what_the_client_held_up_is_an_overload() -> None:
    found = diagnose(stopped(backlog(), (5000, 4000))).findings
    assert list(found) == ["client limited", "overload"]
    assert "this holds without what this client held up" in found["overload"].seen


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: one_blocks_all(600.0), "long prefills"),
        (bursts, "arrival bursts"),
        (timer, "timer-batched stream"),
        (packed, "events of several tokens"),
    ],
)
def test_what_rests_on_this_clients_stamps_is_looked_for_where_it_did_not_touch_them(
    make: Callable[[], Case], kind: str
) -> None:
    once = diagnose(stopped(make(), (9000, 3000))).findings  # of 20 or 30 s: the rest shows it
    assert list(once) == ["client limited", kind]
    assert "this holds without what this client held up" in once[kind].seen
    always = diagnose(dataclasses.replace(make(), end={"client_cpu_share": 0.95}))
    assert list(always.findings) == ["client limited"]
    assert "what it held up can look so by itself" in always.unjudged[kind]


def test_heaps_are_those_of_the_whole_plan_where_first_tokens_are_looked_at_in_a_part_of_it() -> None:
    whole = diagnose(bursts()).findings["arrival bursts"].seen
    part = diagnose(stopped(bursts(), (9000, 3000))).findings["arrival bursts"].seen
    assert part.partition(";")[0] == whole.partition(";")[0]  # bins and variance


def test_what_other_loads_tell_of_a_timer_is_asked_again_too() -> None:
    low, high = related([case(flushed((4,), 50), load="c=1"), case(flushed((2,), 50), load="c=8")])
    assert kinds(stopped(low, (9000, 3000))) == ["client limited", "timer-batched stream"]
    # A load at which the client was late all the time tells nothing.
    late = dataclasses.replace(high, end={"client_cpu_share": 0.95})
    alone = dataclasses.replace(stopped(low, (9000, 3000)), siblings=(late,))
    assert "timer-batched stream" in diagnose(alone).unjudged


def test_a_hot_replica_by_its_own_metrics_stays_whatever_the_client_did() -> None:
    found = diagnose(dataclasses.replace(hot(), end={"client_cpu_share": 0.95})).findings
    assert list(found) == ["client limited", "hot replica"]
    assert found["hot replica"].sure == "sure"


def test_a_client_that_is_a_little_late_for_everybody_leaves_nobody_untouched() -> None:
    assert untouched(of_lag(5.0, gap=2.0)) is None  # of 18 ms
    touched = untouched(of_lag(2.0))  # of 87 ms
    assert touched is not None
    assert touched.rows.all()


def test_who_is_touched_by_a_stall_or_by_a_heap_by_hand() -> None:
    def at(due: float, sent: float, end: float) -> Any:
        return record(0, due, sent, [end], ready_ns=ns(due))

    rows_ = [at(0, 0, 999), at(500, 500, 1001), at(1500, 2000, 2300), at(2200, 2200, 2250), at(2301, 2301, 2400)]
    rows_ += [record(9, 3000, outcome="dropped")]
    of = stopped(case(cell(rows_, load=OPEN)), (1000, 1000))
    calm = untouched(of)
    assert calm is not None
    assert ((calm.case.cell["due_ns"] - ns(0)) / 1e6).tolist() == [0, 2301]  # 2300: the heap's last answer
    for mine, whole in zip(windows.in_flight(calm.case.cell), windows.in_flight(of.cell), strict=True):
        assert mine.tolist() == whole.tolist()  # who was beside them is known all the same
    assert untouched(dataclasses.replace(of, end={"client_cpu_share": 0.95})) is None
    assert untouched(stopped(of, (0, 2399))) is None


def repeated(tmp_path: Path, *made: Cell) -> tuple[results.Run, list[diagnose_report.Diagnosed]]:
    cells = [
        results.Measured(f"{i:03d}-a-p{i}", "a", "10/s", one, windows.of(one), {"reason": "exhausted"}, ())
        for i, one in enumerate(made)
    ]
    run_ = results.Run(tmp_path, {}, cells, [])
    return run_, diagnose_report.diagnosed(run_)


def test_a_round_trip_is_no_longer_than_what_the_server_leaves_of_any_first_token() -> None:
    # The probe met a busy machine: 45 of 50 ms are the server's own, and 5 ms were enough for there and back.
    assert "network limited" not in kinds(case(healthy(probe=PROBED_SLOWLY)))
    # Of a server that says nothing of itself each first token bounds it, the fastest the most.
    rows_ = [stream(i, 100 * i, 4.0 if i == 50 else 50.0) for i in range(100)]
    assert "network limited" not in kinds(case(cell(rows_, load=OPEN, probe=PROBED_SLOWLY)))
    rows_[50] = stream(50, 5000, 31.0)
    assert kinds(case(cell(rows_, load=OPEN, probe=PROBED_SLOWLY))) == ["network limited"]


def test_repeats_of_a_cell_are_told_together(tmp_path: Path) -> None:
    slow = queue().cell
    run_, found = repeated(tmp_path, healthy(), slow, healthy(), slow, slow)
    text = diagnose_report.text(run_, found)
    assert text.count("where the time went") == 1
    assert "a at 10/s (5 runs, stationary)" in text
    # 130 ms e2e in two, 230 ms in three: 190 ms of 500 requests.
    assert "mean of 500 ok requests: e2e 190 ms" in " ".join(text.split()).replace("190.0", "190")
    assert "QUEUEING (sure; in 3 of 5 runs; of one): 110 ms of a mean TTFT of 150 ms" in text
    assert len(text.splitlines()) < 20
    assert "a at 10/s (5 runs" in diagnose_report.markdown(run_, found)
    assert len(json.loads(diagnose_report.json_text(run_, found))["cells"]) == 5


def test_healthy_repeats_say_once_that_nothing_was_found(tmp_path: Path) -> None:
    text = diagnose_report.text(*repeated(tmp_path, healthy(), healthy()))
    assert text.count("nothing found; looked for:") == 1
    assert text.count("not judged: small batches") == 1


@pytest.mark.parametrize("kind", TROUBLE)
def test_each_cause_is_named_and_no_other(kind: str) -> None:
    make, said = TROUBLE[kind]
    found = diagnose(make()).findings
    assert list(found) == (["failed requests", kind] if kind == "out of memory" else [kind])  # whose sign failures are
    assert said in found[kind].seen
    assert found[kind].check
    assert found[kind].sources


def test_a_healthy_cell_has_no_finding_and_says_what_was_looked_for() -> None:
    found = diagnose(case(healthy(), {}, gpu=scraped(gpu_busy=0.6, gpu_memory_busy=0.5)))
    assert found.findings == {}
    assert set(found.judged) | set(found.unjudged) == set(RULES)
    assert "small batches" in found.judged
    assert found.unjudged == {
        "cache effects": "the server says nothing of its prefix cache",
        "hot replica": "one server, as far as is known",
    }


CHAT = [(100, 60), (200, 120), (300, 40), (800, 100)]  # 62/s fill the 64 seats of sim:7b-h100
LONG_TAIL = [(40, 16)] * 9 + [(400, 16)]  # 257/s


@pytest.mark.parametrize("tell", [True, False])
@pytest.mark.parametrize(("lengths", "rate"), [(CHAT, 43.0), (LONG_TAIL, 180.0)])
def test_a_server_at_seven_tenths_of_its_capacity_is_busy_and_nothing_is_wrong_with_it(
    lengths: list[tuple[int, int]], rate: float, tell: bool
) -> None:
    made = served(EngineConfig(model="sim:7b-h100"), poisson(rate, 1200, lengths), tell)
    of = case(cell(made, load=OPEN | {"rate": rate}))
    assert of.window.state == windows.STATIONARY
    assert (of.metric("in_flight") or 0) > 20
    assert kinds(of) == []


def test_the_same_server_beyond_its_capacity_is_overloaded() -> None:
    made = served(EngineConfig(model="sim:7b-h100"), poisson(80.0, 1200, CHAT))
    assert kinds(case(cell(made, load=OPEN | {"rate": 80.0}))) == ["overload"]


WHOLE = {"chunked_prefill": False, "max_num_batched_tokens": 16_384}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (WHOLE, "other streams stand still for"),
        ({}, "is computed, short prompts that are sent then have"),  # streams go on; who comes after it waits for it
        ({"long_prefill_token_threshold": 128}, ""),  # others share each step with it
    ],
)
def test_long_prompts_are_named_by_what_they_hold_up(settings: dict[str, Any], said: str) -> None:
    arrivals = poisson(6.0, 300, [(100, 60)] * 9 + [(12_000, 20)])
    made = cell(served(EngineConfig(model="sim:7b-h100", **settings), arrivals), load=OPEN)
    found = diagnose(case(made)).findings
    assert list(found) == (["long prefills"] if said else [])
    assert all(said in finding.seen for finding in found.values())


def test_a_tail_of_longer_prompts_that_holds_up_next_to_nobody_is_healthy() -> None:
    """3% have four times the median prompt and stop the others for some 50 ms, which is 2% of their time."""
    arrivals = poisson(10.0, 600, [(300, 100)] * 31 + [(2000, 100)])
    made = cell(served(EngineConfig(model="sim:8b-h100", max_num_batched_tokens=2048), arrivals), load=OPEN)
    of = case(made)
    assert max(of.values("stall")) > 40
    assert kinds(of) == []


def test_single_passes_are_said_and_what_needs_streams_is_not_judged(tmp_path: Path) -> None:
    passes = cell([record(i, 100 * i, end=100 * i + 40, tokens_out=-1, text_bytes=0) for i in range(100)], load=OPEN)
    run_, found = repeated(tmp_path, passes)
    assert found[0].diagnosis.findings == {}
    assert found[0].diagnosis.unjudged["long prefills"] == "no stream of two token-bearing events"
    assert "workload of a: single pass: one result a request" in diagnose_report.text(run_, found)
    assert json.loads(diagnose_report.json_text(run_, found))["cells"][0]["work"] == "single pass"
    mixed = diagnose_report.markdown(*repeated(tmp_path, healthy()))
    assert "- workload of a: LLM decoding" in mixed


def test_the_mean_batch_of_single_passes_is_by_the_servers_counters(tmp_path: Path) -> None:
    """Triton's count of inferences over its count of executions; of a stream they say how often one was started."""
    passes = cell([record(i, 100 * i, end=100 * i + 40, tokens_out=-1, text_bytes=0) for i in range(100)], load=OPEN)
    counted = {"inferences": 300.0, "executions": 100.0}
    said = [diagnose_report._figures(case(of, counted)) for of in (passes, healthy())]
    assert said[0][-1] == "3 inputs a batch on average, by the server's counters"
    assert "inputs a batch" not in "".join(said[1])


def test_a_healthy_sweep_has_none() -> None:
    sweep = [
        case(closed_loop(200, n), {"running": (n, n)}, f"c={n}", gpu=GPU_FULL) for n in (4, 8, 16)
    ]  # tokens/s grow as the slots do
    assert [kinds(c) for c in related(sweep)] == [[], [], []]


def test_few_large_requests_fill_the_memory_before_it_is_full() -> None:
    assert kinds(few_large()) == ["KV memory full"]


def test_engines_behind_one_url_have_each_their_own_memory() -> None:
    """One request in each of two, 56% of its memory: a second would not fit, as it would were 56% that of two."""
    of = case(closed_loop(200, 8), {"running": (2.0, 2.0), "waiting": (6.0, 6.0), "kv_usage": (0.56, 0.62)})
    (page,) = of.replicas.values()
    engines = page._replace(of=page.of | {"kv_usage": page.of["kv_usage"]._replace(parts=2)})
    assert kinds(of) == ["small batches"]
    assert kinds(dataclasses.replace(of, replicas={"http://a/metrics": engines})) == ["KV memory full"]


def test_long_prompts_that_hold_nobody_up_are_none() -> None:
    assert kinds(one_blocks_all(15.0)) == []


@pytest.mark.parametrize(("share", "times", "stop"), [(0.04, 1, 0), (0.04, 3, 0), (0.06, 1, 30), (0.06, 3, 30)])
def test_a_stop_counts_once_however_many_long_prompts_are_computed_in_it(share: float, times: int, stop: int) -> None:
    """One stream: 200 stops of 30 ms with gaps of 4 ms between them, for `share` of its whole time with its TTFT."""
    halts = 50.0 * np.arange(200)
    events = np.sort(np.concatenate([halts, *(halts + 30 + 4 * k for k in range(5))]))
    ttft = 200 * 30 / share - (events[-1] - events[0])
    one = cell([record(0, 0, events=(ttft + events).tolist())], load=OPEN)
    begun = np.repeat(ns(ttft) + (halts + 1) * 1e6, times).astype(np.int64)  # three times 200: every other is looked at
    spans = np.stack([begun, begun + 28_000_000], axis=1)
    assert diagnose_queue._stopped(one, np.zeros(1, bool), spans)[0] == pytest.approx(stop)


NS = st.integers(0, 40)


@given(st.lists(st.tuples(NS, NS), min_size=1, max_size=6), st.lists(st.tuples(NS, NS), max_size=8))
def test_gaps_during_a_prefill_are_those_that_share_a_moment_with_any(
    spans: list[tuple[int, int]], gaps: list[tuple[int, int]]
) -> None:
    at, until = np.sort(np.array(gaps, np.int64).reshape(-1, 2)).T
    found = diagnose_queue._during(np.array(spans), at, until)
    assert found.tolist() == [
        any(begun < b and ended > a for begun, ended in spans) for a, b in zip(at, until, strict=True)
    ]


@pytest.mark.parametrize(("server", "said"), [(None, False), ({"prefill_time": 1.1}, False), (None, True)])
def test_a_queue_that_long_prompts_stand_in_too_is_not_theirs(server: dict[str, Any] | None, said: bool) -> None:
    assert "long prefills" not in kinds(busy_queue(server, said))


@pytest.mark.parametrize(("prefill", "named"), [(400.0, True), (2.0, False)])
def test_a_server_says_whether_its_prefills_are_long_enough(prefill: float, named: bool) -> None:
    made = one_blocks_all(600.0)
    told = scraped(**(CALM | {"prefill_time": prefill * 7 / 167}))  # a mean of 7 long and 160 short ones
    of = dataclasses.replace(made, replicas={"http://a/metrics": told})
    found = diagnose(of).findings
    assert ("long prefills" in found) is named
    if named:
        assert "computing one takes at most 400 ms" in found["long prefills"].seen
        assert found["long prefills"].sources == "records; prefill: the server's histogram x:prefill_time"


def test_without_a_scrape_what_needs_one_is_not_judged() -> None:
    found = diagnose(case(healthy(url_index=-1), urls=("http://a", "http://b")))
    assert found.findings == {}
    assert "not scraped" in found.unjudged["small batches"]
    assert "records do not say which one answered" in found.unjudged["hot replica"]
    assert "rerun with --gpu" in found.unjudged["server CPU"]
    assert "rerun with --metrics-url auto" in found.unjudged["small batches"]


@pytest.mark.parametrize("kind", ["preemption storm", "cache effects"])
def test_a_counter_that_fell_is_not_judged_by_its_increase(kind: str) -> None:
    """As two servers make it that take turns at one URL: 1,000 preemptions of the one, then 3 of the other."""
    of = case(healthy(), {"preemptions": 7000.0, "cache_hits": 9e6, "cache_queries": 1e7})
    assert "preemption storm" in diagnose(of).findings
    (figures,) = of.replicas.values()
    fallen = {m: f._replace(resets=7 * (METRICS_OF[m].kind == "counter")) for m, f in figures.of.items()}
    found = diagnose(dataclasses.replace(of, replicas={"http://a/metrics": figures._replace(of=fallen)}))
    assert found.findings == {}
    assert "fell 7 times: the server was started anew, or several answer at this URL" in found.unjudged[kind]
    assert "small batches" in found.judged  # gauges do not fall


def test_replicas_whose_counters_fell_are_compared_by_what_runs() -> None:
    of = case(healthy(), {})
    a = scraped(**(CALM | {"generated_tokens": 9000.0}))
    fallen = a._replace(of=a.of | {"generated_tokens": a.of["generated_tokens"]._replace(resets=1)})
    pair = dataclasses.replace(of, replicas={"http://a": fallen, "http://b": scraped(**CALM)})
    assert diagnose(pair).findings == {}
    hot = dataclasses.replace(of, replicas={"http://a": a, "http://b": scraped(**CALM)})
    assert list(diagnose(hot).findings) == ["hot replica"]


def for_seconds(seconds: int, **values: float) -> Figures:
    of = scraped(**(CALM | values))
    return of._replace(end_ns=of.start_ns + seconds * 1_000_000_000, scrapes=seconds + 1)


def test_a_replica_that_was_scraped_for_longer_is_not_called_hot() -> None:
    """Both made 100 tokens a second; one was scraped for 10 s, the other for 3 s: 1,000 against 300 tokens."""
    of = case(healthy(), {})
    equal = {"http://a": for_seconds(10, generated_tokens=1000.0), "http://b": for_seconds(3, generated_tokens=300.0)}
    assert "hot replica" not in diagnose(dataclasses.replace(of, replicas=equal)).findings
    hot_ = {"http://a": for_seconds(10, generated_tokens=1000.0), "http://b": for_seconds(3, generated_tokens=1200.0)}
    found = diagnose(dataclasses.replace(of, replicas=hot_)).findings["hot replica"]
    assert (
        "b has 1.6 times the generated tokens a second of the mean replica (http://a 20%, http://b 80%)" in found.seen
    )
    assert found.sure == "likely"  # of other times, at which others may have had the work
    at_once = {"http://a": for_seconds(9, generated_tokens=900.0), "http://b": for_seconds(10, generated_tokens=4000.0)}
    assert diagnose(dataclasses.replace(of, replicas=at_once)).findings["hot replica"].sure == "sure"
    seats_ = {url: scraped(running=n, waiting=0.0) for url, n in (("http://a", 1.0), ("http://b", 9.0))}
    seen = diagnose(dataclasses.replace(of, replicas=seats_)).findings["hot replica"].seen
    assert "http://b has 1.8 times the running requests of the mean replica" in seen  # a gauge is no rate


def test_the_rates_that_are_printed_of_replicas_add_up() -> None:
    """1,000 tokens in 10 s and 1,200 in 3 s: 500 a second together, and not 2,200 / 10 s."""
    replicas = {
        "http://a": for_seconds(10, generated_tokens=1000.0),
        "http://b": for_seconds(3, generated_tokens=1200.0),
    }
    of = dataclasses.replace(case(healthy(), {}), replicas=replicas)
    shown = diagnose_report.text(results.Run(Path("r"), {}, [], []), [diagnose_report.Diagnosed(diagnose(of), [])])
    assert "generated tokens 2,200 tokens, 500.0 tokens/s" in shown


def test_how_many_waited_is_a_bound_of_what_waited_at_all_replicas() -> None:
    """At most 40 and 9 waited; whether at one time is not known."""
    pages = {url: scraped(**(CALM | {"waiting": (5.0, most)})) for url, most in (("http://a", 40.0), ("http://b", 9.0))}
    seen = diagnose(dataclasses.replace(backlog(), replicas=pages)).findings["overload"].seen
    assert "; at the server at most 49 were seen waiting (x:waiting, " in seen


def test_seats_of_two_replicas_are_those_of_both() -> None:
    """Each runs 5 on average and up to 10, and 5 wait: neither batch is at its largest, as 10 of "at most 10" was."""
    of = case(healthy(), {})
    page = scraped(**(CALM | {"running": (5.0, 10.0), "waiting": (5.0, 9.0)}))
    assert (
        "small batches" not in diagnose(dataclasses.replace(of, replicas={"http://a": page, "http://b": page})).findings
    )
    full_ = scraped(**(CALM | {"running": (9.0, 10.0), "waiting": (9.0, 12.0)}))
    found = diagnose(dataclasses.replace(of, replicas={"http://a": full_, "http://b": full_})).findings
    assert "18.0 requests ran and 18.0 waited, on average; never more than 20 ran" in found["small batches"].seen


def in_part(of: Case) -> Case:
    """What was scraped of the first 4 s of the window alone."""

    def cut(figures: Figures) -> Figures:
        return figures._replace(end_ns=of.window.start_ns + 4_000_000_000)

    replicas = {url: cut(figures) for url, figures in of.replicas.items()}
    return dataclasses.replace(of, replicas=replicas, gpu=of.gpu and cut(of.gpu))


def test_nothing_seen_in_a_part_of_the_window_is_not_nothing_found() -> None:
    """Scrapes of the first 4 s: what they show is told, and what they do not show is not ruled out."""
    found = diagnose(in_part(case(healthy(), {})))
    assert found.findings == {}
    for kind in ("small batches", "KV memory full", "preemption storm"):
        assert "scraped over 4.0 of the window's 9." in found.unjudged[kind]
        assert kind not in found.judged
    assert "preemption storm" in diagnose(in_part(storm())).findings


def scraped_alone() -> Case:
    """A healthy server of two replicas, of which everything is known by scrapes alone."""
    said = {"queue_time": 5.0, "prefill_time": 40.0, "decode_time": 80.0, "cache_hits": 90.0, "cache_queries": 900.0}
    page = scraped(**(CALM | said))
    of = case(cell([stream(i, 100 * i) for i in range(100)], load=OPEN), gpu=scraped(gpu_busy=0.9, gpu_memory_busy=0.2))
    return dataclasses.replace(of, replicas={"http://a/metrics": page, "http://b/metrics": page})


BY_SCRAPES = {
    "small batches": "the server's metrics were scraped", "KV memory full": "the server's metrics were scraped",
    "preemption storm": "the server's metrics were scraped", "queueing": "the server's metrics were scraped",
    "server CPU": "the GPUs were looked at", "server front end": "the server's metrics were scraped",
    "memory bandwidth": "the GPUs were looked at", "cache effects": "the server's metrics were scraped",
    "hot replica": "the server's metrics were scraped",
}  # fmt: skip


@pytest.mark.parametrize("kind", BY_SCRAPES)
def test_every_rule_that_lives_on_scrapes_rules_nothing_out_by_a_part_of_them(kind: str) -> None:
    whole, part = diagnose(scraped_alone()), diagnose(in_part(scraped_alone()))
    assert (dict(whole.findings), dict(part.findings)) == ({}, {})
    assert kind in whole.judged
    assert part.unjudged[kind].startswith(f"{BY_SCRAPES[kind]} over 4.0 of the window's 9.")
    assert set(part.judged) == set(whole.judged) - set(BY_SCRAPES)


def test_what_answers_and_records_say_is_judged_whatever_was_scraped() -> None:
    rows_ = [stream(i, 100 * i, tokens_cached=10, url_index=i % 2, **SERVER) for i in range(120)]
    of = dataclasses.replace(scraped_alone(), cell=cell(rows_, load=OPEN), urls=("http://a", "http://b"))
    judged = diagnose(in_part(of)).judged
    assert {"queueing", "server front end", "cache effects", "hot replica"} <= set(judged)


def test_of_several_replicas_only_what_was_scraped_of_all_of_them_rules_anything_out() -> None:
    """One seen in the first half alone, the other in the second: together they were never looked at."""
    of = scraped_alone()
    (a, b), middle_ns = of.replicas.values(), of.window.start_ns + 5_000_000_000
    halves = {"http://a/metrics": a._replace(end_ns=middle_ns), "http://b/metrics": b._replace(start_ns=middle_ns)}
    found = diagnose(dataclasses.replace(of, replicas=halves))
    assert "scraped over 0.0 of the window's 9." in found.unjudged["preemption storm"]
    one = dataclasses.replace(of, replicas={"http://a/metrics": a}, silent=["http://b/metrics"])
    said = "http://b/metrics: too few scrapes in or around the window"
    assert diagnose(one).unjudged["preemption storm"] == said


def test_replicas_that_count_nothing_alike_are_not_compared() -> None:
    replicas = {f"http://{name}/metrics": scraped(waiting=0.0) for name in "ab"}
    found = diagnose(dataclasses.replace(scraped_alone(), replicas=replicas))
    assert found.unjudged["hot replica"] == "the replicas' metrics have no count of their work in common"


def test_a_cell_without_an_ok_request_is_judged_by_what_there_is() -> None:
    failed = cell([record(i, 100 * i, outcome="failed", error="HTTP 500: x") for i in range(50)], load=OPEN)
    found = diagnose(case(failed))
    (finding,) = found.findings.values()
    assert finding.seen == (
        "50 of 50 requests due in the window failed (100.0%): http_5xx 503 x50, first: HTTP 500: x; most of them were "
        "due from 0.5 to 4.4 s of a window of 4.9 s, where 100% failed; none was answered: there is no latency, and no "
        "other cause can be looked for in it"
    )
    assert finding.check == "http_5xx: the server's log at that time"
    assert found.unjudged["queueing"] == "no ok request in the window"


def test_failures_are_told_first_with_their_kinds_their_time_and_what_is_left() -> None:
    found = diagnose(refused()).findings["failed requests"]
    assert "connect_error 10 (33% of them), first: refused; most of them were due from" in found.seen
    assert "\x1b" not in found.seen
    assert "every latency here is of the 60 that were answered" in found.seen
    assert found.check.startswith("rejected: the limit that refuses")
    assert "; connect_error: whether the server listens" in found.check
    burst = [
        record(i, 100 * i, outcome="failed") if 40 <= i < 50 or i == 80 else stream(i, 100 * i) for i in range(100)
    ]
    late = diagnose(case(cell(burst, load=OPEN))).findings["failed requests"]
    assert "11 of 100" in late.seen
    assert "most of them were due from 4.1 to 4.9 s of a window of 9.9 s, where 100% failed" in late.seen


def test_one_failure_in_a_thousand_holds_nothing_back() -> None:
    rows_ = [stream(i, 20 * i) if i else record(i, 0, outcome="failed") for i in range(1000)]
    assert kinds(case(cell(rows_, load=OPEN))) == []


def test_failures_of_a_cell_whose_window_has_none_that_ended_are_told_of_the_whole(tmp_path: Path) -> None:
    failed = cell([record(i, 10 * i, outcome="failed") for i in range(20)], load=OPEN)
    after = windows.Window(ns(5000), ns(6000), 0, 0, "")
    of = case(failed, window=after)
    assert (
        "20 of 20 requests of the whole cell (none was due in a window) failed"
        in diagnose(of).findings["failed requests"].seen
    )
    shown = diagnose_report.text(*repeated(tmp_path, failed))
    assert shown.index("FAILED REQUESTS (sure)") < shown.index("not judged")


@pytest.mark.parametrize("kind", sorted(FAILURES))
def test_every_kind_of_failure_has_something_to_look_at(kind: str) -> None:
    assert kind in CHECKS


def test_flushes_by_hand() -> None:
    found = flushes(flushed((2, 4), 50, n=20), flushed((2, 4), 50, n=20).among("outcome", "ok"))
    assert found is not None
    assert (found.every_ms, found.tokens, found.events, found.observed) == (50, 3, 3, 20 * 6)
    assert found.varies == pytest.approx(1 / 3)


def test_the_same_flush_at_one_load_may_be_either() -> None:
    finding = diagnose(case(flushed((4,), 40))).findings["events of several tokens"]
    assert finding.sure == "possible"
    assert "a timer, or a fixed number an event" in finding.seen


def test_a_timer_shows_by_other_sizes_at_another_load() -> None:
    low, high = related([case(flushed((4,), 50), load="c=1"), case(flushed((2,), 50), load="c=8")])
    assert kinds(low) == kinds(high) == ["timer-batched stream"]


# ---- causes, injected into the reference engine: the whole way from its metrics to the finding


def run(folder: Path, engine: str, trace: list[dict[str, Any]], concurrency: int) -> tuple[results.Run, Path]:
    """A run against `python -m reference_engine ENGINE` with its scrape beside the records."""
    pytest.importorskip("aiohttp")
    pytest.importorskip("prometheus_client")
    declared = targets.parse("reference", folder / "none.toml", {})[0]
    path, out = folder / "scraped.jsonl", folder / "run"
    with (
        targets.running(dataclasses.replace(declared, launch=(*declared.launch, *engine.split())), print) as target,
        scrape.beside(target, scrape.Asked(scrape.AUTO, 0.1), path, print),
    ):
        asked = command("run", "--targets", f"e={target.url}", "--trace", trace_file(folder, trace), "--out", out)
        asked += ["--concurrency", str(concurrency), "--workers", "1", "--metrics", "ttft_p50"]
        done = subprocess.run(asked, capture_output=True, text=True, env=environment(), timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    path.rename(scrape.path_of(out, results.load_run(out).cells[0].name))
    return results.load_run(out), out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "nothing: the server's own account"),
        ("x\n", "no scrape of llm-bench"),
        ('{"llm_bench_scrape": 1, "every_s": 1, "sources": ["u"]}\n', "u: 0"),
    ],
)
def test_a_run_without_a_scrape_that_tells_is_judged_by_its_records(
    tmp_path: Path, text: str | None, said: str
) -> None:
    made = healthy()
    measured = results.Measured("000-a", "a", "10/s", made, windows.of(made), {}, ())
    if text is not None:
        scrape.path_of(tmp_path, "000-a").write_text(text)
    (of,) = diagnose_report.diagnosed(results.Run(tmp_path, {}, [measured], []))
    assert said in of.scraped[0]
    assert of.diagnosis.findings == {}
    assert "small batches" in of.diagnosis.unjudged
    assert "nothing found; looked for: failed requests, client limited" in diagnose_report.text(
        results.Run(tmp_path, {}, [], []), [of]
    )


def found_in(measured: results.Run) -> Diagnosis:
    return diagnose_report.diagnosed(measured)[0].diagnosis


def ours(found: Diagnosis) -> set[str]:
    """Kinds found, but for what a busy test machine does to this client and to what stands around the engine."""
    return set(found.findings) - {"client limited", "server front end", "TTFT spikes"}


@pytest.mark.engine
@undisturbed
def test_a_healthy_engine_has_none_and_its_account_adds_up(tmp_path: Path) -> None:
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    measured, out = run(tmp_path, "--model sim:7b-h100", rows(60, 24, 16), 4)
    found = found_in(measured)
    assert ours(found) == set()
    assert {"small batches", "preemption storm", "KV memory full", "long prefills"} <= set(found.judged)
    parts = found.case.parts
    assert parts is not None
    assert [p.name for p in parts.parts] == ["client lag", "network", "queue", "prefill", "decode"]
    assert all(p.ms is not None for p in parts.parts)
    assert sum(p.ms or 0.0 for p in parts.parts) + parts.rest_ms == pytest.approx(parts.e2e_ms)
    said = found.case.server
    assert said is not None
    ended = found.case.cell["end_ns"]
    mine = int(((ended >= said.start_ns) & (ended < said.end_ns)).sum())
    assert said.value("requests_ended") == pytest.approx(mine, abs=5)  # those at the edges, between two scrapes
    shown = CliRunner().invoke(_app(), [str(out)])
    assert shown.exit_code == 0
    assert "where the time went, mean of" in shown.output
    document = json.loads(CliRunner().invoke(_app(), [str(out), "--format", "json"]).output)
    assert document["cells"][0]["time"]["e2e_ms"] == pytest.approx(parts.e2e_ms)
    assert "# Diagnosis of run" in CliRunner().invoke(_app(), [str(out), "--format", "md"]).output


@pytest.mark.engine
@undisturbed
def test_a_small_batch_limit_is_named(tmp_path: Path) -> None:
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    found = found_in(run(tmp_path, "--model sim:fast --max-num-seqs 2", rows(80, 16, 16), 8)[0])
    assert ours(found) == {"small batches"}
    assert "never more than 2 ran" in found.findings["small batches"].seen


@pytest.mark.engine
@undisturbed
def test_a_small_kv_memory_is_named_by_its_preemptions(tmp_path: Path) -> None:
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    # 480 tokens, where eight spread evenly over their lives hold 528: with 768 it hung on how the wave fell together.
    found = found_in(run(tmp_path, "--model sim:fast --num-blocks 30", rows(64, 4, 128), 8)[0])
    assert "preemption storm" in ours(found)
    assert ours(found) <= {"preemption storm", "KV memory full"}


@pytest.mark.engine
@undisturbed
def test_long_prompts_computed_in_one_step_are_named(tmp_path: Path) -> None:
    tmp_path = Path(mkdtemp(dir=tmp_path))  # of this try
    # 12,000 tokens take some hundred ms: with 2,000 a stop was hardly longer than gaps on a machine with other work.
    mixed = [row for k in range(36) for row in rows(1, 12_000 if k % 8 == 7 else 40, 24)]
    engine = "--model sim:7b-h100 --no-chunked-prefill --max-num-batched-tokens 16384"
    found = found_in(run(tmp_path, engine, mixed, 4)[0])
    assert ours(found) == {"long prefills"}
    assert "other streams stand still for" in found.findings["long prefills"].seen


def _app() -> Any:
    import typer

    from llm_bench.cli_diagnose import diagnose as command_

    app = typer.Typer()
    app.command()(command_)
    return app


@pytest.mark.parametrize("alone", ["", "chat"])
def test_a_class_that_was_measured_alone_is_no_colder_cell_of_the_mix(alone: str) -> None:
    first, second = (
        case(cell([stream(i, 100 * i, 30.0, tokens_cached=cached) for i in range(100)], load=OPEN | of), load=load)
        for load, cached, of in (("x1 alone", 0, {"class_alone": alone}), ("x1", 60, {}))
    )
    assert (cache(related([first, second])[1]) is None) == bool(alone)
