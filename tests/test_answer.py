import time
from bisect import bisect_right
from functools import cache
from itertools import accumulate, cycle

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import exchange as ends
from llm_bench.answer import Answer, read
from llm_bench.dialects import DIALECTS
from llm_bench.framing import FRAMINGS, SSE
from llm_bench.http1 import Response, Sse
from tests.fixtures import (
    NAMES,
    START_NS,
    captured,
    cut,
    cuts,
    event,
    exchange,
    hostile_events,
    ms,
    raw_reads,
    unhurried,
    wire,
)

CHAT, COMPLETIONS = DIALECTS["openai-chat"], DIALECTS["openai-completions"]
DIALECT_OF = dict.fromkeys(("usage_packed", "two_choices", "token_ids"), COMPLETIONS)


def answered(reads, dialect=CHAT, ended=ends.COMPLETE, status=200, error="", head=None, **asked) -> Answer:
    asked = {"streamed": True, "asked_out": None, "pinned": False} | asked
    return read(exchange(reads, ended, status, error, **head or {}), dialect, **asked)


def of(name, **more) -> Answer:
    return answered(wire(name), DIALECT_OF.get(name, CHAT), **more)


def verdict(answer: Answer) -> tuple[str, str]:
    return answer.outcome, answer.error_kind


def token(text, **more):
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more})


FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
DONE = event("[DONE]")


def usage(completion_tokens, prompt_tokens=7):
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


# The cases, with their own figures


def test_a_role_only_event_is_not_the_first_token():
    answer = of("role_first", asked_out=5, pinned=True)
    assert verdict(answer) == ("ok", "")
    assert ms(answer.event_ns) == [210, 230, 250, 270, 290]
    assert ms([answer.first_answer_ns]) == [210]
    assert (answer.tokens_in, answer.tokens_out, answer.tokens_out_from) == (30, 5, "usage")
    assert (answer.finish_reason, answer.text, answer.labels) == ("stop", "On the quay at dawn", [])
    assert (answer.event_tokens, answer.event_choice) == ([], [])
    assert answer.text_bytes == len("On the quay at dawn")


def test_reasoning_tokens_are_tokens_and_the_first_answer_token_is_apart():
    answer = of("reasoning")
    assert verdict(answer) == ("ok", "")
    assert ms(answer.event_ns) == [120, 130, 140, 150, 160, 170, 200, 210, 220, 230]
    assert ms([answer.first_answer_ns]) == [200]
    assert answer.tokens_out == 10
    assert answer.text == "so0 so1 so2 so3 "
    assert answer.text_bytes == 10 * 4 + 6


def test_an_answer_of_reasoning_alone_is_a_success_without_a_first_answer():
    answer = of("reasoning_only")
    assert (verdict(answer), answer.finish_reason) == (("ok", ""), "length")
    assert ms(answer.event_ns) == [120, 130, 140, 150, 160, 170]
    assert (answer.first_answer_ns, answer.tokens_out, answer.text) == (0, 6, "")
    assert answer.text_bytes == 6 * 5  # each text came under both names


def test_events_are_not_tokens():
    answer = of("packed")
    assert ms(answer.event_ns) == [100, 160, 190, 250]
    assert (answer.tokens_out, answer.tokens_out_from, answer.event_tokens) == (12, "usage", [])


def test_a_late_usage_event_leaves_the_last_token_where_it_was():
    answer = of("late_usage")
    assert ms(answer.event_ns) == [50, 60, 70, 80, 90, 100]
    assert answer.event_ns[-1] - answer.event_ns[0] == sum(
        b - a for a, b in zip(answer.event_ns, answer.event_ns[1:], strict=False)
    )
    assert answer.tokens_out == 6


def test_a_200_without_a_token_is_no_success():
    answer = of("empty")
    assert verdict(answer) == ("failed", "empty_output")
    assert answer.error
    assert (answer.event_ns, answer.first_answer_ns, answer.tokens_out) == ([], 0, 0)


def test_an_empty_answer_that_was_asked_for_is_a_success():
    assert verdict(of("empty", asked_out=0)) == ("ok", "")


def test_an_error_inside_a_200_stream_fails_and_keeps_its_partial_tokens():
    answer = of("error", asked_out=64, pinned=True)
    assert verdict(answer) == ("failed", "server_error_in_stream")
    assert (answer.error, answer.status) == ("worker lost (code 500)", 200)
    assert ms(answer.event_ns) == [30, 40, 50]
    assert (answer.tokens_out, answer.tokens_out_from) == (3, "events")


