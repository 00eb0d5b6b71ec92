"""sheet: requests as columns, the same figures as of Requests."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench import doctor, sheet, workload
from llm_bench.errors import BenchError
from llm_bench.request import Request
from llm_bench.trace import read, read_sheet

SHARED = Path(__file__).parents[2] / "shared/traces"

REQUESTS = st.lists(
    st.builds(
        Request,
        tokens_in=st.integers(0, 10**7),
        tokens_out=st.none() | st.integers(1, 10**7),
        at_s=st.none() | st.floats(0, 1e6),
        hash_ids=st.lists(st.integers(-(2**70), 2**70), max_size=4).map(tuple),
        block_size=st.integers(0, 2**40),
        session=st.sampled_from(["", "a", "b"]),
        turn=st.integers(0, 9),
        tokens_new=st.integers(0, 2**33),
        think_s=st.none() | st.floats(0, 1e6),
        request_class=st.sampled_from(["", "x", "y"]),
        client=st.sampled_from(["", "u"]),
        model=st.sampled_from(["", "m"]),
        prompt=st.none() | st.just("text"),
        line=st.integers(1, 2**40),
    ),
    min_size=1,
    max_size=30,
)


def values(r: Request) -> dict[str, Any]:
    """What a Request says in the words of columns."""
    nothing = {"at_s": np.nan, "think_s": np.nan, "tokens_out": -1}
    names = ("at_s", "tokens_in", "tokens_out", "tokens_new", "turn", "think_s", "block_size", "line")
    said = {name: nothing[name] if getattr(r, name) is None else getattr(r, name) for name in names}
    return said | {"blocks": len(r.hash_ids), "own_text": r.prompt is not None}


@settings(deadline=None)
@given(requests=REQUESTS, chunk=st.sampled_from([1, 3, 1 << 16]), data=st.data())
def test_columns_hold_what_the_requests_say_and_any_of_them_can_be_taken(
    requests: list[Request], chunk: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sheet, "CHUNK", chunk)
        rows = sheet.of(requests)
        places = data.draw(st.lists(st.integers(0, len(requests) - 1), max_size=9))
        taken = sheet.take(rows, np.array(places, int))
        for columns, meant in ((rows, requests), (taken, [requests[i] for i in places])):
            for name in values(requests[0]):
                np.testing.assert_array_equal(columns[name].tolist(), [values(r)[name] for r in meant])
            for name in sheet.LABELS:
                names = [*columns.names[name], ""]
                assert [names[code] for code in columns[name].tolist()] == [getattr(r, name) for r in meant]
            rest, *prompts = sheet.prompts(columns)
            assert [p.hash_ids for p in prompts] == [r.hash_ids for r in meant if r.hash_ids]
            assert [(p.tokens_in, p.block_size, p.line) for p in prompts] == [
                (r.tokens_in, r.block_size, r.line) for r in meant if r.hash_ids
            ]
            assert rest.tokens_in == sum(r.tokens_in for r in meant if not r.hash_ids)


def test_what_no_row_says_takes_no_column() -> None:
    rows = sheet.of([Request(5, 6, at_s=float(i), line=i) for i in range(1000)])
    assert set(rows.columns) == {"at_s", "tokens_in", "tokens_out", "line"}
    assert sum(column.nbytes for column in rows.columns.values()) / rows.n <= 20
    assert "session" not in rows and rows["session"].tolist() == [-1] * 1000


def test_blocks_are_taken_from_rows_alone_that_lose_them() -> None:
    rows = sheet.of([Request(5, 6, hash_ids=(1, 2), block_size=4), Request(5, 6), Request(9, 1, hash_ids=(3,))])
    sheet.without_blocks(rows, np.array([True, True, False]))
    assert rows.ids.tolist() == [3] and rows["blocks"].tolist() == [0, 0, 1]


def _or_why(reader: Callable[..., Any], path: Path, **how: Any) -> Any:
    try:
        return reader(path, **how)
    except BenchError as e:
        return str(e)


@pytest.mark.parametrize(("limit", "turns"), [(None, None), (50, "new")])
def test_a_file_read_as_columns_has_the_figures_and_doubts_of_its_requests(
    limit: int | None, turns: str | None
) -> None:
    """Of each public excerpt and each sample, also where a file is refused."""
    samples = Path(__file__).parents[1] / "traces"
    files = [p for folder in (SHARED, samples) if folder.exists() for p in sorted(folder.iterdir())]
    files = [p for p in files if p.suffix in (".csv", ".jsonl", ".json") and "presets" not in p.name]
    assert files
    for path in files:
        held, columns = (_or_why(reader, path, limit=limit, turns=turns) for reader in (read, read_sheet))
        if isinstance(held, str) or isinstance(columns, str):
            assert columns == held
            continue
        assert columns[1:] == held[1:], path
        assert workload.describe(columns) == workload.describe(held), path
        assert doctor.examine(columns) == doctor.examine(held), path
        again = sheet.of([replace(r) for r in held.requests])
        for name in sheet.DEFAULTS.keys() - {"at_ns", "timed", *sheet.LABELS}:
            np.testing.assert_array_equal(columns.rows[name], again[name], err_msg=f"{path} {name}")
