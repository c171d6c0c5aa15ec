"""Nanbeige configurations and a slow, plain implementation that shares no code with the adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from golden import GOLDEN
from safetensors.torch import load_file
from torch import Tensor

TINY = GOLDEN / "nanbeige-a"

RELEASE: dict[str, Any] = {
    "model_type": "nanbeige",
    "vocab_size": 166144,
    "hidden_size": 3072,
    "intermediate_size": 10752,
    "num_hidden_layers": 22,
    "num_loops": 2,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "kv_channels": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 70000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "qk_layernorm": False,
    "skip_loop_final_norm": False,
    "loop_loss_weights": [],
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""The sizes of Nanbeige4.2-3B."""


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of the tiny checkpoint with some values changed."""
    config: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return {**config, **changes}


def write_tiny(folder: Path, **changes: Any) -> Path:
    """Copy the tiny checkpoint with some values of config.json changed; None removes a field."""
    folder.mkdir()
    shutil.copy(TINY / "model.safetensors", folder)
    config = {key: value for key, value in tiny_config(**changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def plain_logits(
    tokens: Sequence[int], loops: int, config: Mapping[str, Any], folder: Path = TINY
) -> Tensor:
    """Return logits [T, V] after `loops` loops, head by head and straight from the definitions."""
    w = load_file(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, theta, eps = config["head_dim"], config["rope_theta"], config["rms_norm_eps"]
    layers = 1 + max(int(name.split(".")[2]) for name in w if ".layers." in name)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"]

    def rotate(x: Tensor) -> Tensor:  # [T, size]
        angle = torch.outer(
            torch.arange(len(x)).double(),
            torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)]).double(),
        )
        cos, sin = angle.cos().float(), angle.sin().float()
        a, b = x[:, : size // 2], x[:, size // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=1)

    def attention(x: Tensor, name: str) -> Tensor:
        q, k, v = (x @ w[f"{name}.{part}_proj.weight"].T for part in "qkv")
        future = torch.full((len(x), len(x)), -torch.inf).triu(1)
        out = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            shared = slice(head * kv_heads // heads * size, (head * kv_heads // heads + 1) * size)
            scores = rotate(q[:, own]) @ rotate(k[:, shared]).T / size**0.5 + future
            out.append(scores.softmax(dim=-1) @ v[:, shared])
        return torch.cat(out, dim=1) @ w[f"{name}.o_proj.weight"].T

    def mlp(x: Tensor, name: str) -> Tensor:
        gate = x @ w[f"{name}.gate_proj.weight"].T
        return (gate * gate.sigmoid() * (x @ w[f"{name}.up_proj.weight"].T)) @ w[
            f"{name}.down_proj.weight"
        ].T

    x = w["model.embed_tokens.weight"][list(tokens)]
    for loop in range(loops):
        for number in range(layers):
            name = f"model.layers.{number}"
            x = x + attention(norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
            x = x + mlp(norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        if loop + 1 == loops or not config["skip_loop_final_norm"]:
            x = norm(x, "model.norm")
    return x @ w["lm_head.weight"].T
