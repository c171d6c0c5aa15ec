"""Ouro as a `ModelAdapter`: embedding, D traversals of the stack, head; the exit gate as a
criterion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from looped_spec.adapter import (
    KVPlane,
    LoopGeometry,
    LoopState,
    ModelAdapter,
    StageContext,
    WeightTarget,
    loop_planes,
)
from looped_spec.errors import ModelLoadError, UnsupportedError
from looped_spec.layers.merged import merged_layout
from looped_spec.model_config import read_sizes
from looped_spec_ouro.model import OuroConfig, OuroModel
from looped_spec_ouro.plugin import CAPABILITIES

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "total_ut_steps": "total_loops",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
}


def read_config(config: Mapping[str, Any]) -> OuroConfig:
    """Take the sizes from config.json; num_key_value_heads and head_dim may be absent or null, and
    then follow from the others as in the official class. Its other defaults fit no release."""
    values = dict(config)
    read_sizes(values, {key: key for key in ("hidden_size", "num_attention_heads")})
    if values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values.get("head_dim") is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    if values.get("rope_theta") is None:  # transformers 5 writes it inside rope_parameters
        values["rope_theta"] = _rope_settings(config).get("rope_theta")
    sizes = read_sizes(
        values,
        _SIZES,
        real_numbers=("rms_norm_eps", "rope_theta"),
        counts=("num_hidden_layers", "total_ut_steps"),
    )
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ModelLoadError(
            f"config.json: num_attention_heads {sizes['num_heads']} must be a multiple of "
            f"num_key_value_heads {sizes['num_kv_heads']}"
        )
    if sizes["head_dim"] % 2:  # rotary embeddings turn pairs of channels
        raise ModelLoadError(f"config.json: head_dim must be even, got {sizes['head_dim']}")
    return OuroConfig(**sizes)


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters must be an object, got {settings!r}")
    return settings


class OuroAdapter(ModelAdapter):
    """Ouro-1.4B, Ouro-2.6B and their Thinking variants."""

    # Published speed-ups at draft depth 2 are highest or near it at two drafts for one to eight
    # requests.
    default_speculation = (2, 2)

    def __init__(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.config = read_config(config)
        self.module: OuroModel = OuroModel(self.config)
        self.capabilities = CAPABILITIES
        self.geometry = LoopGeometry(
            default_full_loops=self.config.total_loops,
            max_full_loops=self.config.total_loops,
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            max_model_len=self.config.max_position_embeddings,
        )

    @classmethod
    def unsupported_reason(cls, config: Mapping[str, Any]) -> str | None:
        """Refuse what no published Ouro has and this code does not compute."""
        if config.get("use_sliding_window"):
            return "sliding-window attention (use_sliding_window) is not implemented"
        kinds = config.get("layer_types") or []
        if not isinstance(kinds, list):
            raise ModelLoadError(f"config.json: layer_types must be a list, got {kinds!r}")
        if any(kind != "full_attention" for kind in kinds):
            return "only full_attention is implemented in layer_types"
        rope_type = _rope_settings(config).get("rope_type", "default")
        if config.get("rope_scaling") or rope_type != "default":
            return "rope_scaling is not implemented"
        if config.get("hidden_act", "silu") != "silu":
            return f"hidden_act '{config['hidden_act']}' is not implemented (only silu)"
        if config.get("tie_word_embeddings"):
            return (
                "tied word embeddings are not implemented (the official models have their own head)"
            )
        return None

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """One plane per (loop, layer), ordered by loop."""
        c = self.config
        return loop_planes(full_loops, c.num_layers, c.num_kv_heads, c.head_dim)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """Embed; Ouro has no block that runs only once."""
        return (self.module.model.embed_tokens(tokens),)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """Traverse the stack once; the residual starts anew from the normed state of the loop
        before."""
        return (self.module.traverse(state[0], index, ctx),)

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Apply the head to the state, which the loop left normed."""
        logits: Tensor = self.module.lm_head(ctx.logit_rows(state[0]))
        return logits

    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: StageContext,
    ) -> Tensor:
        """Cumulative exit probability 1 - prod(1 - lambda_j) over the loops so far, in fp32; 1 at
        the last.

        lambda is the sigmoid of the gate on the normed state (paper, section on adaptive exit).
        Taking the product in fp32 log space keeps it below 1, so a threshold of 1.0 means full
        depth.
        """
        if criterion != "gate":
            raise UnsupportedError(f"Ouro has one exit criterion, 'gate', not '{criterion}'")
        if index + 1 >= ctx.total_loops:
            return torch.ones(state[0].shape[:2], dtype=torch.float32, device=state[0].device)
        gate = self.module.model.early_exit_gate
        logit = torch.nn.functional.linear(
            state[0].float(), gate.weight.float(), gate.bias.float()
        ).squeeze(-1)
        stay = torch.sigmoid(-logit)
        if previous_score is not None:
            stay = stay * (1.0 - previous_score)
        return (1.0 - stay).clamp(max=1.0 - 2.0**-24)

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        """Official tensor names; q, k, v and gate, up share one parameter each."""
        return merged_layout(self.module)
