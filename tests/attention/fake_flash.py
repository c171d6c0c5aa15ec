"""What flash-attention and torch's `varlen_attn` say they do, in plain torch on the CPU.

The checks are those of their documentation and of their own argument checks; the kernels read past
a table without a word, which is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


class FlashRecord:
    """The functions, and the keyword arguments of every call of one.

    Attributes:
        dtypes: what queries may be; the real ones take halves alone.
        read_values: check values too, which tracing cannot.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...] = HALF, *, read_values: bool = True) -> None:
        self.calls: list[dict[str, Any]] = []
        self.dtypes = dtypes
        self.read_values = read_values

    def function(self, number: int) -> Callable[..., Any]:
        """The function of a version of flash-attention."""
        return {2: self.kvcache_2, 3: self.kvcache_3, 4: self.varlen_4}[number]

    def kvcache_2(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: int | Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        """`flash_attn.flash_attn_with_kvcache`, version 2.8."""
        assert k is None and v is None and rotary_cos is None and cache_batch_idx is None
        assert k_cache.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        return self._attend(
            q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, causal, num_splits
        )

    def kvcache_3(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cache_seqlens: int | Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        """`flash_attn_interface.flash_attn_with_kvcache`, version 3."""
        assert k is None and v is None
        return self._attend(
            q, k_cache, v_cache, page_table, cache_seqlens, softmax_scale, causal, num_splits
        )

    def varlen_4(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        seqused_k: Tensor | None = None,
        page_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_splits: int = 1,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """`flash_attn.cute.flash_attn_varlen_func`, version 4; it returns a pair."""
        assert cu_seqlens_q is None and cu_seqlens_k is None
        out = self._attend(q, k, v, page_table, seqused_k, softmax_scale, causal, num_splits)
        return out, None

    def varlen_attn(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: object = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: Tensor | None = None,
        block_table: Tensor | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """`torch.nn.attention.varlen.varlen_attn` of PyTorch 2.13."""
        assert block_table is not None and seqused_k is not None and cu_seq_k is None
        assert enable_gqa or query.shape[1] == key.shape[2]
        assert key.shape[1] % 256 == 0
        assert num_splits == 1, "parts of paged rows are mixed up in some releases"
        batch = block_table.shape[0]
        assert cu_seq_q.shape == (batch + 1,) and cu_seq_q.dtype == torch.int32
        assert isinstance(max_q, int) and query.shape[0] == batch * max_q
        assert max_k == block_table.shape[1] * key.shape[1]
        if self.read_values:
            assert cu_seq_q.tolist() == list(range(0, batch * max_q + 1, max_q))
        rows = query.view(batch, max_q, *query.shape[1:])
        causal = window_size == (-1, 0)
        out = self._attend(rows, key, value, block_table, seqused_k, scale, causal, num_splits)
        return out.reshape(query.shape)

    def _attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: Tensor | None,
        lengths: int | Tensor | None,
        scale: float | None,
        causal: bool,
        num_splits: int,
    ) -> Tensor:
        assert tables is not None and isinstance(lengths, Tensor)
        batch, rows, heads, head_dim = q.shape
        num_blocks, block_size, kv_heads, _ = k_cache.shape
        assert q.dtype in self.dtypes and q.dtype == k_cache.dtype == v_cache.dtype
        assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1
        assert k_cache.shape == v_cache.shape and head_dim <= 256 and head_dim % 8 == 0
        assert heads % kv_heads == 0
        assert tables.dtype == torch.int32 and tables.stride(-1) == 1
        assert lengths.dtype == torch.int32 and lengths.shape == (batch,)
        assert lengths.is_contiguous() and tables.shape[0] == batch
        assert isinstance(num_splits, int) and causal
        room = tables.shape[1] * block_size
        if self.read_values:
            assert int(lengths.min()) > 0 and int(lengths.max()) <= room, "read past a table"
            assert int(tables.min()) >= 0 and int(tables.max()) < num_blocks
        self.calls.append({"tables": tables, "lengths": lengths, "num_splits": num_splits})

        k, v = (
            pages[tables.long()].reshape(batch, room, kv_heads, head_dim).float()
            for pages in (k_cache, v_cache)
        )
        k, v = (part.repeat_interleave(heads // kv_heads, dim=2) for part in (k, v))
        scores = torch.einsum("bthd,bkhd->bhtk", q.float(), k)
        scores = scores * (head_dim**-0.5 if scale is None else scale)
        key, row = torch.arange(room), torch.arange(rows)
        # To the bottom right: the last row sees all of the length.
        last = (lengths[:, None] - rows + row)[:, None, :, None]
        weights = scores.masked_fill(key > last, -torch.inf).softmax(-1)
        out = torch.einsum("bhtk,bkhd->bthd", weights.nan_to_num(0.0), v)
        return out.to(q.dtype)
