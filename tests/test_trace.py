"""Readers: every row becomes the request it means, or is refused with its file and line."""

import gc
import gzip
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.errors import BenchError
from llm_bench.formats import FORMATS
from llm_bench.prefixes import blocks, infinite
from llm_bench.request import Request, Trace
from llm_bench.trace import read, write
from tests.quiet import undisturbed

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
SAMPLES = {"llm-bench": "sample-chat.jsonl", "azure": "sample-azure2023.csv", "mooncake": "sample-mooncake.jsonl"}


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout")
    return path


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(path: Path, *rows: dict[str, object]) -> Path:
    return jsonl(path, *({"timestamp": 0, "input_length": 10, "output_length": 1} | row for row in rows))


def own(path: Path, *rows: dict[str, object], **header: object) -> Path:
    return jsonl(path, {"llm_bench_trace": 1} | header, *rows)


def refused(path: Path, line: int, words: str, **kwargs: object) -> None:
    with pytest.raises(BenchError) as e:
        read(path, **kwargs)  # type: ignore[arg-type]
    assert str(e.value).startswith(f"{path}:{line}: "), e.value
    assert words in str(e.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


# -- every format -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_found_to_be_of_its_format_and_no_other(name: str) -> None:
    path = ROOT / "traces" / SAMPLES[name]
    trace = read(path)
    assert trace.format == name
    assert len(trace.requests) == {"llm-bench": 400, "azure": 200, "mooncake": 100}[name]
    assert trace.requests[0].at_s == 0
    assert trace.skipped == {}
    for other in FORMATS.keys() - {name}:
        refused(path, 1, f"no {other} file has the keys", format=other)


def test_a_format_may_be_asked_for_by_another_name() -> None:
    path = ROOT / "traces" / SAMPLES["azure"]
    assert read(path, format="azure-2023").requests == read(path, format="azure-2024").requests == read(path).requests


@pytest.mark.parametrize("name", [*SAMPLES.values(), "sample-sessions.jsonl"])
def test_what_is_written_reads_back_the_same(name: str, tmp_path: Path) -> None:
    before = read(ROOT / "traces" / name)
    write(tmp_path / "again.jsonl.gz", before)
    after = read(tmp_path / "again.jsonl.gz")
    assert [replace(r, line=0) for r in after.requests] == [replace(r, line=0) for r in before.requests]


def test_unknown_keys_are_refused_with_their_line(file: Path) -> None:
    refused(jsonl(file, {"ts": 1, "prompt": "x"}), 1, "no known format has the keys ['ts', 'prompt']; known: llm-bench")
    rows = [{}] * 40 + [{"out_tokens": 9}]
    refused(mooncake(file, *rows), 41, "no mooncake row has the keys ['out_tokens']")
    refused(file, 1, "expected one of llm-bench", format="moonshine")


def test_an_empty_file_and_a_missing_one_are_named(file: Path) -> None:
    file.write_text("\n\n")
    with pytest.raises(BenchError, match="empty, expected a trace"):
        read(file)
    with pytest.raises(BenchError, match="No such file"):
        read(file.parent / "other.jsonl")
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n")
    with pytest.raises(BenchError, match="no requests in it"):
        read(file)


def test_a_folder_is_refused_with_what_makes_a_trace_of_one(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as e:
        read(tmp_path)
    making = "llm-bench trace synth FOLDER --duration SECONDS -o FILE"
    assert str(e.value) == f"{tmp_path}: a folder; make a trace from ServeGen's clients with: {making}"


def test_limit_stops_after_so_many_requests_and_never_looks_further(file: Path) -> None:
    path = mooncake(file, {}, {"output_length": 0}, {}, {"input_length": -1})
    assert [r.line for r in read(path, limit=2).requests] == [1, 3]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_length": -1}, "input_length is -1, expected a whole number, 0 or more"),
        ({"input_length": 10.5}, "input_length is 10.5"),
        ({"input_length": True}, "input_length is True"),
        ({"input_length": "10"}, "input_length is '10'"),
        ({"input_length": None}, "input_length is missing"),
        ({"output_length": None}, "output_length is missing"),
        ({"output_tokens": 2}, "output_length 1 and output_tokens 2 name the same thing and differ"),
        ({"timestamp": math.nan}, "NaN is not a JSON number"),
        ({"timestamp": -math.inf}, "-Infinity is not a JSON number"),
        ({"timestamp": 10**400}, "timestamp is 1000"),
        ({"timestamp": -3}, "timestamp is -3, expected a number, 0 or more"),
        ({"timestamp": "82"}, "timestamp is '82'"),
        ({"hash_ids": {"sys": [1]}}, 'hash_ids is {"sys": [1]}, expected a list of whole numbers'),
        ({"hash_ids": [1.0]}, "hash_ids has 1.0, expected whole numbers only"),
        ({"session_id": ["a"]}, 'session_id is ["a"], expected text'),
    ],
)
def test_a_wrong_value_is_refused_with_its_line(file: Path, row: dict[str, object], words: str) -> None:
    refused(mooncake(file, {}, row), 2, words)


