"""The attention kernels compile for GPUs, which takes none: the interpreter runs what a compiler refuses or spills.

In a process of its own, since Triton decides at import whether it compiles or interprets.
"""

import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.dense_kernels import needs_triton

pytestmark = [pytest.mark.engine, needs_triton]

COMPILE = """
import json
import torch
from kernels.attention_api import plan, tiles_for
from kernels.compile_check import compiled
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention

def attention(count, stored=torch.bfloat16, window=0, **options):
    qkv = torch.empty(count, 48, 128, dtype=torch.bfloat16, device="meta")
    work = plan([count], [8192], 4, window=window, tiles=tiles_for(qkv.dtype, 128, "cpu")).to("meta")
    pool, scales = pages(stored)
    tables, out = torch.empty(1, 512, dtype=torch.int32, device="meta"), qkv.new_empty(count, 32, 128)
    paged_attention(out, qkv[:, :32], pool[0], pool[1], tables, work, **options, **scales)

def write(stored):
    qkv, (pool, scales) = torch.empty(64, 48, 128, dtype=torch.bfloat16, device="meta"), pages(stored)
    slots = torch.empty(64, dtype=torch.int32, device="meta")
    kv_write(qkv[:, 32:40], qkv[:, 40:], pool[0], pool[1], slots, **scales)

def pages(stored):
    pool = torch.empty(2, 999, 8, 16, 128, dtype=stored, device="meta")
    scales = torch.empty(2, 999, 8, 16, device="meta")
    return pool, {} if stored == torch.bfloat16 else {"key_scales": scales[0], "value_scales": scales[1]}

runs = {
    "decode": lambda: attention(1),
    "prefill": lambda: attention(8192),
    "int8, window, cap": lambda: attention(1, torch.int8, 4096, soft_cap=30.0),
    "write": lambda: write(torch.bfloat16),
    "write fp8": lambda: write(torch.float8_e4m3fn),
}
print(json.dumps({name: [made[:4] for made in compiled(run, 90)] for name, run in runs.items()}))
"""


class Made(NamedTuple):
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Made]]:
    """What each call would launch on an H100 or H200."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: [Made(*kernel) for kernel in kernels] for name, kernels in json.loads(done.stdout).items()}


# What attention_api.TILES says of shared memory: keys and values two turns ahead, which a lookup of blocks in the same
# turn would halve.
CLAIMS = {
    "decode": (["_attend", "_merge"], 70),
    "prefill": (["_attend"], 128),
    "int8, window, cap": (["_attend", "_merge"], 39),
    "write": (["_write"], 1),
    "write fp8": (["_write"], 1),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_call_compiles_without_spills_into_the_memory_that_its_tile_claims(
    made: dict[str, list[Made]], name: str
) -> None:
    kernels, kib = CLAIMS[name]
    assert [k.kernel for k in made[name]] == kernels
    assert [k.spilled_bytes for k in made[name]] == [0] * len(kernels)
    shared = made[name][0].shared_bytes / 1024
    assert shared <= kib
    assert kib == 1 or shared > 0.95 * kib