@pytest.mark.parametrize(
    ("reads", "error"),
    [
        ([(5, event({"error": {"message": "no room", "code": "overloaded"}})), (6, DONE)], "no room (code overloaded)"),
        ([(5, token("a")), (6, event({"error": "plain words"}))], "plain words"),
        ([(5, token("a") + FINISH + usage(1) + event({"error": {"message": "late"}}) + DONE)], "late"),
        ([(5, b'{"error": {"message": "not even a stream", "code": 400}}')], "not even a stream (code 400)"),
        ([(5, event({"object": "error", "message": "old shape", "code": 1}))], "old shape (code 1)"),
        ([(5, event({"choices": [{"delta": {}, "finish_reason": "abort"}]}))], "abort"),
    ],
)
def test_an_error_object_fails_the_answer_wherever_it_stands(reads, error):
    answer = answered(reads)
    assert verdict(answer) == ("failed", "server_error_in_stream")
    assert error in answer.error


def test_the_word_error_in_the_text_and_a_null_error_are_successes():
    answer = answered([(5, token("error")), (6, token('{"error": 1}', error=None)), (7, FINISH + usage(2) + DONE)])
    assert (verdict(answer), answer.text) == (("ok", ""), 'error{"error": 1}')


def test_a_clean_close_without_finish_reason_is_a_truncated_stream():
    for ended in (ends.COMPLETE, ends.CLOSED, ends.TRUNCATED):
        answer = of("half_event", ended=ended)
        assert verdict(answer) == ("failed", "truncated_stream")
        assert '{"choices":[{"ind' in answer.error
        assert ms(answer.event_ns) == [30, 40, 50, 60]
        assert answer.tokens_out == 4


def test_done_alone_proves_nothing():
    answer = answered([(5, token("a")), (6, DONE)])
    assert verdict(answer) == ("failed", "truncated_stream")


def test_a_target_that_never_sends_finish_reason_is_ok_with_a_label_unless_it_was_cut():
    reads = [(5, token("a")), (6, DONE)]
    answer = answered(reads, finish_expected=False)
    assert (verdict(answer), answer.labels) == (("ok", ""), ["end unproven"])
    assert verdict(answered(reads, finish_expected=False, ended=ends.TRUNCATED)) == ("failed", "truncated_stream")


def test_finish_reason_without_done_is_ok_with_a_label():
    answer = answered([(5, token("a")), (6, FINISH)], ended=ends.CLOSED)
    assert (verdict(answer), answer.labels) == (("ok", ""), ["no [DONE]"])


def test_framing_cut_after_the_last_word_is_ok_with_a_label():
    answer = answered([(5, token("a")), (6, FINISH + DONE)], ended=ends.TRUNCATED)
    assert (verdict(answer), answer.labels) == (("ok", ""), ["closed without last chunk"])
    answer = answered([(5, token("a")), (6, FINISH + usage(1))], ended=ends.TRUNCATED)
    assert (verdict(answer), answer.labels) == (("ok", ""), ["no [DONE]", "closed without last chunk"])
    answer = answered([(5, token("a")), (6, FINISH)], ended=ends.TRUNCATED, error="connection reset")
    assert verdict(answer) == ("failed", "truncated_stream")
    assert "connection reset" in answer.error


def test_comments_and_empty_events_are_neither_tokens_nor_errors():
    answer = of("comments")
    assert verdict(answer) == ("ok", "")
    assert ms(answer.event_ns) == [20000, 20010]
    assert (answer.comments, answer.tokens_out, answer.text) == (3, 2, "hi!")


def test_all_framings_give_the_same_answer():
    answer = of("framing")
    assert (answer.text, answer.finish_reason, answer.labels, answer.outcome) == ("one two three", "stop", [], "ok")
    assert ms(answer.event_ns) == [30, 30, 30]  # the third read completed all three


def test_cumulative_usage_counts_by_its_last_value_and_tells_each_events_tokens():
    answer = of("usage_every")
    assert (answer.tokens_in, answer.tokens_out, answer.tokens_out_from) == (50, 5, "usage")
    assert answer.event_tokens == [1, 1, 1, 1, 1]
    assert verdict(answer) == ("ok", "")


