"""Runs the stages of an adapter by hand over a small cache, and writes down which planes they
use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looped_spec.adapter import LoopState, ModelAdapter
from looped_spec.runtime.attention import PagedContext, PagedRows, SdpaBackend
from looped_spec.runtime.kv_cache import KVPool, blocks_for

_BLOCK_SIZE = 4


@dataclass(frozen=True)
class PlaneWrite:
    """One call of `attend`, and the stage that made it ("prelude", "loop 2", "readout")."""

    stage: str
    plane: int


class WatchedContext(PagedContext):
    """A context that writes down every use of a plane, and refuses what is not declared."""

    stage = "no stage"
    writes: list[PlaneWrite]

    def column(self, index: int, total_loops: int) -> WatchedContext:
        """Return the context of one row of each request; see `PagedContext.column`."""
        part = super().column(index, total_loops)
        assert isinstance(part, WatchedContext)
        return part

    def attend(
        self, plane: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None
    ) -> Tensor:
        """Note the write, then do it; see `StageContext.attend`."""
        declared = len(self._pool.planes)
        if not isinstance(plane, int) or not 0 <= plane < declared:
            raise AssertionError(
                f"{self.stage} uses KV plane {plane!r}, kv_planes declares 0 to {declared - 1}"
            )
        sizes = (*self.positions.shape, *self._pool.planes[plane][0].shape[2:])
        for name, rows in (("keys", k), ("values", v)):
            if tuple(rows.shape) != sizes:
                raise AssertionError(
                    f"{self.stage} gives {name} of shape {tuple(rows.shape)} to KV plane {plane}, "
                    f"where [B, T, num_kv_heads, head_dim] is {sizes}"
                )
        self.writes.append(PlaneWrite(self.stage, plane))
        return super().attend(plane, q, k, v, scale=scale)


class StageBench:
    """One adapter, and a cache with room for `num_tokens` tokens of each of its requests.

    `seeds` gives the requests; row b of every call belongs to request b. All passes are run without
    gradients.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        *,
        seeds: Sequence[int] = (0,),
        full_loops: int | None = None,
        num_tokens: int = 24,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.adapter = adapter
        self.full_loops = full_loops or adapter.geometry.default_full_loops
        self.device = torch.device(device)
        self.writes: list[PlaneWrite] = []
        width = blocks_for(num_tokens, _BLOCK_SIZE)
        planes = adapter.kv_planes(self.full_loops)
        self.pool = KVPool(planes, len(seeds) * width, _BLOCK_SIZE, dtype, self.device)
        tables = torch.arange(1, len(seeds) * width + 1, device=self.device)
        self._tables = tables.view(len(seeds), width)
        self._seeds = torch.tensor(seeds, dtype=torch.int64, device=self.device)

    def context(
        self,
        start: int,
        length: int,
        *,
        total_loops: int | None = None,
        last_rows: Sequence[int] | None = None,
    ) -> WatchedContext:
        """Return the context of positions `start` to `start + length` of every request.

        With `last_rows` it is one of prefill: rows behind the last of a request only pad.
        """
        batch = len(self._seeds)
        positions = torch.arange(start, start + length, device=self.device).expand(batch, length)
        limits = torch.full((batch,), self._tables.shape[1] * _BLOCK_SIZE, device=self.device)
        last = None
        if last_rows is not None:
            last = torch.tensor(last_rows, dtype=torch.int64, device=self.device)
            limits = start + last + 1
        ctx = WatchedContext(
            self.pool,
            SdpaBackend(),
            PagedRows(self._tables, limits, self._seeds),
            positions,
            total_loops or self.full_loops,
            last,
        )
        ctx.writes = self.writes
        return ctx

    @torch.no_grad()
    def prelude(self, tokens: Tensor, ctx: WatchedContext) -> LoopState:
        """Run the prelude of tokens [B, T]."""
        ctx.stage = "prelude"
        return self.adapter.prelude(tokens.to(self.device), ctx)

    @torch.no_grad()
    def loop(self, state: LoopState, index: int, ctx: WatchedContext) -> LoopState:
        """Run one loop."""
        ctx.stage = f"loop {index}"
        return self.adapter.loop(state, index, ctx)

    @torch.no_grad()
    def readout(self, state: LoopState, ctx: WatchedContext) -> Tensor:
        """Run the readout of full depth."""
        ctx.stage = "readout"
        return self.adapter.readout(state, ctx)

    @torch.no_grad()
    def draft_readout(self, state: LoopState, ctx: WatchedContext) -> Tensor:
        """Run the readout of drafts."""
        ctx.stage = "draft_readout"
        return self.adapter.draft_readout(state, ctx)

    @torch.no_grad()
    def exit_score(
        self,
        criterion: str,
        state: LoopState,
        previous: LoopState,
        previous_score: Tensor | None,
        index: int,
        ctx: WatchedContext,
    ) -> Tensor:
        """Run `exit_score` after loop `index`."""
        ctx.stage = "exit_score"
        return self.adapter.exit_score(criterion, state, previous, previous_score, index, ctx)

    def states(self, tokens: Tensor, ctx: WatchedContext) -> list[LoopState]:
        """Return the state after the prelude and after each loop."""
        states = [self.prelude(tokens, ctx)]
        for index in range(self.full_loops):
            states.append(self.loop(states[-1], index, ctx))
        return states

    def chunks(self, tokens: Tensor, sizes: Sequence[int]) -> list[tuple[list[LoopState], Tensor]]:
        """Run tokens [B, T] in chunks from position 0; return states and logits of each."""
        done: list[tuple[list[LoopState], Tensor]] = []
        start = 0
        for size in sizes:
            ctx = self.context(start, size)
            states = self.states(tokens[:, start : start + size], ctx)
            done.append((states, self.readout(states[-1], ctx)))
            start += size
        return done

    def logits(self, tokens: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """Return logits [B, T, V] of tokens [B, T] at full depth, run in chunks of these sizes."""
        parts = [logits for _, logits in self.chunks(tokens, sizes or [tokens.shape[1]])]
        return torch.cat(parts, dim=1)

    def fill(self, planes: Sequence[int], positions: slice, value: float) -> None:
        """Overwrite what `planes` hold for these positions of every request."""
        slots = torch.arange(self._tables.shape[1] * _BLOCK_SIZE, device=self.device)[positions]
        blocks = self._tables[:, slots // _BLOCK_SIZE]
        for plane in planes:
            for pages in self.pool.planes[plane]:
                pages[blocks, slots % _BLOCK_SIZE] = value
