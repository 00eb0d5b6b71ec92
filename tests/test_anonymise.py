"""Anonymised traces: of the input's words and numbers only lengths and times are left, and sharing is as it was."""

import hmac
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_bench.anonymise import STATISTICS, anonymise, before_after, figure, key_from_env
from llm_bench.errors import BenchError
from llm_bench.prefixes import prefix_bound
from llm_bench.request import Request, Trace
from llm_bench.trace import read, write
from llm_bench.workload import describe

KEY, OTHER = b"sixteen bytes, ok", b"sixteen bytes, no"
BLOCK = 16
MARK = "§"  # in every string that must not survive, and in nothing that the project writes

secrets = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=80).map(lambda s: MARK + s)
numbers = st.integers(10**9, 2**31 - 1)
nested = st.recursive(
    secrets | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(secrets, inner, max_size=3),
    max_leaves=6,
)
contents = secrets | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": secrets}) | nested, max_size=3)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user"]), "content": contents}, optional={"name": nested}
    ),
    min_size=1,
    max_size=4,
)
sampling = st.fixed_dictionaries(
    {}, optional={"temperature": st.floats(0, 2) | nested.filter(lambda x: type(x) is not int), "n": st.integers(1, 9)}
)
said = st.one_of(
    st.builds(lambda n: {"input_length": n}, st.integers(1, 90)),
    st.builds(lambda n, path: {"input_length": n, "path": path}, st.integers(1, 90), st.tuples(*[st.booleans()] * 6)),
    st.fixed_dictionaries({"prompt": secrets}, optional={"input_length": st.integers(1, 90)}),
    st.fixed_dictionaries({"messages": messages}),
    st.builds(lambda ids: {"prompt_token_ids": ids}, st.lists(numbers, min_size=1, max_size=50)),
    st.builds(
        lambda what, more: {"prompt": "", "body": {**what, **more}},
        st.fixed_dictionaries({"messages": messages})
        | st.fixed_dictionaries({"prompt": secrets})
        | nested.map(lambda x: {MARK: x}),
        sampling | st.dictionaries(secrets, nested, max_size=2),
    ),
)
rows = st.lists(
    st.tuples(
        said,
        st.fixed_dictionaries(
            {},
            optional={
                "output_length": st.integers(1, 40),
                "session_id": st.sampled_from([MARK + "a", MARK + "b", MARK + "ü😀"]),
                "class": secrets,
                "model": secrets,
                "client": secrets,
                "think_s": st.sampled_from([0.0, 0.25, 3.0]),
                "cancel_after_s": st.just(2.5),
                "priority": st.integers(0, 2),
                "extra": st.dictionaries(secrets, nested, max_size=2) | sampling,
            },
        ),
        st.integers(0, 10**4),
    ),
    min_size=1,
    max_size=12,
)


