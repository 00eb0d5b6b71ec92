"""A trace file's bytes as items, (line, values by name), one after the other: CSV, JSONL, a JSON document, Parquet.

What a file is, its content says; how it is compressed, its suffix. A line that cannot be read is an item too, its
ValueError, so that the reader decides how many of them it bears.
"""

import bz2
import csv
import gzip
import io
import json
import os
import re
import secrets
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal, InvalidOperation
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from llm_bench.errors import BenchError
from llm_bench.fields import Values, shortened

Item = tuple[int, Values | ValueError]  # (line of the file, item of a JSON list or row of a Parquet file, from 1; what)
LARGEST_DOCUMENT_BYTES = 2 * 2**30  # a JSON document is parsed from memory, where it takes several times its size
_BOM = b"\xef\xbb\xbf"
_ZST_BYTES = 2**10  # fed at once: a block of three bytes may stand for 128 KiB, and all that comes out is held
_BATCH_ROWS = 8192  # of a Parquet file that are in memory at once
_LONGEST_INT = 40  # digits; more are no count and no time, and int() itself refuses over 4,300
MOST_CELL = 100_000_000  # characters of one cell of CSV: a prompt of the longest context, and not a file of one quote


class Items(NamedTuple):
    """A file being read: items are taken from it one by one, and no more of it is read than that needs."""

    number: int  # of the first item, or of the line of column names
    first: Values  # the first item's values; of a table its column names, each None
    table: bool  # the names stand apart from the items, and are the same for all of them
    items: Iterator[Item]


# -- bytes ------------------------------------------------------------------------------------------------------------


def open_bytes(path: Path, mode: str) -> IO[bytes]:
    """A binary file, (de)compressed as its suffix says: .gz, .bz2, .zst (with the extra `zstd`)."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, mode))
    if suffix == ".bz2":
        return cast(IO[bytes], bz2.open(path, mode))
    if suffix == ".zst":
        return _open_zst(path, mode)
    return cast(IO[bytes], path.open(mode))


def _open_zst(path: Path, mode: str) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        raise BenchError(f"{path}: .zst needs zstandard: pip install '.[zstd]'") from None
    if mode == "wb":
        return cast(IO[bytes], zstandard.open(path, mode))
    return io.BufferedReader(_Zst(path.open("rb")), 2**17)


class _Zst(io.RawIOBase):
    """Frames of zstd, one behind another. zstandard's own reader takes a torn frame for the end of the file."""

    def __init__(self, file: IO[bytes]) -> None:
        import zstandard

        self._new, self._error = zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._file = file
        self._frame: Any = None  # None: between two frames
        self._left = b""  # what lies behind the frame that has ended
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self._file.read(_ZST_BYTES)
            self._left = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("the file ends in the middle of a zstd frame")
                return 0
            self._frame = self._frame or self._new()
            try:
                self._ready = memoryview(self._frame.decompress(data))
            except self._error as e:
                raise OSError(str(e)) from None
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def new_file(path: Path, option: str = "-o") -> Iterator[Path]:
    """A name beside `path` to write to, of the same suffix, which is `path` from the end of the `with` on.

    Whatever ends it earlier (an error, Ctrl-C, a full disk) leaves nothing; a killed process leaves the other name,
    which no later one meets. Nothing is ever overwritten, whoever made it and when. Raises BenchError naming `option`.
    """
    part = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.part{path.suffix[:50]}")
    try:
        yield part
        _named(part, path)
    except FileExistsError:
        raise BenchError(f"{option} {path}: it is there already, and nothing is overwritten; give a new name") from None
    except OSError as e:
        raise BenchError(f"{option} {path}: cannot be written: {e.strerror or e}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _named(part: Path, path: Path) -> None:
    """A rename would replace a file that came meanwhile; a link does not."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        path.open("xb").close()
        part.replace(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as e:
        raise BenchError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _text(raw: bytes, number: int) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as e:
        raise _no_text(e) from None


def _no_text(error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"byte {error.start} of the line is not UTF-8")


# -- which container --------------------------------------------------------------------------------------------------


_NO_TEXT = {  # how a file begins -> what it is, and what would be right
    b"\x1f\x8b": "gzip's bytes, expected a name that ends in .gz",
    b"BZh": "bzip2's bytes, expected a name that ends in .bz2",
    b"\x28\xb5\x2f\xfd": "zstd's bytes, expected a name that ends in .zst",
    b"PK\x03\x04": "a zip archive (or a spreadsheet), expected the file inside it, or a table saved as CSV",
    b"\xff\xfe": "text in UTF-16, expected UTF-8",
    b"\xfe\xff": "text in UTF-16, expected UTF-8",
}


@contextmanager
def reading(path: Path) -> Iterator[Items]:
    """The items of a file, which is closed at the end of the `with`.

    Raises BenchError where the file is missing, empty or torn, or where its first line is none: names, or an item.
    """
    with _readable(path):
        file = open_bytes(path, "rb")
    with file:
        with _readable(path):
            start: bytes = file.peek(64)  # type: ignore[attr-defined]
        for begins, what in _NO_TEXT.items():
            if start.startswith(begins):
                raise BenchError(f"{path}: {what}")
        found = _parquet(path, file) if start[:4] == b"PAR1" else _json_or_csv(path, file, start)
        if found is None:
            raise BenchError(f"{path}: empty, expected a trace")
        yield found


def _json_or_csv(path: Path, file: IO[bytes], start: bytes) -> Items | None:
    if start.removeprefix(_BOM).lstrip()[:1] == b"[":
        return _ahead(path, _list(path, _document(path, file, b"")))
    lines = enumerate(_raw_lines(path, file), 1)
    number, raw = next(((n, line) for n, line in lines if line.removeprefix(_BOM).strip()), (1, b""))
    if not raw:
        return None
    try:
        text = _text(raw, number)
        if not text.lstrip().startswith("{"):
            return _csv(number, text, lines)
        try:
            first = json_object(text.strip())
        except _UnfinishedError:  # one object over several lines, or torn
            first = json_object(_document(path, file, raw).strip())
            return Items(number, first, False, iter([(number, first)]))
    except ValueError as e:
        raise BenchError(f"{path}:{number}: {e}") from None
    return Items(number, first, False, chain([(number, first)], _jsonl(lines)))


def _ahead(path: Path, items: Iterator[Item]) -> Items | None:
    number, first = next(items, (1, None))
    if isinstance(first, ValueError):
        raise BenchError(f"{path}:{number}: {first}")
    return None if first is None else Items(number, first, False, chain([(number, first)], items))


def _raw_lines(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    with _readable(path):
        yield from file


def _document(path: Path, file: IO[bytes], start: bytes) -> str:
    with _readable(path):
        data = start + file.read(LARGEST_DOCUMENT_BYTES + 1)
    if len(data) > LARGEST_DOCUMENT_BYTES:
        right = "JSONL (an object a line), which is read line by line"
        raise BenchError(f"{path}: one JSON document of over {LARGEST_DOCUMENT_BYTES:,} bytes, expected {right}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BenchError(f"{path}:{data.count(10, 0, e.start) + 1}: byte {e.start} of the file is not UTF-8") from None


# -- JSON -------------------------------------------------------------------------------------------------------------


class _UnfinishedError(ValueError):
    """JSON that ends too early."""


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number, expected a number or null")


def _decimal(text: str) -> Decimal:
    """All its digits: as a float, seconds since 1970 are good to 0.2 µs only."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text[:80]} is larger or smaller than any number") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shortened([twice])[0]!r} is there twice; keep one of them")
    return values


