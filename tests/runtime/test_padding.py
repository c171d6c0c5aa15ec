"""Rows of padding change nothing, whatever stands in the state for them."""

from __future__ import annotations

import pytest
import torch
from toys import shared_toy

from looped_spec.control.plan import Candidate
from looped_spec.runtime.kv_cache import TRASH_BLOCK
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.sampler import SamplingMode
from looped_spec.testing.rounds import make_program, randomize

LOOPS = 3
ROWS = 4
BLOCK_SIZE = 4
CHOICES = [(0, 0), (3, 2)]


@pytest.mark.parametrize(("k", "d"), CHOICES)
@pytest.mark.parametrize("mode", list(SamplingMode))
@torch.inference_mode()
def test_poisoned_padding_gives_what_clean_padding_gives(
    k: int, d: int, mode: SamplingMode
) -> None:
    clean, poisoned = (make_program(shared_toy(full_loops=LOOPS), LOOPS) for _ in range(2))
    for seed in range(3):
        for program in (clean, poisoned):
            randomize(program, 2, seed)
        state = poisoned.state
        padding = state.padding_row
        # A token, position, limit, seed and parameters of its own, over the blocks of real rows.
        state.numbers[:, padding] = torch.tensor([7, 5, 30, 2**40 + seed, 3])
        state.params[:, padding] = torch.tensor([0.9, 0.5, 0.05])
        state.tables[padding] = state.tables[state.batch[0]]
        shape = RoundShape.of(ROWS, Candidate(k, d), mode)
        want, got = (program(shape, has_padding=True) for program in (clean, poisoned))
        assert torch.equal(want, got)
        for pairs in zip(clean.pool.planes, poisoned.pool.planes, strict=True):
            for one, other in zip(*pairs, strict=True):
                assert torch.equal(one[TRASH_BLOCK + 1 :], other[TRASH_BLOCK + 1 :])
        assert torch.equal(clean.state.numbers[:, :ROWS], poisoned.state.numbers[:, :ROWS])


@pytest.mark.parametrize(("k", "d"), CHOICES)
@torch.inference_mode()
def test_padding_writes_to_the_trash_block_and_stays_where_it_is(k: int, d: int) -> None:
    program = make_program(shared_toy(full_loops=LOOPS), LOOPS)
    randomize(program, 0, seed=1)
    before = [tensor.clone() for tensor in program.static_tensors]
    shape = RoundShape.of(ROWS, Candidate(k, d), SamplingMode.FILTERED)
    for _ in range(2):
        numbers = program(shape, has_padding=True)
        assert not numbers.any()
    for old, new in zip(before, program.static_tensors, strict=True):
        if old.dim() == 4:  # pages
            assert old.shape[1] == BLOCK_SIZE
            assert not torch.equal(old[TRASH_BLOCK], new[TRASH_BLOCK])
            old, new = old[TRASH_BLOCK + 1 :], new[TRASH_BLOCK + 1 :]
        assert torch.equal(old, new)


@pytest.mark.parametrize(("k", "d"), CHOICES)
@torch.inference_mode()
def test_a_padded_batch_gives_the_tokens_of_the_batch_alone(k: int, d: int) -> None:
    padded, exact = (make_program(shared_toy(full_loops=LOOPS), LOOPS) for _ in range(2))
    for seed in range(4):
        for program in (padded, exact):
            randomize(program, 3, seed)
        candidate = Candidate(k, d)
        want = exact(RoundShape.of(3, candidate, SamplingMode.FILTERED), has_padding=False)
        got = padded(RoundShape.of(ROWS, candidate, SamplingMode.FILTERED), has_padding=True)
        assert torch.equal(want, got[:3])
        assert torch.equal(exact.state.numbers[:, :ROWS], padded.state.numbers[:, :ROWS])
