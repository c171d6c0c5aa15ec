"""Writes the weights of an adapter as a checkpoint in the layout that it declares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from looped_spec.adapter import ModelAdapter


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
