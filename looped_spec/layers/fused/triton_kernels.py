"""What a layer does beside its matrix products, in Triton.

Imported only where Triton is installed. Each rounds where the plain layers do, so that in bfloat16
both give nearly always the same bits. With TRITON_INTERPRET=1 set before the import they run in
Triton's interpreter on the CPU, which is for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    out_ptr, x_ptr, residual_ptr, weight_ptr, size, eps, BLOCK: tl.constexpr, ADDS: tl.constexpr
):
    """Normalise one row of `size` numbers; with ADDS add it to the residual. Grid: rows."""
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    real = place < size
    x = tl.load(x_ptr + row + place, mask=real, other=0.0)
    numbers = x.to(tl.float32)
    normed = numbers * (1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / size + eps))
    weight = tl.load(weight_ptr + place, mask=real, other=0.0).to(tl.float32)
    out = (normed.to(x.dtype).to(tl.float32) * weight).to(x.dtype)
    if ADDS:
        residual = tl.load(residual_ptr + row + place, mask=real, other=0.0)
        out = (residual.to(tl.float32) + out.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row + place, out, mask=real)


@triton.jit
def _silu_mul(out_ptr, gate_up_ptr, size, BLOCK: tl.constexpr):
    """Gate a part of a row: silu(gate) * up. Grid: rows, parts."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    gate = tl.load(gate_up_ptr + 2 * row * size + place, mask=real, other=0.0)
    up = tl.load(gate_up_ptr + (2 * row + 1) * size + place, mask=real, other=0.0)
    number = gate.to(tl.float32)
    silu = (number / (1.0 + tl.exp(-number))).to(gate.dtype)
    out = (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    tl.store(out_ptr + row * size + place, out, mask=real)


@triton.jit
def _rotate(
    x_ptr,
    cos_ptr,
    sin_ptr,
    length,
    heads,
    row_stride,
    angle_stride_request,
    angle_stride_row,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotate one head of one row in place: channel i with i + HALF. Grid: rows * heads."""
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    place = tl.arange(0, BLOCK)
    real = place < HALF
    angle = (row // length) * angle_stride_request + (row % length) * angle_stride_row + place
    at = x_ptr + row * row_stride + head * (2 * HALF) + place
    low = tl.load(at, mask=real, other=0.0)
    high = tl.load(at + HALF, mask=real, other=0.0)
    cos = tl.load(cos_ptr + angle, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=real, other=0.0).to(tl.float32)
    # The second half of the angles is the first; the plain layer rounds x * cos before it adds.
    new_low = (low.to(tl.float32) * cos).to(low.dtype).to(tl.float32)
    new_high = (high.to(tl.float32) * cos).to(low.dtype).to(tl.float32)
    new_low -= high.to(tl.float32) * sin
    new_high += low.to(tl.float32) * sin
    tl.store(at, new_low.to(low.dtype), mask=real)
    tl.store(at + HALF, new_high.to(low.dtype), mask=real)


@triton.jit
def _write_pages(
    k_pages_ptr,
    v_pages_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    length,
    size,
    k_stride_request,
    k_stride_row,
    v_stride_request,
    v_stride_row,
    slot_stride_request,
    slot_stride_row,
    BLOCK: tl.constexpr,
):
    """Copy keys and values of one row, `size` numbers each, to its slot. Grid: rows, parts."""
    row = tl.program_id(0).to(tl.int64)
    request, place_in_request = row // length, row % length
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    slot = tl.load(
        slots_ptr + request * slot_stride_request + place_in_request * slot_stride_row
    ).to(tl.int64)
    k_at = k_ptr + request * k_stride_request + place_in_request * k_stride_row
    v_at = v_ptr + request * v_stride_request + place_in_request * v_stride_row
    k = tl.load(k_at + place, mask=real, other=0.0)
    v = tl.load(v_at + place, mask=real, other=0.0)
    tl.store(k_pages_ptr + slot * size + place, k, mask=real)
    tl.store(v_pages_ptr + slot * size + place, v, mask=real)


INTERPRETED = not isinstance(_rms_norm, triton.JITFunction)
"""Whether kernels run in Triton's interpreter, which wants tensors of the CPU."""

_PART = 1024


class TritonKernels:
    """The kernels as functions of tensors; where one cannot serve, the plain layer does."""

    def __deepcopy__(self, _: object) -> TritonKernels:
        return self

    @staticmethod
    def serves(x: Tensor) -> bool:
        """Tell whether `x` is a tensor that the kernels take."""
        return (x.is_cuda or INTERPRETED) and x.is_contiguous() and not torch.is_grad_enabled()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x / sqrt(mean(x ** 2) + eps) * weight over the last axis; x is contiguous."""
        return self._norm(x, x, weight, eps, adds=False)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return residual + rms_norm(x); both are contiguous."""
        return self._norm(residual, x, weight, eps, adds=True)

    @staticmethod
    def _norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, adds: bool) -> Tensor:
        out, size = torch.empty_like(x), x.shape[-1]
        block = triton.next_power_of_2(size)
        with torch.cuda.device_of(x):
            _rms_norm[(x.numel() // size,)](
                out, x, residual, weight, size, eps, BLOCK=block, ADDS=adds, num_warps=4
            )
        return out

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [..., n] of gate and up side by side ([..., 2 n], contiguous)."""
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], size))
        grid = (gate_up.numel() // (2 * size), triton.cdiv(size, _PART))
        with torch.cuda.device_of(gate_up):
            _silu_mul[grid](out, gate_up, size, BLOCK=_PART, num_warps=4)
        return out

    @staticmethod
    def rotate_(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `heads` heads of x ([B, T, all heads, head_dim], contiguous) in place.

        `cos` and `sin` are those of `RotaryAngles.cos_sin`, of equal strides.
        """
        batch, length, all_heads, head_dim = x.shape
        half = head_dim // 2
        with torch.cuda.device_of(x):
            _rotate[(batch * length * heads,)](
                x,
                cos,
                sin,
                length,
                heads,
                all_heads * head_dim,
                *cos.stride()[:2],
                HALF=half,
                BLOCK=triton.next_power_of_2(half),
                num_warps=1,
            )

    @staticmethod
    def write_pages(k_pages: Tensor, v_pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v ([B, T, kv_heads, head_dim], a row contiguous) to flat slots ([B, T]
        int64) of pages [blocks, block_size, kv_heads, head_dim]."""
        batch, length, kv_heads, head_dim = k.shape
        size = kv_heads * head_dim
        with torch.cuda.device_of(k):
            _write_pages[(batch * length, triton.cdiv(size, _PART))](
                k_pages,
                v_pages,
                k,
                v,
                slots,
                length,
                size,
                *k.stride()[:2],
                *v.stride()[:2],
                *slots.stride(),
                BLOCK=_PART,
                num_warps=4,
            )