def test_lines_that_are_no_rows_are_refused(file: Path) -> None:
    good = '{"timestamp": 0, "input_length": 10, "output_length": 1}'
    refused(jsonl(file, good, good[:-9]), 2, "not JSON: ")
    refused(jsonl(file, good, "[1]"), 2, "a JSON list, expected an object")
    file.write_bytes(good.encode() + b'\n{"timestamp": "\xff"}\n')
    refused(file, 2, "byte 15 of the line is not UTF-8")
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n")
    refused(file, 2, "2 cells, expected 3")


def test_bad_rows_are_tolerated_up_to_a_number_and_counted(file: Path) -> None:
    path = mooncake(file, {}, {"input_length": -1}, {}, {"input_length": -2})
    trace = read(path, skip_bad=2)
    assert [r.line for r in trace.requests] == [1, 3]
    assert trace.skipped == {"bad row": 2}
    assert [note for note in trace.notes if f"{path}:2: " in note]
    refused(path, 4, "input_length is -2", skip_bad=1)


def test_rows_that_failed_in_the_trace_are_left_out_and_counted(file: Path) -> None:
    trace = read(mooncake(file, {"output_length": 0}, {"timestamp": 5}, {"input_length": 0, "output_length": 0}))
    assert trace.skipped == {"failed in the trace": 1, "empty": 1}
    assert [(r.at_s, r.tokens_out) for r in trace.requests] == [(0.0, 1)]


def test_output_tokens_is_another_name_of_output_length(file: Path) -> None:
    jsonl(file, {"timestamp": 0, "input_length": 10, "output_tokens": 7})
    assert read(file).requests[0].tokens_out == 7


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from([key for form in FORMATS.values() for key in form.keys])


@given(JSON, st.lists(st.dictionaries(KEYS, JSON, max_size=4), max_size=3), st.booleans(), st.binary(max_size=30))
def test_whatever_a_file_holds_it_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: object, rows: list[dict[str, object]], with_own: bool, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    good = {"timestamp": 0, "input_length": 10, "output_length": 1}
    head = {"llm_bench_trace": 1, "unit": value} if with_own else good
    path.write_bytes("\n".join(json.dumps(row) for row in [head, *(good | row for row in rows)]).encode() + tail)
    try:
        trace = read(path)
    except BenchError:  # any other exception fails the test
        return
    assert all(r.tokens_in >= 0 and r.line > 0 for r in trace.requests)


# -- times ------------------------------------------------------------------------------------------------------------


def azure(path: Path, *stamps: str, newline: str = "\r\n", bom: bytes = b"") -> Path:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{stamp},10,1" for stamp in stamps)]
    path.write_bytes(bom + newline.join(rows).encode())
    return path


STAMPS = ("2024-02-29 23:59:59.6805900", "2024-02-29 23:59:59.9951690", "2024-03-01 00:00:00.2224671")


