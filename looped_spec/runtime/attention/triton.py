"""Our own kernel, for CUDA devices with Triton, which PyTorch's builds for them bring along."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looped_spec.runtime.attention.backend import AttentionBackend, AttentionNeeds, PagedRows
from looped_spec.runtime.attention.tiles import MAX_SPLITS, Tiles, choose_splits
from looped_spec.runtime.kv_cache import KVPool

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class PositionRows:
    """The tensors of a context as they are: the kernel reads tables [B, W] and first positions."""

    tables: Tensor
    positions: Tensor


class TritonBackend(AttentionBackend):
    """One paged kernel for decoding, verification and prefill; heads up to 256, blocks of any
    size."""

    name = "triton"

    def __init__(self, num_processors: int = 1, num_splits: int = 0) -> None:
        """Use a device of `num_processors` multiprocessors; `num_splits` as in
        `AttentionNeeds`."""
        import looped_spec.runtime.attention.triton_kernel  # noqa: F401  # defines the operator

        self._kernel = torch.ops.looped_spec.paged_attention.default
        self._num_processors = num_processors
        self._num_splits = num_splits

    @classmethod
    def unsupported_reason(cls, needs: AttentionNeeds) -> str | None:
        """Ask for Triton and a device; see `AttentionBackend.unsupported_reason`."""
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        wide = max(needs.head_dims, default=0)
        if wide > MAX_HEAD_DIM:
            return f"it takes heads of up to {MAX_HEAD_DIM}, not of {wide}"
        splits = needs.num_splits
        if splits > MAX_SPLITS or splits & (splits - 1):
            return f"it reads a context in a power of 2 up to {MAX_SPLITS} parts, not in {splits}"
        try:
            from looped_spec.runtime.attention.triton_kernel import INTERPRETED
        except Exception as error:  # a Triton of another time fails in its own ways
            return f"Triton does not import: {type(error).__name__}: {error}"
        if INTERPRETED and needs.device.type != "cpu":
            return "TRITON_INTERPRET is set, which is for tests on the CPU"
        if needs.device.type != "cuda" and not INTERPRETED:
            return "it needs a CUDA device"
        if needs.device.type == "cuda" and needs.capability < 8:
            return f"it needs compute capability 8.0 or higher, not {needs.capability}.x"
        return None

    @classmethod
    def create(cls, needs: AttentionNeeds) -> TritonBackend:
        """Ask the device for its size; see `AttentionBackend.create`."""
        if needs.device.type != "cuda":
            return cls(num_splits=needs.num_splits)
        properties = torch.cuda.get_device_properties(needs.device)
        return cls(properties.multi_processor_count, needs.num_splits)

    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> PositionRows:
        """Keep tables and positions."""
        return PositionRows(rows.block_tables, positions)

    def column(self, prepared: Any, index: int) -> PositionRows:
        """Keep one row of each request: a view."""
        return PositionRows(prepared.tables, prepared.positions[:, index : index + 1])

    def select(self, prepared: Any, requests: Tensor) -> PositionRows:
        """Keep some of the requests."""
        return PositionRows(prepared.tables[requests], prepared.positions[requests])

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Run the kernel; see `AttentionBackend.attend`."""
        if q.stride(-1) != 1:
            q = q.contiguous()
        head_dim = q.shape[-1]
        splits = self._num_splits or self._choose_splits(q, k_pages, prepared)
        attended: Tensor = self._kernel(
            q,
            k_pages,
            v_pages,
            prepared.tables,
            prepared.positions,
            head_dim**-0.5 if scale is None else scale,
            splits,
        )
        return attended

    def _choose_splits(self, q: Tensor, k_pages: Tensor, prepared: PositionRows) -> int:
        batch, num_rows, heads, head_dim = q.shape
        block_size, kv_heads = k_pages.shape[1:3]
        num_pairs = num_rows * heads // kv_heads
        pair_tiles = -(-num_pairs // Tiles.of(num_pairs, head_dim, q.dtype).pairs)
        num_keys = prepared.tables.shape[1] * block_size
        return choose_splits(
            num_pairs, batch * kv_heads * pair_tiles, num_keys, self._num_processors
        )
