"""FORMATS: each row of each format becomes the requests it means, is claimed by one format only, and survives write."""

import contextlib
import csv
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.containers import reading
from llm_bench.errors import BenchError
from llm_bench.fields import date_time, seven_decimals
from llm_bench.formats import FORMATS
from llm_bench.request import Request, Trace
from llm_bench.trace import read, write

# The first lines of a file of each format: what it is found by.
FIRST = {
    "llm-bench": '{"llm_bench_trace": 1, "unit": "ms"}',
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5",
    "azure-2025-multimodal": "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n2024-10-15T12:00:00.269Z,1,770,491",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,M,1,1,2,API log",
    "mooncake": '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [0]}',
    "bailian": '{"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.0, "input_length": 2, "output_length": 4}',
    "ragpulse": '{"timestamp": "8", "input_length": 3, "output_length": 1, "hash_ids": {}, "session_id": "a"}',
    "lengths": "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,20,30,0.5",
    "plain": "at,in,out\n0.5,10,20",
    "aiperf": '{"timestamp": 0, "text_input": "hello", "output_length": 5}',
    "weka": '{"id": "a", "block_size": 64, "requests": []}',
    "tracelab": '{"session_id": "a", "round_index": 0, "input_tokens_total": 3, "output_tokens": 1, '
    '"timing_events": []}',
    "otel": '{"resourceSpans": []}',
    "sharegpt": '[{"id": "a", "conversations": [{"from": "human", "value": "x"}]}]',
    "sagemaker": '{"captureData": {}, "eventMetadata": {}, "eventVersion": "0"}',
    "openai-batch": '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}',
    "captured": '{"timestamp": 0, "body": {"prompt": "x"}}',
}


