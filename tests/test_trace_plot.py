"""The picture: the panels that a trace has, in both formats, the same bytes each time."""

from pathlib import Path

import numpy as np
import pytest

from llm_bench.errors import BenchError
from llm_bench.request import Request, Trace
from llm_bench.trace_plot import PANELS, plot
from llm_bench.workload import describe

pytest.importorskip("matplotlib", reason="pictures need matplotlib")


def trace(requests: list[Request]) -> Trace:
    return Trace(requests, "llm-bench", "a $name_.jsonl", [], {})


def full(n: int) -> Trace:
    """Ticks of 1 s, blocks of 16, sessions: every panel."""
    rng = np.random.default_rng(0)
    at_s = np.floor(np.cumsum(rng.exponential(0.2, n)))
    return trace(
        [
            Request(
                32 + i % 16,
                1 + i % 90,
                at_s=float(at),
                hash_ids=(1, 2 + i % 5, 100 + i),
                block_size=16,
                session=f"s{i}",
            )
            for i, at in enumerate(at_s - at_s[0])
        ]
    )


def titles(path: Path) -> list[str]:
    """The texts of an SVG, as comments beside their outlines."""
    return [line.strip()[5:-4] for line in path.read_text().splitlines() if line.strip().startswith("<!-- ")]


NAMES = ["Arrivals in", "Gaps between arrivals", "Lengths", "Answer against prompt", "Prefix hits", "Turns of"]


def test_all_panels_are_drawn_and_the_same_each_time(tmp_path):
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    given = full(400)
    plot(given, describe(given), one)
    plot(given, describe(given), two)
    said = titles(one)
    assert all(any(text.startswith(name) for text in said) for name in NAMES)
    assert any("at random inside ticks" in text for text in said)
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize(
    ("requests", "names"),
    [
        ([Request(0, None, prompt="x")], []),
        ([Request(10, 5)], ["Lengths"]),
        ([Request(10, 5, at_s=0.0)] * 3, ["Lengths"]),
        ([Request(10 + i, 5 + i, at_s=float(i)) for i in range(2)], ["Arrivals in", "Lengths"]),
        ([Request(10 + i, None, at_s=float(i)) for i in range(9)], ["Arrivals in", "Gaps between arrivals", "Lengths"]),
        ([Request(8, 5 + i, session="s", turn=i) for i in range(50)], ["Lengths", "Turns of"]),
        ([Request(16, 5, hash_ids=(1,), block_size=16)] * 2, ["Lengths", "Prefix hits"]),
        ([Request(16, i % 2, at_s=i / 9) for i in range(4000)], ["Arrivals in", "Gaps between arrivals", "Lengths"]),
    ],
)
def test_only_panels_that_apply_are_drawn(tmp_path, requests, names):
    path = tmp_path / "some.svg"
    plot(trace(requests), describe(trace(requests)), path)
    said = titles(path)
    assert [name for name in NAMES if any(text.startswith(name) for text in said)] == names
    assert len(PANELS) == len(NAMES)


def test_many_requests_are_counted_in_hexagons_as_png(tmp_path):
    path = tmp_path / "many.PNG"
    given = full(5000)
    plot(given, describe(given), path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "words"), [("a.pdf", "ends in .png or .svg"), ("none/a.png", "cannot be written")])
def test_a_picture_that_cannot_be_written_is_refused_in_words(tmp_path, name, words):
    given = full(20)
    with pytest.raises(BenchError, match=words):
        plot(given, describe(given), tmp_path / name)
