"""How many blocks the key/value cache gets."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.errors import CapacityError
from looped_spec.options import EngineOptions
from looped_spec.runtime.kv_cache import blocks_for, bytes_per_block

logger = logging.getLogger(__name__)

# The rest is for activations and for the logits of a round, which sampling copies several times.
_GPU_SHARE = 0.85
_RAM_SHARE = 0.25


@dataclass(frozen=True)
class CacheSize:
    """Blocks of the cache, their bytes over all planes, and the longest sequence that they
    serve."""

    num_blocks: int
    num_bytes: int
    max_model_len: int


def size_cache(
    options: EngineOptions,
    adapter: ModelAdapter,
    full_loops: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> CacheSize:
    """Decide how many blocks of `block_size` tokens to allocate: what all sequences at full length
    need, within the memory given.

    Raises:
        CapacityError: the memory does not hold one sequence of the length asked for.
    """
    memory = options.kv_cache_memory_bytes
    if memory is None:
        memory = _default_memory(device)
    size = _plan(options, adapter, full_loops, block_size, dtype, memory)
    limit = adapter.geometry.max_model_len
    if options.max_model_len is None and size.max_model_len < limit:
        logger.warning(
            "max_model_len is %d tokens, all that a cache of %d bytes holds; the model allows %d: "
            "raise kv_cache_memory_bytes for longer texts",
            size.max_model_len,
            memory,
            limit,
        )
    return size


def _plan(
    options: EngineOptions,
    adapter: ModelAdapter,
    full_loops: int,
    block_size: int,
    dtype: torch.dtype,
    memory_bytes: int,
) -> CacheSize:
    wanted = options.max_model_len or adapter.geometry.max_model_len
    block_bytes = bytes_per_block(adapter.kv_planes(full_loops), block_size, dtype)
    affordable = memory_bytes // block_bytes
    if affordable < blocks_for(wanted, block_size):
        fits = affordable * block_size
        if options.max_model_len is not None or fits < 2:
            raise CapacityError(
                f"the key/value cache has {memory_bytes} bytes, which hold {fits} tokens "
                f"({block_bytes // block_size} bytes each at {full_loops} loops); "
                f"max_model_len {wanted} needs {blocks_for(wanted, block_size) * block_bytes} bytes"
            )
        wanted = fits
    num_blocks = min(affordable, blocks_for(wanted, block_size) * options.max_num_seqs)
    return CacheSize(num_blocks, num_blocks * block_bytes, wanted)


def _default_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(min(memory, _container_limit()) * _RAM_SHARE)


def _container_limit() -> float:
    """Return the memory limit of the container in bytes (Linux cgroup v2), infinity without one."""
    try:
        return float(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # another system, or no limit, which is written "max"
        return math.inf
