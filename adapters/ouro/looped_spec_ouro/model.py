"""The Ouro network: a stack of sandwich-norm decoder layers that a token traverses several times.

Facts from the published configuration and paper (arXiv 2510.25741); parameter names follow the
official checkpoints where a parameter stands for one tensor. The query, key and value projections
are one matrix here, and so are the gate and up projections (see `looped_spec.layers.merged`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from looped_spec.adapter import StageContext
from looped_spec.layers.attention import RotaryAttention
from looped_spec.layers.decoder import DecoderLayer, DecoderParts
from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.rotary import RotaryAngles


@dataclass(frozen=True)
class OuroConfig:
    """Sizes of an Ouro checkpoint; `num_layers` counts physical layers, each used once a loop."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    total_loops: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


class OuroLayer(DecoderLayer):
    """x + n2(attn(n1 x)), then x + n4(mlp(n3 x)): a norm before and after each branch."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = RotaryAttention(
            size, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.input_layernorm_2 = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size)
        self.post_attention_layernorm_2 = RMSNorm(size, eps)

    def parts(self) -> DecoderParts:
        """Return the parts, all four norms among them."""
        return DecoderParts(
            self.self_attn,
            self.mlp,
            before_attention=self.input_layernorm,
            after_attention=self.input_layernorm_2,
            before_mlp=self.post_attention_layernorm,
            after_mlp=self.post_attention_layernorm_2,
        )


class OuroStack(nn.Module):
    """Embedding, the shared layers, the norm that ends every loop, and the exit gate."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)


class OuroModel(nn.Module):
    """The stack and its head. One traversal is `traverse`; the depth is the caller's business."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.model = OuroStack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.angles = RotaryAngles(config.head_dim, config.rope_theta)

    def traverse(self, hidden: Tensor, index: int, ctx: StageContext) -> Tensor:
        """Run all layers once on `hidden` ([B, T, E]) and end with the norm that feeds head and
        next loop."""
        cos, sin = ctx.per_row(
            "rotary", lambda positions, _: self.angles.cos_sin(positions, hidden.dtype)
        )
        first_plane = index * self.config.num_layers
        for number, layer in enumerate(self.model.layers):
            hidden = layer(hidden, (cos, sin), first_plane + number, ctx)
        normed: Tensor = self.model.norm(hidden)
        return normed