def table(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def read_text(path: Path, text: str, **kwargs: Any) -> Trace:
    path.write_text(text)
    return read(path, **kwargs)


def refused(path: Path, text: str, line: int, words: str, **kwargs: Any) -> None:
    with pytest.raises(BenchError) as e:
        read_text(path, text, **kwargs)
    assert str(e.value).startswith(f"{path}:{line}: "), e.value
    assert words in str(e.value)


# -- over the table ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_a_first_line_is_claimed_by_its_own_format_and_no_other(name: str, file: Path) -> None:
    file.write_text(FIRST[name])
    with reading(file) as opened:
        assert [other for other, form in FORMATS.items() if form.detect(opened.first)] == [name]
        assert opened.first.keys() <= set(FORMATS[name].keys) or FORMATS[name].header


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not form.header])
@given(data=st.data())
@settings(max_examples=60)
def test_whatever_a_first_line_has_besides_one_format_claims_it_at_most(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_text(FIRST[name])
    with reading(path) as opened:
        first = opened.first
    values = st.sampled_from([None, 1, "x", [], {}, [1], {"a": 1}])
    more = data.draw(st.dictionaries(st.sampled_from(FORMATS[name].keys), values, max_size=4))
    claims = [other for other, form in FORMATS.items() if form.detect(dict(first) | more)]
    assert len(claims) <= 1, (first, more)


def why_not(path: Path, text: str, **kwargs: Any) -> str:
    try:
        read_text(path, text, **kwargs)
    except BenchError as e:
        return str(e)
    return ""


@given(st.lists(st.sampled_from(list(FORMATS)), min_size=2, max_size=2, unique=True))
def test_keys_of_two_formats_are_refused_unless_the_user_says_which(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    path = tmp_path_factory.mktemp("t") / "t"
    first: dict[str, Any] = {}
    for name in names:
        path.write_text(FIRST[name])
        with reading(path) as opened:
            first |= opened.first
    text = json.dumps(first, default=float) + "\n"
    claims = [name for name, form in FORMATS.items() if form.detect(first)]
    both = f"keys of {' and '.join(claims)}, expected those of one format; say which with --format-of-trace"
    assert (both in why_not(path, text)) == (len(claims) > 1)
    assert not any(both in why_not(path, text, format=name) for name in claims)


def test_a_line_with_the_keys_of_two_recordings_names_both(file: Path) -> None:
    text = '{"captureData": {}, "eventMetadata": {}, "timestamp": 0, "body": {"prompt": "x"}}'
    refused(file, text, 1, "keys of sagemaker and captured, expected those of one format")
    refused(file, text, 1, "no captured row has the keys ['captureData', 'eventMetadata']", format="captured")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_says_what_it_is(name: str) -> None:
    form = FORMATS[name]
    assert form.about
    assert "|" not in form.about  # it is a cell of README's table
    assert len(set(form.keys)) == len(form.keys)


# -- every row means a request ----------------------------------------------------------------------------------------


def test_azure_with_an_offset_and_with_or_without_decimals(file: Path) -> None:
    stamps = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00", "2024-05-10 02:00:02+01:30")
    trace = read_text(file, table([{"TIMESTAMP": s, "ContextTokens": 2162, "GeneratedTokens": 5} for s in stamps]))
    assert [r.at_s for r in trace.requests] == [0, 0.99007, 1801.99007]
    assert trace.format == "azure"


@given(st.datetimes(), st.integers(0, 9), st.sampled_from(" T"))
def test_dates_of_seven_decimals_are_read_as_any_others(moment: datetime, tick: int, between: str) -> None:
    text = f"{moment.isoformat(between, 'microseconds')}{tick}"
    day, seconds = moment.toordinal(), (moment.hour * 60 + moment.minute) * 60 + moment.second
    ns = ((day * 86400 + seconds) * 10**6 + moment.microsecond) * 1000 + tick * 100
    assert seven_decimals(text, "at") == date_time(text) == date_time(text + "00Z") == ns


@given(
    st.text("0123456789-:. TZ\u0665", min_size=27, max_size=27)
    | st.from_regex(r"[0-9]{4}(-[0-9]{2}){2} [0-9:]{8}\.[0-9]{7}", fullmatch=True)
)
def test_dates_of_seven_decimals_are_refused_as_any_others(text: str) -> None:
    told = []
    for read_date in (seven_decimals, date_time):
        try:
            told.append(str(read_date(text, "at")))
        except ValueError as e:
            told.append(str(e))
    assert told[0] == told[1]


def test_images_of_azure_are_not_sent_and_it_says_so(file: Path) -> None:
    trace = read_text(file, FIRST["azure-2025-multimodal"])
    assert [(r.tokens_in, r.tokens_out) for r in trace.requests] == [(770, 491)]
    assert any("images are not sent" in note for note in trace.notes)
    refused(file, FIRST["azure-2025-multimodal"].replace(",1,", ",-1,"), 2, "NumImages is '-1'")


BURST = {"Model": "GPT-4", "Log Type": "Conversation log"}


def burst(at: object, tokens_in: int, tokens_out: int, session: str, elapsed: object) -> dict[str, Any]:
    times = {"Timestamp": at, "Session ID": session, "Elapsed time": elapsed}
    tokens = {"Request tokens": tokens_in, "Response tokens": tokens_out, "Total tokens": tokens_in + tokens_out}
    return times | BURST | tokens


def test_burstgpt_sessions_know_the_pause_between_an_answer_and_the_next_turn(file: Path) -> None:
    rows = [
        burst("1000.0", 100, 50, "a", 7),
        burst("1003.5", 9, 1, "b", 1),
        burst("1012.0", 150, 10, "a", 3),  # 100 + 50: holds all; 5 s after the end at 1007
        burst("1014.0", 170, 10, "a", 3),  # begun before the answer's end at 1015: no pause is known
        burst("1020.0", 0, 0, "a", 0),
        burst("1030.0", 60, 10, "a", 3),  # too short to hold 180: begun anew
        burst("1040.0", 70, 10, "a", 3),
    ]
    trace = read_text(file, table(rows))
    assert [(r.session, r.turn, r.tokens_new, r.think_s, r.at_s) for r in trace.requests] == [
        ("a", 0, 0, None, 0),
        ("b", 0, 0, None, 3.5),
        ("a", 1, 0, 5.0, 12),
        ("a", 2, 10, None, 14),
        ("a/2", 0, 0, None, 30),
        ("a/2", 1, 0, 7.0, 40),
    ]
    assert {r.request_class for r in trace.requests} == {"GPT-4"}
    assert {r.model for r in trace.requests} == {""}
    assert trace.skipped == {"empty": 1}
    assert trace.facts["zero_s"] == 1000
    assert trace.facts["turns"] == "cumulative"
    assert any(note.startswith("1 conversations are opened anew, as NAME/2") for note in trace.notes)
    new = read(file, turns="new")
    assert [(r.session, r.turn, r.tokens_in) for r in new.requests if r.session[0] == "a"][-1] == ("a", 4, 630)
    assert not any("opened anew" in note for note in new.notes)


def test_totals_that_are_no_sum_are_refused(file: Path) -> None:
    text = table([burst("1", 5, 6, "a", 1) | {"Total tokens": 12}])
    refused(file, text, 2, "Total tokens is 12, expected 5 + 6")
    refused(file, FIRST["lengths"].replace("30", "31"), 2, "num_total_tokens is 31, expected 10 + 20")


def test_bailian_turns_are_linked_by_their_parents(file: Path) -> None:
    def chat(chat: int, parent: int, at: float, tokens_in: int, tokens_out: int = 16) -> dict[str, Any]:
        times = {"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "type": "text", "turn": 1}
        return times | {
            "input_length": tokens_in,
            "output_length": tokens_out,
            "hash_ids": [chat * 100 + k for k in range(-(-tokens_in // 16))],
        }

    rows = [
        chat(1, -1, 0.0, 32),
        chat(2, -1, 0.5, 10),
        chat(3, 1, 61.114, 50),  # 32 + 16 <= 50: the next turn
        chat(4, 3, 70.0, 66),
        chat(5, 3, 71.0, 66),  # another child of 3: a conversation of its own
        chat(6, 5, 80.0, 90),
        chat(7, 6, 90.0, 100),  # 106 would be needed: its history was cut
        chat(8, 999, 95.0, 20),  # its parent was before the trace
    ]
    trace = read_text(file, lines(rows))
    named = [(r.session, r.turn, r.tokens_in, r.tokens_new) for r in trace.requests]
    assert named == [
        ("1", 0, 32, 0),
        ("2", 0, 10, 0),
        ("1", 1, 50, 2),
        ("1", 2, 66, 0),
        ("5", 0, 66, 0),
        ("5", 1, 90, 8),
        ("7", 0, 100, 0),
        ("8", 0, 20, 0),
    ]
    assert {(r.block_size, r.request_class) for r in trace.requests} == {(16, "text")}
    assert len(trace.requests[2].hash_ids) == 4
    refused(file, lines([rows[0], rows[1] | {"hash_ids": [1, 2]}]), 2, "10 tokens need 1 block of 16, got 2")
    del rows[0]["parent_chat_id"]
    refused(file, lines([rows[1], rows[0]]), 2, "parent_chat_id '', expected both")


def test_bailian_rows_may_have_no_ids(file: Path) -> None:
    trace = read_text(file, FIRST["bailian"])
    assert [(r.hash_ids, r.block_size) for r in trace.requests] == [((), 0)]


def test_ragpulse_keeps_lengths_and_times_and_says_what_is_not_modelled(file: Path) -> None:
    row = {"timestamp": "82", "input_length": 3112, "output_length": 192, "session_id": "s-1"}
    ids = {"sys_prompt": [8302, 1], "passages_ids": [7, 8], "history": [3], "web_search": [], "user_input": [4]}
    trace = read_text(file, lines([row | {"hash_ids": ids}, row | {"timestamp": "93.5", "hash_ids": ids}]) + "\n\n")
    assert [(r.at_s, r.tokens_in, r.client, r.session, r.hash_ids) for r in trace.requests] == [
        (0, 3112, "s-1", "", ()),
        (11.5, 3112, "s-1", "", ()),
    ]
    assert any("not modelled, as their lengths stand in other files" in note for note in trace.notes)
    assert trace.facts["zero_s"] == 82
    refused(file, lines([row | {"hash_ids": ids}, row | {"hash_ids": {"other": []}}]), 2, "expected an object of sys_")
    refused(file, lines([row | {"hash_ids": ids}, row | {"hash_ids": {"history": ["x"]}}]), 2, "whole numbers only")
    refused(file, lines([row | {"hash_ids": ids}, row | {"timestamp": "8s", "hash_ids": ids}]), 2, "timestamp is '8s'")


def test_lengths_have_no_times(file: Path) -> None:
    trace = read_text(file, FIRST["lengths"])
    assert [(r.at_s, r.tokens_in, r.tokens_out) for r in trace.requests] == [(None, 10, 20)]
    assert trace.facts["zero_s"] is None
    assert trace.facts["instants"] == 0


# -- any table --------------------------------------------------------------------------------------------------------

MAP = {"at": "ts_col", "in": "prompt_toks", "out": "gen_toks", "session": "conv", "class": "kind", "client": "who"}
ANY = [
    {"ts_col": "1700000000.25", "prompt_toks": 374, "gen_toks": "44.0", "conv": "c1", "kind": "chat", "who": 7, "x": 1},
    {"ts_col": "1700000001", "prompt_toks": "500.0", "gen_toks": 10, "conv": "c1", "kind": "chat", "who": 7, "x": 2},
    {"ts_col": "1.7000000025e9", "prompt_toks": 12, "gen_toks": "", "conv": "", "kind": "", "who": "", "x": 3},
]


@pytest.mark.parametrize("container", ["csv", "jsonl", "parquet"])
def test_any_table_is_read_by_a_map_of_its_columns(file: Path, container: str) -> None:
    if container == "parquet":
        columns = {name: [row[name] or None for row in ANY] for name in ANY[0]}
        columns |= {"ts_col": [float(row["ts_col"]) for row in ANY], "gen_toks": [44.0, 10.0, None]}
        columns |= {"prompt_toks": [374.0, 500.0, 12.0], "who": [7.0, 7.0, None]}
        pq.write_table(pa.table(columns), file)
    else:
        file.write_text(
            table(ANY) if container == "csv" else lines([{k: v or None for k, v in r.items()} for r in ANY])
        )
    trace = read(file, map=MAP)
    assert trace.format == "plain"
    assert [(r.at_s, r.tokens_in, r.tokens_out, r.session, r.turn, r.client) for r in trace.requests] == [
        (0, 374, 44, "c1", 0, "7"),
        (0.75, 500, 10, "c1", 1, "7"),
        (2.25, 12, None, "", 0, ""),
    ]
    assert [r.request_class for r in trace.requests] == ["chat", "chat", ""]


@pytest.mark.parametrize(("unit", "at_s"), [("s", 5), ("ms", 5e-3), ("us", 5e-6), ("ns", 5e-9)])
def test_the_unit_of_any_table_is_the_users(file: Path, unit: str, at_s: float) -> None:
    rows = [{"at": 1_700_000_000_000_000_000, "in": 1, "out": 1}, {"at": 1_700_000_000_000_000_005, "in": 1, "out": 1}]
    if unit != "ns":
        rows = [row | {"at": row["at"] - 1_700_000_000_000_000_000} for row in rows]
    assert [r.at_s for r in read_text(file, table(rows), unit=unit).requests] == [0, at_s]


def test_times_of_any_table_may_be_dates(file: Path) -> None:
    rows = [{"at": "2024-02-29T23:59:59Z", "in": 1, "out": 1}, {"at": "2024-03-01 00:00:00.5", "in": 1, "out": 1}]
    assert [r.at_s for r in read_text(file, table(rows), unit="date-time").requests] == [0, 1.5]
    refused(file, table(rows), 2, "at is '2024-02-29T23:59:59Z', expected a number, 0 or more")
    refused(file, table([rows[0] | {"at": "0000-00-00 00:00:00"}]), 2, "at is '0000-00-00 00:00:00'", unit="date-time")


def test_a_map_that_does_not_fit_is_refused_before_any_row(file: Path) -> None:
    refused(file, table(ANY), 1, "no column 'when'; there are: ts_col, ", map=MAP | {"at": "when"})
    refused(file, table(ANY), 1, "expected in or prompt, and any of at, in, ", map={"at": "ts_col"})
    refused(file, table(ANY), 1, "expected in or prompt", map=MAP | {"color": "x"})
    refused(file, table(ANY), 1, "format azure and a map", map=MAP, format="azure")
    refused(file, lines([{"n": 1}, {"m": 2}]), 2, "in is missing", map={"in": "n"})


def test_prompts_of_any_table_are_sent_as_they_stand(file: Path) -> None:
    trace = read_text(
        file, table([{"text": "a, b\nc", "n": 5}, {"text": "d", "n": ""}]), map={"prompt": "text", "in": "n"}
    )
    assert [(r.prompt, r.tokens_in, r.tokens_out) for r in trace.requests] == [("a, b\nc", 5, None), ("d", 0, None)]


# -- convert(read(x)) read again is the same requests -----------------------------------------------------------------

TOKENS = st.integers(0, 3000)
SOME = st.integers(1, 3000)
NAMES = st.sampled_from(["", "a", "b", "c", "0012", "é😀"])
SECONDS = st.integers(0, 10**7).map(lambda ms: ms / 1000)
DATES = st.datetimes().map(lambda d: d.replace(year=2023 + d.year % 5, day=min(d.day, 28)).isoformat(" "))
JSON = st.dictionaries(
    st.sampled_from("abc"), st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9), max_size=2
)


def blocks(size: int) -> st.SearchStrategy[tuple[int, list[int]]]:
    """A length and its ids: full blocks shared with others, the last one its own."""

    @st.composite
    def drawn(draw: Callable[[st.SearchStrategy[int]], int]) -> tuple[int, list[int]]:
        tokens = draw(SOME)
        full, rest = divmod(tokens, size)
        ids = [draw(st.integers(0, 3)) + 10 * k for k in range(full)]
        return tokens, ids + ([10**6 * rest + 2**40] if rest else [])

    return drawn()


def rows_of(**columns: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=8)


def _with_blocks(row: dict[str, Any]) -> dict[str, Any]:
    tokens, ids = row.pop("blocks")
    return row | ({"input_length": tokens, "hash_ids": ids} if ids else {"input_length": tokens})


def _sum(total: str, *parts: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: [row | {total: sum(row[part] for part in parts)} for row in rows]


def _own(row: dict[str, Any]) -> dict[str, Any]:
    text = row.pop("text")
    return row | text if row["session_id"] else row | text | {"timestamp": row["timestamp"] or 0}


OWN_ROW = rows_of(
    timestamp=SECONDS,
    output_length=TOKENS | st.none(),
    session_id=NAMES,
    think_s=st.none() | SECONDS,
    client=NAMES,
    priority=st.integers(-5, 5),
    extra=JSON,
    text=st.fixed_dictionaries({"input_length": SOME})
    | st.fixed_dictionaries({"prompt": st.text(max_size=5)}, optional={"input_length": SOME})
    | st.fixed_dictionaries({"body": JSON}, optional={"input_length": SOME})
    | st.fixed_dictionaries({"messages": st.lists(JSON, max_size=2)})
    | st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4)}),
).map(lambda rows: [_own(row) for row in rows])
WRITTEN: dict[str, st.SearchStrategy[str]] = {
    "llm-bench": st.builds(lambda rows: lines([{"llm_bench_trace": 1}, *rows]), OWN_ROW),
    "azure": rows_of(TIMESTAMP=DATES, ContextTokens=TOKENS, GeneratedTokens=TOKENS).map(table),
    "azure-2025-multimodal": rows_of(
        TIMESTAMP=DATES, NumImages=TOKENS, ContextTokens=TOKENS, GeneratedTokens=TOKENS
    ).map(table),
    "burstgpt": rows_of(
        **{"Timestamp": SECONDS, "Session ID": NAMES, "Elapsed time": st.integers(0, 60), "Model": NAMES},
        **{"Request tokens": TOKENS, "Response tokens": TOKENS},
    )
    .map(_sum("Total tokens", "Request tokens", "Response tokens"))
    .map(table),
    "mooncake": rows_of(
        timestamp=st.integers(0, 10**6), output_length=TOKENS, blocks=blocks(512), session_id=NAMES
    ).map(lambda rows: lines([_with_blocks(row) for row in rows])),
    "bailian": rows_of(
        chat_id=st.integers(0, 9),
        parent_chat_id=st.integers(-1, 9),
        timestamp=SECONDS,
        output_length=TOKENS,
        type=NAMES,
        blocks=blocks(16),
    ).map(lambda rows: lines([_with_blocks(row) for row in rows])),
    "ragpulse": rows_of(
        timestamp=SECONDS.map(str),
        input_length=TOKENS,
        output_length=TOKENS,
        hash_ids=st.just({"sys_prompt": [1]}),
        session_id=NAMES,
    ).map(lines),
    "lengths": rows_of(num_prefill_tokens=TOKENS, num_decode_tokens=TOKENS).map(table),
    "plain": rows_of(**{"at": SECONDS, "in": TOKENS, "out": TOKENS, "session": NAMES, "class": NAMES}).map(table),
}


def nameless(requests: list[Request]) -> list[Request]:
    return [replace(r, line=0) for r in requests]


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
@settings(max_examples=60)
def test_what_is_read_and_written_reads_the_same(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("t")
    turns = data.draw(st.sampled_from([None, "cumulative", "new"]))
    try:
        trace = read_text(folder / "t", data.draw(WRITTEN[name]), turns=turns, skip_bad=9)
    except BenchError as e:
        if not any(words in str(e) for words in ("no requests in it", "years after", "no timestamp", "say --turns")):
            raise
        return
    assert trace.format == name
    write(folder / "again.jsonl", trace)
    again = read(folder / "again.jsonl")
    assert nameless(again.requests) == nameless(trace.requests)
    assert trace.facts["rows"] == len(trace.requests) + sum(trace.skipped.values())
    assert all(r.tokens_new <= r.tokens_in and r.tokens_in >= 0 and (r.tokens_out or 1) > 0 for r in trace.requests)


# -- whatever a file holds ---------------------------------------------------------------------------------------------

ODD = st.sampled_from(
    [
        *("", "x", "-1", "true", "null", "NaN", "Infinity", "1e400", "-1e-400", "1e99999999999999999999", "0000-00-00"),
        *(
            "9" * 5000,
            str(2**63),
            str(2**64 - 1),
            "\x00",
            "\ud83d",
            "\\ud800",
            '"',
            "[",
            "{",
            "}",
            "[[[[",
            "{}",
            "\n",
            ",",
        ),
        *(
            "[" * 1500 + "]" * 1500,
            '{"a":' * 1500,
            "9999-12-31 23:59:59",
            "0001-01-01 00:00:00",
            "\u0665",
            "1.5",
            "[-1]",
        ),
    ]
)


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=70)
def test_whatever_is_done_to_a_file_it_is_read_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    text = data.draw(WRITTEN[name]) if name in WRITTEN else FIRST[name]
    for _ in range(data.draw(st.integers(1, 3))):
        start, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 6))
        text = text[:start] + data.draw(ODD | st.text(max_size=3)) + text[start + length :]
    path = tmp_path_factory.mktemp("t") / "t"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    asked = data.draw(st.sampled_from([None, name]))
    try:
        trace = read(path, format=asked, skip_bad=data.draw(st.sampled_from([0, 100])))
    except BenchError:  # any other exception fails the test
        return
    for r in trace.requests:
        assert 0 <= r.tokens_new <= r.tokens_in
        assert r.tokens_out is None or r.tokens_out > 0
        assert r.at_s is None or (math.isfinite(r.at_s) and r.at_s >= 0)
    json.dumps([dict(trace.facts), trace.notes])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "value", [True, -1, 2**63, 2.5, "NaN", None, [], {"a": 1}, "\x00", 10**400, "x" * 200], ids=repr
)
def test_no_value_of_any_key_ends_in_a_traceback(name: str, value: object, file: Path) -> None:
    text = FIRST[name]
    if text[0] not in "{[":
        return
    first = json.loads(text)
    first = first[0] if isinstance(first, list) else first
    for key in FORMATS[name].keys:
        with contextlib.suppress(BenchError):
            read_text(file, lines([first, first | {key: value}]), format=name)
