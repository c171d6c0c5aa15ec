"""Rounds over random states, to compare ways of running them bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.runtime.attention import AttentionBackend, SdpaBackend
from looped_spec.runtime.kv_cache import TRASH_BLOCK, KVPool, blocks_for
from looped_spec.runtime.round_program import RoundProgram
from looped_spec.runtime.row_state import RowState


def make_program(
    adapter: ModelAdapter,
    full_loops: int,
    *,
    backend: AttentionBackend | None = None,
    num_rows: int = 4,
    block_size: int = 4,
    max_model_len: int = 40,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> RoundProgram:
    """Return the program of a round over a cache of zeros that holds all rows at full length."""
    where = torch.device(device)
    width = blocks_for(max_model_len, block_size)
    planes = adapter.kv_planes(full_loops)
    pool = KVPool(planes, num_rows * width, block_size, dtype, where)
    state = RowState(num_rows, width, where)
    return RoundProgram(adapter, pool, backend or SdpaBackend(), state, full_loops)


def randomize(program: RoundProgram, batch_size: int, seed: int, room: int = 12) -> None:
    """Fill cache and rows with numbers of a seed: other positions, tables, seeds, parameters, and
    another choice of rows each time.

    Rows that sit out are filled too. Every row has `room` positions behind its own at least, the
    limit somewhere among them.
    """
    dice = torch.Generator().manual_seed(seed)
    state, pool = program.state, program.pool
    num_rows, width = state.padding_row, state.tables.shape[1]
    state.empty_batch()

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=dice)

    for pair in pool.planes:
        for pages in pair:
            pages.copy_(torch.randn(pages.shape, generator=dice))
    tables = (torch.randperm(num_rows * width, generator=dice) + 1).view(num_rows, width)
    state.tables[:num_rows].copy_(tables)
    positions = integers(1, width * pool.block_size - room, num_rows)
    numbers = (
        integers(0, program.adapter.geometry.vocab_size, num_rows),
        positions,
        positions + integers(1, room, num_rows),
        integers(-(2**62), 2**62, num_rows),
        integers(0, 30, num_rows),
    )
    state.numbers[:, :num_rows].copy_(torch.stack(numbers))
    params = (
        torch.tensor([0.0, 0.9])[integers(0, 2, num_rows)],
        torch.rand(num_rows, generator=dice) * 0.9 + 0.1,
        torch.rand(num_rows, generator=dice) * 0.1,
    )
    state.params[:, :num_rows].copy_(torch.stack(params))
    state.batch[:batch_size].copy_(torch.randperm(num_rows, generator=dice)[:batch_size])


def everything(program: RoundProgram) -> list[Tensor]:
    """Return copies of all that a round reads and writes beside the weights, but for the trash
    block: where rows write to the same place of it, any of them may be the last."""
    pages = [pages[TRASH_BLOCK + 1 :] for pair in program.pool.planes for pages in pair]
    return [tensor.clone() for tensor in (*program.state.tensors, *pages)]
