"""KServe v2 over HTTP: bodies as JSON and with binary tensors, answers as real servers gave them."""

import json
import re
import struct

import pytest

from llm_bench import answer, clock, exchange, probe
from llm_bench.bodies import Ask
from llm_bench.dialect_kserve import HEAD, binary_headers
from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import Timeouts
from llm_bench.kserve_tensors import described
from llm_bench.request import Request
from llm_bench.targets import Target
from llm_bench.transport import TRANSPORTS, Asked
from tests.fixtures import CAPTURES
from tests.fixtures import exchange as seen_by_the_socket
from tests.fixtures.protocols import METADATA, MODEL, body_of, serve
from tests.scripted import Scripted

ROW = Request(6, 40, prompt="low water", line=7)
EXTRA = described(METADATA, {"id": "a", "parameters": {"priority": 1}})
ASK = Ask("m", stream=False, extra=EXTRA)
JSON, BINARY = DIALECTS["kserve-http"], DIALECTS["kserve-binary"]


def read(name, data, ended=exchange.COMPLETE, status=200):
    x = seen_by_the_socket([(5, data)], ended, status)
    return answer.read(x, DIALECTS[name], streamed=False, asked_out=None, pinned=False, finish_expected=False)


def test_json_holds_every_tensor_and_what_else_extra_says():
    body = json.loads(JSON.encode(ROW, ASK))
    assert (body["id"], body["parameters"], "tensors" in body) == ("a", {"priority": 1}, False)
    text, features, ids = body["inputs"]
    assert text == {"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["low water"]}
    assert (features["shape"], len(features["data"])) == ([1, 4], 4)
    assert (ids["shape"], ids["datatype"], len(ids["data"])) == ([1, 6], "INT64", 6)
    assert binary_headers(JSON.encode(ROW, ASK)) == ()


def test_binary_tensors_stand_behind_the_json_in_its_order():
    made = BINARY.encode(ROW, ASK)
    ((name, length),) = binary_headers(made)
    assert name == HEAD
    head, raw = json.loads(made[: int(length)]), made[int(length) :]
    assert head["parameters"] == {"priority": 1, "binary_data_output": True}
    assert [one["parameters"]["binary_data_size"] for one in head["inputs"]] == [4 + 9, 16, 48]
    assert raw[:13] == struct.pack("<I", 9) + b"low water"
    as_json = json.loads(JSON.encode(ROW, ASK))["inputs"]
    assert list(struct.unpack("<4f", raw[13:29])) == pytest.approx(as_json[1]["data"])
    assert list(struct.unpack("<6q", raw[29:])) == as_json[2]["data"]
    assert not any("data" in one for one in head["inputs"])


def test_a_prompt_of_line_ends_does_not_end_the_json():
    made = BINARY.encode(Request(6, 40, prompt="a\nb\r\n"), ASK)
    assert json.loads(made[: int(binary_headers(made)[0][1])])["inputs"][0]["parameters"] == {"binary_data_size": 9}


def test_half_precision_has_no_json():
    ask = Ask("m", extra={"tensors": {"X": {"datatype": "FP16", "shape": [2]}}})
    with pytest.raises(BenchError, match="line 7: input X is FP16, which JSON cannot hold; use --api kserve-binary"):
        JSON.encode(ROW, ask)
    assert BINARY.encode(ROW, ask)
    bent = Ask("m", extra={"tensors": {"X": {"datatype": "INT8", "shape": [1], "data": 500}}})
    with pytest.raises(BenchError, match="line 7: tensor X: not of datatype INT8"):
        BINARY.encode(ROW, bent)


@pytest.mark.parametrize("name", ["kserve-http", "kserve-binary"])
def test_a_captured_body_is_sent_as_it_stands(name):
    captured = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [1.0]}], "id": "b"}
    made = DIALECTS[name].encode(Request(1, None, body=captured), ASK)
    assert json.loads(made) == {"parameters": {"priority": 1}, **captured}
    assert binary_headers(made) == ()


def test_the_length_of_the_json_goes_with_the_load_and_with_the_probe():
    with Scripted(serve("kserve-binary")) as server:
        target = Target("t", server.url.removesuffix("/v1"), api="kserve-binary", model=MODEL)
        found = probe.probe(target, lambda _: None, 5.0)
        assert found.ask.extra["tensors"].keys() == {"TEXT", "FEATURES", "IDS"}
        transport = TRANSPORTS[BINARY.transport]

        async def one():
            sender = transport.open(Asked(target, target.url, BINARY, MODEL, False, Timeouts()))
            got = await sender.send(transport.frame("r-0", BINARY.encode(ROW, found.ask)))
            sender.close()
            return got

        clock.run(one())
        infers = [seen for seen in server.requests if seen.path.endswith("/infer")]
    assert len(infers) >= 3
    for seen in infers:
        head = json.loads(seen.body[: int(seen.headers[HEAD.lower()])])
        sizes = [one["parameters"]["binary_data_size"] for one in head["inputs"]]
        assert sum(sizes) == len(seen.body) - int(seen.headers[HEAD.lower()])


