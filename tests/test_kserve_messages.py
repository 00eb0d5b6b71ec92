"""The messages' bytes: round trips, against google.protobuf where it is installed, hostile bytes."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llm_bench.grpc_frames import GRPC_STATUS, Status, frame, read_frames, status_frame
from llm_bench.kserve_messages import (
    DATATYPES,
    FINAL,
    WANT_FINAL,
    Tensor,
    field,
    infer_request,
    infer_response,
    is_final,
    model_metadata,
    read_fields,
    repository_index,
    server_metadata,
    server_ready,
    stream_response,
    tensor,
    values_of,
    varint,
    with_id,
)

# As Triton's own client wrote it (tritonclient 2.73, SerializeToString): a text, a flag and a number, raw.
FROM_TRITONCLIENT = bytes.fromhex(
    "0a036c6c6d1a02723922280a22747269746f6e5f656e61626c655f656d7074795f66696e616c5f726573706f6e7365120208012a160a0a746578745f696e707574120542595445531a01012a110a0673747265616d1204424f4f4c1a01012a160a0a6d61785f746f6b656e731205494e5433321a01013a0f0b000000646566206d61696e28293a3a01013a0404000000"
)
INTS = st.integers(-(1 << 63), (1 << 63) - 1)
NAMES = st.text(max_size=20)
RANGES = {"B": (0, 255), "H": (0, 65535), "I": (0, 2**32 - 1), "Q": (0, 2**64 - 1)}
RANGES |= {"b": (-128, 127), "h": (-32768, 32767), "i": (-(2**31), 2**31 - 1), "q": (-(2**63), 2**63 - 1)}


def elements(datatype):
    letter = DATATYPES[datatype]
    if not letter:
        return st.binary(max_size=30)
    if letter == "?":
        return st.booleans()
    if letter in RANGES:
        return st.integers(*RANGES[letter])
    return st.floats(width={"e": 16, "f": 32, "d": 64}[letter], allow_nan=False)


@st.composite
def tensors(draw):
    datatype = draw(st.sampled_from(list(DATATYPES)))
    values = draw(st.lists(elements(datatype), max_size=6))
    return tensor(draw(NAMES), datatype, [1, len(values)], values), values


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), st.integers(0, 2**64 - 1) | st.binary(max_size=300))))
def test_fields_come_back(fields):
    assert list(read_fields(b"".join(field(*one) for one in fields))) == fields


@given(tensors())
def test_a_tensors_values_come_back(pair):
    one, values = pair
    assert values_of(one) == values


@given(NAMES, st.lists(tensors(), max_size=4), st.dictionaries(NAMES, st.booleans() | INTS | NAMES, max_size=3))
def test_what_a_request_says_comes_back(model, pairs, parameters):
    """Requests and answers share the places of parameters and tensors but for the raw contents, 7 and 6."""
    inputs = [one for one, _ in pairs]
    message = with_id("r-1", infer_request(model, inputs, parameters))
    places = {number: value for number, value in read_fields(message) if number in (1, 3)}
    assert places == {1: model.encode(), 3: b"r-1"}
    mirrored = b"".join(field(6 if number == 7 else number, value) for number, value in read_fields(message))
    got = infer_response(mirrored)
    assert got.parameters == parameters
    assert got.outputs == {one.name: one for one in inputs}


def test_a_request_is_what_tritons_own_client_sends():
    inputs = [
        tensor("text_input", "BYTES", [1], ["def main():"]),
        tensor("stream", "BOOL", [1], [True]),
        tensor("max_tokens", "INT32", [1], [4]),
    ]
    ours = with_id("r9", infer_request("llm", inputs, {WANT_FINAL: True}))
    assert sorted(read_fields(ours), key=repr) == sorted(read_fields(FROM_TRITONCLIENT), key=repr)


TYPED = {  # InferTensorContents: its field, packed as proto3 packs numbers
    "BOOL": (field(1, b"\x01\x00"), [True, False]),
    "INT8": (field(2, varint(-3) + varint(4)), [-3, 4]),
    "INT64": (field(3, varint(-(1 << 62))), [-(1 << 62)]),
    "UINT8": (field(4, b"\x07"), [7]),
    "UINT64": (field(5, varint((1 << 64) - 1)), [(1 << 64) - 1]),
    "INT32": (field(2, -1) + field(2, 5), [-1, 5]),  # not packed
    "FP32": (field(6, b"\x00\x00\x00\x3f"), [0.5]),
    "FP64": (field(7, b"\x00\x00\x00\x00\x00\x00\xe0\x3f"), [0.5]),
    "BYTES": (field(8, "a") + field(8, ""), [b"a", b""]),
}


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents(datatype):
    contents, values = TYPED[datatype]
    output = field(1, "OUT") + field(2, datatype) + field(3, varint(len(values))) + field(5, contents)
    got = infer_response(field(1, "m") + field(5, output)).outputs["OUT"]
    assert values_of(got) == values
    assert got.shape == (len(values),)


def test_a_number_that_its_type_cannot_hold():
    output = field(1, "OUT") + field(2, "UINT8") + field(5, field(4, varint(300)))
    with pytest.raises(ValueError, match="not of datatype UINT8"):
        infer_response(field(5, output))


@pytest.mark.parametrize(
    ("shape", "datatype", "values", "said"),
    [
        ([2], "FP32", [1.0], "1 values for the shape"),
        ([-1], "FP32", [1.0], "1 values for the shape"),
        ([1], "BF16", [1.0], "datatype BF16; known: BOOL"),
        ([1], "INT8", [300], "not of datatype INT8"),
        ([1], "FP32", ["x"], "not of datatype FP32"),
        ([1], "BYTES", [5], "a value of type int is not of datatype BYTES"),
        ([1], "BOOL", ["no"], "a value of type str is not of datatype BOOL"),
        ([1], "BOOL", [5], "tensor IN: 5 is not of datatype BOOL; expected true, false, 1 or 0"),
    ],
)
def test_a_tensor_that_cannot_be(shape, datatype, values, said):
    with pytest.raises(ValueError, match=said):
        tensor("IN", datatype, shape, values)


def test_a_bool_may_be_a_number():
    assert values_of(tensor("IN", "BOOL", [4], [0, 1, True, False])) == [False, True, True, False]


def a_stream_message(final):
    about = field(4, field(1, FINAL) + field(2, field(1, final)))
    return field(2, field(1, "m") + about)


def test_the_final_message_is_known():
    assert is_final(a_stream_message(True))
    assert not is_final(a_stream_message(False))
    assert not is_final(field(2, field(1, "a model called triton_final_response")))
    assert not is_final(b"\xff triton_final_response")


def test_an_error_in_a_stream():
    assert stream_response(field(1, "no such model") + field(2, field(3, "r"))).error == "no such model"


def test_a_bare_answer_in_a_stream_is_mlservers():
    one = tensor("output", "BYTES", [1], ["hi"])
    about = field(1, one.name) + field(2, one.datatype) + field(3, varint(1))
    bare = field(1, "m") + field(5, about) + field(6, one.raw)
    assert stream_response(bare) == infer_response(bare)
    assert stream_response(field(2, bare)).outputs == {"output": one}


def test_what_a_server_says_of_itself():
    about = field(1, "IN") + field(2, "FP32") + field(3, varint(-1) + varint(4))
    page = model_metadata(field(1, "echo") + field(2, "1") + field(3, "python") + field(4, about) + field(5, about))
    row = {"name": "IN", "datatype": "FP32", "shape": [-1, 4]}
    assert page == {"name": "echo", "platform": "python", "inputs": [row], "outputs": [row]}
    assert server_metadata(field(1, "triton") + field(2, "2.51.0") + field(3, "x")) == {
        "name": "triton",
        "version": "2.51.0",
    }
    assert (server_ready(field(1, True)), server_ready(b"")) == (True, False)
    rows = field(1, field(1, "a") + field(3, "READY")) + field(1, field(1, "b") + field(3, "State.UNAVAILABLE"))
    assert repository_index(rows) == [{"name": "a", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE"}]


@given(st.lists(st.binary(max_size=400), max_size=5), st.sampled_from(list(GRPC_STATUS)), st.text(max_size=50))
@example([], 13, "two\r\nlines: 100%")
def test_frames_come_back(messages, code, text):
    data = b"".join(map(frame, messages)) + status_frame(code, text)
    assert read_frames(data) == (messages, Status(code, text))
    if len(data) > 1:
        with pytest.raises(ValueError, match="half a gRPC frame"):
            read_frames(data[:-1])


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data):
    for reader in (infer_response, stream_response, model_metadata, repository_index, server_metadata, read_frames):
        try:
            got = reader(data)
        except ValueError:
            continue
        for one in getattr(got, "outputs", {}).values():
            if isinstance(one, Tensor):
                try:
                    values_of(one)
                except ValueError:
                    continue
    is_final(data + FINAL.encode())


# ---- against google.protobuf, from the same fields


@pytest.fixture(scope="module")
def protobuf():
    """Classes of the messages, by a description of their fields."""
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = {"bool": 8, "int32": 5, "int64": 3, "uint32": 13, "uint64": 4, "float": 2, "double": 1, "bytes": 12}
    kinds |= {"string": 9}
    contents = ["*bool b 1", "*int32 i 2", "*int64 l 3", "*uint32 u 4", "*uint64 w 5", "*float f 6", "*double d 7"]
    messages = {
        "Parameter": ["bool b 1", "int64 i 2", "string s 3"],
        "Entry": ["string key 1", "Parameter value 2"],
        "Contents": [*contents, "*bytes t 8"],
        "Tensor": [
            "string name 1",
            "string datatype 2",
            "*int64 shape 3",
            "*Entry parameters 4",
            "Contents contents 5",
        ],
        "Request": ["string model 1", "string version 2", "string id 3", "*Entry parameters 4", "*Tensor tensors 5"],
    }
    messages["Response"] = [*messages["Request"], "*bytes raw 6"]
    messages["Request"] = [*messages["Request"], "*bytes raw 7"]
    file = descriptor_pb2.FileDescriptorProto(name="ours.proto", package="ours", syntax="proto3")
    for name, rows in messages.items():
        message = file.message_type.add(name=name)
        for row in rows:
            kind, called, number = row.lstrip("*").split()
            label = 3 if row[0] == "*" else 1
            one = message.field.add(name=called, number=int(number), label=label, type=kinds.get(kind, 11))
            if kind not in kinds:
                one.type_name = f".ours.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file) if hasattr(pool, "Add") else pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ours.{name}")) for name in messages}


def test_protobuf_reads_our_request(protobuf):
    @given(NAMES, st.lists(tensors(), max_size=3), st.dictionaries(NAMES, INTS, max_size=2))
    def check(model, pairs, parameters):
        inputs = [one for one, _ in pairs]
        got = protobuf["Request"].FromString(with_id("r", infer_request(model, inputs, parameters)))
        assert (got.model, got.id, list(got.raw)) == (model, "r", [one.raw for one in inputs])
        assert [(t.name, t.datatype, tuple(t.shape)) for t in got.tensors] == [one[:3] for one in inputs]
        assert {entry.key: entry.value.i for entry in got.parameters} == parameters

    check()


def test_we_read_protobufs_response(protobuf):
    places = {"b": "BOOL", "i": "INT32", "l": "INT64", "u": "UINT32", "w": "UINT64", "f": "FP32", "d": "FP64"}
    places |= {"t": "BYTES"}

    @given(st.data())
    def check(data):
        place = data.draw(st.sampled_from(list(places)))
        values = data.draw(st.lists(elements(places[place]), max_size=5))
        made = protobuf["Response"](model="m", id="r")
        made.parameters.add(key=FINAL).value.b = True
        one = made.tensors.add(name="OUT", datatype=places[place], shape=[len(values), 1])
        getattr(one.contents, place).extend(values)
        got = infer_response(made.SerializeToString())
        assert values_of(got.outputs["OUT"]) == values
        assert got.outputs["OUT"].shape == (len(values), 1)
        assert got.parameters == {FINAL: True}
        assert all(math.isfinite(v) or place in "fd" for v in values if isinstance(v, float))

    check()