@pytest.mark.parametrize("last", [usage(5, 50), b""])
def test_one_usage_at_the_end_gives_the_same_count_and_none_an_estimate(last):
    answer = answered([(10 * k, token("k")) for k in range(1, 6)] + [(51, FINISH), (52, last + DONE)])
    assert (answer.tokens_out, answer.tokens_out_from) == (5, "usage" if last else "events")
    assert (answer.tokens_in, answer.event_tokens) == (50 if last else -1, [])


def test_a_rise_of_the_usage_bears_tokens_even_without_text():
    answer = of("usage_packed", asked_out=12, pinned=True)
    assert verdict(answer) == ("ok", "")
    assert ms(answer.event_ns) == [40, 80, 120, 160]
    assert answer.event_tokens == [1, 4, 4, 3]
    assert (answer.tokens_out, answer.text, ms([answer.first_answer_ns])) == (12, "é", [80])
    assert answer.text_bytes == 2


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch):
    before = of("role_first")
    monkeypatch.setattr(time, "time", iter([2e9, 1e9, 3e9]).__next__)
    assert of("role_first") == before


# Choices, usage, sizes


def test_with_two_choices_each_has_its_own_events_and_usage():
    answer = of("two_choices", asked_out=3, pinned=True)
    assert verdict(answer) == ("ok", "")
    assert ms(answer.event_ns) == [10, 20, 30, 40, 50, 60]
    assert answer.event_choice == [1, 0, 1, 0, 1, 0]
    assert (answer.tokens_out, answer.tokens_in, answer.tokens_cached) == (6, 10, 9)  # 3 + 3; the prompt once
    assert (answer.text, answer.text_bytes, answer.finish_reason) == ("abc", 6, "length")
    assert answer.server_ms == {
        "server_prefill_ms": 8.5,
        "server_ttft_ms": 8.5,
        "server_decode_ms": 40.0,
        "server_tpot_ms": 20.0,
    }


def test_a_choice_without_its_end_is_a_truncated_stream():
    reads = [(5, event({"choices": [{"index": k, "text": "t", "finish_reason": None}]})) for k in (0, 1)]
    reads.append((6, event({"choices": [{"index": 1, "text": "", "finish_reason": "stop"}]}) + DONE))
    assert verdict(answered(reads, COMPLETIONS)) == ("failed", "truncated_stream")


def test_continuous_usage_of_two_choices_counts_each_for_itself_and_the_last_event_for_all():
    def one(choice, count, finish=None):
        return event(
            {
                "choices": [{"index": choice, "text": "t", "finish_reason": finish}],
                "usage": {"prompt_tokens": 4, "completion_tokens": count},
            }
        )

    reads = [(1, one(0, 1)), (2, one(1, 2)), (3, one(0, 4)), (4, one(1, 3, "stop") + one(0, 5, "stop"))]
    for tail in (b"", usage(8, 4)):
        answer = answered([*reads, (5, tail + DONE)], COMPLETIONS)
        assert (answer.tokens_out, answer.tokens_in, answer.tokens_out_from) == (8, 4, "usage")
        assert answer.event_tokens == [1, 2, 3, 1, 1]
        assert answer.event_choice == [0, 1, 0, 1, 0]


def test_two_choices_in_one_event_are_two_events_of_one_stamp():
    both = {"choices": [{"index": k, "text": "t", "finish_reason": "stop"} for k in (0, 1)]}
    answer = answered([(5, event(both)), (6, usage(2) + DONE)], COMPLETIONS)
    assert (ms(answer.event_ns), answer.event_choice, answer.tokens_out) == ([5, 5], [0, 1], 2)


def test_token_ids_on_the_wire_are_counted():
    answer = of("token_ids", asked_out=4, pinned=True)
    assert (answer.event_tokens, answer.tokens_out, answer.outcome) == ([1, 2, 1], 4, "ok")
    assert ms(answer.event_ns) == [10, 20, 30]


def test_sizes_that_do_not_add_up_to_the_usage_are_not_kept():
    reads = [(1, token("a", usage={"completion_tokens": 1})), (2, token("b", usage={"completion_tokens": 2}))]
    answer = answered([*reads, (3, FINISH + usage(5) + DONE)])
    assert (answer.tokens_out, answer.event_tokens) == (5, [])


