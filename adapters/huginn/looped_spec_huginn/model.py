"""The Huginn network: blocks that run once, blocks that recur, and blocks that run once at the end.

Facts from the paper (arXiv 2502.05171, section 2) and the published configuration. Parameters have
the names and shapes of the official checkpoint; how deep to recur is the caller's business.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from looped_spec.adapter import StageContext
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.rotary import RotaryAngles, apply_rotary_to_pairs
from looped_spec_huginn.config import HuginnConfig


class HuginnAttention(nn.Module):
    """Causal multi-head attention; learned offsets of queries and keys come before rotation."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.n_heads, config.head_dim
        self.Wqkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.qk_bias: nn.Parameter | None = None
        if config.qk_bias:
            self.qk_bias = nn.Parameter(torch.zeros(2, 1, self.num_heads, self.head_dim))
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], plane: int, ctx: StageContext
    ) -> Tensor:
        """Return [B, T, E] for `x` of that shape; `rotary` is cos and sin, [B, T, 1, 1, hd / 2]."""
        qkv = self.Wqkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        qk, v = qkv[..., :2, :, :], qkv[..., 2, :, :]
        if self.qk_bias is not None:
            qk = qk + self.qk_bias.squeeze(1)
        q, k = apply_rotary_to_pairs(qk, *rotary).unbind(dim=-3)
        out: Tensor = self.proj(ctx.attend(plane, q, k, v).flatten(-2))
        return out


class HuginnMLP(nn.Module):
    """Gated feed-forward layer: the first half of `fc` is the gate of the second half."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.n_embd, 2 * config.intermediate_size, bias=False)
        self.proj = nn.Linear(config.intermediate_size, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, T, E] for `x` of that shape."""
        gate, up = self.fc(x).chunk(2, dim=-1)
        out: Tensor = self.proj(F.silu(gate) * up)
        return out


class HuginnBlock(nn.Module):
    """Norms before each branch and after each sum: n2(x + attn(n1 x)), then n4(x + mlp(n3 x))."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.norm_1 = RMSNorm(config.n_embd, config.norm_eps)
        self.attn = HuginnAttention(config)
        self.norm_2 = RMSNorm(config.n_embd, config.norm_eps)
        self.norm_3 = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = HuginnMLP(config)
        self.norm_4 = RMSNorm(config.n_embd, config.norm_eps)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], plane: int, ctx: StageContext
    ) -> Tensor:
        """Return [B, T, E] for `x` of that shape, with keys and values in KV plane `plane`."""
        x = self.norm_2(x + self.attn(self.norm_1(x), rotary, plane, ctx))
        out: Tensor = self.norm_4(x + self.mlp(self.norm_3(x)))
        return out


class HuginnStack(nn.Module):
    """Embedding, three groups of blocks, the injection (`adapter`), and the norm of the readout."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.prelude = _blocks(config, config.n_layers_in_prelude)
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False)
        self.core_block = _blocks(config, config.n_layers_in_recurrent_block)
        self.coda = _blocks(config, config.n_layers_in_coda)
        self.ln_f = RMSNorm(config.n_embd, config.norm_eps)


class HuginnModel(nn.Module):
    """The stack and its head, which is the embedding's matrix unless the configuration says no."""

    def __init__(self, config: HuginnConfig) -> None:
        super().__init__()
        self.transformer = HuginnStack(config)
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        self.angles = RotaryAngles(config.head_dim, config.rope_base)

    def run(self, blocks: nn.ModuleList, x: Tensor, first_plane: int, ctx: StageContext) -> Tensor:
        """Run `x` ([B, T, E]) through `blocks`, whose KV planes follow each other."""
        cos, sin = ctx.per_row(
            "rotary", lambda positions, _: self.angles.cos_sin_of_pairs(positions)
        )
        # One more axis, over which queries and keys are rotated together.
        rotary = cos.unsqueeze(-2), sin.unsqueeze(-2)
        for number, block in enumerate(blocks):
            x = block(x, rotary, first_plane + number, ctx)
        return x

    def inject(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Mix the prelude's output into the state: [B, T, E] each; state columns first."""
        out: Tensor = self.transformer.adapter(torch.cat((state, embedded), dim=-1))
        return out


def _blocks(config: HuginnConfig, count: int) -> nn.ModuleList:
    return nn.ModuleList(HuginnBlock(config) for _ in range(count))
