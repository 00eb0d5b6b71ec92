"""What prompts cost, whether the target keeps them, and whether its stream counts as it goes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_bench import probe, probe_prompts, probe_report
from llm_bench.probe_prompts import LONG, OFF, ON, SHORT, TRIPLES, UNDECIDED, Sent, Triple, prefix_cache, settled
from llm_bench.prompts import Sizer
from llm_bench.targets import Target
from tests.scripted import END, FINISH, SSE_HEAD, Scripted, http_response, sse, token

MS = 1_000_000


def triple(short_ms, fresh_ms, again_ms, cached=(-1, -1), tokens=100):
    """(cached of the fresh prompt, of its repeat)."""
    return Triple(
        Sent(SHORT, "s", 10, -1, round(short_ms * MS)),
        Sent(LONG, "t", tokens, cached[0], round(fresh_ms * MS)),
        Sent(LONG, "t", tokens, cached[1], round(again_ms * MS)),
    )


KEEPS = [triple(10, 100, 12), triple(11, 90, 20), triple(9, 110, 12), triple(10, 100, 30), triple(10, 95, 11)]
FORGETS = [triple(10, 100, 98), triple(11, 90, 93), triple(9, 110, 104), triple(10, 100, 100), triple(10, 95, 99)]
FLAT = [triple(10, 11, 10)] * TRIPLES
TOLD_ON, TOLD_OFF = [triple(10, 11, 10, (4, 96))] * 2, [triple(10, 11, 10, (4, 4))] * 2


@pytest.mark.parametrize(
    ("triples", "cache", "seen"),
    [
        (KEEPS, ON, "it counts no cached tokens; its first token takes 0.11 to 0.30 of a new one's time"),
        (FORGETS, OFF, "it counts no cached tokens; its first token takes 0.95 to 1.04 of a new one's time"),
        (FLAT, UNDECIDED, "a prompt's length does not show in its time"),
        (TOLD_ON, ON, "92% of a repeated prompt of 256 words from the cache, it says"),
        (TOLD_OFF, OFF, "0% of a repeated prompt of 256 words from the cache, it says"),
        ([triple(10, 100, 98, (-1, 96))] * TRIPLES, ON, "96% of a repeated prompt"),  # though no time is saved
        ([triple(10, 100, 12, (0, 0))] * TRIPLES, UNDECIDED, "0% of a repeated prompt"),  # its word against its time
        ([triple(10, 100, 50, (0, 30))] * TRIPLES, ON, "30% of a repeated prompt"),  # half kept: the time decides
        ([triple(10, 100, 12, (0, 0))] * 2, UNDECIDED, "0% of a repeated prompt"),  # nor with fewer of them
        ([triple(10, 100, 12, (0, 96))], ON, "96% of a repeated prompt of 256 words from the cache, it says; too slow"),
        (KEEPS[:3], UNDECIDED, "takes 0.11 to 0.22"),  # too few to be sure
        (KEEPS[:1], UNDECIDED, "too slow to be timed"),
        ([*KEEPS[:4], triple(10, 95, 90)], UNDECIDED, "takes 0.11 to 0.95"),  # one of them does not agree
        ([*FORGETS[:4], triple(10, 95, 40)], UNDECIDED, "takes 0.42 to 1.03"),
        ([triple(10, 500, 12), *FORGETS[1:]], OFF, "0.95 to 1.04"),  # a cold start is in the first alone
        ([triple(10, 10, 10), *KEEPS[1:]], ON, "0.11 to 0.30"),
    ],
)  # fmt: skip
def test_a_cache_is_on_or_off_where_its_count_or_all_times_say_so(triples, cache, seen):
    found = prefix_cache(triples)
    assert found[0] == cache
    assert seen in found[1]


@given(st.integers(1, 10**6), st.sampled_from([KEEPS, FORGETS, FLAT, TOLD_ON, TOLD_OFF]))
def test_no_unit_of_time_is_part_of_the_verdict(times, triples):
    faster = [Triple(*(sent._replace(wait_ns=sent.wait_ns * times) for sent in one)) for one in triples]
    assert prefix_cache(faster) == prefix_cache(triples)


def test_no_more_is_sent_than_can_decide():
    assert settled(FLAT[:2])
    assert settled(TOLD_ON)
    assert settled(TOLD_OFF)
    assert not settled(KEEPS[:4])
    assert not settled(TOLD_ON[:1])
    assert not settled([triple(10, 100, 12, (0, 0))] * 4)  # nothing kept, it says, and its time says otherwise
    assert settled([triple(10, 100, 98, (0, 0))] * 2)


def keeping(cache, *, counts=True, reports=False, word_ms=0.5, continuous=False, says_none=False):
    """A chat server whose first token takes as long as the words that it has not in its cache; it may say so."""
    kept = set()

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        body = seen.json()
        text = body["messages"][0]["content"]
        words = len(text.split())
        hit = words - 1 if cache and text in kept else 0
        kept.add(text)
        usage = {"prompt_tokens": words + 7, "completion_tokens": 0}
        usage |= {"prompt_tokens_details": {"cached_tokens": 0 if says_none else hit}} if reports else {}
        at_ms, asked, each = (words - hit) * word_ms, int(body.get("max_tokens", 4)), body.get("stream_options", {})
        each = continuous and each.get("continuous_usage_stats")
        events = [
            token("w ") | ({"usage": usage | {"completion_tokens": i + 1}} if each and counts else {})
            for i in range(asked)
        ]
        last = [{"choices": [], "usage": usage | {"completion_tokens": asked}}] if counts else []
        finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        return [(at_ms, SSE_HEAD + sse(*events, finish, *last, "[DONE]") + END)]

    return answer


def probed(answer, **facts):
    with Scripted(answer) as server:
        target = Target("t", server.url, **facts)
        return target, probe.probe(target, lambda text: None, 5.0, whole=True)


def test_a_server_that_reports_its_cache_is_taken_at_its_word():
    target, found = probed(keeping(True, reports=True, word_ms=0))
    assert (found.prefix_cache, found.cached_reported) == (ON, True)
    assert dict(probe_report.check_rows(target, found))["prefix cache"] == ON
    said = probe_report.note_lines([(target, found)])[0]
    assert said.startswith("t: prefix cache on: 97% of a repeated prompt of 256 words from the cache, it says")
    _, found = probed(keeping(False, reports=True, word_ms=0))
    assert found.prefix_cache == OFF


def test_a_cache_that_nobody_reports_shows_in_the_time_of_a_repeat():
    """128 ms for a new prompt, 0.5 ms for a kept one; a machine that stalls for longer has three tries."""
    found = next((one for _ in range(3) if (one := probed(keeping(True))[1]).prefix_cache == ON), None)
    assert found is not None
    assert not found.cached_reported
    assert json.loads(json.dumps(found.public()))["prefix_cache_seen"].startswith(
        "it counts no cached tokens; its first"
    )


def test_a_server_without_tokens_counted_is_timed_all_the_same():
    found = next((one for _ in range(3) if (one := probed(keeping(True, counts=False))[1]).prefix_cache == ON), None)
    assert found is not None
    assert (found.sized, found.prompts) == (False, ())


def test_an_instant_server_is_asked_two_triples_and_is_undecided():
    with Scripted(keeping(True, word_ms=0)) as server:
        found = probe.probe(Target("t", server.url), lambda text: None, 5.0, whole=True)
        prompts = [seen.json()["messages"][0]["content"] for seen in server.requests if seen.method == "POST"]
    assert found.prefix_cache in (UNDECIDED, ON)  # a machine that stalls may make the new ones late
    assert [len(p.split()) for p in prompts if len(p.split()) in (SHORT, LONG)][:6] == [SHORT, LONG, LONG] * 2


def test_a_count_of_nothing_that_the_time_belies_is_no_word_for_off():
    """Some gateways say 0 of every prompt."""
    server = keeping(True, reports=True, says_none=True)
    found = next((one for _ in range(3) if (one := probed(server)[1]).prefix_cache == UNDECIDED), None)
    assert found is not None
    assert found.prefix_cache_seen.startswith("0% of a repeated prompt of 256 words from the cache, it says; its first")


def test_a_slow_server_is_not_kept_waiting_for(monkeypatch):
    monkeypatch.setattr(probe_prompts, "LONGEST_S", 0.0)
    with Scripted(keeping(True)) as server:
        found = probe.probe(Target("t", server.url), lambda text: None, 5.0, whole=True)
        prompts = [seen.json()["messages"][0]["content"] for seen in server.requests if seen.method == "POST"]
    assert len([p for p in prompts if len(p.split()) == LONG]) == 1  # no repeat: it could say nothing
    assert (found.prefix_cache, found.sized) == (UNDECIDED, True)
    assert "too slow to be timed" in found.prefix_cache_seen


@pytest.mark.parametrize(("continuous", "said"), [(True, "when asked"), (False, "no")])
def test_continuous_usage_is_asked_for_where_the_protocol_has_a_word_for_it(continuous, said):
    target, found = probed(keeping(False, word_ms=0, continuous=continuous))
    assert found.continuous_usage == said
    assert dict(probe_report.check_rows(target, found))["usage in every event"] == said
    always = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert probed(keeping(False, word_ms=0, continuous=continuous), extra=always)[1].continuous_usage == (
        "yes" if continuous else "no"
    )


def test_an_answer_in_one_event_tells_of_no_continuous_usage():
    """As of a server that holds no length: "is water wet?" is answered in a word."""
    good = keeping(False, word_ms=0, continuous=True)

    def terse(number, seen):
        if seen.method == "POST":
            seen = seen._replace(body=json.dumps(seen.json() | {"max_tokens": 1}).encode())
        return good(number, seen)

    def as_asked(number, seen):
        return (terse if b"one word" in seen.body or b"single word" in seen.body else good)(number, seen)

    assert probed(terse)[1].continuous_usage == "undecided"
    assert probed(as_asked)[1].continuous_usage == "when asked"


def test_a_server_that_refuses_the_word_has_no_continuous_usage():
    good = keeping(False, word_ms=0, continuous=True)

    def answer(number, seen):
        if b"continuous_usage_stats" in seen.body:
            return [(0, http_response(400, b'{"error": {"message": "unknown field"}}'))]
        return good(number, seen)

    assert probed(answer)[1].continuous_usage == "no"


def test_the_template_is_what_a_prompt_costs_beyond_what_its_tokenizer_counts():
    """Of words that cost 1 or 2 tokens each the fitted line is off; what one and the same text costs is not."""

    def count(text):
        return sum(1 + (len(set(word)) == 4) for word in text.split())

    def answer(number, seen):
        if seen.method == "GET":
            return [(0, http_response(200, b'{"data": [{"id": "m"}]}'))]
        tokens = 7 + count(seen.json()["messages"][0]["content"])
        last = {"choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": 1}}
        return [(0, SSE_HEAD + sse(token("w"), FINISH, last, "[DONE]") + END)]

    _, found = probed(answer)
    assert found.template(count) == 7
    assert found.base_tokens != pytest.approx(7, abs=1e-6)  # or this test would prove nothing
    assert "prompts" not in found.public()
    assert found._replace(prompts=()).template(count) == 0


def test_sizes_are_fitted_to_all_new_prompts():
    _, found = probed(keeping(False, word_ms=0))
    assert found.sizer == Sizer(7.0, 1.0)
    assert len(found.prompts) >= 4
