"""LoRA adapters by name: which are loaded, who uses them, which folders may be read, and what an adapter's config says.

Endpoints and errors are vLLM's (docs/features/lora.md), files are PEFT's. No tensors here: those are `lora_weights`'.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from reference_engine.admission import Refused
from reference_engine.engine import Engine, out_of_memory
from reference_engine.families import WeightsError, read_json
from reference_engine.openai_api import LONGEST_NAME, ApiError, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_LOADED = 64
MOST_RANK = 4096
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Of PEFT's LoraConfig: what says nothing about the sum W + scale · B A, whatever its value.
INERT = frozenset(
    "auto_mapping base_model_name_or_path corda_config eva_config exclude_modules inference_mode loftq_config "
    "lora_dropout megatron_core peft_version qalora_group_size revision runtime_config target_modules".split()
)
# What changes it, with the values that do not. Any other key is refused unless its value is null, false or empty.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    # Other ways to begin (pissa, olora, loftq, corda, eva) change the base weights that the adapter is added to.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", None),
}


class Config(NamedTuple):
    rank: int
    scale: float  # of the product B A


def read_config(path: Path) -> Config:
    """Of an adapter_config.json, read strictly. Raises WeightsError."""
    said = read_json(path)
    for key, value in said.items():
        if key in NEUTRAL:
            if not any(type(value) is type(right) and value == right for right in NEUTRAL[key]):
                right = " or ".join(map(repr, NEUTRAL[key]))
                raise WeightsError(f"{path}: {key} is {shown(value)}; would be right: {right}")
        elif key not in (*INERT, "r", "lora_alpha", "use_rslora") and value not in (None, False, [], {}, ""):
            raise WeightsError(f"{path}: {key} is {shown(value)}, which this engine does not compute")
    if "peft_type" not in said:
        raise WeightsError(f"{path}: lacks peft_type; would be right: 'LORA'")
    rank, alpha, by_root = said.get("r"), said.get("lora_alpha"), said.get("use_rslora") or False
    if type(rank) is not int or not 0 < rank <= MOST_RANK:
        raise WeightsError(f"{path}: r is {shown(rank)}; would be right: 1 to {MOST_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise WeightsError(f"{path}: lora_alpha is {shown(alpha)}; would be right: a number")
    if type(by_root) is not bool:
        raise WeightsError(f"{path}: use_rslora is {shown(by_root)}; would be right: true or false")
    return Config(rank, alpha / (math.sqrt(rank) if by_root else rank))


def folder_of(root: str, path: str) -> Path:
    """The adapter's folder, below `root`. Raises ApiError: what a request says reaches the disk nowhere else.

    Refused by its text before anything is looked up: so it does not even show whether there is such a file. Links that
    lead out of `root` are refused as well.
    """
    wrong = ApiError(
        400, f"lora_path is {shown(path)}; would be right: an adapter's folder below --lora-dir", "lora_path"
    )
    if "\0" in path or ".." in Path(path).parts:
        raise wrong
    base = Path(root).absolute()
    folder = base / path  # an absolute path stays one
    if folder == base or not folder.is_relative_to(base):
        raise wrong
    try:
        real = base.resolve(strict=True)
        for place in (folder, folder / CONFIG, folder / WEIGHTS):
            if not place.resolve(strict=True).is_relative_to(real):
                raise wrong
    except (OSError, RuntimeError, ValueError) as error:  # not there, a loop of links, a name too long
        raise ApiError(400, f"lora_path {shown(path)} has no {CONFIG} and {WEIGHTS}", "lora_path") from error
    return folder


@runtime_checkable
class Adaptable(Protocol):
    """What a runner has beside, if it can compute adapters."""

    adapters: dict[int, Any]  # by number; a step looks up those that its sequences name

    def read_adapter(self, folder: Path, max_rank: int) -> tuple[Any, int]:
        """Its weights on the device and its rank; may run beside a step. Raises WeightsError."""
        ...


@dataclass(slots=True, eq=False)
class Loaded:
    name: str
    number: int  # never used again: what the prefix cache has of an adapter is found by no other
    path: str  # as the request had it
    rank: int
    users: int = 0  # requests that are being answered

    def salt(self, salt: bytes) -> bytes:
        """Sequences share KV blocks with those of the same adapter alone: 0xff begins no text in UTF-8."""
        return b"\xff%d\xff%b" % (self.number, salt)


class Adapters:
    """All methods are for the event loop's thread."""

    def __init__(self, engine: Engine, model: str, folder: str, max_rank: int) -> None:
        """`folder`: below which adapters lie; "": none may be loaded."""
        self.engine = engine
        self.model = model
        self.folder = folder
        self.max_rank = max_rank
        self.loaded: dict[str, Loaded] = {}
        self._loading: set[str] = set()
        self._numbers = itertools.count(1)

    async def load(self, body: Mapping[str, Any]) -> str:
        """What there is to say of it. Raises ApiError, Refused or EngineDownError."""
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        if not self.folder:
            raise ApiError(400, "this server loads no adapters; --lora-dir names the folder below which it does")
        if name == self.model or name in self.loaded or name in self._loading:
            raise ApiError(400, f"the model {shown(name)} is there already", "lora_name")
        if len(self.loaded) + len(self._loading) >= MOST_LOADED:
            raise ApiError(400, f"{MOST_LOADED} adapters are loaded; would be right: to unload one first")
        runner = self.engine.runner
        self.engine.check_alive()
        if not isinstance(runner, Adaptable):
            raise ApiError(400, f"the model {self.model!r} computes no adapters")
        self._loading.add(name)
        try:
            weights, rank = await asyncio.to_thread(self._read, runner, path)
        finally:
            self._loading.discard(name)
        adapter = Loaded(name, next(self._numbers), path, rank)
        runner.adapters[adapter.number] = weights
        self.loaded[name] = adapter
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: Mapping[str, Any]) -> str:
        """The same. 409 while requests use it: their answers would have to change in the middle."""
        name = _text(body, "lora_name")
        adapter = self.loaded.get(name)
        if adapter is None:
            raise ApiError(404, f"the adapter {shown(name)} is not loaded", "lora_name")
        if adapter.users:
            raise ApiError(409, f"the adapter {shown(name)} is used by {adapter.users} requests", "lora_name")
        self.engine.check_alive()
        del self.loaded[name]
        # Between two steps: the last that used it may be one whose end the step loop has not heard of yet.
        await self.engine.ask(lambda: self._drop(adapter.number))
        return f"Success: LoRA adapter '{name}' removed successfully."

    @contextmanager
    def used(self, name: object) -> Iterator[Loaded | None]:
        """The adapter that a request names as its model, kept until the request has ended; None if it names none."""
        adapter = self.loaded.get(name) if isinstance(name, str) else None
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1

    def _read(self, runner: Adaptable, path: str) -> tuple[Any, int]:
        """In a thread: it waits for a disk."""
        folder = folder_of(self.folder, path)
        try:
            return runner.read_adapter(folder, self.max_rank)
        except WeightsError as error:  # its text has whole paths of this machine
            raise ApiError(400, str(error).replace(str(folder), path), "lora_path") from error
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise Refused("oom", f"memory does not hold the adapter: {error}", 1) from error

    def _drop(self, number: int) -> None:
        runner = self.engine.runner
        if isinstance(runner, Adaptable):
            runner.adapters.pop(number, None)


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if type(value) is not str or not 0 < len(value) <= LONGEST_NAME or not value.isprintable():
        raise ApiError(
            400, f"{name} is {shown(value)}; would be right: a string of 1 to {LONGEST_NAME} printable characters", name
        )
    return value
