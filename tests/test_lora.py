"""LoRA adapters: as if merged into the weights, each for its own rows; loaded, used and unloaded over HTTP."""

import asyncio
import copy
import json
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import PreTrainedModel

from reference_engine import lora, lora_weights, model
from reference_engine.__main__ import _reload, arguments, configured
from reference_engine.config import EngineConfig
from reference_engine.engine import Engine
from reference_engine.families import WeightsError
from reference_engine.faults import Fault
from reference_engine.lora import Loaded, folder_of, read_config
from reference_engine.openai_api import ApiError
from reference_engine.runner import ModelRunner
from reference_engine.scheduler import Scheduler
from reference_engine.sequence import SamplingParams, Sequence
from reference_engine.server import Server, listen
from reference_engine.tokenizer import ByteTokenizer
from reference_engine.weights import read, tiny
from tests.engine_models import drive, family, greedy, outputs, prompts, runner, save, sequence
from tests.stub_runner import PagedStub
from tests.test_engine_server import COMPLETIONS, call

RIGHT = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 6,
    "bias": "none",
    "target_modules": ["q_proj"],
    "base_model_name_or_path": "someone/else",
    "lora_dropout": 0.1,
    "use_dora": False,
    "rank_pattern": {},
    "modules_to_save": None,
}
ALL = lora.TARGETS
# Largest difference from merged weights in float64, of logits up to 38: seen 1.1e-4; transformers in float32: 1.5e-4.
MERGED = 2e-4