@pytest.mark.parametrize("suffix", ["", "Z", "+00:00", "+0530"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_date_times_are_exact_to_100_ns_over_a_leap_day(file: Path, suffix: str, bom: bytes, newline: str) -> None:
    trace = read(azure(file, *(s + suffix for s in STAMPS), STAMPS[-1] + suffix, bom=bom, newline=newline))
    assert [r.at_s for r in trace.requests] == [0.0, 0.314579, 0.5418771, 0.5418771]
    assert "prompts are unique; prefix cache hits are not modelled" in trace.notes
    assert any("timestamp resolution 100 ns; 2 rows share one instant" in note for note in trace.notes)


def test_a_zone_moves_the_time(file: Path) -> None:
    assert [r.at_s for r in read(azure(file, "2024-02-29 23:00:00Z", "2024-03-01 01:30:00+02:00")).requests] == [
        0,
        1800,
    ]


@pytest.mark.parametrize("stamp", ["2023-02-29 00:00:00", "2023-01-01 24:00:00", "16/11/2023 18:15", "12345", ""])
def test_no_date_is_refused(file: Path, stamp: str) -> None:
    refused(azure(file, STAMPS[0], stamp), 3, "TIMESTAMP is ")


def test_csv_columns_are_found_by_name(file: Path) -> None:
    file.write_text('GeneratedTokens,TIMESTAMP,ContextTokens\n7,"2023-11-16 18:15:46.6805900",374\n')
    request = read(file).requests[0]
    assert (request.tokens_in, request.tokens_out) == (374, 7)


def test_a_date_format_takes_no_unit(file: Path) -> None:
    refused(azure(file, *STAMPS), 1, "leave the unit out", unit="ms")


def test_the_unit_is_the_formats_and_can_be_overridden(file: Path) -> None:
    path = mooncake(file, {"timestamp": 0}, {"timestamp": 99})
    assert read(path).requests[1].at_s == 0.099
    assert "times read as ms: 2 timed rows over 0.099 s" in read(path).notes
    assert read(path, unit="s").requests[1].at_s == 99
    refused(path, 1, "unit 'min', expected one of s, ms, us, ns", unit="min")
    refused(path, 1, "unit 'date-time', expected one of s, ms, us, ns", unit="date-time")
    assert read(path, unit="us").requests[1].at_s == 99e-6


def test_rows_out_of_order_are_sorted_stably_and_counted(file: Path) -> None:
    trace = read(mooncake(file, *({"timestamp": t} for t in (5, 9, 5, 0, 9))))
    assert [r.line for r in trace.requests] == [4, 1, 3, 2, 5]
    assert trace.requests[0].at_s == 0
    assert any(note.startswith("2 rows stood behind a later one") for note in trace.notes)


@given(st.lists(st.integers(0, 3 * 10**9), min_size=1, max_size=20))
def test_seconds_since_1970_keep_every_nanosecond(tmp_path_factory: pytest.TempPathFactory, offsets: list[int]) -> None:
    start = 1_700_158_546
    stamps = [f"{start + ns // 10**9}.{ns % 10**9:09}" for ns in sorted(offsets)]
    path = tmp_path_factory.mktemp("t") / "t.jsonl"
    header = '{"llm_bench_trace": 1}'
    jsonl(path, header, *(f'{{"timestamp": {s}, "input_length": 1, "output_length": 1}}' for s in stamps))
    assert [r.at_s for r in read(path).requests] == [(ns - min(offsets)) / 1e9 for ns in sorted(offsets)]


def test_a_trace_may_have_no_times_but_not_half_of_them(file: Path) -> None:
    row = {"input_length": 5, "output_length": 1}
    trace = read(own(file, row, row))
    assert [r.at_s for r in trace.requests] == [None, None]
    assert any("no times in it" in note for note in trace.notes)
    refused(own(file, row | {"timestamp": 1}, row), 3, "no timestamp, expected one in each row")


# -- shared prefixes --------------------------------------------------------------------------------------------------


def test_the_number_of_hash_ids_must_fit_the_length(file: Path) -> None:
    refused(mooncake(file, {"input_length": 20, "hash_ids": [1, 2]}), 1, "20 tokens need 1 block of 512, got 2")
    refused(mooncake(file, {"input_length": 600, "hash_ids": [1]}), 1, "600 tokens need 2 blocks of 512, got 1")
    path = mooncake(file, {"input_length": 20, "hash_ids": [1, 2]})
    assert read(path, block_size=16).requests[0].block_size == 16


def test_an_id_keeps_its_number_of_tokens(file: Path) -> None:
    path = mooncake(
        file,
        {"input_length": 1100, "hash_ids": [1, 2, 3]},
        {"input_length": 700, "hash_ids": [3, 7]},
        {"input_length": 700, "hash_ids": [7, 8]},
    )
    refused(path, 2, "id 3 was 76 tokens, now 512")
    # The refused row left nothing behind: 7 is free to be a whole block.
    assert [r.line for r in read(path, skip_bad=1).requests] == [1, 3]


def test_ids_are_no_32_bit_numbers(file: Path) -> None:
    ids = [5 + 2**32, 5, 2**64 + 5]
    request = read(mooncake(file, {"input_length": 1500, "hash_ids": ids})).requests[0]
    assert request.hash_ids == tuple(ids)


def test_ids_need_a_block_size(file: Path) -> None:
    row = {"input_length": 20, "output_length": 1, "hash_ids": [1, 2]}
    refused(own(file, row), 2, "hash_ids without a block size")
    assert read(own(file, row, block_size=16)).requests[0].block_size == 16


# -- conversations ----------------------------------------------------------------------------------------------------

TURNS = [
    {"session_id": "s1", "timestamp": 0, "input_length": 100, "output_length": 50},
    {"session_id": "s1", "timestamp": 4000, "input_length": 190, "output_length": 30},
    {"session_id": "s1", "timestamp": 9000, "input_length": 260, "output_length": 10},
]


def turns_of(trace: Trace) -> list[tuple[int, int, int]]:
    return [(r.turn, r.tokens_in, r.tokens_new) for r in trace.requests]


def test_cumulative_lengths_are_recognised_and_said(file: Path) -> None:
    trace = read(mooncake(file, *TURNS))
    assert turns_of(trace) == [(0, 100, 0), (1, 190, 40), (2, 260, 40)]
    assert any("the whole prompt so far (cumulative)" in note for note in trace.notes)


def test_lengths_can_be_read_as_what_the_user_adds(file: Path) -> None:
    trace = read(mooncake(file, *TURNS), turns="new")
    assert turns_of(trace) == [(0, 100, 0), (1, 340, 190), (2, 630, 260)]
    assert any("what the user adds: as told" in note for note in trace.notes)


def test_lengths_that_cannot_be_cumulative_are_new_or_refused(file: Path) -> None:
    path = mooncake(file, TURNS[0], TURNS[1] | {"input_length": 149})
    assert turns_of(read(path)) == [(0, 100, 0), (1, 299, 149)]
    refused(path, 2, "149 prompt tokens, fewer than 100 + 50 of the turn before", turns="cumulative")
    assert turns_of(read(mooncake(file, TURNS[0], TURNS[1] | {"input_length": 150}))) == [(0, 100, 0), (1, 150, 0)]
    refused(path, 1, "turns 'old', expected cumulative or new", turns="old")


def test_a_text_of_unknown_length_leaves_the_later_turns_what_their_users_add(file: Path) -> None:
    given, made = {"session_id": "a", "prompt": "x", "output_length": 5}, {"session_id": "a", "output_length": 5}
    path = own(file, given, made | {"input_length": 30}, made | {"input_length": 20}, turns="new")
    assert turns_of(read(path)) == [(0, 0, 0), (1, 30, 30), (2, 55, 20)]
    assert turns_of(read(own(file, made | {"input_length": 30}, given))) == [(0, 30, 0), (1, 0, 0)]
    assert turns_of(read(file, turns="new")) == [(0, 30, 0), (1, 0, 0)]


def test_a_turn_without_a_time_stays_with_its_conversation(file: Path) -> None:
    a, b = {"session_id": "a", "output_length": 1}, {"session_id": "b", "output_length": 1}
    path = own(
        file,
        b | {"timestamp": 5, "input_length": 10},
        a | {"timestamp": 0, "input_length": 10},
        b | {"think_s": 2, "input_length": 20},
        a | {"delay": 3, "input_length": 20},
    )
    requests = read(path).requests
    assert [(r.session, r.turn, r.at_s, r.think_s) for r in requests] == [
        ("a", 0, 0.0, None),
        ("a", 1, None, 3.0),
        ("b", 0, 5.0, None),
        ("b", 1, None, 2.0),
    ]


def test_turns_that_contradict_their_times_are_refused(file: Path) -> None:
    row = {"session_id": "a", "input_length": 10, "output_length": 1}
    path = own(file, row | {"turn": 1, "timestamp": 0}, row | {"turn": 0, "timestamp": 1})
    refused(path, 3, "turn 0 comes after turn 1 in time")
    refused(own(file, {"turn": 2, "input_length": 10, "output_length": 1}), 2, "turn 2 without a session_id")


# -- what a row may not hold ------------------------------------------------------------------------------------------

ROW = '"input_length": 5, "output_length": 4'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROW + ', "input_length": 7', "the key 'input_length' is there twice"),
        (ROW + ', "extra": {"seed": 1, "seed": 2}', "the key 'seed' is there twice"),
        (ROW + ', "session_id": "\\ud800"', "not JSON: "),
        (ROW + ', "class": "a\\udc00"', "not JSON: "),
        (ROW + ', "model": "\\ud800x"', "not JSON: "),
        ('"output_length": 4, "prompt": "\\ud800"', "not JSON: "),
        (ROW + ', "priority": 2147483648', "priority is 2147483648, expected a whole number of 32 bits"),
        (ROW + ', "priority": -2147483649', "priority is -2147483649"),
        (ROW + ', "extra": {"a": 1e400}', "1E+400 is larger than any float"),
        (ROW + ', "extra": {"a": 99999999999999999999}', "extra cannot be sent as JSON: "),
        (ROW + ', "extra": {"a": ' + "[" * 400 + "]" * 400 + "}", "extra cannot be sent as JSON: "),
        ('"output_length": 4, "messages": [{"content": ' + "[" * 400 + "]" * 400 + "}]", "messages cannot be sent"),
        (ROW + ', "extra": ' + "[" * 100_000, "nested too deeply"),
        (ROW + ', "think_s": 1e15', "think_s is 1E+15, expected 10 years at most"),
        (ROW + ', "cancel_after_s": 400000000', "cancel_after_s is 400000000, expected 10 years at most"),
        ('"output_length": 4, "prompt_token_ids": [1, 2147483648]', "prompt_token_ids has one below 0 or of more"),
        ('"output_length": 4, "prompt_token_ids": [-1]', "prompt_token_ids has one below 0 or of more"),
        ('"input_length": 1000000000, "output_length": 4', "input_length is 1000000000, expected 10,000,000 at most"),
        ('"input_length": 5, "output_length": 10000001', "output_length is 10000001, expected 10,000,000 at most"),
    ],
    ids=lambda text: text[-60:],
)
def test_what_no_request_or_record_could_hold_is_refused_here(file: Path, text: str, words: str) -> None:
    refused(jsonl(file, '{"llm_bench_trace": 1}', "{" + ROW + "}", "{" + text + "}"), 3, words)


