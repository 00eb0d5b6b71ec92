"""Embeddings and rerankers: bodies, and what makes an answer without tokens a whole one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import answer, exchange
from llm_bench.bodies import Ask
from llm_bench.dialect_pooling import DOCUMENTS, of_headers, query_and_documents
from llm_bench.dialects import DIALECTS, unsayable
from llm_bench.errors import BenchError
from llm_bench.protocol import Chunk, Usage
from llm_bench.request import Request
from tests.fixtures import exchange as seen_by_the_socket
from tests.fixtures import leaves, trees, unhurried
from tests.fixtures.protocols import SPEAKS

ROWS = ("embeddings", "rerank", "tei-rerank")
SINGLE = [name for name, row in DIALECTS.items() if row.comes.single_pass and row.transport != "grpc"]
TEXT = " ".join(f"word{k}" for k in range(27))
PAGE = b"<!DOCTYPE html>\n<html><head><title>Welcome to nginx!</title></head></html>"
single = pytest.mark.parametrize("name", SINGLE)


def body(name, request, **ask):
    return json.loads(DIALECTS[name].encode(request, Ask("m", stream=False, **ask)))


def read(name, data, ended=exchange.COMPLETE, **head):
    x = seen_by_the_socket([(5, data)] if data else [], ended, **head)
    return answer.read(x, DIALECTS[name], streamed=False, asked_out=None, pinned=False, finish_expected=False)


def whole(name) -> bytes:
    return json.dumps(SPEAKS[name].whole([], 5)).encode()


# What is sent


def test_an_embedding_is_asked_of_a_text_or_of_its_ids():
    assert body("embeddings", Request(5, 99, prompt=TEXT)) == {"model": "m", "input": TEXT}
    assert body("embeddings", Request(3, 99, prompt_token_ids=(7, 8, 9))) == {"model": "m", "input": [7, 8, 9]}
    more = body("embeddings", Request(5, 99, prompt="p", extra={"dimensions": 8}), extra={"encoding_format": "base64"})
    assert more == {"model": "m", "input": "p", "dimensions": 8, "encoding_format": "base64"}


def test_a_reranker_gets_a_query_and_documents_of_the_one_text():
    made = body("rerank", Request(27, 99, prompt=TEXT))
    assert (made["model"], made["query"], len(made["documents"])) == ("m", "word0 word1 word2", DOCUMENTS)
    tei = body("tei-rerank", Request(27, 99, prompt=TEXT))
    assert tei == {"query": made["query"], "texts": made["documents"]}


@given(st.lists(st.text(st.characters(categories=["L"]), min_size=1, max_size=5), min_size=1, max_size=60))
def test_all_words_of_a_text_are_in_its_query_or_one_document(words):
    query, documents = query_and_documents(" ".join(words))
    assert 1 <= len(documents) <= DOCUMENTS
    assert all(documents)
    if len(words) > 1:
        assert " ".join([query, *documents]).split() == words
        sizes = [len(part.split()) for part in (query, *documents)]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("name", "key"), [("rerank", "documents"), ("tei-rerank", "texts")])
def test_documents_that_are_given_are_sent_and_the_prompt_is_the_query(name, key):
    made = body(name, Request(27, None, prompt=TEXT, extra={key: ["a", "b"]}), extra={key: ["of the target"]})
    assert (made["query"], made[key]) == (TEXT, ["a", "b"])
    assert body(name, Request(27, None, prompt=TEXT), extra={key: ["x"]})[key] == ["x"]
    for wrong in ("a", [], {}):
        with pytest.raises(BenchError, match=f"line 4: extra.{key} is not a list of documents"):
            body(name, Request(27, None, prompt=TEXT, extra={key: wrong}, line=4))


@pytest.mark.parametrize("name", ROWS)
def test_of_no_single_pass_a_length_is_asked_and_a_captured_body_stands_as_it_was(name):
    takes = DIALECTS[name].takes
    assert takes.asked(Request(5, 99), Ask("m")) == (None, False, 1)  # its prompt need not be made up yet
    captured = {takes.prompt: "x", "model": "once", "user": "u"}
    made = body(name, Request(5, 99, body=captured))
    assert made == captured | ({"model": "m"} if takes.model else {})
    assert unsayable(Request(0, None, body=captured), name) == ""
    assert f"{name} takes a prompt" in unsayable(Request(1, 1, messages=({"role": "user", "content": "x"},)), name)


# What comes


@single
def test_a_whole_answer_is_ok_without_a_token_and_without_stamps(name):
    got = read(name, whole(name), **{k.replace("-", "_"): v for k, v in SPEAKS[name].head.items()})
    assert (got.outcome, got.error, got.labels, got.event_ns) == ("ok", "", [], [])
    assert (got.tokens_in, got.tokens_out, got.text, got.finish_reason) == (SPEAKS[name].counts[0], 0, "", "")


@single
def test_half_an_answer_is_truncated_wherever_it_was_cut(name):
    data = whole(name)
    for at in range(0, len(data), 11):
        got = read(name, data[:at], exchange.TRUNCATED)
        assert (got.outcome, got.error_kind) == ("failed", "truncated_stream")
        if at:  # half of one behind a length that lies: no JSON
            assert read(name, data[:at]).error_kind == "protocol_error"


@single
@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "empty_output"),
        (b" \n", "protocol_error"),
        (PAGE, "protocol_error"),
        (b"{}", "protocol_error"),
        (b"[]", "protocol_error"),
        (b"null", "protocol_error"),
        (b"\xff\xfe", "protocol_error"),
        (b'{"data":[],"results":[],"outputs":[]}', "protocol_error"),
        (b'{"choices":[{"index":0,"text":"an answer of another protocol"}]}', "protocol_error"),
        (b'{"error":{"message":"no memory","code":500}}', "server_error_in_stream"),
        (b'{"detail":"no memory"}', "server_error_in_stream"),
        (b'{"error":"no memory","error_type":"backend"}', "server_error_in_stream"),
    ],
)
def test_what_is_no_answer_of_the_protocol_has_failed(name, data, kind):
    got = read(name, data)
    assert (got.outcome, got.error_kind) == ("failed", kind)
    assert got.error
    assert kind != "server_error_in_stream" or "no memory" in got.error


@pytest.mark.parametrize(
    ("name", "answer_"),
    [
        ("embeddings", {"data": [{"embedding": []}]}),
        ("embeddings", {"data": [{"embedding": [1.0]}, {"embedding": None}]}),
        ("embeddings", {"data": [5]}),
        ("embeddings", {"data": {"embedding": [1.0]}}),
        ("rerank", {"results": [{"index": 0}]}),
        ("rerank", {"results": [{"index": 0, "relevance_score": True}]}),
        ("rerank", {"results": [{"index": 0, "relevance_score": 0.5}], "usage": {"total_tokens": "many"}}),
        ("tei-rerank", [{"index": 0, "relevance_score": 0.5}]),
        ("tei-rerank", [[0.5]]),
    ],
)
def test_an_answer_without_what_was_asked_for_is_none(name, answer_):
    with pytest.raises(ValueError, match=r"embedding|score|not a|not an"):
        DIALECTS[name].decode(json.dumps(answer_).encode())


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"usage": {"prompt_tokens": 4, "total_tokens": 9}}, 4),
        ({"usage": {"total_tokens": 9}}, 9),
        ({"usage": None}, -1),
        ({}, -1),
        ({"meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": 8}}}, 8),  # Cohere's
        ({"meta": {"billed_units": {"search_units": 1}}}, -1),
    ],
)
def test_the_inputs_tokens_are_counted_wherever_they_are_said(usage, tokens):
    said = {"results": [{"index": 0, "relevance_score": 0.5}], **usage}
    got = read("rerank", json.dumps(said).encode())
    assert (got.outcome, got.tokens_in) == ("ok", tokens)


def test_base64_and_vectors_by_datatype_are_embeddings():
    for vector in ("AAAAPw==", {"float": [0.5]}, [0.5]):
        assert read("embeddings", json.dumps({"data": [{"embedding": vector}]}).encode()).outcome == "ok"


def test_where_a_servers_time_went_is_in_its_head():
    tei = [(b"x-queue-time", b"7"), (b"x-inference-time", b"12"), (b"x-compute-tokens", b"31"), (b"x-total-time", b"9")]
    assert of_headers(tei) == Chunk(usage=Usage(31), server_ms={"server_queue_ms": 7.0, "server_prefill_ms": 12.0})
    timing = b'http_in;dur=0.211, queue;dur=1.5, compute;desc="x";dur=9, compute;dur=2.75, http_out;dur=0.1'
    assert of_headers([(b"x-batch-size", b"8")]).server_ms == {"server_batch": 8.0}
    assert of_headers([(b"x-batch-size", b"0"), (b"x-batch-size", b"-1")]).server_ms == {}
    assert of_headers([(b"server-timing", timing)]).server_ms == {"server_queue_ms": 1.5, "server_prefill_ms": 2.75}


@unhurried
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                [b"x-queue-time", b"x-inference-time", b"x-compute-tokens", b"x-batch-size", b"server-timing", b"x"]
            ),
            st.binary(max_size=12) | st.sampled_from([b"-1", b"nan", b"1e9", b"9" * 5000, b"\xb2", b"queue;dur=-1"]),
        ),
        max_size=4,
    )
)
def test_any_head_says_times_of_0_or_more_or_nothing(headers):
    said = of_headers(headers)
    assert all(0 <= ms < 1e11 for ms in said.server_ms.values())
    assert said.usage is None or 0 <= said.usage.prompt_tokens < 2**31


KEYS = (
    "data",
    "embedding",
    "results",
    "relevance_score",
    "score",
    "outputs",
    "parameters",
    "binary_data_size",
    "usage",
)
answers = st.recursive(
    leaves | trees,
    lambda t: st.lists(t, max_size=2) | st.dictionaries(st.sampled_from(KEYS), t, max_size=4),
    max_leaves=10,
)


@unhurried
@given(answers, st.binary(max_size=9))
@single
def test_any_answer_is_one_or_a_value_error(name, value, behind):
    for data in (json.dumps(value).encode(), json.dumps(value).encode() + behind):
        try:
            chunk = DIALECTS[name].decode(data)
        except ValueError:
            continue
        assert chunk.deltas == ()
        assert all(ms >= 0 for ms in chunk.server_ms.values())
