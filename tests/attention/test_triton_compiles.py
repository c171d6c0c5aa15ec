"""The kernel compiles for a GPU that is not here, and keeps its numbers in registers.

Triton interprets in this process where there is no CUDA device, so it compiles in another.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from processes import PATIENCE_SECONDS

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = """
import json, sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from looped_spec.runtime.attention import triton_kernel
from looped_spec.runtime.attention.tiles import Tiles

capability, name, num_rows, group, head_dim, block_size, splits = json.loads(sys.argv[1])
dtype, short = {"float32": (torch.float32, "*fp32"), "bfloat16": (torch.bfloat16, "*bf16")}[name]
tiles = Tiles.of(num_rows * group, head_dim, dtype)
kernel = triton_kernel._attend
constants = dict(
    GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, SPLITS=splits, TILE_PAIRS=tiles.pairs,
    TILE_KEYS=tiles.keys, TILE_DIM=tiles.dim, INTERPRETED=False,
)
partial = "*fp32" if splits > 1 else short
types = dict(
    q_ptr=short, k_ptr=short, v_ptr=short, tables_ptr="*i64", positions_ptr="*i64",
    out_ptr=partial, sums_ptr=partial, scale="fp32",
)
signature, aligned = {}, {}
for number, argument in enumerate(kernel.arg_names):
    signature[argument] = "constexpr" if argument in constants else types.get(argument, "i32")
    if argument.endswith("_ptr") or argument.startswith(("q_stride", "page_stride")):
        aligned[(number,)] = [["tt.divisibility", 16]]
compiled = triton.compile(
    ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
    target=GPUTarget("cuda", capability, 32),
    options=dict(num_warps=triton_kernel.NUM_WARPS, num_stages=triton_kernel.NUM_STAGES),
)
ptx = compiled.asm["ptx"]
print(json.dumps({
    "shared": compiled.metadata.shared,
    "tensor cores": "mma" in ptx,
    "loads of 16 bytes": ptx.count("cp.async.cg.shared.global"),
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "num_rows", "group", "head_dim", "block_size", "splits"),
    [
        (90, "bfloat16", 1, 1, 128, 16, 8),
        (90, "bfloat16", 5, 4, 96, 256, 1),
        (90, "bfloat16", 200, 1, 256, 16, 1),
        (90, "float32", 3, 1, 128, 16, 4),
        (80, "bfloat16", 1, 4, 64, 7, 2),
    ],
)
def test_the_kernel_compiles_for_a_gpu(
    capability: int,
    dtype: str,
    num_rows: int,
    group: int,
    head_dim: int,
    block_size: int,
    splits: int,
) -> None:
    numbers = [capability, dtype, num_rows, group, head_dim, block_size, splits]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(numbers)],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["shared"] <= 99 * 1024, "the shared memory of a small device"
    assert found["tensor cores"] == (dtype == "bfloat16"), "fp32 must not be rounded to tf32"
    assert found["loads of 16 bytes"] > 0, "pages are read in wide loads"
