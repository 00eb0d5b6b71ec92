"""The same work raises nothing; each check names what differs, with the figures of both sides."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm_bench.columns import Cell
from llm_bench.same_work import CHECKS, Difference, Side, agreement, differences, first_line, same_work
from tests.sample import cell, header, record

PROBE = header()["probe"] | {"model": "m", "tokens_per_word": 1.3, "rtt_ms": 0.2}


def work(n: int = 50, load: str = "c=8", probe: Any = None, target: Any = None, **fields: Any) -> Cell:
    """`n` answers of five tokens, TTFT 50 ms."""
    rows = [record(i, 100 * i, **({"events": [100 * i + 50 + 20 * k for k in range(5)]} | fields)) for i in range(n)]
    parts: dict[str, Any] = {"load": {"kind": "open", "label": load, "warmup": 0.0}, "plan": {"requests": 50}}
    return cell(rows, probe=PROBE | (probe or {}), target=header()["target"] | (target or {}), **parts)


def between(**fields: Any) -> dict[str, str]:
    return {d.check: d.text for d in differences(Side("a", work()), Side("b", work(**fields)))}


# check -> (what is different of b, what is said)
TROUBLE: dict[str, tuple[dict[str, Any], str]] = {
    "kind of work": (  # and nothing else of the two: its lengths, its tokens, its ends
        {"events": [], "end": 90, "tokens_in": 9, "finish_reason": "", "probe": {"model": "n"}},
        "an answer is decoded token by token at a, comes of a single pass at b",
    ),
    "declared": ({"probe": {"model": "n"}}, "model 'm' at a, 'n' at b"),
    "tokenizer": ({"probe": {"tokens_per_word": 1.5}}, "a word costs 1.3 tokens at a, 1.5 at b"),
    "prompt tokens": ({"tokens_in": 107}, "prompt tokens a request 100 at a, 107 at b (+7.0%)"),
    "delivered tokens": ({"tokens_out": 4}, "delivered tokens a request 5 at a, 4 at b (-20.0%)"),
    "finish reasons": ({"finish_reason": "stop"}, "answers ended by length 100% at a, by stop 100% at b"),
    "cached share": ({"tokens_cached": 60}, "0.0% of prompt tokens from the cache at a, 60.0% at b"),
    "network path": ({"probe": {"rtt_ms": 5.3}}, "a round trip takes 0.20 ms to a, 5.30 ms to b: over 10%"),
}


def test_every_check_has_its_trouble() -> None:
    assert list(TROUBLE) == list(CHECKS)


@pytest.mark.parametrize("check", TROUBLE)
def test_each_check_names_what_differs_with_both_figures(check: str) -> None:
    fields, said = TROUBLE[check]
    a = Side("a", work(tokens_cached=0))
    found = differences(a, Side("b", work(**({"tokens_cached": 0} | fields))))
    assert [d.check for d in found] == [check]
    assert found[0].text.startswith(said)


def test_the_same_work_is_none() -> None:
    assert between() == {}
    assert first_line([]) == ""


def test_what_only_one_side_says_is_no_difference() -> None:
    assert between(target={"precision": "fp8"}) == {}
    assert between(probe={"tokens_per_word": None, "rtt_ms": None}) == {}
    assert between(probe={"tokens_per_word": 1.0, "sized": False}) == {}  # a word was taken for a token, unchecked
    assert between(tokens_cached=99) == {}
    assert between(tokens_out=-1, tokens_out_from="") == {}
    assert between(tokens_out=9, tokens_out_from="events") == {}  # events are an estimate
    assert between(finish_reason="") == {}


def test_lengths_are_compared_as_they_were_measured_whatever_a_probe_found_of_pinning() -> None:
    unpinned = {"probe": {"lengths_pinned": False}}
    assert between(**unpinned) == {}
    said = "delivered tokens a request 5 at a, 4 at b (-20.0%)"
    assert between(tokens_out=4, **unpinned) == {"delivered tokens": said}
    by_events = {"tokens_out": 4, "tokens_out_from": "events"}
    assert between(**by_events, **unpinned) == {}  # an estimate
    unsaid = {"event_tokens": [1, 1, 1, 1, 0]}  # of its last event the wire did not say: one token, or more
    assert between(**unsaid, **by_events, **unpinned) == {}
    of_four = {"events": [50, 70, 90, 110], "event_tokens": [1, 1, 1, 1]}
    assert between(**of_four, **by_events, **unpinned) == {"delivered tokens": said}


@pytest.mark.parametrize(
    ("fields", "differs"),
    [
        ({"tokens_in": 102}, False),
        ({"tokens_in": 103}, True),
        ({"probe": {"rtt_ms": 5.2}}, False),  # 5 ms of a TTFT of 50
        ({"probe": {"rtt_ms": 5.21}}, True),
        ({"probe": {"tokens_per_word": 1.32}}, False),
        ({"finish_reason": "max_tokens"}, False),  # another protocol's word for the same
        ({"finish_reason": "LENGTH"}, False),
    ],
)
def test_limits_of_what_counts_as_different(fields: dict[str, Any], differs: bool) -> None:
    assert bool(between(**fields)) == differs


def test_one_more_way_to_end_counts_from_two_percent_on() -> None:
    def ended(stopped: int) -> Cell:
        rows = [record(i, 100 * i, events=[100 * i + 50, 100 * i + 60]) for i in range(100)]
        for row in rows[:stopped]:
            row.finish_reason = "eos_token"
        return cell(rows)

    plain = Side("a", ended(0))
    assert [bool(differences(plain, Side("b", ended(k)))) for k in (1, 3)] == [False, True]
    assert differences(plain, Side("b", ended(3)))[0].text == (
        "answers ended by length 100% at a, by length 97%, stop 3% at b"
    )


def test_requests_are_compared_by_their_place_in_the_plan() -> None:
    # The second target lost its longer half: of the requests that both answered nothing differs.
    def lengths(n: int) -> Cell:
        rows = [
            record(i, 100 * i, events=[100 * i + 50, 100 * i + 60], tokens_out=10 * (1 + i // 25)) for i in range(n)
        ]
        return cell(rows, plan={"requests": 50})

    a, half = Side("a", lengths(50)), lengths(25)
    assert differences(a, Side("b", half)) == []
    half.header["plan"] = {"requests": 25}  # a plan of other rows: a place says nothing
    assert [d.text for d in differences(a, Side("b", half))] == ["delivered tokens a request 15 at a, 10 at b (-33.3%)"]


def test_cells_are_compared_load_by_load_and_repeats_in_turn() -> None:
    sides = [Side("a", work()), Side("b", work()), Side("c", work(tokens_in=120))]
    sides += [Side("a", work(load="c=16")), Side("b", work(load="c=16", tokens_in=130))]
    sides += [Side("a", work(tokens_in=90)), Side("b", work(tokens_in=99))]
    assert same_work(sides) == [
        Difference("prompt tokens", "prompt tokens a request 90 at a, 99 at b (+10.0%)"),
        Difference("prompt tokens", "prompt tokens a request 100 at a, 120 at c (+20.0%)"),
        Difference("prompt tokens", "prompt tokens a request 100 at a, 130 at b (+30.0%)"),
    ]
    assert same_work([]) == []


def test_what_holds_at_every_load_is_said_once() -> None:
    loads = ("c=1", "c=8")
    sides = [Side(name, work(load=load, target={"precision": name})) for load in loads for name in ("fp8", "bf16")]
    assert same_work(sides) == [Difference("declared", "precision 'fp8' at fp8, 'bf16' at bf16")]


def test_the_first_line_of_a_comparison_has_each_check_once() -> None:
    other = work(tokens_in=130, target={"revision": "2"})
    found = same_work([Side("a", work(target={"revision": "1"})), Side("b", other), Side("c", other)])
    assert first_line(found) == (
        "not the same work: revision '1' at a, '2' at b; prompt tokens a request 100 at a, 130 at b (+30.0%) (2 more)"
    )


def test_agreement_of_greedy_answers_is_a_figure_and_no_check() -> None:
    def answers(*texts: str) -> Side:
        return Side("", work(probe={"agreement": list(texts)}))

    assert agreement(answers("x", "y", "z"), answers("x", "y", "w")) == (2, 3)
    assert differences(answers("x"), answers("y")) == []
    assert agreement(answers("x"), answers("x", "y")) is None  # other prompts
    assert agreement(answers("x"), Side("b", work())) is None


@pytest.mark.parametrize("empty", [work(0), work(outcome="failed")])
@pytest.mark.parametrize("order", [1, -1])
def test_a_cell_without_an_answer_differs_in_nothing_that_can_be_told(empty: Cell, order: int) -> None:
    first, second = [Side("a", work()), Side("b", empty)][::order]
    assert differences(first, second) == []


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 400))
@example(200, 204)
def test_differences_are_seen_from_either_side(x: int, y: int) -> None:
    def of(tokens: int) -> Side:
        return Side("a", work(3, tokens_in=tokens, tokens_cached=0, probe={"tokens_per_word": tokens / 100}))

    one, other = differences(of(x), of(y)), differences(of(y), of(x))
    assert [d.check for d in one] == [d.check for d in other]
    assert bool(one) == (max(x, y) > 1.02 * min(x, y))


def test_prompts_that_cost_more_than_a_template_apart_are_of_differing_tokenizers() -> None:
    mine, theirs = {"agreement_tokens": [5, 6, 7]}, {"agreement_tokens": [6, 7, 9]}
    found = differences(Side("a", work(probe=mine)), Side("b", work(probe=theirs)))
    assert [d.check for d in found] == ["tokenizer"]
    assert "the same prompts cost 5, 6, 7 tokens here, 6, 7, 9 there" in found[0].text
    template = {"agreement_tokens": [7, 8, 9]}
    assert differences(Side("a", work(probe=mine)), Side("b", work(probe=template))) == []


def test_what_a_server_tells_of_its_build_stands_where_nothing_is_declared() -> None:
    told = {"told": {"revision": "abc123", "precision": "torch.float16"}}
    other = {"told": {"revision": "fff999", "precision": "fp16"}}
    found = differences(Side("a", work(probe=told)), Side("b", work(probe=other)))
    assert [d.text for d in found] == ["revision 'abc123' at a, 'fff999' at b"]
    assert differences(Side("a", work(probe=told)), Side("b", work(target={"revision": "abc"}))) == []


@pytest.mark.parametrize(("bytes_out", "said"), [
    (1000, {}),
    (1050, {}),  # a longer name of the model
    (1900, {"prompt tokens": "bytes sent a request 1,000 at a, 1,900 at b (+90.0%), and b counts no prompt tokens"}),
    (-1, {}),  # a run of an earlier version
])  # fmt: skip
def test_a_target_that_counts_no_prompt_tokens_got_as_long_a_text(bytes_out: int, said: dict[str, str]) -> None:
    silent = {"tokens_in": -1, "bytes_out": bytes_out, "probe": {"tokens_per_word": 1.0, "sized": False}}
    a, b = Side("a", work(bytes_out=1000)), Side("b", work(**silent))
    assert {d.check: d.text for d in differences(a, b)} == said
    assert differences(Side("a", work(bytes_out=1000)), Side("b", work(bytes_out=1900))) == []  # both have counted
