"""Huginn adapters for tests: golden checkpoints, and a shape without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from golden import GOLDEN, GoldenPrompt, golden_prompts
from looped_spec_huginn.adapter import HuginnAdapter

from looped_spec.weights import load_weights

FOLDERS = [GOLDEN / "huginn-a", GOLDEN / "huginn-b"]
CASES = [(folder, case) for folder in FOLDERS for case in golden_prompts(folder)]
CASE_IDS = [f"{folder.name}-{len(case.prompt)}-tokens" for folder, case in CASES]
ZEROS = {"init_scale": 0.0}


def read_config(folder: Path = FOLDERS[0], /, **changes: Any) -> dict[str, Any]:
    """Read config.json of a golden folder, with some values changed; None takes one out."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    return {name: value for name, value in config.items() if value is not None}


def load(
    folder: Path = FOLDERS[0],
    options: Mapping[str, Any] = ZEROS,
    adapter_class: type[HuginnAdapter] = HuginnAdapter,
) -> HuginnAdapter:
    """Load a golden checkpoint in fp32, by default with an initial state of zeros."""
    with torch.device("meta"):
        adapter = adapter_class(read_config(folder), options)
    load_weights(adapter, folder, torch.device("cpu"), torch.float32)
    return adapter


def without_weights(options: Mapping[str, Any] | None = None, **changes: Any) -> HuginnAdapter:
    """Build an adapter on the meta device."""
    with torch.device("meta"):
        return HuginnAdapter(read_config(**changes), options or {})


def continuation(case: GoldenPrompt) -> list[int]:
    """Return the recorded greedy continuation of a prompt."""
    return case.sequence("greedy_full_depth_zero_init")[len(case.prompt) :]