def test_an_event_that_the_usage_gives_no_token_leaves_the_sizes_unknown():
    reads = [(1, token("a", usage={"completion_tokens": 2})), (2, token("b", usage={"completion_tokens": 2}))]
    answer = answered([*reads, (3, FINISH + usage(2) + DONE)])
    assert (ms(answer.event_ns), answer.tokens_out, answer.event_tokens) == ([1, 2], 2, [])


def test_a_usage_that_leaves_the_prompt_out_takes_nothing_back():
    answer = answered([(1, token("a")), (2, FINISH + usage(1) + event({"usage": {"completion_tokens": 1}}) + DONE)])
    assert (answer.tokens_in, answer.tokens_out) == (7, 1)


def test_tool_calls_are_tokens_but_no_answer_text():
    answer = of("tools")
    assert verdict(answer) == ("ok", "")
    assert ms(answer.event_ns) == [30, 40, 50]
    assert (answer.first_answer_ns, answer.text, answer.finish_reason) == (0, "", "tool_calls")
    assert answer.text_bytes == len('tide{"at":"noon"}')
    assert (answer.tokens_out, answer.tokens_cached) == (9, 32)


def test_a_usage_from_before_the_last_token_is_stale():
    first = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 0}})
    answer = answered([(1, first), (2, token("a")), (3, token("b"))], ended=ends.TRUNCATED)
    assert (answer.tokens_out, answer.tokens_out_from, answer.tokens_in) == (2, "events", 7)


def test_a_usage_of_zero_after_tokens_is_no_count():
    answer = answered([(1, token("a")), (2, token("b") + FINISH + usage(0) + DONE)])
    assert (answer.tokens_out, answer.tokens_out_from) == (2, "events")


def test_a_tokenizer_counts_where_the_server_does_not():
    reads = [(1, token("ab")), (2, token("cd") + FINISH + DONE)]
    answer = answered(reads, count_tokens=len)
    assert (answer.tokens_out, answer.tokens_out_from) == (4, "tokenizer")
    assert answer.tokens_counted == -1  # nothing to hold it against
    answer = answered([*reads, (3, usage(3))], count_tokens=len)
    assert (answer.tokens_out, answer.tokens_out_from, answer.tokens_counted) == (3, "usage", -1)
    answer = answered([*reads, (3, usage(3))], count_tokens=len, check_usage=True)
    assert (answer.tokens_out, answer.tokens_out_from, answer.tokens_counted) == (3, "usage", 4)


@pytest.mark.parametrize(("count", "kind"), [(7, "short_output"), (8, ""), (9, "")])
def test_fewer_tokens_than_asked_fail_only_where_lengths_are_pinned(count, kind):
    reads = [(1, token("a")), (2, FINISH + usage(count) + DONE)]
    assert answered(reads, asked_out=8, pinned=True).error_kind == kind
    assert answered(reads, asked_out=8, pinned=False).outcome == "ok"


def test_each_choice_is_asked_for_its_length():
    assert verdict(of("two_choices", asked_out=4, pinned=True)) == ("failed", "short_output")


def test_an_estimate_does_not_prove_a_short_output():
    reads = [(1, token("several tokens at once")), (2, FINISH + DONE)]
    assert answered(reads, asked_out=8, pinned=True).outcome == "ok"
    assert answered(reads, asked_out=8, pinned=True, count_tokens=lambda text: 7).outcome == "ok"


def test_the_end_token_alone_is_an_empty_output_whoever_counts_it():
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    vllm = [(5, event(end)), (6, usage(1) + DONE)]
    llamacpp = [(5, event(end | {"usage": {"completion_tokens": 1}})), (6, DONE)]
    for reads in (vllm, llamacpp):
        assert verdict(answered(reads, COMPLETIONS)) == ("failed", "empty_output")


def test_a_token_without_text_that_filled_the_length_is_an_answer_without_stamps():
    end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
    answer = answered([(5, event(end)), (6, usage(1) + DONE)], COMPLETIONS, asked_out=1, pinned=True)
    assert (verdict(answer), answer.tokens_out, answer.event_ns) == (("ok", ""), 1, [])


# Whole bodies

WHOLE = (
    b'{"object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Sea, sand"},'
    b'"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3}}'
)


def test_an_answer_not_streamed_has_counts_and_no_events():
    answer = answered([(400, WHOLE[:50]), (410, WHOLE[50:])], streamed=False)
    assert (verdict(answer), answer.labels, answer.event_ns, answer.event_tokens) == (("ok", ""), [], [], [])
    assert (answer.tokens_in, answer.tokens_out, answer.tokens_out_from) == (7, 3, "usage")
    assert (answer.text, answer.first_answer_ns, answer.event_choice) == ("Sea, sand", 0, [])


