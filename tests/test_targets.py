import json
from pathlib import Path

import pytest

from llm_bench import probe, targets
from llm_bench.bodies import Ask, asked
from llm_bench.dialects import DIALECTS
from llm_bench.errors import BenchError, TargetError
from llm_bench.exchange import Timeouts
from llm_bench.request import Request
from llm_bench.target import hourly_price
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
        ("[targets.v]\nurll = 'http://h/v1'\n", r"unknown keys \['urll'\] \(url is near\); known: "),
        ("[targets.v]\nurl = 3\n", "url is of type int, expected a text"),
        (
            "[targets.v]\nurl = 'http://h/v1'\nmax_model_len = 'big'\n",
            "max_model_len is of type str, expected a whole number",
        ),
        ("[targets.v]\nurl = 'http://h/v1'\nheaders = { a = \"x\\r\\ny\" }\n", "not one line"),
        ("[targets.v]\nurl = 'http://h/v1'\ncount = 0\n", "count = 0, expected a whole number, 1 to 4096"),
        ("[targets.v]\nurl = 'http://h/v1'\nprice = 2.5\n", "price is of type float, expected a text"),
        ("[targets.v]\nurl = 'http://h/v1'\nprice = '2.5'\n", "price '2.5': expected an amount an hour such as 2.50/h"),
        ("[targets.v]\nurl = 'http://h/v1'\nprice = '-2.5/h'\n", "price '-2.5/h': expected an amount an hour"),
        ("[targets.v]\nurl = 'http://h/v1'\nprice = '!!!2/h'\n", "price '!!!2/h': expected an amount an hour"),
        ("[targets.v]\nurl = 'ftp://h'\n", "is not a URL"),
        ("[targets.v]\nmodel = 'm'\n", "target v: it has no url; expected url = "),
        ("[targets.v]\nurl = 'http://h/v1'\nkey_env = 'NOT_SET_ANYWHERE'\n", "NOT_SET_ANYWHERE"),
        ("[targets.v]\nurl = 'http://h/v1'\nmax_model_len = true\n", "max_model_len is of type bool"),
        ("[targets.v]\nurl = 'http://h/v1'\nmax_model_len = -1\n", "max_model_len = -1, expected a whole number, 0"),
        ("[targets.v]\nurl = 'http://h/v1'\nextra = { top_p = nan }\n", "extra.top_p: .*expected what a JSON body"),
        ("[targets.v]\nurl = 'http://h/v1'\nextra = { a = { b = [1, inf] } }\n", "extra.a: "),
        ("[targets.v]\nurl = 'http://h/v1'\nextra = { since = 2024-01-01 }\n", "extra.since: "),
        ("[targets.v]\nurl = 'http://h/v1'\nextra = { seed = 99999999999999999999 }\n", "extra.seed: "),
        ("[targets.'a/b']\nurl = 'http://h/v1'\n", "a name has letters"),
        ("[targets.v]\nurl = 'http://h/v1'\nheaders = { 'X Key' = 'x' }\n", "not the name of a header"),
        ("[targets.v]\nurl = 'http://h/v1'\nheaders = { Content-Length = '3' }\n", "every request has already"),
        ("[targets.v]\nurl = 'https://h/v1'\ncafile = '/no/such.pem'\n", "cafile /no/such.pem: No such file"),
        (
            "[targets.v]\nurl = 'https://h/v1'\ncafile = '/etc/hostname'\n",
            "cafile /etc/hostname: no certificates in it",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_what_would_be_right(tmp_path, text, said):
    file = tmp_path / "targets.toml"
    file.write_text(text)
    with pytest.raises(BenchError, match=said):
        targets.parse("v", file, {})


@pytest.mark.parametrize("price", ["2.50/h", " $1e3/h ", "EUR .5 / hour", "US$2/h"])
def test_a_price_is_read_as_capacity_reads_it(tmp_path, price):
    file = tmp_path / "targets.toml"
    file.write_text(f'[targets.v]\nurl = "http://h/v1"\nprice = "{price}"\n')
    (found,) = targets.parse("v", file, {})
    assert hourly_price(found.price, "--price")[1] > 0


def test_a_key_in_the_url_is_refused_and_not_repeated():
    with pytest.raises(BenchError, match="--key-env") as caught:
        targets.parse("a=http://user:sk-secret@h/v1", NONE, {})
    assert "sk-secret" not in str(caught.value)


SECRET = "sk-0123456789-secret"


@pytest.mark.parametrize(
    "spec",
    [
        f"a=http://user:{SECRET}@h/v1",
        f"http://user:{SECRET}@h/v1",
        f"a=http://h/v1?api-key={SECRET}",
        f"http://h/v1?api-key={SECRET}",
        f"a=http://h/v1#{SECRET}",
        f"h/v1?api-key={SECRET}",
        f"a=h/v1?api-key={SECRET}",
        f"a=http://h:{SECRET}/v1",
        f"a=http://[{SECRET}",
        f"a=http://h/{SECRET} v1",
        "a=",
    ],
)
def test_a_url_that_may_hold_a_key_is_refused_and_not_repeated(spec):
    with pytest.raises(BenchError) as caught:
        targets.parse(spec, NONE, {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", [name for name, row in DIALECTS.items() if row.path and row.transport != "grpc"])
def test_a_url_with_the_path_that_its_protocol_adds_is_told_the_right_one(name):
    row = DIALECTS[name]
    for path in filter(None, (row.path_of("m", True), row.path_of("m", False))):
        base = f"http://host:9{row.site.base}"
        for url in (base + path, f"http://host:1|{base}{path}"):
            with pytest.raises(BenchError) as caught:
                targets.parse(f"t={url}", NONE, {"api": name})
            right = f'{path} is what api {name} adds to a URL by itself; expected url = "{base}"'
            assert str(caught.value).startswith(f"target t: {right}")
            assert ("the model in `model`" in str(caught.value)) is ("{model}" in row.path)
        assert targets.parse(f"t={base}", NONE, {"api": name})[0].url == base


def test_a_url_with_the_path_of_another_protocol_is_told_which():
    said = 'expected url = "http://h/v1", api = "openai-completions"'
    with pytest.raises(BenchError, match=f"^target t: /completions is what api openai-completions adds .*{said}$"):
        targets.parse("t=http://h/v1/completions", NONE, {})
    with pytest.raises(
        BenchError, match='/models is what api openai-chat adds to a URL by itself; expected url = "http'
    ):
        targets.parse("t=http://h/v1/models", NONE, {})
    for fine in ("http://h/models", "http://h/messages", "http://h/generate"):  # a gateway's own, maybe
        assert targets.parse(f"t={fine}", NONE, {})[0].url == fine
    assert targets.parse("t=http://h/generate", NONE, {"api": "ray-serve"})[0].url == "http://h/generate"


@pytest.mark.parametrize(
    ("name", "path"), [("tei-rerank", "/rerank"), ("tgi", "/generate_stream"), ("sglang", "/generate")]
)
def test_a_gateways_own_path_that_is_called_as_the_protocols_is_said_by_a_slash(name, path):
    with pytest.raises(BenchError, match=r'url = "http://gw"; a gateway\'s own path of that name ends in /$'):
        targets.parse(f"t=http://gw{path}", NONE, {"api": name})
    (found,) = targets.parse(f"t=http://gw{path}/|http://gw2{path}/", NONE, {"api": name})
    assert found.urls == [f"http://gw{path}", f"http://gw2{path}"]
    with pytest.raises(BenchError, match="adds to a URL by itself"):  # each by itself
        targets.parse(f"t=http://gw{path}/|http://gw2{path}", NONE, {"api": name})


def test_a_query_is_refused_with_what_to_do_instead():
    with pytest.raises(BenchError, match=r"send it as a header \(\[targets.a.headers\] in targets.toml\).*--key-env"):
        targets.parse("a=http://h/v1?x=1", NONE, {})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is empty"),
        (f"{SECRET}\n", "begins or ends with a blank"),
        (f" {SECRET}", "begins or ends with a blank"),
        (f"{SECRET}\r\nX: y", "not one line of printable ASCII"),
        (f"{SECRET}\x7f", "not one line of printable ASCII"),
        (f"é{SECRET}", "not one line of printable ASCII"),
    ],
)
def test_a_key_or_header_value_that_no_request_can_carry_is_refused_and_not_repeated(
    tmp_path, monkeypatch, value, said
):
    file = tmp_path / "targets.toml"
    file.write_text(f'[targets.v]\nurl = "http://h/v1"\nheaders = {{ X-Key = {json.dumps(value)} }}\n')
    monkeypatch.setenv("SOME_KEY", value)
    for given in (
        lambda: targets.parse("v", file, {}),
        lambda: targets.parse("a=http://h/v1", NONE, {"key_env": "SOME_KEY"}),
    ):
        with pytest.raises(BenchError, match=said) as caught:
            given()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "facts", [f"headers = '{SECRET}'", f"headers = {{ X-Key = ['{SECRET}'] }}", f"key_env = ['{SECRET}']",
              f"key_env = '{SECRET}'", f"headers = ['{SECRET}']", f"max_model_len = '{SECRET}'",
              "key_env = 'hf_0123456789abcdef'"],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_not_repeated(tmp_path, facts):
    file = tmp_path / "targets.toml"
    file.write_text(f"[targets.v]\nurl = 'http://h/v1'\n{facts}\n")
    with pytest.raises(BenchError) as caught:
        targets.parse("v", file, {})
    assert SECRET not in str(caught.value)
    assert "hf_0123" not in str(caught.value)


def test_a_key_and_a_header_that_both_authorize_are_refused(tmp_path, monkeypatch):
    file = tmp_path / "targets.toml"
    file.write_text(
        "[targets.v]\nurl = 'http://h/v1'\nkey_env = 'SOME_KEY'\nheaders = { authorization = 'Bearer x' }\n"
    )
    monkeypatch.setenv("SOME_KEY", "k")
    with pytest.raises(BenchError, match="keep one of them"):
        targets.parse("v", file, {})


def test_secrets_are_hidden_whole_and_cut_in_the_middle_and_nothing_else_is(monkeypatch):
    monkeypatch.setenv("SOME_KEY", SECRET)
    hide = targets.hider(
        Target("t", "http://h/v1", headers={"X-Auth": 'Token a"quoted-one', "X-Short": "abc"}, key_env="SOME_KEY")
    )
    assert hide(f"no such key: {SECRET}!") == "no such key: [key]!"
    assert hide(f"twice {SECRET}{SECRET}") == "twice [key][key]"
    assert hide(f"cut here: {SECRET[:12]}") == "cut here: [key]"
    assert hide(f"Bearer {SECRET}") == "[key]"
    assert hide(json.dumps('Token a"quoted-one')) == '"[key]"'
    assert hide('only a"quoted-one') == "only [key]"
    assert hide("abc Token sk-012") == "abc Token sk-012"  # too short to be told from any text


def test_a_list_of_targets_says_which_keys_are_not_set_and_fails_for_none(tmp_path, monkeypatch):
    file = tmp_path / "targets.toml"
    file.write_text(
        "[targets.a]\nurl = 'http://h/v1'\nkey_env = 'A_KEY'\n[targets.b]\nurl = 'http://g/v1'\nkey_env = 'B_KEY'\n"
        "[targets.c]\nurl = 'http://f/v1'\nkey_env = 'hf_0123456789abcdef'\n"
    )
    monkeypatch.setenv("B_KEY", SECRET)
    monkeypatch.delenv("A_KEY", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://p:1")  # no matter for a list
    assert targets.listing(file) == [
        "a  http://h/v1  openai-chat  key: $A_KEY not set",
        "b  http://g/v1  openai-chat  key: $B_KEY",
        "c  http://f/v1  openai-chat  key: the environment variable not set",  # it may be the key itself
        "reference  built in, started for a run  openai-chat",
        "static  built in, started for a run  openai-chat",
        "dynamic  built in, started for a run  openai-chat",
        "continuous  built in, started for a run  openai-chat",
        "null  built in, started for a run  openai-chat",
    ]
    with pytest.raises(BenchError, match="A_KEY"):
        targets.parse("a", file, {"proxy": "none"})


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
        found = probe.probe(Target("t", server.url), silent, 5.0)
    assert (found.model, found.max_model_len) == ("m", 2048)
    assert found.usage_in_stream
    assert found.lengths_pinned
    assert found.finish_reason_seen
    assert (found.base_tokens, found.tokens_per_word) == (0.0, 1.0)
    assert found.rtt_ms is not None
    assert found.ttft_ms is not None


def test_a_declared_limit_wins_over_the_probed_one():
    with Scripted(llm_server([], max_model_len=2048)) as server:
        assert probe.probe(Target("t", server.url, max_model_len=99), silent, 5.0).max_model_len == 99


def test_a_server_that_ends_early_has_no_pinned_lengths():
    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        return [(0, SSE_HEAD + sse(token("no"), finish, "[DONE]") + END)]

    with Scripted(answer) as server:
        found = probe.probe(Target("t", server.url), silent, 5.0)
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
        found = probe.probe(Target("t", server.url), silent, 5.0)
    assert seen_fields[:4] == [(True, True), (False, True), (True, False), (False, False)]
    assert (found.ask.pin_lengths, found.ask.include_usage) == (False, False)


def test_a_target_without_a_list_of_models_needs_a_name():
    def answer(number, seen):
        return [(0, http_response(404, b"not found"))] if seen.method == "GET" else good(seen)

    with Scripted(answer) as server:
        with pytest.raises(TargetError, match="--model"):
            probe.probe(Target("t", server.url), silent, 5.0)
        assert probe.probe(Target("t", server.url, model="x"), silent, 5.0).model == "x"


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_one_sentence(status, monkeypatch):
    with Scripted([(0, http_response(status, b"{}"))]) as server:
        with pytest.raises(TargetError, match="--key-env"):
            probe.probe(Target("t", server.url), silent, 5.0)
        monkeypatch.setenv("SOME_KEY", "k")
        with pytest.raises(TargetError, match="its key was refused"):
            probe.probe(Target("t", server.url, key_env="SOME_KEY"), silent, 5.0)


def test_a_server_that_is_still_starting_is_waited_for():
    said = []

    def answer(number, seen):
        if number < 2:
            return [(0, http_response(503, b"loading"))]
        return llm_server([])(number, seen)

    with Scripted(answer) as server:
        assert probe.probe(Target("t", server.url), said.append, 10.0).model == "m"
    assert "waiting for t" in said[0]


def test_nobody_there_is_one_sentence_with_the_limit():
    url = f"http://127.0.0.1:{unused_port()}/v1"
    with pytest.raises(TargetError, match=r"not ready after 0\.2 s .*--ready-timeout"):
        probe.probe(Target("t", url), silent, 0.2)
    assert not targets.reachable(Target("t", url))


def test_a_built_in_target_that_cannot_start_says_its_last_word(tmp_path):
    broken = Target("x", launch=("-c", "raise SystemExit('no room for the model')"))
    with pytest.raises(TargetError, match="no room for the model"), targets.running(broken, silent, tmp_path / "x.log"):
        pass


def listing(body, status=200, headers=None):
    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(status, body, headers))]
        return good(seen)

    return answer


