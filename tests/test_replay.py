"""What is sent of a trace, seen by the server: rows, histories, bodies, lengths, classes; and the engine's cache."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from llm_bench import neighbours, prefixes, records, trace
from llm_bench.cell import Options
from llm_bench.errors import BenchError
from llm_bench.plan import Load
from llm_bench.records import Cell
from llm_bench.run import Job, run
from llm_bench.targets import BUILT_IN, Target
from tests.bench import good, llm_server, trace_file
from tests.scripted import Script, Scripted, Seen, http_response, usage

ONE_SLOT = (Load(concurrency=1),)


class Replayed(NamedTuple):
    bodies: list[dict[str, Any]]  # of the measured requests, in the order in which the server read them
    said: list[str]
    folder: Path

    @property
    def cells(self) -> list[Cell]:
        return [records.read(path) for path in sorted(self.folder.glob("*.arrow"))]

    @property
    def book(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run.json").read_text()))


def replay(
    folder: Path,
    rows: Path | Sequence[Mapping[str, Any]],
    loads: Sequence[Load] = ONE_SLOT,
    *,
    api: str = "openai-chat",
    job: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    **options: Any,
) -> Replayed:
    path = rows if isinstance(rows, Path) else trace_file(folder, [dict(r) for r in rows])
    said: list[str] = []
    with Scripted(llm_server(lambda n, seen: speak(seen), max_model_len=max_model_len)) as server:
        one = Target("t", server.url, api=api, **(target or {}))
        asked = Options(folder / "run", warmup=0, **options)
        run(Job([one], loads, path, **(job or {})), asked, said.append, lambda text: None)
    bodies = [seen.json() for seen in server.requests if "x-request-id" in seen.headers]
    return Replayed(bodies, said, folder / "run")


def speak(seen: Seen) -> Script:
    """`good` in the protocol that was asked; whole where no stream was."""
    body = seen.json()
    if seen.path.endswith("/chat/completions") and body["stream"]:
        return good(seen)
    tokens = body.get("max_tokens", 4)
    prompt = body.get("prompt", "")
    counts = usage(len(prompt if isinstance(prompt, list) else prompt.split()), tokens)["usage"]
    choice = {"index": 0, "text": "".join(f" w{i}" for i in range(tokens)), "finish_reason": "length"}
    if not body["stream"]:
        return [(0, http_response(200, json.dumps({"choices": [choice], "usage": counts}).encode()))]
    events = [{"choices": [choice]}, {"choices": [], "usage": counts}]
    text = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
    return [(0, http_response(200, text.encode(), {"Content-Type": "text/event-stream"}))]


def words(body: Mapping[str, Any]) -> int:
    """Of the whole prompt."""
    return (
        sum(len(m["content"].split()) for m in body["messages"]) if "messages" in body else len(body["prompt"].split())
    )


# -- rows -------------------------------------------------------------------------------------------------------------


def test_every_row_is_sent_once_in_order_whatever_the_load(tmp_path: Path) -> None:
    rows = [{"timestamp": 0.01 * (i // 3), "input_length": 5 + i, "output_length": 1} for i in range(40)]
    for name, load in {"closed": Load(concurrency=1), "replay": Load(speed=1.0, max_in_flight=1)}.items():
        folder = tmp_path / name
        folder.mkdir()
        sent = replay(folder, rows, [load], job={"dejitter": "off"})
        assert [words(b) for b in sent.bodies] == [5 + i for i in range(40)]
        (cell,) = sent.cells
        assert cell["planned_in"].tolist() == [5 + i for i in range(40)]
        if load.speed:
            dues_ms = (cell["due_ns"] - cell["due_ns"][0]) / 1e6
            assert dues_ms.tolist() == [10.0 * (i // 3) for i in range(40)]


def test_a_part_of_a_trace_is_whole_conversations_and_is_said(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 7, "output_length": 1},
        {"timestamp": 10, "input_length": 8, "output_length": 1, "session_id": "a"},
        {"timestamp": 10.02, "input_length": 9, "output_length": 1},
        {"timestamp": 10.05, "input_length": 29, "output_length": 1, "session_id": "a"},
        {"timestamp": 10.06, "input_length": 6, "output_length": 1},
    ]
    part = {"from_s": 10.0, "to_s": 10.05, "limit": 3}
    sent = replay(tmp_path, rows, [Load(speed=1.0)], job=part, history="recorded")
    assert sorted(words(b) for b in sent.bodies) == [8, 9, 29]
    assert any("3 of 5 rows chosen, in whole conversations, over 0.05 s" in line for line in sent.said)
    assert sent.book["trace"]["from_s"] == 10.0
    due_ns = np.sort(sent.cells[0]["due_ns"])
    assert ((due_ns - due_ns[0])[:2] / 1e6).tolist() == [0.0, 20.0]


def test_ticks_are_spread_in_a_replay_and_that_is_said(tmp_path: Path) -> None:
    rows = [{"timestamp": 0.2 * (i // 4), "input_length": 5, "output_length": 1} for i in range(12)]
    due_ms: dict[tuple[str, int], list[float]] = {}
    for mode, seed in (("even:0.2", 0), ("0.2", 1), ("0.2", 2), ("off", 0)):
        folder = tmp_path / f"{mode}-{seed}"
        folder.mkdir()
        sent = replay(folder, rows, [Load(speed=2.0)], job={"dejitter": mode}, seed=seed)
        due_ns = np.sort(sent.cells[0]["due_ns"])
        due_ms[mode, seed] = ((due_ns - due_ns[0]) / 1e6).tolist()
        assert any("spread" in line for line in sent.said) == (mode != "off")
        assert any("spread" in note for note in sent.book["trace"]["notes"]) == (mode != "off")
    assert due_ms["even:0.2", 0] == [25.0 * i for i in range(12)]
    assert due_ms["off", 0] == [100.0 * (i // 4) for i in range(12)]
    assert due_ms["0.2", 1] != due_ms["0.2", 2]
    assert len(set(due_ms["0.2", 1])) == 12


def test_requests_are_a_cut_of_what_was_chosen(tmp_path: Path) -> None:
    rows = [{"timestamp": i, "input_length": 5 + i, "output_length": 1} for i in range(9)]
    sent = replay(tmp_path, rows, job={"from_s": 2.0}, requests=3)
    assert [words(b) for b in sent.bodies] == [7, 8, 9]


# -- histories --------------------------------------------------------------------------------------------------------

CUMULATIVE = [
    {"session_id": "s1", "input_length": 100, "output_length": 50},
    {"session_id": "s1", "input_length": 190, "output_length": 30},
    {"session_id": "s1", "input_length": 260, "output_length": 10},
]


@pytest.mark.parametrize("api", ["openai-chat", "openai-completions"])
@pytest.mark.parametrize(("turns", "lengths"), [("cumulative", [100, 190, 260]), ("new", [100, 340, 630])])
@pytest.mark.parametrize("history", ["live", "recorded"])
def test_case_26_prompts_have_the_lengths_of_the_trace(
    tmp_path: Path, api: str, turns: str, lengths: list[int], history: str
) -> None:
    sent = replay(tmp_path, CUMULATIVE, api=api, job={"turns": turns}, history=history)
    assert [words(b) for b in sent.bodies] == lengths
    if api == "openai-completions":
        prompts = [b["prompt"] for b in sent.bodies]
        assert prompts[1].startswith(prompts[0])
        assert prompts[2].startswith(prompts[1])
        assert ("w0 w1" in prompts[1]) == (history == "live")
        return
    messages = [b["messages"] for b in sent.bodies]
    assert [[m["role"] for m in ms] for ms in messages] == [["user", "assistant"] * k + ["user"] for k in range(3)]
    assert messages[1][:1] == messages[0]
    assert messages[2][:3] == messages[1]
    answers = [len(m["content"].split()) for m in messages[2] if m["role"] == "assistant"]
    assert answers == [50, 30]
    assert messages[1][1]["content"].startswith("w0 w1") == (history == "live")


def test_a_recorded_history_is_in_the_plan_before_the_clock_starts(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        replay(folder, CUMULATIVE, history="recorded", reuse_prompts=True)
    one, other = (records.read(next((f / "run").glob("*.arrow"))) for f in folders)
    assert one["prompt_hash"].tolist() == other["prompt_hash"].tolist()
    assert one.header["plan"]["hash"] == other.header["plan"]["hash"] != ""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ADDED = [[user("one")], [assistant("said then"), user("two")]]
WHOLE = [[user("one")], [user("one"), assistant("said then"), user("two")]]


@pytest.mark.parametrize("turns", [ADDED, WHOLE])
@pytest.mark.parametrize(("history", "answer"), [("live", "w0 w1 "), ("recorded", "said then")])
def test_recorded_answers_of_a_trace_are_used_or_replaced_by_live_ones(
    tmp_path: Path, turns: list[list[dict[str, str]]], history: str, answer: str
) -> None:
    rows = [{"messages": messages, "output_length": 2, "session_id": "s"} for messages in turns]
    sent = replay(tmp_path, rows, history=history)
    assert sent.bodies[1]["messages"] == [user("one"), assistant(answer), user("two")]


def test_blocks_decide_what_a_recorded_later_turn_says(tmp_path: Path) -> None:
    rows = [
        {"input_length": 32, "output_length": 4, "hash_ids": [1, 2], "session_id": "s"},
        {"input_length": 60, "output_length": 4, "hash_ids": [1, 2, 3, 4], "session_id": "s"},
        {"input_length": 48, "output_length": 4, "hash_ids": [1, 2, 3]},
    ]
    path = trace_file(tmp_path, rows, block_size=16)
    sent = replay(tmp_path, path, history="recorded")
    first, second, other = (b["messages"] for b in sent.bodies)
    assert [len(ms) for ms in (first, second, other)] == [1, 1, 1]
    assert [words({"messages": ms}) for ms in (first, second, other)] == [32, 60, 48]
    assert second[0]["content"].startswith(other[0]["content"])
    assert other[0]["content"].startswith(first[0]["content"])


def test_an_answer_of_unknown_length_cannot_be_made_up(tmp_path: Path) -> None:
    rows = [{"input_length": 10, "session_id": "s"}, {"input_length": 30, "session_id": "s"}]
    with pytest.raises(BenchError, match=r"trace.jsonl:2 has no output length.*--history live"):
        replay(tmp_path, rows, history="recorded")


# -- bodies -----------------------------------------------------------------------------------------------------------

CAPTURED = {
    "model": "gpt-4o",
    "messages": [user("ebb?"), assistant("flood"), user("why?")],
    "max_tokens": 3,
    "stream": False,
    "metadata": {"app": "x"},
}


def captured_trace(folder: Path, *bodies: dict[str, Any]) -> Path:
    path = folder / "captured.jsonl"
    path.write_text("".join(json.dumps({"timestamp": i, "body": body}) + "\n" for i, body in enumerate(bodies)))
    return path


@pytest.mark.parametrize(("keep", "model"), [(False, "m"), (True, "gpt-4o")])
def test_captured_bodies_are_sent_as_they_stand_but_for_model_and_streaming(
    tmp_path: Path, keep: bool, model: str
) -> None:
    other = CAPTURED | {"seed": 2, "max_tokens": 5}
    sent = replay(tmp_path, captured_trace(tmp_path, CAPTURED, other), keep_model=keep)
    ours = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    assert sent.bodies == [CAPTURED | ours, other | ours]
    assert any("2 captured bodies are sent as they stand but for" in line for line in sent.said)
    assert any("2 rows name a model: theirs" in line for line in sent.said) == keep
    assert any("2 rows name a model: the target's own" in line for line in sent.said) != keep
    (cell,) = sent.cells
    assert cell["asked_out"].tolist() == [3, 5]
    assert (cell["outcome"] == "ok").all()


@pytest.mark.parametrize(("keep", "models"), [(False, ["m", "m"]), (True, ["adapter", "m"])])
def test_a_model_that_a_row_names_is_asked_for_only_where_it_is_kept(
    tmp_path: Path, keep: bool, models: list[str]
) -> None:
    rows = [{"input_length": 5, "output_length": 1, "model": "adapter"}, {"input_length": 5, "output_length": 1}]
    assert [b["model"] for b in replay(tmp_path, rows, keep_model=keep).bodies] == models


def test_a_body_of_another_api_is_refused_by_its_line_before_anything_is_sent(tmp_path: Path) -> None:
    path = captured_trace(tmp_path, CAPTURED, CAPTURED)
    with Scripted(llm_server([])) as server:
        target = Target("t", server.url, api="openai-completions")
        with pytest.raises(BenchError, match=r"captured.jsonl:1: its body has messages.*openai-chat.*target t"):
            run(Job([target], ONE_SLOT, path), Options(tmp_path / "run"), print, lambda text: None)
        assert server.requests == []


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_lengths_are_scaled_by_what_was_asked_or_by_what_fits_and_it_is_said(tmp_path: Path) -> None:
    rows = [{"input_length": n, "output_length": 8} for n in (32, 64, 192)]
    for name, options, limit in (("asked", {"scale_lengths": "1/4"}, None), ("fits", {"too_long": "scale"}, 50)):
        folder = tmp_path / name
        folder.mkdir()
        sent = replay(folder, rows, max_model_len=limit, **options)
        assert [(words(b), b["max_tokens"]) for b in sent.bodies] == [(8, 2), (16, 2), (48, 2)]
        assert any("all lengths of the trace were multiplied by 0.25" in line for line in sent.said)
        (cell,) = sent.cells
        effect = str(cell.header["settings"]["too_long"])
        assert ("2 of 3 requests (66.7%)" in effect) == (limit is not None)


# -- classes ----------------------------------------------------------------------------------------------------------


def test_each_class_alone_has_its_rows_and_times_of_the_mix_and_other_prompts(tmp_path: Path) -> None:
    rows = [
        {"input_length": 10 + i, "output_length": 1, "class": "chat" if i % 3 else "batch", "priority": i % 3}
        for i in range(12)
    ]
    path, said = trace_file(tmp_path, rows), list[str]()
    options = Options(tmp_path / "run", warmup=0)
    with Scripted(llm_server(lambda n, seen: speak(seen))) as server:
        job = Job([Target("t", server.url)], [Load(rate=200.0)], path, alone_too=True)
        run(job, options, print, lambda text: None)
        run(replace(job, resume=True), options, said.append, lambda text: None)
        assert sum("x-request-id" in seen.headers for seen in server.requests) == 24
    names = ["000-t-rate=200-s", "001-t-rate=200-s--batch-alone", "002-t-rate=200-s--chat-alone"]
    assert [line for line in said if line.endswith("done before")] == [f"{name}: done before" for name in names]
    mix, *alone = (records.read(tmp_path / "run" / f"{name}.arrow") for name in names)
    assert [c.header["load"]["label"] for c in alone] == ["rate=200/s [batch alone]", "rate=200/s [chat alone]"]
    assert mix.header["load"]["class_alone"] == ""
    for cell, name in zip(alone, ("batch", "chat"), strict=True):
        assert cell.header["load"]["class_alone"] == name
        assert set(cell["request_class"]) == {name}
        of_it = mix.among("request_class", name)
        for column in ("planned_in", "priority"):
            assert cell[column].tolist() == mix[column][of_it].tolist()
        assert np.diff(cell["due_ns"]).tolist() == np.diff(mix["due_ns"][of_it]).tolist()
        assert not set(cell["prompt_hash"]) & set(mix["prompt_hash"])


def test_a_class_of_any_name_and_length_gives_a_file_name(tmp_path: Path) -> None:
    rows = [{"input_length": 10, "output_length": 1, "class": name} for name in ("x" * 400, "漢" * 400, "../\u0000/")]
    sent = replay(tmp_path, rows, job={"alone_too": True})
    assert [len(cell["request_class"]) for cell in sent.cells] == [3, 1, 1, 1]
    assert any("a class measured alone has all the slots" in line for line in sent.said)


def test_a_trace_keeps_its_times_beside_a_neighbour_and_each_class_is_measured_alone(tmp_path: Path) -> None:
    rows = [{"timestamp": 40 * i, "input_length": 10 + i, "output_length": 1} for i in range(12)]
    path, said = trace_file(tmp_path, rows), list[str]()
    batch = tmp_path / "batch.jsonl"
    path.rename(path := tmp_path / "chat.jsonl")
    others = [{"timestamp": 70 * i, "input_length": 90, "output_length": 1} for i in range(20)]
    trace_file(tmp_path, others).rename(batch)
    beside = [neighbours.parse(f"{batch}:priority=3")]
    with Scripted(llm_server(lambda n, seen: speak(seen))) as server:
        job = Job([Target("t", server.url)], [Load(speed=1.0)], path, unit="ms", beside=beside, alone_too=True)
        run(job, Options(tmp_path / "run", warmup=0), said.append, lambda text: None)
    cells = [records.read(p) for p in sorted((tmp_path / "run").glob("*.arrow"))]
    together, *alone = cells
    own = [together.among("request_class", name) for name in ("chat", "batch")]
    assert [int(of.sum()) for of in own] == [12, 7]  # 0.48 s of the trace; what comes later of the other is not sent
    assert np.diff(together["due_ns"][own[0]]).tolist() == [40_000_000] * 11
    assert np.diff(together["due_ns"][own[1]]).tolist() == [70_000_000] * 6
    assert set(together["priority"][own[1]]) == {3} and set(together["priority"][own[0]]) == {0}
    assert {cell.header["load"]["class_alone"]: cell.n for cell in alone} == {"chat": 12, "batch": 7}
    for cell in alone:
        of = together.among("request_class", cell.header["load"]["class_alone"])
        assert np.diff(cell["due_ns"]).tolist() == np.diff(together["due_ns"][of]).tolist()
    assert any("batch: 7 of 20 requests, its own times" in line for line in said)
    (noted,) = json.loads((tmp_path / "run" / "run.json").read_text())["trace"]["beside"]
    assert (noted["name"], noted["priority"], noted["bytes"]) == ("batch", 3, batch.stat().st_size)


# -- the engine's own cache -------------------------------------------------------------------------------------------


def mooncake_like(folder: Path, n: int = 150, block: int = 512) -> Path:
    """Rows as Mooncake has them: a few system prompts, conversations that grow, answers of any length."""
    random = np.random.Generator(np.random.PCG64(7))
    rows, grown, fresh = [], [[0, 1], [0, 2, 3], [4]], 100
    for i in range(n):
        base = grown[int(random.integers(len(grown)))]
        added = int(random.integers(1, 6))
        ids = [*base, *range(fresh, fresh + added)]
        fresh += added
        last = int(random.integers(1, block + 1))
        if last == block:
            grown.append(ids)
        elif added > 1 and random.random() < 0.6:
            grown.append(ids[:-1])
        length = block * (len(ids) - 1) + last
        rows.append({"timestamp": 3000 * (i // 10), "input_length": length, "output_length": 32, "hash_ids": ids})
    path = folder / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def engine(num_blocks: int) -> Target:
    """The bundled engine with an endless cache and a model that takes no time; a token is a byte."""
    launch = (*BUILT_IN["reference"], "--model", "sim:null", "--num-blocks", str(num_blocks), "--block-size", "16")
    return Target("engine", api="openai-completions", launch=launch)


def cached_and_bound(folder: Path, path: Path, num_blocks: int) -> tuple[Cell, float, float]:
    """The cell, its cached share of prompt tokens, and what the ids of the whole trace say an endless cache saves."""
    asked = Options(folder / "run", warmup=0, scale_lengths="1/32")
    run(Job([engine(num_blocks)], ONE_SLOT, path), asked, print, lambda text: None)
    cell = records.read(next((folder / "run").glob("*.arrow")))
    assert (cell["outcome"] == "ok").all()
    assert (cell["tokens_in"] == cell["planned_in"]).all()
    shared, total = prefixes.prefix_bound(trace.read(path).requests)
    return cell, cell["tokens_cached"].sum() / cell["tokens_in"].sum(), shared / total


def test_the_engines_cache_hits_what_the_ids_say_at_a_scaled_down_block_size(tmp_path: Path) -> None:
    path = mooncake_like(tmp_path)
    cell, measured, bound = cached_and_bound(tmp_path, path, 20_000)
    assert 0.2 < bound < 0.9
    # Sharing at 16 tokens a block is that at 512, but for the rounding of last blocks and each prompt's last token.
    assert measured == pytest.approx(bound, abs=0.01)
    # Request by request it is exact: whole blocks that an earlier prompt had, the prompt's last token excepted.
    seen: set[tuple[int, ...]] = set()
    rows = trace.read(path).requests
    for row, cached, tokens in zip(rows, cell["tokens_cached"].tolist(), cell["tokens_in"].tolist(), strict=True):
        full = tokens // 16
        hits = next((k for k in range(full, 0, -1) if row.hash_ids[:k] in seen), 0)
        assert cached == min(hits, (tokens - 1) // 16) * 16
        seen |= {row.hash_ids[:k] for k in range(1, full + 1)}


def test_a_replayed_excerpt_of_mooncake_has_the_hit_rate_of_its_ids(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "shared/traces/mooncake_conversation_first1000.jsonl"
    if not path.exists():
        pytest.skip("needs the excerpt of Mooncake's conversation trace")
    cell, measured, bound = cached_and_bound(tmp_path, path, 40_000)
    assert cell.n == 1000
    assert bound == pytest.approx(0.2155, abs=1e-4)
    assert measured == pytest.approx(bound, abs=0.001)


# -- token ids --------------------------------------------------------------------------------------------------------


def letters(folder: Path) -> Path:
    """A tokenizer.json of the 26 letters, whose ids the engine's own vocabulary has."""
    tokenizers = pytest.importorskip("tokenizers")
    path = folder / "tokenizer.json"
    vocabulary = {chr(i): i for i in range(97, 123)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a")).save(str(path))
    return path


def test_token_ids_are_exact_and_share_what_the_blocks_share(tmp_path: Path) -> None:
    rows = [
        {"input_length": 48, "output_length": 2, "hash_ids": [1, 2, 3]},
        {"input_length": 40, "output_length": 2, "hash_ids": [1, 2, 4]},
        {"input_length": 21, "output_length": 2},
    ]
    path = trace_file(tmp_path, rows, block_size=16)
    sent = replay(
        tmp_path, path, api="openai-completions", target={"tokenizer": str(letters(tmp_path))}, token_ids=True
    )
    a, b, c = (body["prompt"] for body in sent.bodies)
    assert [len(ids) for ids in (a, b, c)] == [48, 40, 21]
    assert a[:32] == b[:32]
    assert a[32:40] != b[32:40]
    assert {*a, *b, *c} <= set(range(97, 123))


def test_token_ids_of_a_recorded_conversation_have_its_lengths(tmp_path: Path) -> None:
    sent = replay(
        tmp_path, CUMULATIVE, api="openai-completions", target={"tokenizer": str(letters(tmp_path))},
        token_ids=True, history="recorded",
    )  # fmt: skip
    prompts = [body["prompt"] for body in sent.bodies]
    assert [len(ids) for ids in prompts] == [100, 190, 260]
    assert prompts[2][:190] == prompts[1]


@pytest.mark.parametrize(
    ("api", "tokenizer", "history", "said"),
    [
        ("openai-chat", True, "recorded", "--token-ids: target t speaks openai-chat, expected openai-completions"),
        ("openai-completions", False, "recorded", "which ids are words is not known of target t"),
        ("openai-completions", True, "live", r"trace.jsonl:3 is a later turn.*--history recorded"),
    ],
)
def test_token_ids_are_refused_where_they_cannot_be_right(
    tmp_path: Path, api: str, tokenizer: bool, history: str, said: str
) -> None:
    target = {"tokenizer": str(letters(tmp_path))} if tokenizer else {}
    with pytest.raises(BenchError, match=said):
        replay(tmp_path, CUMULATIVE, api=api, target=target, token_ids=True, history=history)


def test_a_speed_says_what_it_makes_of_the_traces_length(tmp_path: Path) -> None:
    path, said = (
        trace_file(tmp_path, [{"timestamp": i / 10, "input_length": 9, "output_length": 1} for i in range(5)]),
        [],
    )
    with Scripted(llm_server(lambda n, seen: speak(seen))) as server:
        job = Job([Target("t", server.url)], [Load(speed=2.0)], path)
        run(job, Options(tmp_path / "run", warmup=0), said.append, lambda text: None)
    assert "trace: its 0.4 s take 0.2 s at --speed 2" in said
