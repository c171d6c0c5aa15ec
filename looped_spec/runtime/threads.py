"""How many CPU threads PyTorch runs with."""

from __future__ import annotations

import logging

import torch

from looped_spec.adapter import ModelAdapter
from looped_spec.loading import LoadedModel

logger = logging.getLogger(__name__)

# Threads that wait for each other after every small product cost more than they bring, and on a
# busy machine many times more. A model of this many parameters is read from the cache of one core.
_ONE_THREAD_PARAMETERS = 10_000_000


def set_threads(num_threads: int | None, loaded: LoadedModel) -> None:
    """Set PyTorch's number of CPU threads, which is one for the process, as the options say."""
    num_threads = planned_threads(num_threads, loaded.adapter, loaded.device)
    if num_threads is not None and num_threads != torch.get_num_threads():
        logger.info("PyTorch runs with %d CPU threads (num_threads)", num_threads)
        torch.set_num_threads(num_threads)


def planned_threads(
    num_threads: int | None, adapter: ModelAdapter, device: torch.device
) -> int | None:
    """Return the CPU threads that a run has: as the options say, 1 for a tiny model, else as
    PyTorch is set; None on a GPU."""
    if device.type != "cpu":
        return None
    if num_threads is not None:
        return num_threads
    parameters = sum(p.numel() for p in adapter.module.parameters())
    return torch.get_num_threads() if parameters > _ONE_THREAD_PARAMETERS else 1
