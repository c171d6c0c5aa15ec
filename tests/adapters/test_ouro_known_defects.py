"""Defects that users met in other implementations of Ouro, and that this one must not have.

The numbers are those of the project's list of such reports; each test names the symptom.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden import GOLDEN, TOLERANCE, golden_prompts
from looped_spec_ouro.adapter import OuroAdapter

from looped_spec import LLM, SamplingParams
from looped_spec.loading import load_adapter
from looped_spec.runtime.attention import PagedContext, PagedRows, SdpaBackend
from looped_spec.runtime.kv_cache import KVPool
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.oracle import dense_logits

FOLDER = GOLDEN / "ouro-a"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapter() -> OuroAdapter:
    """The adapter of a golden checkpoint."""
    loaded = load_adapter(FOLDER).adapter
    assert isinstance(loaded, OuroAdapter)
    return loaded


def _paged(adapter: OuroAdapter, positions: torch.Tensor, pool: KVPool) -> PagedContext:
    rows = PagedRows(
        torch.arange(1, 13)[None], torch.tensor([48]), torch.zeros(1, dtype=torch.int64)
    )
    return PagedContext(pool, SdpaBackend(), rows, positions, 4)


@torch.no_grad()
def _logits_in_chunks(adapter: OuroAdapter, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    pool = KVPool(adapter.kv_planes(4), 12, 4, torch.float32, torch.device("cpu"))
    parts, start = [], 0
    for size in chunks:
        ctx = _paged(adapter, torch.arange(start, start + size)[None], pool)
        state = adapter.prelude(torch.tensor([tokens[start : start + size]]), ctx)
        for index in range(4):
            state = adapter.loop(state, index, ctx)
        parts.append(adapter.readout(state, ctx)[0])
        start += size
    return torch.cat(parts)


def test_1_a_row_of_a_ragged_batch_equals_its_lone_run() -> None:
    llm = LLM(str(FOLDER), num_speculative_tokens=2, draft_loops=1)
    prompts = [[5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22]]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("chunks", [[1] * 20, [20], [7, 1, 5, 1, 6], [3, 17]])
def test_2_several_tokens_at_once_on_the_cache_equal_one_by_one(
    adapter: OuroAdapter, chunks: list[int]
) -> None:
    tokens = golden_prompts(FOLDER)[0].sequence("greedy_full_depth")[:20]
    expected = dense_logits(adapter, tokens, 4)
    got = _logits_in_chunks(adapter, tokens, chunks)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_3_no_code_of_a_checkpoint_folder_and_no_transformers_model_is_needed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_ouro.py").write_text("raise SystemExit('remote code was run')\n")
    script = (
        "import sys\n"
        "from looped_spec import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1])\n"
        "llm.generate([[5, 6]], SamplingParams(max_tokens=3, temperature=0.0), use_tqdm=False)\n"
        "assert 'transformers.modeling_utils' not in sys.modules\n"
        "print('ran')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, "ran"), run.stderr


@pytest.mark.parametrize("full_loops", [1, 2, 4])
def test_4_there_is_a_plane_for_every_loop_and_layer(adapter: OuroAdapter, full_loops: int) -> None:
    planes = adapter.kv_planes(full_loops)
    assert len(planes) == full_loops * adapter.config.num_layers
    seen: list[int] = []

    class Recorder(DenseContext):
        def attend(
            self,
            plane: int,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            *,
            scale: float | None = None,
        ) -> torch.Tensor:
            seen.append(plane)
            return super().attend(plane, q, k, v, scale=scale)

    ctx = Recorder(1, 3, full_loops)
    with torch.no_grad():
        state = adapter.prelude(torch.tensor([[1, 2, 3]]), ctx)
        for index in range(full_loops):
            state = adapter.loop(state, index, ctx)
    assert seen == list(range(len(planes)))


def test_5_every_loop_starts_from_the_normed_state_alone(adapter: OuroAdapter) -> None:
    """A residual carried over a loop boundary would reach the first layer of the next loop."""
    stack = adapter.module.model
    entered: list[torch.Tensor] = []
    normed: list[torch.Tensor] = []
    hooks = [
        stack.layers[0].register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0])),
        stack.norm.register_forward_hook(lambda _, inputs, output: normed.append(output)),
    ]
    try:
        dense_logits(adapter, [3, 1, 4, 1, 5], 4)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(entered) == len(normed) == 4
    embedded = stack.embed_tokens(torch.tensor([[3, 1, 4, 1, 5]]))
    for begin, before in zip(entered, [embedded, *normed], strict=False):
        assert torch.equal(begin, before)


def test_6_the_loop_count_is_that_of_the_config(adapter: OuroAdapter) -> None:
    assert adapter.geometry.default_full_loops == 4
    llm = LLM(str(FOLDER))
    assert llm.full_loops == 4
    assert len(llm.engine.runner.pool.planes) == 4 * adapter.config.num_layers


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_7_generation_stops_at_the_end_token_of_either_file(tmp_path: Path, where: str) -> None:
    case = golden_prompts(FOLDER)[0]
    continuation = case.sequence("greedy_full_depth")[len(case.prompt) :]
    end = continuation[4]
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    named = json.loads((folder / where).read_text()) if (folder / where).exists() else {}
    (folder / where).write_text(json.dumps({**named, "eos_token_id": end}))
    params = SamplingParams(temperature=0.0, max_tokens=len(continuation))
    output = LLM(str(folder)).generate([case.prompt], params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == continuation[: continuation.index(end) + 1]
    assert output.finish_reason == "stop"


def test_8_threshold_one_never_leaves_early_even_with_saturated_gates(
    adapter: OuroAdapter,
) -> None:
    """In bf16 the official cumulative probability rounds to 1.0 before the last loop."""
    hidden = adapter.config.hidden_size
    gate = adapter.module.model.early_exit_gate
    state = torch.linspace(-40, 40, 64)[None, :, None].expand(1, 64, hidden) / hidden
    with torch.no_grad():
        weight, bias = gate.weight.clone(), gate.bias.clone()
        try:
            gate.weight.fill_(1.0)
            gate.bias.zero_()
            for dtype in (torch.float32, torch.bfloat16):
                score = None
                for index in range(4):
                    states = (state.to(dtype),)
                    ctx = DenseContext(1, 64, 4)
                    score = adapter.exit_score("gate", states, states, score, index, ctx)
                    assert score.dtype == torch.float32
                    assert bool((score >= 1.0).all()) == (index == 3)
                    assert bool((score < 1.0).all()) == (index < 3)
        finally:
            gate.weight.copy_(weight)
            gate.bias.copy_(bias)


def test_8_the_target_is_full_depth_whatever_the_threshold_in_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["early_exit_threshold"] = 0.1
    (folder / "config.json").write_text(json.dumps(config))
    case = golden_prompts(FOLDER)[1]
    expected = case.sequence("greedy_full_depth")[len(case.prompt) :]
    params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
    output = LLM(str(folder)).generate([case.prompt], params, use_tqdm=False)[0]
    assert output.outputs[0].token_ids == expected
