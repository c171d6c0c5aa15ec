"""Rows that belong nowhere write to the trash block, and what lies there changes nothing."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import GREEDY, PROMPTS, oracle_text, shared_toy

from looped_spec.control.plan import Candidate
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.kv_cache import TRASH_BLOCK, BlockAllocator
from looped_spec.runtime.request import Request
from looped_spec.runtime.scheduler import PrefillChunk
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine

BLOCK_SIZE = 3


def engine_with_noise_in_its_cache() -> Engine:
    engine = make_engine(shared_toy(), block_size=BLOCK_SIZE, num_blocks=40)
    generator = torch.Generator().manual_seed(0)
    for pair in engine.runner.pool.planes:
        for pages in pair:
            pages.normal_(generator=generator)
    return engine


def request_in(engine: Engine, row: int, blocks: list[int], prompt: list[int], new: int) -> Request:
    request = Request(
        row,
        prompt,
        SamplingParams(temperature=0.0, max_tokens=new),
        seed=0,
        max_total_tokens=len(prompt) + new,
    )
    request.row, request.blocks = row, blocks
    engine.runner.prepare([request])
    return request


def changed_slots(before: list[torch.Tensor], engine: Engine) -> set[int]:
    """Flat slots of which any plane differs from `before`."""
    pages = [pages for pair in engine.runner.pool.planes for pages in pair]
    changed = torch.zeros(before[0].shape[0] * BLOCK_SIZE, dtype=torch.bool)
    for old, new in zip(before, pages, strict=True):
        changed |= (old != new).flatten(2).any(-1).flatten()
    return set(changed.nonzero()[:, 0].tolist())


def snapshot(engine: Engine) -> list[torch.Tensor]:
    return [pages.clone() for pair in engine.runner.pool.planes for pages in pair]


def slots(request: Request, start: int, stop: int) -> set[int]:
    return {
        request.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)
    }


TRASH = set(range(TRASH_BLOCK * BLOCK_SIZE, (TRASH_BLOCK + 1) * BLOCK_SIZE))


def test_padded_prefill_rows_write_to_the_trash_block_alone() -> None:
    engine = engine_with_noise_in_its_cache()
    long = request_in(engine, 0, [7, 3, 9, 20], list(range(10)), 2)
    short = request_in(engine, 1, [5, 11], [1, 2, 3, 4, 5, 6], 1)
    later = request_in(engine, 2, [30, 31, 32, 33], list(range(12)), 1)
    before = snapshot(engine)
    engine.runner.prefill(
        [PrefillChunk(long, 0, 10), PrefillChunk(short, 0, 5), PrefillChunk(later, 3, 9)]
    )
    own = slots(long, 0, 10) | slots(short, 0, 5) | slots(later, 3, 9)
    changed = changed_slots(before, engine)
    assert own <= changed <= own | TRASH
    assert changed & TRASH, "the prompts differ in length, so some rows are padding"


@pytest.mark.parametrize(("k", "d"), [(0, 0), (2, 1), (4, 3), (8, 2)])
@pytest.mark.parametrize("conditioned", [False, True])
def test_positions_past_the_limit_of_a_row_write_to_the_trash_block_alone(
    k: int, d: int, conditioned: bool
) -> None:
    engine = make_engine(
        shared_toy(depth_conditioned=conditioned), block_size=BLOCK_SIZE, num_blocks=40
    )
    near = request_in(engine, 0, [4, 17], [1, 2, 3, 4], 3)  # positions 3.. and a limit of 6
    far = request_in(engine, 2, [8, 6, 21, 2, 19, 13], list(range(7)), 11)
    engine.runner.write_tables([(1, 0, [25, 26, 27])])  # a row that sits out
    before = snapshot(engine)
    engine.runner.round([near, far], Candidate(k, d))
    own = slots(near, 3, min(3 + k + 1, 6)) | slots(far, 6, min(6 + k + 1, 17))
    changed = changed_slots(before, engine)
    assert own <= changed <= own | TRASH
    assert bool(changed & TRASH) == (k > 2)


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(0, 2**16))
def test_the_trash_block_is_never_given_away_nor_any_block_twice(
    wishes: list[int], seed: int
) -> None:
    allocator, dice = BlockAllocator(9), random.Random(seed)
    held: list[list[int]] = []
    for wish in wishes:
        free = allocator.num_free
        blocks = allocator.allocate(wish)
        if blocks is None:
            assert wish > free == allocator.num_free
            if held:
                allocator.free(held.pop(dice.randrange(len(held))))
        else:
            held.append(blocks)
        owned = [block for blocks in held for block in blocks]
        assert len(set(owned)) == len(owned) == 9 - allocator.num_free
        assert set(owned) <= set(range(1, 10))


def test_freeing_a_block_twice_is_an_error() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    assert blocks is not None
    allocator.free(blocks)
    with pytest.raises(KeyError):
        allocator.free(blocks[:1])


@pytest.mark.parametrize(("k", "d"), [(0, 0), (4, 2), (8, 1)])
def test_large_values_in_the_trash_block_change_nothing(k: int, d: int) -> None:
    engine = make_engine(shared_toy(), num_speculative_tokens=k, draft_loops=d, block_size=3)
    requests = [engine.add_request(p, GREEDY) for p in PROMPTS]
    while engine.has_work:
        for pair in engine.runner.pool.planes:
            for pages in pair:
                pages[TRASH_BLOCK] = 1e4
        engine.step()
    assert [r.output_token_ids for r in requests] == [oracle_text(p, GREEDY) for p in PROMPTS]


def test_a_table_never_names_blocks_of_a_former_request_in_its_row() -> None:
    engine = make_engine(shared_toy(), max_num_seqs=1, block_size=BLOCK_SIZE, max_model_len=30)
    engine.runner.write_tables([(0, 0, [5, 6, 7, 8, 9, 10])])
    engine.runner.write_tables([(0, 0, [2, 3])])
    assert engine.runner.state.tables[0].tolist() == [2, 3] + [TRASH_BLOCK] * 8
    engine.runner.write_tables([(0, 2, [2, 3, 4])])
    assert engine.runner.state.tables[0].tolist() == [2, 3, 4] + [TRASH_BLOCK] * 7
