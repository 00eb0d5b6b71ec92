"""The runner that computes, sole owner of a device. `load` turns a configuration into a runner and its tokenizer."""

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from reference_engine.config import EngineConfig
from reference_engine.runner_api import Pass, Runner
from reference_engine.sequence import SamplingParams, Sequence
from reference_engine.tokenizer import ByteTokenizer, HFTokenizer, TextTokenizer, Tokenizer

if TYPE_CHECKING:  # torch takes seconds to import; a simulated model starts without it, so its users import it late
    import torch

    from reference_engine.ahead import Stepper
    from reference_engine.families import Shape
    from reference_engine.model import Adapter
    from reference_engine.weights import Weights


def load(config: EngineConfig) -> tuple[Runner, Tokenizer]:
    """The model that config.model names: `tiny`, `sim:NAME`, `smollm2`, a GGUF file, or a Hugging Face directory.

    Raises WeightsError, TokenizerError or ValueError for what cannot be loaded.
    """
    if config.model.startswith("sim:"):
        from reference_engine import cost_model

        return cost_model.load(config)
    from reference_engine import weights

    if config.dtype not in weights.DTYPES:
        raise ValueError(f"dtype {config.dtype!r}: would be right: {' or '.join(weights.DTYPES)}")
    dtype = weights.DTYPES[config.dtype]
    if config.model == "tiny":
        tokenizer = ByteTokenizer()
        return ModelRunner("tiny", weights.tiny(config.seed, dtype), tokenizer.eos_ids, config), tokenizer
    name, read, text = _read(config.model, dtype)
    if text.vocab_size > read.shape.vocab_size:
        raise weights.WeightsError(
            f"{config.model}: the tokenizer has {text.vocab_size:,} tokens; would be right: at most the model's "
            f"vocab_size, {read.shape.vocab_size:,}"
        )
    return ModelRunner(name, read, text.eos_ids, config), text


def _read(model: str, dtype: "torch.dtype") -> tuple[str, "Weights", TextTokenizer]:
    """Name, weights and tokenizer. Raises WeightsError or TokenizerError."""
    from reference_engine import gguf, weights

    path = gguf.packaged(model) if model in gguf.PACKAGED else Path(model)
    if path.is_file():
        return model if model in gguf.PACKAGED else path.stem, *gguf.load(path, dtype)
    if not path.is_dir():
        known = ", ".join(["tiny", *gguf.PACKAGED])
        raise weights.WeightsError(
            f"{path}: no such directory or file; would be right: {known}, sim:NAME, a model's directory or a GGUF file"
        )
    text = HFTokenizer(path)
    return path.resolve().name, weights.read(path, dtype), text


