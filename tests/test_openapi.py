"""The document that the server serves is true, and hostile input gets a 4xx of OpenAI's shape: no 500, no hang."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reference_engine import intake, openapi
from reference_engine.openai_api import LONGEST_ERROR, MOST_NESTING, ApiError, check_nesting, error_body, shown
from reference_engine.server import ROUTES
from tests.test_engine_server import CHAT, COMPLETIONS, Program, end, launch

GENERATE = (COMPLETIONS, CHAT)
SEEDS: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    started = launch("--model", "sim:null", "--allow-faults", "--num-blocks", "64")
    yield started
    state = ask(started.port, "GET", "/v1/engine")[2]  # after all of it: nobody runs, no block is missing
    assert (state["running"], state["waiting"], state["free_blocks"], state["check"]) == (0, 0, 64, "ok")
    assert started.process.stdin
    assert started.process.stderr
    started.process.stdin.close()
    assert b"Traceback" not in started.process.stderr.read()
    assert end(started) == 0


def ask(port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """(status, headers, JSON or bytes). A hang is a failure after 10 s."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})
    response = connection.getresponse()
    got = response.read()
    connection.close()
    kind = response.headers.get("Content-Type", "")
    return response.status, response.headers, json.loads(got) if kind.startswith("application/json") else got


def document(port: int) -> Any:
    return ask(port, "GET", "/openapi.json")[2]


def is_refusal(status: int, body: Any) -> bool:
    """A 4xx with OpenAI's error object, all of it, and no more of what was sent than a person reads."""
    error = body["error"] if isinstance(body, dict) and set(body) == {"error"} else {}
    return (
        400 <= status < 500
        and set(error) == {"message", "type", "param", "code"}
        and error["code"] == status
        and 0 < len(error["message"]) <= LONGEST_ERROR + 1
        and error["type"] != "InternalServerError"
    )


def property_schema(port: int, path: str) -> dict[str, Any]:
    body = document(port)["paths"][path]["post"]["requestBody"]
    schema = body["content"]["application/json"]["schema"]
    found: dict[str, Any] = schema.get("anyOf", [schema])[0]["properties"]  # the first is of answers, not of scores
    return found


# The document


def test_every_route_is_described_and_every_description_served(program: Program) -> None:
    assert set(openapi.ROUTES) == set(ROUTES)
    paths = document(program.port)["paths"]
    assert {(method.upper(), path) for path, row in paths.items() for method in row} == set(ROUTES)
    for path, row in paths.items():
        named = path.format(model="sim:null")
        for method in {"get", "post", "delete", "put"} - set(row):
            status, _, body = ask(program.port, method.upper(), named)
            assert status == 405, (method, path)
            assert set(body) == {"error"} if path.startswith("/v2") else is_refusal(status, body)
        if "get" in row:
            status, headers, _ = ask(program.port, "GET", named)
            assert status == 200
            assert headers["Content-Type"].split(";")[0] in row["get"]["responses"]["200"]["content"]


@pytest.mark.parametrize("path", GENERATE)
def test_best_of_is_described_where_it_is_read(program: Program, path: str) -> None:
    assert property_schema(program.port, path)["best_of"]["type"] == ["integer", "null"]
    body = SEEDS[path] | {"max_tokens": 1, "n": 2}
    assert [ask(program.port, "POST", path, body | {"best_of": n})[0] for n in (2, 3, None)] == [200, 400, 200]
    _, _, said = ask(program.port, "POST", path, body | {"best_of": 3})
    assert said["error"]["param"] == "best_of"
    assert said["error"]["message"].startswith("best_of is 3; expected 2, which is n: ")


