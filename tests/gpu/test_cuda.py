"""On a CUDA device the engine gives the recorded text too; `pytest -m gpu` runs these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from looped_spec import LLM, SamplingParams
from looped_spec.runtime.kv_cache import bytes_per_block
from looped_spec.runtime.outputs import RequestOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]

GOLDEN = Path(__file__).parent.parent / "golden"
OPTIONS: dict[str, dict[str, Any]] = {
    "ouro-a": {},
    "huginn-a": {"adapter_options": {"init_scale": 0.0}},  # recorded from a state of zeros
    "nanbeige-a": {},
}
PLAIN = {"num_speculative_tokens": 0}
DRAFTING = {"num_speculative_tokens": 2, "draft_loops": 1}

each_family = pytest.mark.parametrize("family", OPTIONS)
each_candidate = pytest.mark.parametrize("candidate", [PLAIN, DRAFTING], ids=["K0", "K2"])


def make_llm(family: str, device: str = "cuda", dtype: str = "float32", **options: Any) -> LLM:
    return LLM(
        str(GOLDEN / family), device=device, dtype=dtype, block_size=4, **OPTIONS[family], **options
    )


def recorded(family: str) -> list[tuple[list[int], list[int]]]:
    """Return three requests, prompt and recorded greedy continuation of each."""
    tensors = load_file(GOLDEN / family / "expected.safetensors")
    requests = []
    for number in (0, 1, 0):
        prompt = tensors[f"p{number}.prompt"].tolist()
        (name,) = (name for name in tensors if name.startswith(f"p{number}.greedy_full_depth"))
        requests.append((prompt, tensors[name].tolist()[len(prompt) :]))
    return requests


def generate(llm: LLM, family: str) -> list[RequestOutput]:
    """Run the recorded prompts together, greedily; all memory is free afterwards."""
    requests = recorded(family)
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(continuation), ignore_eos=True)
        for _, continuation in requests
    ]
    outputs = llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)
    stats = llm.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    return outputs


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@each_candidate
@each_family
def test_greedy_text_is_the_recorded_one(family: str, candidate: dict[str, int]) -> None:
    outputs = generate(make_llm(family, **candidate), family)
    assert token_ids(outputs) == [continuation for _, continuation in recorded(family)]


@each_candidate
@each_family
def test_preemption_changes_nothing(family: str, candidate: dict[str, int]) -> None:
    adapter = make_llm(family).loaded.adapter
    planes = adapter.kv_planes(adapter.geometry.default_full_loops)
    # 17 blocks of 4 tokens hold one request of 64 tokens, but not all three at their full length.
    memory = 17 * bytes_per_block(planes, 4, torch.float32)
    llm = make_llm(family, max_model_len=64, kv_cache_memory_bytes=memory, **candidate)
    outputs = generate(llm, family)
    assert llm.stats()["num_preemptions"] > 0
    assert token_ids(outputs) == [continuation for _, continuation in recorded(family)]


def test_early_exit_leaves_at_the_loops_where_it_leaves_on_the_cpu() -> None:
    on_cuda, on_cpu = (
        generate(make_llm("ouro-a", device=device, exit_threshold=0.6, **PLAIN), "ouro-a")
        for device in ("cuda", "cpu")
    )
    assert token_ids(on_cuda) == token_ids(on_cpu)
    rows = [output.metrics.num_loop_rows for output in on_cuda]
    assert rows == [output.metrics.num_loop_rows for output in on_cpu]
    assert sum(rows) < 4 * sum(output.metrics.num_rounds for output in on_cuda)


@each_candidate
@each_family
def test_bf16_runs_to_the_length_asked_for_with_finite_values(
    family: str, candidate: dict[str, int]
) -> None:
    llm = make_llm(family, dtype="bfloat16", **candidate)
    outputs = generate(llm, family)
    lengths = [len(continuation) for _, continuation in recorded(family)]
    assert [len(tokens) for tokens in token_ids(outputs)] == lengths
    for keys, values in llm.engine.runner.pool.planes:
        assert bool(torch.isfinite(keys).all()) and bool(torch.isfinite(values).all())
