"""Checks of the KV planes: declared exactly as they are used, and of the right kind."""

from __future__ import annotations

from collections import Counter

import pytest

from looped_spec.adapter import ModelAdapter
from looped_spec.testing.conformance.base import ConformanceBase, draft_depth
from looped_spec.testing.stages import PlaneWrite, StageBench

_STAGE_OF_KIND = {"prelude": "prelude", "loop": "loop", "readout": "readout"}


def _depths(adapter: ModelAdapter) -> set[int]:
    return {1, adapter.geometry.default_full_loops}


class PlaneChecks(ConformanceBase):
    """Speculation decides by the planes' kinds what it keeps and what it computes again."""

    def _writes(self, adapter: ModelAdapter, depth: int, rows: int) -> list[PlaneWrite]:
        """Return what one pass of `rows` tokens of two requests uses, `depth` loops deep."""
        bench = StageBench(adapter, full_loops=depth, seeds=(0, 1))
        bench.logits(self.sample_tokens(adapter, 2, rows))
        return bench.writes

    @pytest.mark.parametrize("rows", [1, 5])
    def test_every_declared_plane_is_written_once(self, adapter: ModelAdapter, rows: int) -> None:
        for depth in _depths(adapter):
            writes = Counter(write.plane for write in self._writes(adapter, depth, rows))
            expected = Counter(range(len(adapter.kv_planes(depth))))
            assert writes == expected, f"{depth} loops deep, calls of attend by plane"

    def test_every_plane_is_written_by_the_stage_of_its_kind(self, adapter: ModelAdapter) -> None:
        for depth in _depths(adapter):
            planes = adapter.kv_planes(depth)
            for write in self._writes(adapter, depth, 3):
                kind = planes[write.plane].kind
                assert write.stage.split()[0] == _STAGE_OF_KIND[kind], (
                    f"{write.stage} writes plane {write.plane}, which is declared as '{kind}'"
                )

    def test_every_loop_writes_planes_of_its_own_in_the_same_order_of_layers(
        self, adapter: ModelAdapter
    ) -> None:
        depth = adapter.geometry.default_full_loops
        planes = adapter.kv_planes(depth)
        layers: dict[str, list[int]] = {}
        for write in self._writes(adapter, depth, 3):
            plane = planes[write.plane]
            if plane.loop is not None:
                assert write.stage == f"loop {plane.loop}", (
                    f"{write.stage} writes plane {write.plane}, declared for loop {plane.loop}"
                )
                layers.setdefault(write.stage, []).append(plane.layer)
        for stage, order in layers.items():
            assert len(set(order)) == len(order), f"{stage} writes a layer twice"
            assert order == layers["loop 0"], f"{stage} has other layers than loop 0"

    def test_keys_and_values_have_the_declared_sizes(self, adapter: ModelAdapter) -> None:
        for depth in _depths(adapter):
            assert self._writes(adapter, depth, 3), (
                "attend is never called, or the context says why"
            )

    def test_a_draft_readout_writes_readout_planes_only(self, adapter: ModelAdapter) -> None:
        depth = draft_depth(adapter)
        bench = StageBench(adapter)
        ctx = bench.context(0, 1)
        state = bench.states(self.sample_tokens(adapter, 1, 1), ctx)[depth]
        bench.writes.clear()
        bench.draft_readout(state, ctx)
        planes = adapter.kv_planes(bench.full_loops)
        assert {planes[write.plane].kind for write in bench.writes} <= {"readout"}

    def test_a_shadow_readout_writes_no_plane(self, adapter: ModelAdapter) -> None:
        if not adapter.capabilities.shadow_depths:
            pytest.skip("capability shadow_depths: not declared")
        bench = StageBench(adapter)
        ctx = bench.context(0, 3)
        states = bench.states(self.sample_tokens(adapter, 1, 3), ctx)
        bench.writes.clear()
        for state in states[1:]:
            bench.readout(state, ctx)
            bench.draft_readout(state, ctx)
        assert bench.writes == []
