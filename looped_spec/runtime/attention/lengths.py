"""What the kernels that take block tables and lengths have in common: flash-attention's and
torch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from looped_spec.runtime.attention.backend import PagedRows
from looped_spec.runtime.kv_cache import TRASH_BLOCK, blocks_for


@dataclass(frozen=True)
class LengthRows:
    """Block tables and lengths of B requests with T rows each, as such kernels want them.

    They align causality to the bottom right: of T rows over a length of L keys, row t sees keys
    0 to L - T + t. With L one more than the last row's position, that is its own position, since
    the positions of a request are consecutive.

    Attributes:
        tables: [B, W'] int32, contiguous; wide enough for the last row of every request, as the
            kernels check no bounds: positions past a request's table lie in trash blocks.
        lengths: [T, B] int32, one more than the position of each row; contiguous, so that a row of
            it is too.
    """

    tables: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, positions: Tensor, rows: PagedRows, block_size: int) -> LengthRows:
        """Convert positions ([B, T] int64) and tables; the one row of T = 1 is within its
        table."""
        past = blocks_for(positions.shape[1] - 1, block_size)
        tables = rows.block_tables.to(torch.int32)
        if past:
            tables = F.pad(tables, (0, past), value=TRASH_BLOCK)
        return cls(tables.contiguous(), (positions.T + 1).to(torch.int32).contiguous())

    def column(self, index: int) -> LengthRows:
        """Keep row `index` of each request: two views."""
        return LengthRows(self.tables, self.lengths[index : index + 1])

    def select(self, requests: Tensor) -> LengthRows:
        """Keep some of the requests ([N] int64)."""
        return LengthRows(self.tables[requests], self.lengths[:, requests])

    @property
    def last(self) -> Tensor:
        """How many keys the last row of each request sees: [B] int32."""
        return self.lengths[-1]
