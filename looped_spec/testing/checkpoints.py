"""Gives an adapter random weights, and writes its weights as a checkpoint in the layout that it
declares."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from looped_spec.adapter import ModelAdapter


@torch.no_grad()
def fill_random(
    module: nn.Module,
    *,
    seed: int = 0,
    std: float = 0.1,
    adjust: Callable[[str, Tensor], object] | None = None,
) -> None:
    """Fill matrices and biases with normal numbers of deviation `std`, and other vectors (the
    weights of norms) with numbers from 0.8 to 1.2, so that no two of them can be mistaken.

    The same numbers for the same seed, in the order of the parameters. `adjust` then gets each
    parameter by name and may change it in place: what recurs must be small, or the model amplifies
    its own rounding errors from loop to loop and no two runs of it agree.
    """
    dice = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 or name.endswith("bias"):
            parameter.normal_(0.0, std, generator=dice)
        else:
            parameter.uniform_(0.8, 1.2, generator=dice)
        if adjust is not None:
            adjust(name, parameter)


def checkpoint_tensors(adapter: ModelAdapter) -> dict[str, Tensor]:
    """Return a copy of every tensor that `adapter.checkpoint_layout()` names."""
    state = adapter.module.state_dict()
    tensors = {}
    for name, target in adapter.checkpoint_layout().items():
        parameter = state[target.parameter]
        whole = target.start is None and target.stop is None
        rows = parameter if whole else parameter[target.start : target.stop]
        tensors[name] = rows.detach().clone().contiguous()
    return tensors


def write_checkpoint(
    adapter: ModelAdapter, folder: Path, config: Mapping[str, Any] | None = None
) -> Path:
    """Write model.safetensors, and config.json if its content is given; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(adapter), folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder
