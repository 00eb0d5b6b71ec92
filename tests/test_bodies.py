"""What is sent in each protocol, made from a request's parts or captured, and what that asks for."""

import json

import pytest

from llm_bench.bodies import Ask, asked
from llm_bench.dialects import DIALECTS, unsayable
from llm_bench.errors import BenchError
from llm_bench.request import Request

OPENAI = ("openai-chat", "openai-completions")
CHAT, COMPLETIONS = DIALECTS["openai-chat"], DIALECTS["openai-completions"]
ASK = Ask(model="m")


def encoded(dialect, request, ask=ASK):
    return json.loads(dialect.encode(request, ask))


def test_a_chat_body_asks_for_all_that_a_measurement_needs():
    assert encoded(CHAT, Request(tokens_in=3, tokens_out=64, prompt="low water")) == {
        "model": "m",
        "messages": [{"role": "user", "content": "low water"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 64,
        "min_tokens": 64,
        "ignore_eos": True,
    }


def test_a_completions_body_takes_text_or_token_ids():
    assert encoded(COMPLETIONS, Request(tokens_in=1, tokens_out=2, prompt="ebb"))["prompt"] == "ebb"
    assert encoded(COMPLETIONS, Request(tokens_in=3, tokens_out=2, prompt_token_ids=(7, 8, 9)))["prompt"] == [7, 8, 9]


def test_messages_of_a_trace_go_out_as_they_are():
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]})
    assert encoded(CHAT, Request(tokens_in=1, tokens_out=None, messages=messages))["messages"] == list(messages)


@pytest.mark.parametrize(
    ("request_", "ask", "absent"),
    [
        (Request(1, None, prompt="p"), ASK, {"max_tokens", "min_tokens", "ignore_eos", "priority"}),
        (Request(1, 8, prompt="p"), ASK._replace(pin_lengths=False), {"min_tokens", "ignore_eos"}),
        (Request(1, 8, prompt="p"), ASK._replace(include_usage=False), {"stream_options"}),
        (Request(1, 8, prompt="p"), ASK._replace(stream=False), {"stream_options"}),
    ],
)
@pytest.mark.parametrize("name", OPENAI)
def test_what_is_not_asked_for_is_not_in_the_body(name, request_, ask, absent):
    body = encoded(DIALECTS[name], request_, ask)
    assert not absent & body.keys()
    assert body["stream"] is ask.stream


@pytest.mark.parametrize("name", OPENAI)
def test_extra_fields_of_the_trace_win_over_the_users_and_those_over_ours(name):
    request = Request(1, 8, prompt="p", priority=-2, extra={"temperature": 1, "top_k": 5})
    body = encoded(DIALECTS[name], request, Ask(model="m", extra={"temperature": 0.5, "seed": 3, "min_tokens": 0}))
    assert (body["temperature"], body["top_k"], body["seed"], body["min_tokens"]) == (1, 5, 3, 0)
    assert (body["priority"], body["max_tokens"]) == (-2, 8)


def test_the_targets_model_is_asked_for_not_the_one_the_traffic_once_met():
    assert encoded(CHAT, Request(1, 8, prompt="p", model="GPT-4"))["model"] == "m"
    assert encoded(CHAT, Request(1, 8, prompt="p", model="GPT-4"), Ask(model=""))["model"] == "GPT-4"


@pytest.mark.parametrize(
    ("name", "request_", "right"),
    [
        ("openai-chat", Request(1, 8, prompt_token_ids=(1,), line=41), "openai-completions"),
        ("openai-completions", Request(1, 8, messages=({"role": "user", "content": "x"},), line=41), "openai-chat"),
        ("openai-chat", Request(1, 8, prompt="p", extra={"logit_bias": {1, 2}}, line=41), "JSON"),
        ("openai-completions", Request(1, 8, prompt="half a pair \ud83d", line=41), "JSON"),
    ],
)
def test_what_a_protocol_cannot_say_is_the_users_mistake_with_its_line(name, request_, right):
    with pytest.raises(BenchError, match=rf"line 41: .*{right}"):
        DIALECTS[name].encode(request_, ASK)


# Captured bodies

CHATTED = {"model": "gpt-4o", "messages": [{"role": "user", "content": "ebb?"}], "max_tokens": 7, "top_p": 0.9}
COMPLETED = {"model": "davinci", "prompt": "ebb?", "max_tokens": 7, "seed": 1}


@pytest.mark.parametrize(("name", "body"), [("openai-chat", CHATTED), ("openai-completions", COMPLETED)])
def test_a_captured_body_is_sent_as_it_stands_but_for_model_and_streaming(name, body):
    ours = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    request = Request(5, 99, body=body, priority=3)
    assert encoded(DIALECTS[name], request) == body | ours  # nothing is pinned, and no temperature is set
    whole = encoded(DIALECTS[name], request, ASK._replace(stream=False))
    assert whole == body | {"model": "m", "stream": False}
    plain = encoded(DIALECTS[name], request, ASK._replace(include_usage=False))
    assert plain == body | {"model": "m", "stream": True}


def test_stream_options_of_a_captured_body_stay_but_for_usage_and_go_where_nothing_is_streamed():
    body = CHATTED | {"stream": False, "stream_options": {"include_usage": False, "continuous_usage_stats": True}}
    made = encoded(CHAT, Request(5, None, body=body))
    assert made["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "stream_options" not in encoded(CHAT, Request(5, None, body=body), ASK._replace(stream=False))
    assert "stream_options" not in encoded(CHAT, Request(5, None, body=body), ASK._replace(include_usage=False))


def test_what_the_user_wants_in_every_body_is_added_to_a_captured_one_and_wins_over_nothing_in_it():
    made = encoded(CHAT, Request(5, None, body=CHATTED), ASK._replace(extra={"top_p": 0.1, "user": "bench"}))
    assert (made["top_p"], made["user"]) == (0.9, "bench")


@pytest.mark.parametrize(
    ("more", "out", "pinned", "choices"),
    [
        ({}, 7, False, 1),
        ({"max_completion_tokens": 5}, 5, False, 1),
        ({"ignore_eos": True, "min_tokens": 7}, 7, True, 1),
        ({"ignore_eos": True, "min_tokens": 7, "stop": "x"}, 7, False, 1),
        ({"n": 3}, 7, False, 3),
        ({"max_tokens": None}, None, False, 1),
    ],
)
def test_what_a_captured_body_asks_for_is_read_from_it_alone(more, out, pinned, choices):
    assert asked(Request(5, 99, body=CHATTED | more), ASK) == (out, pinned, choices)


@pytest.mark.parametrize(("prompt", "choices"), [("one", 2), (["a", "b", "c"], 6), ([1, 2, 3], 2), ([[1, 2], [3]], 4)])
def test_each_prompt_of_a_body_has_choices_of_its_own(prompt, choices):
    assert asked(Request(5, None, body={"prompt": prompt, "n": 2}), ASK).choices == choices


@pytest.mark.parametrize(
    ("api", "body", "said"),
    [
        (
            "openai-chat",
            COMPLETED,
            "its body has prompt, openai-chat needs messages, alone and not empty; send it to an openai-compl",
        ),
        (
            "openai-completions",
            CHATTED,
            "its body has messages, openai-completions needs prompt, alone and not empty; send it to an openai-chat",
        ),
        ("openai-chat", {"input": "x"}, "its body has input, openai-chat needs messages"),
        ("openai-chat", {"model": "m"}, "its body has no prompt, openai-chat needs messages"),
        ("openai-chat", {"messages": []}, "its body has messages, openai-chat needs messages"),
        ("openai-chat", {"messages": "x"}, "its body has messages"),
        ("openai-chat", CHATTED | {"prompt": "x"}, "its body has messages and prompt"),
        ("openai-completions", {"prompt": ""}, "its body has prompt"),
    ],
)
def test_a_body_of_another_api_is_told_from_one_of_the_targets(api, body, said):
    assert unsayable(Request(0, None, body=body), api).startswith(said)


@pytest.mark.parametrize("api", OPENAI)
def test_every_protocol_can_say_its_own_bodies_and_texts(api):
    bodies = {"openai-chat": CHATTED, "openai-completions": COMPLETED}
    assert unsayable(Request(0, None, body=bodies[api]), api) == ""
    assert unsayable(Request(0, None, prompt="x"), api) == ""
    assert unsayable(Request(5, 5), api) == ""


# Protocols in words of their own

ROW = Request(3, 64, prompt="low water")
LIMIT = {"temperature": 0, "max_new_tokens": 64}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (
            "openai-responses",
            {
                "model": "m",
                "input": [{"role": "user", "content": "low water"}],
                "stream": True,
                "store": False,
                "temperature": 0,
                "max_output_tokens": 64,
            },
        ),
        ("tgi", {"inputs": "low water", "parameters": {"details": True, "do_sample": False, "max_new_tokens": 64}}),
        (
            "triton-generate",
            {
                "text_input": "low water",
                "stream": True,
                "exclude_input_in_output": True,
                "return_finish_reason": True,
                "return_num_input_tokens": True,
                "return_num_output_tokens": True,
                "sampling_parameters": '{"temperature":0,"max_tokens":64,"ignore_eos":true,"min_tokens":64}',
            },
        ),
        (
            "trtllm-triton",
            {
                "text_input": "low water",
                "stream": True,
                "bad_words": "",
                "stop_words": "",
                "exclude_input_in_output": True,
                "return_perf_metrics": True,
                "max_tokens": 64,
                "min_tokens": 64,
            },
        ),
        (
            "sglang",
            {
                "text": "low water",
                "stream": True,
                "sampling_params": LIMIT | {"ignore_eos": True, "min_new_tokens": 64},
            },
        ),
        (
            "llamacpp",
            {"prompt": "low water", "stream": True, "temperature": 0, "n_predict": 64, "ignore_eos": True},
        ),
        (
            "anthropic-messages",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "low water"}],
                "stream": True,
                "temperature": 0,
                "max_tokens": 64,
            },
        ),
        ("torchserve", {"prompt": "low water", "stream": True, "temperature": 0, "max_tokens": 64}),
        ("ray-serve", {"prompt": "low water", "stream": True, "temperature": 0, "max_tokens": 64}),
    ],
)
def test_a_body_says_the_same_in_each_protocols_words(name, body):
    assert encoded(DIALECTS[name], ROW) == body
    pinned = bool(DIALECTS[name].takes.pins)
    assert DIALECTS[name].takes.asked(ROW, ASK) == (64, pinned, 1)
    assert DIALECTS[name].takes.asked(ROW, ASK._replace(pin_lengths=False)) == (64, False, 1)


