"""Tensors of a request by a model's own metadata."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench.bodies import Ask
from llm_bench.errors import BenchError
from llm_bench.kserve_messages import DATATYPES, tensor, values_of
from llm_bench.kserve_tensors import MOST_ELEMENTS, described, inputs_of
from llm_bench.request import Request
from tests.fixtures.protocols import METADATA

ROW = Request(6, 40, prompt="low water", line=7)


def filled(extra, request=ROW):
    return inputs_of(request, Ask("m", extra=extra), "kserve-http")


def of(datatype, shape, **more):
    return {"tensors": {"X": {"datatype": datatype, "shape": shape, **more}}}


def test_a_models_page_is_what_every_request_fills():
    text, features, ids = filled(described(METADATA, {}))  # the optional one is left out
    assert text == ("TEXT", "BYTES", (1, 1), ["low water"])
    assert (features.name, features.shape, len(features.values)) == ("FEATURES", (1, 4), 4)
    assert all(0 <= value < 1 for value in features.values)
    assert (ids.datatype, ids.shape, len(set(ids.values))) == ("INT64", (1, 6), 6)  # as many as the prompt has tokens


def test_what_a_target_names_is_sent_alone_and_the_page_fills_in_the_rest():
    extra = described(METADATA, {"id": "x", "tensors": {"FEATURES": {"data": 0.5}, "MASK": [True, False]}})
    assert extra["id"] == "x"
    features, mask = filled(extra)
    assert features == ("FEATURES", "FP32", (1, 4), [0.5] * 4)  # a single value stands for all
    assert mask == ("MASK", "BOOL", (2,), [True, False])


def test_a_trace_says_more_of_the_same_inputs():
    extra = described(METADATA, {})
    row = Request(6, 40, prompt="p", extra={"tensors": {"IDS": [5, 6, 7], "TEXT": {"data": [["a"], ["b"]]}}})
    text, _, ids = filled(extra, row)
    assert (text.shape, text.values) == ((2, 1), ["a", "b"])  # the last open size takes what there is
    assert (ids.shape, ids.values) == ((1, 3), [5, 6, 7])


def test_the_same_request_has_the_same_tensors_and_another_text_others():
    extra = described(METADATA, {})
    assert filled(extra) == filled(extra)
    other = filled(extra, Request(6, 40, prompt="high water"))
    assert all(a.values != b.values for a, b in zip(filled(extra), other, strict=True))


@pytest.mark.parametrize(("datatype", "tokens"), [("INT32", 40), ("UINT64", 40), ("INT8", 40)])
def test_an_input_by_the_name_of_a_length_asks_for_the_answers(datatype, tokens):
    (one,) = filled({"tensors": {"max_tokens": {"datatype": datatype, "shape": [1]}}})
    assert one.values == [tokens]
    (one,) = filled({"tensors": {"max_tokens": {"datatype": "INT8", "shape": [1]}}}, Request(6, 900, prompt="p"))
    assert one.values == [127]


@given(st.sampled_from(sorted(DATATYPES)), st.lists(st.integers(-1, 5), max_size=4), st.integers(1, 40), st.text())
def test_every_datatype_and_shape_is_filled_with_what_its_bytes_can_hold(datatype, shape, tokens, prompt):
    request = Request(tokens, None, prompt=prompt)
    (one,) = filled(of(datatype, shape), request)
    assert len(one.values) == math.prod(one.shape)
    assert all(size in (1, tokens) if said == -1 else size == said for said, size in zip(shape, one.shape, strict=True))
    if "\ud800" <= max(prompt, default="") <= "\udfff":
        return  # half a surrogate is no UTF-8
    back = values_of(tensor(one.name, one.datatype, one.shape, one.values))
    if datatype == "BYTES":
        assert back == [prompt.encode()] * len(back)
    else:
        assert back == pytest.approx(one.values, abs=1e-3)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "line 7: the model's inputs are not known"),
        ({"tensors": [1]}, "line 7: extra.tensors is not a table of tensors"),
        (of("FLOAT", [1]), r"line 7: extra.tensors.X has datatype 'FLOAT' and shape \[1\]; expected one of BOOL"),
        (of("FP32", [-2]), "-1 for one that is open"),
        (of("FP32", "4"), "a list of sizes"),
        (of("FP32", [1, True]), "a list of sizes"),
        (of("FP32", [MOST_ELEMENTS, 2]), "would have 33,554,432 values; give its shape"),
        (of("FP32", [2, 2], data=[1.0, 2.0, 3.0]), r"3 values for the shape \[2, 2\]"),
        (of("FP32", [2, -1], data=[1.0, 2.0, 3.0]), r"3 values for the shape \[2, -1\]"),
    ],
)
def test_what_cannot_be_filled_names_the_line_and_what_would_be_right(extra, said):
    with pytest.raises(BenchError, match=said):
        filled(extra)


@pytest.mark.parametrize("page", [{}, {"inputs": None}, {"inputs": [5, {"name": 5}, {"name": "X"}]}, {"error": "x"}])
def test_a_page_without_inputs_is_a_value_error_unless_the_target_names_some(page):
    with pytest.raises(ValueError, match=r"lists no inputs; name them in targets.toml: \[targets.NAME.extra.tensors\]"):
        described(page, {"id": 1})
    own = {"tensors": {"X": {"datatype": "FP32", "shape": [1]}}}
    assert described(page, own) == own