WRONG: dict[str, tuple[bytes, dict[str, str]]] = {
    "no JSON": (b"{", {}),
    "a list": (b"[]", {}),
    "nothing in it": (b"{}", {}),
    "packed": (b"{}", {"Content-Encoding": "br"}),
    "too large": (b" " * (intake.MAX_BODY_BYTES + 1), {}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_every_status_of_a_refusal_is_described(program: Program, wrong: str) -> None:
    expected = {"packed": 415, "too large": 413}.get(wrong, 400)
    posts = {path: row["post"] for path, row in document(program.port)["paths"].items() if "post" in row}
    assert len(posts) == sum(method == "POST" for method, _ in ROUTES)
    for path, post in posts.items():
        data, headers = WRONG[wrong]
        status, _, _ = ask(program.port, "POST", path.format(model="sim:null"), data, headers)
        assert status == expected, path
        assert str(status) in post["responses"], path


@pytest.mark.parametrize("path", GENERATE)
def test_limits_are_where_the_document_has_them(program: Program, path: str) -> None:
    """At a limit a value is not refused for itself, beyond it is, and by name."""

    def refused(field: str, value: Any) -> str | None:
        body = {**SEEDS[path], "max_tokens": 1, field: value}
        if field == "stream_options":
            body["stream"] = True
        status, _, said = ask(program.port, "POST", path, body)
        assert status == 200 or is_refusal(status, said), (field, value, said)
        return None if status == 200 else said["error"]["param"]

    for field, schema in property_schema(program.port, path).items():
        if "enum" in schema:
            for value in schema["enum"]:
                assert refused(field, value) is None, field
            assert refused(field, {"no": "such"}) == field
            continue
        kinds = schema.get("type", ())
        if "null" in kinds:
            assert refused(field, None) is None
        if "boolean" in kinds:
            assert (refused(field, True), refused(field, False), refused(field, 1)) == (None, None, field)
        if "minimum" in schema:
            low, high = schema["minimum"], schema.get("maximum")
            step = 1 if "integer" in kinds else 1e-7
            at_low = refused(field, low)
            assert at_low is None or field == "priority"  # needs another policy, which is said
            assert refused(field, low - step) == field
            if high is not None and field != "priority":
                assert refused(field, high) is None
                assert refused(field, high + max(step, 1e-6)) == field
        if "maxLength" in schema:
            assert (refused(field, "x" * schema["maxLength"]), refused(field, "x" * (schema["maxLength"] + 1))) == (
                None,
                field,
            )
    one, many, _ = property_schema(program.port, path)["stop"]["anyOf"]
    assert refused("stop", ["\N{SNOWMAN}" * one["maxLength"]] * many["maxItems"]) is None
    assert refused("stop", "x" * (one["maxLength"] + 1)) == "stop"
    assert refused("stop", ["x"] * (many["maxItems"] + 1)) == "stop"
    assert refused("stop", "") == "stop"


def test_messages_and_prompts_have_their_limits(program: Program) -> None:
    def param(path: str, body: Any) -> str:
        status, _, said = ask(program.port, "POST", path, body)
        assert is_refusal(status, said)
        return str(said["error"]["param"])

    last = property_schema(program.port, COMPLETIONS)["prompt"]["anyOf"][1]["items"]["maximum"]
    assert param(COMPLETIONS, {"prompt": [last + 1]}) == "prompt"
    assert ask(program.port, "POST", COMPLETIONS, {"prompt": [last], "max_tokens": 1})[0] == 200
    most = property_schema(program.port, CHAT)["messages"]["maxItems"]
    assert param(CHAT, {"messages": [{"role": "user", "content": ""}] * (most + 1)}) == "messages"
    assert param(CHAT, {"messages": [{"role": "u" * 257, "content": ""}]}) == "messages"
    assert (
        param(CHAT, {"messages": [{"role": "user", "content": "x" * (64 * 16 * intake.CHARS_A_TOKEN + 1)}]})
        == "messages"
    )
    assert param(COMPLETIONS, {"prompt": "x" * (64 * 16 * intake.CHARS_A_TOKEN + 1)}) == "prompt"


def test_user_of_embeddings_is_a_string(program: Program) -> None:
    status, _, body = ask(program.port, "POST", "/v1/embeddings", {"input": "x", "user": 5})
    assert (status, body["error"]["param"]) == (400, "user")


def test_a_text_that_is_too_long_for_a_pass_is_named_as_its_route_names_it(program: Program) -> None:
    """KServe's errors are a text alone."""
    long = "x" * (512 * intake.CHARS_A_TOKEN + 1)
    ids = {"name": "input_ids", "shape": [1, 513], "datatype": "INT64", "data": [1] * 513}
    text = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["x", long]}
    for inputs, said in ((["x", long], "input[1] has 65537 characters"), ([[1] * 513], "input[0] has 513 tokens")):
        status, _, body = ask(program.port, "POST", "/v1/embeddings", {"input": inputs})
        assert (status, body["error"]["param"]) == (400, "input")
        assert body["error"]["message"].startswith(said)
    for tensor, said in ((text, "text[1] has 65537 characters"), (ids, "input_ids[0] has 513 tokens")):
        status, _, body = ask(program.port, "POST", "/v2/models/sim:null/infer", {"inputs": [tensor]})
        assert status == 400
        assert body["error"].startswith(said)


# Hostile input

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
HUGE = st.sampled_from([2**63, -(2**63) - 1, 10**30, 1e308, -0.0, "x" * 70_000, ["x"] * 5000, [[[]]] * 100, {"a": {}}])


@st.composite
def bodies(draw: st.DrawFn, path: str, fields: tuple[str, ...]) -> dict[str, Any]:
    """A body that is right but for some of its fields, or that has others."""
    body: dict[str, Any] = dict(SEEDS[path]) if draw(st.booleans()) else {}
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        body[field] = draw(JSON | HUGE)
    if draw(st.booleans()):
        body |= draw(st.dictionaries(st.text(max_size=10), JSON, max_size=3))
    return body


@pytest.mark.parametrize("path", [*GENERATE, "/fault"])
def test_a_body_of_any_json_is_answered_or_refused(program: Program, path: str) -> None:
    if path == "/fault":
        kinds = document(program.port)["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        names = tuple(sorted({name for kind in kinds["oneOf"] for name in kind["properties"]}))
    else:
        names = tuple(property_schema(program.port, path))

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(bodies(path, names) if path in SEEDS else st.dictionaries(st.sampled_from(names), JSON | HUGE, max_size=4))
    def fuzz(body: dict[str, Any]) -> None:
        status, headers, said = ask(program.port, "POST", path, body)
        assert status == 200 or is_refusal(status, said), (status, said)
        if path in SEEDS:
            assert headers["X-Request-Id"]

    fuzz()
    assert ask(program.port, "DELETE", "/fault")[0] == 200  # what was planted strikes no other test


PIECES = st.sampled_from([b"{", b"}", b"[", b"]", b'"prompt"', b":", b",", b'"x"', b"\xff\xfe", b"\\ud800", b"1e999",
                          b"\0", b"NaN", b'"stream":true', b'"n":128', b" ", b"-"])  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.lists(PIECES, max_size=30).map(b"".join) | st.binary(max_size=200))
def test_a_body_of_any_bytes_is_refused(program: Program, data: bytes) -> None:
    status, _, said = ask(program.port, "POST", COMPLETIONS, data)
    assert status == 200 or is_refusal(status, said)


NESTED = [
    b'{"prompt":"x","stop":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"messages":[{"role":"user","content":"x","tool_calls":' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}]}",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt":' + b"[" * 1000 + b"1" + b"]" * 1000 + b"}",
    b'{"prompt":"\\ud800"}',
    b'{"prompt":"x","max_tokens":' + b"9" * 10_000 + b"}",
]


