"""The Huginn adapter gives the outputs of the official code: goldens of two tiny checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from golden import TOLERANCE, GoldenPrompt, golden_prompts
from huginn_models import CASE_IDS, CASES, FOLDERS, ZEROS, continuation, load
from looped_spec_huginn.adapter import HuginnAdapter

from looped_spec import LLM, SamplingParams
from looped_spec.adapter import StageContext
from looped_spec.runtime.engine import Engine
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_logits

KS = (1, 2, 4, 8)
GRID = [
    (folder, k, d)
    for folder, depths in zip(FOLDERS, ((1, 3, 7), (2, 5)), strict=True)
    for k, d in [(0, 0), *itertools.product(KS, depths)]
]
GRID_IDS = [f"{folder.name}-K{k}-d{d}" for folder, k, d in GRID]


@pytest.fixture(scope="module")
def adapters() -> dict[Path, HuginnAdapter]:
    """The adapter of every folder, loaded once, with an initial state of zeros."""
    return {folder: load(folder) for folder in FOLDERS}


@pytest.mark.parametrize(("folder", "case"), CASES, ids=CASE_IDS)
def test_logits_after_each_loop_match(
    adapters: dict[Path, HuginnAdapter], folder: Path, case: GoldenPrompt
) -> None:
    adapter = adapters[folder]
    tokens = case.sequence("greedy_full_depth_zero_init")
    depths = range(1, adapter.geometry.default_full_loops + 1)
    assert sum("logits_after" in name for name in case.tensors) == len(depths)
    for loops in depths:
        expected = case.tensors[f"logits_after_{loops}_loops_zero_init"]
        logits = dense_logits(adapter, tokens, loops)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("folder", "case"), CASES, ids=CASE_IDS)
def test_logits_from_a_given_initial_state_match(folder: Path, case: GoldenPrompt) -> None:
    given = case.tensors["initial_state"]

    class Given(HuginnAdapter):
        def initial_state(self, embedded: torch.Tensor, ctx: StageContext) -> torch.Tensor:
            return given[ctx.positions]

    adapter = load(folder, adapter_class=Given)
    tokens = case.sequence("greedy_full_depth_zero_init")
    logits = dense_logits(adapter, tokens, adapter.geometry.default_full_loops)
    expected = case.tensors["logits_full_depth_given_initial_state"]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("folder", "k", "d"), GRID, ids=GRID_IDS)
def test_greedy_text_is_the_official_one_at_every_k_and_d(
    adapters: dict[Path, HuginnAdapter], folder: Path, k: int, d: int
) -> None:
    engine = make_engine(adapters[folder], num_speculative_tokens=k, draft_loops=d)
    first, second = golden_prompts(folder)
    _assert_continues(engine, [second], max_tokens=10)
    _assert_continues(engine, [first, second, first])


@pytest.mark.parametrize(("k", "d"), [(0, 0), (2, 1), (8, 3)])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_chunked_prefill_changes_nothing(
    adapters: dict[Path, HuginnAdapter], folder: Path, k: int, d: int
) -> None:
    engine = make_engine(
        adapters[folder], num_speculative_tokens=k, draft_loops=d, max_num_batched_tokens=3
    )
    first, second = golden_prompts(folder)
    _assert_continues(engine, [second, first, second])


@pytest.mark.parametrize(("k", "d"), [(0, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_preemption_changes_nothing(
    adapters: dict[Path, HuginnAdapter], folder: Path, k: int, d: int
) -> None:
    # 17 blocks of 4 tokens hold two of the three requests at their full length, not three.
    engine = make_engine(adapters[folder], num_speculative_tokens=k, draft_loops=d, num_blocks=17)
    first, second = golden_prompts(folder)
    _assert_continues(engine, [first, second, first])
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "options",
    [{}, {"num_speculative_tokens": 4}, {"num_speculative_tokens": 0}],
    ids=["adaptive", "drafting", "plain"],
)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_model_folder_generates_the_official_text(folder: Path, options: dict[str, int]) -> None:
    llm = LLM(str(folder), adapter_options=ZEROS, **options)
    for name, value in options.items():
        assert getattr(llm.speculation, name) == value
    for case in golden_prompts(folder):
        expected = continuation(case)
        params = SamplingParams(temperature=0.0, max_tokens=len(expected))
        output = llm.generate([case.prompt], params, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == expected


def _assert_continues(engine: Engine, cases: Sequence[GoldenPrompt], max_tokens: int = 100) -> None:
    """Every case continues as recorded, and all memory is free afterwards."""
    expected = [continuation(case)[:max_tokens] for case in cases]
    params = [SamplingParams(temperature=0.0, max_tokens=len(tokens)) for tokens in expected]
    requests = run_all(engine, [case.prompt for case in cases], params)
    assert [request.output_token_ids for request in requests] == expected
