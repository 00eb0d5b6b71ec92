"""A clean trace raises no doubt, each fault put into one raises its own and no other; the words hold the figures."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llm_bench.doctor import CHECKS, STATEMENTS, Finding, examine, warnings
from llm_bench.request import Request, Trace
from llm_bench.trace import read, read_sheet
from llm_bench.trace_report import document, figures, markdown, text
from llm_bench.workload import describe

SHARED = Path(__file__).parents[2] / "shared"
FACTS = {"unit": "s", "resolution_s": 1e-6, "zero_s": 0.0, "late_rows": 0, "turns": ""}


def made(gaps: np.ndarray, rng: np.random.Generator, hashed: bool = False) -> Trace:
    """A trace of these gaps, lognormal lengths and, if asked, chains of blocks of 16 behind one of 20 beginnings."""
    at_s = np.round(np.concatenate([[0], np.cumsum(gaps)]), 6).tolist()
    tokens_in = np.ceil(rng.lognormal(5, 1, len(at_s))).astype(int).tolist()
    tokens_out = np.ceil(rng.lognormal(4, 1, len(at_s))).astype(int).tolist()
    shared = (1000 * rng.integers(1, 21, len(at_s))).tolist()
    requests = []
    for i, at in enumerate(at_s):
        need = -(-tokens_in[i] // 16)
        beginning = [shared[i] + k for k in range(min(3, need - 1))]
        ids = (*beginning, *(10**6 + 1000 * i + k for k in range(need - len(beginning)))) if hashed else ()
        requests.append(Request(tokens_in[i], tokens_out[i], at_s=at, hash_ids=ids, block_size=16 * hashed, line=i + 2))
    return Trace(requests, "llm-bench", "clean.jsonl", [], {}, FACTS | {"rows": len(requests)})


def clean(n: int = 2000, hashed: bool = False) -> Trace:
    rng = np.random.default_rng(11)
    return made(rng.exponential(0.5, n - 1), rng, hashed)


def kinds(trace: Trace) -> list[str]:
    return [f.kind for f in examine(trace)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [1, 2, 3, 50, 500, 5000])
def test_a_poisson_trace_raises_no_finding(n, seed):
    rng = np.random.default_rng(seed)
    assert examine(made(rng.exponential(0.2, n - 1), rng)) == []


@pytest.mark.parametrize("seed", range(3))
def test_bursts_and_tides_are_traffic_and_no_faults(seed):
    rng = np.random.default_rng(seed)
    bursty = rng.lognormal(-2, np.log(10) ** 0.5, 4000)  # CV 3
    assert examine(made(bursty, rng)) == []
    tide = rng.exponential(0.3, 4000) * (2 + np.sin(np.linspace(0, 12, 4000)))
    assert examine(made(tide, rng)) == []


def test_stamps_that_bursts_bring_together_are_no_copies():
    rng = np.random.default_rng(1)
    trace = made(np.where(rng.random(4000) < 0.5, rng.exponential(0.002, 4000), rng.exponential(1.0, 4000)), rng)
    trace = facts(each(trace, lambda i, r: replace(r, at_s=round(r.at_s, 3))), resolution_s=1e-3)
    assert len({r.at_s for r in trace.requests}) < 3700
    assert examine(trace) == []


def test_shared_prefixes_raise_no_finding():
    assert examine(clean(500, hashed=True)) == []


def each(trace: Trace, change: Callable[[int, Request], Request]) -> Trace:
    return trace._replace(requests=[change(i, r) for i, r in enumerate(trace.requests)])


def later(trace: Trace, at: int, by_s: float) -> Trace:
    return each(trace, lambda i, r: replace(r, at_s=r.at_s + by_s) if i >= at else r)


def facts(trace: Trace, **new: Any) -> Trace:
    return trace._replace(facts=dict(trace.facts) | new)


def thin(trace: Trace, first: bool) -> Trace:
    """Twenty rows 30 s apart before or after a trace of two rows a second."""
    if first:
        few = [Request(100 + i, 50 + i, at_s=30.0 * i) for i in range(20)]
        return trace._replace(requests=few + later(trace, 0, 600).requests)
    end = trace.requests[-1].at_s
    return trace._replace(requests=trace.requests + [Request(99 + i, 50 + i, at_s=end + 30 * i) for i in range(1, 21)])


def copied(trace: Trace) -> Trace:
    return trace._replace(requests=[r for i, r in enumerate(trace.requests) for _ in range(2 if i % 20 == 0 else 1)])


def conversations(trace: Trace, cut: int) -> Trace:
    """Two turns each, read as new: nearly all hold the prompt and the answer before them, and so are cumulative."""

    def change(i: int, r: Request) -> Request:
        own = 150 + i % 97 if i % 2 == 0 else (500 + i % 89 if i > cut else 10)
        new = {"turn": 1, "tokens_new": own} if i % 2 else {}
        return replace(r, session=f"s{i // 2}", tokens_in=own, tokens_out=100 + i % 83, **new)

    return facts(each(trace, change), turns="new")


def with_ids(trace: Trace, at: int, ids: Callable[[tuple[int, ...]], tuple[int, ...]], **new: Any) -> Trace:
    return each(trace, lambda i, r: replace(r, hash_ids=ids(r.hash_ids), **new) if i == at else r)


def resized(trace: Trace) -> Trace:
    """The first row's last id, which is of 5 tokens there, is a full block in front of one more in the second row."""
    first = replace(trace.requests[0], hash_ids=(1, 7), tokens_in=21)
    second = replace(trace.requests[1], hash_ids=(1, 7, 8), tokens_in=40)
    return trace._replace(requests=[first, second, *trace.requests[2:]])


