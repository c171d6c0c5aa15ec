"""What a training run is made of: the sizes of the model and the schedule."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from looped_spec.errors import ConfigError
from looped_spec_ouro.model import OuroConfig

VOCAB_SIZE = 1024


def demo_config() -> OuroConfig:
    """Return the sizes of `demo:ouro`: one physical layer, four loops, 1.93 M parameters."""
    return OuroConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=320,
        intermediate_size=896,
        num_layers=1,
        num_heads=5,
        num_kv_heads=5,
        head_dim=64,
        total_loops=4,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_position_embeddings=1024,
    )


@dataclass(frozen=True)
class TrainSettings:
    """One run, reproducible on the same machine with the same number of threads.

    A step sees `tokens_per_step` tokens: in rows of `row_tokens`, and every `long_row_every`-th
    step in rows as long as `max_position_embeddings`, so that late positions are trained too. The
    weights of the per-loop losses go from `first_weights` to `last_weights` in a straight line
    between the shares `blend_from` and `blend_to` of the run: leaning on the last loop first makes
    every loop useful, evening out later makes the shallow readouts good predictors of the deep one.
    `compiled` runs the forward and backward passes through torch.compile, which fuses what is bound
    by memory: about five times as fast on two cores.
    """

    steps: int = 3000
    gate_steps: int = 100
    seed: int = 0
    tokens_per_step: int = 3072
    row_tokens: int = 256
    long_row_every: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 80
    clip_norm: float = 1.0
    first_weights: tuple[float, ...] = (0.02, 0.05, 0.13, 0.8)
    last_weights: tuple[float, ...] = (0.14, 0.13, 0.18, 0.55)
    blend_from: float = 0.4
    blend_to: float = 0.85
    autocast: bool = True
    compiled: bool = False
    model: OuroConfig = field(default_factory=demo_config)

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "row_tokens", "long_row_every", "warmup_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.gate_steps < 0:
            raise ConfigError(f"gate_steps must be at least 0, got {self.gate_steps}")
        if self.learning_rate <= 0:
            raise ConfigError(f"learning_rate must be above 0, got {self.learning_rate}")
        for name in ("first_weights", "last_weights"):
            if len(getattr(self, name)) != self.model.total_loops:
                raise ConfigError(
                    f"{name} must have one weight for each of the {self.model.total_loops} loops, "
                    f"got {len(getattr(self, name))}"
                )
        for length in (self.row_tokens, self.model.max_position_embeddings):
            if self.tokens_per_step % length:
                raise ConfigError(
                    f"tokens_per_step must be a multiple of the row length {length}, "
                    f"got {self.tokens_per_step}"
                )

    def row_length(self, step: int) -> int:
        """Return how many tokens a row of this step has."""
        is_long = step % self.long_row_every == self.long_row_every - 1
        return self.model.max_position_embeddings if is_long else self.row_tokens

    def loop_weights(self, step: int) -> tuple[float, ...]:
        """Return the weight of each loop's loss at this step."""
        done = (step / self.steps - self.blend_from) / (self.blend_to - self.blend_from)
        share = min(max(done, 0.0), 1.0)
        pairs = zip(self.first_weights, self.last_weights, strict=True)
        return tuple(first + share * (last - first) for first, last in pairs)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
