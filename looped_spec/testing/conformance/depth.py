"""Checks of what speculation relies on: drafted states and planes that verification may keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from looped_spec.adapter import LoopState, ModelAdapter
from looped_spec.testing.conformance.base import ConformanceBase, draft_depth
from looped_spec.testing.oracle import dense_logits
from looped_spec.testing.stages import StageBench

_KNOWN, _DRAFTED = 5, 3
_POISON = 30.0
"""Wrong enough to change all logits, and no overflow in any dtype."""


class DepthChecks(ConformanceBase):
    """A token may be computed to d loops first, and from there to D."""

    def test_a_shallow_run_is_a_prefix_of_a_deep_run(self, adapter: ModelAdapter) -> None:
        _needs_resumable(adapter)
        depth = draft_depth(adapter)
        tokens = self.sample_tokens(adapter, 1, _KNOWN)
        reached: list[LoopState] = []
        for total in (depth, adapter.geometry.default_full_loops):
            bench = StageBench(adapter)
            ctx = bench.context(0, _KNOWN, total_loops=total)
            reached.append(bench.states(tokens, ctx)[depth])
        for shallow, deep in zip(*reached, strict=True):
            self.assert_close(shallow, deep, f"states after {depth} loops of two depths of run")

    def test_verification_continues_from_drafted_states(self, adapter: ModelAdapter) -> None:
        _needs_resumable(adapter)
        self._assert_verified(adapter, poison=False)

    def test_verification_starts_anew_where_a_model_is_not_resumable(
        self, adapter: ModelAdapter
    ) -> None:
        if adapter.capabilities.resumable:
            pytest.skip("capability resumable: verification continues instead")
        self._assert_verified(adapter, poison=False)

    def test_verification_overwrites_the_planes_that_it_may_not_keep(
        self, adapter: ModelAdapter
    ) -> None:
        self._assert_verified(adapter, poison=True)

    def test_rejected_rows_leave_no_trace(self, adapter: ModelAdapter) -> None:
        draft_depth(adapter)
        tokens = self.sample_tokens(adapter, 1, _KNOWN + _DRAFTED)
        wrong = (tokens[:, _KNOWN:] + 1) % adapter.geometry.vocab_size
        bench = StageBench(adapter, seeds=(7,))
        bench.logits(tokens[:, :_KNOWN])
        _speculate(bench, wrong)
        self._assert_dense(adapter, tokens, _speculate(bench, tokens[:, _KNOWN:]))

    def _assert_verified(self, adapter: ModelAdapter, *, poison: bool) -> None:
        draft_depth(adapter)
        tokens = self.sample_tokens(adapter, 1, _KNOWN + _DRAFTED)
        bench = StageBench(adapter, seeds=(7,))
        bench.logits(tokens[:, :_KNOWN])
        logits = _speculate(bench, tokens[:, _KNOWN:], poison=poison)
        self._assert_dense(adapter, tokens, logits)

    def _assert_dense(self, adapter: ModelAdapter, tokens: Tensor, logits: Tensor) -> None:
        depth = adapter.geometry.default_full_loops
        expected = dense_logits(adapter, tokens[0].tolist(), depth, seed=7)[_KNOWN:]
        self.assert_close(logits[0], expected, "verified logits and those of one deep run")


def _needs_resumable(adapter: ModelAdapter) -> None:
    if not adapter.capabilities.resumable:
        pytest.skip("capability resumable: not declared")


def _speculate(bench: StageBench, tokens: Tensor, *, poison: bool = False) -> Tensor:
    """Draft `tokens` ([1, K + 1]) from position `_KNOWN` one by one, then verify; return logits.

    With `poison` all that verification must write again is spoilt in between.
    """
    depth = draft_depth(bench.adapter)
    resumable = bench.adapter.capabilities.resumable
    full, length = bench.full_loops, tokens.shape[1]
    kept: list[LoopState] = []
    for step in range(length):
        ctx = bench.context(_KNOWN + step, 1, total_loops=full if resumable else depth)
        state = bench.prelude(tokens[:, step : step + 1], ctx)
        for index in range(depth):
            state = bench.loop(state, index, ctx)
        kept.append(state)
        bench.draft_readout(state, ctx)
    if poison:
        _spoil(bench, depth, length)
    ctx = bench.context(_KNOWN, length)
    if resumable:
        state, first = tuple(torch.cat(parts, dim=1) for parts in zip(*kept, strict=True)), depth
    else:
        state, first = bench.prelude(tokens, ctx), 0
    for index in range(first, full):
        state = bench.loop(state, index, ctx)
    return bench.readout(state, ctx)


def _spoil(bench: StageBench, depth: int, length: int) -> None:
    """Spoil the drafted rows of every plane that verification writes again."""
    again = [
        number
        for number, plane in enumerate(bench.adapter.kv_planes(bench.full_loops))
        if plane.kind == "readout"
        or not bench.adapter.capabilities.resumable
        or (plane.loop is not None and plane.loop >= depth)
    ]
    bench.fill(again, slice(_KNOWN, _KNOWN + length), _POISON)
