"""A model whose drafts are dictated, for tests of what verification does with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor

from looped_spec.adapter import LoopState, ModelAdapter, StageContext


def with_dictated_drafts(
    adapter: ModelAdapter, tokens: Mapping[tuple[int, int], int]
) -> ModelAdapter:
    """Return an adapter of the same weights that drafts `tokens`, by (seed, position).

    The readout of drafts runs as ever, so that its planes are written. Where nothing is dictated,
    its least likely token is drafted, which verification will hardly ever agree with.
    """
    own = adapter.draft_readout

    def dictated(state: LoopState, ctx: StageContext) -> Tensor:
        logits = -own(state, ctx)
        seeds, positions = ctx.seeds.tolist(), ctx.positions.tolist()
        for row, seed in enumerate(seeds):
            for column, position in enumerate(positions[row]):
                token = tokens.get((seed, position + 1))
                if token is not None:
                    logits[row, column, token] = 1e6
        return logits

    changed = copy.copy(adapter)
    vars(changed)["draft_readout"] = dictated
    return changed
