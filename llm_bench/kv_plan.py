"""The KV memory of a replica as a section of a plan: what a token, a sequence and a context take, and what fits."""

from llm_bench import capacity, kv_cache
from llm_bench.capacity_ask import Figure, Hardware, Section, Table, digits
from llm_bench.carried import Resident
from llm_bench.printable import counted

CONTEXTS = (1024, 4096, 16_384, 65_536, 131_072)  # of the table of what fits


def section(hw: Hardware, held: Resident | None, tokens: float | None) -> tuple[Section, float | None]:
    """What fits, and the sequences of the measured (or assumed) mix that do."""
    memory = hw.memory
    each = _token_bytes(hw)
    figures = [
        Figure("kv_bytes_per_token", "KV cache of one token", each, "bytes", hw.shape.text if hw.shape else "as given")
    ]
    figures.append(Figure("memory", "memory of a replica", memory.total, "bytes", hw.memory_text))
    figures.append(Figure("weights", "weights", memory.weights, "bytes", hw.weights_text))
    figures.append(
        Figure(
            "workspace",
            "workspace",
            memory.workspace,
            "bytes",
            f"{digits(memory.workspace / kv_cache.GIB / hw.accelerators)} GiB on each of {hw.accelerators}",
        )
    )
    how = f"memory x {memory.fraction:g} - weights - workspace"
    figures.append(Figure("for_cache", "left for the KV cache", max(memory.for_cache, 0.0), "bytes", how))
    notes = []
    if hw.copies != 1:
        notes.append(
            f"the cache lies {hw.copies:.3g} times on the {hw.accelerators} accelerators: tensor parallelism splits "
            + ("no latent" if hw.shape and not hw.shape.heads else "whole KV heads only")
        )
    if memory.for_cache <= 0:
        notes.append("the weights alone do not fit: nothing is left for a cache")
    sequences = None
    mean = _held_bytes(hw, held, tokens)
    if mean is not None:
        size, how, remarks = mean
        figures.append(Figure("sequence_bytes", "KV cache of a mean active sequence", size, "bytes", how))
        sequences = kv_cache.fits(memory, size)
        figures.append(Figure("sequences", "sequences that fit", sequences, "sequences", "left for the cache / that"))
        notes += remarks
        roof = _roof(hw, sequences, size)
        figures += [roof] if roof else []
    contexts = tuple(n for n in CONTEXTS if hw.context is None or n <= hw.context)
    rows = kv_cache.by_context(memory, lambda n: _bytes_of(hw, n), contexts)
    table = Table(
        ("context, tokens", "KV cache", "sequences that fit"), [(n, kv_cache.size(b), float(k)) for n, b, k in rows]
    )
    return Section("kv_memory", "KV memory of one replica", figures, [table] if rows else [], notes), sequences


def tokens(hw: Hardware) -> float:
    """That the cache holds, each of its own: 0 where the weights leave nothing."""
    return kv_cache.fits(hw.memory, _token_bytes(hw) * hw.copies)


def _token_bytes(hw: Hardware) -> float:
    if hw.shape is not None:
        return kv_cache.bytes_per_token(hw.shape, hw.kv_bytes)
    assert hw.held is not None
    return hw.held


def _bytes_of(hw: Hardware, tokens: float) -> float:
    """Of a sequence of so many tokens, on all accelerators of the replica, in whole blocks."""
    if hw.shape is not None:
        return kv_cache.sequence_bytes(hw.shape, tokens, hw.kv_bytes, hw.block_size) * hw.copies
    blocks = -(-tokens // hw.block_size)
    return _token_bytes(hw) * blocks * hw.block_size * hw.copies


def _held_bytes(hw: Hardware, held: Resident | None, tokens: float | None) -> tuple[float, str, list[str]] | None:
    """(bytes, how, remarks) of a mean active sequence."""
    if tokens is not None:
        return _bytes_of(hw, tokens), f"{counted(digits(tokens), 'token')}, assumed, in blocks of {hw.block_size}", []
    if held is None:
        return None
    slides = hw.shape is not None and any(layer.window is not None for layer in hw.shape.layers)
    shared = held.shared and not slides
    seconds = held.private if shared else held.seconds
    blocks = held.private_blocks if shared else held.blocks
    total = sum(s * _bytes_of(hw, b * hw.block_size) for b, s in enumerate(seconds.tolist()) if s)
    of = f"{counted(f'{blocks:.4g}', 'block')} of {counted(hw.block_size, 'token')}"
    how = (
        f"time-weighted mean of {counted(held.sequences, 'sequence')}, {of}, {held.begins}; the longest held "
        f"{held.most:,}"
    )
    remarks = [f"left out of what sequences held: {held.left_out}"] if held.left_out else []
    if shared:
        remarks.append(
            f"blocks taken from the server's cache are taken off ({counted(f'{held.blocks:.4g}', 'block')} with them); "
            "the shared blocks themselves, held once, are not counted"
        )
    elif held.shared:
        remarks.append("sliding layers: blocks shared with other sequences are not taken off")
    return total / float(seconds.sum()), how, remarks


def _roof(hw: Hardware, sequences: float, size: float) -> Figure | None:
    if hw.accelerator is None or not sequences:
        return None
    bandwidth = hw.accelerator.bandwidth * hw.accelerators
    roof = capacity.memory_roof(bandwidth, hw.memory.weights, sequences * size, sequences)
    how = f"each step reads weights and cache once at {digits(bandwidth / 1e9)} GB/s, with all that fit in the batch"
    return Figure("memory_roof", "most output tokens that memory bandwidth allows", roof, "tokens/s", how)
