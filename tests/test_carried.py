"""What cells are evidence of: verdicts, brackets that are never a flat number, blocks held over time by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import capacity, carried, results
from llm_bench.carried import Bracket, Busiest, Carried, Judgement, Resident, brackets, busiest, evidence, resident
from llm_bench.client import CLIENT_CHECKS
from llm_bench.evidence import SERVERS, work_of
from llm_bench.objectives import NO_SLO, parse
from llm_bench.records import Record, Writer
from llm_bench.results import Run
from llm_bench.windows import Window
from tests.sample import cell, header, ns, record, stood_still

ALL = Window(ns(0), ns(1e6), 0, 0, "")


def slots(n: int, concurrency: int, stay: float, ttft: float, tokens: int = 5) -> list[Record]:
    """A closed loop by hand: n requests of `stay` ms, the first wave staggered evenly."""
    rows = []
    for i in range(n):
        due = i // concurrency * stay + i % concurrency * stay / concurrency
        gap = (stay - ttft) / (tokens - 1)
        rows.append(record(i, due, events=[due + ttft + gap * k for k in range(tokens)]))
    return rows


def run_of(folder: Path, cells: dict[str, tuple[list[Record], dict[str, object]]], **parts: object) -> Run:
    """A run on disk: name -> (records, load)."""
    folder.mkdir(parents=True)
    entries = []
    for name, (rows, load) in cells.items():
        writer = Writer(folder / f"{name}.arrow", header(load=load, cell=name, **parts))
        for row in rows:
            writer.write(row)
        writer.close()
        target = str((header(**parts)["target"])["name"])
        entries.append({"name": name, "target": target, "load": load, "end": {"reason": "exhausted"}, "doubts": []})
    (folder / "run.json").write_text(json.dumps({"version": "0.1.0", "cells": entries}))
    return results.load_run(folder)


def closed(concurrency: int) -> dict[str, object]:
    return {"kind": "closed", "concurrency": concurrency, "label": f"c={concurrency}", "warmup": None}


def sweep(folder: Path, **parts: object) -> Run:
    """c=2 and c=4 at 100 ms with a first token after 20 ms, c=8 ten times as slow."""
    return run_of(
        folder,
        {
            "000-a-c=2": (slots(400, 2, 100, 20), closed(2)),
            "001-a-c=4": (slots(400, 4, 100, 20), closed(4)),
            "002-a-c=8": (slots(400, 8, 1000, 200), closed(8)),
        },
        **parts,
    )


def cell_of(
    level: float, verdict: Judgement, rate: float | None = 10.0, target: str = "a", kind: str = "closed", **parts: Any
) -> Carried:
    given: dict[str, Any] = {
        "run": "run", "target": target, "kind": kind, "even": False, "load": f"c={level:g}", "level": level,
        "state": "stationary", "verdict": verdict, "why": "", "offered": None if kind == "closed" else rate,
        "served": rate, "rate": rate, "goodput": rate, "tokens_per_second": 50.0, "tokens_within": 50.0,
        "tokens_out": 5.0, "tokens_in": 100.0, "cached_share": None, "stay_s": 0.1, "window_s": 10.0,
        "in_flight": 1.0, "steady": True,
        "ttft_s": None, "tpot_s": None, "wasted": 0.0, "little": "", "doubts": (), "work": "decoding",
    }  # fmt: skip
    return Carried(**(given | parts))


# ---- evidence


def test_cells_carry_what_their_records_say(tmp_path):
    two, four, eight = evidence(sweep(tmp_path / "run"), parse("ttft_p95<100ms,error_rate<5%"))
    assert [c.verdict for c in (two, four, eight)] == ["MET", "MET", "MISSED"]
    assert [c.rate for c in (two, four, eight)] == pytest.approx([20, 40, 8], rel=0.02)
    assert [c.tokens_per_second for c in (two, four, eight)] == pytest.approx([100, 200, 40], rel=0.02)
    assert [c.in_flight for c in (two, four, eight)] == pytest.approx([2, 4, 8], rel=0.02)
    assert (four.tokens_out, four.tokens_in, four.stay_s) == (5, 100, pytest.approx(0.1))
    assert (four.ttft_s, four.tpot_s) == (pytest.approx(0.02), pytest.approx(0.02))
    assert (four.tokens_within, eight.tokens_within) == (pytest.approx(200, rel=0.02), 0)
    assert (four.wasted, four.work) == (0, "decoding")
    assert four.goodput == pytest.approx(40, rel=0.02)
    assert "Little" in four.little


def test_without_an_slo_nothing_is_judged_and_nothing_proven(tmp_path):
    cells = evidence(run_of(tmp_path / "r", {"a": (slots(400, 2, 100, 20), closed(2))}), NO_SLO)
    assert (cells[0].verdict, cells[0].why) == ("not judged", "no limit was given")
    assert (cells[0].goodput, cells[0].tokens_within) == (None, None)
    (found,) = brackets(cells)
    assert (found.low, found.high) == (None, None)


def test_of_a_backlog_that_grows_offered_and_served_are_apart(tmp_path):
    # Due every 10 ms, one ended every 50 ms: 100/s offered, 20/s served; those due late stay for up to 20 s.
    rows = [record(i, 10 * i, events=[50 * i + 5, 50 * i + 25]) for i in range(400)]
    rate = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    (one,) = evidence(run_of(tmp_path / "r", {"a": (rows, rate)}), NO_SLO)
    assert (one.state, one.why.startswith("the backlog grows by")) == ("growing without bound", True)
    assert one.offered == pytest.approx(100, rel=0.01)
    assert one.served == pytest.approx(20, rel=0.02)
    assert one.rate == one.served
    assert not one.steady
    assert one.stay_s is not None
    assert one.window_s < one.stay_s
    assert busiest([one]) == (
        "no load was steady for as long as its requests stay: its tokens/s are not those of a steady state"
    )


def test_tokens_within_the_limits_are_no_more_than_their_share_of_what_is_made(tmp_path):
    """Due every 10 ms, one of 2 tokens ended every 50 ms: 40 tokens/s are made. Those due in the first half have their
    first token within 8 s, half of all, most of them long after the window of 4 s.
    """
    rows = [record(i, 10 * i, events=[50 * i + 5, 50 * i + 25]) for i in range(400)]
    rate = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    agreed = parse("ttft_p95<8000ms")
    (one,) = evidence(run_of(tmp_path / "r", {"a": (rows, rate)}), agreed)
    assert one.tokens_per_second == pytest.approx(40, rel=0.02)
    assert one.tokens_within == pytest.approx(20, rel=0.02)
    # The second half cut while they wait for their second token: they are met by nobody.
    cut = [dataclasses.replace(r, outcome="cut_at_end", event_ns=r.event_ns[:1], tokens_out=1) for r in rows[200:]]
    (one,) = evidence(run_of(tmp_path / "cut", {"a": (rows[:200] + cut, rate)}), agreed)
    assert one.tokens_per_second == pytest.approx(40, rel=0.02)
    assert one.tokens_within == pytest.approx(40 * 2 / 3, rel=0.02)
    # What one of them has is not known: neither is the share.
    dumb = dataclasses.replace(rows[7], tokens_out=-1)
    (one,) = evidence(run_of(tmp_path / "dumb", {"a": ([*rows[:7], dumb, *rows[8:]], rate)}), agreed)
    assert one.tokens_per_second is not None
    assert one.tokens_within is None


def test_a_mean_answer_is_of_those_that_ended_in_the_window_where_it_is_steady(tmp_path):
    steady = slots(400, 2, 100, 20)
    (one,) = evidence(run_of(tmp_path / "r", {"a": (steady, closed(2))}), NO_SLO)
    assert one.tokens_out == 5
    # Of a growing backlog the short ones end first: half the answers have 2 tokens, half 40 that end after the window.
    rows = [
        record(i, 10 * i, events=[10 * i + 5, 10 * i + 9] if i % 2 else [50 * i + 5000 + k for k in range(40)])
        for i in range(400)
    ]
    rate = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    (grown,) = evidence(run_of(tmp_path / "g", {"a": (rows, rate)}), NO_SLO)
    assert not grown.steady
    assert grown.tokens_out == pytest.approx(21)


def test_evenly_spaced_arrivals_are_known_from_random_ones(tmp_path):
    rows = [record(i, 10 * i, events=[10 * i + 5, 10 * i + 9]) for i in range(200)]
    load = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    cells = {"a": (rows, load | {"burstiness": None}), "b": (rows, load | {"burstiness": 1.0}), "c": (rows, load)}
    assert [c.even for c in evidence(run_of(tmp_path / "r", cells), NO_SLO)] == [True, False, False]


def test_a_growing_cell_misses_and_one_too_short_is_undecided(tmp_path):
    rows = [record(i, 10 * i, events=[10 * i + 40 * i + 5, 10 * i + 40 * i + 25]) for i in range(400)]
    rate = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    cells = {"a": (rows, rate), "b": (slots(12, 4, 100, 20), closed(4))}
    growing, short = evidence(run_of(tmp_path / "r", cells), parse("ttft_p95<100s"))
    assert growing.verdict == "MISSED"
    assert "the backlog grows" in growing.why
    assert short.verdict == "UNDECIDED"
    assert short.why.startswith("the cell is too short: ")
    assert "more --requests or a longer --warmup makes it steady; ttft_p95<100s: " in short.why  # its limits' own too


def test_an_open_loops_rate_is_its_arrivals_that_ended_well(tmp_path):
    rng = np.random.Generator(np.random.PCG64(7))
    due = np.cumsum(rng.exponential(10, 600))
    rows = [record(i, at, events=[at + 5, at + 9]) if i % 10 else record(i, at, outcome="failed", end=at + 1)
            for i, at in enumerate(due)]  # fmt: skip
    load = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    (one,) = evidence(run_of(tmp_path / "r", {"a": (rows, load)}), NO_SLO)
    assert one.rate == pytest.approx(0.9 * 600 / (due[-1] - due[0]) * 1e3, rel=1e-3)


def test_one_token_a_request_is_a_single_pass(tmp_path):
    rows = [record(i, 10 * i, events=[10 * i + 5]) for i in range(200)]
    load = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    (one,) = evidence(run_of(tmp_path / "r", {"a": (rows, load)}), NO_SLO)
    assert one.work == "single pass"


def whole(n: int = 200, **fields: Any) -> list[Record]:
    """Answers that came in one piece, without a token-bearing event."""
    return [record(i, 10 * i, end=10 * i + 5, **fields) for i in range(n)]


@pytest.mark.parametrize(("rows", "work"), [
    ([record(i, 10 * i, events=[10 * i + 5]) for i in range(200)], "single pass"),  # one token each
    ([record(i, 10 * i, events=[10 * i + 2, 10 * i + 5], tokens_out=-1) for i in range(200)], "decoding"),
    (whole(tokens_out=-1, text_bytes=0), "single pass"),  # embeddings: no token, no text
    (whole(tokens_out=-1, text_bytes=900), "unknown"),  # text of any number of tokens
    (whole(tokens_out=40, text_bytes=900), "decoding"),
    (whole(outcome="failed"), "unknown"),
])  # fmt: skip
def test_what_a_request_was_to_the_server_is_told_by_its_answers(rows, work):
    assert work_of(cell(rows), ALL) == work
    assert SERVERS[work]


# ---- brackets


@pytest.mark.parametrize(("cells", "low", "high", "undecided"), [
    ([(8, "MET"), (16, "MET"), (32, "MISSED")], 16, 32, []),
    ([(8, "MET"), (16, "UNDECIDED"), (32, "MISSED")], 8, 32, [16]),
    # Case 41, server 2: 50 of 50, 47 of 50, 50 of 50 and 30 of 50 within an SLO of 95%: no flat 8.
    ([(8, "UNDECIDED"), (16, "UNDECIDED"), (24, "UNDECIDED"), (32, "MISSED")], None, 32, [8, 16, 24]),
    ([(8, "MISSED"), (16, "MET")], None, 8, []),
    ([(8, "MET"), (16, "MET")], 16, None, []),
    ([(8, "UNDECIDED")], None, None, [8]),
])  # fmt: skip
def test_the_rate_within_the_slo_is_a_bracket(cells, low, high, undecided):
    (found,) = brackets([cell_of(level, verdict, rate=level) for level, verdict in reversed(cells)])
    assert found.low is None if low is None else found.low and found.low.level == low
    assert found.high is None if high is None else found.high and found.high.level == high
    assert [c.level for c in found.undecided] == undecided


def test_past_its_knee_a_loop_that_carries_less_is_not_what_counts():
    (found,) = brackets([cell_of(8, "MET", 50), cell_of(16, "MET", 60), cell_of(32, "MET", 40)])
    assert found.low is not None
    assert found.low.level == 16


def test_targets_and_kinds_of_load_are_apart():
    cells = [cell_of(1, "MET"), cell_of(2, "MET", target="b"), cell_of(3, "MET", kind="open")]
    assert [(b.target, b.kind) for b in brackets(cells)] == [("a", "closed"), ("b", "closed"), ("a", "open")]
    assert isinstance(brackets(cells)[0], Bracket)


# ---- the most that was made


def made(level: float, tokens: float, **parts: Any) -> Carried:
    return cell_of(level, "MET", tokens_per_second=tokens, **parts)


def test_a_ceiling_is_of_a_load_past_which_more_bring_no_more():
    found = busiest([made(1, 50), made(8, 300), made(32, 320)])
    assert isinstance(found, Busiest)
    assert (found.cell.level, found.saturated) == (32, True)
    assert found.text == "saturated: from c=8 to c=32 it went from 300 to 320 tokens/s"
    worse = busiest([made(2, 100), made(4, 200), made(8, 40)])
    assert isinstance(worse, Busiest)
    assert (worse.cell.level, worse.text) == (4, "saturated: from c=4 to c=8 it went from 200 to 40 tokens/s")


def test_a_backlog_that_grows_for_many_stays_shows_a_full_server_and_for_few_it_shows_nothing():
    grown = {"kind": "open", "state": "growing without bound", "steady": False, "window_s": 12.0}
    full = busiest([made(20, 600, kind="open"), made(60, 1600, stay_s=1.0, **grown)])
    assert isinstance(full, Busiest)
    assert (full.cell.level, full.saturated) == (60, True)
    assert full.text == "saturated: its backlog grew, over 12 times what its requests stay"
    short = busiest([made(20, 600, kind="open"), made(60, 1600, stay_s=4.0, **grown)])
    assert isinstance(short, Busiest)
    assert (short.cell.level, short.saturated) == (20, False)
    late = busiest([made(60, 1600, stay_s=1.0, doubts=("client busy",), **grown)])
    assert isinstance(late, Busiest)
    assert not late.saturated


@pytest.mark.parametrize(("cells", "said"), [
    ([made(1, 50), made(8, 300), made(32, 400)], "not shown to be saturated: the ceiling is this or more"),
    ([made(8, 300), made(12, 305)], "not shown to be saturated"),  # half as many slots more say nothing
    ([made(5, 50, kind="open"), made(20, 50, kind="open")], "not shown to be saturated"),
    ([made(8, 300), made(32, 300, doubts=("client busy",))], "not shown to be saturated"),
    ([made(8, 300), made(32, 300, doubts=("idle slots",))], "not shown to be saturated"),
    ([made(8, 300, doubts=("client busy",))], "this client may have been the limit (client busy)"),
    ([made(8, 300), made(32, 310, steady=False)], "not shown to be saturated"),
])  # fmt: skip
def test_what_does_not_show_saturation_is_said_to_be_a_lower_bound(cells, said):
    found = busiest(cells)
    assert isinstance(found, Busiest)
    assert not found.saturated
    assert said in found.text


def test_of_single_passes_answers_are_what_is_made():
    passes = {"work": "single pass", "tokens_per_second": None, "tokens_out": None}
    found = busiest([cell_of(8, "MET", 300.0, **passes), cell_of(32, "MET", 310.0, **passes)])
    assert isinstance(found, Busiest)
    assert (found.saturated, found.cell.level) == (True, 32)
    assert found.text == "saturated: from c=8 to c=32 it went from 300 to 310 answers/s"
    unknown = busiest([cell_of(8, "MET", 300.0, **(passes | {"work": "unknown"}))])
    assert unknown == "how many tokens its answers have is not known"


def test_a_closed_loops_rate_is_planned_with_less_and_an_open_ones_as_it_is():
    assert cell_of(8, "MET", 71.0).planned(0.7) == pytest.approx(49.7)
    assert cell_of(8, "MET", 71.0, kind="open").planned(0.7) == 71.0
    assert cell_of(8, "MET", None).planned(0.7) is None


# ---- what sequences hold

TWO = [
    # 31, 32, 33 tokens for 100 ms each: 2, 2 and 3 blocks of 16; with the 34th token it ends.
    record(0, 0, events=[100, 200, 300, 400], tokens_in=30),
    # 48 tokens for 100 ms: 3 blocks, 2 of them from the cache.
    record(1, 0, events=[200, 300], tokens_in=47, tokens_cached=32),
]


def held(rows: list[Record], window: Window = ALL, block: int = 16) -> Resident:
    found = resident(cell(rows), window, block)
    assert isinstance(found, Resident)
    return found


def test_resident_blocks_by_hand():
    found = held(TWO)
    assert found.seconds.tolist() == pytest.approx([0, 0, 0.2, 0.2])
    assert found.blocks == pytest.approx(2.5)
    assert found.private.tolist() == pytest.approx([0, 0.1, 0.2, 0.1])
    assert found.private_blocks == pytest.approx(2.0)
    assert (found.sequences, found.most, found.shared) == (2, 3, True)
    assert found.active_s == pytest.approx((0.4 + 0.3) / 2)
    assert found.begins == "from its first token"


def test_only_what_lies_in_the_window_counts():
    found = held(TWO, Window(ns(150), ns(250), 0, 0, ""))
    assert found.seconds.tolist() == pytest.approx([0, 0, 0.1, 0.05])


def test_blocks_of_one_token_are_the_integral_itself():
    assert held(TWO, block=1).blocks == pytest.approx((31 + 32 + 33 + 48) / 4)


def test_where_the_server_tells_its_queue_the_prefill_counts():
    told = [record(0, 0, events=[100, 200, 300, 400], tokens_in=30, server_queue_ms=40.0)]
    found = held(told)
    assert found.seconds.tolist() == pytest.approx([0, 0, 0.26, 0.1])  # 60 ms of prefill with its 2 blocks
    assert found.active_s == pytest.approx(0.36)
    assert "left its queue" in found.begins


def test_tokens_of_an_event_are_its_own_where_the_wire_says_them():
    packed = [record(0, 0, events=[100, 200], event_tokens=[10, 10], tokens_out=20, tokens_in=20)]
    assert held(packed).seconds.tolist() == pytest.approx([0, 0, 0.1])  # 30 tokens
    spread = [record(0, 0, events=[100, 200], tokens_out=40, tokens_in=20)]
    assert held(spread).seconds.tolist() == pytest.approx([0, 0, 0, 0.1])  # 20 + 40 / 2


def test_what_is_not_known_is_left_out_and_said():
    more = [*TWO, record(2, 0, end=500, tokens_out=5), record(3, 0, events=[10, 20], event_choice=[0, 1])]
    assert held(more).left_out == "1 not streamed or of unknown prompt, 1 of several choices"
    assert held(more).blocks == held(TWO).blocks
    nothing = resident(cell([record(0, 0, end=50, tokens_out=5)]), ALL, 16)
    assert isinstance(nothing, str)
    assert "no sequence streamed" in nothing


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40), st.integers(1, 400)), min_size=1, max_size=12),
    st.integers(1, 64),
)
def test_the_mean_lies_between_the_shortest_and_the_longest_and_time_is_kept(requests, block):
    rows = [
        record(i, due, events=[due + 5 + 3 * k for k in range(tokens + 1)], tokens_in=prompt)
        for i, (due, tokens, prompt) in enumerate(requests)
    ]
    found = held(rows, block=block)
    assert found.seconds.sum() == pytest.approx(sum(3 * tokens for _, tokens, _ in requests) / 1e3)
    assert min(-(-p // block) for _, _, p in requests) <= found.blocks * (1 + 1e-9)
    assert found.blocks <= found.most * (1 + 1e-9)
    assert found.most == max(-(-(p + t) // block) for _, t, p in requests)


# ---- case 39


def test_littles_law_of_steady_arrivals_by_hand(tmp_path):
    """Arrivals every 0.5 s, each stays 3 s: 2/s x 3 s = 6 in flight; at most 64 in flight are 21.333/s."""
    rows = [record(i, 500 * i, events=[500 * i + 1000, 500 * i + 3000]) for i in range(40)]
    load = {"kind": "open", "rate": 2.0, "label": "rate=2/s", "warmup": 5.0}
    (one,) = evidence(run_of(tmp_path / "r", {"a": (rows, load)}), NO_SLO)
    assert (one.rate, one.stay_s) == (pytest.approx(2, rel=0.05), pytest.approx(3))
    assert one.in_flight == pytest.approx(6, rel=0.01)
    assert capacity.rate_of(64, one.stay_s or 0) == pytest.approx(21.333, abs=1e-3)
    assert carried.IDLE_SLOTS in CLIENT_CHECKS


def test_cells_of_one_load_are_judged_together_and_the_luckiest_proves_nothing(tmp_path):
    """120 of 120 prove 95% alone; with two more cells that missed 3% each no share is proven at 99%."""
    some = [[record(i, 100 * i, events=[100 * i + (90 if i % 20 == 7 and k else 20), 100 * i + 95])
             for i in range(120)] for k in (1, 0, 1)]  # fmt: skip
    rate = {"kind": "open", "rate": 10.0, "label": "rate=10/s", "warmup": 0.0}
    limits = parse("ttft_p95<80ms")
    run = run_of(tmp_path / "r", {f"{i:03}": (rows, rate) for i, rows in enumerate(some)})
    assert {c.verdict for c in evidence(run, limits)} == {"UNDECIDED"}
    assert brackets(evidence(run, limits))[0].low is None
    alone = run_of(tmp_path / "alone", {"000": (some[1], rate)})
    assert brackets(evidence(alone, limits))[0].low is not None


def test_a_backlog_that_the_client_made_is_no_miss_and_no_sign_of_a_full_server(tmp_path):
    rate = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    # 200 of 1,000 are late: 95% would be missed too, were it not the client's.
    for name, slo in (("late", "ttft_p95<800ms"), ("easy", "ttft_p95<100s"), ("none", "")):
        run = run_of(tmp_path / name, {"a": (stood_still(27), rate)})
        (one,) = evidence(run, parse(slo))
        assert one.state == "growing without bound"
        assert one.verdict == ("UNDECIDED" if slo else "not judged")
        assert "no more than this client's own lateness explains" in one.why
        assert brackets([one])[0].high is None
        assert busiest([one]) == (
            "no load was steady for as long as its requests stay: its tokens/s are not those of a steady state"
        )


def test_failures_that_are_not_the_clients_miss_beside_a_backlog_that_is(tmp_path):
    rate = {"kind": "open", "rate": 100.0, "label": "rate=100/s", "warmup": 0.0}
    rows = [
        dataclasses.replace(row, outcome="failed", error_kind="connect_error") if row.index % 5 == 0 else row
        for row in stood_still(27)
    ]  # fmt: skip
    (one,) = evidence(run_of(tmp_path / "r", {"a": (rows, rate)}), parse("error_rate<1%"))
    assert (one.state, one.verdict) == ("growing without bound", "MISSED")
    assert "error_rate<1%" in one.why