def test_what_is_sent_on_keeps_its_numbers(file: Path) -> None:
    row = {"timestamp": 0.5, "output_length": 4, "extra": {"top_p": 0.25, "seed": 7, "x": [1e-3]}}
    (request,) = read(own(file, row | {"messages": [{"role": "user", "content": "é😀", "weight": 0.5}]})).requests
    assert json.dumps(dict(request.extra)) == '{"top_p": 0.25, "seed": 7, "x": [0.001]}'
    assert request.messages == ({"role": "user", "content": "é😀", "weight": 0.5},)


def test_columns_of_one_name_are_refused(file: Path) -> None:
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,ContextTokens\n2023-11-16 18:15:46,5,4,9\n")
    refused(file, 1, "the key 'ContextTokens' is there twice")


def test_digits_of_other_scripts_are_no_numbers(file: Path) -> None:
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,\u0665,4\n")
    refused(file, 2, "ContextTokens is '\u0665'")


def test_times_that_lie_years_apart_are_refused_with_both_lines(file: Path) -> None:
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n9999-12-31 23:59:59,5,4\n0001-01-01 00:00:00,5,4\n")
    refused(file, 2, "9,999 years after line 3, expected 10 at most")
    row = json.loads("{" + ROW + "}")
    refused(own(file, row | {"timestamp": 0}, row | {"timestamp": 1e15}), 3, "years after line 2")


