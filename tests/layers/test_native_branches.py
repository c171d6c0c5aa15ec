"""Branches of a layer in one call: the bits of their pieces, and where they do not serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from looped_spec.layers.attention import RotaryAttention
from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.native import BuildError, Kernels, LinearKernels, use_kernels
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.packed import TiledHalves, TiledPacked, tiles_of, use_packed
from looped_spec.layers.rotary import RotaryAngles

SIZE, INNER, HEADS, KV_HEADS, HEAD_DIM = 48, 90, 4, 2, 10
# fp32, other orders of a sum of some dozens of products of numbers about 1
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    try:
        return Kernels()
    except BuildError as error:
        pytest.skip(f"the kernels do not build here: {error}")


class Context:
    """Attention that mixes what it gets, so that each of its inputs counts."""

    def attend(self, plane: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = (k + 2 * v).repeat_interleave(HEADS // KV_HEADS, dim=2)
        return (q + plane * wide).transpose(1, 2).contiguous().transpose(1, 2)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def branches(seed: int, with_after: bool) -> dict[str, Any]:
    """A feed-forward branch and one of attention as functions of x [B, T, SIZE], and the parts."""
    mlp = SwiGLU(SIZE, INNER)
    attention = RotaryAttention(SIZE, HEADS, KV_HEADS, HEAD_DIM)
    norms = [RMSNorm(SIZE, 1e-6), RMSNorm(SIZE, 1e-3)]
    parts = torch.nn.ModuleList([mlp, attention, *norms]).requires_grad_(False)
    for number, parameter in enumerate(parts.parameters()):
        parameter.copy_(0.25 * numbers(*parameter.shape, seed=seed + number))
    after = norms[1] if with_after else None
    angles = RotaryAngles(HEAD_DIM, 1e4)
    context: Any = Context()

    def attend(x: Tensor) -> Tensor:
        positions = 3 + torch.arange(x.shape[1]).expand(x.shape[0], -1)
        rotary = angles.cos_sin(positions, x.dtype)
        return attention.branch(x, rotary, 2, context, norms[0], after)

    return {"mlp": lambda x: mlp.branch(x, norms[0], after), "attention": attend, "parts": parts}


@pytest.mark.parametrize("with_after", [True, False])
@pytest.mark.parametrize("kinds", [(TiledHalves, TiledHalves), (TiledHalves, TiledPacked)])
@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_a_branch_in_one_call_is_its_pieces_bit_by_bit(
    kernels: Kernels,
    name: str,
    kinds: tuple[type[TiledPacked], type[TiledPacked]],
    with_after: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = branches(7, with_after)
    shapes = [(1, 1), (3, 1), (2, 5), (1, 40)]
    xs = [numbers(*shape, SIZE, seed=shape[1]) for shape in shapes]
    with torch.no_grad():
        plain = [made[name](x) for x in xs]
        use_kernels(made["parts"], kernels)
        for part in made["parts"][:2]:
            for layer, kind in zip(part.children(), kinds, strict=True):
                packed = kind.of(layer.weight)
                assert packed is not None
                use_packed(layer, packed)
        calls = []
        for entry in ("gated_branch", "open_attention", "close_branch"):
            method = getattr(LinearKernels, entry)

            def watched(*args: Any, call: Any = method, entry: str = entry) -> Any:
                calls.append(entry)
                return call(*args)

            monkeypatch.setattr(LinearKernels, entry, watched)
        got = [made[name](x) for x in xs]
        want = ["gated_branch"] if name == "mlp" else ["open_attention", "close_branch"]
        assert calls == want * len(xs)
        monkeypatch.setattr(f"looped_spec.layers.{name}.tiles_of", lambda _: None)
        pieces = [made[name](x) for x in xs]
    for one, other, expected in zip(got, pieces, plain, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_weights_that_others_keep_have_no_tiles(kernels: Kernels) -> None:
    layer = torch.nn.Linear(SIZE, SIZE).requires_grad_(False)
    assert tiles_of(layer) is None
    packed = TiledPacked.of(layer.weight)
    assert packed is not None
    use_packed(layer, packed)
    assert tiles_of(layer) is None, "a bias is added by the layer"
    made = branches(3, True)
    use_kernels(made["parts"], kernels)
    x = numbers(1, 2, SIZE, seed=0)
    assert made["mlp"](x.clone().requires_grad_()).requires_grad