def path_ids(path: tuple[bool, ...], tokens: int, known: dict[object, int]) -> list[int]:
    """Ids of a tree of blocks: a block's id is one of its beginning and its tokens."""
    count = -(-tokens // BLOCK)
    held = [BLOCK] * (count - 1) + [tokens - BLOCK * (count - 1)]
    return [known.setdefault((path[: k + 1], held[k]), 10**9 + 7 * len(known)) for k in range(count)]


def made(folder: Path, drawn: list[tuple[dict[str, Any], dict[str, Any], int]]) -> Trace:
    """As the reader makes it; bodies and clients are put in afterwards."""
    known: dict[object, int] = {}
    after: dict[int, dict[str, Any]] = {}
    lines = [json.dumps({"llm_bench_trace": 1, "block_size": BLOCK})]
    for number, (what, facts, at) in enumerate(sorted(drawn, key=lambda row: row[2]), 2):
        row = {**what, **facts, "timestamp": at / 8}
        if path := row.pop("path", None):
            row["hash_ids"] = path_ids(path, row["input_length"], known)
        after[number] = {"client": row.pop("client", "")}
        if body := row.pop("body", None):
            after[number] |= {"body": body, "prompt": None}
        lines.append(json.dumps(row))
    file = folder / "made.jsonl"
    file.write_text("\n".join(lines))
    try:
        trace = read(file)
    except BenchError:  # some turns hold what went before, others do not
        trace = read(file, turns="new")
    return trace._replace(requests=[replace(r, **after[r.line]) for r in trace.requests])


def through_a_file(folder: Path, trace: Trace) -> tuple[str, list[Request]]:
    file = folder / "safe.jsonl"
    file.unlink(missing_ok=True)
    write(file, trace)
    return file.read_text(), read(file).requests


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("anonymise")


def values(of: Any) -> Iterator[object]:
    """Every string and number in it, names of members too."""
    if isinstance(of, dict):
        for name, value in of.items():
            yield name
            yield from values(value)
    elif isinstance(of, list | tuple):
        for value in of:
            yield from values(value)
    else:
        yield of


@given(rows, st.sampled_from([0, 1, 7, 64]), st.sampled_from([None, lambda text: [ord(c) for c in text]]))
@settings(deadline=None)
def test_no_string_and_no_number_of_the_input_is_left(folder, drawn, bucket, encode):
    trace = made(folder, drawn)
    safe = anonymise(trace, KEY, bucket=bucket, encode=encode)
    text, again = through_a_file(folder, safe)
    assert again == safe.requests
    left = set(values([json.loads(line) for line in text.splitlines()]))
    for value in values([asdict(r) for r in trace.requests]):
        if isinstance(value, str) and MARK in value:
            assert value not in text
        elif type(value) is int and value >= 10**9:
            assert value not in left
    assert MARK not in text
    assert MARK not in repr(safe)


@given(rows)
@settings(deadline=None)
def test_lengths_times_and_sharing_stay_and_another_key_changes_only_names(folder, drawn):
    trace = made(folder, drawn)
    safe, other = anonymise(trace, KEY), anonymise(trace, OTHER)
    assert safe == anonymise(trace, KEY)
    for before, after, by_other in zip(trace.requests, safe.requests, other.requests, strict=True):
        same = ("at_s", "turn", "think_s", "priority", "cancel_after_s", "tokens_out")
        assert all(getattr(before, name) == getattr(after, name) for name in same)
        named = {"session", "client", "model", "request_class", "hash_ids"}
        assert {k: v for k, v in asdict(after).items() if k not in named} == {
            k: v for k, v in asdict(by_other).items() if k not in named
        }
        assert len(after.hash_ids) == len(by_other.hash_ids)
        assert not set(after.hash_ids) & set(by_other.hash_ids)
    assert prefix_bound(safe.requests) == prefix_bound(other.requests)
    if all(r.tokens_in for r in trace.requests):
        assert [(r.tokens_in, r.tokens_new) for r in trace.requests] == [
            (r.tokens_in, r.tokens_new) for r in safe.requests
        ]
        places = [i for i, r in enumerate(trace.requests) if r.hash_ids]
        before, after = ([of.requests[i] for i in places] for of in (trace, safe))
        assert prefix_bound(before) == prefix_bound(after)


@given(
    rows.map(lambda drawn: [row for row in drawn if "input_length" in row[0] and "prompt" not in row[0]]).filter(bool)
)
@settings(deadline=None)
def test_statistics_of_a_trace_without_texts_are_exactly_equal(folder, drawn):
    trace = made(folder, drawn)
    safe = anonymise(trace, KEY)
    before, after = describe(trace), describe(safe)
    for name, at in STATISTICS.items():
        assert figure(before, at) == figure(after, at), name
    named = {"classes": {}, "models": {}}
    assert replace(before, **named) == replace(after, **named)
    assert sorted(before.classes.values()) == sorted(after.classes.values())
    assert all(b == a for _, b, a in before_after(trace, safe))


def test_before_and_after_are_shown_side_by_side():
    rows = [
        Request(10 + k % 2, 5 + k % 2, at_s=float(k), prompt="x" * 2000, client="c" * (k % 3), session=f"{k // 2 * 2}")
        for k in range(1000)
    ]
    rows = [replace(r, turn=1, prompt=None, think_s=0.5, tokens_in=20) if k % 2 else r for k, r in enumerate(rows)]
    trace = Trace(rows, "llm-bench", "", [], {})
    shown = {name: values for name, *values in before_after(trace, anonymise(trace, KEY, bucket=8))}
    assert shown.keys() == STATISTICS.keys()
    assert shown["requests"] == ["1,000", "1,000"]
    assert shown["rate, 1/s"] == ["1.001", "1.001"]
    assert shown["CV of inter-arrivals"] == ["0", "0"]
    assert shown["prompt tokens, p50"] == ["15", "20"]  # of 10 and 20; of 16 and 24
    assert shown["pause before a turn, p50, s"] == ["0.5", "0.5"]
    assert shown["endless cache: share of blocks hit"] == ["-", "0.998"]  # 499 of 500
    one = Trace([Request(1, 1)], "llm-bench", "", [], {})
    assert "turns, mean" not in {name for name, *_ in before_after(one, one)}


def test_the_first_block_is_the_hmac_that_the_definition_says():
    request = Request(0, 5, prompt="x" * 70)
    (after,) = anonymise(Trace([request], "llm-bench", "", [], {}), KEY).requests
    assert after.tokens_in == 18  # 70 bytes at 4 a token
    assert len(after.hash_ids) == 2
    message = b"block\0" + bytes(32) + (16).to_bytes(4, "big") + b"0[]\0" + b"x" * 64
    assert after.hash_ids[0] == int.from_bytes(hmac.digest(KEY, message, "sha256")[:8], "big") >> 1


def safe(*requests: Request, **how: Any) -> list[Request]:
    return anonymise(Trace(list(requests), "llm-bench", "", [], {}), KEY, **how).requests


def shared(a: Request, b: Request) -> int:
    """Blocks that both begin with."""
    same = [x == y for x, y in zip(a.hash_ids, b.hash_ids, strict=False)]
    return same.index(False) if False in same else len(same)


def test_texts_share_the_blocks_they_begin_with_and_no_later_ones():
    begin, end = "b" * 200, "e" * 128
    a, b, c = safe(
        Request(0, 1, prompt=begin + end), Request(0, 1, prompt=begin + "!!!!" + end), Request(0, 1, prompt=end)
    )
    assert shared(a, b) == 200 // 64
    assert not set(a.hash_ids) & set(c.hash_ids)
    assert shared(*safe(Request(99, 1, prompt=begin), Request(99, 1, prompt=begin))) == 7  # more blocks than text
    assert shared(*safe(Request(33, 1, prompt=begin), Request(33, 1, prompt=begin + end))) == 2  # more text than blocks
    assert shared(*safe(Request(33, 1, prompt=begin), Request(34, 1, prompt=begin))) == 2  # its last block is another


def test_a_tokenizer_cuts_blocks_by_its_tokens_as_given_token_ids_do():
    text = "".join(chr(97 + k % 26) for k in range(50))
    a, b = safe(
        Request(0, 1, prompt=text),
        Request(50, 1, prompt_token_ids=tuple(map(ord, text))),
        encode=lambda text: [ord(c) for c in text],
    )
    assert (a.tokens_in, len(a.hash_ids)) == (50, 4)
    assert a.hash_ids == b.hash_ids


def test_a_role_is_part_of_the_prompt_and_costs_no_tokens():
    turns = [{"role": "system", "content": "s" * 64}, {"role": "user", "content": "u" * 64}]
    other = [turns[0], {"role": "assistant", "content": "u" * 64}]
    image = [
        turns[0],
        {"role": "user", "content": [{"type": "text", "text": "u" * 64}, {"image_url": "data:" + "A" * 999}]},
    ]
    rows = [Request(0, 1, messages=tuple(m)) for m in (turns, other, image)]
    trace = anonymise(Trace(rows, "llm-bench", "", [], {}), KEY)
    a, b, c = trace.requests
    assert [r.tokens_in for r in trace.requests] == [32, 32, 32]
    assert (shared(a, b), shared(a, c)) == (1, 1)
    assert "1 rows hold parts that are no text: their tokens are not counted" in trace.notes


def test_captured_bodies_of_one_conversation_share_what_came_before():
    first = [{"role": "user", "content": "q" * 128}]
    second = [*first, {"role": "assistant", "content": "a" * 80}, {"role": "user", "content": "r" * 80}]
    tools = [{"name": "t" * 100}]
    a, b, c = safe(
        Request(
            0, 20, body={"model": "m", "messages": first, "temperature": 0.5, "seed": 7, "max_tokens": 9}, session="s"
        ),
        Request(0, 20, body={"model": "m", "messages": second, "max_tokens": True}, session="s"),
        Request(0, None, body={"messages": first, "tools": tools, "max_tokens": 100}),
        bucket=8,
    )
    assert (a.turn, b.turn, shared(a, b), shared(a, c)) == (0, 1, 2, 0)
    assert a.extra == {"temperature": 0.5}  # its length is known: the limit would stand against it
    assert b.extra == {}
    assert c.extra == {"max_tokens": 104}
    assert (a.tokens_in, a.tokens_out, b.tokens_in, b.tokens_new) == (32, 24, 72, 16)


def test_what_a_later_turn_adds_is_counted_behind_the_turn_before_and_has_no_blocks():
    a, b, c = safe(
        Request(0, 10, prompt="x" * 80, session="s"),
        Request(0, 10, prompt="y" * 40, session="s", turn=1),
        Request(30, 10, session="s", turn=2, tokens_new=30),
    )
    assert [(r.tokens_in, r.tokens_new, r.turn) for r in (a, b, c)] == [(20, 0, 0), (40, 10, 1), (80, 30, 2)]
    assert b.hash_ids == ()


def test_buckets_keep_turns_cumulative_and_the_count_of_blocks(tmp_path):
    ids = (5, 6)
    rows = [
        Request(20, 7, session="s", hash_ids=ids, block_size=16),
        Request(27, 7, session="s", turn=1),
        Request(60, 1),
        Request(20, 3, hash_ids=ids, block_size=16),
    ]
    after = safe(*rows, bucket=50)
    assert [(r.tokens_in, r.tokens_out, r.tokens_new) for r in after] == [
        (50, 50, 0),
        (100, 50, 0),
        (100, 50, 0),
        (50, 50, 0),
    ]
    assert len(after[0].hash_ids) == 4
    assert after[0].hash_ids == after[3].hash_ids
    assert through_a_file(tmp_path, Trace(after, "", "", [], {}))[1] == after


def test_classes_and_models_stay_when_asked():
    row = Request(1, 1, request_class="chat", model="m-7b", client="c", session="s")
    (kept,) = safe(row, keep_class=True, keep_model=True)
    assert (kept.request_class, kept.model) == ("chat", "m-7b")
    (hidden,) = safe(row)
    names = [hidden.request_class, hidden.model, hidden.client, hidden.session]
    assert len(set(names)) == 4
    assert all(len(name) == 16 for name in names)
    assert safe(replace(row, client="s"))[0].client != hidden.session  # one name, two kinds: not to be linked


def test_a_key_must_be_there_and_long_enough(monkeypatch):
    monkeypatch.setenv("TRACE_KEY", "fifteen letters")
    with pytest.raises(BenchError, match=r"--key-env TRACE_KEY: a key of 15 bytes, expected a secret of 16 bytes"):
        key_from_env("TRACE_KEY")
    monkeypatch.setenv("TRACE_KEY", "sixteen letters!")
    assert key_from_env("TRACE_KEY") == b"sixteen letters!"
    monkeypatch.delenv("TRACE_KEY")
    with pytest.raises(BenchError, match=r"--key-env TRACE_KEY: no such variable is set"):
        key_from_env("TRACE_KEY")
    with pytest.raises(BenchError, match=r"--key-env VARIABLE: a key of 3 bytes"):
        anonymise(Trace([], "", "", [], {}), b"abc")


def test_a_number_that_no_sampler_can_mean_is_left_out_and_counted(folder):
    """A telephone number as `n` or as a priority would tell who asked."""
    number = 4155550123
    extra = {"n": number, "temperature": number + 0.5, "top_k": number, "top_p": 0.9, "max_tokens": number}
    rows = [
        Request(5, 4, at_s=0.0, extra=extra, priority=1234567),
        Request(5, 4, at_s=1.0, extra={"n": 2, "top_k": -1, "logprobs": True}, priority=-7),
        Request(5, 4, at_s=2.0, body={"messages": [], "presence_penalty": 1e9, "temperature": 0}),
    ]
    safe = anonymise(Trace(rows, "llm-bench", "", [], {}), KEY)
    assert [(dict(r.extra), r.priority) for r in safe.requests] == [
        ({"top_p": 0.9}, 0),
        ({"n": 2, "top_k": -1, "logprobs": True}, -7),
        ({"temperature": 0}, 0),
    ]
    assert next(note for note in safe.notes if "beyond all use" in note).startswith("2 rows ")
    assert not any("other entries" in note for note in safe.notes)