def test_a_server_that_ignores_stream_is_ok_with_a_label():
    answer = answered([(400, WHOLE)], head={"content_type": "application/json"})
    assert (verdict(answer), answer.labels) == (("ok", ""), ["not streamed"])
    assert (answer.event_ns, answer.tokens_out) == ([], 3)


def test_a_whole_body_without_usage_is_of_unknown_length():
    body = WHOLE.replace(b'"usage"', b'"other"')
    answer = answered([(400, body)], streamed=False)
    assert (answer.tokens_out, answer.tokens_out_from, answer.outcome) == (-1, "", "ok")
    assert answered([(400, body)], streamed=False, count_tokens=len).tokens_out == 9


def test_half_a_body_is_truncated_however_the_connection_ended_and_a_bad_one_is_a_protocol_error():
    for ended in (ends.TRUNCATED, ends.CLOSED):
        assert verdict(answered([(4, WHOLE[:60])], streamed=False, ended=ended)) == ("failed", "truncated_stream")
    assert verdict(answered([(4, WHOLE[:60])], streamed=False)) == ("failed", "protocol_error")


def test_a_whole_body_without_a_finish_reason_is_shown_and_not_called_half_a_body():
    got = answered([(4, b'{"ok": true}')], streamed=False)
    assert (verdict(got), got.error) == (
        ("failed", "truncated_stream"),
        'a whole body without finish_reason: {"ok": true}',
    )
    assert answered([(4, WHOLE[:60])], streamed=False, ended=ends.TRUNCATED).error.startswith("half a body")


@pytest.mark.parametrize("name", ["torchserve", "ray-serve", "openai-chat", "triton-generate", "anthropic-messages"])
@pytest.mark.parametrize("ended", [ends.COMPLETE, ends.CLOSED])
def test_a_web_page_of_200_is_no_answer(name, ended):
    page = b"<!DOCTYPE html>\n<html><body>We will be back soon</body></html>\n\n"
    html = {"content_type": "Text/HTML; charset=utf-8"}
    got = answered([(4, page)], DIALECTS[name], ended, head=html, finish_expected=False)
    assert verdict(got) == ("failed", "protocol_error")
    assert got.error.startswith("a web page (HTML) and no answer: <!DOCTYPE html>")


@pytest.mark.parametrize("name", ["torchserve", "ray-serve"])
def test_html_that_a_model_wrote_is_an_answer(name):
    page, html = [(4, b"<!DOCTYPE html>\n<html>")], {"content_type": "text/html"}
    assert answered(page, DIALECTS[name], head={"content_type": "text/plain"}).outcome == "ok"
    assert answered([(4, b"a token")], DIALECTS[name], head=html).outcome == "ok"


# Failures


