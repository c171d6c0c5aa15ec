"""Prompts that are waiting are computed together, and padding stays within bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from toys import GREEDY, oracle_text

from looped_spec.adapter import LoopState, StageContext
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.toy import TOY_CONFIG, ToyAdapter, make_toy

VOCAB = TOY_CONFIG["vocab_size"]


class ShapeToy(ToyAdapter):
    """Notes the shape of every prelude."""

    shapes: list[tuple[int, int]]

    def prelude(self, tokens: Tensor, ctx: StageContext) -> LoopState:
        self.shapes.append((tokens.shape[0], tokens.shape[1]))
        return super().prelude(tokens, ctx)


def shape_toy() -> ShapeToy:
    adapter = ShapeToy(dict(TOY_CONFIG), {})
    adapter.module.load_state_dict(make_toy().module.state_dict())
    adapter.shapes = []
    return adapter


def first_step(lengths: list[int], **options: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """Shapes of the passes of the first step, and the first token of each prompt."""
    adapter = shape_toy()
    engine = make_engine(adapter, max_num_seqs=len(lengths), **options)
    prompts = [[1 + (n + i) % (VOCAB - 1) for i in range(n)] for n in lengths]
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    engine.step()
    passes = list(adapter.shapes)
    return passes, [request.output_token_ids[0] for request in requests]


def test_prompts_of_one_length_take_one_pass() -> None:
    passes, _ = first_step([9] * 6)
    assert passes == [(6, 9)]


def test_prompts_of_like_lengths_are_padded_to_the_longest_and_keep_their_tokens() -> None:
    lengths = [12, 10, 7, 9]
    passes, tokens = first_step(lengths)
    assert passes == [(4, 12)]
    for length, token in zip(lengths, tokens, strict=True):
        prompt = [1 + (length + i) % (VOCAB - 1) for i in range(length)]
        assert token == oracle_text(prompt, GREEDY)[0]


@pytest.mark.parametrize(
    "lengths", [[64, 3, 3, 3], [2, 4, 8, 16, 32, 64], [50, 24, 26, 11, 5], [7] * 5 + [60]]
)
def test_at_least_half_of_every_row_is_real(lengths: list[int]) -> None:
    passes, _ = first_step(lengths)
    assert sum(rows for rows, _ in passes) == len(lengths)
    assert sum(rows * columns for rows, columns in passes) <= 2 * sum(lengths)
    assert len(passes) < len(lengths)


def test_chunks_of_several_prompts_share_the_budget_of_a_step() -> None:
    adapter = shape_toy()
    engine = make_engine(adapter, max_num_seqs=3, max_num_batched_tokens=16)
    for _ in range(3):
        engine.add_request([5] * 8, GREEDY)
    engine.step()
    assert adapter.shapes[0] == (2, 8)


def test_batched_prefill_changes_no_text() -> None:
    prompts = [[1 + (n + i) % (VOCAB - 1) for i in range(n)] for n in (20, 13, 11, 3, 1)]
    engine = make_engine(shape_toy(), max_num_seqs=5)
    together = [request.output_token_ids for request in run_all(engine, prompts, GREEDY)]
    assert together == [oracle_text(prompt, GREEDY) for prompt in prompts]


@torch.inference_mode()
def test_attention_of_a_round_reads_the_live_blocks_only() -> None:
    seen: list[int] = []
    engine = make_engine(make_toy(), max_num_seqs=1, max_model_len=128, block_size=4)
    backend = engine.runner.backend
    prepare = backend.prepare

    def noted(positions: Tensor, rows: Any, pool: Any) -> Any:
        seen.append(rows.block_tables.shape[1])
        return prepare(positions, rows, pool)

    vars(backend)["prepare"] = noted
    request = engine.add_request([1, 2, 3, 4, 5], GREEDY)
    while engine.has_work:
        engine.step()
    length = request.num_tokens
    assert seen[-1] <= -(-length // 4) < 128 // 4
    assert seen == sorted(seen)
