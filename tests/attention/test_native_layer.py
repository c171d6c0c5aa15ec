"""A layer in one call: the bits and the pages of its branches, and nothing of a replaced copy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from looped_spec.adapter import KVPlane
from looped_spec.layers.attention import RotaryAttention
from looped_spec.layers.decoder import DecoderLayer, DecoderParts
from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.native import BuildError, Kernels, NativeLayer, use_kernels
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.packed import TiledHalves, TiledPacked, use_packed
from looped_spec.layers.rotary import RotaryAngles
from looped_spec.runtime.attention import PagedContext, PagedRows
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.kv_cache import KVPool

SIZE, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 90, 4, 2, 10
BLOCK, BLOCKS, REQUESTS = 4, 24, 3


class Layer(DecoderLayer):
    """A layer with norms behind its branches, or without."""

    def __init__(self, is_sandwich: bool) -> None:
        super().__init__()
        self.attention = RotaryAttention(SIZE, HEADS, KV_HEADS, HEAD_DIM)
        self.mlp = SwiGLU(SIZE, INNER)
        self.norms = torch.nn.ModuleList(RMSNorm(SIZE, 10.0**-i) for i in (6, 5, 4, 3))
        self.is_sandwich = is_sandwich

    def parts(self) -> DecoderParts:
        norms: Any = list(self.norms) if self.is_sandwich else [*list(self.norms)[:2], None, None]
        return DecoderParts(self.attention, self.mlp, *norms)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return Kernels()
    except BuildError as error:
        pytest.skip(f"the kernels do not build here: {error}")


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def layer_with(kernels: Kernels, is_sandwich: bool) -> Layer:
    layer = Layer(is_sandwich).requires_grad_(False)
    for number, parameter in enumerate(layer.parameters()):
        parameter.copy_(0.25 * numbers(*parameter.shape, seed=number))
    use_kernels(layer, kernels)
    kinds = (TiledHalves, TiledPacked, TiledHalves, TiledHalves)
    linears = [*layer.attention.children(), *layer.mlp.children()]
    for one, kind in zip(linears, kinds, strict=True):
        packed = kind.of(one.weight)  # type: ignore[arg-type]
        assert packed is not None
        use_packed(one, packed)  # type: ignore[arg-type]
    return layer


class Run:
    """A cache, and steps of a layer over it."""

    def __init__(self, layer: Layer, kernels: Kernels) -> None:
        self.layer, self.backend = layer, NativeBackend(kernels)
        self.angles = RotaryAngles(HEAD_DIM, 1e4)
        planes = [KVPlane("loop", KV_HEADS, HEAD_DIM, loop=0, layer=n) for n in range(2)]
        self.pool = KVPool(planes, BLOCKS, BLOCK, torch.float32, torch.device("cpu"))
        order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)) + 1
        self.tables = order.view(REQUESTS, -1)

    def context(self, starts: Tensor, length: int) -> PagedContext:
        limits = torch.full((REQUESTS,), BLOCK * self.tables.shape[1] - 1)
        rows = PagedRows(self.tables, limits, torch.arange(REQUESTS))
        positions = starts[:, None] + torch.arange(length)
        return PagedContext(self.pool, self.backend, rows, positions, 1)

    @torch.no_grad()
    def step(self, ctx: Any, seed: int) -> Tensor:
        x = numbers(*ctx.positions.shape, SIZE, seed=seed)
        rotary = ctx.per_row("rotary", lambda p, _: self.angles.cos_sin(p, torch.float32))
        out: Tensor = self.layer(x, rotary, 1, ctx)
        return out

    def all_steps(self) -> list[Tensor]:
        """A prompt, a row each, some rows each, single ones of them, and past the limit."""
        starts = torch.tensor([0, 2, 1])
        outs = [self.step(self.context(starts, 20), 1)]
        starts = starts + 20
        outs.append(self.step(self.context(starts, 1), 2))
        wide = self.context(starts + 1, 4)
        outs += [self.step(wide.column(column, 1), 3 + column) for column in range(4)]
        outs.append(self.step(wide, 8))
        outs.append(self.step(wide.select(torch.tensor([2, 0])), 9))
        outs.append(self.step(self.context(torch.tensor([30, 29, 31]), 2), 10))
        return outs


@pytest.mark.parametrize("is_sandwich", [True, False])
def test_a_layer_in_one_call_is_its_branches_bit_by_bit(
    kernels: Kernels, is_sandwich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_with(kernels, is_sandwich)
    called = 0
    call = NativeLayer.__call__

    def watched(*args: Any) -> Tensor:
        nonlocal called
        called += 1
        return call(*args)

    monkeypatch.setattr(NativeLayer, "__call__", watched)
    whole = Run(layer, kernels)
    got = whole.all_steps()
    assert called == len(got) - 1, "all but the prompt"
    monkeypatch.setattr(NativeBackend, "native_rows", lambda *_: None)
    branches = Run(layer, kernels)
    want = branches.all_steps()
    assert called == len(got) - 1
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(whole.pool.planes[1], branches.pool.planes[1], strict=True):
        assert torch.equal(one[1:], other[1:])


def test_norms_that_change_in_place_are_read_and_a_copy_has_its_own(kernels: Kernels) -> None:
    layer = layer_with(kernels, True)
    first = Run(layer, kernels).all_steps()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for norm in other.norms:
            norm.weight.mul_(2.0)  # type: ignore[operator]
    changed = Run(other, kernels).all_steps()
    assert not torch.equal(changed[1], first[1])
    assert torch.equal(Run(layer, kernels).all_steps()[1], first[1])
    with torch.no_grad():
        for norm in layer.norms:
            norm.weight.mul_(2.0)  # type: ignore[operator]
    assert torch.equal(Run(layer, kernels).all_steps()[1], changed[1])


class _TripledNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 3.0 * super().forward(x)


class _HalvedMlp(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class _TurnedAttention(RotaryAttention):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return -super().forward(x, *args)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("norms.0", _TripledNorm),
        ("norms.1", _TripledNorm),
        ("norms.2", _TripledNorm),
        ("norms.3", _TripledNorm),
        ("mlp", _HalvedMlp),
        ("attention", _TurnedAttention),
    ],
)
def test_a_part_that_computes_something_of_its_own_is_called(
    kernels: Kernels, path: str, kind: type[torch.nn.Module]
) -> None:
    layer = layer_with(kernels, True)
    usual = Run(layer, kernels).all_steps()
    layer = layer_with(kernels, True)
    layer.get_submodule(path).__class__ = kind  # type: ignore[assignment]
    got = Run(layer, kernels).all_steps()
    use_kernels(layer, None)
    want = Run(layer, kernels).all_steps()
    for one, other, common in zip(got, want, usual, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        assert (one - common).abs().max() > 1e-3


@pytest.mark.parametrize(
    "path", ["norms.0", "norms.3", "mlp", "mlp.down_proj", "attention", "attention.qkv_proj"]
)
def test_a_hook_on_a_part_hears_of_every_pass(kernels: Kernels, path: str) -> None:
    layer = layer_with(kernels, True)
    run = Run(layer, kernels)
    before = run.all_steps()
    heard = []
    layer.get_submodule(path).register_forward_hook(lambda *_: heard.append(1))
    after = Run(layer, kernels).all_steps()
    assert len(heard) == len(after)
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
