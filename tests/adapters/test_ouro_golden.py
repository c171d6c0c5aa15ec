"""The Ouro adapter gives the outputs of the official code: golden files of two tiny checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from golden import GOLDEN, TOLERANCE, GoldenPrompt, golden_prompts
from looped_spec_ouro.adapter import OuroAdapter

from looped_spec import LLM, SamplingParams
from looped_spec.loading import load_adapter
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.oracle import dense_logits

FOLDERS = [GOLDEN / "ouro-a", GOLDEN / "ouro-b"]
CASES = [
    pytest.param(folder, prompt, id=f"{folder.name}-p{number}")
    for folder in FOLDERS
    for number, prompt in enumerate(golden_prompts(folder))
]


@pytest.fixture(scope="module")
def adapters() -> dict[Path, OuroAdapter]:
    """The adapter of every folder, loaded once."""
    loaded = {folder: load_adapter(folder).adapter for folder in FOLDERS}
    return {folder: a for folder, a in loaded.items() if isinstance(a, OuroAdapter)}


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
@pytest.mark.parametrize(("folder", "case"), CASES)
def test_logits_after_each_loop_match(
    adapters: dict[Path, OuroAdapter], folder: Path, case: GoldenPrompt, loops: int
) -> None:
    logits = dense_logits(adapters[folder], case.sequence("greedy_full_depth"), loops)
    expected = case.tensors[f"logits_after_{loops}_loops"]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("threshold", ["0.3", "0.6", "0.9"])
@pytest.mark.parametrize(("folder", "case"), CASES)
def test_the_exit_gate_chooses_the_same_loop(
    adapters: dict[Path, OuroAdapter], folder: Path, case: GoldenPrompt, threshold: str
) -> None:
    adapter = adapters[folder]
    tokens = case.sequence("greedy_full_depth")
    ctx = DenseContext(1, len(tokens), 4)
    per_loop, scores = _run_with_scores(adapter, tokens, ctx)
    ready = torch.stack(scores) >= float(threshold)
    chosen = ready.float().argmax(dim=0)
    logits = torch.stack(per_loop)[chosen, torch.arange(len(tokens))]
    expected = case.tensors[f"logits_exit_threshold_{threshold}"]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    if threshold == "0.3":
        assert len(set(chosen.tolist())) > 1, "a case where every token leaves alike shows nothing"


@torch.no_grad()
def _run_with_scores(
    adapter: OuroAdapter, tokens: list[int], ctx: DenseContext
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    state = adapter.prelude(torch.tensor([tokens]), ctx)
    score = None
    logits, scores = [], []
    for index in range(ctx.total_loops):
        previous, state = state, adapter.loop(state, index, ctx)
        score = adapter.exit_score("gate", state, previous, score, index, ctx)
        logits.append(adapter.readout(state, ctx)[0])
        scores.append(score[0])
    return logits, scores


GRID = [(0, 1), *itertools.product((1, 2, 4, 8), (1, 2, 3))]


@pytest.mark.parametrize(("k", "d"), GRID)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_greedy_text_is_the_official_one_at_every_k_and_d(folder: Path, k: int, d: int) -> None:
    llm = LLM(str(folder), num_speculative_tokens=k, draft_loops=d)
    for case in golden_prompts(folder):
        _assert_continues(llm, [case])


@pytest.mark.parametrize("max_num_batched_tokens", [3, 2048], ids=["chunked", "whole"])
@pytest.mark.parametrize(("k", "d"), GRID)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_ragged_batches_and_chunked_prefill_change_nothing(
    folder: Path, k: int, d: int, max_num_batched_tokens: int
) -> None:
    llm = LLM(
        str(folder),
        num_speculative_tokens=k,
        draft_loops=d,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    first, second = golden_prompts(folder)
    _assert_continues(llm, [first, second, first])


def _assert_continues(llm: LLM, cases: list[GoldenPrompt]) -> None:
    """Every case continues as recorded, and all memory is free afterwards."""
    expected = [case.sequence("greedy_full_depth")[len(case.prompt) :] for case in cases]
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(tokens), ignore_eos=True)
        for tokens in expected
    ]
    outputs = llm.generate([case.prompt for case in cases], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
