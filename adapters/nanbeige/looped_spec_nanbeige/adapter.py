"""Nanbeige as a `ModelAdapter`: embedding, D traversals of the stack, head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from looped_spec.adapter import (
    KVPlane,
    LoopGeometry,
    LoopState,
    ModelAdapter,
    StageContext,
    WeightTarget,
    loop_planes,
)
from looped_spec.layers.merged import merged_layout
from looped_spec_nanbeige.config import read_config, unsupported_reason
from looped_spec_nanbeige.model import NanbeigeModel
from looped_spec_nanbeige.plugin import CAPABILITIES


class NanbeigeAdapter(ModelAdapter):
    """Nanbeige4.2-3B and its Base variant. There is no exit mechanism."""

    default_speculation = None
    speculation_note = (
        "nothing published says that the first loop of this family was trained to predict tokens; "
        "try num_speculative_tokens=1 draft_loops=1, and keep it if the draft acceptance rate is "
        "well above draft_loops / full_loops"
    )

    def __init__(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.config = read_config(config)
        self.module: NanbeigeModel = NanbeigeModel(self.config)
        self.capabilities = CAPABILITIES
        self.geometry = LoopGeometry(
            default_full_loops=self.config.total_loops,
            max_full_loops=self.config.total_loops,
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            max_model_len=self.config.max_position_embeddings,
        )

    @classmethod
    def unsupported_reason(cls, config: Mapping[str, Any]) -> str | None:
        """Refuse what the config class offers, no release uses, and this code does not compute."""
        return unsupported_reason(config)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """One plane per (loop, layer), ordered by loop."""
        c = self.config
        return loop_planes(full_loops, c.num_layers, c.num_kv_heads, c.head_dim)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """Embed; Nanbeige has no block that runs only once."""
        return (self.module.model.embed_tokens(tokens),)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """Traverse the stack once; the state stays un-normed where the model says so."""
        return (self.module.traverse(state[0], index, ctx),)

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Apply the head, after the norm that an un-normed state still lacks."""
        return self.module.head(ctx.logit_rows(state[0]))

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        """Official tensor names; q, k, v and gate, up share one parameter each."""
        return merged_layout(self.module)
