"""How `demo:ouro` is trained: a readout after every loop, then the exit gate alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.adapter import ModelAdapter
from looped_spec.demos.depths import mean_loss, states_after_each_loop
from looped_spec.demos.recipe import Recipe, Stage, body_groups
from looped_spec.demos.settings import VOCAB_SIZE, TrainSettings
from looped_spec.demos.vocabulary import END_OF_TEXT
from looped_spec.errors import ConfigError
from looped_spec_ouro.adapter import OuroAdapter

# Ouro's second stage (arXiv 2510.25741): go on where one more loop lowers the loss by the margin.
GATE_SLOPE = 50.0
GATE_MARGIN = 0.005
GATE_RATE = 1e-2

# Weight that the norms after attention and MLP start with. At 1, a token's own embedding is mostly
# gone after four loops. Losses of one batch, step 78, loops 1 to 4: 5.38 5.33 5.35 5.38 when it
# starts at 1, 4.41 4.20 4.12 4.11 at 0.12.
BRANCH_SCALE = 0.12


def config_json(**changes: Any) -> dict[str, Any]:
    """Return config.json with the keys of the official checkpoints, some values changed.

    Unchanged it has the sizes of `demo:ouro`: one physical layer, four loops, 1.93 M parameters.
    """
    config = {
        "architectures": ["OuroForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "early_exit_threshold": 1.0,
        "eos_token_id": END_OF_TEXT,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 320,
        "initializer_range": 0.02,
        "intermediate_size": 896,
        "max_position_embeddings": 1024,
        "model_type": "ouro",
        "num_attention_heads": 5,
        "num_hidden_layers": 1,
        "num_key_value_heads": 5,
        "pad_token_id": END_OF_TEXT,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "total_ut_steps": 4,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
        **changes,
    }
    return {**config, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


@dataclass(frozen=True, kw_only=True)
class OuroTrainSettings(TrainSettings):
    """A run whose last `gate_steps` steps train the gate alone.

    The weights of the per-loop losses go from `first_weights` to `last_weights` in a straight line
    between the shares `blend_from` and `blend_to` of the run: leaning on the last loop first makes
    every loop useful, evening out later makes the shallow readouts good predictors of the deep one.
    """

    model: Mapping[str, Any] = field(default_factory=config_json)
    steps: int = 3000
    gate_steps: int = 100
    first_weights: tuple[float, ...] = (0.02, 0.05, 0.13, 0.8)
    last_weights: tuple[float, ...] = (0.14, 0.13, 0.18, 0.55)
    blend_from: float = 0.4
    blend_to: float = 0.85

    may_change: ClassVar[frozenset[str]] = frozenset({"steps", "gate_steps"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_steps < 0:
            raise ConfigError(f"gate_steps must be at least 0, got {self.gate_steps}")
        loops = self.model["total_ut_steps"]
        for name in ("first_weights", "last_weights"):
            if len(getattr(self, name)) != loops:
                raise ConfigError(
                    f"{name} must have one weight for each of the {loops} loops, "
                    f"got {len(getattr(self, name))}"
                )

    def loop_weights(self, step: int) -> tuple[float, ...]:
        """Return the weight of each loop's loss at this step."""
        done = (step / self.steps - self.blend_from) / (self.blend_to - self.blend_from)
        share = min(max(done, 0.0), 1.0)
        pairs = zip(self.first_weights, self.last_weights, strict=True)
        return tuple(first + share * (last - first) for first, last in pairs)


class BodyStage(Stage):
    """Everything but the gate: the weighted cross entropies of all readouts."""

    name = "body"

    def __init__(self, adapter: OuroAdapter, settings: OuroTrainSettings) -> None:
        self.adapter, self.settings, self.steps = adapter, settings, settings.steps
        self.clip_norm = settings.clip_norm
        named = dict(adapter.module.named_parameters())
        body = {name: p for name, p in named.items() if "early_exit_gate" not in name}
        self.groups = body_groups(body, "model.embed_tokens.weight", settings.weight_decay)
        self._losses = torch.compile(self._eager) if settings.compiled else self._eager

    def _eager(self, rows: Tensor) -> list[Tensor]:
        loops = self.adapter.geometry.default_full_loops
        states, ctx = states_after_each_loop(self.adapter, rows[:, :-1], loops)
        return [mean_loss(self.adapter.readout(state, ctx), rows[:, 1:]) for state in states]

    def loss(self, rows: Tensor, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Return the weighted sum, and the loss of every loop."""
        with self.settings.precision():
            losses = torch.stack(self._losses(rows))
        return losses @ torch.tensor(self.settings.loop_weights(step)), losses.detach()


class GateStage(Stage):
    """The gate alone: leave after a loop unless one more lowers the token's loss by the margin."""

    name = "gate"

    def __init__(self, adapter: OuroAdapter, settings: OuroTrainSettings) -> None:
        self.adapter, self.settings, self.steps = adapter, settings, settings.gate_steps
        gate = adapter.module.model.early_exit_gate
        self.groups = [{"params": list(gate.parameters()), "lr": GATE_RATE, "weight_decay": 0.0}]

    def loss(self, rows: Tensor, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Return the gate's cross entropy, once to learn from and once to show."""
        with torch.no_grad(), self.settings.precision():
            loops = self.adapter.geometry.default_full_loops
            states, ctx = states_after_each_loop(self.adapter, rows[:, :-1], loops)
            losses = []
            for state in states:
                logits = self.adapter.readout(state, ctx).float().flatten(0, 1)
                losses.append(F.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none"))
        gain = torch.stack(losses)
        gain = (gain[:-1] - gain[1:]).view(-1, *rows[:, 1:].shape)
        leave = 1.0 - torch.sigmoid(GATE_SLOPE * (gain - GATE_MARGIN))
        gate = self.adapter.module.model.early_exit_gate
        logits = torch.stack([gate(state[0].float()).squeeze(-1) for state in states[:-1]])
        loss = F.binary_cross_entropy_with_logits(logits, leave)
        return loss, loss.detach()[None]


class OuroRecipe(Recipe[OuroTrainSettings]):
    """The recipe of `demo:ouro`."""

    name = "ouro"
    adapter_class = OuroAdapter
    defaults = OuroTrainSettings()
    folder = Path(__file__).parent
    flags = ("gate_steps",)

    def initialize(self, adapter: ModelAdapter, settings: OuroTrainSettings) -> None:
        """Fill all weights; branches start small, and the gate starts undecided."""
        generator = torch.Generator().manual_seed(settings.seed)
        with torch.no_grad():
            for name, parameter in adapter.module.named_parameters():
                if name.endswith("embed_tokens.weight"):
                    parameter.normal_(0.0, 0.5, generator=generator)
                elif "early_exit_gate" in name:
                    parameter.zero_()
                elif parameter.ndim == 2:
                    parameter.normal_(0.0, 0.5 * parameter.shape[1] ** -0.5, generator=generator)
                elif name.endswith("layernorm_2.weight"):
                    parameter.fill_(BRANCH_SCALE)

    def stages(self, adapter: ModelAdapter, settings: OuroTrainSettings) -> Sequence[Stage]:
        """Return the body's stage and the gate's."""
        ouro = cast(OuroAdapter, adapter)
        return BodyStage(ouro, settings), GateStage(ouro, settings)


RECIPE = OuroRecipe()