SINGLE = [name for name, row in DIALECTS.items() if row.comes.single_pass]
NOT_JSON = ("http", "kserve-grpc")  # whose words are a template's, or tensors
OTHERS = [name for name in DIALECTS if name not in (*OPENAI, *SINGLE, *NOT_JSON)]


@pytest.mark.parametrize("name", OTHERS)
def test_openais_words_in_extra_are_put_into_a_protocols_own(name):
    row = Request(3, 64, prompt="p", extra={"max_tokens": 9, "top_p": 0.5})
    dialect, ask = DIALECTS[name], ASK._replace(extra={"temperature": 0.7, "top_p": 0.1, "max_tokens": 5})
    assert dialect.takes.asked(row, ask).out == 9
    text = dialect.encode(row, ask).decode().replace("\\", "")
    assert '"top_p":0.5' in text
    assert '"temperature":0.7' in text
    newer = Request(3, 64, prompt="p", extra={"max_completion_tokens": 4})
    assert dialect.takes.asked(newer, ASK).out == 4


@pytest.mark.parametrize("name", OTHERS)
def test_a_table_in_extra_is_merged_and_a_word_of_the_protocols_own_goes_out_as_it_stands(name):
    section = {"tgi": "parameters", "sglang": "sampling_params", "triton-generate": "sampling_parameters"}.get(name)
    extra = {"lora": "a"} | ({section: {"own": 1}} if section else {})
    text = DIALECTS[name].encode(ROW, ASK._replace(extra=extra)).decode().replace("\\", "")
    assert '"lora":"a"' in text
    assert section is None or ('"own":1' in text and "64" in text)


