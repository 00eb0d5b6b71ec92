"""Scales end on round numbers and hold all that is drawn; decimation hides nothing; text is escaped."""

import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llm_bench import svg

FINITE = st.floats(-1e12, 1e12, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-9)
SIZES = st.floats(1e-6, 1e9, allow_nan=False)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 137, [0, 50, 100]),
        (0, 0.03, [0, 0.01, 0.02, 0.03]),
        (-10, 10, [-10, -5, 0, 5, 10]),
        (3.2, 3.9, [3.2, 3.4, 3.6, 3.8]),
    ],
)
def test_linear_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert svg.linear_ticks(low, high) == ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1, 100, [1, 2, 5, 10, 20, 50, 100]), (0.5, 5000, [1, 10, 100, 1000]), (1, 1e9, [1, 100, 1e4, 1e6, 1e8])],
)
def test_logarithmic_ticks_are_powers_of_ten_and_few(low: float, high: float, ticks: list[float]) -> None:
    assert svg.log_ticks(low, high) == pytest.approx(ticks)


@given(st.lists(FINITE, min_size=1, max_size=20), st.booleans())
def test_a_scale_holds_every_value_between_its_ends(values: list[float], zero: bool) -> None:
    scale = svg.scale(np.array(values), 50, 400, zero=zero)
    at = scale.at(np.array(values))
    assert (at >= 50 - 1e-3).all()
    assert (at <= 400 + 1e-3).all()
    assert scale.low < scale.high
    assert 2 <= len(scale.ticks()) <= 12
    assert not zero or scale.low <= 0 <= scale.high


@given(st.lists(SIZES, min_size=1, max_size=20))
@example([0.2])
def test_a_logarithmic_scale_holds_every_value_and_has_ticks(values: list[float]) -> None:
    scale = svg.scale(np.array(values), 400, 50, log=True)
    at = scale.at(np.array(values))
    assert (at >= 50 - 1e-6).all()
    assert (at <= 400 + 1e-6).all()
    assert 2 <= len(scale.ticks()) <= 12


def test_scales_take_what_has_no_extent() -> None:
    for values in ([], [math.nan], [0.0], [5.0], [-5.0]):
        for zero in (True, False):
            scale = svg.scale(np.array(values), 0, 100, zero=zero)
            assert scale.low < scale.high
    assert svg.scale(np.array([0.0, -1.0]), 0, 1, log=True).log is False  # nothing of it is positive


def test_a_logarithmic_axis_is_for_what_spans_much_and_has_no_zero() -> None:
    assert svg.wide(np.array([1.0, 100.0]))
    assert not svg.wide(np.array([1.0, 20.0]))
    assert not svg.wide(np.array([0.0, 1.0, 100.0]))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=2000))
def test_an_ecdf_has_measured_values_with_exact_shares(numbers: list[int]) -> None:
    values = np.array(numbers, float)
    at, share = svg.ecdf(values)
    assert set(at) <= set(values)
    assert share.tolist() == [float((values <= v).mean()) for v in at]
    assert (at[0], at[-1], share[-1]) == (values.min(), values.max(), 1)
    assert len(at) <= max(svg.CURVE_POINTS, 1)


def test_an_ecdf_of_many_values_keeps_the_tail_and_is_close_everywhere() -> None:
    values = np.random.Generator(np.random.PCG64(1)).lognormal(3, 1, 200_000)
    at, share = svg.ecdf(values)
    assert len(at) <= svg.CURVE_POINTS
    assert at[-30:].tolist() == np.sort(values)[-30:].tolist()
    assert np.diff(share).max() < 0.01
    assert np.interp(np.quantile(values, 0.999), at, share) == pytest.approx(0.999, abs=2e-4)


@given(st.integers(0, 500), st.integers(2, 100))
def test_even_samples_have_both_ends_and_no_row_twice(n: int, most: int) -> None:
    rows = svg.evenly(n, most)
    assert len(rows) == min(n, most)
    assert (np.diff(rows) > 0).all()
    assert not n or (rows[0], rows[-1]) == (0, n - 1)


def test_a_line_breaks_where_there_is_no_value() -> None:
    drawn = svg.line(np.arange(5.0), np.array([1, 2, math.nan, 4, 5.26]), "s0")
    assert drawn == '<path class="line s0" d="M0 1L1 2M3 4L4 5.3"/>'


def test_steps_hold_their_level_from_edge_to_edge() -> None:
    assert 'd="M0 5L1 5L1 7L3 7"' in svg.steps(np.array([0.0, 1, 3]), np.array([5.0, 7]), "s0")


def test_points_that_are_no_numbers_are_not_drawn() -> None:
    drawn = svg.dots(np.array([1.0, math.nan, 3]), np.array([1.0, 2, math.inf]), "s0")
    assert drawn == '<path class="dots s0" d="M1 1h0"/>'


@given(st.text(max_size=40).filter(lambda t: all(c >= " " and c not in "\ufffe\uffff" for c in t)))
def test_any_text_is_escaped_and_found_again(said: str) -> None:
    parts = [svg.label(1, 2, said), svg.marker(1, 2, "s0", said), svg.bar(0, 0, 1, 1, "s0", said or "-")]
    root = ET.fromstring(svg.document(parts, 100, said, said))
    assert {child.tag for child in root.iter()} <= {"svg", "desc", "text", "circle", "title", "rect"}
    assert root.findtext("text") == root.findtext("desc") == root.findtext("circle/title") == said
    assert root.get("aria-label") == re.sub(r"[\t\n]", " ", said)


def test_tick_labels_stay_short_and_never_touch() -> None:
    texts = [svg.tick_text(v) for v in (0, 0.2, 12.5, 1500, 25_000, 2_000_000, 3e9)]
    assert texts == ["0", "0.2", "12.5", "1,500", "25k", "2M", "3G"]
    drawn = svg.x_axis(svg.x_scale(np.array([0, 9_999.0])), 200, 20, "x")
    at = [float(x) for x in re.findall(r'<text x="([\d.]+)"[^>]*class="tick"', drawn)]
    assert len(at) > 2
    assert min(np.diff(at)) > svg.text_width("10k")


def test_the_look_of_a_series_repeats_only_after_all_colours_with_all_dashes() -> None:
    looks = [svg.series_class(i) for i in range(svg.COLOURS * svg.DASHES)]
    assert len(set(looks)) == len(looks)