def test_reading_leaves_the_garbage_collector_as_it_was(file: Path) -> None:
    path = mooncake(file, {})
    assert gc.isenabled()
    read(path)
    refused(mooncake(file, {"input_length": -1}), 1, "input_length")
    assert gc.isenabled()
    gc.disable()
    read(mooncake(file, {}))
    enabled = gc.isenabled()
    gc.enable()
    assert not enabled


@undisturbed
def test_a_hundred_thousand_rows_are_read_in_a_second_or_two(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    stamps = ((i // 3600 % 24, i // 60 % 60, i % 60, i) for i in range(100_000))
    lines = [
        f"2023-11-{16 + i // 86400} {h:02}:{m:02}:{s:02}.{i % 10**7:07},{i % 4000 + 1},7\n" for h, m, s, i in stamps
    ]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    start = time.process_time()
    trace = read(path)
    took_s = time.process_time() - start
    assert len(trace.requests) == 100_000
    assert took_s < 2  # 0.6 s on the machine of 2026; copying each row thrice took 3


# -- our own format ---------------------------------------------------------------------------------------------------


def test_every_field_of_a_request_survives_our_own_format(tmp_path: Path) -> None:
    requests = [
        Request(10, 5, at_s=0.0, hash_ids=(2**70,), block_size=16, request_class="chat", priority=-2, model="m"),
        Request(0, None, at_s=0.000000001, prompt="Grüße\u2028 here", cancel_after_s=1.5, extra={"temperature": 0.5}),
        Request(0, 3, at_s=1.25, messages=({"role": "user", "content": "x"},)),
        Request(3, 3, at_s=2.0, prompt_token_ids=(1, 2, 3)),
        Request(10, 4, at_s=3.0, session="s"),
        Request(20, None, session="s", turn=1, tokens_new=6, think_s=0.25),
        Request(0, 7, at_s=4.5, body={"model": "m", "messages": [{"role": "user", "content": "x"}], "top_p": 0.1}),
        Request(5, 7, at_s=5.0, body={"prompt": "x"}, client="tenant 7"),
    ]
    path = tmp_path / "own.jsonl"
    write(path, Trace(requests, "llm-bench", "", [], {}))
    again = read(path)
    assert [replace(r, line=0) for r in again.requests] == requests
    assert any(note.startswith("3 rows give a text without its length") for note in again.notes)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "x", "prompt_token_ids": [1]}, "both prompt and prompt_token_ids are given"),
        ({"prompt": 3}, "prompt is 3, expected text"),
        ({"prompt": "x", "body": {}}, "both prompt and body are given"),
        ({"body": []}, "body is [], expected an object"),
        ({"input_length": 1, "client": 0.5}, "client is 0.5, expected text"),
        ({"messages": ["x"]}, 'messages is ["x"], expected a list of objects'),
        ({"prompt_token_ids": [1, 2], "input_length": 3}, "input_length is 3, but there are 2 prompt_token_ids"),
        ({"output_length": 4}, "input_length is missing"),
        ({"input_length": 1, "extra": [1]}, "extra is [1], expected an object"),
        ({"input_length": 1, "priority": 0.5}, "priority is 0.5"),
        ({"input_length": 1, "think_s": -1}, "think_s is -1"),
    ],
)
def test_a_wrong_row_of_our_own_is_refused(file: Path, row: dict[str, object], words: str) -> None:
    refused(own(file, row), 2, words)


def test_the_header_is_checked_and_the_user_stands_above_it(file: Path) -> None:
    row = {"timestamp": 1500, "input_length": 20, "output_length": 1, "hash_ids": [1, 2]}
    path = own(file, row | {"timestamp": 0, "hash_ids": [1, 3]}, row, unit="ms", block_size=16)
    assert read(path).requests[1].at_s == 1.5
    assert read(path, unit="s").requests[1].at_s == 1500
    refused(path, 2, "20 tokens need 3 blocks of 8, got 2", block_size=8)
    refused(own(file, row, blocksize=16), 1, '"blocksize": 16')
    refused(jsonl(file, {"llm_bench_trace": 2}, row), 1, "expected llm_bench_trace: 1")


def test_blocks_of_two_sizes_cannot_be_written(tmp_path: Path) -> None:
    requests = [Request(10, 1, hash_ids=(1,), block_size=16), Request(10, 1, hash_ids=(2,), block_size=32)]
    with pytest.raises(BenchError, match=r"blocks of \[16, 32\] tokens"):
        write(tmp_path / "x.jsonl", Trace(requests, "", "", [], {}))