@pytest.mark.parametrize("data", NESTED, ids=range(len(NESTED)))
@pytest.mark.parametrize("path", GENERATE)
def test_depth_and_broken_text_are_refused(program: Program, path: str, data: bytes) -> None:
    status, _, said = ask(program.port, "POST", path, data)
    assert is_refusal(status, said)


def test_nesting_is_counted_exactly() -> None:
    def body(depth: int) -> dict[str, Any]:
        inner: Any = 1
        for _ in range(depth - 1):
            inner = [inner]
        return {"a": inner, "b": [[]] * MOST_NESTING}

    check_nesting(json.dumps(body(MOST_NESTING)).encode(), body(MOST_NESTING))
    with pytest.raises(ApiError, match="nested more than"):
        check_nesting(json.dumps(body(MOST_NESTING + 1)).encode(), body(MOST_NESTING + 1))


def test_a_long_message_is_cut() -> None:
    message = json.loads(error_body(400, "é" * 10_000))["error"]["message"]
    assert message == "é" * LONGEST_ERROR + "…"
    assert json.loads(error_body(400, "e" * LONGEST_ERROR))["error"]["message"] == "e" * LONGEST_ERROR


def test_a_strangers_value_is_shown_short() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for value in (deep, "x" * 10**6, list(range(10**5)), {str(i): i for i in range(10**4)}):
        assert len(shown(value)) < 200


RAW = [
    b"GET / HTTP/1.1\r\n\r\n",  # no host
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 0\r\n\r\n",
    b"GET /v1/engine HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 10_000 + b"\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%2e%2e/%ff HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
def test_what_is_hardly_http_is_a_4xx(program: Program, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", program.port), timeout=10) as connection:
        connection.sendall(data)
        head = connection.recv(65536)
    assert head.split(b" ")[1][:1] == b"4", head[:300]


def test_other_paths_and_methods_reach_nothing(program: Program) -> None:
    for method, path in (("GET", "/etc/passwd"), ("PUT", COMPLETIONS), ("GET", "/v1/models/../../x"), ("PATCH", "/")):
        status, _, said = ask(program.port, method, path)
        assert is_refusal(status, said)