_decoder = json.JSONDecoder(parse_float=_decimal, parse_constant=_no_number, object_pairs_hook=_unique)
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_BLANK = re.compile(r"[ \t\r\n]*")


def json_object(text: str) -> Values:
    """The values of one JSON object; numbers with a fraction are Decimals. ValueError says what is wrong with it."""
    values, _ = _value(text, 0, whole=True)
    if not isinstance(values, dict):
        raise ValueError(f"a JSON {type(values).__name__}, expected an object")
    return values


def _value(text: str, start: int, *, whole: bool) -> tuple[object, int]:
    """The value that begins at `start`, and where it ends; `whole`: nothing may follow it."""
    try:
        value, end = _decoder.raw_decode(text, start)
        if whole and end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        if _HALF_PAIR.search(text, start, end):
            json.dumps(value, ensure_ascii=False, default=str).encode()
    except json.JSONDecodeError as e:
        kind = ValueError if text[e.pos :].strip() else _UnfinishedError
        where = f"line {e.lineno}, " if e.lineno > 1 else ""
        raise kind(f"not JSON: {e.msg} at {where}column {e.colno}") from None
    except UnicodeEncodeError:
        raise ValueError("not JSON: it has half a surrogate pair, which is not text") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError as e:
        if "int_max_str_digits" not in str(e):
            raise
        raise ValueError(
            f"a whole number of over {sys.get_int_max_str_digits()} digits, which is neither a count nor a time"
        ) from None
    return value, end


def _jsonl(lines: Iterator[tuple[int, bytes]]) -> Iterator[Item]:
    for number, raw in lines:
        try:
            text = _text(raw, number).strip()
            if text:
                yield number, json_object(text)
        except ValueError as e:
            yield number, e


