"""The network: Llama blocks before, inside and after a loop (arXiv 2511.07384).

Parameters have the names of the published checkpoints, except that attention and feed-forward
layers are those of `looped_spec.layers`; `official_name` tells how they are called there. How deep
to recur is the caller's business.
"""

from __future__ import annotations

import torch
from looped_spec.adapter import StageContext
from looped_spec.layers.attention import RotaryAttention
from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.rotary import RotaryAngles
from torch import Tensor, nn

from looped_spec_retrofit.config import RetrofitConfig

_OFFICIAL = {
    "attn.qkv_proj": "attn.Wqkv",  # query rows, then key rows, then value rows
    "attn.o_proj": "attn.proj",
    "mlp.gate_up_proj": "mlp.fc",  # gate rows first
    "mlp.down_proj": "mlp.proj",
}


def official_name(parameter: str) -> str:
    """Return the name that a parameter of `RetrofitModel` has in checkpoints."""
    for ours, theirs in _OFFICIAL.items():
        parameter = parameter.replace(ours, theirs)
    return parameter


class RetrofitBlock(nn.Module):
    """A Llama block: x + attn(norm_1 x), then x + mlp(norm_2 x)."""

    def __init__(self, config: RetrofitConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm_1 = RMSNorm(size, config.norm_eps)
        self.attn = RotaryAttention(size, config.num_heads, config.num_kv_heads, config.head_dim)
        self.norm_2 = RMSNorm(size, config.norm_eps)
        self.mlp = SwiGLU(size, config.intermediate_size)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], plane: int, ctx: StageContext
    ) -> Tensor:
        """Return [B, T, E] for `x` of that shape, with keys and values in KV plane `plane`."""
        x = x + self.attn(self.norm_1(x), rotary, plane, ctx)
        branch: Tensor = self.mlp(self.norm_2(x))
        return x + branch


class RetrofitStack(nn.Module):
    """Embedding, three groups of blocks, the injection (`adapter`), and the norm before the
    head."""

    def __init__(self, config: RetrofitConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.wte = nn.Embedding(config.padded_vocab_size, size)
        self.prelude = _blocks(config, config.num_prelude)
        self.adapter = nn.Linear(2 * size, size, bias=False)
        self.core_block = _blocks(config, config.num_core)
        self.coda = _blocks(config, config.num_coda)
        self.ln_f = RMSNorm(size, config.norm_eps)


class RetrofitModel(nn.Module):
    """The stack and its head, which is the embedding's matrix only if the configuration says so."""

    def __init__(self, config: RetrofitConfig) -> None:
        super().__init__()
        self.transformer = RetrofitStack(config)
        self.lm_head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        self.angles = RotaryAngles(config.head_dim, config.rope_theta, config.rope_scaling)

    def run(self, blocks: nn.ModuleList, x: Tensor, first_plane: int, ctx: StageContext) -> Tensor:
        """Run `x` ([B, T, E]) through `blocks`, whose KV planes follow each other."""
        cos, sin = ctx.per_row(
            "rotary", lambda positions, _: self.angles.cos_sin(positions, x.dtype)
        )
        for number, block in enumerate(blocks):
            x = block(x, (cos, sin), first_plane + number, ctx)
        return x

    def inject(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Mix the prelude's output into the state: [B, T, E] each; state columns first."""
        out: Tensor = self.transformer.adapter(torch.cat((state, embedded), dim=-1))
        return out


def _blocks(config: RetrofitConfig, count: int) -> nn.ModuleList:
    return nn.ModuleList(RetrofitBlock(config) for _ in range(count))
