"""Captured rounds on a CUDA device; `pytest -m gpu` runs these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from looped_spec import LLM, SamplingParams
from looped_spec.control.plan import Candidate
from looped_spec.loading import load_adapter
from looped_spec.runtime.attention import AttentionNeeds, choose_attention
from looped_spec.runtime.graphs import CudaGraphs, GraphRunner
from looped_spec.runtime.readback import Readback
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.sampler import SamplingMode
from looped_spec.testing.rounds import everything, make_program, randomize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = {"ouro-a": 3, "huginn-a": 2, "nanbeige-a": 2}
PROMPTS = [[3, 4, 5], [6], list(range(1, 18)), [9, 9]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, max_tokens=13, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=17, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("size", "k", "d"), [(1, 0, 0), (4, 0, 0), (1, 1, 1), (4, 4, 1)])
@pytest.mark.parametrize("mode", list(SamplingMode))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@torch.inference_mode()
def test_a_captured_round_is_the_eager_one_bit_for_bit(
    family: str, size: int, k: int, d: int, mode: SamplingMode, dtype: torch.dtype
) -> None:
    loops = FAMILIES[family]
    loaded = load_adapter(GOLDEN / family, device="cuda", dtype=dtype)
    heads = frozenset(plane.head_dim for plane in loaded.adapter.kv_planes(loops))
    choice = choose_attention("auto", AttentionNeeds(loaded.device, dtype, heads))
    eager, twin = (
        make_program(
            loaded.adapter,
            loops,
            backend=choice.backend,
            block_size=choice.block_size,
            max_model_len=max(48, choice.block_size),
            device=loaded.device,
            dtype=dtype,
        )
        for _ in range(2)
    )
    runner = GraphRunner(twin, CudaGraphs(loaded.device), sizes=[size])
    shape = RoundShape.of(size, Candidate(k, d), mode)
    runner.capture([shape], show_progress=False)
    for seed in range(3):
        live = max(1, size - seed)
        for program in (eager, twin):
            randomize(program, live, seed)
        for _ in range(2):
            want = eager(shape, has_padding=True)
            got = runner.run(shape._replace(batch_size=live))
            assert torch.equal(want[:live], got)
            for one, other in zip(everything(eager), everything(twin), strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_mixed_load_over_captured_rounds_has_the_text_of_eager_ones(
    family: str, async_scheduling: bool
) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "num_speculative_tokens": 2,
        "draft_loops": 1,
        "max_num_seqs": 3,
        "max_model_len": 64,
    }
    eager = LLM(str(GOLDEN / family), enforce_eager=True, **options)
    graphs = LLM(
        str(GOLDEN / family), graph_backend="cuda", async_scheduling=async_scheduling, **options
    )
    assert graphs.stats()["graphs"]["captured"] == 3 * 2 * 2
    texts = [
        [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        for llm in (eager, graphs)
    ]
    assert texts[0] == texts[1]
    stats = graphs.stats()["graphs"]
    assert stats["replays"] > 10 and not stats["eager_rounds"]
    assert stats["captured"] == 3 * 2 * 2, "nothing is captured while requests run"


def test_capturing_more_changes_nothing_of_what_was_captured() -> None:
    llm = LLM(str(GOLDEN / "ouro-a"), device="cuda", dtype="float32", num_speculative_tokens=0)
    before = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    llm.set_speculation(6, 3)
    llm.set_speculation(0)
    after = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for one, other in zip(before, after, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_no_memory_for_graphs_leaves_all_rounds_eager() -> None:
    llm = LLM(str(GOLDEN / "ouro-a"), device="cuda", graph_memory_bytes=0)
    stats = llm.stats()["graphs"]
    assert stats["captured"] == 0 and stats["given_up"]
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert llm.stats()["graphs"]["eager_rounds"]["not captured"] > 0


def test_numbers_are_read_without_waiting_for_what_comes_behind_them() -> None:
    numbers = torch.arange(12, device="cuda").view(3, 4)
    readback = Readback(numbers)
    numbers.fill_(-1)  # queued behind the copy
    assert readback.wait().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
