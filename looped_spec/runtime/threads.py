"""How many CPU threads PyTorch runs with."""

from __future__ import annotations

import logging

import torch

from looped_spec.loading import LoadedModel

logger = logging.getLogger(__name__)

# Threads that wait for each other after every small product cost more than they bring, and on a
# busy machine many times more. A model of this many parameters is read from the cache of one core.
_ONE_THREAD_PARAMETERS = 10_000_000


def set_threads(num_threads: int | None, loaded: LoadedModel) -> None:
    """Set PyTorch's number of CPU threads, which is one for the process, as the options say."""
    if loaded.device.type != "cpu":
        return
    if num_threads is None:
        parameters = sum(p.numel() for p in loaded.adapter.module.parameters())
        if parameters > _ONE_THREAD_PARAMETERS:
            return
        num_threads = 1
    if num_threads != torch.get_num_threads():
        logger.info("PyTorch runs with %d CPU threads (num_threads)", num_threads)
        torch.set_num_threads(num_threads)
