"""The Nanbeige network: a stack of pre-norm decoder layers that a token traverses several times.

Facts from the published configuration and the observed outputs of the released model; parameter
names follow the official checkpoints. Merged projections are those of `looped_spec.layers`.
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
class NanbeigeConfig:
    """Sizes of a Nanbeige checkpoint; `num_layers` counts physical layers, each used once a loop.

    `norm_between_loops` is false for a model that norms only what goes to the head.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    total_loops: int
    norm_between_loops: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


class NanbeigeLayer(DecoderLayer):
    """x + attn(n1 x), then x + mlp(n2 x): a norm before each branch only."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = RotaryAttention(
            size, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size)

    def parts(self) -> DecoderParts:
        """Return the parts; no norm stands behind a branch."""
        return DecoderParts(
            self.self_attn,
            self.mlp,
            before_attention=self.input_layernorm,
            before_mlp=self.post_attention_layernorm,
        )


class NanbeigeStack(nn.Module):
    """Embedding, the shared layers, and the norm that ends a loop or precedes the head."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(NanbeigeLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class NanbeigeModel(nn.Module):
    """The stack and its head.

    What is handed on between loops is either normed, and then goes to the head as it is, or not,
    and then only the head's own copy is normed. So a readout is right at every depth, and never
    changes the state that the next loop gets.
    """

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        self.config = config
        self.model = NanbeigeStack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.angles = RotaryAngles(config.head_dim, config.rope_theta)

    def traverse(self, hidden: Tensor, index: int, ctx: StageContext) -> Tensor:
        """Run all layers once on `hidden` ([B, T, E]); plane index * layers + layer is theirs."""
        cos, sin = ctx.per_row(
            "rotary", lambda positions, _: self.angles.cos_sin(positions, hidden.dtype)
        )
        first_plane = index * self.config.num_layers
        for number, layer in enumerate(self.model.layers):
            hidden = layer(hidden, (cos, sin), first_plane + number, ctx)
        if self.config.norm_between_loops:
            hidden = self.model.norm(hidden)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of a state [..., E] as `traverse` left it."""
        if not self.config.norm_between_loops:
            hidden = self.model.norm(hidden)
        logits: Tensor = self.lm_head(hidden)
        return logits
