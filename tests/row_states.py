"""Random states of rows and caches, for tests of rounds that are captured."""

from __future__ import annotations

import torch
from torch import Tensor

from looped_spec.adapter import ModelAdapter
from looped_spec.runtime.attention import SdpaBackend
from looped_spec.runtime.kv_cache import KVPool, blocks_for
from looped_spec.runtime.round_program import RoundProgram
from looped_spec.runtime.row_state import RowState

BLOCK_SIZE = 4
ROWS = 4
LENGTH = 40
WIDTH = blocks_for(LENGTH, BLOCK_SIZE)
CPU = torch.device("cpu")


def make_program(
    adapter: ModelAdapter, full_loops: int, device: torch.device = CPU
) -> RoundProgram:
    """A program over a cache of zeros, with every row unused."""
    pool = KVPool(adapter.kv_planes(full_loops), ROWS * WIDTH, BLOCK_SIZE, torch.float32, device)
    return RoundProgram(adapter, pool, SdpaBackend(), RowState(ROWS, WIDTH, device), full_loops)


def randomize(program: RoundProgram, batch_size: int, seed: int, room: int = 12) -> None:
    """Fill cache and rows with numbers of a seed: other positions, tables, seeds, parameters, and
    another choice of rows each time. Rows that sit out are filled too."""
    dice = torch.Generator().manual_seed(seed)
    state, vocab_size = program.state, program.adapter.geometry.vocab_size

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=dice)

    for pair in program.pool.planes:
        for pages in pair:
            pages.copy_(torch.randn(pages.shape, generator=dice))
    tables = (torch.randperm(ROWS * WIDTH, generator=dice) + 1).view(ROWS, WIDTH)
    state.tables[:ROWS] = tables.to(state.tables.device)
    positions = integers(1, LENGTH - room, ROWS)
    numbers = torch.stack(
        (
            integers(0, vocab_size, ROWS),
            positions,
            positions + integers(1, room, ROWS),
            integers(-(2**62), 2**62, ROWS),
            integers(0, 30, ROWS),
        )
    )
    state.numbers[:, :ROWS] = numbers.to(state.numbers.device)
    params = torch.stack(
        (
            torch.tensor([0.0, 0.9])[integers(0, 2, ROWS)],
            torch.rand(ROWS, generator=dice) * 0.9 + 0.1,
            torch.rand(ROWS, generator=dice) * 0.1,
        )
    )
    state.params[:, :ROWS] = params.to(state.params.device)
    state.empty_batch()
    rows = torch.randperm(ROWS, generator=dice)[:batch_size]
    state.batch[:batch_size] = rows.to(state.batch.device)


def everything(program: RoundProgram) -> list[Tensor]:
    """Copies of all that a round reads and writes beside the weights."""
    return [tensor.clone() for tensor in program.static_tensors]
