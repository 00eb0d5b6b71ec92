"""Containers: whatever holds the rows, the same items come out, each with its line, and no more is read than needed."""

import bz2
import csv
import gzip
import io
import json
import sys
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import containers
from llm_bench.containers import Item, reading
from llm_bench.errors import BenchError

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y, z"}, {"a": 3, "b": "é"}]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}


def taken(path: Path) -> list[Item]:
    with reading(path) as file:
        return list(file.items)


def values(path: Path) -> list[Any]:
    return [item for _, item in taken(path)]


def told(path: Path) -> list[tuple[int, str]]:
    """Each item that is an error, in words."""
    return [(number, str(item)) for number, item in taken(path) if isinstance(item, ValueError)]


def refused(path: Path, words: str) -> None:
    with pytest.raises(BenchError) as e:
        taken(path)
    assert str(path) in str(e.value)
    assert words in str(e.value)


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",", newline: str = "\n") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), delimiter=delimiter, lineterminator=newline)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), data, row_group_size=2)
    return data.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]]], bytes]] = {
    "csv": as_csv,
    "csv, CRLF, BOM": lambda rows: b"\xef\xbb\xbf" + as_csv(rows, newline="\r\n"),
    "csv, no end": lambda rows: as_csv(rows).rstrip(b"\n"),
    "semicolons": lambda rows: as_csv(rows, delimiter=";"),
    "tabs": lambda rows: as_csv(rows, delimiter="\t"),
    "jsonl": as_jsonl,
    "jsonl, BOM, blank lines, no end": lambda rows: (
        b"\xef\xbb\xbf\n\r\n" + as_jsonl(rows).replace(b"\n", b"\r\n\n")[:-3]
    ),
    "list": lambda rows: json.dumps(rows).encode(),
    "list over lines": lambda rows: b"\xef\xbb\xbf\n " + json.dumps(rows, indent=1).encode() + b"\n",
    "parquet": as_parquet,
}


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "parquet"])
def test_the_same_rows_come_out_of_every_container(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(COMPRESS[suffix](WRITERS[name](ROWS)))
    assert values(path) == ROWS


def test_parquet_rows_are_numbered_from_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.anything"
    path.write_bytes(as_parquet(ROWS))
    assert taken(path) == [(1, ROWS[0]), (2, ROWS[1]), (3, ROWS[2])]


@given(st.lists(st.fixed_dictionaries({"a": st.integers(1, 10**12), "b": st.text(min_size=1, max_size=8)}), min_size=1))
def test_any_text_survives_every_container(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("t") / "rows"
    for name in ("jsonl", "list", "list over lines", "parquet"):
        path.write_bytes(WRITERS[name](rows))
        assert values(path) == rows, name


# -- CSV --------------------------------------------------------------------------------------------------------------


def test_cells_are_whole_numbers_text_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,c,d,e,f\n 7, x ,,007,0,\u0665\n12,1.5,-3,1e3,9" + "9" * 50 + ',"4"\n')
    assert values(path) == [
        {"a": 7, "b": "x", "c": None, "d": "007", "e": 0, "f": "\u0665"},
        {"a": 12, "b": "1.5", "c": "-3", "d": "1e3", "e": "9" + "9" * 50, "f": 4},
    ]


def test_a_quoted_cell_may_hold_lines_and_the_row_is_where_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a,b\n1,"one\ntwo"\n\n2,"say ""hi"""\n3\n')
    assert taken(path)[:2] == [(2, {"a": 1, "b": "one\ntwo"}), (5, {"a": 2, "b": 'say "hi"'})]
    assert told(path) == [(6, "1 cells, expected 2: a, b")]


def test_a_row_of_csv_that_is_none_is_told_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'a,b\n1,"x"y\n2,\xff\n3,c\n4,"no end\n5,d\n')
    assert [(n, item) for n, item in taken(path) if not isinstance(item, ValueError)] == [(4, {"a": 3, "b": "c"})]
    assert [n for n, _ in told(path)] == [2, 3, 5]
    assert "not UTF-8" in told(path)[1][1]


def test_a_comma_in_the_header_parts_it_whatever_else_stands_there(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a;x,b\n1,2\n")
    assert values(path) == [{"a;x": 1, "b": 2}]
    path.write_text("a;x\tb\n1,2\n")
    assert told(path) == [(2, "2 cells, expected 1: a;x\tb")]  # two ways to part it: none is guessed


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\n\na,b, a\n1,2,3\n")
    refused(path, ":3: the key 'a' is there twice")
    path.write_bytes(as_parquet(ROWS))
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(table, path)
    refused(path, "the key 'a' is there twice")


# -- JSON -------------------------------------------------------------------------------------------------------------


def test_one_object_over_several_lines_is_one_item(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("\n" + json.dumps({"spans": ROWS, "id": 0.5}, indent=2) + "\n\n")
    assert taken(path) == [(2, {"spans": ROWS, "id": Decimal("0.5")})]


def test_numbers_with_a_fraction_keep_all_their_digits(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"t": 1700158546.123456789}\n')
    assert values(path) == [{"t": Decimal("1700158546.123456789")}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1', "not JSON: "),
        ("[1", "expected a comma or one ]"),
        ("[1] 2", "expected a comma or one ]"),
        ("[1 2]", "follows it"),
        ("[,]", "not JSON: Expecting value"),
        ('[{"a": 1}, {"a": 1, "a": 2}]', ":2: the key 'a' is there twice"),
        ('[{"a": 1}, {"a": NaN}]', ":2: NaN is not a JSON number"),
        ('{"a": 1,\n "b": 2\n "c": 3}', "line 3, column 2"),
        ('{"a": 1,\n "b": 2} {"a": 2}', "not JSON: Extra data"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": 1e99999999999999999999}', "larger or smaller than any number"),
        ('{"a": ' + "9" * 5000 + "}", "4300"),
        ('{"a": "\\ud800"}', "half a surrogate pair"),
        ('["\\udfff"]', "half a surrogate pair"),
        ('{"a": \x00}', "not JSON: "),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_json_is_said_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    refused(path, words)
    with pytest.raises(BenchError, match=r"t\.json:\d+: "):
        taken(path)


def test_whole_surrogate_pairs_are_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": "\\ud83d\\ude00"}\n')
    assert values(path) == [{"a": "😀"}]


def test_what_is_no_object_is_told_and_the_next_item_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n[1]\n{"a"\n7\n{"a": 2}\n')
    assert [n for n, _ in told(path)] == [2, 3, 4]
    assert taken(path)[-1] == (5, {"a": 2})
    path.write_text('[{"a": 1}, 7, {"a": 2}]')
    assert told(path) == [(2, "a JSON int, expected an object")]
    assert taken(path)[-1] == (3, {"a": 2})


def test_a_document_too_large_for_memory_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(ROWS))
    monkeypatch.setattr(containers, "LARGEST_DOCUMENT_BYTES", path.stat().st_size)
    assert values(path) == ROWS
    monkeypatch.setattr(containers, "LARGEST_DOCUMENT_BYTES", path.stat().st_size - 1)
    refused(path, "expected JSONL")


# -- Parquet ----------------------------------------------------------------------------------------------------------


def test_time_stamps_of_parquet_keep_their_nanoseconds_and_are_utc(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    ns = 1_700_158_546_680_590_001
    table = pa.table(
        {
            "plain": pa.array([ns, None], pa.timestamp("ns")),
            "zone": pa.array([ns // 1000, None], pa.timestamp("us", tz="Asia/Tokyo")),
        }
    )
    pq.write_table(table, path)
    shown = datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S")
    assert values(path) == [
        {"plain": f"{shown}.680590001", "zone": f"{shown}.680590"},
        {"plain": None, "zone": None},
    ]


def test_parquet_that_is_torn_or_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    good = as_parquet(ROWS * 20)
    for data in (good[:-1], good[:100], b"PAR1", b"PAR1" * 9, good[: len(good) // 2] + b"PAR1", good[:4] + good[-8:]):
        path.write_bytes(data)
        refused(path, "cannot be read as Parquet")


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_what_was_compressed_and_is_torn_is_refused(tmp_path: Path, suffix: str) -> None:
    data = COMPRESS[suffix](as_jsonl([{"a": i, "b": f"{i * 7919 % 1000}"} for i in range(2000)]))
    path = tmp_path / f"t.jsonl{suffix}"
    for torn in (
        data[:-40],
        data[: len(data) // 2],
        data[:30] + b"\xff" * 30 + data[60:],
        b"nothing of the kind",
        data[:5],
    ):
        path.write_bytes(torn)
        refused(path, "cannot be read: ")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_compressed_bytes_under_another_name_are_told_their_suffix(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(COMPRESS[suffix](as_jsonl(ROWS)))
    refused(path, f"expected a name that ends in {suffix}")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"a": 1}'.encode("utf-16"), "text in UTF-16, expected UTF-8"),
        (b"\xfe\xff\x00a", "text in UTF-16, expected UTF-8"),
        (b"PK\x03\x04rest", "a zip archive (or a spreadsheet)"),
    ],
)
def test_bytes_that_are_no_text_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(data)
    refused(path, words)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_members_that_stand_one_behind_another_are_one_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.jsonl{suffix.upper()}"
    path.write_bytes(b"".join(COMPRESS[suffix](as_jsonl([row])) for row in ROWS))
    assert values(path) == ROWS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_what_open_bytes_writes_it_reads(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.jsonl{suffix}"
    with containers.open_bytes(path, "wb") as file:
        file.write(as_jsonl(ROWS[:1]))
        file.write(as_jsonl(ROWS[1:]))
    assert values(path) == ROWS


def test_zst_without_its_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refused(tmp_path / "t.jsonl.zst", "pip install '.[zstd]'")


def test_nothing_and_no_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "t"
    refused(path, "No such file")
    refused(tmp_path, "Is a directory")
    for nothing in (b"", b"\n\n", b"\xef\xbb\xbf \r\n", b"[]", b" [ ] \n"):
        path.write_bytes(nothing)
        refused(path, "empty, expected a trace")


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["csv", "jsonl"])
def test_a_file_larger_than_memory_is_read_as_far_as_is_asked(tmp_path: Path, name: str, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    rows = [{"a": i, "b": "a cell of some length"} for i in range(30_000)]
    path.write_bytes(COMPRESS[suffix](WRITERS[name](rows)))
    del rows
    tracemalloc.start()
    try:
        with reading(path) as file:
            number, last = 0, None
            for _ in range(10):
                number, last = next(file.items)
            few = tracemalloc.get_traced_memory()[1]
            for number, last in file.items:  # noqa: B007 (the last one is looked at)
                pass
            all_of_it = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert last == {"a": 29_999, "b": "a cell of some length"}
    assert number == 30_000 + (name == "csv")
    assert few < 1_000_000
    assert all_of_it < 2_000_000  # the file is 0.9 to 1.3 MB, its items 6


def test_a_parquet_file_is_read_by_batches(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": list(range(50_000))}), path)
    with reading(path) as file:
        assert (file.number, file.first, file.table) == (1, {"a": None}, True)
        assert next(file.items) == (1, {"a": 0})
    assert len(taken(path)) == 50_000


@given(
    st.binary(max_size=60),
    st.sampled_from([b"", b"{", b"[", b"[{}", b'{"a":', b"PAR1", b"a,b\n", b'a\n"', b"\xef\xbb\xbf"]),
)
def test_any_bytes_are_items_or_an_error_in_words(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, start: bytes
) -> None:
    folder = tmp_path_factory.mktemp("t")
    for suffix in COMPRESS:
        path = folder / f"t{suffix}"
        for content in (start + data, COMPRESS[suffix](start + data)):
            path.write_bytes(content)
            try:
                numbers = [number for number, _ in taken(path)]
            except BenchError:  # any other exception fails the test
                continue
            assert numbers == sorted(numbers)
            assert all(number > 0 for number in numbers)


# -- a new file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", *(f".jsonl{s}" for s in COMPRESS)])
def test_a_new_file_has_its_name_only_when_it_is_whole(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t{suffix}"
    with containers.new_file(path) as part, containers.open_bytes(part, "wb") as file:
        file.write(b"{}\n")
        assert not path.exists()
    with containers.open_bytes(path, "rb") as file:
        assert file.read() == b"{}\n"
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def half(path: Path, option: str = "-o", *, then: Callable[[], None]) -> None:
    with containers.new_file(path, option) as part:
        part.write_bytes(b"half")
        then()


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), ValueError("no row"), OSError(28, "No space left on device")])
def test_whatever_ends_a_new_file_early_leaves_nothing(tmp_path: Path, reason: BaseException) -> None:
    def fails() -> None:
        raise reason

    right = BenchError if isinstance(reason, OSError) else type(reason)
    with pytest.raises(right) as e:
        half(tmp_path / "t.jsonl", then=fails)
    assert list(tmp_path.iterdir()) == []
    if right is BenchError:
        assert str(e.value) == f"-o {tmp_path / 't.jsonl'}: cannot be written: No space left on device"


def test_a_new_file_never_replaces_one_that_came_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "t.png"
    with pytest.raises(BenchError, match=r"--plot .*t\.png: it is there already"):
        half(path, "--plot", then=lambda: path.write_bytes(b"theirs") and None)
    assert path.read_bytes() == b"theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["t.png"]


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    writing = containers.new_file(tmp_path / "t.jsonl")
    writing.__enter__().write_bytes(b"half")  # killed here
    with containers.new_file(tmp_path / "t.jsonl") as part:
        part.write_bytes(b"whole")
    assert (tmp_path / "t.jsonl").read_bytes() == b"whole"


# -- cells -------------------------------------------------------------------------------------------------------------


def test_spaces_around_names_and_cells_are_no_part_of_them(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('a , b, "c"\n 1 ,x , "y, z"\n')
    assert values(path) == [{"a": 1, "b": "x", "c": "y, z"}]


def test_a_long_prompt_is_a_cell_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"a,b\n1,{'word ' * 60_000}x\n")
    assert values(path) == [{"a": 1, "b": "word " * 60_000 + "x"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\r1,2\r3,4\r", "it contains a carriage return, expected lines that end in LF or in CR LF"),
        ('a,b\n1,"2\n', "the file ends inside a quoted cell"),
        ('{"a": ' + "9" * 5000 + "}", "a whole number of over 4300 digits"),
    ],
)
def test_faults_are_told_in_words_of_the_file_and_not_of_python(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(text.encode())
    try:
        said = [str(item) for _, item in taken(path) if isinstance(item, ValueError)]
    except BenchError as e:
        said = [str(e)]
    assert words in said[0]
    assert not any(word in said[0] for word in ("universal", "newline", "sys.", "_csv"))
