"""Whether the compiled kernels serve a run."""

from __future__ import annotations

import logging

import torch

from looped_spec.errors import UnsupportedError
from looped_spec.layers.native import BuildError, Kernels
from looped_spec.options import EngineOptions
from looped_spec.runtime.graphs import graph_mode

logger = logging.getLogger(__name__)


def choose_kernels(
    options: EngineOptions, device: torch.device, dtype: torch.dtype
) -> Kernels | None:
    """Return the kernels that `cpu_kernels` asks for, None for PyTorch's own operations.

    "auto" takes them where they can serve and says so once.

    Raises:
        UnsupportedError: "native" was asked for where they cannot serve.
    """
    if options.cpu_kernels == "torch":
        return None
    reason = _obstacle(options, device, dtype)
    if reason is None:
        try:
            kernels = Kernels()
        except BuildError as error:
            reason = str(error)
        else:
            logger.info("cpu_kernels: native")
            return kernels
    if options.cpu_kernels == "native":
        raise UnsupportedError(f"cpu_kernels='native' cannot be used here: {reason}")
    logger.info("cpu_kernels auto: torch (not native: %s)", reason)
    return None


def _obstacle(options: EngineOptions, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"they are for device cpu, not for '{device}'"
    if dtype is not torch.float32:
        return f"they compute in float32, not in {str(dtype).removeprefix('torch.')}"
    if graph_mode(options, device) == "traced":
        return "graph_backend 'traced' records operations of PyTorch alone"
    return None
