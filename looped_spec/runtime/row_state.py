"""What the device knows of each request between rounds: tensors whose addresses never change."""

from __future__ import annotations

import torch
from torch import Tensor

from looped_spec.runtime.kv_cache import TRASH_BLOCK
from looped_spec.runtime.sampler import SamplingTensors


class RowState:
    """One row for each request that may run at once, and one behind them for padding.

    A round reads which rows it is for from `batch`, and leaves their next token and position here
    for the round behind it; so the host need not know them to submit that one. The row of padding
    has a limit of 0: every position of it lies past its limit, in the trash block.

    Attributes:
        tables: [R + 1, W] int64, block tables.
        numbers: [5, R + 1] int64: newest token, its position, limit (positions from there on go to
            the trash block), seed, top_k.
        params: [3, R + 1] fp32: temperature, top_p, min_p.
        batch: [R] int64, the rows of a batch in order, padding behind them.
        padding_row: R.
    """

    def __init__(self, num_rows: int, table_width: int, device: torch.device) -> None:
        self.padding_row = num_rows
        size = num_rows + 1
        self.tables = torch.full((size, table_width), TRASH_BLOCK, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(5, size, dtype=torch.int64, device=device)
        self.params = torch.zeros(3, size, dtype=torch.float32, device=device)
        self.batch = torch.full((num_rows,), num_rows, dtype=torch.int64, device=device)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.tables, self.numbers, self.params, self.batch

    def write_batch(self, rows: Tensor, numbers: Tensor, params: Tensor) -> None:
        """Make `rows` ([B] int64) the batch; their limits, seeds and top_k are `numbers` ([3, B]),
        temperatures, top_p and min_p are `params` ([3, B])."""
        self.numbers[2:].index_copy_(1, rows, numbers)
        self.params.index_copy_(1, rows, params)
        self.batch[: len(rows)].copy_(rows)
        self.batch[len(rows) :].fill_(self.padding_row)

    def write_starts(self, starts: Tensor) -> None:
        """Let the rows of the batch start from `starts` ([2, B]: token and position)."""
        self.numbers[:2].index_copy_(1, self.batch[: starts.shape[1]], starts)

    def empty_batch(self) -> None:
        """Make every row of the batch padding."""
        self.batch.fill_(self.padding_row)


class BatchRows:
    """The rows of a batch, gathered for one round.

    Attributes:
        tokens: [B] int64, the newest token of each.
        positions: [B] int64, its position.
        limits: [B] int64.
        sampling: parameters and seeds.
        tables: [B, W'] int64.
    """

    def __init__(
        self, state: RowState, size: int, width: int | None = None, *, has_padding: bool
    ) -> None:
        """Gather `size` rows, and the first `width` columns of their tables (None: all).

        With `has_padding` rows of padding are told from the others by their number, and count as
        zeros whatever stands in the state for them.
        """
        self._state = state
        self._rows = state.batch[:size]
        numbers = state.numbers.index_select(1, self._rows)
        params = state.params.index_select(1, self._rows)
        self._is_padding: Tensor | None = None
        if has_padding:
            self._is_padding = self._rows == state.padding_row
            numbers = numbers.masked_fill(self._is_padding, 0)
            params = params.masked_fill(self._is_padding, 0.0)
        self.tokens, self.positions, self.limits, seeds, top_k = numbers.unbind()
        temperature, top_p, min_p = params.unbind()
        self.sampling = SamplingTensors(seeds, temperature, top_k, top_p, min_p)
        tables = state.tables if width is None else state.tables[:, :width]
        self.tables = tables.index_select(0, self._rows)

    def advance(self, next_token: Tensor, next_position: Tensor) -> None:
        """Let the next round start there ([B] int64 each).

        A token that is no token (`NOT_FINITE`) becomes 0: a round that was submitted before the
        host knew must have something to embed.
        """
        starts = torch.stack((next_token.clamp(min=0), next_position))
        if self._is_padding is not None:
            starts = starts.masked_fill(self._is_padding, 0)
        self._state.numbers[:2].index_copy_(1, self._rows, starts)

    def without_padding(self, columns: Tensor) -> Tensor:
        """Return [B, N] `columns` with zeros in rows of padding."""
        if self._is_padding is None:
            return columns
        return columns.masked_fill(self._is_padding[:, None], 0)