def _list(path: Path, text: str) -> Iterator[Item]:
    """The objects of one JSON list, by their places from 1. Past an item that is no JSON nothing can be read."""
    start, number = _next(text, text.index("[") + 1), 1
    if text[start : start + 1] == "]":
        return
    while True:
        try:
            value, start = _value(text, _next(text, start), whole=False)
            start = _next(text, start)
            last = text[start : start + 1] == "]"
            if text[start + 1 :].strip() if last else text[start : start + 1] != ",":
                raise ValueError(f"not JSON: {text[start : start + 20]!r} follows it, expected a comma or one ]")
        except ValueError as e:
            raise BenchError(f"{path}:{number}: {e}") from None
        wrong = ValueError(f"a JSON {type(value).__name__}, expected an object")
        yield number, value if isinstance(value, dict) else wrong
        if last:
            return
        number, start = number + 1, start + 1


def _next(text: str, start: int) -> int:
    blank = _BLANK.match(text, start)
    return blank.end() if blank else start


# -- tables -----------------------------------------------------------------------------------------------------------


def _csv(number: int, header: str, lines: Iterator[tuple[int, bytes]]) -> Items:
    """Columns by name; a quoted cell may hold line ends. Tabs or semicolons part them where no comma could."""
    others = [d for d in ";\t" if d in header]
    delimiter = others[0] if len(others) == 1 and "," not in header else ","
    csv.field_size_limit(MOST_CELL)
    try:
        cells = next(csv.reader([header], delimiter=delimiter, skipinitialspace=True, strict=True))
    except csv.Error as e:
        raise ValueError(_no_csv(e)) from None
    names = _unique([(name.strip(), None) for name in cells])
    return Items(number, names, True, _csv_rows(list(names), delimiter, number, lines))


def _csv_rows(names: list[str], delimiter: str, before: int, lines: Iterator[tuple[int, bytes]]) -> Iterator[Item]:
    undecoded: list[Item] = []

    def texts() -> Iterator[str]:
        for number, raw in lines:
            try:
                yield raw.decode()
            except UnicodeDecodeError as e:
                undecoded.append((number, _no_text(e)))
                yield "\n"

    reader = csv.reader(texts(), delimiter=delimiter, skipinitialspace=True, strict=True)
    columns, ended = len(names), before  # a row may be of several lines: its number is that of the first
    for cells in _each_row(reader):
        number, ended = ended + 1, before + reader.line_num
        if isinstance(cells, ValueError):
            yield number, cells
        elif undecoded:
            yield from undecoded
            undecoded.clear()
        elif len(cells) == columns:
            yield number, dict(zip(names, map(_cell, cells), strict=True))
        elif "".join(cells).strip():
            yield number, ValueError(f"{len(cells)} cells, expected {columns}: {', '.join(shortened(names))}")


def _each_row(reader: Iterator[list[str]]) -> Iterator[list[str] | ValueError]:
    """The rows; in place of one that the reader refuses, what is wrong with it. The reader goes on after it."""
    while True:
        try:
            yield from reader
            return
        except csv.Error as e:
            yield ValueError(_no_csv(e))


_CSV_FAULTS = {  # what Python's reader says -> what it means to who wrote the file
    "new-line character": "it contains a carriage return, expected lines that end in LF or in CR LF",
    "field larger": f"a cell of over {MOST_CELL:,} characters",
    "unexpected end of data": "the file ends inside a quoted cell",
    "line contains NUL": "it contains a byte of value 0",
}


def _no_csv(error: csv.Error) -> str:
    said = str(error)
    return f"not a line of CSV: {next((ours for theirs, ours in _CSV_FAULTS.items() if said.startswith(theirs)), said)}"


def _cell(text: str) -> int | str | None:
    """A whole number as such; text that only looks like one (007, digits of other scripts) stays text; "" is None."""
    text = text.strip()
    if text.isdigit() and text.isascii() and (text[0] != "0" or text == "0") and len(text) < _LONGEST_INT:
        return int(text)
    return text or None


def _parquet(path: Path, file: IO[bytes]) -> Items:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(file)
        names = _unique([(name, None) for name in table.schema_arrow.names])
    except (pa.ArrowException, OSError, ValueError) as e:
        raise BenchError(f"{path}: cannot be read as Parquet: {e}") from None
    return Items(1, names, True, _parquet_rows(path, table))


def _parquet_rows(path: Path, table: Any) -> Iterator[Item]:
    import pyarrow as pa

    number = 0
    try:
        for batch in table.iter_batches(_BATCH_ROWS):
            columns = [_plain_times(column) for column in batch.columns]
            for row in pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowException, OSError, ValueError, OverflowError) as e:
        raise BenchError(f"{path}: cannot be read as Parquet after row {number}: {e}") from None


def _plain_times(column: Any) -> Any:
    """Time stamps as the text of their date and time in UTC, nanoseconds kept: a datetime would lose them."""
    import pyarrow as pa

    if not pa.types.is_timestamp(column.type):
        return column
    return column.cast(pa.timestamp(column.type.unit)).cast(pa.string())