def test_a_model_whose_page_has_no_inputs_is_told_before_any_load():
    def answers(number, seen):
        if seen.path == f"/v2/models/{MODEL}":
            return body_of({"name": MODEL, "inputs": []})
        return serve("kserve-http")(number, seen)

    with Scripted(answers) as server:
        root = server.url.removesuffix("/v1")
        with pytest.raises(TargetError, match=rf"target t: {root}/v2/models/m: the model's metadata lists no inputs"):
            probe.probe(Target("t", root, api="kserve-http"), lambda _: None, 5.0)
        extra = {"tensors": {"X": {"datatype": "FP32", "shape": [1, 4]}}}
        found = probe.probe(Target("t", root, api="kserve-http", extra=extra), lambda _: None, 5.0)
    assert found.ask.extra == extra


# Answers


def answer_of(outputs, raw=b"", **more):
    return json.dumps({"model_name": "m", "outputs": outputs, **more}).encode() + raw


BIN = {"name": "O", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}


def test_binary_outputs_are_whole_or_none():
    good = answer_of([BIN], b'\x00\x00\x80?}}"\xff')  # bytes that look like JSON's own
    assert read("kserve-binary", good).outcome == "ok"
    for data in (good[:-1], good + b"x", answer_of([BIN])):
        got = read("kserve-binary", data)
        assert got.error_kind == "protocol_error"
        assert "bytes of binary tensors where the answer announces 8" in got.error
    assert read("kserve-binary", good[:-1], exchange.TRUNCATED).error_kind == "truncated_stream"


def test_an_output_without_its_data_is_no_answer():
    got = read("kserve-http", answer_of([{"name": "O", "datatype": "FP32", "shape": [1]}]))
    assert (got.error_kind, "output 'O' has no data" in got.error) == ("protocol_error", True)
    assert read("kserve-http", answer_of([{"name": "O", "data": []}])).outcome == "ok"


def test_a_servers_own_account_is_read():
    said = {"queue_ns": 2_000_000, "compute_ns": 5_500_000, "batch_size": 4, "http_in_ns": -1}
    got = read("kserve-http", answer_of([{"name": "O", "data": [1]}], parameters=said))
    assert got.server_ms == {"server_queue_ms": 2.0, "server_prefill_ms": 5.5}
    for bent in (5, [], {"queue_ns": "x", "compute_ns": -5}, {"queue_ns": 2**63}):
        assert read("kserve-http", answer_of([{"name": "O", "data": [1]}], parameters=bent)).server_ms == {}


def captured(file) -> tuple[int, bytes]:
    """Status and body of a captured answer."""
    path = CAPTURES / file
    if not path.exists():
        pytest.skip("no ../shared/captures here")
    data = path.read_bytes()
    head, _, rest = data[data.rfind(b"\nHTTP/1.1") + 1 :].partition(b"\r\n\r\n")
    length = int(re.findall(rb"(?im)^content-length: (\d+)", head)[-1])
    return int(head.split()[1]), rest[:length]


@pytest.mark.parametrize(
    ("file", "outcome", "said"),
    [
        ("triton/infer_json.txt", "ok", ""),
        ("triton/infer_binary.txt", "ok", ""),
        ("mlserver/infer.txt", "ok", ""),
        ("triton/infer_err_shape.txt", "http_4xx", "unexpected shape for input 'INPUT0'"),
        ("triton/err_infer_on_decoupled.txt", "http_5xx", "doesn't support models with decoupled transaction policy"),
        ("mlserver/err_bad_model.txt", "http_4xx", "Model nope not found"),
        ("mlserver/err_invalid_json.txt", "http_4xx", "JSON decode error"),
    ],
)
def test_what_real_servers_were_seen_to_answer_is_read(file, outcome, said):
    status, body = captured(file)
    for name in ("kserve-http", "kserve-binary"):
        got = read(name, body, status=status)
        assert (got.error_kind or got.outcome) == outcome
        assert said in got.error


def test_a_real_models_page_fills_a_request():
    path = CAPTURES / "triton/model_meta.txt"
    if not path.exists():
        pytest.skip("no ../shared/captures here")
    page = json.loads(re.search(r'^({"name":"llm".*?})\* Connection', path.read_text(), re.M)[1])
    body = json.loads(JSON.encode(ROW, Ask("llm", extra=described(page, {}))))
    inputs = {one["name"]: one for one in body["inputs"]}
    assert inputs["text_input"]["data"] == ["low water"]
    assert inputs["max_tokens"]["data"] == [40]
    assert inputs["stream"]["shape"] == [1]
