"""A toy looped model with everything that a family may have: prelude, injection, readout block,
grouped queries.

Small enough to read in a minute, and used by the core's own tests so that they need no real family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from looped_spec.adapter import (
    Capabilities,
    ExitCriterion,
    KVPlane,
    LoopGeometry,
    LoopState,
    ModelAdapter,
    StageContext,
    loop_planes,
)
from looped_spec.errors import UnsupportedError
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.rotary import RotaryAngles, apply_rotary

TOY_CONFIG: dict[str, Any] = {
    "model_type": "toy_looped",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_layers": 2,
    "full_loops": 4,
    "max_model_len": 128,
    "depth_conditioned": False,
}


class ToyBlock(nn.Module):
    """Pre-norm attention and a small MLP, damped so that rounding errors do not grow over loops."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads = config["num_heads"], config["num_kv_heads"]
        self.head_dim, size = config["head_dim"], config["hidden_size"]
        self.norm = RMSNorm(size, 1e-6)
        self.qkv = nn.Linear(size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, size, bias=False)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))
        self.angles = RotaryAngles(self.head_dim, 1e4)

    def forward(self, x: Tensor, plane: int, ctx: StageContext) -> Tensor:
        batch, rows, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, rows, -1, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        cos, sin = self.angles.cos_sin(ctx.positions, x.dtype)
        out = ctx.attend(plane, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        x = x + 0.5 * self.out(out.reshape(batch, rows, -1))
        branch: Tensor = self.mlp(x)
        return x + 0.5 * branch


class ToyModel(nn.Module):
    """One prelude block, a looped stack, one readout block with keys and values of its own, a tied
    head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.embed = nn.Embedding(config["vocab_size"], size)
        self.prelude = ToyBlock(config)
        self.inject = nn.Linear(2 * size, size, bias=False)
        self.stack = nn.ModuleList(ToyBlock(config) for _ in range(config["num_layers"]))
        self.depth_scale = nn.Parameter(torch.ones(()))
        self.coda = ToyBlock(config)
        self.norm = RMSNorm(size, 1e-6)
        self.exit_gate = nn.Linear(size, 1)


class ToyAdapter(ModelAdapter):
    """The toy as an adapter. With `depth_conditioned` its shallow run is no prefix of its deep
    run."""

    module: ToyModel
    default_speculation = (2, 1)

    def __init__(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.config = {**TOY_CONFIG, **config}
        self.module = ToyModel(self.config)
        self.capabilities = Capabilities(
            early_exit=(ExitCriterion("gate", default_threshold=1.0, monotone=True),),
            resumable=not self.config["depth_conditioned"],
            seed_free=True,
        )
        self.geometry = LoopGeometry(
            default_full_loops=self.config["full_loops"],
            max_full_loops=self.config["full_loops"],
            vocab_size=self.config["vocab_size"],
            hidden_size=self.config["hidden_size"],
            max_model_len=self.config["max_model_len"],
        )

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """Prelude, readout, then one plane per (loop, layer)."""
        sizes = (self.config["num_kv_heads"], self.config["head_dim"])
        loops = loop_planes(full_loops, self.config["num_layers"], *sizes)
        return (KVPlane("prelude", *sizes), KVPlane("readout", *sizes), *loops)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """Return the recurrent state (zero at first) and the embedding that every loop injects."""
        embedded = self.module.prelude(self.module.embed(tokens), 0, ctx)
        return torch.zeros_like(embedded), embedded

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """Inject, then run the stack."""
        hidden, embedded = state
        hidden = self.module.inject(torch.cat((hidden, embedded), dim=-1))
        if self.config["depth_conditioned"]:
            # LoopFormer conditions on how far the run has come (arXiv 2602.11451).
            progress = (index + 1) / ctx.total_loops
            hidden = hidden * (1 + self.module.depth_scale * progress)
        for number, block in enumerate(self.module.stack):
            hidden = block(hidden, 2 + index * self.config["num_layers"] + number, ctx)
        return hidden, embedded

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Run the readout block over all rows, then the head over those that are wanted."""
        hidden = self.module.norm(self.module.coda(state[0], 1, ctx))
        return ctx.logit_rows(hidden) @ self.module.embed.weight.T

    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: StageContext,
    ) -> Tensor:
        """Return the probability to have left by now, 1 - prod(1 - gate), [B, T] fp32."""
        if criterion != "gate":
            raise UnsupportedError(f"the toy has one exit criterion, 'gate', not '{criterion}'")
        if index + 1 >= ctx.total_loops:
            return torch.ones(state[0].shape[:2], device=state[0].device)
        stay = torch.sigmoid(-self.module.exit_gate(state[0]).squeeze(-1).float())
        return 1 - stay if previous_score is None else 1 - stay * (1 - previous_score)


def make_toy(seed: int = 0, **changes: Any) -> ToyAdapter:
    """Return a toy with random weights; `changes` are entries of `TOY_CONFIG`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ToyAdapter({**TOY_CONFIG, **changes}, {})
