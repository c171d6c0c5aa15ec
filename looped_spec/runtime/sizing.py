"""How many blocks the key/value cache gets."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.errors import CapacityError, ConfigError
from looped_spec.options import EngineOptions
from looped_spec.runtime.kv_cache import blocks_for, bytes_per_block

logger = logging.getLogger(__name__)

_GPU_SHARE = 0.9
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
    dtype: torch.dtype,
    device: torch.device,
) -> CacheSize:
    """Decide how many blocks to allocate: what all sequences at full length need, within the memory
    given.

    Raises:
        ConfigError: max_model_len is longer than the model allows.
        CapacityError: the memory does not hold one sequence of the length asked for.
    """
    limit = adapter.geometry.max_model_len
    wanted = options.max_model_len if options.max_model_len is not None else limit
    if wanted > limit:
        raise ConfigError(f"max_model_len must be at most {limit} for this model, got {wanted}")
    planes = adapter.kv_planes(full_loops)
    block_bytes = bytes_per_block(planes, options.block_size, dtype)
    memory = options.kv_cache_memory_bytes
    if memory is None:
        memory = _default_memory(device)
    affordable = memory // block_bytes
    per_sequence = blocks_for(wanted, options.block_size)
    if affordable < per_sequence:
        fits = affordable * options.block_size
        if options.max_model_len is not None or fits < 2:
            raise CapacityError(
                f"the key/value cache has {memory} bytes, which hold {fits} tokens "
                f"({block_bytes // options.block_size} bytes each at {full_loops} loops); "
                f"max_model_len {wanted} needs {per_sequence * block_bytes} bytes"
            )
        logger.info(
            "max_model_len is %d tokens, all that the cache memory holds (not %d)", fits, wanted
        )
        wanted = fits
    num_blocks = min(affordable, blocks_for(wanted, options.block_size) * options.max_num_seqs)
    return CacheSize(num_blocks, num_blocks * block_bytes, wanted)


def _default_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * _RAM_SHARE)
