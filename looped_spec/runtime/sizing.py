"""What an engine starts with: how many cache blocks fit, and which (K, d) to run when none was
asked for."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.control.plan import PLAIN, Candidate
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


def choose_candidate(options: EngineOptions, adapter: ModelAdapter, full_loops: int) -> Candidate:
    """Return the (K, d) of the options, completed by what the adapter suggests."""
    suggested = adapter.default_speculation
    if options.num_speculative_tokens is None:
        if full_loops < 2:
            return PLAIN
        if suggested is None:
            if adapter.speculation_note:
                logger.info("speculation is off by default: %s", adapter.speculation_note)
            return PLAIN
        return Candidate(suggested[0], min(suggested[1], full_loops - 1)).check(full_loops)
    draft_loops = options.draft_loops
    if draft_loops is None:
        draft_loops = min(suggested[1] if suggested else 1, max(full_loops - 1, 1))
    return Candidate(options.num_speculative_tokens, draft_loops).check(full_loops)


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
