"""A model whose drafts are right with a chosen probability, whatever its weights.

What speculation gains is a matter of acceptance and of costs. With random weights nothing is
accepted, and with trained ones the text decides; here the costs are those of the real model, every
stage runs as ever, and acceptance is a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from looped_spec.adapter import KVPlane, LoopState, ModelAdapter, StageContext, WeightTarget
from looped_spec.errors import ConfigError
from looped_spec.layers.hashing import mix, open_uniform, row_keys

_STREAM = 0x1F0ACCE7
_FORCED = 1e4  # above any other logit, and a number in every dtype


class ForcedAcceptance(ModelAdapter):
    """Another adapter with the choice of tokens taken from it.

    The token of a position is a hash of the request's seed and the position, and so is whether a
    draft has that token or its neighbour. Drafts are right with probability `probability`,
    independently of each other and of the draft depth; a text is the same with and without
    speculation. Any id can come out, those that end a text among them: decode with `ignore_eos`.

    The logits are those of the model with one number per row overwritten, which costs next to
    nothing beside a head. The probability lies on the device of the model: `set_probability` takes
    effect in rounds that were captured before.
    """

    def __init__(self, adapter: ModelAdapter, probability: float) -> None:
        """Wrap `adapter`, whose weights are in place; `probability` is 0 to 1."""
        self.adapter = adapter
        self.module = adapter.module
        self.geometry = adapter.geometry
        self.capabilities = adapter.capabilities
        self.default_speculation = adapter.default_speculation
        device = next(adapter.module.parameters()).device
        self._probability = torch.empty((), dtype=torch.float32, device=device)
        self.set_probability(probability)

    def set_probability(self, probability: float) -> None:
        """Let drafts be right with another probability from the next round on."""
        if not 0.0 <= probability <= 1.0:
            raise ConfigError(f"probability must be between 0 and 1, got {probability!r}")
        self._probability.fill_(probability)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        """Declare the planes of the model."""
        return self.adapter.kv_planes(full_loops)

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        """Run the model's prelude."""
        return self.adapter.prelude(tokens, ctx)

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        """Run the model's loop."""
        return self.adapter.loop(state, index, ctx)

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return the model's logits with the token of each position on top."""
        return _put_on_top(self.adapter.readout(state, ctx), self._tokens(ctx)[0], ctx)

    def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        """Return the model's draft logits with the draft of each position on top."""
        return _put_on_top(self.adapter.draft_readout(state, ctx), self._tokens(ctx)[1], ctx)

    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: StageContext,
    ) -> Tensor:
        """Score as the model does."""
        return self.adapter.exit_score(criterion, state, previous, previous_score, index, ctx)

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        """Return the layout of the model."""
        return self.adapter.checkpoint_layout()

    def optional_checkpoint_tensors(self) -> frozenset[str]:
        """Return those of the model."""
        return self.adapter.optional_checkpoint_tensors()

    def _tokens(self, ctx: StageContext) -> tuple[Tensor, ...]:
        """Return the token that follows each row and its draft, [B, T] int64 each."""
        return ctx.per_row("forced_acceptance", self._draw)

    def _draw(self, positions: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        keys = row_keys(seeds[:, None], positions, _STREAM)
        vocab_size = self.geometry.vocab_size
        tokens = keys % vocab_size
        is_right = open_uniform(mix(keys)) < self._probability
        return tokens, torch.where(is_right, tokens, (tokens + 1) % vocab_size)


def _put_on_top(logits: Tensor, tokens: Tensor, ctx: StageContext) -> Tensor:
    """Overwrite in `logits` ([B, T', V]) the number of the row's token."""
    index = ctx.logit_rows(tokens[..., None])
    return logits.scatter_(-1, index, _FORCED)
