"""KServe v2 bodies: what other servers' clients send is read, what they would read comes back, the rest is a 400."""

import json
import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine import kserve
from reference_engine.openai_api import ApiError

VECTORS = [array("f", [1.5, -2.25]), array("f", [0.0, 3.0])]


def text(*texts: str, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}], **more}


def read(body: Any, raw: bytes = b"") -> kserve.InferAsk:
    head = json.dumps(body).encode()
    return kserve.parse(head + raw, str(len(head)) if raw else None)


def elements(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(t)) + t for t in texts)


def test_texts_are_read_from_json_and_from_bytes() -> None:
    assert read(text("a", "bé", id="r1")) == kserve.InferAsk("r1", ["a", "bé"], False)
    raw = elements(b"a", "bé".encode())
    tensor = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    assert read({"inputs": [tensor]}, raw).inputs == ["a", "bé"]
    tensor = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": [["a"], ["b"]]}
    assert read({"inputs": [tensor]}).inputs == ["a", "b"]


@pytest.mark.parametrize("datatype", kserve.INTEGERS)
def test_token_ids_are_read_up_to_their_padding(datatype: str) -> None:
    ids = {"name": "input_ids", "shape": [2, 3], "datatype": datatype}
    mask = {"name": "attention_mask", "shape": [2, 3], "datatype": datatype}
    rows = {"inputs": [ids | {"data": [[1, 2, 3], [4, 0, 0]]}, mask | {"data": [1, 1, 1, 1, 0, 0]}]}
    assert read(rows).inputs == [[1, 2, 3], [4]]
    code = "<6" + kserve.INTEGERS[datatype]
    size = {"parameters": {"binary_data_size": struct.calcsize(code)}}
    raw = struct.pack(code, 1, 2, 3, 4, 0, 0) + struct.pack(code, 1, 1, 1, 1, 0, 0)
    assert read({"inputs": [ids | size, mask | size]}, raw).inputs == [[1, 2, 3], [4]]
    assert read({"inputs": [ids | {"data": [1, 2, 3, 4, 5, 6]}]}).inputs == [[1, 2, 3], [4, 5, 6]]


def test_an_answer_in_json_and_in_bytes() -> None:
    body, head = kserve.answer(kserve.InferAsk("r1", ["a", "b"], False), "m", VECTORS, {"batch_size": 2})
    assert head is None
    assert json.loads(body) == {
        "id": "r1",
        "model_name": "m",
        "model_version": "1",
        "parameters": {"batch_size": 2},
        "outputs": [{"name": "embedding", "datatype": "FP32", "shape": [2, 2], "data": [1.5, -2.25, 0.0, 3.0]}],
    }
    body, head = kserve.answer(kserve.InferAsk("", ["a", "b"], True), "m", VECTORS, {})
    assert head is not None
    (output,) = json.loads(body[:head])["outputs"]
    assert output == {
        "name": "embedding",
        "datatype": "FP32",
        "shape": [2, 2],
        "parameters": {"binary_data_size": 16},
    }
    assert struct.unpack("<4f", body[head:]) == (1.5, -2.25, 0.0, 3.0)


@pytest.mark.parametrize(
    ("said", "binary"),
    [
        ({}, False),
        ({"parameters": {"binary_data_output": True}}, True),
        ({"outputs": [{"name": "embedding"}]}, False),
        ({"outputs": [{"name": "embedding", "parameters": {"binary_data": True}}]}, True),
        (
            {
                "parameters": {"binary_data_output": True},
                "outputs": [{"name": "embedding", "parameters": {"binary_data": False}}],
            },
            False,
        ),
    ],
)
def test_bytes_go_out_where_they_are_asked_for(said: dict[str, Any], binary: bool) -> None:
    assert read(text("a", **said)).binary is binary


