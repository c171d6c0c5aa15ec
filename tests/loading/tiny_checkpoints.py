"""Tiny checkpoints in the official Ouro layout, written from an adapter with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from looped_spec_ouro.adapter import OuroAdapter
from safetensors.torch import save_file
from torch import Tensor

CONFIG: dict[str, Any] = {
    "model_type": "ouro",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "total_ut_steps": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}
Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"
V = "model.layers.1.self_attn.v_proj.weight"
NORM = "model.norm.weight"


def meta_adapter() -> OuroAdapter:
    """Build the tiny adapter as the loader gets it."""
    with torch.device("meta"):
        return OuroAdapter(CONFIG, {})


def random_tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Make one random tensor per name of the official layout."""
    adapter = meta_adapter()
    generator = torch.Generator().manual_seed(seed)
    state = adapter.module.state_dict()
    tensors: dict[str, Tensor] = {}
    for name, target in adapter.checkpoint_layout().items():
        shape = list(state[target.parameter].shape)
        if target.stop is not None:
            shape[0] = target.stop - (target.start or 0)
        tensors[name] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


def write_config(folder: Path, **changes: Any) -> None:
    """Write config.json with some values changed."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def write_single(
    folder: Path, tensors: Mapping[str, Tensor], name: str = "model.safetensors"
) -> Path:
    """Write a checkpoint of one file, config.json included."""
    write_config(folder)
    save_file(dict(tensors), folder / name)
    return folder / name


def write_sharded(folder: Path, tensors: Mapping[str, Tensor], shards: int = 3) -> dict[str, str]:
    """Deal the tensors out to shards, one parameter to several of them; return the map."""
    write_config(folder)
    weight_map = {
        name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors"
        for number, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, folder / file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    """Write the index of a sharded checkpoint."""
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