def tensors_of(shape: Any, rank: int = 4, targets: tuple[str, ...] = ALL, seed: int = 0, size: float = 0.15) -> Any:
    """PEFT's tensors of every layer."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(shape.layers):
        for parts in lora_weights.parts_of(shape).values():
            for part in parts:
                if part.name in targets:
                    where = "mlp" if part.name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                    key = f"base_model.model.model.layers.{layer}.{where}.{part.name}.lora_"
                    made[f"{key}A.weight"] = torch.randn(rank, part.inputs, generator=generator) * size
                    made[f"{key}B.weight"] = torch.randn(part.rows, rank, generator=generator) * size
    return made


def adapter(folder: Path, tensors: Any, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / lora.CONFIG).write_text(json.dumps(RIGHT | config))
    save_file(tensors, folder / lora.WEIGHTS)
    return folder


def merged(hf: PreTrainedModel, tensors: Any, scale: float) -> PreTrainedModel:
    """The same model with W + scale · B A."""
    made = copy.deepcopy(hf)
    weights = dict(made.named_parameters())
    with torch.no_grad():
        for key, b in tensors.items():
            if ".lora_B." in key:
                a = tensors[key.replace(".lora_B.", ".lora_A.")]
                name = key.removeprefix("base_model.model.").replace(".lora_B.weight", ".weight")
                weights[name].add_(scale * b @ a)
    return made


def logits_at(engine: ModelRunner, tokens: list[int], chunk: int, number: int) -> torch.Tensor:
    """[chunks, vocab] with adapter `number`."""
    rows = []
    for end in range(chunk, len(tokens) + 1, chunk):
        s = sequence(tokens[:end])
        s.adapter, s.computed, s.blocks = number, end - chunk, list(range(40, 0, -1))
        laid_out = model.lay_out(engine.model, [(s, chunk)])
        rows.append(model.forward(engine.model, laid_out, engine.adapters)[0])
    return torch.stack(rows)


# The mathematics


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("up_proj",), ("k_proj", "o_proj", "down_proj")])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_logits_are_those_of_merged_weights(tmp_path: Path, name: str, targets: tuple[str, ...]) -> None:
    """In float32, beside weights merged and computed in float64."""
    hf = family(name)
    weights = read(save(hf, tmp_path / "model"), torch.float32)
    tensors = tensors_of(weights.shape, targets=targets)
    folder = adapter(tmp_path / "adapter", tensors)
    tokens = prompts(1, seed=7)[0] + list(range(30))
    exact = hf.double()
    with torch.inference_mode():
        right = merged(exact, {key: t.double() for key, t in tensors.items()}, 6 / 4)(torch.tensor([tokens])).logits[0]
        plain = exact(torch.tensor([tokens])).logits[0]
    assert (right - plain).abs().max() > 1000 * MERGED, "the adapter changes nothing"
    for kernels in ("torch", "auto"):
        engine = runner(weights, cpu_kernels=kernels)
        engine.adapters[3], rank = engine.read_adapter(folder, 16)
        assert rank == 4
        for chunk in (1, 5, len(tokens)):
            difference = (logits_at(engine, tokens, chunk, 3) - right[chunk - 1 :: chunk]).abs().max().item()
            assert difference < MERGED, (kernels, chunk)
        assert (logits_at(engine, tokens, len(tokens), 0) - plain[-1]).abs().max() < MERGED


@pytest.mark.parametrize(("by_root", "scale"), [(False, 6 / 4), (True, 6 / math.sqrt(4))])
def test_the_scale_is_pefts(tmp_path: Path, by_root: bool, scale: float) -> None:
    folder = adapter(tmp_path / "a", {"x": torch.zeros(1)}, use_rslora=by_root)
    found = read_config(folder / lora.CONFIG)
    assert found.rank == 4
    assert found.scale == pytest.approx(scale)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_tokens_of_a_mixed_batch_are_those_of_each_model_alone(tmp_path: Path, kernels: str) -> None:
    """Three models in one batch, in chunks, preempted: each sequence's tokens are its own merged model's."""
    hf = family("llama")
    weights = read(save(hf, tmp_path / "model"), torch.float32)
    engine = runner(weights, cpu_kernels=kernels)
    models: dict[int, Any] = {0: hf}
    for number, seed in ((1, 1), (2, 2)):
        tensors = tensors_of(weights.shape, seed=seed)
        engine.adapters[number], _ = engine.read_adapter(adapter(tmp_path / str(number), tensors), 16)
        models[number] = merged(hf, tensors, 6 / 4)
    asked = prompts(9, seed=5)
    right = [greedy(models[i % 3], prompt, 12) for i, prompt in enumerate(asked)]
    for preempt_every in (0, 5):
        sequences = [sequence(prompt, i) for i, prompt in enumerate(asked)]
        for s in sequences:
            s.adapter = s.id % 3
        drive(engine, sequences, budget=23, preempt_every=preempt_every)
        assert outputs(sequences) == right


# Files


def refused(tmp_path: Path, tensors: Any, **config: Any) -> str:
    engine = runner(tiny(0))
    with pytest.raises(WeightsError) as caught:
        engine.read_adapter(adapter(tmp_path / "a", tensors, **config), 16)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": 0}, "r is 0; would be right: 1 to 4096"),
        ({"r": True}, "r is True"),
        ({"r": 17}, "r is 17; would be right: at most max_lora_rank, 16"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 1e300}, "has a value that is no finite number"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; would be right: 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        ({"bias": "all"}, "bias is 'all'; would be right: 'none'"),
        ({"use_dora": True}, "use_dora is True, which this engine does not compute"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"a_new_idea": 0.5}, "a_new_idea is 0.5"),
        ({"use_rslora": 1}, "use_rslora is 1"),
    ],
)
def test_what_would_change_the_sum_is_refused_by_name(tmp_path: Path, config: Any, said: str) -> None:
    assert said in refused(tmp_path, tensors_of(tiny(0).shape), **config)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 128)}, "lm_head.lora_A.weight has no place"),
        ({KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(128)}, "has no place"),
        ({KEY.replace("layers.0", "layers.4"): torch.zeros(4, 128)}, "layers 0 to 3"),
        ({KEY.replace("layers.0", "layers." + "9" * 400): torch.zeros(4, 128)}, "has no place"),
        ({KEY.replace("q_proj", "qkv_proj"): torch.zeros(4, 128)}, "has no place"),
        ({KEY: torch.zeros(8, 128)}, "is [8, 128]; would be right: [4, 128]"),
        ({KEY: torch.zeros(4, 128, dtype=torch.int32)}, "holds I32; would be right: F32, BF16, F16"),
        ({KEY: torch.full((4, 128), float("inf"))}, "no finite number"),
        ({KEY: None}, "layer 0 has lora_B of q_proj and no lora_A"),
        (dict.fromkeys(tensors_of(tiny(0).shape)) | {"metadata": None}, "holds no tensor"),
    ],
)
def test_every_tensor_has_its_place_and_size(tmp_path: Path, change: Any, said: str) -> None:
    tensors = tensors_of(tiny(0).shape) | change
    assert said in refused(tmp_path, {key: t for key, t in tensors.items() if t is not None})


def test_no_safetensors_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", tensors_of(tiny(0).shape))
    engine = runner(tiny(0))
    for content in (b"", b"\x80\x04pickle", b"\xff" * 64, (folder / lora.WEIGHTS).read_bytes()[:-8]):
        (folder / lora.WEIGHTS).write_bytes(content)
        with pytest.raises(WeightsError, match="no readable safetensors"):
            engine.read_adapter(folder, 16)


# Paths


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """root/good, root/deep/good, and outside/bad, to which links in root lead."""
    for folder in ("root/good", "root/deep/good", "outside/bad"):
        adapter(tmp_path / folder, {"x": torch.zeros(1)})
    (tmp_path / "root/link").symlink_to(tmp_path / "outside/bad")
    (tmp_path / "root/inner").symlink_to(tmp_path / "root/good")
    (tmp_path / "root/half").mkdir()
    (tmp_path / "root/half" / lora.CONFIG).symlink_to(tmp_path / "outside/bad" / lora.CONFIG)
    (tmp_path / "root/half" / lora.WEIGHTS).symlink_to(tmp_path / "outside/bad" / lora.WEIGHTS)
    (tmp_path / "root/loop").symlink_to(tmp_path / "root/loop")
    (tmp_path / "rootling").symlink_to(tmp_path / "outside")
    return tmp_path


def test_folders_below_the_root_are_found(place: Path) -> None:
    root = str(place / "root")
    for path in ("good", "deep/good", "./good", "inner", f"{root}/good"):
        assert (folder_of(root, path) / lora.CONFIG).is_file()


@pytest.mark.parametrize(
    "path",
    ["../outside/bad", "good/../../outside/bad", "/etc", "//etc", "link", "half", "loop", ".", "", "good\0", "nope",
     "good/adapter_config.json", "x" * 5000, "{outside}/bad", "{root}ling/bad", "{root}/../outside/bad", "~/x",
     "..", "deep", "\ud800"],
)  # fmt: skip
def test_no_path_of_a_request_leaves_the_root(place: Path, path: str) -> None:
    path = path.format(outside=place / "outside", root=place / "root")
    with pytest.raises(ApiError, match="lora_path"):
        folder_of(str(place / "root"), path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["..", ".", "/", "good", "outside", "bad", "link", "deep", "root", "", "~", "%2e%2e"])))
def test_no_path_of_any_pieces_does_either(place: Path, pieces: list[str]) -> None:
    root = place / "root"
    try:
        folder = folder_of(str(root), "/".join(pieces))
    except ApiError:
        return
    assert (folder / lora.CONFIG).resolve().is_relative_to(root)


# The scheduler


def test_a_step_has_no_more_adapters_than_it_may() -> None:
    config = EngineConfig(num_blocks=100, block_size=4, max_loras=2, max_num_batched_tokens=64)
    scheduler = Scheduler(config, frozenset())
    stub = PagedStub(4, scheduler.blocks)
    owners = [1, 0, 2, 1, 3, 0, 1, 4, 2]
    sequences = [Sequence(i, [1] * 5, 5, SamplingParams(4), i, adapter=a, salt=b"%d" % a) for i, a in enumerate(owners)]
    for s in sequences:
        scheduler.submit(s)
    most, now_ns = 0, 1
    while scheduler.busy:
        work = scheduler.step(config.max_num_batched_tokens, now_ns)
        most = max(most, len({s.adapter for s, _ in work} - {0}))
        scheduler.check()
        scheduler.commit(work, stub.execute(work), now_ns + 1)
        now_ns += 2
    assert most == 2
    assert all(s.finish_reason == "length" for s in sequences)
    firsts = [s.scheduled_ns for s in sequences]
    assert firsts == sorted(firsts)  # nobody overtook who waited for room


@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous"])
def test_every_sequence_ends_however_few_adapters_a_step_may_have(batching: str) -> None:
    config = EngineConfig(
        num_blocks=30, block_size=4, max_loras=1, max_num_batched_tokens=16, batching=batching, max_wait_ms=0
    )
    scheduler = Scheduler(config, frozenset())
    stub = PagedStub(4, scheduler.blocks)
    sequences = [Sequence(i, [1] * 9, 9, SamplingParams(9), i, adapter=i % 4, salt=b"%d" % (i % 4)) for i in range(20)]
    for s in sequences:
        scheduler.submit(s)
    now_ns = 1
    while scheduler.busy:
        work = scheduler.step(config.max_num_batched_tokens, now_ns)
        scheduler.check()
        scheduler.commit(work, stub.execute(work), now_ns + 1)
        now_ns += 2
    assert {s.finish_reason for s in sequences} == {"length"}


def test_salts_of_adapters_and_of_clients_never_meet() -> None:
    first, second = Loaded("a", 1, "a", 4), Loaded("b", 11, "b", 4)
    salts = [b"", b"1", "\xff1\xff".encode(), first.salt(b""), first.salt(b"1"), second.salt(b""), second.salt(b"1")]
    assert len(set(salts)) == len(salts)


# Over HTTP

PROMPT = {"prompt": "The same words, twice over: ", "max_tokens": 12, "temperature": 0}
CONFIG = EngineConfig(model="tiny", block_size=8, num_blocks=64, max_model_len=256, max_lora_rank=8, device="cpu")


@asynccontextmanager
async def serving(root: Path, **changes: Any) -> AsyncIterator[tuple[int, Server]]:
    config = replace(CONFIG, lora_dir=str(root), **changes)
    tokenizer = ByteTokenizer()
    made = ModelRunner("tiny", tiny(0), tokenizer.eos_ids, config)
    reload = partial(_reload, config, made.adapters)
    engine = Engine(config, made, made.eos_ids, "tiny", reload=reload, backoff_s=0.001)
    server = Server(engine, tokenizer, made.vocab_size, "tiny")
    app, port = await listen(server, "127.0.0.1", 0)
    engine.start()
    try:
        yield port, server
        assert not any(loaded.users for loaded in server.adapters.loaded.values())
        assert (await call(port, "/v1/engine")).json["check"] == "ok"
    finally:
        await engine.stop()
        await app.cleanup()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shape = tiny(0).shape
    for name, seed in (("one", 1), ("two", 2)):
        adapter(tmp_path / "root" / name, tensors_of(shape, seed=seed))
    adapter(tmp_path / "root" / "big", tensors_of(shape, rank=16), r=16)
    return tmp_path / "root"


async def load(port: int, name: str, path: str) -> Any:
    return await call(port, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})


async def text(port: int, name: str) -> str:
    reply = await call(port, COMPLETIONS, PROMPT | {"model": name})
    assert reply.status == 200, reply.body
    assert reply.json["model"] == name
    return str(reply.json["choices"][0]["text"])


def test_an_adapter_is_loaded_listed_used_and_unloaded(root: Path) -> None:
    async def main() -> None:
        async with serving(root) as (port, _):
            plain = await text(port, "tiny")
            assert (await call(port, COMPLETIONS, PROMPT | {"model": "a"})).status == 404
            assert (await load(port, "a", "one")).body == b"Success: LoRA adapter 'a' added successfully."
            assert (await load(port, "b", str(root / "two"))).status == 200
            rows = (await call(port, "/v1/models")).json["data"]
            assert [(r["id"], r.get("parent"), r.get("root")) for r in rows] == [
                ("tiny", None, None), ("a", "tiny", "one"), ("b", "tiny", str(root / "two"))
            ]  # fmt: skip
            alone = [await text(port, name) for name in ("tiny", "a", "b")]
            assert alone[0] == plain
            assert len(set(alone)) == 3
            mixed = await asyncio.gather(*(text(port, name) for name in ("b", "tiny", "a", "a", "tiny", "b") * 2))
            assert mixed == [alone[i] for i in (2, 0, 1, 1, 0, 2)] * 2
            gone = await call(port, "/v1/unload_lora_adapter", {"lora_name": "a"})
            assert gone.body == b"Success: LoRA adapter 'a' removed successfully."
            assert (await call(port, COMPLETIONS, PROMPT | {"model": "a"})).status == 404
            assert (await load(port, "a", "two")).status == 200  # the name again, with other weights
            assert await text(port, "a") == alone[2]

    asyncio.run(main())


def test_the_prefix_cache_tells_adapters_apart(root: Path) -> None:
    async def main() -> None:
        async with serving(root) as (port, _):
            await load(port, "a", "one")

            async def cached(name: str) -> int:
                usage = (await call(port, COMPLETIONS, PROMPT | {"model": name})).json["usage"]
                return int(usage["prompt_tokens_details"]["cached_tokens"])

            assert [await cached(name) for name in ("tiny", "a", "tiny", "a")] == [0, 0, 24, 24]
            await call(port, "/v1/unload_lora_adapter", {"lora_name": "a"})
            await load(port, "a", "one")
            assert await cached("a") == 0  # another adapter now, whatever its name

    asyncio.run(main())


def test_an_adapter_in_use_is_not_unloaded(root: Path) -> None:
    async def main() -> None:
        async with serving(root) as (port, server):
            await load(port, "a", "one")
            body = PROMPT | {"model": "a", "max_tokens": 200, "ignore_eos": True}
            long = asyncio.create_task(call(port, COMPLETIONS, body))
            while not server.adapters.loaded["a"].users:
                await asyncio.sleep(0.001)
            reply = await call(port, "/v1/unload_lora_adapter", {"lora_name": "a"})
            assert (reply.status, reply.json["error"]["type"]) == (409, "ConflictError")
            assert (await long).json["usage"]["completion_tokens"] == 200
            assert (await call(port, "/v1/unload_lora_adapter", {"lora_name": "a"})).status == 200

    asyncio.run(main())


def test_who_leaves_gives_its_adapter_up_before_it_is_unloaded(root: Path) -> None:
    async def main() -> None:
        async with serving(root) as (port, server):
            await load(port, "a", "one")
            for _ in range(5):
                body = PROMPT | {"model": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
                data = json.dumps(body).encode()
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(
                    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
                )
                await reader.readuntil(b"data: ")
                writer.close()
                while (await call(port, "/v1/unload_lora_adapter", {"lora_name": "a"})).status == 409:
                    await asyncio.sleep(0)
                assert not server.engine.down
                await load(port, "a", "one")

    asyncio.run(main())


def test_what_cannot_be_loaded_is_said(root: Path) -> None:
    async def main() -> None:
        async with serving(root) as (port, _):
            big = await load(port, "big", "big")
            assert (
                big.status,
                "r is 16; would be right: at most max_lora_rank, 8" in big.json["error"]["message"],
            ) == (
                400,
                True,
            )
            assert str(root) not in big.json["error"]["message"]
            assert (await load(port, "tiny", "one")).json["error"]["param"] == "lora_name"
            assert (await load(port, "a", "one")).status == 200
            assert (await load(port, "a", "one")).status == 400
            assert (await load(port, "c", "../root/one")).json["error"]["param"] == "lora_path"
            assert (await call(port, "/v1/unload_lora_adapter", {"lora_name": "c"})).status == 404
            assert (await call(port, "/v1/embeddings", {"input": "a", "model": "a"})).status == 404
            for body in ({}, {"lora_name": 5}, {"lora_name": "x\n"}, {"lora_name": ""}, {"lora_name": "x" * 257}):
                assert (await call(port, "/v1/load_lora_adapter", {"lora_path": "one"} | body)).status == 400
            both = await asyncio.gather(load(port, "d", "one"), load(port, "d", "two"))
            assert sorted(reply.status for reply in both) == [200, 400]
        async with serving(Path()) as (port, server):
            server.adapters.folder = ""
            assert "--lora-dir" in (await load(port, "a", "one")).json["error"]["message"]

    asyncio.run(main())


def test_adapters_outlive_a_runner(root: Path) -> None:
    """From the second crash within a minute on the model is loaded anew."""

    async def main() -> None:
        async with serving(root) as (port, server):
            await load(port, "a", "one")
            before, first = await text(port, "a"), server.engine.runner
            embedding = (await call(port, "/v1/embeddings", {"input": "abc"})).json["data"]
            for _ in range(2):
                server.engine.plant(Fault("crash", {"steps": 1, "at_step": 0}))
                assert (await call(port, COMPLETIONS, PROMPT)).status == 503
                assert not any(instance._made for instance in server.passes.idle), "an old model is kept in memory"
                while server.engine.down:
                    await asyncio.sleep(0.001)
            assert server.engine.runner is not first
            assert await text(port, "a") == before
            assert (await call(port, "/v1/embeddings", {"input": "abc"})).json["data"] == embedding

    asyncio.run(main())


def test_a_simulated_model_computes_no_adapters(root: Path) -> None:
    for flags, said in ((["--model", "sim:fast", "--lora-dir", str(root)], "computes no adapters"),
                        (["--lora-dir", os.devnull], "would be right: a folder")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            configured(arguments().parse_args(flags))
