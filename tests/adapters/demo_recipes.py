"""The recipes of the bundled demos, each with settings of a size that trains in a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import looped_spec_huginn.demo.recipe as huginn
import looped_spec_nanbeige.demo.recipe as nanbeige
import looped_spec_ouro.demo.recipe as ouro

from looped_spec.demos.recipe import Recipe
from looped_spec.demos.train import train
from looped_spec.demos.trainer import Trainer

_RUN: dict[str, Any] = {
    "tokens_per_step": 64,
    "row_tokens": 16,
    "long_row_tokens": 32,
    "warmup_steps": 1,
    "autocast": False,
}

_OURO = ouro.config_json(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)

_HUGINN = huginn.config_json(
    vocab_size=300,
    padded_vocab_size=320,
    padding_multiple=64,
    n_embd=32,
    n_heads=2,
    intermediate_size=64,
    mean_recurrence=3,
    block_size=32,
)

_NANBEIGE = nanbeige.config_json(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)


@dataclass(frozen=True)
class Case:
    """A recipe, and a short run of it."""

    recipe: Recipe[Any]
    settings: Any

    def train(self, sources: Any, out: Path, state: Path, **options: Any) -> Trainer:
        """Train from `sources`, with the settings of this case unless others are given."""
        settings = options.pop("settings", self.settings)
        return train(self.recipe, sources, settings, out, state, **options)


OURO = Case(ouro.RECIPE, ouro.OuroTrainSettings(model=_OURO, steps=3, gate_steps=2, **_RUN))
HUGINN = Case(
    huginn.RECIPE,
    huginn.HuginnTrainSettings(model=_HUGINN, steps=5, mean_rate=2.0, grad_loops=2, **_RUN),
)
NANBEIGE = Case(nanbeige.RECIPE, nanbeige.NanbeigeTrainSettings(model=_NANBEIGE, steps=5, **_RUN))
CASES = {case.recipe.name: case for case in (OURO, HUGINN, NANBEIGE)}
