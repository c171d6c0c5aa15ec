"""The flash-attention packages, on block tables.

Versions 2 and 3 have `flash_attn_with_kvcache`, version 4 has `flash_attn_varlen_func`, which also
takes rows [B, T, heads, head_dim] with a length per request. All three align causality to the
bottom right and take keys that are in the cache already, so decoding (T = 1), verification
(T = K + 1) and prefill are one call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looped_spec.runtime.attention.backend import AttentionBackend, AttentionNeeds, PagedRows
from looped_spec.runtime.attention.lengths import LengthRows
from looped_spec.runtime.kv_cache import KVPool


@dataclass(frozen=True)
class FlashVersion:
    """One of the packages: where its function is, how its arguments are called, what it can do.

    Attributes:
        number: 2, 3 or 4.
        module: where the function is imported from.
        function: its name there.
        tables: argument that takes the block tables.
        lengths: argument that takes the lengths.
        block_multiple: a block's tokens must be a multiple of this.
        default_block_size: a block's tokens where the user asks for no size.
        max_head_dim: largest head by major compute capability; what is not in it has no kernel
            for block tables.
        splits: major compute capabilities where a context can be read in several parts.
    """

    number: int
    module: str
    function: str
    tables: str
    lengths: str
    block_multiple: int
    default_block_size: int
    max_head_dim: dict[int, int]
    splits: frozenset[int]

    def unsupported_reason(self, needs: AttentionNeeds) -> str | None:
        """Say why this version cannot serve `needs`, or None."""
        limit = self.max_head_dim.get(needs.capability)
        if limit is None:
            return f"has no kernel for compute capability {needs.capability}.x"
        wrong = [dim for dim in sorted(needs.head_dims) if dim % 8 or dim > limit]
        if wrong:
            return f"wants heads of a multiple of 8 up to {limit}, not of {wrong[0]}"
        if needs.block_size is not None and needs.block_size % self.block_multiple:
            return (
                f"wants a block_size that is a multiple of {self.block_multiple}, "
                f"not {needs.block_size}"
            )
        try:
            self.load()
        except Exception as error:  # a build for another PyTorch fails in its own ways
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and f"{self.module}.".startswith(f"{missing}."):
                return f"is not installed: there is no module {missing}"
            return f"does not import: {type(error).__name__}: {error}"
        return None

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return function


FLASH_2 = FlashVersion(
    number=2,
    module="flash_attn",
    function="flash_attn_with_kvcache",
    tables="block_table",
    lengths="cache_seqlens",
    block_multiple=256,
    default_block_size=256,
    max_head_dim={8: 256, 9: 256, 10: 256, 11: 256, 12: 256},
    splits=frozenset({8, 9, 10, 11, 12}),
)
FLASH_3 = FlashVersion(
    number=3,
    module="flash_attn_interface",
    function="flash_attn_with_kvcache",
    tables="page_table",
    lengths="cache_seqlens",
    block_multiple=1,
    default_block_size=16,
    max_head_dim={9: 256},
    splits=frozenset({9}),
)
FLASH_4 = FlashVersion(
    number=4,
    module="flash_attn.cute",
    function="flash_attn_varlen_func",
    tables="page_table",
    lengths="seqused_k",
    block_multiple=1,
    default_block_size=16,
    max_head_dim={9: 256, 10: 128, 11: 128},
    splits=frozenset({10, 11}),
)

_PREFERENCE = {9: (FLASH_3, FLASH_2, FLASH_4)}
"""By major compute capability. On Hopper version 4 comes last: it reads a long context in one
part there, and few rows then leave most of the device idle."""
_OTHERWISE = (FLASH_4, FLASH_2)


class FlashAttnBackend(AttentionBackend):
    """The best version of flash-attention that is installed and can serve the model."""

    name = "flash_attn"

    def __init__(
        self, version: FlashVersion, function: Callable[..., Any], num_splits: int
    ) -> None:
        """Call `function` of `version`; `num_splits` as in `AttentionNeeds`."""
        self.version = version
        self.default_block_size = version.default_block_size
        self._function = function
        self._num_splits = num_splits

    @classmethod
    def unsupported_reason(cls, needs: AttentionNeeds) -> str | None:
        """Ask every version; see `AttentionBackend.unsupported_reason`."""
        if needs.device.type != "cuda":
            return "it needs a CUDA device"
        if needs.dtype not in (torch.float16, torch.bfloat16):
            name = str(needs.dtype).removeprefix("torch.")
            return f"it computes in bfloat16 and float16, not in {name}"
        reasons = []
        for version in _versions(needs):
            reason = version.unsupported_reason(needs)
            if reason is None:
                return None
            reasons.append(f"version {version.number} {reason}")
        return "; ".join(reasons)

    @classmethod
    def create(cls, needs: AttentionNeeds) -> FlashAttnBackend:
        """Take the first version that can; see `AttentionBackend.create`."""
        version = next(v for v in _versions(needs) if v.unsupported_reason(needs) is None)
        num_splits = needs.num_splits if needs.capability in version.splits else 1
        return cls(version, version.load(), num_splits)

    @property
    def description(self) -> str:
        """The name with the version."""
        return f"{self.name} {self.version.number}"

    def prepare(self, positions: Tensor, rows: PagedRows, pool: KVPool) -> LengthRows:
        """Convert tables and positions."""
        return LengthRows.of(positions, rows, pool.block_size)

    def column(self, prepared: Any, index: int) -> LengthRows:
        """Keep one row of each request."""
        kept: LengthRows = prepared.column(index)
        return kept

    def select(self, prepared: Any, requests: Tensor) -> LengthRows:
        """Keep some of the requests."""
        kept: LengthRows = prepared.select(requests)
        return kept

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, prepared: Any, scale: float | None
    ) -> Tensor:
        """Call the package; see `AttentionBackend.attend`."""
        arguments = {self.version.tables: prepared.tables, self.version.lengths: prepared.last}
        out = self._function(
            q,
            k_pages,
            v_pages,
            softmax_scale=scale,
            causal=True,
            num_splits=self._num_splits,
            **arguments,
        )
        attended: Tensor = out[0] if isinstance(out, tuple) else out  # some return the lse too
        return attended


def _versions(needs: AttentionNeeds) -> tuple[FlashVersion, ...]:
    return _PREFERENCE.get(needs.capability, _OTHERWISE)
