"""What the device knows of each request between rounds: tensors whose addresses never change."""

from __future__ import annotations

import torch
from torch import Tensor

from looped_spec.runtime.kv_cache import TRASH_BLOCK
from looped_spec.runtime.sampler import SamplingTensors

Starts = tuple[Tensor, Tensor]
"""Newest token and its position, [B] int64 each."""


class RowState:
    """One row for each request that may run at once, and one behind them for padding.

    What stays the same while a request runs is written once, when it gets its row (`set_params`). A
    round reads which rows it is for from `batch`, and leaves their next token and position here for
    the round behind it; so the host need not know them to submit that one. The row of padding has a
    limit of 0: every position of it lies past its limit, in the trash block.

    Captured rounds know no other tensors. Eager rounds take the batch that the host has sent, and
    what the round before has left, as they are; these are written here when somebody needs them
    here (`flush`).

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
        self._sent: Tensor | None = None
        self._first: int | None = None
        self._gathered: tuple[Tensor, SamplingTensors] | None = None
        self._starts: Starts | None = None
        self._is_batch_here = self._are_starts_here = True

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.tables, self.numbers, self.params, self.batch

    def set_params(self, rows: Tensor, numbers: Tensor, params: Tensor) -> None:
        """Write what stays the same of requests that were given `rows` ([N] int64): limit, seed and
        top_k ([3, N] int64), temperature, top_p and min_p ([3, N] fp32)."""
        self._gathered = None
        self.numbers[2:].index_copy_(1, rows, numbers)
        self.params.index_copy_(1, rows, params)

    def sampling(self, rows: Tensor) -> tuple[Tensor, SamplingTensors]:
        """Return limits ([N] int64) and sampling parameters of `rows` ([N] int64)."""
        limits, seeds, top_k = self.numbers[2:].index_select(1, rows).unbind()
        temperature, top_p, min_p = self.params.index_select(1, rows).unbind()
        return limits, SamplingTensors(seeds, temperature, top_k, top_p, min_p)

    def set_batch(self, rows: Tensor, first: int | None, *, keep_starts: bool) -> None:
        """Make other `rows` ([B] int64) the batch; with `keep_starts` they start where rounds have
        left them. `first` is the first of rows that follow each other, else None."""
        if keep_starts:
            self.flush()
        self._sent, self._first, self._gathered, self._starts = rows, first, None, None
        self._is_batch_here, self._are_starts_here = False, keep_starts

    def set_starts(self, starts: Starts) -> None:
        """Let the rows of the batch start there."""
        self._starts, self._are_starts_here = starts, False

    def follow(self) -> None:
        """Let the next round start where the one before it ends, whatever that is.

        What is no token (`NOT_FINITE`) becomes 0: a round that is submitted before the host knows
        must have something to embed.
        """
        if self._starts is not None:
            token, position = self._starts
            self.set_starts((token.clamp(min=0), position))

    def flush(self) -> None:
        """Write everything to the tensors that have their places."""
        sent = self._sent
        if sent is not None and not self._is_batch_here:
            self.batch[: len(sent)].copy_(sent)
            self.batch[len(sent) :].fill_(self.padding_row)
        self._is_batch_here = True
        if sent is not None and self._starts is not None and not self._are_starts_here:
            token, position = self._starts
            starts = torch.stack((token.clamp(min=0), position))  # see `follow`
            self.numbers[:2].index_copy_(1, sent, starts)
        self._are_starts_here = True

    def moved(self) -> None:
        """Note that a captured round has moved the rows on."""
        self._starts = None

    def empty_batch(self) -> None:
        """Make every row of the batch padding."""
        self.flush()
        self._sent = self._starts = self._gathered = None
        self.batch.fill_(self.padding_row)

    def rows(self, size: int, width: int | None = None) -> BatchRows:
        """Return the first `size` rows of the batch, for a round that is not captured; of their
        tables the first `width` columns (None: all)."""
        sent = self._sent
        if sent is None:
            return self.static_rows(size, width, has_padding=False)
        if self._starts is None:
            token, position = self.numbers[:2].index_select(1, sent).unbind()
        else:
            token, position = self._starts
        if self._gathered is None:
            self._gathered = self.sampling(sent)
        limits, sampling = self._gathered
        tables = _columns(self.tables, width)
        if self._first is None:
            tables = tables.index_select(0, sent)
        else:  # as they lie there: wide tables of many rows take longer to copy than to read
            tables = tables.narrow(0, self._first, len(sent))
        return BatchRows(self, sent, token, position, limits, sampling, tables, is_live=True)

    def static_rows(
        self, size: int, width: int | None = None, *, has_padding: bool = True
    ) -> BatchRows:
        """Return `size` rows as `batch` names them, by operations on these tensors alone.

        With `has_padding` rows of padding are told from the others by their number, and count as
        zeros whatever stands in the state for them.
        """
        rows = self.batch[:size]
        numbers = self.numbers.index_select(1, rows)
        params = self.params.index_select(1, rows)
        padding: Tensor | None = None
        if has_padding:
            padding = rows == self.padding_row
            numbers = numbers.masked_fill(padding, 0)
            params = params.masked_fill(padding, 0.0)
        tokens, positions, limits, seeds, top_k = numbers.unbind()
        temperature, top_p, min_p = params.unbind()
        sampling = SamplingTensors(seeds, temperature, top_k, top_p, min_p)
        tables = _columns(self.tables, width).index_select(0, rows)
        return BatchRows(self, rows, tokens, positions, limits, sampling, tables, padding)


class BatchRows:
    """The rows of a batch, as one round sees them.

    Attributes:
        tokens: [B] int64, the newest token of each.
        positions: [B] int64, its position.
        limits: [B] int64.
        sampling: parameters and seeds.
        tables: [B, W'] int64.
    """

    def __init__(
        self,
        state: RowState,
        rows: Tensor,
        tokens: Tensor,
        positions: Tensor,
        limits: Tensor,
        sampling: SamplingTensors,
        tables: Tensor,
        padding: Tensor | None = None,
        *,
        is_live: bool = False,
    ) -> None:
        """Take what `RowState` has gathered: `padding` tells which rows are ([B] bool, None: no
        row is), `is_live` that tensors need not be in their places."""
        self.tokens, self.positions, self.limits = tokens, positions, limits
        self.sampling, self.tables = sampling, tables
        self._state, self._rows, self._padding = state, rows, padding
        self._is_live = is_live

    def advance(self, next_token: Tensor, next_position: Tensor) -> None:
        """Let the next round start there ([B] int64 each)."""
        if self._is_live:
            self._state.set_starts((next_token, next_position))
            return
        starts = torch.stack((next_token.clamp(min=0), next_position))  # see `RowState.follow`
        if self._padding is not None:
            starts = starts.masked_fill(self._padding, 0)
        self._state.numbers[:2].index_copy_(1, self._rows, starts)

    def without_padding(self, columns: Tensor) -> Tensor:
        """Return [B, N] `columns` with zeros in rows of padding."""
        if self._padding is None:
            return columns
        return columns.masked_fill(self._padding[:, None], 0)


def _columns(tables: Tensor, width: int | None) -> Tensor:
    return tables if width is None else tables[:, :width]
