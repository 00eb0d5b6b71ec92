"""What other tools would have printed, worked by hand from five records, and what is said where none can know it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import as_tools, metrics, report, results, stats, tool_figures, windows
from llm_bench.as_tools import REDUCERS, TOOLS, Line, Table
from llm_bench.columns import Cell
from llm_bench.errors import BenchError
from llm_bench.records import Record
from llm_bench.results import Asked
from tests.sample import cell, ns, record
from tests.test_report import write_cell

# In ms. d is `sent`; the first byte of an answer is its first event where nothing else is said.
FIVE = [
    record(0, 0, sent=10, first_byte_ns=ns(40), events=[50, 60, 90], end=100),
    record(1, 100, first_byte_ns=ns(150), events=[180, 200, 260], end=270, tokens_out=6, event_tokens=[2, 2, 2]),
    record(2, 200, events=[230, 250], end=260, outcome="failed", error_kind="server_error_in_stream", status=200),
    record(3, 300, events=[330], end=335),
    record(4, 400, sent=420, first_byte_ns=ns(450), events=[470, 520], end=540),
]
GAPS = (190 / 6, 25, 59.5)  # of 10, 30, 20, 60, 20, 50
# Mean, p50, p99; a pair of them are bounds.
BY_HAND: dict[str, dict[str, Any]] = {
    "vllm": {  # all five: it takes an error in a stream for a success
        "TTFT": ((34, 30, 49.2), (46, 40, 78.8)),  # to the first byte 30 50 30 30 30, to the first token 40 80 30 30 50
        "TPOT": ((26.5, 20, 49.1), (43.5, 30, 88.2)),  # l - f: 20/2 is 20, 80/5, 20, 50; e - first byte: 30 24 30 90
        "ITL": tool_figures.EXTRA_GAPS,
        "E2EL": ((84, 80, 157.6), (95, 90, 168)),  # 80 160 50 30 100 and 90 170 60 35 120
        "Output token throughput": 14 / 0.54,
        "Request throughput": 5 / 0.54,
    },
    "sglang": {
        "TTFT": (46, 40, 78.8),
        "TPOT": ((26.5, 20, 49.1), (35.75, 27.5, 68.8)),  # to e: 25 18 30 70
        "ITL": GAPS,
        "E2E Latency": ((84, 80, 157.6), (95, 90, 168)),
        "Output token throughput": 14 / 0.54,
        "Request throughput": 5 / 0.54,
    },
    "guidellm": {  # four: the failed one is not
        "TTFT": (50, 40, 80),  # the second and the fourth of 30 40 50 80
        "ITL": (170 / 8, 16, 50),  # 20 x2, 16 x5, 50 x1: the whole decode time over all tokens but the first ones
        "TPOT": (370 / 12, 80 / 3, 50),  # 80/3 x3, 160/6 x6, 30 x1, 50 x2
        "Request Latency": (103.75, 90, 170),
        "Output Tok/s mean": 12 / 0.53,
        "Req/s mean": 4 / 0.53,
    },
    "aiperf": {
        "Time to First Token": (46, 40, 78.8),
        "Inter Token Latency": (27.5, 20, 49.1),  # 20, 80 / (6 - 2), 20, 50
        "Inter Chunk Latency": GAPS,
        "Request Latency": (84, 80, 157.6),
        "Output Token Throughput": 14 / 0.51,
        "Request Throughput": 5 / 0.51,
    },
    "inference-perf": {
        "time_to_first_token": (50, 45, 79.1),  # without the answer of one token
        "time_per_output_token": (26.5, 20, 49.1),
        "inter_token_latency": (190 / 9, 20, 59.2),  # the gaps, and three of 0 within the events of two tokens
        "normalized_time_per_output_token": (110 / 3, 30, 59),  # 30, 170/6, 30, 35, 60
        "request_latency": (95, 90, 168),
        "output_tokens_per_sec": 14 / 0.53,
        "requests_per_sec": 5 / 0.53,
    },
    "llmperf": {
        "ttft_s": (50, 45, 79.1),
        "inter_token_latency_s": ((0, 0, 0), (40, 40, 50 + 0.97 * 10 / 3)),  # at most 80/3, 160/3, 30, 50
        "end_to_end_latency_s": (103.75, 105, 168.5),
        "mean_output_throughput_token_per_s": tool_figures.LLAMA,
        "num_completed_requests_per_min / 60": 4 / 0.54,
    },
    "genai-perf": {
        "Time To First Token": (50, 45, 79.1),
        "Inter Token Latency": (86 / 3, 20, 49.4),  # 20, 16, 50
        "Request Latency": (92.5, 90, 158.2),
        "Output Token Throughput": 12 / 0.51,
        "Request Throughput": 4 / 0.51,
    },
    "mlperf": {
        "first token latency": (57.5, 70, 80),  # from due: 30 50 70 80, ranks 2 and 3 from 0
        "time to output token": "what a one-token answer counts as is not said",
        "latency": (100, 120, 160),
        "Completed tokens per second": 12 / 0.52,
        "Completed samples per second": 3 / 0.52,
    },
}


def table(rows: list[Record] | Cell, tool: str, **head: Any) -> Table:
    made = rows if isinstance(rows, Cell) else cell(rows, **head)
    (found,) = as_tools.tables(made, windows.of(made), (tool,))
    return found


def line(rows: list[Record], tool: str, name: str, **head: Any) -> Line:
    (found,) = [got for got in table(rows, tool, **head).lines if got.name == name]
    return found


def test_every_tool_is_worked_by_hand() -> None:
    assert set(BY_HAND) == set(TOOLS)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_figure_is_the_one_worked_by_hand(tool: str) -> None:
    found = {got.name: got for got in table(FIVE, tool).lines}
    names = []
    for name, expected in BY_HAND[tool].items():
        whole = isinstance(expected, float) or "throughput" in name.lower()
        names += [name] if whole else [f"{name} {reducer}" for reducer in REDUCERS]
        for at, key in enumerate(names[-1:] if whole else names[-len(REDUCERS) :]):
            got = found[key]
            if isinstance(expected, str):
                assert (got.value, got.least, got.most, got.reason) == (None, None, None, expected)
            elif isinstance(expected, float):
                assert got.value == pytest.approx(expected)
                assert not got.reason
            elif isinstance(expected[0], tuple):
                assert (got.value, bool(got.reason)) == (None, True)
                assert (got.least, got.most) == pytest.approx((expected[0][at], expected[1][at])), key
            else:
                assert got.value == pytest.approx(expected[at]), key
                assert (got.least, got.most, got.reason) == (None, None, "")
    assert names == list(found)  # nothing is printed that is not worked by hand


@pytest.mark.parametrize("tool", TOOLS)
def test_our_value_beside_is_the_one_that_a_report_prints(tool: str) -> None:
    made = cell(FIVE)
    for got in table(made, tool).lines:
        assert got.our_value == metrics.compute(got.ours, made, windows.of(made)).value
        assert len(got.why.split()) <= 6


def test_how_many_requests_it_counts_and_what_else_to_know_of_them_is_said() -> None:
    assert {tool: table(FIVE, tool).requests for tool in TOOLS} == {
        "vllm": 5, "sglang": 5, "guidellm": 4, "aiperf": 5, "inference-perf": 5, "llmperf": 4, "genai-perf": 4,
        "mlperf": 4,
    }  # fmt: skip
    assert "1 failed requests are successes there" in table(FIVE, "vllm").notes
    assert "its percentiles: nearest rank by weight" in table(FIVE, "guidellm").notes
    assert any("tokenizer of its own" in note for note in table(FIVE, "aiperf").notes)
    assert [note for note in table(FIVE, "mlperf").notes if note.startswith("not valid")] == [
        "not valid there: 0.5 s, under 600 s",
        "not valid there: 1 requests without an answer",
    ]
    guessed = [record(0, 0, events=[50, 60], tokens_out_from="events")]
    assert "tokens of 1 answers are estimates" in table(guessed, "vllm").notes


def test_the_first_event_of_a_completion_is_its_first_token() -> None:
    api = {"target": {"name": "a", "api": "openai-completions"}}
    assert [line(FIVE, "vllm", f"TTFT {r}", **api).value for r in REDUCERS] == pytest.approx([46, 40, 78.8])
    tpot = line(FIVE, "vllm", "TPOT mean", **api)
    assert (tpot.value, tpot.least, tpot.most) == (None, 26.5, 35.75)
    assert tpot.reason == tool_figures.LATE
    assert line(FIVE, "vllm", "TPOT mean").reason != tool_figures.LATE


def test_bounds_that_meet_are_the_value() -> None:
    rows = [record(0, 0, events=[50, 60]), record(1, 100, events=[180, 200])]  # nothing before, nothing after
    assert line(rows, "vllm", "TTFT mean").value == 65
    assert line(rows, "vllm", "TPOT p99").value == pytest.approx(19.9)
    assert line(rows, "vllm", "TPOT p99").reason == ""


def test_tokens_of_one_event_have_no_gap_and_those_of_the_first_none_to_wait_for() -> None:
    rows = [record(0, 0, events=[50, 50, 90], tokens_out=6)]
    assert line(rows, "sglang", "ITL mean").value == 20  # 0 and 40
    assert line(rows, "inference-perf", "inter_token_latency mean").value == 8  # and three more of 0
    assert line(rows, "aiperf", "Inter Token Latency mean").value == 8  # 40 / 5: the first event's size is unknown
    sized = [record(0, 0, events=[50, 90], tokens_out=6, event_tokens=[4, 2])]
    assert line(sized, "aiperf", "Inter Token Latency mean").value == 20
    wrong = [record(0, 0, events=[50, 90], tokens_out=3, event_tokens=[4, 2])]
    assert line(wrong, "aiperf", "Inter Token Latency mean").value == 20  # 40 / 2: no token would be left
    more = [record(0, 0, events=[50, 60, 90], tokens_out=2)]
    assert line(more, "inference-perf", "inter_token_latency mean").reason == "answers have more events than tokens"


def test_reasoning_is_no_first_token_for_those_who_look_for_content() -> None:
    rows = [record(0, 0, events=[50, 60, 90], first_answer_ns=ns(60))]
    assert line(rows, "sglang", "TTFT mean").value == 50
    for tool, name in (("llmperf", "ttft_s mean"), ("inference-perf", "time_to_first_token mean")):
        assert line(rows, tool, name).value == 60
    assert line(rows, "inference-perf", "time_per_output_token mean").value == 15
    assert line(rows, "inference-perf", "inter_token_latency p50").reason == tool_figures.REASONING
    silent = [record(0, 0, events=[50, 60], first_answer_ns=0)]
    assert line(silent, "llmperf", "ttft_s mean").reason == "a stamp that it needs is missing of 1"


@pytest.mark.parametrize("tool", TOOLS)
def test_what_cannot_be_known_has_a_reason_and_no_value(tool: str) -> None:
    cases = {
        "not streamed": [record(i, 10 * i, end=10 * i + 9, tokens_out=4) for i in range(3)],
        "several choices": [record(0, 0, events=[5, 6, 7, 8], event_choice=[0, 1, 0, 1])],
        as_tools.NONE: [record(0, 0, outcome="failed", end=5), record(1, 5, outcome="dropped")],
    }
    if tool != "llmperf":  # which counts events
        cases["unknown of 1 of 1"] = [record(0, 0, events=[5, 6, 7], tokens_out=-1)]
    if tool not in ("llmperf", "mlperf"):
        cases["no answer has two tokens"] = [record(0, 0, events=[5])]
    for said, rows in cases.items():
        lines = table(rows, tool).lines
        assert all((got.value is None) == bool(got.reason) for got in lines), said
        assert any(said in got.reason for got in lines), said
    assert all(got.reason == as_tools.NONE for got in table([], tool).lines)


def test_no_time_is_no_rate() -> None:
    rows = [record(0, 0, events=[0])]
    assert line(rows, "vllm", "Request throughput").reason == "no time passed from its first stamp to its last"
    last_failed = [record(0, 0, events=[50]), record(1, 60, end=70, outcome="failed")]
    assert "was due last" in line(last_failed, "mlperf", "Completed tokens per second").reason


times = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.integers(0, 20), times, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_bounds_are_in_order_and_hold_what_a_tool_that_sees_the_stamps_prints(rows: list[Any]) -> None:
    made = []
    for i, (wait, steps, early, late) in enumerate(rows):
        due = 100.0 * i
        events = [due + wait + 10 + float(at) for at in np.cumsum(steps)]
        made.append(
            record(i, due, sent=due + wait, first_byte_ns=ns(events[0] - early), events=events, end=events[-1] + late)
        )
    for tool in ("vllm", "sglang", "llmperf"):
        for got in table(made, tool).lines:
            if got.least is not None and got.most is not None:
                assert 0 <= got.least < got.most
    seen = [(r.event_ns[0] - r.sent_ns) / 1e6 for r in made]
    for q, reducer in ((0.5, "p50"), (0.99, "p99")):
        got = line(made, "vllm", f"TTFT {reducer}")
        low, high = (got.value, got.value) if got.least is None else (got.least, got.most)
        assert low is not None
        assert high is not None
        assert low - 1e-9 <= stats.percentile(np.array(seen), q) <= high + 1e-9


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=30), st.sampled_from([0.5, 0.99])
)
def test_a_weight_is_so_many_requests_of_one_value(rows: list[tuple[int, int]], q: float) -> None:
    values, weights = (np.array(column, float) for column in zip(*rows, strict=True))
    nearest = tool_figures.QUANTILES["nearest rank by weight"]
    spread = np.repeat(values, weights.astype(int))
    assert nearest(values, weights, q) == nearest(spread, None, q) == np.quantile(spread, q, method="inverted_cdf")


def test_names_of_tools_are_checked() -> None:
    assert as_tools.parse(" vLLM, aiperf,vllm,") == ("vllm", "aiperf")
    assert as_tools.parse("") == ()
    with pytest.raises(BenchError, match=r"--as 'k6': expected some of vllm, sglang, guidellm"):
        as_tools.parse("vllm,k6")


@pytest.fixture
def run(tmp_path: Path) -> results.Run:
    write_cell(tmp_path / "run", "000-a", FIVE)
    return results.load_run(tmp_path / "run")


ASKED = Asked(["ttft_p50"], tools=("vllm", "guidellm"))


def test_json_and_csv_have_each_figure_with_all_its_digits(run: results.Run) -> None:
    (of_cell,) = json.loads(report.render([run], ASKED, "json"))["runs"][0]["cells"]
    assert list(of_cell["as_tools"]) == ["vllm", "guidellm"]
    rows = {row["metric"]: row for row in csv.DictReader(io.StringIO(report.render([run], ASKED, "csv")))}
    for tool in ASKED.tools:
        expected = [got._asdict() for got in table(FIVE, tool).lines]
        assert of_cell["as_tools"][tool]["lines"] == expected
        assert of_cell["as_tools"][tool]["version"] == TOOLS[tool].version
        for got in expected:
            row = rows[f"{tool}: {got['name']}"]
            assert row["value"] == ("" if got["value"] is None else str(got["value"]))
            assert row["label"].startswith(f"ours: {got['ours']}; {got['why']}")
            assert got["reason"] in row["label"]
    assert "between 34.0 and 46.0" in rows["vllm: TTFT mean"]["label"]
    assert not json.loads(report.render([run], Asked(["ttft_p50"]), "json"))["runs"][0]["cells"][0]["as_tools"]


def test_markdown_and_terminal_have_a_table_a_tool(run: results.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = report.render([run], ASKED, "md")
    assert "*as vllm bench serve 0.32 prints it: 5 requests of the whole run; ours: of the window*" in text
    assert "| its name | its value | our name | our value | why they differ |" in text
    assert "| TTFT mean, ms | 34 to 46 | ttft_mean | 57.5 | from send; role-only event counts |" in text
    assert "| TTFT p50, ms | 30 to 40 | ttft_p50 | 60 |  |" in text
    assert "| ITL p50, ms | – | itl_p50 | 30 |  |" in text  # of 10, 20, 30, 50, 60
    assert f"- ITL: {tool_figures.EXTRA_GAPS}" in text
    assert "as guidellm 0.8 prints it: 4 requests" in text
    for width in (60, 100, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = report.render([run], ASKED, "terminal")
        assert max(map(len, shown.splitlines())) <= max(width, 80)
        assert "…" not in shown
        flat = " ".join(shown.split())
        assert "34 to 46 ttft_mean 57.5 from send; role-only" in flat
        assert "30 to 40 ttft_p50 60" in flat
    assert "prints it" not in report.render([run], Asked(["ttft_p50"]), "terminal")
