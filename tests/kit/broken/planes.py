"""Faults in the KV planes: their indices, kinds and sizes, and who writes them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from broken.case import BrokenToy
from looped_spec.adapter import KVPlane, LoopState, StageContext


class PlaneOffByOne(BrokenToy):
    """The loops begin at the plane of the readout, and never write the last one."""

    caught_by = (
        "test_every_declared_plane_is_written_once",
        "test_every_plane_is_written_by_the_stage_of_its_kind",
        "test_every_loop_writes_planes_of_its_own_in_the_same_order_of_layers",
        "test_verification_continues_from_drafted_states",
    )

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        hidden, embedded = state
        hidden = self.module.inject(torch.cat((hidden, embedded), dim=-1))
        return self.module.stack[0](hidden, 1 + index, ctx), embedded


class OnePlaneForAllLoops(BrokenToy):
    """Every loop writes the plane of the first: a chunk then sees other keys than single tokens."""

    caught_by = (
        "test_every_declared_plane_is_written_once",
        "test_every_loop_writes_planes_of_its_own_in_the_same_order_of_layers",
        "test_chunks_give_the_logits_of_the_whole",
    )

    def loop(self, state: LoopState, index: int, ctx: StageContext) -> LoopState:
        return super().loop(state, 0, ctx)


class MislabelledReadoutPlane(BrokenToy):
    """The readout's plane is declared as one of the prelude, which verification would keep."""

    caught_by = (
        "test_every_plane_is_written_by_the_stage_of_its_kind",
        "test_a_draft_readout_writes_readout_planes_only",
    )

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        first, second, *loops = super().kv_planes(full_loops)
        return (first, replace(second, kind="prelude"), *loops)


class MislabelledPreludePlane(BrokenToy):
    """The prelude's plane is declared as one of the readout."""

    caught_by = ("test_every_plane_is_written_by_the_stage_of_its_kind",)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        first, *others = super().kv_planes(full_loops)
        return (replace(first, kind="readout"), *others)


class LoopsInReverse(BrokenToy):
    """The planes of the loops are declared in the order opposite to their use."""

    caught_by = ("test_every_loop_writes_planes_of_its_own_in_the_same_order_of_layers",)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        first, second, *loops = super().kv_planes(full_loops)
        return (first, second, *reversed(loops))


class UndeclaredPlane(BrokenToy):
    """A negative index reaches the last declared plane by way of Python's lists."""

    caught_by = (
        "test_every_declared_plane_is_written_once",
        "test_chunks_give_the_logits_of_the_whole",
    )

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        hidden = self.module.norm(self.module.coda(state[0], -1, ctx))
        return ctx.logit_rows(hidden) @ self.module.embed.weight.T


class PlaneNeverWritten(BrokenToy):
    """One more plane is declared than is used."""

    caught_by = ("test_every_declared_plane_is_written_once",)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        planes = super().kv_planes(full_loops)
        return (*planes, planes[0])


class WrongHeadSizes(BrokenToy):
    """Heads and their size are declared the wrong way round: as many numbers, in other places."""

    caught_by = ("test_keys_and_values_have_the_declared_sizes",)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        return tuple(
            replace(plane, num_kv_heads=plane.head_dim, head_dim=plane.num_kv_heads)
            for plane in super().kv_planes(full_loops)
        )


class DraftReadoutInTheWrongPlane(BrokenToy):
    """The readout of drafts writes the plane of the prelude, which nobody writes again."""

    caught_by = (
        "test_a_draft_readout_writes_readout_planes_only",
        "test_verification_continues_from_drafted_states",
    )

    def draft_readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        hidden = self.module.norm(self.module.coda(state[0], 0, ctx))
        return ctx.logit_rows(hidden) @ self.module.embed.weight.T


class PlanesInAList(BrokenToy):
    """The planes are declared as a list."""

    caught_by = ("test_every_depth_declares_planes",)

    def kv_planes(self, full_loops: int) -> tuple[KVPlane, ...]:
        return list(super().kv_planes(full_loops))  # type: ignore[return-value]


class ReadoutPlaneOfNewTokens(BrokenToy):
    """A prompt leaves the plane of the readout empty, and later tokens attend to it."""

    caught_by = (
        "test_every_declared_plane_is_written_once",
        "test_what_the_cache_held_before_is_never_seen",
    )

    def readout(self, state: LoopState, ctx: StageContext) -> Tensor:
        hidden = state[0] if ctx.positions.shape[1] > 1 else self.module.coda(state[0], 1, ctx)
        return ctx.logit_rows(self.module.norm(hidden)) @ self.module.embed.weight.T


FAULTS = (
    PlanesInAList,
    ReadoutPlaneOfNewTokens,
    PlaneOffByOne,
    OnePlaneForAllLoops,
    MislabelledReadoutPlane,
    MislabelledPreludePlane,
    LoopsInReverse,
    UndeclaredPlane,
    PlaneNeverWritten,
    WrongHeadSizes,
    DraftReadoutInTheWrongPlane,
)
