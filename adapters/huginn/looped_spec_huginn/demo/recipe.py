"""How `demo:huginn` is trained: every piece of text at a depth drawn at random, one loss there.

The scheme is the paper's (arXiv 2502.05171, section 3.3): depths from a Poisson distribution with
a log-normal rate, gradients through the last few loops only, a random initial state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from looped_spec.adapter import LoopState, ModelAdapter
from looped_spec.demos.depths import mean_loss
from looped_spec.demos.recipe import Recipe, Stage, body_groups
from looped_spec.demos.settings import VOCAB_SIZE, TrainSettings
from looped_spec.demos.vocabulary import END_OF_TEXT
from looped_spec.errors import ConfigError
from looped_spec.testing.dense import DenseContext
from looped_spec_huginn.adapter import HuginnAdapter

F = TypeVar("F", bound=Callable[..., Any])

# What the injection starts as: most of the state is kept and a little of the prelude's output is
# added, so that the first loops are coarse and later ones refine. And how much slower than all else
# it learns: at the full rate it learns in 100 steps to write over the state, and nothing changes
# after the second loop. Held-out GSM8K at step 200, loops 1, 2, 4 and 8: 3.30 3.28 3.28 3.28 from
# random weights at the full rate, 3.75 3.47 3.40 3.40 with these, which start more slowly.
KEPT_STATE = 1.0
INJECTED = 0.2
INJECTION_NOISE = 0.1
INJECTION_RATE = 0.1


def config_json(**changes: Any) -> dict[str, Any]:
    """Return config.json with the keys of the official checkpoint, some values changed.

    Unchanged it has the sizes of `demo:huginn`: one block each of prelude, core and coda, eight
    loops, 2.03 M parameters.
    """
    config = {
        "architectures": ["RavenForCausalLM"],
        "architecture_class_name": "RecurrentGPT",
        "bias": False,
        "block_class_name": "SandwichBlock",
        "block_size": 1024,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "init_strategy": "takase",
        "injection_type": "linear",
        "intermediate_size": 544,
        "mean_backprop_depth": 4,
        "mean_recurrence": 8,
        "mlp_class_name": "GatedMLP",
        "model_type": "huginn_raven",
        "n_embd": 224,
        "n_heads": 7,
        "n_layers_in_coda": 1,
        "n_layers_in_prelude": 1,
        "n_layers_in_recurrent_block": 1,
        "nonlin_name": "SiLU",
        "norm_class_name": "RMSNorm_llama",
        "norm_eps": 1e-6,
        "pad_token_id": END_OF_TEXT,
        "padded_vocab_size": VOCAB_SIZE,
        "padding_multiple": 256,
        "qk_bias": True,
        "rope_base": 50_000,
        "sampling_scheme": "poisson-lognormal-filling",
        "state_init": "like-init",
        "test_time_noise": 0,
        "tie_embeddings": True,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        **changes,
    }
    return {**config, **_derived(config)}


def _derived(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that follow from others."""
    once = config["n_layers_in_prelude"] + config["n_layers_in_coda"]
    core = config["n_layers_in_recurrent_block"]
    depth = once + config["mean_recurrence"] * core
    std = math.sqrt(2 / (5 * config["n_embd"]))
    return {
        "effective_expected_depth": depth,
        "head_dim": config["n_embd"] // config["n_heads"],
        "init_values": {
            "embed_scale": math.sqrt(config["n_embd"]),
            "embedding": std,
            "out_proj": std / math.sqrt(2 * depth),
            "std": std,
        },
        "n_layers": once + core,
        "num_key_value_heads": config["n_heads"],
    }


@dataclass(frozen=True, kw_only=True)
class HuginnTrainSettings(TrainSettings):
    """A run at depths drawn around `mean_rate` + 1, at most `max_loops`.

    The rate of the Poisson distribution is log-normal with mean `mean_rate` and deviation
    `rate_sigma` of its logarithm. Gradients flow through the last `grad_loops` loops.
    """

    model: Mapping[str, Any] = field(default_factory=config_json)
    steps: int = 2700
    mean_rate: float = 7.0
    rate_sigma: float = 0.5
    max_loops: int = 24
    grad_loops: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_loops", "grad_loops"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("mean_rate", "rate_sigma"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")

    def draw(self, step: int, part: int, rows: int) -> tuple[int, Tensor]:
        """Return the depth of a piece of a step, and a seed of noise [rows] for each of its rows.

        They depend on the run's seed, the step and the part alone.
        """
        rng = np.random.default_rng((self.seed, 2, step, part))
        log_mean = math.log(self.mean_rate) - self.rate_sigma**2 / 2
        depth = int(rng.poisson(math.exp(rng.normal(log_mean, self.rate_sigma)))) + 1
        return min(depth, self.max_loops), torch.from_numpy(rng.integers(0, 2**62, rows))


