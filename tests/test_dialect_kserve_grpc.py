"""Rows kserve-grpc and kserve-grpc-infer: what a request says in tensors, what an answer's frames say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import answer
from llm_bench.bodies import Ask
from llm_bench.dialect_kserve_grpc import ROWS
from llm_bench.errors import BenchError
from llm_bench.grpc_frames import GRPC_STATUS, frame, status_frame
from llm_bench.kserve_messages import (
    FINAL,
    Response,
    Tensor,
    field,
    infer_response,
    read_fields,
    tensor,
    values_of,
    varint,
)
from llm_bench.kserve_tensors import described
from llm_bench.protocol import Chunk, Usage
from llm_bench.request import Request

TEXT, INFER = ROWS["kserve-grpc"], ROWS["kserve-grpc-infer"]
REQUEST = Request(tokens_in=3, tokens_out=8, prompt="low water now")
PAGE = {
    "inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]},
        {"name": "stream", "datatype": "BOOL", "shape": [-1, 1]},
        {"name": "max_tokens", "datatype": "INT64", "shape": [1]},
        {"name": "temperature", "datatype": "FP32", "shape": [1]},
        {"name": "image", "datatype": "BYTES", "shape": [-1]},
    ]
}


def said(message: bytes) -> Response:
    """A request's message, read as an answer's: their raw contents have other numbers."""
    return infer_response(b"".join(field(6 if n == 7 else n, value) for n, value in read_fields(message)))


def values(message: bytes) -> dict[str, tuple[tuple[int, ...], list[object]]]:
    return {name: (one.shape, values_of(one)) for name, one in said(message).outputs.items()}


def answer_message(outputs: list[Tensor], final: bool = False) -> bytes:
    parts = [field(1, "m")]
    if final:
        parts.append(field(4, field(1, FINAL) + field(2, field(1, True))))
    for one in outputs:
        shape = b"".join(map(varint, one.shape))
        parts.append(field(5, field(1, one.name) + field(2, one.datatype) + field(3, shape)))
    return b"".join([*parts, *(field(6, one.raw) for one in outputs)])


def text_frame(text: str, finish: str = "None") -> bytes:
    outputs = [
        tensor("text_output", "BYTES", [1], [text]),
        tensor("finish_reason", "BYTES", [1], [finish]),
        tensor("num_input_tokens", "UINT32", [1], [3]),
        tensor("num_output_tokens", "UINT32", [1], [1]),
    ]
    return frame(field(2, answer_message(outputs)))


def test_without_metadata_the_vllm_backends_tensors_are_sent():
    message = TEXT.encode(REQUEST, Ask("llm"))
    got = values(message)
    assert got["text_input"] == ((1,), [b"low water now"])
    assert got["stream"] == ((1,), [True])
    assert got["return_num_output_tokens"] == ((1,), [True])
    assert b'"max_tokens":8' in got["sampling_parameters"][1][0]
    assert said(message).parameters == {"triton_enable_empty_final_response": True}
    assert dict(read_fields(message))[1] == b"llm"


def test_with_metadata_only_what_the_model_has_is_sent_in_its_types_and_shapes():
    got = values(TEXT.encode(REQUEST, Ask("llm", extra=described(PAGE, {}))))
    assert got == {
        "text_input": ((1, 1), [b"low water now"]),
        "stream": ((1, 1), [True]),
        "max_tokens": ((1,), [8]),  # a word of the sampler, where the model has an input of that name
        "temperature": ((1,), [0.0]),
    }


def test_what_the_user_asks_for_is_sent_whatever_the_metadata_says():
    extra = {"lora": "a", "depth": 3, "tensors": {"image": {"data": ["x"]}}}
    page = {"inputs": PAGE["inputs"]}
    got = values(TEXT.encode(REQUEST, Ask("llm", extra={**described(page, {}), **described(page, extra)})))
    assert got["lora"] == ((1,), [b"a"])
    assert got["depth"] == ((1,), [3])
    assert got["image"] == ((1,), [b"x"])


def test_a_model_that_calls_its_prompt_otherwise():
    extra = {"tensors": {"flag": {"datatype": "BOOL", "shape": [1]}, "words": {"datatype": "BYTES", "shape": [-1]}}}
    assert values(TEXT.encode(REQUEST, Ask("m", extra=extra))) == {"words": ((1,), [b"low water now"])}


def test_a_model_without_a_text_input():
    extra = {"tensors": {"IN": {"datatype": "FP32", "shape": [4]}}}
    with pytest.raises(BenchError, match="line 0: the model has no BYTES input for a prompt; it has IN"):
        TEXT.encode(REQUEST, Ask("m", extra=extra))


def test_a_captured_body_of_the_generate_extension_goes_as_tensors():
    request = Request(3, None, body={"text_input": "as captured", "stream": False, "n": 2, "model": "once"})
    got = values(TEXT.encode(request, Ask("llm")))
    assert got["text_input"] == ((1,), [b"as captured"])
    assert got["n"] == ((1,), [2])
    assert "model" not in got


def test_a_single_pass_is_filled_as_over_http():
    extra = described({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}]}, {})
    first, again = (INFER.encode(REQUEST, Ask("m", extra=extra)) for _ in range(2))
    assert first == again
    shape, numbers = values(first)["IN"]
    assert shape == (1, 4)
    assert len(set(numbers)) == 4
    assert INFER.takes.asked(REQUEST, Ask("m")) == (None, False, 1)


def test_a_captured_body_of_a_single_pass():
    one = {"name": "IN", "datatype": "INT32", "shape": [2, 1], "data": [[1], [2]]}
    assert values(INFER.encode(Request(1, None, body={"inputs": [one]}), Ask("m"))) == {"IN": ((2, 1), [1, 2])}
    for wrong in ({"name": "IN"}, {**one, "data": [1]}, {**one, "data": ["x", "y"]}, {**one, "datatype": "X"}):
        with pytest.raises(BenchError, match="line 0: "):
            INFER.encode(Request(1, None, body={"inputs": [wrong]}), Ask("m"))


def test_tensors_that_are_not_known():
    with pytest.raises(BenchError, match="the model's inputs are not known"):
        INFER.encode(REQUEST, Ask("m"))


def test_a_token_a_message():
    chunk = TEXT.decode(text_frame(" low"))
    (delta,) = chunk.deltas
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.bears_token) == (" low", 1, "", True)
    assert chunk.usage == Usage(3)
    assert TEXT.decode(text_frame("", "length")).deltas[0].finish_reason == "length"
    assert TEXT.is_token(text_frame("a"))


def test_what_bears_no_token():
    empty = frame(field(2, answer_message([], final=True)))
    assert TEXT.decode(empty) == Chunk()
    assert TEXT.decode(status_frame(0, "")) == Chunk(done=True)
    assert not TEXT.is_token(empty)
    assert not TEXT.is_token(status_frame(13, "a"))
    assert not TEXT.is_token(b"<html>")


def test_a_whole_answer_is_its_messages_and_its_status():
    chunk = TEXT.decode(text_frame("all of it", "stop") + status_frame(0, ""))
    assert (chunk.deltas[0].text, chunk.deltas[0].finish_reason, chunk.done) == ("all of it", "stop", True)


def test_errors():
    assert TEXT.decode(frame(field(1, "no model"))).error == "no model"
    assert TEXT.decode(status_frame(13, "boom")) == Chunk(error="boom", error_code="INTERNAL")
    assert TEXT.decode(status_frame(12, "")).error == "UNIMPLEMENTED"
    assert INFER.decode(status_frame(77, "odd")).error_code == "77"


def test_a_single_pass_that_says_nothing_is_none():
    out = answer_message([tensor("OUT", "FP32", [1], [0.5])])
    assert INFER.decode(frame(out) + status_frame(0, "")) == Chunk(done=True)
    for wrong in (status_frame(0, ""), frame(b"") + status_frame(0, "")):
        with pytest.raises(ValueError, match="an answer without"):
            INFER.decode(wrong)


@given(
    st.sampled_from(["kserve-grpc", "kserve-grpc-infer"]), st.binary(max_size=60), st.sampled_from(list(GRPC_STATUS))
)
def test_any_message_is_read_or_refused(api, message, code):
    for data in (message, frame(message), frame(field(2, message)) + status_frame(code, "x")):
        try:
            assert isinstance(ROWS[api].decode(data), Chunk)
        except ValueError:
            continue


def test_a_character_that_is_cut_between_messages_is_whole_in_the_text():
    wave = "🌊".encode()
    outputs = [[tensor("text_output", "BYTES", [1], [part])] for part in (b"a" + wave[:3], wave[3:])]
    deltas = [TEXT.decode(frame(field(2, answer_message(output)))).deltas[0] for output in outputs]
    assert answer.joined([delta.text for delta in deltas]) == "a🌊"
    assert all(delta.bears_token for delta in deltas)
