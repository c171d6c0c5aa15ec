"""Gives memory that was freed back to the system, where libraries would keep it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from pathlib import Path

import torch


def return_freed_memory() -> bool:
    """Let the C library return what was freed, after large tensors came and went; tell whether it
    can (glibc).

    Each large block that is freed makes glibc take larger ones from its heap, where a small block
    behind them keeps them. MKL keeps the buffers of its largest products for good, some tens of
    MiB; it takes them anew where they are needed.
    """
    gc.collect()
    _free_mkl_buffers()
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # musl
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True


def _free_mkl_buffers() -> None:
    """Call MKL's own function for it, where PyTorch has MKL inside."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with contextlib.suppress(OSError, AttributeError):  # another system, another algebra library
        ctypes.CDLL(str(library)).mkl_serv_free_buffers()