class ModelRunner:
    """Runs a model on one device. The KV pool is allocated here, once; whose a block is, the scheduler decides."""

    def __init__(self, name: str, weights: "Weights", eos_ids: frozenset[int], config: EngineConfig) -> None:
        """Raises ValueError for what cannot be had here, WeightsError if sequences outgrow the model's positions."""
        import torch

        from reference_engine import attention, linear, model
        from reference_engine.weights import WeightsError

        shape = weights.shape
        if config.max_model_len > shape.max_positions:
            raise WeightsError(
                f"{name}: max_position_embeddings is {shape.max_positions}, max_model_len is "
                f"{config.max_model_len}; would be right: max_model_len {shape.max_positions} or less"
            )
        positions = min(config.max_model_len or shape.max_positions, config.pool_tokens)
        _known("quantization", config.quantization, {form for form, _ in linear.FORMS})
        self.device = torch.device(_device(config.device))
        torch.set_num_threads(config.compute_threads)
        self.kernels = _kernels(config, shape, self.device, weights.embedding.dtype)
        self.graphs = _graphs(config, self.kernels, self.device)
        stored = attention.STORED if self.kernels == "triton" else attention.KV_DTYPES
        _known("kv_cache_dtype", config.kv_cache_dtype, stored)
        self.name = name
        self.vocab_size = shape.vocab_size
        self.eos_ids = eos_ids
        self.max_positions = shape.max_positions
        self.embedding_size = shape.hidden_size
        self.seed = config.seed
        self.parameters = sum(t.numel() for t in weights.tensors())
        self.quantization, self.kv_cache_dtype = config.quantization, config.kv_cache_dtype
        self.model = model.make(
            weights.to(self.device), config.num_blocks, config.block_size, positions, self.kernels,
            config.quantization, config.kv_cache_dtype,
        )  # fmt: skip
        self.adapters: dict[int, model.Adapter] = {}  # by number
        self._most_rows, self._ahead = config.max_num_seqs, config.ahead
        self.graphs_bytes = 0
        self._stepper: Stepper | None = None  # of the model's pool; None until there is something captured
        self.weights_bytes = self.model.bytes()
        self.kv_bytes = self.model.cache.bytes()

    def execute(self, work: list[tuple[Sequence, int]]) -> list[int | None]:
        """One forward pass over all the work, then one token for each sequence whose end it reached."""
        if self._stepper and self._stepper.graphs.model is self.model:
            return self._stepper.execute(work)
        import torch

        from reference_engine import model, sampler

        laid_out = model.lay_out(self.model, work)
        sequences = [work[i][0] for i in laid_out.sampled]
        with torch.inference_mode():  # the sampler writes into the logits, which only this mode may do
            logits = model.forward(self.model, laid_out, self.adapters)
            sampled = sampler.sample(logits, sequences, self.eos_ids, self.seed)
        tokens: list[int | None] = [None] * len(work)
        for i, token in zip(laid_out.sampled, sampled, strict=True):
            tokens[i] = token
        return tokens

    def read_adapter(self, folder: Path, max_rank: int) -> "tuple[Adapter, int]":
        """A LoRA adapter's weights on the device, and its rank; may run beside a step. Raises WeightsError."""
        from reference_engine import lora_weights

        return lora_weights.read(folder, self.model, max_rank)

    def single_pass(self, pooling: str) -> Pass:
        """For one thread, which may run beside the one that executes."""
        from reference_engine import pooling as pools

        return pools.make(self, pooling)

    def warmup(self) -> None:
        """A forward pass over a chunk and over a decode, so that the first request does not pay for first uses.

        Writes to block 0, hence before the scheduler hands out blocks.
        """
        n = self.model.cache.pages.block_size
        sequence = Sequence(-1, [0] * n, n, SamplingParams(max_tokens=1), 0, blocks=[0])
        self.execute([(sequence, n)])
        sequence.computed = n - 1
        self.execute([(sequence, 1)])

    def capture(self) -> None:
        """Where decodes go by graphs: make them for the pool as it is now, which nobody must be using yet."""
        if not self.graphs or (self._stepper and self._stepper.graphs.model is self.model):
            return
        from reference_engine import ahead

        self._stepper = None  # what the old ones hold of memory goes first
        before = self._free()
        self._stepper = ahead.make(self, self._most_rows, self._ahead)
        self.graphs_bytes = before - self._free()

    def _free(self) -> int:
        """Bytes of a GPU that nobody holds; of a CPU, where graphs hold nothing, 0."""
        import torch

        if self.device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def facts(self) -> dict[str, str | int]:
        """What was effectively chosen, for the server's start-up line."""
        import torch

        from reference_engine import native

        return {
            "device": str(self.device) if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            "dtype": str(self.model.embedding.dtype).removeprefix("torch."),
            "quantization": self.quantization,
            "kv_cache_dtype": str(self.model.cache.pool.dtype).removeprefix("torch."),
            "cpu_kernels": self.kernels,
            "cpu_kernels_flags": shlex.join(native.extra_flags()) if self.kernels == "native" else "",
            "graphs": len(self._stepper.graphs.sizes) if self._stepper else 0,
            "graphs_bytes": self.graphs_bytes,
            "threads": torch.get_num_threads(),
            "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
            "parameters": self.parameters,
            "weights_bytes": self.weights_bytes,
            "kv_bytes": self.kv_bytes,
        }


def _device(wanted: str) -> str:
    import torch

    if wanted not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {wanted!r}: would be right: auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda': torch finds no GPU; would be right: cpu")
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def _known(name: str, found: str, known: Iterable[str]) -> None:
    if found not in known:
        raise ValueError(f"{name} {found!r}: would be right: {' or '.join(sorted(known))}")


def _kernels(config: EngineConfig, shape: "Shape", device: "torch.device", dtype: "torch.dtype") -> str:
    """Which row of model.KERNELS computes: the one place that chooses. Raises ValueError for what cannot be had."""
    from reference_engine import gpu

    wanted = config.cpu_kernels
    _known("cpu_kernels", wanted, ("auto", "torch", "native", "triton"))
    if wanted == "torch":
        return wanted
    if wanted == "native" or (wanted == "auto" and device.type == "cpu"):
        return _native(config, device, dtype)
    problem = gpu.problem(shape, dtype, device)
    if problem and wanted == "triton":
        raise ValueError(f"cpu_kernels 'triton': {problem}")
    if problem:
        print(f"reference_engine: {problem}; torch computes instead", file=sys.stderr, flush=True)
    return "torch" if problem else "triton"


def _graphs(config: EngineConfig, kernels: str, device: "torch.device") -> bool:
    """Whether decodes go by graphs. Raises ValueError where they were asked for and cannot be had."""
    _known("graphs", config.graphs, ("auto", "on", "off"))
    if config.graphs == "on" and kernels != "triton":
        raise ValueError(f"graphs 'on' with kernels {kernels!r}: would be right: triton")
    return config.graphs == "on" or (config.graphs == "auto" and kernels == "triton" and device.type == "cuda")


def _native(config: EngineConfig, device: "torch.device", dtype: "torch.dtype") -> str:
    """`native`, or `torch` where only the best was asked for. Raises ValueError where native ones were."""
    import torch

    from reference_engine import native

    wanted = config.cpu_kernels
    if (device.type, dtype) != ("cpu", torch.float32):
        if wanted == "native":
            raise ValueError(f"cpu_kernels 'native' with {dtype} on {device.type}: would be right: float32 on the cpu")
        return "torch"
    try:
        native.set_threads(config.compute_threads)
    except native.NativeError as error:
        if wanted == "native":
            raise
        print(f"reference_engine: {error}; torch computes instead", file=sys.stderr, flush=True)
        return "torch"
    return "native"
