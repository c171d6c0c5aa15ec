"""A whole round from static buffers to static buffers: what is run, traced or captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.control.plan import Candidate
from looped_spec.runtime.attention import AttentionBackend, PagedContext, PagedRows, Span
from looped_spec.runtime.kv_cache import KVPool, blocks_for
from looped_spec.runtime.logprobs import OnTargets
from looped_spec.runtime.round import speculative_round
from looped_spec.runtime.row_state import RowState
from looped_spec.runtime.sampler import SamplingMode


class RoundShape(NamedTuple):
    """What is fixed when a round is captured: rows, K, d, and how much work token choice is."""

    batch_size: int
    num_speculative_tokens: int
    draft_loops: int
    mode: SamplingMode

    @staticmethod
    def of(batch_size: int, candidate: Candidate, mode: SamplingMode) -> RoundShape:
        """Return the shape of a round of `candidate`; plain decoding has no draft depth."""
        k = candidate.num_speculative_tokens
        return RoundShape(batch_size, k, candidate.draft_loops if k else 0, mode)

    @property
    def num_columns(self) -> int:
        """Numbers per row that the host gets: K + 1 tokens, and how many drafts were accepted."""
        return self.num_speculative_tokens + 2

    @property
    def num_rows(self) -> int:
        """Rows of the verification, B (K + 1)."""
        return self.batch_size * (self.num_speculative_tokens + 1)

    def __str__(self) -> str:
        """Name it in messages."""
        size, k, d, mode = self
        return f"B={size} K={k}{f' d={d}' if k else ''} {mode.name.lower()}"


class RoundProgram:
    """Runs rounds of one model over one cache and one `RowState`."""

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: KVPool,
        backend: AttentionBackend,
        state: RowState,
        full_loops: int,
    ) -> None:
        self.adapter = adapter
        self.pool = pool
        self.backend = backend
        self.state = state
        self.full_loops = full_loops
        self.between_passes: Callable[[], None] | None = None
        """Called between two passes of a round that is not captured; see `speculative_round`."""

    @property
    def static_tensors(self) -> list[Tensor]:
        """Every tensor that a round reads or writes beside the weights."""
        return [*self.state.tensors, *(pages for pair in self.pool.planes for pages in pair)]

    def width_for(self, num_positions: int) -> int | None:
        """Return the columns of the block tables that rows up to `num_positions` positions long
        need, None for all where it makes no difference to the backend."""
        if not self.backend.cost_follows_width:
            return None
        width = blocks_for(num_positions, self.pool.block_size)
        return min(width, self.state.tables.shape[1])

    def __call__(
        self,
        shape: RoundShape,
        shadow_depths: Sequence[int] = (),
        *,
        width: int | None = None,
        spans: Sequence[Span] = (),
        has_padding: bool,
        on_targets: OnTargets | None = None,
    ) -> Tensor:
        """Run a round of the first rows of the batch and move them on.

        Returns [B, K + 2 + S] int64, all that the host needs: the target's tokens, the accepted
        drafts, and for each shadow depth the leading rows that agree (see `RoundOutput`); zeros in
        rows of padding. `spans` and `on_targets` are for rounds that are not captured.
        """
        if has_padding:
            rows = self.state.static_rows(shape.batch_size, width)
        else:
            rows = self.state.rows(shape.batch_size, width)
        paged = PagedRows(rows.tables, rows.limits, rows.sampling.seeds, spans)

        def context(where: Tensor, loops: int) -> PagedContext:
            return PagedContext(self.pool, self.backend, paged, where, loops)

        out = speculative_round(
            self.adapter,
            context,
            rows.tokens,
            rows.positions,
            rows.sampling,
            num_speculative_tokens=shape.num_speculative_tokens,
            draft_loops=shape.draft_loops,
            full_loops=self.full_loops,
            mode=shape.mode,
            shadow_depths=shadow_depths,
            on_targets=on_targets,
            between_passes=None if has_padding else self.between_passes,
        )
        rows.advance(out.next_token, out.next_position)
        parts = [out.tokens, out.accepted[:, None]]
        if shadow_depths:
            parts.append(out.shadow)
        return rows.without_padding(torch.cat(parts, dim=1))
