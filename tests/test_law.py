"""law: conversations drawn of published quantiles; model_file: such a law as a user may write one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import law
from llm_bench.errors import BenchError
from llm_bench.fit import AGAIN, NEXT, Law
from llm_bench.model_file import load, save
from llm_bench.synth import synth
from llm_bench.workload import spearman

TABLE = ((0.0, 10.0), (0.5, 100.0), (0.99, 1000.0), (1.0, 8000.0))
PUBLISHED: dict[str, Any] = {
    "llm_bench_model": 1,
    "source": "a table in a paper",
    "date": "2025-11",
    "block_size": 16,
    "requests": 500,
    "conversations": 500,
    "notes": ["lengths: published"],
    "streams": [
        {
            "arrivals": {"span_s": 100, "rates": [5], "splits": [], "shape": 1},
            "law": {"rows": 500, "tokens_in": TABLE, "tokens_out": TABLE, "spearman": 0.5, "common": 2, "again": 0.3},
        }
    ],
}


def written(folder: Path, values: object, name: str = "m.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(values))
    return path


def test_a_level_of_the_table_gives_its_value_and_between_them_the_logarithm_is_linear() -> None:
    found = law.quantile(TABLE, np.array([0.0, 0.25, 0.5, 0.99]), rows=10_000)
    np.testing.assert_allclose(found, [10, 10 * 10**0.5, 100, 1000], rtol=1e-12)
    tail = law.quantile(TABLE, np.array([0.999, 0.9999, 1 - 2.0**-53]), rows=10_000)  # a power law up to 1 - 1 / rows
    np.testing.assert_allclose(tail, [1000 * 8**0.5, 8000, 8000], rtol=1e-6)
    even = law.quantile(((0.0, 1.0), (0.5, 10.0), (1.0, 100.0)), np.array([0.75]), rows=10)
    np.testing.assert_allclose(even, [10 * 10**0.5])


@given(rho=st.floats(-0.95, 0.95), seed=st.integers(0, 2**32))
def test_ranks_correlate_as_asked(rho: float, seed: int) -> None:
    """The standard error of a rank correlation of n pairs is at most 1 / sqrt(n - 1) (Kendall and Gibbons 1990)."""
    u, v = law.uniforms((2, 4000), seed)
    w = law.correlated(u, v, rho)
    found = spearman(u, w)
    assert found == pytest.approx(rho, abs=4.5 / 3999**0.5)
    assert np.abs(np.sort(w) - (np.arange(4000) + 0.5) / 4000).max() < 2.2 / 4000**0.5  # and w is uniform
    assert (law.correlated(u, v, 0.0) == v).all()


def test_prompts_begin_alike_go_on_or_stand_alone_as_their_law_says() -> None:
    one = Law(100, TABLE, TABLE, 0.0, common=2, again=0.3, again_part=0.9, again_lag_s=60.0)
    drawn = [c.turns[0] for c in law.conversations(one, 5000, 16, 1, 0, 0)]
    again = [t for t in drawn if t.source == NEXT]
    assert len(again) / 5000 == pytest.approx(0.3, abs=0.02)
    assert all(t.shared == max(2, int(t.tokens // 16 * 0.9)) for t in again)
    assert np.mean([t.lag for t in again]) == pytest.approx(60, rel=0.1)
    assert {(t.source, t.shared) for t in drawn if t.source != NEXT} == {(AGAIN, 2)}
    assert {c.turns[0].source for c in law.conversations(one, 10, 0, 1, 0, 0)} == {"none"}


def test_a_law_is_saved_and_read_alike_and_makes_the_same_each_time(tmp_path: Path) -> None:
    model = load(written(tmp_path, PUBLISHED))
    save(model, tmp_path / "again.json")
    assert load(tmp_path / "again.json") == model
    made = synth(model, seed=3)
    assert len(made) == 500 and made == synth(model, seed=3) and made != synth(model, seed=4)
    assert all(r.hash_ids[:2] == made[0].hash_ids[:2] for r in made if r.tokens_in >= 32)
    assert max(r.tokens_in for r in synth(model, seed=3, lengths=0.1)) <= 800


def test_a_law_without_times_has_them_from_a_rate(tmp_path: Path) -> None:
    values = json.loads(json.dumps(PUBLISHED))
    values["streams"][0]["arrivals"] = None
    model = load(written(tmp_path, values))
    assert {r.at_s for r in synth(model)} == {None}
    made = synth(model, rate=5, count=2000)
    assert made[-1].at_s == pytest.approx(400, rel=0.1)


WRONG: list[tuple[list[str | int], object, str]] = [
    (["source"], "", "whose figures"),
    (["date"], "last year", "whose figures"),
    (["date"], None, "date is None"),
    (["streams", 0, "law", "tokens_in"], [[0, 5]], "tokens_in is"),
    (["streams", 0, "law", "tokens_in"], [[0, 5], [0.5, 4], [1, 9]], "rising"),
    (["streams", 0, "law", "tokens_in"], [[0.1, 5], [1, 9]], "from level 0 to level 1"),
    (["streams", 0, "law", "tokens_in"], [[0, 0], [1, 9]], "values above 0"),
    (["streams", 0, "law", "tokens_in"], [[0, 5, 6], [1, 9]], "a list of 2 at most"),
    (["streams", 0, "law", "tokens_out"], [[0, 5], [1, 1e9]], "a number, 0 to 1e+07"),
    (["streams", 0, "law", "spearman"], 1.5, "a rank correlation, -1 to 1"),
    (["streams", 0, "law", "spearman"], "0", "a rank correlation"),
    (["streams", 0, "law", "rows"], 1, "a whole number, 2 to"),
    (["streams", 0, "law", "again"], 2, "a number, 0 to 1"),
    (["streams", 0, "law", "turns"], [[0, 1], [1, 9]], "expected both or neither"),
    (["streams", 0, "law", "mean"], 3, "expected the keys"),
    (["streams", 0, "law"], [], "expected the keys"),
    (["streams", 0, "conversations"], [], "expected the keys"),
]


@pytest.mark.parametrize(("at", "value", "said"), WRONG)
def test_a_law_that_cannot_be_right_is_refused_by_its_key(
    at: list[str | int], value: object, said: str, tmp_path: Path
) -> None:
    values: Any = json.loads(json.dumps(PUBLISHED))
    inner = values
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    with pytest.raises(BenchError) as refused:
        load(written(tmp_path, values))
    assert said in str(refused.value) and "m.json" in str(refused.value)


def test_a_law_without_its_source_or_beside_another_stream_is_refused(tmp_path: Path) -> None:
    bare = {key: value for key, value in PUBLISHED.items() if key not in ("source", "date")}
    for i, values in enumerate((bare, PUBLISHED | {"streams": PUBLISHED["streams"] * 2})):
        with pytest.raises(BenchError, match="the source and date of its figures"):
            load(written(tmp_path, values, f"{i}.json"))
