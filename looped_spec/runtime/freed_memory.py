"""Gives memory that was freed back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import gc
import sys


def return_freed_memory() -> bool:
    """Let the C library return what was freed, after large tensors came and went; tell whether it
    can (glibc).

    Each large block that is freed makes glibc take larger ones from its heap, where a small block
    behind them keeps them.
    """
    gc.collect()
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:  # musl
        return False
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    trim(0)
    return True
