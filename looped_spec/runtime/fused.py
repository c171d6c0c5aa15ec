"""Whether fused kernels serve a run on a CUDA device."""

from __future__ import annotations

import importlib.util
import logging

import torch

from looped_spec.errors import UnsupportedError
from looped_spec.layers.fused import FusedKernels
from looped_spec.options import EngineOptions

logger = logging.getLogger(__name__)


def choose_fused(options: EngineOptions, device: torch.device) -> FusedKernels | None:
    """Return the fused kernels that `fused` asks for, None for PyTorch's own operations.

    "auto" does not take them, as nobody has measured yet where they pay.

    Raises:
        UnsupportedError: "on" was asked for where they cannot serve.
    """
    if options.fused != "on":
        return None
    reason = _obstacle(device)
    if reason is not None:
        raise UnsupportedError(f"fused='on' cannot be used here: {reason}")
    from looped_spec.layers.fused.triton_kernels import TritonKernels

    logger.info("fused kernels: Triton")
    return TritonKernels()


def _obstacle(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from looped_spec.layers.fused.triton_kernels import INTERPRETED
    except Exception as error:  # a Triton of another time fails in its own ways
        return f"Triton does not import: {type(error).__name__}: {error}"
    if INTERPRETED:
        return None if device.type == "cpu" else "TRITON_INTERPRET is set, which is for the CPU"
    if device.type != "cuda":
        return f"they are for CUDA devices, not for '{device}'"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "they need compute capability 8.0 or higher"
    return None