def test_gz_is_read_and_a_torn_one_refused(tmp_path: Path) -> None:
    data = gzip.compress((ROOT / "traces/sample-mooncake.jsonl").read_bytes())
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(data)
    assert len(read(path).requests) == 100
    for torn in (data[:-40], data[:30] + b"\xff" * 30 + data[60:], b"no gzip"):
        path.write_bytes(torn)
        with pytest.raises(BenchError, match="cannot be read"):
            read(path)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 10**6 + "\n",
        ",".join(f"c{i}" for i in range(10**5)) + "\n",
        f'{{"{"k" * 10**6}": 1, "{"k" * 10**6}": 2}}\n',
        json.dumps({f"k{i}": 1 for i in range(10**5)}) + "\n",
        '{"timestamp": 1, "input_length": 5, "output_length": 6}\n' + json.dumps({f"k{i}": 1 for i in range(10**5)}),
        ",".join(f"c{i}" for i in range(10**5)) + "\n1,2\n",
    ],
)
@pytest.mark.parametrize("columns", [None, {"in": "nowhere"}, {"in": "c0"}, {"y" * 10**6: "c0"}])
def test_a_refusal_is_a_sentence_however_long_a_line_or_its_names_are(
    tmp_path: Path, text: str, columns: dict[str, str] | None
) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(BenchError) as e:
        read(path, map=columns)
    assert len(str(e.value)) < len(str(path)) + 2_500


# -- the project's cases and the public files -------------------------------------------------------------------------


def test_case_23_burstgpt_like() -> None:
    trace = read(shared("cases/23-burstgpt-like.csv"))
    assert [r.at_s for r in trace.requests] == [0, 0, 0, 2, 9]
    assert [r.tokens_in for r in trace.requests] == [120, 400, 60, 90, 33]
    assert sum(r.tokens_out or 0 for r in trace.requests) == 286
    assert trace.skipped == {"failed in the trace": 1, "empty": 1}
    assert any("timestamp resolution 1 s; 4 rows share one instant" in note for note in trace.notes)
    assert trace.facts == {
        "unit": "s",
        "given": [],
        "resolution_s": 1,
        "zero_s": 41,
        "instants": 3,
        "late_rows": 0,
        "turns": "",
        "block_size": 0,
        "rows": 7,
    }


def test_case_24_azure_like() -> None:
    trace = read(shared("cases/24-azure-like.csv"))
    assert trace.facts["zero_s"] is None
    assert trace.facts["unit"] == "date-time"
    assert trace.facts["resolution_s"] == 1e-6
    assert "prompts are unique; prefix cache hits are not modelled" in trace.notes
    assert [r.at_s for r in trace.requests] == [0.0, 0.314579, 0.541877, 0.541877]
    assert [r.tokens_in for r in trace.requests] == [374, 396, 879, 91]


def test_case_25_mooncake_like() -> None:
    path = shared("cases/25-mooncake-like.jsonl")
    refused(path, 5, "20 tokens need 1 block of 512, got 2")
    refused(path, 6, "id 3 was 76 tokens, now 512", skip_bad=1)
    trace = read(path, skip_bad=2)
    assert [r.at_s for r in trace.requests] == [0, 0.027, 0.027, 0.09]
    assert (trace.facts["block_size"], trace.facts["rows"], trace.facts["zero_s"]) == (512, 6, 0)
    assert any("2,048 of 4,260 prompt tokens (48.08%)" in note for note in trace.notes)
    assert trace.requests[3].hash_ids == (4294967301, 5)


def test_case_26_multi_turn() -> None:
    path = shared("cases/26-multi-turn.jsonl")
    assert [read(path, turns=turns).facts["turns"] for turns in (None, "new")] == ["cumulative", "new"]
    assert turns_of(read(path)) == [(0, 100, 0), (1, 190, 40), (2, 260, 40)]
    assert [r.tokens_in for r in read(path, turns="new").requests] == [100, 340, 630]


@pytest.mark.parametrize(
    ("name", "rows", "span_s", "tokens_in", "tokens_out"),
    [
        ("AzureLLMInferenceTrace_code.csv", 8819, 3436, 2048, 27.9),
        ("AzureLLMInferenceTrace_conv.csv", 19366, 3502, 1155, 211),
        ("mooncake_conversation_trace.jsonl", 12031, 3537, 12035, 343),
    ],
)
def test_whole_public_traces_give_their_known_figures(
    name: str, rows: int, span_s: float, tokens_in: float, tokens_out: float
) -> None:
    start = time.process_time()
    trace = read(shared(f"traces/full/{name}"))
    took_s = time.process_time() - start
    assert len(trace.requests) == rows
    assert trace.requests[-1].at_s == pytest.approx(span_s, abs=0.5)
    assert sum(r.tokens_in for r in trace.requests) / rows == pytest.approx(tokens_in, abs=0.5)
    assert sum(r.tokens_out or 0 for r in trace.requests) / rows == pytest.approx(tokens_out, abs=0.5)
    assert took_s < 10


