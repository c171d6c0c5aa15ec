"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from looped_spec.runtime.freed_memory import return_freed_memory


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_blocks_that_lie_before_others_are_returned() -> None:
    size = 64 * 1024  # below what glibc maps apart: taken from its heap
    blocks = [torch.ones(size // 4) for _ in range(800)]
    last = torch.ones(16)  # keeps the heap from shrinking by itself
    full = resident()
    del blocks
    if not return_freed_memory():
        pytest.skip("the C library cannot return freed memory")
    assert resident() < full - 400 * size
    assert last.sum() == 16


def test_buffers_of_mkl_are_returned() -> None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        held = ctypes.CDLL(str(library)).mkl_serv_mem_stat
    except (OSError, AttributeError):
        pytest.skip("PyTorch has no MKL inside here")
    held.argtypes, held.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int64
    count = ctypes.c_int()
    product = torch.ones(300, 700) @ torch.ones(700, 900)
    if not held(ctypes.byref(count)):
        pytest.skip("this product needs no buffer here")
    return_freed_memory()
    assert held(ctypes.byref(count)) == 0
    assert torch.equal(torch.ones(300, 700) @ torch.ones(700, 900), product)