def ticked(trace: Trace) -> Trace:
    return each(trace, lambda i, r: replace(r, at_s=r.at_s // 3 * 3))


# kind -> (a trace with this fault only, words of its finding)
FAULTS: dict[str, tuple[Callable[[], Trace], str]] = {
    "no times": (lambda: each(clean(), lambda i, r: replace(r, at_s=None)), "needs a rate or a concurrency"),
    "unit": (lambda: each(clean(), lambda i, r: replace(r, at_s=r.at_s / 1000)), "read as s: very many"),
    "order": (lambda: facts(clean(), late_rows=37), "37 of 2,000 rows stood behind a later one"),
    "zero point": (lambda: facts(clean(), zero_s=41.0), "the first stamp is 41 s on the file's own scale"),
    "ticks": (lambda: ticked(clean()), "timestamps stand on 3 s ticks: 2,000 rows on"),
    "equal stamps": (lambda: copied(clean()), "100 of 2,100 rows have the stamp of the row before"),
    "thin head": (lambda: thin(clean(), first=True), "the first 600 s have 0.03333 requests/s (20 rows)"),
    "thin tail": (lambda: thin(clean(), first=False), "requests/s (20 rows), the rest"),
    "silence": (lambda: later(clean(), 900, 120.0), "nothing arrives for 120"),
    "rows left out": (
        lambda: facts(clean()._replace(skipped={"failed in the trace": 5, "empty": 1}), rows=2006),
        "6 of 2,006 rows are left out (failed in the trace: 5, empty: 1)",
    ),
    "unknown lengths": (
        lambda: each(clean(), lambda i, r: replace(r, tokens_out=None) if i < 7 else r),
        "7 of 2,000 rows do not say the answer's length",
    ),
    "clipped lengths": (
        lambda: each(clean(), lambda i, r: replace(r, tokens_in=min(r.tokens_in, 512))),
        "510 to 512 tokens, 0 more",
    ),
    "constant lengths": (lambda: each(clean(), lambda i, r: replace(r, tokens_out=128)), "every answer has 128 tokens"),
    "turns": (lambda: conversations(clean(), 100), "950 of 1,000 later turns would hold all before them"),
    "block count": (lambda: with_ids(clean(500, True), 4, lambda ids: (*ids, 5)), "1 rows have not ceil"),
    "parents": (
        lambda: with_ids(clean(500, True), 4, lambda ids: (99, 1001), tokens_in=32),
        "1 ids follow different blocks",
    ),
    "partial blocks": (lambda: resized(clean(500, True)), "id 7 is 5 tokens in line 2, 16 in line 3"),
    "wide ids": (lambda: with_ids(clean(500, True), 4, lambda ids: (*ids[:-1], 2**50 + 3)), "more than 32 bits"),
    "aliased ids": (
        lambda: with_ids(clean(500, True), 4, lambda ids: (*ids[:-1], 2**40 + 1001)),
        "1 ids equal another in their low 32 bits",
    ),
    "nothing shared": (
        lambda: each(
            clean(500, True), lambda i, r: replace(r, hash_ids=tuple(900 * i + k for k in range(len(r.hash_ids))))
        ),
        "no prefix comes twice in 500 rows",
    ),
}
WITH = {"aliased ids": ["wide ids"], "no times": []}  # what cannot but come with a fault


@pytest.mark.parametrize("kind", CHECKS)
def test_a_fault_in_a_clean_trace_is_found_and_nothing_else(kind):
    trace, words = FAULTS[kind]
    found = examine(trace())
    assert [f.kind for f in found] == [kind, *WITH.get(kind, [])]
    assert words in found[0].text
    assert found[0].doubt == (kind not in STATEMENTS)


def test_all_rows_at_one_instant_are_said_to_have_no_rate():
    found = examine(each(clean(), lambda i, r: replace(r, at_s=0.0)))
    assert [f.kind for f in found] == ["no times"]
    assert "all 2,000 rows share one instant" in found[0].text


def test_a_trace_of_seconds_read_as_milliseconds_and_the_other_way_round():
    assert kinds(facts(each(clean(), lambda i, r: replace(r, at_s=r.at_s * 4000)), unit="s")) == ["unit"]
    assert kinds(facts(each(clean(), lambda i, r: replace(r, at_s=r.at_s / 1000)), unit="date-time")) == []


def test_several_holes_are_one_finding_and_hide_neither_each_other_nor_the_head():
    trace = later(later(thin(clean(), first=True), 700, 400.0), 730, 500.0)
    found = examine(trace)
    assert [f.kind for f in found] == ["thin head", "silence"]
    assert "2 such gaps, 90" in found[1].text


def test_ticks_finer_than_the_traffic_are_no_doubt():
    rng = np.random.default_rng(2)
    slow = made(rng.exponential(30, 1000), rng)
    assert kinds(each(slow, lambda i, r: replace(r, at_s=float(round(r.at_s))))) == []


def test_a_cliff_under_a_few_longer_ones_is_a_limit_too():
    trace = each(clean(), lambda i, r: replace(r, tokens_in=min(r.tokens_in, 512) if i % 150 else 1500 + i))
    (found,) = examine(trace)
    assert found.kind == "clipped lengths"
    assert "510 to 512 tokens, 14 more" in found.text


SHARED_DOUBTS = {
    "traces/full/AzureLLMInferenceTrace_code.csv": ["clipped lengths"],  # a spike at 7,437
    "traces/full/AzureLLMInferenceTrace_conv.csv": ["clipped lengths"],  # a cliff at about 4,100
    "traces/full/mooncake_conversation_trace.jsonl": ["ticks", "clipped lengths"],  # answers of 2,000
    "traces/mooncake_synthetic_first1000.jsonl": [],
    "cases/23-burstgpt-like.csv": ["ticks", "rows left out"],
    "cases/24-azure-like.csv": [],
    "cases/26-multi-turn.jsonl": [],
}


@pytest.mark.parametrize("name", SHARED_DOUBTS)
def test_public_traces_raise_the_doubts_that_they_are_known_for(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    assert [f.kind for f in examine(read(path)) if f.doubt] == SHARED_DOUBTS[name]


# -- in words ---------------------------------------------------------------------------------------------------------


def shown() -> tuple[Trace, Any, list[Finding]]:
    trace = ticked(clean(500, hashed=True))
    sessions = [
        replace(r, session=f"s{i}", client=f"c{i % 3}", request_class="a|b") for i, r in enumerate(trace.requests)
    ]
    trace = trace._replace(requests=sessions, notes=["times read as s <of course>"], skipped={"empty": 2})
    return trace, describe(trace), examine(trace)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_no_line_of_words_is_wider_than_the_terminal(width):
    lines = text(*shown(), width=width).splitlines()
    words = [line for line in lines if not line or line[0] not in "┏┃┡│└"]
    assert max(map(len, words)) <= width
    assert "…" not in "".join(lines)
    tables = [line for line in lines if line and line[0] in "┏┃┡│└"]
    assert len({len(line) for line in tables}) <= 2  # two tables, none of them cut


def test_the_words_hold_notes_figures_doubts_and_statements():
    trace, workload, findings = shown()
    said = text(trace, workload, findings)
    for words in ("clean.jsonl  ·  llm-bench", "times read as s <of course>", "doubt: ticks:", "doubt: rows left out:"):
        assert words in said
    assert f"{workload.arrivals.cv:.4g}; inside ticks at random" in said
    assert "3, the top one sends 33.4%" in said
    assert "\x1b" not in said
    assert "\x1b[1;33mdoubt: " in text(trace, workload, findings, colour=True)
    assert "no doubts" in text(trace, workload, [])
    assert "note: zero point" in text(trace, workload, [Finding("zero point", "41 s", False)])


def test_markdown_has_whole_tables_and_no_markup_of_the_traces_own():
    said = markdown(*shown())
    for block in said.split("\n\n"):
        rows = [line.replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1
    assert "<of" not in said
    assert "- **doubt: ticks**: " in said


def test_the_document_is_strict_json_of_the_same_figures():
    trace, workload, findings = shown()
    read_back = json.loads(json.dumps(document(trace, workload, findings), allow_nan=False))
    assert read_back["schema"] == 1
    assert read_back["workload"]["arrivals"]["cv"] == workload.arrivals.cv
    assert read_back["workload"]["sharing"]["lru"][0] == list(workload.sharing.lru[0])
    assert [f["kind"] for f in read_back["findings"]] == [f.kind for f in findings]
    assert read_back["skipped"] == {"empty": 2}


def test_a_trace_of_one_row_is_said_in_every_form():
    trace = Trace([Request(0, None, prompt="x")], "llm-bench", "one.jsonl", [], {})
    workload, findings = describe(trace), examine(trace)
    assert "– (fewer than two rows have a time)" in text(trace, workload, findings)
    assert "– (fewer than two rows have a time)" in markdown(trace, workload, findings)
    json.dumps(document(trace, workload, findings), allow_nan=False)


def test_what_changes_a_replay_is_warned_of_before_it():
    assert warnings(clean()) == []
    assert [said.split(":")[0] for said in warnings(ticked(clean()))] == ["ticks"]
    assert warnings(ticked(clean()), timed=False) == []
    whole = conversations(clean(), 100)
    assert [said.split(":")[0] for said in warnings(whole, timed=False)] == ["turns"]


@pytest.mark.parametrize(("unit", "scale"), [("ms", 1e3), ("us", 1e6)])
def test_a_stamp_that_would_be_a_date_in_another_unit_is_doubted(unit, scale):
    """Seconds since 1970 read as milliseconds: the 20th of January 1970, and a trace a thousand times too fast."""
    three = clean(3)._replace(facts=FACTS | {"unit": unit, "zero_s": 1.7e9 / scale, "rows": 3})
    assert any("1,700,000,000" in said and "in s. Give the unit" in said for said in warnings(three))
    assert warnings(three._replace(facts=FACTS | {"unit": unit, "zero_s": 1.7e9})) == []


@pytest.mark.parametrize(("unit", "step"), [("s", 0.0005), ("ms", 5_000_000), ("s", 12), ("ms", 0.0005)])
def test_a_unit_that_was_given_is_not_asked_about(tmp_path: Path, unit: str, step: float) -> None:
    path = tmp_path / "t.csv"
    path.write_text("at,in,out\n" + "".join(f"{1.7e9 + i * step:.7f},9,5\n" for i in range(30)))
    assert not [finding for finding in examine(read_sheet(path, unit=unit)) if finding.kind == "unit"]
    assert not [text for text in warnings(read(path, unit=unit)) if text.startswith("unit: ")]
    if unit == "s" and step < 1:
        assert [finding for finding in examine(read_sheet(path)) if finding.kind == "unit"]


def test_a_trace_without_times_has_no_span() -> None:
    lengths = read(SHARED / "traces/etalon_bwb_lengths_first2000.csv")
    assert dict(figures(describe(lengths)))["span"] == "– (no row has a time)"


def test_a_reading_of_turns_that_was_given_is_not_asked_about() -> None:
    path = SHARED / "cases/26-multi-turn.jsonl"
    assert not [finding for finding in examine(read(path, turns="new")) if finding.kind == "turns"]


def test_whole_numbers_of_a_table_without_a_unit_may_be_ms(tmp_path: Path) -> None:
    at_ms = np.cumsum(np.random.default_rng(3).integers(1, 500, 300))
    path = tmp_path / "mine.csv"
    path.write_text("at,in,out\n" + "".join(f"{at},{100 + i % 90},{10 + i % 70}\n" for i, at in enumerate(at_ms)))
    (said,) = (text for text in warnings(read(path)) if text.startswith("unit: "))
    assert "whole numbers read as s" in said
    assert "give --unit ms" in said
    assert not [text for text in warnings(read(path, unit="ms")) if text.startswith("unit")]
    path.write_text("at,in,out\n" + "".join(f"{at / 1000},{100 + i},{10 + i}\n" for i, at in enumerate(at_ms)))
    assert not [text for text in warnings(read(path)) if text.startswith("unit")]
