"""Tiny models with random weights whose rounding errors do not grow over loops, as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from golden import GOLDEN
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.loading import load_adapter
from looped_spec.testing.checkpoints import fill_random, write_checkpoint


def golden_config(name: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a golden folder with some values changed."""
    config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return {**config, **changes}


def write_random(
    adapter_class: type[ModelAdapter],
    config: Mapping[str, Any],
    folder: Path,
    *,
    std: float,
    damp: Callable[[str, Tensor], None],
) -> Path:
    """Write a checkpoint of random weights; `damp` gets each parameter by name, to scale it."""
    adapter = adapter_class(config, adapter_class.options)
    fill_random(adapter.module, std=std, adjust=damp)
    return write_checkpoint(adapter, folder, config)


def load(folder: Path) -> ModelAdapter:
    """Load a checkpoint as users do."""
    return load_adapter(folder, device="cpu").adapter
