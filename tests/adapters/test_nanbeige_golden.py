"""The Nanbeige adapter gives the outputs of the official code, recorded on two tiny checkpoints.

`nanbeige-a` norms the state after every loop, `nanbeige-b` only what goes to the head.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden import GOLDEN, TOLERANCE, GoldenPrompt, golden_prompts

from looped_spec import LLM, SamplingParams
from looped_spec.adapter import ModelAdapter
from looped_spec.loading import load_adapter
from looped_spec.runtime.engine import Engine
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits

FOLDERS = [GOLDEN / "nanbeige-a", GOLDEN / "nanbeige-b"]
CASES = [
    pytest.param(folder, prompt, id=f"{folder.name}-p{number}")
    for folder in FOLDERS
    for number, prompt in enumerate(golden_prompts(folder))
]
GRID = [(0, 0), (1, 1), (2, 1), (3, 1), (5, 1), (8, 1)]
each_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
each_candidate = pytest.mark.parametrize(("k", "d"), GRID)


@pytest.fixture(scope="module")
def adapters() -> dict[Path, ModelAdapter]:
    """The adapter of every folder, loaded once."""
    return {folder: load_adapter(folder).adapter for folder in FOLDERS}


@pytest.mark.parametrize("loops", [1, 2])
@pytest.mark.parametrize(("folder", "case"), CASES)
def test_logits_after_each_loop_match(
    adapters: dict[Path, ModelAdapter], folder: Path, case: GoldenPrompt, loops: int
) -> None:
    logits = dense_logits(adapters[folder], case.sequence("greedy_full_depth"), loops)
    expected = case.tensors[f"logits_after_{loops}_loops"]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@each_candidate
@each_folder
def test_one_request_continues_as_recorded(
    adapters: dict[Path, ModelAdapter], folder: Path, k: int, d: int
) -> None:
    engine = make_engine(adapters[folder], num_speculative_tokens=k, draft_loops=d)
    for case in golden_prompts(folder):
        _assert_continues(engine, [case])


@pytest.mark.parametrize("max_num_batched_tokens", [3, 512], ids=["chunked", "whole"])
@each_candidate
@each_folder
def test_a_ragged_batch_and_chunked_prefill_change_nothing(
    adapters: dict[Path, ModelAdapter], folder: Path, k: int, d: int, max_num_batched_tokens: int
) -> None:
    engine = make_engine(
        adapters[folder],
        num_speculative_tokens=k,
        draft_loops=d,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    first, second = golden_prompts(folder)
    _assert_continues(engine, [first, second, first])


@each_candidate
@each_folder
def test_a_preempted_request_continues_as_recorded(
    adapters: dict[Path, ModelAdapter], folder: Path, k: int, d: int
) -> None:
    """Three sequences need 33 blocks of 4 tokens; 20 hold one whole, but never all three."""
    engine = make_engine(
        adapters[folder],
        num_speculative_tokens=k,
        draft_loops=d,
        max_model_len=64,
        num_blocks=20,
    )
    first, second = golden_prompts(folder)
    _assert_continues(engine, [second, first, second])
    assert engine.scheduler.num_preemptions > 0


@each_candidate
@each_folder
def test_the_folder_through_the_user_interface(folder: Path, k: int, d: int) -> None:
    options = {"draft_loops": d} if k else {}
    llm = LLM(str(folder), num_speculative_tokens=k, max_num_seqs=3, **options)
    assert (llm.full_loops, llm.speculation.num_speculative_tokens) == (2, k)
    cases = golden_prompts(folder)
    expected = [_continuation(case) for case in cases]
    outputs = llm.generate(
        [case.prompt for case in cases], [_greedy(len(t)) for t in expected], use_tqdm=False
    )
    assert [output.outputs[0].token_ids for output in outputs] == expected
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_some_drafts_are_accepted_and_some_are_not(adapters: dict[Path, ModelAdapter]) -> None:
    """Otherwise the grids above would not have tried the rollback."""
    for folder in FOLDERS:
        engine = make_engine(adapters[folder], num_speculative_tokens=2, draft_loops=1)
        _assert_continues(engine, golden_prompts(folder))
        rate = engine.metrics.draft_acceptance_rate
        assert rate is not None
        assert 0.2 < rate < 0.9


def _continuation(case: GoldenPrompt) -> list[int]:
    return case.sequence("greedy_full_depth")[len(case.prompt) :]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _assert_continues(engine: Engine, cases: list[GoldenPrompt]) -> None:
    """Every case continues as recorded; `run_all` checks that all memory is free afterwards."""
    expected = [_continuation(case) for case in cases]
    params = [_greedy(len(tokens)) for tokens in expected]
    requests = run_all(engine, [case.prompt for case in cases], params)
    assert [list(request.output_token_ids) for request in requests] == expected
