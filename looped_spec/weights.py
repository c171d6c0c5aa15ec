"""Filling an adapter that was built on the meta device: from a checkpoint, or with random weights.

Nothing is allocated before every name, shape and dtype of the checkpoint was found to fit; then one
parameter at a time is allocated and filled straight from the mapped file.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from looped_spec.adapter import ModelAdapter
from looped_spec.checkpoint import open_safetensors, scan_checkpoint
from looped_spec.errors import ModelLoadError
from looped_spec.weight_plan import Part, plan_weights, refuse_buffers, tied_names

DUMMY_STD = 0.02


def load_weights(
    adapter: ModelAdapter, folder: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Fill `adapter.module` from the safetensors checkpoint in `folder`, and set it to inference.

    All parameters of the module are replaced by new ones on `device` in `dtype`, without gradients;
    those that were tied stay tied. Raises `ModelLoadError` before anything is allocated if the
    checkpoint does not fit `adapter.checkpoint_layout()`, and while filling if a value is not
    finite in `dtype`.
    """
    stored = scan_checkpoint(folder)
    parts = plan_weights(adapter, stored, folder)
    with ExitStack() as stack:
        files = {tensor.file for name, tensor in stored.items()}
        handles = {file: stack.enter_context(open_safetensors(file)) for file in sorted(files)}
        for names in tied_names(adapter.module):
            meta = adapter.module.get_parameter(names[0])
            filled = torch.empty(meta.shape, dtype=dtype, device=device)
            sources = [name for name in names if parts[name]]
            for part in parts[sources[0]]:
                _fill(filled, part, handles[stored[part.tensor].file])
            for name in sources[1:]:
                for part in parts[name]:
                    _check_tied(filled, part, handles[stored[part.tensor].file], sources[0])
            _assign(adapter.module, names, filled)
    adapter.module.eval()


def init_dummy_weights(
    adapter: ModelAdapter, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> None:
    """Fill `adapter.module` with random weights, the same for the same seed, device type and dtype.

    Biases are zeros, other vectors (norm weights) ones; the rest has mean 0 and deviation 0.02.
    """
    refuse_buffers(adapter)
    generator = torch.Generator(device=device).manual_seed(seed)
    for names in tied_names(adapter.module):
        filled = torch.empty(
            adapter.module.get_parameter(names[0]).shape, dtype=dtype, device=device
        )
        if names[0].endswith("bias"):
            filled.zero_()
        elif filled.ndim <= 1:
            filled.fill_(1.0)
        else:
            filled.normal_(0.0, DUMMY_STD, generator=generator)
        _assign(adapter.module, names, filled)
    adapter.module.eval()


def _rows(parameter: Tensor, part: Part) -> Tensor:
    return (
        parameter if part.start is None and part.stop is None else parameter[part.start : part.stop]
    )


def _read(part: Part, handle: Any) -> Tensor:
    """Return a tensor of the file: CPU memory mapped from it, in the dtype of the file."""
    try:
        tensor: Tensor = handle.get_tensor(part.tensor)
    except Exception as error:
        raise ModelLoadError(f"tensor '{part.tensor}' cannot be read: {error}") from error
    return tensor


def _fill(parameter: Tensor, part: Part, handle: Any) -> None:
    rows = _rows(parameter, part)
    rows.copy_(_read(part, handle))
    if rows.numel() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(rows)):
        raise ModelLoadError(
            f"tensor '{part.tensor}' holds values that are not finite in {parameter.dtype}: "
            "the file is damaged, or the weights need a dtype of wider range"
        )


def _check_tied(parameter: Tensor, part: Part, handle: Any, filled_by: str) -> None:
    rows = _rows(parameter, part)
    if not torch.equal(rows, _read(part, handle).to(rows)):
        raise ModelLoadError(
            f"tensor '{part.tensor}' differs from '{filled_by}', but the model ties the two: the "
            "configuration and the weights contradict each other"
        )


def _assign(module: nn.Module, names: list[str], filled: Tensor) -> None:
    parameter = nn.Parameter(filled, requires_grad=False)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, parameter)