def test_the_mooncake_trace_stands_on_ticks_and_shares_37_percent() -> None:
    trace = read(shared("traces/full/mooncake_conversation_trace.jsonl"))
    assert any("12,031 rows on 1,180 instants, 3 s apart" in note for note in trace.notes)
    assert (trace.facts["instants"], trace.facts["resolution_s"], trace.facts["rows"]) == (1180, 0.001, 12031)
    bound = infinite(blocks(trace.requests))
    assert bound.tokens_hit_full / bound.tokens == pytest.approx(0.374, abs=0.001)  # 0.374 counts partial blocks too


@pytest.mark.parametrize(
    ("name", "kind", "rows", "span_s"),
    [
        ("azure2023_code_first2000.csv", "azure", 2000, None),
        ("azure2023_conv_first2000.csv", "azure", 2000, None),
        ("azure2023_conv_tail200_no_eol.csv", "azure", 200, None),
        ("azure2024_documented_row.csv", "azure", 1, 0),
        ("inferenceperf_azure_style_20.csv", "azure", 20, 13.0251),
        ("burstgpt1_documented_rows.csv", "burstgpt", 3, 113),
        ("burstgpt3_documented_rows.csv", "burstgpt", 4, 144),
        ("mooncake_conversation_first1000.jsonl", "mooncake", 1000, 330),
        ("mooncake_synthetic_first1000.jsonl", "mooncake", 1000, 272.653),
        ("mooncake_toolagent_documented_rows.jsonl", "mooncake", 6, 0),
        ("bailian_documented_rows.jsonl", "bailian", 3, 62.5),
        ("ragpulse_first1000.jsonl", "ragpulse", 1000, 82157),
        ("ragpulse_tail_blankline.jsonl", "ragpulse", 2, 127),
        ("etalon_sharegpt8k_lengths_first2000.csv", "lengths", 2000, None),
        ("etalon_bwb_lengths_first2000.csv", "lengths", 2000, None),
        ("vidur_arxiv_lengths_first2000.csv", "lengths", 2000, None),
        ("inferenceperf_otel_prefix_sharing.json", "otel", 7, None),
        ("tracelab_sanitized_example.jsonl", "tracelab", 19, None),
    ],
)
def test_each_public_excerpt_reads_whole_and_is_the_same_once_written(
    name: str, kind: str, rows: int, span_s: float | None, tmp_path: Path
) -> None:
    trace = read(shared(f"traces/{name}"))
    assert (trace.format, len(trace.requests), trace.skipped) == (kind, rows, {})
    assert trace.facts["rows"] == rows
    if span_s is not None:
        assert trace.requests[-1].at_s == pytest.approx(span_s, abs=1e-4)
    write(tmp_path / "again.jsonl.gz", trace)
    again = read(tmp_path / "again.jsonl.gz")
    assert [replace(r, line=0) for r in again.requests] == [replace(r, line=0) for r in trace.requests]


@pytest.mark.parametrize("name", ["bailian_documented_rows.jsonl", "ragpulse_first1000.jsonl"])
def test_lookalikes_are_not_taken_for_mooncake(name: str) -> None:
    with pytest.raises(BenchError, match=r"jsonl:1: "):
        read(shared(f"traces/{name}"), format="mooncake")


# -- one file, one reading ---------------------------------------------------------------------------------------------


def turn(session: object, tokens_in: int, tokens_out: int = 50, at: int = 0) -> dict[str, object]:
    return {"session_id": session, "timestamp": at, "input_length": tokens_in, "output_length": tokens_out}


def test_turns_that_fit_in_part_are_refused_until_the_user_says_how_they_are_meant(file: Path) -> None:
    path = mooncake(file, turn("a", 100), turn("a", 120), turn("b", 100), turn("b", 160))
    refused(path, 2, "session 'a' has 120 prompt tokens, fewer than 100 + 50")
    refused(path, 2, "while 1 of 2 later turns hold the prompt and answer before them: say --turns cumulative")
    assert turns_of(read(path, turns="new")) == [(0, 100, 0), (1, 270, 120), (0, 100, 0), (1, 310, 160)]


def test_as_told_cumulative_a_turn_too_short_takes_its_conversation_with_it(file: Path) -> None:
    rows = [turn("a", 100), turn("a", 120), turn("a", 200), turn("b", 100), turn("b", 160), turn("c", 9), turn("c", 9)]
    path = mooncake(file, *rows)
    refused(path, 2, "not cumulative; expected --turns new", turns="cumulative")
    refused(path, 7, "session 'c' has 9 prompt tokens, fewer than 9 + 50", turns="cumulative", skip_bad=1)
    trace = read(path, turns="cumulative", skip_bad=2)
    assert turns_of(trace) == [(0, 100, 0), (1, 160, 10)]
    assert trace.skipped == {"bad row": 2, "of a bad row's conversation": 3}
    assert trace.facts["rows"] == 7
    assert next(note for note in trace.notes if note.startswith("left out: ")).startswith(f"left out: {path}:2: ")