class SampledDepthStage(Stage):
    """Cross entropy after as many loops as were drawn.

    The three parts of the model are compiled one by one, so that a new depth compiles nothing.
    """

    name = "body"

    def __init__(self, adapter: HuginnAdapter, settings: HuginnTrainSettings) -> None:
        self.adapter, self.settings, self.steps = adapter, settings, settings.steps
        self.clip_norm = settings.clip_norm
        named = dict(adapter.module.named_parameters())
        injection = named.pop("transformer.adapter.weight")
        self.groups = [
            *body_groups(named, "transformer.wte.weight", settings.weight_decay),
            {"params": [injection], "weight_decay": 0.0, "rate_scale": INJECTION_RATE},
        ]
        self._begin = self._compiled(self._eager_begin)
        self._loop = self._compiled(self._eager_loop)
        self._finish = self._compiled(self._eager_finish)

    def _compiled(self, function: F) -> F:
        if not self.settings.compiled:
            return function
        return cast(F, torch.compile(function, dynamic=False))

    def _eager_begin(self, tokens: Tensor, seeds: Tensor) -> LoopState:
        ctx = DenseContext(tokens.shape[0], tokens.shape[1], total_loops=1, seeds=seeds)
        return self.adapter.prelude(tokens, ctx)

    def _eager_loop(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        # Without a cache, one loop is like any other.
        ctx = DenseContext(hidden.shape[0], hidden.shape[1], total_loops=1)
        return self.adapter.loop((hidden, embedded), 0, ctx)[0]

    def _eager_finish(self, hidden: Tensor, embedded: Tensor, targets: Tensor) -> Tensor:
        ctx = DenseContext(hidden.shape[0], hidden.shape[1], total_loops=1)
        return mean_loss(self.adapter.readout((hidden, embedded), ctx), targets)

    def loss(self, rows: Tensor, step: int, part: int) -> tuple[Tensor, Tensor]:
        """Return the loss, and for show the loss and the depth."""
        depth, seeds = self.settings.draw(step, part, len(rows))
        kept = min(depth, self.settings.grad_loops)
        with self.settings.precision():
            hidden, embedded = self._begin(rows[:, :-1], seeds)
            with torch.no_grad():
                for _ in range(depth - kept):
                    hidden = self._loop(hidden, embedded.detach())
            hidden = hidden.detach().requires_grad_()  # the state before the first kept loop
            for _ in range(kept):
                hidden = self._loop(hidden, embedded)
            loss = self._finish(hidden, embedded, rows[:, 1:])
        return loss, torch.stack((loss.detach(), torch.tensor(float(depth))))


class HuginnRecipe(Recipe[HuginnTrainSettings]):
    """The recipe of `demo:huginn`."""

    name = "huginn"
    adapter_class = HuginnAdapter
    defaults = HuginnTrainSettings()
    folder = Path(__file__).parent

    def initialize(self, adapter: ModelAdapter, settings: HuginnTrainSettings) -> None:
        """Fill all weights with the deviations that config.json states, but for the injection."""
        values, width = settings.model["init_values"], settings.model["n_embd"]
        generator = torch.Generator().manual_seed(settings.seed)
        with torch.no_grad():
            for name, parameter in adapter.module.named_parameters():
                if parameter.ndim == 2:
                    ends = name.endswith(("attn.proj.weight", "mlp.proj.weight"))
                    std = values["out_proj" if ends else "std"]
                    parameter.normal_(0.0, std, generator=generator)
                if name.endswith("adapter.weight"):
                    parameter.mul_(INJECTION_NOISE)
                    parameter[:, :width] += KEPT_STATE * torch.eye(width)
                    parameter[:, width:] += INJECTED * torch.eye(width)

    def stages(self, adapter: ModelAdapter, settings: HuginnTrainSettings) -> Sequence[Stage]:
        """Return the one stage."""
        return (SampledDepthStage(cast(HuginnAdapter, adapter), settings),)


RECIPE = HuginnRecipe()