def test_sampling_in_tgi_is_said_and_a_temperature_of_zero_is_not():
    warm = encoded(DIALECTS["tgi"], Request(1, 8, prompt="p", extra={"temperature": 0.5}))["parameters"]
    assert (warm["temperature"], warm["do_sample"]) == (0.5, True)


@pytest.mark.parametrize("name", OTHERS)
def test_a_stop_word_sets_a_pinned_length_free(name):
    row = Request(3, 8, prompt="p", extra={"stop": ["x"]})
    assert not DIALECTS[name].takes.asked(row, ASK).pinned


def test_a_chats_system_text_is_a_field_of_its_own_at_anthropic():
    said = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"})
    body = encoded(DIALECTS["anthropic-messages"], Request(3, None, messages=said))
    assert (body["system"], body["messages"]) == ("be brief", [{"role": "user", "content": "hi"}])
    assert body["max_tokens"] == 4096  # it may not be left out


@pytest.mark.parametrize(("name", "key"), [("sglang", "input_ids"), ("llamacpp", "prompt")])
def test_token_ids_go_where_they_are_taken(name, key):
    assert encoded(DIALECTS[name], Request(3, 8, prompt_token_ids=(7, 8, 9)))[key] == [7, 8, 9]


@pytest.mark.parametrize("name", OTHERS)
def test_a_captured_body_of_a_protocol_is_sent_as_it_stands_but_for_model_and_stream(name):
    takes = DIALECTS[name].takes
    value = [{"role": "user", "content": "x"}] if takes.chat else "x"
    body = {takes.prompt: value, "model": "once", "max_tokens": 5, "seed": 1}
    made = encoded(DIALECTS[name], Request(5, 99, body=body))
    ours = {key: made[key] for key in ("model", "stream") if key in made}
    assert made == body | ours
    assert made["model"] == ("m" if takes.model == "body" else "once")
    assert unsayable(Request(0, None, body=body), name) == ""


@pytest.mark.parametrize("name", DIALECTS)
def test_what_each_protocol_cannot_say_is_refused_by_both_ways_of_asking(name):
    takes = DIALECTS[name].takes
    rows = {
        "ids": Request(1, 8, prompt_token_ids=(1,), line=41),
        "messages": Request(1, 8, messages=({"role": "user", "content": "x"},), line=41),
    }
    for what, taken in (("ids", takes.token_ids), ("messages", takes.chat)):
        assert (unsayable(rows[what], name) == "") is taken
        if taken:
            assert DIALECTS[name].encode(rows[what], ASK)
        else:
            with pytest.raises(BenchError, match="line 41"):
                DIALECTS[name].encode(rows[what], ASK)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_rows_own_model_is_refused_where_the_protocol_cannot_name_it(name):
    row = Request(1, 8, prompt="p", model="lora-a")
    said = unsayable(row, name, keep_model=True)
    assert bool(said) is (DIALECTS[name].takes.model != "body")
    assert not said or ("'lora-a'" in said and "--keep-model" in said)
    assert unsayable(row, name) == ""


def test_a_models_name_cannot_break_out_of_the_path_it_stands_in():
    path = DIALECTS["torchserve"].path_of("a b?c#d\r\ne/é", stream=True)
    assert path == "/predictions/a%20b%3Fc%23d%0D%0Ae/%C3%A9"
