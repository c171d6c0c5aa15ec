"""The fused kernels compile for a GPU that is not here, in a process where Triton compiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from looped_spec.layers.fused import triton_kernels

capability, short = int(sys.argv[1]), sys.argv[2]
for kernel, constants in (
    (triton_kernels._rms_norm, dict(BLOCK=2048, ADDS=False)),
    (triton_kernels._rms_norm, dict(BLOCK=2048, ADDS=True)),
    (triton_kernels._silu_mul, dict(BLOCK=1024)),
    (triton_kernels._rotate, dict(HALF=64, BLOCK=64)),
    (triton_kernels._write_pages, dict(BLOCK=1024)),
):
    types = {"slots_ptr": "*i64", "eps": "fp32"}
    signature = {
        name: "constexpr" if name in constants
        else types.get(name, short if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", capability, 32),
    )
    assert "st.global" in compiled.asm["ptx"]
print("all compile")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(80, "*fp32"), (90, "*bf16")])
def test_every_kernel_compiles(capability: int, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(capability), dtype],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "all compile"
