"""More loops than the release has, with and without a norm between them, against a plain run.

The recorded outputs end at two loops; whether an un-normed state is handed on rightly shows at
three and four, and in speculation that continues from drafted states there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden import TOLERANCE, golden_prompts
from nanbeige_models import TINY, plain_logits, tiny_config

from looped_spec import SamplingParams
from looped_spec.adapter import LoopState, ModelAdapter
from looped_spec.loading import build_adapter
from looped_spec.plugins import PluginManager
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits
from looped_spec.weights import load_weights

TOKENS = golden_prompts(TINY)[0].sequence("greedy_full_depth")
PROMPTS = [TOKENS[:7], [5, 6, 7], TOKENS[3:20]]
NUM_TOKENS = 16
MIN_MARGIN = 1e-4  # above rounding, below which greedy text proves nothing

each_norm = pytest.mark.parametrize("skip", [False, True], ids=["normed", "skipped"])


def _four_loops(skip: bool) -> tuple[ModelAdapter, dict[str, Any]]:
    config = tiny_config(num_loops=4, skip_loop_final_norm=skip)
    adapter = build_adapter(config, "tiny", PluginManager(), {})
    load_weights(adapter, TINY, torch.device("cpu"), torch.float32)
    return adapter, config


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
@each_norm
def test_every_depth_equals_the_plain_run(skip: bool, loops: int) -> None:
    adapter, config = _four_loops(skip)
    got = dense_logits(adapter, TOKENS, loops)
    torch.testing.assert_close(got, plain_logits(TOKENS, loops, config), atol=TOLERANCE, rtol=0)


def test_the_norm_between_loops_makes_a_difference_from_the_second_loop_on() -> None:
    """Otherwise the tests here would show nothing."""
    (normed, _), (skipped, _) = _four_loops(False), _four_loops(True)
    for loops in (1, 2, 3, 4):
        a, b = (dense_logits(adapter, TOKENS, loops) for adapter in (normed, skipped))
        assert bool((a - b).abs().max() > 0.1) == (loops > 1)


@torch.no_grad()
@each_norm
def test_reading_out_a_shallow_state_leaves_it_as_it_was(skip: bool) -> None:
    adapter, config = _four_loops(skip)
    ctx = DenseContext(1, len(TOKENS), 4)
    state: LoopState = adapter.prelude(torch.tensor([TOKENS]), ctx)
    for index in range(4):
        state = adapter.loop(state, index, ctx)
        before = [tensor.clone() for tensor in state]
        shallow = adapter.draft_readout(state, ctx)[0]
        expected = plain_logits(TOKENS, index + 1, config)
        torch.testing.assert_close(shallow, expected, atol=TOLERANCE, rtol=0)
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))


@pytest.mark.parametrize(("k", "d"), [(0, 0), (1, 1), (3, 1), (2, 2), (4, 2), (1, 3), (5, 3)])
@each_norm
def test_greedy_text_is_the_plain_one_at_every_k_and_d(skip: bool, k: int, d: int) -> None:
    adapter, config = _four_loops(skip)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for prompts in (PROMPTS, PROMPTS[:1]):
        engine = make_engine(
            adapter, num_speculative_tokens=k, draft_loops=d, max_num_batched_tokens=9
        )
        for request in run_all(engine, prompts, params):
            tokens = request.prompt_token_ids + request.output_token_ids
            logits = plain_logits(tokens[:-1], 4, config)[len(request.prompt_token_ids) - 1 :]
            best = logits.topk(2).values
            assert bool((best[:, 0] - best[:, 1]).min() > MIN_MARGIN)
            assert request.output_token_ids == logits.argmax(dim=-1).tolist()


def test_a_run_of_fewer_loops_than_the_model_has_is_that_of_a_shallower_model() -> None:
    adapter, config = _four_loops(True)
    engine = make_engine(adapter, full_loops=2, num_speculative_tokens=2, draft_loops=1)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (request,) = run_all(engine, PROMPTS[:1], params)
    tokens = request.prompt_token_ids + request.output_token_ids
    logits = plain_logits(tokens[:-1], 2, config)[len(request.prompt_token_ids) - 1 :]
    assert request.output_token_ids == logits.argmax(dim=-1).tolist()
