import json
from pathlib import Path

import pytest

from llm_bench import targets
from llm_bench.errors import BenchError, TargetError
from llm_bench.targets import Target
from tests.bench import good, llm_server
from tests.scripted import END, SSE_HEAD, Scripted, http_response, sse, token, unused_port

NONE = Path("no-such-targets.toml")


def silent(_: str) -> None:
    pass


def test_names_urls_and_built_ins_mix():
    found = targets.parse("reference, a=http://h:1/v1/, http://127.0.0.1:8000/v1", NONE, {"model": "m"})
    assert [(t.name, t.url, t.model) for t in found] == [
        ("reference", "", "m"),
        ("a", "http://h:1/v1", "m"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1", "m"),
    ]
    assert found[0].launch
    assert not found[1].launch


def test_a_file_declares_targets_and_a_flag_wins_over_it(tmp_path):
    file = tmp_path / "targets.toml"
    file.write_text(
        '[targets.v]\nurl = "http://h/v1"\nmodel = "big"\nmax-model-len = 100\nheaders = { X-Team = "a" }\n'
    )
    (found,) = targets.parse("v", file, {})
    assert (found.url, found.model, found.max_model_len, found.api) == ("http://h/v1", "big", 100, "openai-chat")
    assert targets.parse("v", file, {"model": "small"})[0].model == "small"
    assert targets.auth_headers(found) == [("X-Team", "a")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[targets.v\n", "not TOML"),
        ("[target.v]\nurl = 'x'\n", r"only tables \[targets.NAME\]"),
        ("[targets]\nv = 3\n", "targets.v is not a table"),
        ("[targets.v]\nurll = 'http://h/v1'\n", "unknown keys.*urll"),
        ("[targets.v]\nurl = 3\n", "url = 3 is not a str"),
        ("[targets.v]\nurl = 'http://h/v1'\nmax_model_len = 'big'\n", "max_model_len = 'big' is not a int"),
        ("[targets.v]\nurl = 'http://h/v1'\nheaders = { a = \"x\\r\\ny\" }\n", "not one line"),
        ("[targets.v]\nurl = 'ftp://h'\n", "is no URL"),
        ("[targets.v]\nmodel = 'm'\n", "is no URL"),
        ("[targets.v]\nurl = 'http://h/v1'\nkey_env = 'NOT_SET_ANYWHERE'\n", "NOT_SET_ANYWHERE"),
    ],
)
def test_a_wrong_file_is_refused_with_what_would_be_right(tmp_path, text, said):
    file = tmp_path / "targets.toml"
    file.write_text(text)
    with pytest.raises(BenchError, match=said):
        targets.parse("v", file, {})


def test_a_key_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(BenchError, match="--key-env") as caught:
        targets.parse("a=http://user:sk-secret@h/v1", NONE, {})
    assert "sk-secret" not in str(caught.value)


def test_two_targets_of_one_name_and_none_at_all_are_refused():
    with pytest.raises(BenchError, match="twice"):
        targets.parse("a=http://h/v1,a=http://g/v1", NONE, {})
    with pytest.raises(BenchError, match="no target"):
        targets.parse(" , ", NONE, {})


def test_what_is_stored_of_a_target_holds_no_header_value():
    stored = json.dumps(Target("a", "http://h/v1", headers={"X-Key": "secret"}).public())
    assert "secret" not in stored
    assert "X-Key" in stored


def test_a_probe_finds_limits_sizes_and_what_the_server_says():
    with Scripted(llm_server([], max_model_len=2048)) as server:
        found = targets.probe(Target("t", server.url), silent, 5.0)
    assert (found.model, found.max_model_len) == ("m", 2048)
    assert found.usage_in_stream
    assert found.lengths_pinned
    assert found.finish_reason_seen
    assert (found.base_tokens, found.tokens_per_word) == (0.0, 1.0)
    assert found.rtt_ms is not None
    assert found.ttft_ms is not None


def test_a_declared_limit_wins_over_the_probed_one():
    with Scripted(llm_server([], max_model_len=2048)) as server:
        assert targets.probe(Target("t", server.url, max_model_len=99), silent, 5.0).max_model_len == 99


def test_a_server_that_ends_early_has_no_pinned_lengths():
    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        return [(0, SSE_HEAD + sse(token("no"), finish, "[DONE]") + END)]

    with Scripted(answer) as server:
        found = targets.probe(Target("t", server.url), silent, 5.0)
    assert not found.lengths_pinned
    assert not found.usage_in_stream
    assert any("not pinned" in note for note in found.notes)


def test_fields_that_a_server_refuses_are_dropped_one_after_the_other_and_remembered():
    seen_fields = []

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        body = seen.json()
        seen_fields.append(("ignore_eos" in body, "stream_options" in body))
        if "stream_options" in body or "ignore_eos" in body:
            return [(0, http_response(400, b'{"error": {"message": "unknown field"}}'))]
        return good(seen)

    with Scripted(answer) as server:
        found = targets.probe(Target("t", server.url), silent, 5.0)
    assert seen_fields[:4] == [(True, True), (False, True), (True, False), (False, False)]
    assert (found.ask.pin_lengths, found.ask.include_usage) == (False, False)


def test_a_target_without_a_list_of_models_needs_a_name():
    def answer(number, seen):
        return [(0, http_response(404, b"not found"))] if seen.method == "GET" else good(seen)

    with Scripted(answer) as server:
        with pytest.raises(TargetError, match="--model"):
            targets.probe(Target("t", server.url), silent, 5.0)
        assert targets.probe(Target("t", server.url, model="x"), silent, 5.0).model == "x"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_one_sentence(status, monkeypatch):
    with Scripted([(0, http_response(status, b"{}"))]) as server:
        with pytest.raises(TargetError, match="--key-env"):
            targets.probe(Target("t", server.url), silent, 5.0)
        monkeypatch.setenv("SOME_KEY", "k")
        with pytest.raises(TargetError, match="its key was refused"):
            targets.probe(Target("t", server.url, key_env="SOME_KEY"), silent, 5.0)


def test_a_server_that_is_still_starting_is_waited_for():
    said = []

    def answer(number, seen):
        if number < 2:
            return [(0, http_response(503, b"loading"))]
        return llm_server([])(number, seen)

    with Scripted(answer) as server:
        assert targets.probe(Target("t", server.url), said.append, 10.0).model == "m"
    assert "waiting for t" in said[0]


def test_nobody_there_is_one_sentence_with_the_limit():
    url = f"http://127.0.0.1:{unused_port()}/v1"
    with pytest.raises(TargetError, match=r"not ready after 0\.2 s .*--ready-timeout"):
        targets.probe(Target("t", url), silent, 0.2)
    assert not targets.reachable(Target("t", url))


def test_a_built_in_target_that_cannot_start_says_its_last_word(tmp_path):
    broken = Target("x", launch=("-c", "raise SystemExit('no room for the model')"))
    with pytest.raises(TargetError, match="no room for the model"), targets.running(broken, silent, tmp_path / "x.log"):
        pass
