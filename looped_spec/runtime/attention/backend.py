"""What an attention backend is: attention of new rows over the pages of their own requests."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from looped_spec.adapter import KVPlane
from looped_spec.layers.native import NativeRows
from looped_spec.options import EngineOptions
from looped_spec.runtime.kv_cache import KVPool


class Span(NamedTuple):
    """Where the host knows a request to stand.

    Attributes:
        position: of its first row.
        capacity: tokens that its blocks hold.
        block: its first block where all of them follow each other, else None.
    """

    position: int
    capacity: int
    block: int | None


@dataclass(frozen=True)
class PagedRows:
    """Which requests the rows of a call belong to.

    Attributes:
        block_tables: [B, W] int64, the blocks of each request in order; unused columns hold the
            trash block.
        limits: [B] int64, positions from here on write to the trash block.
        seeds: [B] int64, the requests' seeds.
        spans: what the host knows of each request; empty where it does not, as in a round that is
            captured.
    """

    block_tables: Tensor
    limits: Tensor
    seeds: Tensor
    spans: Sequence[Span] = ()


class PageWriter(Protocol):
    """Writes rows of keys and values to pages."""

    def write_pages(
        self, k_pages: Tensor, v_pages: Tensor, slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write k and v ([B, T, kv_heads, head_dim], a row contiguous) to flat slots ([B, T]
        int64)."""
        ...


@dataclass(frozen=True)
class AttentionNeeds:
    """What a model, its device and the options ask of a backend.

    Attributes:
        device: where the cache lies.
        dtype: of the cache and of the queries.
        head_dims: sizes of the heads of all KV planes.
        block_size: tokens per block that were asked for, None to take the backend's.
        num_splits: parts that a kernel may read a long context in at once; 0 lets it choose, 1
            makes the bits of a row independent of how many requests share its batch.
    """

    device: torch.device
    dtype: torch.dtype
    head_dims: frozenset[int]
    block_size: int | None = None
    num_splits: int = 0

    @classmethod
    def of(
        cls,
        options: EngineOptions,
        planes: Iterable[KVPlane],
        device: torch.device,
        dtype: torch.dtype,
    ) -> AttentionNeeds:
        """Gather them from the options and the planes of a model."""
        head_dims = frozenset(plane.head_dim for plane in planes)
        return cls(device, dtype, head_dims, options.block_size, options.attention_num_splits)

    @property
    def capability(self) -> int:
        """Major compute capability of a CUDA device (9 is Hopper), 0 for the CPU."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.get_device_capability(self.device)[0]


class AttentionBackend(ABC):
    """Attention of new rows over the pages of their own requests.

    A position sees itself and all before it. The positions of one request are consecutive, so its
    first says where all its rows stand. Nothing here reads a tensor on the host.
    """

    name: ClassVar[str]
    default_block_size: int = 16
    """Tokens per block where the user asks for no size."""
    cost_follows_width: ClassVar[bool] = False
    """Whether time grows with the width of the block tables, not with the live lengths alone."""
    fused: PageWriter | None = None
    """Writes keys and values in one kernel."""

    def wants_spans(self, device: torch.device) -> bool:
        """Whether it makes use of `PagedRows.spans` on this device."""
        return False

    def native_rows(self, prepared: Any, slots: Tensor, pool: KVPool) -> NativeRows | None:
        """Return prepared rows, which write to `slots` ([B, T] int64), for layers in one call of
        our own kernels; None where it does not attend with these."""
        return None

    def for_engine(self) -> Self:
        """Return one for another engine: what it keeps from call to call is its own."""
        return copy.copy(self)

    def context_of(self, lengths: Sequence[int]) -> int:
        """Return the context that stands for those of some requests where rounds are told apart by
        what they take: their mean, rounded down."""
        return sum(lengths) // len(lengths)

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, needs: AttentionNeeds) -> str | None:
        """Say why this backend cannot serve `needs`, or None; asked before anything is
        allocated."""

    @classmethod
    @abstractmethod
    def create(cls, needs: AttentionNeeds) -> AttentionBackend:
        """Return the backend for `needs`, which it supports."""

    @property
    def description(self) -> str:
        """What to call it in a log line."""
        return self.name

    @abstractmethod
    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> Any:
        """Compute what all planes share, for rows at `positions` ([B, T] int64): called once per
        context."""

    @abstractmethod
    def column(self, prepared: Any, index: int) -> Any:
        """Return what `prepare` would give for row `index` of each request alone."""

    @abstractmethod
    def select(self, prepared: Any, requests: Tensor) -> Any:
        """Return what `prepare` would give for some of the requests ([N] int64) alone."""

    def write(self, pool: KVPool, plane: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v ([B, T, kv_heads, head_dim]) into a plane, at flat slots ([B, T] int64)."""
        if self.fused is not None and k[0, 0].is_contiguous() and v[0, 0].is_contiguous():
            self.fused.write_pages(*pool.planes[plane], slots, k, v)
            return
        pool.write(plane, slots.reshape(-1), k, v)

    @abstractmethod
    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Attend q ([B, T, heads, head_dim]) over pages [num_blocks, block_size, kv_heads,
        head_dim].

        The keys and values of the rows themselves are in the pages already. The default scale is
        head_dim ** -0.5.
        """
