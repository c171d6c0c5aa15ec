"""The Triton kernels of layers against the plain layers that they stand for: in Triton's
interpreter (TRITON_INTERPRET=1), or on a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from looped_spec.layers.mlp import SwiGLU
from looped_spec.layers.native import use_kernels
from looped_spec.layers.norm import RMSNorm
from looped_spec.layers.rotary import RotaryAngles, apply_rotary

pytest.importorskip("triton", reason="Triton is not installed")
fused = pytest.importorskip("looped_spec.layers.fused.triton_kernels")
DEVICE = "cpu" if fused.INTERPRETED else "cuda"
if not fused.INTERPRETED and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET is not set, and there is no GPU", allow_module_level=True)

# fp32: sums of some hundred terms in another order. bf16: up to three roundings, where the plain
# layers round too; but Triton's interpreter cuts bits off, so each may differ by a last bit.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 3 * 2**-7}
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype)[6:])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(DEVICE, dtype)


def check(got: Tensor, want: Tensor) -> None:
    """Compare, relative to the largest of the numbers."""
    assert got.dtype == want.dtype
    limit = TOLERANCES[want.dtype] * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(got.float(), want.float(), atol=limit, rtol=0)


@pytest.fixture
def kernels() -> Any:
    return fused.TritonKernels()


@each_dtype
@pytest.mark.parametrize("size", [6, 64, 90])
@torch.no_grad()
def test_a_norm_is_the_plain_one(kernels: Any, size: int, dtype: torch.dtype) -> None:
    norm = RMSNorm(size, 1e-6).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(random(size, seed=1))
    x, residual = random(3, 2, size, dtype=dtype), random(3, 2, size, seed=2, dtype=dtype)
    plain, added = norm(x), norm.added(residual, x)
    assert use_kernels(norm, kernels) == 1
    check(norm(x), plain)
    check(norm.added(residual, x), added)


@each_dtype
@torch.no_grad()
def test_a_feed_forward_layer_is_the_plain_one(kernels: Any, dtype: torch.dtype) -> None:
    layer = SwiGLU(16, 1100).to(DEVICE, dtype).requires_grad_(False)
    x = 3 * random(2, 1, 16, dtype=dtype)
    gate, up = layer.gate_up_proj(x).chunk(2, dim=-1)
    plain, inner = layer(x), torch.nn.functional.silu(gate) * up
    check(kernels.silu_mul(layer.gate_up_proj(x)), inner)
    use_kernels(layer, kernels)
    check(layer(x), plain)


@each_dtype
@torch.no_grad()
def test_a_rotation_is_the_plain_one_and_leaves_the_values(
    kernels: Any, dtype: torch.dtype
) -> None:
    x = random(2, 3, 4, 10, dtype=dtype)
    positions = torch.arange(6, device=DEVICE).view(2, 3) * 7
    cos, sin = RotaryAngles(10, 1e4).cos_sin(positions, dtype)
    out = x.clone()
    kernels.rotate_(out, 3, cos, sin)
    check(out[:, :, :3], apply_rotary(x[:, :, :3], cos, sin))
    assert torch.equal(out[:, :, 3:], x[:, :, 3:])
    column = x[:, 2:3].contiguous()  # its angles are a part of those of more rows
    kernels.rotate_(column, 3, cos[:, 2:3], sin[:, 2:3])
    assert torch.equal(column, out[:, 2:3])


@each_dtype
@torch.no_grad()
def test_keys_and_values_are_written_where_the_plain_write_puts_them(
    kernels: Any, dtype: torch.dtype
) -> None:
    qkv = random(2, 3, 7, 600, dtype=dtype)
    k, v = qkv[:, :, 3:5], qkv[:, :, 5:]
    slots = torch.tensor([[3, 9, 4], [0, 8, 1]], device=DEVICE)
    got = [torch.zeros(3, 4, 2, 600, dtype=dtype, device=DEVICE) for _ in range(2)]
    kernels.write_pages(*got, slots, k, v)
    for pages, rows in zip(got, (k, v), strict=True):
        want = torch.zeros_like(pages)
        want.view(-1, 2, 600)[slots.flatten()] = rows.reshape(-1, 2, 600)
        assert torch.equal(pages, want)


@torch.no_grad()
def test_what_is_not_finite_stays_so(kernels: Any) -> None:
    x = random(2, 8)
    x[0, 3] = float("nan")
    normed = kernels.rms_norm(x, torch.ones(8, device=DEVICE), 1e-6)
    assert normed[0].isnan().all() and normed[1].isfinite().all()
    assert kernels.silu_mul(x).isnan().tolist() == [[False] * 3 + [True], [False] * 4]