IDS = {"name": "input_ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}
MASK = {"name": "attention_mask", "shape": [1, 2], "datatype": "INT64", "data": [1, 1]}
TEXT = text("a")["inputs"][0]
WRONG: list[tuple[Any, str]] = [
    ([], "the request is a list"),
    ({}, "inputs: would be right"),
    ({"inputs": []}, "inputs: would be right"),
    ({"inputs": [3]}, r"inputs\[0\]: would be right: an object"),
    ({"inputs": [TEXT | {"name": "INPUT0"}]}, "name is 'INPUT0'; would be right: one of text, input_ids"),
    ({"inputs": [TEXT, TEXT]}, "each once"),
    ({"inputs": [TEXT, IDS]}, "inputs are text, input_ids"),
    ({"inputs": [MASK]}, "inputs are attention_mask"),
    ({"inputs": [TEXT | {"datatype": "FP32"}]}, "datatype is 'FP32'; would be right: BYTES"),
    ({"inputs": [TEXT | {"shape": [0]}]}, r"shape is \[0\]"),
    ({"inputs": [TEXT | {"shape": [1, 1, 1]}]}, "one or two sizes"),
    ({"inputs": [TEXT | {"shape": [True]}]}, "shape is"),
    ({"inputs": [TEXT | {"shape": [2**31]}]}, "shape is"),
    ({"inputs": [TEXT | {"shape": [2]}]}, "has 1 values; would be right: 2"),
    ({"inputs": [TEXT | {"shape": [1, 2], "data": ["a", "b"]}]}, r"shape \[1, 2\]; would be right: \[n\] or \[n, 1\]"),
    ({"inputs": [TEXT | {"data": [1]}]}, "strings"),
    ({"inputs": [TEXT | {"data": [""]}]}, r"text\[0\] is empty"),
    ({"inputs": [IDS | {"data": [1, True]}]}, "values of INT64"),
    ({"inputs": [IDS | {"data": [1.0, 2]}]}, "values of INT64"),
    ({"inputs": [IDS | {"data": [[1], [2]]}]}, "rows that are not of shape"),
    ({"inputs": [IDS | {"shape": [2]}]}, r"\[texts, tokens\]"),
    ({"inputs": [IDS, MASK | {"data": [0, 1]}]}, "ones, then zeros"),
    ({"inputs": [IDS, MASK | {"data": [0, 0]}]}, "ones, then zeros"),
    ({"inputs": [IDS, MASK | {"shape": [2, 1]}]}, r"would be right: \[1, 2\]"),
    ({"inputs": [TEXT | {"parameters": {"binary_data_size": 1}}]}, "would be right: 0 to 0"),
    ({"inputs": [TEXT | {"parameters": []}]}, r"inputs\[0\].parameters: would be right: an object"),
    (text("a", outputs=[{"name": "logits"}]), "would be right: 'embedding'"),
    (text("a", outputs=[{"name": "embedding"}] * 2), "would be right: 'embedding'"),
    (text("a", outputs=[{"name": "embedding", "parameters": {"classification": 2}}]), "classification"),
    (text("a", outputs=5), "outputs: would be right"),
    (text("a", id=5), "id: would be right"),
    (text("a", parameters={"binary_data_output": 1}), "binary_data_output is 1"),
]


@pytest.mark.parametrize(("body", "said"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_said(body: Any, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("raw", "size", "said"),
    [
        (elements(b"a") + b"x", 5, "1 bytes behind the last tensor"),
        (elements(b"a"), 6, "binary_data_size is 6; would be right: 0 to 5"),
        (elements(b"a")[:-1], 4, "ends beyond"),
        (struct.pack("<I", 2**32 - 1) + b"a", 5, "ends beyond"),
        (elements(b"a", b"b"), 10, "has 2 values; would be right: 1"),
        (b"\xff\xff", 2, "ends beyond"),
        (elements(b"\xff"), 5, r"text\[0\] is no UTF-8"),
        (elements(b"a"), -5, "binary_data_size is -5"),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(raw: bytes, size: int, said: str) -> None:
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    with pytest.raises(ApiError, match=said):
        read({"inputs": [tensor]}, raw)


@pytest.mark.parametrize("length", ["", "-1", "9999999", "1e3", "٣", "1" * 5000])
def test_a_header_length_that_is_none_is_refused(length: str) -> None:
    with pytest.raises(ApiError, match=kserve.HEADER_LENGTH):
        kserve.parse(json.dumps(text("a")).encode(), length)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS: dict[str, Any] = {
    "name": st.sampled_from([*kserve.KINDS]) | JSON,
    "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
    "datatype": st.sampled_from(["BYTES", "BOOL", *kserve.INTEGERS]) | JSON,
    "data": st.lists(st.integers(0, 3) | st.text(max_size=3), max_size=6) | JSON,
    "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 40)}) | JSON,
}
TENSORS = st.lists(st.fixed_dictionaries({}, optional=FIELDS), max_size=3)
BODIES = st.fixed_dictionaries({"inputs": TENSORS}, optional={"outputs": JSON, "parameters": JSON, "id": JSON}) | JSON


@given(BODIES, st.binary(max_size=40))
def test_any_body_is_read_or_refused(body: Any, raw: bytes) -> None:
    try:
        ask = read(body, raw)
    except ApiError:
        return
    assert ask.inputs
    assert all(isinstance(one, str) and one for one in ask.inputs) or all(
        isinstance(one, list) and one and all(type(t) is int for t in one) for one in ask.inputs
    )


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=10))
def test_any_texts_come_through_as_bytes(texts: list[str]) -> None:
    raw = elements(*(t.encode("utf-8", "replace") for t in texts))
    size = {"binary_data_size": len(raw)}
    tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "parameters": size}
    assert read({"inputs": [tensor]}, raw).inputs == [t.encode("utf-8", "replace").decode() for t in texts]