def test_fewer_than_half_that_fit_do_so_by_chance(file: Path) -> None:
    path = mooncake(file, turn("a", 100), turn("a", 30), turn("a", 20), turn("a", 90))
    trace = read(path)
    assert trace.facts["turns"] == "new"
    assert turns_of(trace)[-1] == (3, 100 + 50 + 30 + 50 + 20 + 50 + 90, 90)


def test_a_format_of_whole_prompts_is_never_read_as_what_users_add(file: Path) -> None:
    """Out of order in the file, a conversation of BurstGPT may not be cut where it should be."""
    file.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "9,s,1,m,100,50,150,x\n5,s,1,m,160,5,165,x\n"
    )
    refused(file, 2, "say --turns cumulative")


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=14),
    st.integers(1, 14),
    st.sampled_from([None, "cumulative", "new"]),
)
def test_no_limit_changes_what_a_row_means(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, int, int]], limit: int, turns: str | None
) -> None:
    path = mooncake(tmp_path_factory.mktemp("t") / "t.jsonl", *(turn(*row) for row in drawn))
    try:
        whole = {r.line: r for r in read(path, turns=turns).requests}
    except BenchError:
        return
    part = read(path, turns=turns, limit=limit).requests
    assert part == [replace(whole[r.line], at_s=r.at_s) for r in part]
    assert len(part) == min(limit, len(whole))


def test_a_limit_alone_reads_no_further_than_a_file_without_conversations_needs(file: Path) -> None:
    path = mooncake(file, {}, {"input_length": -1})
    assert len(read(path, limit=1).requests) == 1
    refused(mooncake(file, turn("a", 10), {"input_length": -1}), 2, "input_length is -1", limit=1)
    assert len(read(file, limit=1, turns="new").requests) == 1


def test_a_session_that_is_a_number_here_and_text_there_is_refused(file: Path) -> None:
    refused(mooncake(file, turn(1, 100), turn("1", 160)), 2, "session 1 is a number in some rows and text in others")
    assert turns_of(read(mooncake(file, turn(1, 100), turn(1, 160)))) == [(0, 100, 0), (1, 160, 10)]


# -- numbers that may mean something else ------------------------------------------------------------------------------


@pytest.mark.parametrize(("cell", "words"), [
    ("2.000", "in is '2.000', expected digits alone: its point may be meant to part thousands"),
    ("1.234.567", "part thousands"),
    ("1e3", "in is '1e3', expected a whole number, 0 or more, in digits alone"),
    ("12.5", "in is '12.5', expected a whole number"),
])  # fmt: skip
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_a_count_that_may_be_meant_otherwise_is_refused(file: Path, cell: str, words: str, delimiter: str) -> None:
    file.write_text("\n".join(delimiter.join(row) for row in (("at", "in", "out"), ("0", "7", "5"), ("1", cell, "5"))))
    refused(file, 3, words)


def test_a_count_with_a_fraction_of_nothing_is_that_count(file: Path) -> None:
    file.write_text("at,in,out\n0.250,374.0,5.\n1,12.00,6\n")
    assert [(r.at_s, r.tokens_in, r.tokens_out) for r in read(file).requests] == [(0, 374, 5), (0.75, 12, 6)]
    jsonl(file, '{"at": 0, "in": 2.000, "out": 5}')
    assert read(file).requests[0].tokens_in == 2


@pytest.mark.parametrize(("unit", "digits", "right"), [
    ("s", 13, "ms"), ("s", 16, "us"), ("s", 19, "ns"), ("ms", 16, "us"), ("ms", 19, "ns"), ("us", 19, "ns"),
])  # fmt: skip
def test_a_first_stamp_of_a_far_year_tells_of_another_unit(file: Path, unit: str, digits: int, right: str) -> None:
    first = int("17" + "0" * (digits - 2))
    jsonl(file, *({"at": first + i, "in": 5, "out": 5} for i in range(3)))
    refused(file, 1, f"expected --unit {right}", unit=unit)
    assert len(read(file, unit=right).requests) == 3


def test_seconds_since_1970_are_read_as_they_are(file: Path) -> None:
    jsonl(file, *({"at": 1_700_000_000 + i, "in": 5, "out": 5} for i in range(3)))
    assert read(file).facts["zero_s"] == 1_700_000_000


def test_no_python_is_told_to_who_has_a_wrong_file(file: Path) -> None:
    for row in ({"session_id": {"a": 1.5}}, {"output_length": 1, "output_tokens": 2}, {"hash_ids": {"a": [1]}}):
        with pytest.raises(BenchError) as e:
            read(mooncake(file, {}, row))
        assert not any(word in str(e.value) for word in ("Decimal", "{'"))


def test_a_conversation_that_opens_with_an_answer_is_counted(file: Path) -> None:
    said = [{"from": who, "value": "x"} for who in ("system", "gpt", "human", "gpt")]
    file.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1] + said[2:]}]))
    trace = read(file)
    assert any(note.startswith("1 conversations open with an answer, which is dropped") for note in trace.notes)
    assert len(trace.requests) == 2
