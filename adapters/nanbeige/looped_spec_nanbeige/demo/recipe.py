"""How `demo:nanbeige` is trained: the loss of the last loop alone, as the published model was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.demos.depths import mean_loss, states_after_each_loop
from looped_spec.demos.recipe import Recipe, Stage, body_groups
from looped_spec.demos.settings import VOCAB_SIZE, TrainSettings
from looped_spec.demos.vocabulary import END_OF_TEXT
from looped_spec_nanbeige.adapter import NanbeigeAdapter


def config_json(**changes: Any) -> dict[str, Any]:
    """Return config.json with the keys of the official checkpoints, some values changed.

    Unchanged it has the sizes of `demo:nanbeige`: two layers, two loops, 1.95 M parameters. As in
    the release, queries are wider than the hidden state, and heads share keys and values.
    """
    return {
        "architectures": ["NanbeigeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 224,
        "initializer_range": 0.02,
        "intermediate_size": 768,
        "loop_loss_weights": [],
        "max_position_embeddings": 1024,
        "mlp_bias": False,
        "model_type": "nanbeige",
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_loops": 2,
        "pad_token_id": END_OF_TEXT,
        "pretraining_tp": 1,
        "qk_layernorm": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "skip_loop_final_norm": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCAB_SIZE,
        **changes,
    }


@dataclass(frozen=True, kw_only=True)
class NanbeigeTrainSettings(TrainSettings):
    """The run of `demo:nanbeige`."""

    model: Mapping[str, Any] = field(default_factory=config_json)
    steps: int = 3000


class LastLoopStage(Stage):
    """Cross entropy after the last loop; nothing tells the first one to predict anything."""

    name = "body"

    def __init__(self, adapter: NanbeigeAdapter, settings: NanbeigeTrainSettings) -> None:
        self.adapter, self.settings, self.steps = adapter, settings, settings.steps
        self.clip_norm = settings.clip_norm
        named = dict(adapter.module.named_parameters())
        self.groups = body_groups(named, "model.embed_tokens.weight", settings.weight_decay)
        self._loss = torch.compile(self._eager, dynamic=False) if settings.compiled else self._eager

    def _eager(self, rows: Tensor) -> Tensor:
        loops = self.adapter.geometry.default_full_loops
        states, ctx = states_after_each_loop(self.adapter, rows[:, :-1], loops)
        return mean_loss(self.adapter.readout(states[-1], ctx), rows[:, 1:])

    def loss(self, rows: Tensor, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Return the loss, once to learn from and once to show."""
        with self.settings.precision():
            loss = self._loss(rows)
        return loss, loss.detach()[None]


class NanbeigeRecipe(Recipe[NanbeigeTrainSettings]):
    """The recipe of `demo:nanbeige`."""

    name = "nanbeige"
    adapter_class = NanbeigeAdapter
    defaults = NanbeigeTrainSettings()
    folder = Path(__file__).parent

    def initialize(self, adapter: ModelAdapter, settings: NanbeigeTrainSettings) -> None:
        """Fill all weights; what each branch adds shrinks with the number of branches."""
        config = cast(NanbeigeAdapter, adapter).config
        branch = (2 * config.num_layers * config.total_loops) ** -0.5
        generator = torch.Generator().manual_seed(settings.seed)
        with torch.no_grad():
            for name, parameter in adapter.module.named_parameters():
                if name.endswith("embed_tokens.weight"):
                    parameter.normal_(0.0, 0.5, generator=generator)
                elif parameter.ndim == 2:
                    ends = name.endswith(("o_proj.weight", "down_proj.weight"))
                    std = 0.5 * (branch if ends else 1.0) * parameter.shape[1] ** -0.5
                    parameter.normal_(0.0, std, generator=generator)

    def stages(self, adapter: ModelAdapter, settings: NanbeigeTrainSettings) -> Sequence[Stage]:
        """Return the one stage."""
        return (LastLoopStage(cast(NanbeigeAdapter, adapter), settings),)


RECIPE = NanbeigeRecipe()