@pytest.mark.parametrize(
    ("status", "body", "kind", "error"),
    [
        (429, b'{"error":{"message":"slow down","code":429}}', "rejected", "slow down"),
        (503, b"upstream gone", "rejected", "upstream gone"),
        (400, b'data: {"error": "prompt too long"}\n\n', "http_4xx", "prompt too long"),  # Triton's way
        (404, b'{"detail":"Not Found"}', "http_4xx", "Not Found"),
        (422, b'{"detail":[{"msg":"required"}]}', "http_4xx", "required"),
        (500, b"<html>" + b"x" * 999, "http_5xx", "<html>xxx"),
        (502, b"", "http_5xx", "HTTP 502"),
        (302, b"", "http_3xx", "HTTP 302"),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("ended", [ends.COMPLETE, ends.CLOSED, ends.TRUNCATED])
def test_a_status_that_is_no_success_names_its_kind_and_its_text(status, body, kind, error, streamed, ended):
    answer = answered([(5, body)] if body else [], status=status, streamed=streamed, ended=ended)
    assert (verdict(answer), answer.status) == (("failed", kind), status)
    assert error in answer.error
    assert len(answer.error) <= 300
    assert (answer.tokens_out, answer.event_ns) == (0, [])


@pytest.mark.parametrize(
    ("ended", "outcome", "kind"),
    [
        (ends.CANCELLED, "cancelled", ""),
        (ends.CUT, "cut_at_end", ""),
        (ends.CONNECT_ERROR, "failed", "connect_error"),
        (ends.CONNECT_TIMEOUT, "failed", "connect_timeout"),
        (ends.TTFT_TIMEOUT, "failed", "ttft_timeout"),
        (ends.STALL_TIMEOUT, "failed", "stall_timeout"),
        (ends.TOTAL_TIMEOUT, "failed", "total_timeout"),
        (ends.PROTOCOL_ERROR, "failed", "protocol_error"),
    ],
)
def test_what_the_socket_decided_stands_and_the_tokens_so_far_are_kept(ended, outcome, kind):
    answer = answered([(5, token("a")), (6, token("b"))], ended=ended, asked_out=9, pinned=True)
    assert verdict(answer) == (outcome, kind)
    assert (ms(answer.event_ns), answer.tokens_out) == ([5, 6], 2)
    assert bool(answer.error) is (outcome == "failed")
    assert answered([], ended=ended, status=0, error="as told").error == "as told"


def test_a_connection_closed_before_the_answer_is_truncated_with_words():
    answer = answered([], ended=ends.TRUNCATED, status=0)
    assert verdict(answer) == ("failed", "truncated_stream")
    assert answer.error


@pytest.mark.parametrize("bad", [b"data: <html>\n\n", event([1]), event({"choices": "x"}), b"data: {\n\n"])
def test_garbage_in_the_stream_is_a_protocol_error_with_the_garbage_shown(bad):
    answer = answered([(1, token("a")), (2, bad), (3, token("b") + DONE)])
    assert verdict(answer) == ("failed", "protocol_error")
    assert bad.removeprefix(b"data: ").strip().decode() in answer.error
    assert answer.tokens_out == 2


@pytest.mark.parametrize("bad", [b"data: ping\n\n", event({"choices": [], "usage": {"prompt_tokens": 12.5}})])
def test_an_event_that_cannot_be_read_in_an_answer_that_is_whole_without_it_is_a_label(bad):
    answer = answered([(1, token("a")), (2, bad), (3, token("b") + FINISH + DONE)])
    assert verdict(answer) == ("ok", "")
    assert answer.labels == ["unreadable event"]


@pytest.mark.parametrize("rest", [FINISH + DONE, b""])
@pytest.mark.parametrize("data", [b'{"message": "worker lost", "code": 500}', b"worker lost"])
def test_an_event_named_error_is_an_error_whatever_it_holds(data, rest):
    answer = answered([(1, token("a")), (2, b"event: error\ndata: " + data + b"\n\n" + rest)])
    assert verdict(answer) == ("failed", "server_error_in_stream")
    assert "worker lost" in answer.error


def test_a_choice_that_was_asked_for_and_never_came_is_a_truncated_stream():
    reads = [(1, token("a")), (2, FINISH + DONE)]
    assert verdict(answered(reads)) == ("ok", "")
    answer = answered(reads, choices=2)
    assert verdict(answer) == ("failed", "truncated_stream")
    assert "fewer than asked" in answer.error


def test_a_redirect_is_a_failure_that_names_where_to():
    answer = answered([], status=307, head={"location": "http://other/v1"})
    assert verdict(answer) == ("failed", "http_3xx")
    assert "http://other/v1: redirects are not followed" in answer.error


def test_why_a_rejected_request_was_not_tried_again_is_in_its_error():
    reads = [(1, b'{"error": {"message": "busy"}}')]
    answer = answered(reads, status=503, error="Retry-After 86400 s is over the total time-out of 3 s")
    assert verdict(answer) == ("failed", "rejected")
    assert answer.error == "busy; Retry-After 86400 s is over the total time-out of 3 s"


def test_an_empty_body_is_a_failure_with_words():
    for streamed in (True, False):
        answer = answered([], streamed=streamed)
        assert verdict(answer) == ("failed", "truncated_stream")
        assert "empty body" in answer.error


# Properties


@cache
def by_bytes(body, dialect) -> Answer:
    """Of a body that comes a byte at a time, byte k at k ms: a stamp says which byte completed the event."""
    single, sse = answered([(k, body[k : k + 1]) for k in range(len(body))], dialect), Sse()
    assert set(ms(single.event_ns)) <= {k for k in range(len(body)) if sse.feed(body[k : k + 1])}
    return single


def read_in(pieces, single: Answer) -> Answer:
    """The answer `by_bytes` as it is where the body comes in pieces, the first at 1 ms: stamped with the read of the
    byte that completed the event.
    """
    starts = [0, *accumulate(map(len, pieces))]

    def stamp(ns: int) -> int:
        return START_NS + 10**6 * bisect_right(starts, (ns - START_NS) // 10**6)

    first_ns = stamp(single.first_answer_ns) if single.first_answer_ns else 0
    return single._replace(event_ns=[stamp(ns) for ns in single.event_ns], first_answer_ns=first_ns)


@pytest.mark.parametrize("name", NAMES)
@unhurried
@given(cuts)
def test_any_split_of_a_stream_gives_the_same_answer_and_the_stamps_of_its_reads(name, at):
    dialect = DIALECT_OF.get(name, CHAT)
    pieces = cut(b"".join(data for _, data in wire(name)), at)
    split = answered([*enumerate(pieces, 1)], dialect)
    timeless = {"event_ns": [], "first_answer_ns": 0}
    assert split._replace(**timeless) == of(name)._replace(**timeless)
    assert split == read_in(pieces, by_bytes(b"".join(pieces), dialect))


def _slow(dialect):
    """The same dialect without its short cut."""
    return dialect._replace(plain=lambda data: None)


@pytest.mark.parametrize("name", NAMES)
def test_the_short_cut_for_plain_events_changes_nothing(name):
    for dialect in DIALECTS.values():
        x = exchange(wire(name))
        facts = {"streamed": True, "asked_out": 4, "pinned": False}
        assert read(x, dialect, **facts) == read(x, _slow(dialect), **facts)


@pytest.mark.parametrize(("chat", "body"), captured())
def test_the_short_cut_changes_nothing_on_captured_streams(chat, body):
    dialect = DIALECTS["openai-chat" if chat else "openai-completions"]
    x = exchange([(5, body)])
    facts = {"streamed": True, "asked_out": None, "pinned": False}
    assert read(x, dialect, **facts) == read(x, _slow(dialect), **facts)


@pytest.mark.parametrize("together", [(1,), (1, 1, 2), (2, 1), (1, 1, 1, 1, 0)], ids=str)
@pytest.mark.parametrize(("chat", "body"), captured())
def test_pieces_that_are_events_are_read_as_a_stream_that_is_cut(monkeypatch, chat, body, together):
    """`together`: events of a read, over and over; 0: one event that two reads bring."""
    *blocks, rest = body.split(b"\n\n")
    pieces = []
    for many in cycle(together):
        piece = b"".join(block + b"\n\n" for block in blocks[: many or 1])
        pieces += [piece] if many else [piece[:9], piece[9:]]
        del blocks[: many or 1]
        if not blocks:
            break
    x = exchange([*enumerate([*pieces, rest], 1)])
    facts = {"streamed": True, "asked_out": None, "pinned": False}
    dialect = CHAT if chat else COMPLETIONS
    found = read(x, dialect, **facts)
    monkeypatch.setitem(FRAMINGS, SSE, FRAMINGS[SSE]._replace(event_in=None))
    assert found == read(x, dialect, **facts)


def test_a_stream_of_an_event_a_read_is_not_put_together(monkeypatch):
    sse, cut_up = FRAMINGS[SSE], []

    def events(read_ns, pieces, chunk_ends):
        cut_up.extend(pieces)
        return sse.events(read_ns, pieces, chunk_ends)

    monkeypatch.setitem(FRAMINGS, SSE, sse._replace(events=events))
    stream = [token("a"), token('"'), token("b"), FINISH, usage(3), DONE]
    assert ms(answered([*enumerate(stream, 1)]).event_ns) == [1, 2, 3]
    assert cut_up == []
    assert ms(answered([*enumerate([*stream[:2], b": ping\n\n", *stream[2:]], 1)]).event_ns) == [1, 2, 4]
    assert cut_up == [b": ping\n\n", *stream[2:]]


@pytest.mark.parametrize("name", NAMES)
def test_a_byte_at_a_time_gives_the_same_answer(name):
    whole = of(name)
    split = answered([(at, bytes([b])) for at, data in wire(name) for b in data], DIALECT_OF.get(name, CHAT))
    if name != "framing":  # there a read holds the end of one event: at a byte a read it has the same time
        assert split == whole
    assert split.text == whole.text


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@unhurried
@given(st.lists(hostile_events.map(event) | st.binary(max_size=20), max_size=4), st.booleans(), st.booleans())
def test_hostile_answers_are_data_and_a_failure_always_has_words(dialect, body, streamed, whole):
    reads = list(enumerate(body, 1))
    answer = answered(reads, dialect, ends.COMPLETE if whole else ends.TRUNCATED, streamed=streamed, asked_out=3)
    assert bool(answer.error) is bool(answer.error_kind) is (answer.outcome == "failed")
    assert answer.event_tokens == [] or len(answer.event_tokens) == len(answer.event_ns)
    assert answer.event_choice == [] or len(answer.event_choice) == len(answer.event_ns)


@pytest.mark.parametrize(("chat", "body"), captured())
@unhurried
@given(cuts)
def test_any_split_of_a_captured_stream_gives_the_same_answer_and_the_stamps_of_its_reads(chat, body, at):
    dialect = CHAT if chat else COMPLETIONS
    single = by_bytes(body, dialect)
    assert answered([(1, body)], dialect) == read_in([body], single)
    pieces = cut(body, at)
    assert answered([*enumerate(pieces, 1)], dialect) == read_in(pieces, single)


@pytest.mark.parametrize(("chat", "body"), captured())
def test_a_captured_streams_events_and_usage_agree(chat, body):
    answer = answered([(1, body)], CHAT if chat else COMPLETIONS)
    if b'"error"' in body:
        assert verdict(answer) == ("failed", "server_error_in_stream")
    elif b"[DONE]" not in body:
        assert verdict(answer) == ("failed", "truncated_stream")
    elif answer.outcome != "ok":
        assert (answer.error_kind, answer.finish_reason) == ("empty_output", "stop")
    if answer.tokens_out_from == "usage" and not answer.event_tokens:
        assert len(answer.event_ns) <= answer.tokens_out


@pytest.mark.parametrize("server", ["llamacpp", "vllm", "ray-serve", "ray-serve-llm"])
def test_a_captured_connection_read_by_read(server):
    response = Response()
    reads = [(at, piece) for at, data in raw_reads(f"{server}/raw_tcp_stream.txt") for piece in response.feed(data)]
    answer = answered(reads, COMPLETIONS, asked_out=16, pinned=True)
    assert (verdict(answer), answer.labels) == (("ok", ""), [])
    assert (answer.tokens_out, answer.tokens_out_from, answer.finish_reason) == (16, "usage", "length")
    assert set(ms(answer.event_ns)) <= {at for at, _ in reads}
    assert len(answer.event_ns) == 16
    assert (len(set(answer.event_ns)) < 16) is (server == "ray-serve-llm")  # it sends its events in batches
    assert ms(answer.event_ns)[-1] <= reads[-1][0]


def test_a_worker_killed_in_a_captured_stream_is_a_failure_though_done_came():
    response = Response()
    reads = raw_reads("vllm-perreq/raw_tcp_worker_killed_midstream.txt")
    reads = [(at, piece) for at, data in reads for piece in response.feed(data)]
    answer = answered(reads, COMPLETIONS, asked_out=200, pinned=True)
    assert verdict(answer) == ("failed", "server_error_in_stream")
    assert answer.error.startswith("EngineCore encountered an issue")
    assert (answer.tokens_out, answer.tokens_out_from, ms(answer.event_ns)[0]) == (14, "events", 123.369)


@pytest.mark.parametrize("name", ["openai-chat", "openai-completions", "sglang"])
def test_the_choices_of_a_whole_body_are_counted_as_those_of_a_stream(name):
    each = [{"index": k, "message": {"content": "a b"}, "text": "a b", "finish_reason": "length"} for k in range(3)]
    body: object = {"choices": each, "usage": {"prompt_tokens": 7, "completion_tokens": 6}}
    if name == "sglang":
        meta = {"prompt_tokens": 7, "completion_tokens": 2, "finish_reason": {"type": "length"}}
        body = [{"text": "a b", "meta_info": meta}] * 3
    got = answered([(4, orjson.dumps(body))], DIALECTS[name], streamed=False, choices=3, asked_out=2, pinned=True)
    assert (verdict(got), got.choices, got.tokens_out) == (("ok", ""), 3, 6)
    assert answered([(4, WHOLE)], streamed=False).choices == 1
    assert of("two_choices").choices == 2
    assert answered([], ended=ends.CONNECT_ERROR, status=0).choices == 0