@pytest.mark.parametrize(
    ("body", "names", "limit"),
    [
        (b'{"data": [{"id": "m", "meta": [1]}]}', ["m"], None),
        (b'{"data": [{"id": "m", "meta": {"n_ctx": 512}}]}', ["m"], 512),
        (b'{"data": [{"id": "m", "max_model_len": true}]}', ["m"], None),
        (b'{"data": [{"id": "m", "max_model_len": "big", "meta": {"n_ctx": -1}}]}', ["m"], None),
        (b'{"data": [{"id": 3}, null, "m", {"id": "m"}]}', ["m"], None),
        (b'{"data": null}', [], None),
        (b'{"data": {"id": "m"}}', [], None),
        (b"[1]", [], None),
        (b"null", [], None),
        (b"<html>hello</html>", [], None),
        (b"\xff\xfe", [], None),
        (b"[" * 100_000, [], None),
        (json.dumps({"data": [{"id": f"m{i}"} for i in range(20_000)]}).encode(), None, None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_any_answer_of_models_is_a_list_or_none(body, names, limit):
    with Scripted(listing(body)) as server:
        found = probe.probe(Target("t", server.url, model="m"), silent, 5.0)
    assert names is None or found.models == names
    assert found.max_model_len == limit
    assert max(map(len, found.notes), default=0) < 300
    assert len(json.dumps(found.public())) < 10_000


def test_an_answer_that_cannot_be_decoded_is_a_target_that_is_not_ready():
    with (
        Scripted(listing(b"not gzip", headers={"Content-Encoding": "gzip"})) as server,
        pytest.raises(TargetError, match="DecodingError"),
    ):
        probe.probe(Target("t", server.url), silent, 0.2)


def test_a_compressed_answer_to_a_probe_is_a_failure_as_it_is_in_the_load():
    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        return [(0, http_response(200, b"\x1f\x8b", {"Content-Encoding": "gzip"}))]

    with Scripted(answer) as server, pytest.raises(TargetError, match="a small probe request failed"):
        probe.probe(Target("t", server.url), silent, 5.0)
    assert {s.headers.get("accept-encoding") for s in server.requests} == {"identity"}


def test_the_first_answer_of_a_cold_server_is_not_what_a_request_takes_alone():
    posts = []

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        posts.append(seen.json()["messages"][0]["content"])
        return good(seen, 2500 if len(posts) == 1 else 20)

    with Scripted(answer) as server:
        found = probe.probe(Target("t", server.url), silent, 5.0)
    assert 20 <= found.alone_ms < 2500
    assert found.ttft_ms is not None
    assert 20 <= found.ttft_ms < 2500
    assert posts[0].split()[0] != posts[1].split()[0]  # the second is no hit of the first one's cache


def test_a_second_probe_that_fails_is_said_and_the_first_counts():
    posts = []

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        posts.append(seen)
        return [(0, http_response(503, b"busy"))] if len(posts) == 2 else good(seen)

    with Scripted(answer) as server:
        found = probe.probe(Target("t", server.url), silent, 5.0)
    assert found.lengths_pinned
    assert any("the second failed (rejected" in note for note in found.notes)


def test_a_server_that_repeats_the_key_gives_it_away_to_nobody(monkeypatch):
    monkeypatch.setenv("SOME_KEY", SECRET)
    said = []

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        return [(0, http_response(500, json.dumps({"error": seen.headers["authorization"]}).encode()))]

    with Scripted(answer) as server, pytest.raises(TargetError, match=r"http_5xx: \[key\]") as caught:
        probe.probe(Target("t", server.url, key_env="SOME_KEY"), said.append, 5.0)
    assert SECRET not in str(caught.value) + "".join(said)


def test_a_probe_has_the_time_outs_of_a_request():
    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        return [(0, SSE_HEAD), *((20.0 * i, sse(token("a"))) for i in range(1000))]

    with Scripted(answer) as server, pytest.raises(TargetError, match=r"total_timeout: not ended within 0\.5 s"):
        probe.probe(Target("t", server.url), silent, 5.0, timeouts=Timeouts(total_s=0.5))


@pytest.mark.parametrize(
    ("extra", "of_row", "out", "pinned", "choices"),
    [
        ({}, {}, 7, True, 1),
        ({"temperature": 1}, {"top_p": 0.5}, 7, True, 1),
        ({}, {"max_tokens": 2}, 2, True, 1),
        ({"max_tokens": 3}, {"max_tokens": 2}, 2, True, 1),
        ({"max_tokens": 9}, {}, 9, False, 1),  # min_tokens is still 7: fewer than 9 are no failure
        ({}, {"max_completion_tokens": 5}, 5, True, 1),
        ({}, {"max_completion_tokens": None, "max_tokens": None}, None, False, 1),
        ({}, {"max_tokens": True}, None, False, 1),
        ({"ignore_eos": False}, {}, 7, False, 1),
        ({}, {"min_tokens": 0}, 7, False, 1),
        ({}, {"stop": ["x"]}, 7, False, 1),
        ({"stop": ["x"]}, {"stop": None}, 7, True, 1),
        ({}, {"stop_token_ids": [2]}, 7, False, 1),
        ({"n": 3}, {}, 7, True, 3),
        ({"n": 3}, {"n": 2}, 7, True, 2),
    ],
)
def test_what_is_asked_is_what_stands_in_the_final_body(extra, of_row, out, pinned, choices):
    request = Request(5, 7, prompt="x", extra=of_row)
    assert asked(request, Ask("m", extra=extra)) == (out, pinned, choices)


def test_nothing_is_pinned_where_the_target_does_not_take_it_or_no_length_is_asked():
    assert asked(Request(5, 7), Ask("m", pin_lengths=False)) == (7, False, 1)
    assert asked(Request(5, None), Ask("m")) == (None, False, 1)


def test_the_extra_of_a_target_counts_in_its_probe_too():
    with Scripted(llm_server([])) as server:
        assert probe.probe(Target("t", server.url, extra={"max_tokens": 5}), silent, 5.0).lengths_pinned
        found = probe.probe(Target("t", server.url, extra={"stop": ["x"]}), silent, 5.0)
    assert not found.lengths_pinned
    assert any("`extra` of the target" in note for note in found.notes)
