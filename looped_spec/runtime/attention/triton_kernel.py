"""The paged attention kernel in Triton, registered as an operator of torch.

Imported only where Triton is installed. With TRITON_INTERPRET=1 set before that, the kernel runs in
Triton's interpreter on the CPU, which is for tests.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from looped_spec.runtime.attention.tiles import Tiles

NUM_WARPS = 4
NUM_STAGES = 2


# Every value of these would otherwise be looked at, and some compiled for anew.
@triton.jit(do_not_specialize=["num_rows", "table_width", "table_stride", "position_stride"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    positions_ptr,
    out_ptr,
    sums_ptr,
    scale,
    num_rows,
    table_width,
    q_stride_request,
    q_stride_row,
    q_stride_head,
    page_stride_block,
    page_stride_slot,
    page_stride_head,
    table_stride,
    position_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend a tile of rows of one request, one key/value head, over one part of the context.

    A tile's rows are pairs (row of the request, query head of the group): keys and values are read
    once for all query heads that share them. The softmax is the running one of flash-attention
    (arXiv 2205.14135), in fp32 and to base 2; `scale` includes log2(e). Grid: requests * SPLITS,
    key/value heads, tiles.
    """
    request = (tl.program_id(0) // SPLITS).to(tl.int64)
    part = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(1)
    first = tl.program_id(2) * TILE_PAIRS
    kv_heads = tl.num_programs(1)

    pair = first + tl.arange(0, TILE_PAIRS)
    row = pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, TILE_DIM)
    q_at = q_ptr + request * q_stride_request + row[:, None] * q_stride_row
    real = (row[:, None] < num_rows) & (dim[None, :] < HEAD_DIM)
    q = tl.load(q_at + head[:, None] * q_stride_head + dim[None, :], mask=real, other=0.0)

    start = tl.load(positions_ptr + request * position_stride).to(tl.int32)
    length = start + tl.minimum((first + TILE_PAIRS - 1) // GROUP, num_rows - 1) + 1
    tiles = (length + TILE_KEYS - 1) // TILE_KEYS
    tiles_per_part = (tiles + SPLITS - 1) // SPLITS
    low = part * tiles_per_part * TILE_KEYS
    high = tl.minimum(low + tiles_per_part * TILE_KEYS, length)

    best = tl.full([TILE_PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_PAIRS], tl.float32)
    mixed = tl.zeros([TILE_PAIRS, TILE_DIM], tl.float32)
    for begin in range(low, high, TILE_KEYS):
        key = begin + tl.arange(0, TILE_KEYS)
        inside = key < high
        column = tl.minimum(key // BLOCK_SIZE, table_width - 1)
        block = tl.load(tables_ptr + request * table_stride + column, mask=inside, other=0)
        at = block * page_stride_block + (key % BLOCK_SIZE) * page_stride_slot
        at += kv_head * page_stride_head
        kept = inside[:, None] & (dim[None, :] < HEAD_DIM)
        k = tl.load(k_ptr + at[:, None] + dim[None, :], mask=kept, other=0.0)
        v = tl.load(v_ptr + at[:, None] + dim[None, :], mask=kept, other=0.0)
        if INTERPRETED:  # its products take the bits of bfloat16 for integers
            score = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32)), input_precision="ieee")
        else:
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = inside[None, :] & (key[None, :] <= start + row[:, None])
        score = tl.where(seen, score * scale, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        # A row may see nothing of its part: then all is -inf, and must not become -inf - -inf.
        base = tl.where(better == float("-inf"), 0.0, better)
        weight = tl.exp2(score - base[:, None])
        faded = tl.exp2(best - base)
        total = total * faded + tl.sum(weight, 1)
        rounded = weight.to(v.dtype)
        if INTERPRETED:
            new = tl.dot(rounded.to(tl.float32), v.to(tl.float32), input_precision="ieee")
        else:
            new = tl.dot(rounded, v, input_precision="ieee")
        mixed = mixed * faded[:, None] + new
        best = better

    total = tl.where(total == 0.0, 1.0, total)  # only where nothing was seen: best is -inf there
    mixed = mixed / total[:, None]
    # out is [B, T, heads, SPLITS, head_dim], sums [B, T, heads, SPLITS], both contiguous.
    slot = ((request * num_rows + row) * (kv_heads * GROUP) + head) * SPLITS + part
    tl.store(out_ptr + slot[:, None] * HEAD_DIM + dim[None, :], mixed, mask=real)
    if SPLITS > 1:
        tl.store(sums_ptr + slot, best + tl.log2(total), mask=row < num_rows)


@triton.jit
def _combine(
    parts_ptr,
    sums_ptr,
    out_ptr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Mix the parts of one row and head by the sums of their weights (log2). Grid: rows * heads."""
    slot = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    dim = tl.arange(0, TILE_DIM)
    kept = dim[None, :] < HEAD_DIM
    sums = tl.load(sums_ptr + slot * SPLITS + part)
    weight = tl.exp2(sums - tl.max(sums, 0))  # part 0 holds position 0, which every row sees
    at = (slot * SPLITS + part)[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(parts_ptr + at, mask=kept, other=0.0)
    mixed = tl.sum(parts * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out_ptr + slot * HEAD_DIM + dim, mixed, mask=dim < HEAD_DIM)


INTERPRETED = not isinstance(_attend, triton.JITFunction)
"""Whether kernels run in Triton's interpreter, which wants tensors of the CPU."""


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    num_splits: int,
) -> Tensor:
    """Attend rows over the pages of their requests; returns the shape of q.

    Args:
        q: [B, T, heads, head_dim]; its last axis is contiguous.
        k_pages: [blocks, block_size, kv_heads, head_dim], contiguous, of the dtype of q.
        v_pages: likewise.
        tables: [B, W] int64, its last axis contiguous; a position behind it counts to its last
            block.
        positions: [B, T] int64, consecutive; only the first of each request is read.
        scale: what the products of queries and keys are multiplied with.
        num_splits: parts that a context is read in at once, a power of 2.
    """
    batch, num_rows, heads, head_dim = q.shape
    block_size, kv_heads = k_pages.shape[1:3]
    group = heads // kv_heads
    tiles = Tiles.of(num_rows * group, head_dim, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts, sums = out, out
    if num_splits > 1:
        shape = (batch, num_rows, heads, num_splits)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    pair_tiles = triton.cdiv(num_rows * group, tiles.pairs)
    with torch.cuda.device_of(q):
        _attend[(batch * num_splits, kv_heads, pair_tiles)](
            q,
            k_pages,
            v_pages,
            tables,
            positions,
            parts,
            sums,
            scale * math.log2(math.e),
            num_rows,
            tables.shape[1],
            *q.stride()[:3],
            *k_pages.stride()[:3],
            tables.stride(0),
            positions.stride(0),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            SPLITS=num_splits,
            TILE_PAIRS=tiles.pairs,
            TILE_KEYS=tiles.keys,
            TILE_DIM=tiles.dim,
            INTERPRETED=INTERPRETED,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        if num_splits > 1:
            _combine[(batch * num_rows * heads,)](
                parts, sums, out, HEAD_DIM=head_dim, SPLITS=num_splits, TILE_DIM=tiles.dim
            )
    return out


def _shape_of_paged_attention(q: Tensor, *_: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


# An operator, so that tracing sees one call. By hand: `torch.library.custom_op` brings a dispatch
# through Python that costs more than the launch, and the import of torch's compiler.
_library = torch.library.Library("looped_spec", "FRAGMENT")
_library.define(
    "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor tables, Tensor positions, "
    "float scale, int num_splits) -> Tensor"
)
_library.impl("paged_attention", paged_attention, "CPU" if INTERPRETED else "CUDA")
torch.library.register_fake("looped_spec::paged_attention", _shape_of_paged_attention, lib=_library)
