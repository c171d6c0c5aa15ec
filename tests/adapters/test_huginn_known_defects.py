"""Defects that users met in the official code of Huginn, and that this one must not have.

The numbers are those of the project's list of such reports; each test names the symptom.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from golden import golden_prompts
from huginn_models import FOLDERS, ZEROS, continuation, load, read_config

from looped_spec import LLM, SamplingParams
from looped_spec.errors import CapacityError, ConfigError
from looped_spec.runtime.early_exit import ExitRule, exit_round
from looped_spec.runtime.sampler import SamplingMode, SamplingTensors
from looped_spec.testing.stages import StageBench

FOLDER = FOLDERS[0]
PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22]]


def greedy(max_tokens: int = 12, **others: object) -> SamplingParams:
    """Return parameters of a greedy request."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the generated ids of each prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """Eight drafts, so that most rounds of a short request reach past its end."""
    return LLM(str(FOLDER), num_speculative_tokens=8, draft_loops=2, adapter_options=ZEROS)


def test_9_a_row_of_a_ragged_batch_equals_its_lone_run(llm: LLM) -> None:
    llm.set_speculation(0)
    together = texts(llm, PROMPTS, greedy())
    assert together == [texts(llm, [prompt], greedy())[0] for prompt in PROMPTS]


@pytest.mark.parametrize("d", [1, 2, 4])
def test_10_rows_that_accept_unlike_numbers_of_drafts_stay_apart(llm: LLM, d: int) -> None:
    llm.set_speculation(0)
    expected = texts(llm, PROMPTS, greedy(24))
    llm.set_speculation(3, d)
    outputs = llm.generate(PROMPTS, greedy(24), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    if d == 1:
        rounds = {output.metrics.num_rounds for output in outputs}
        assert len(rounds) > 1, "a case where all rows accept alike shows nothing"


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 13])
def test_11_never_more_than_max_tokens(llm: LLM, max_tokens: int) -> None:
    llm.set_speculation(8, 2)
    case = golden_prompts(FOLDER)[0]
    output = llm.generate([case.prompt], greedy(max_tokens), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == continuation(case)[:max_tokens]
    assert output.finish_reason == "length"


def test_11_nothing_after_a_stop_id_inside_accepted_drafts(llm: LLM) -> None:
    llm.set_speculation(8, 7)
    case = golden_prompts(FOLDER)[0]
    expected = continuation(case)
    for stop in sorted(set(expected)):
        params = greedy(len(expected), stop_token_ids=(stop,))
        output = llm.generate([case.prompt], params, use_tqdm=False)[0].outputs[0]
        assert output.token_ids == expected[: expected.index(stop) + 1]
        assert output.finish_reason == "stop"


def test_12_warm_starts_are_refused_and_never_combined_with_drafts() -> None:
    with pytest.raises(ConfigError, match="unknown option of adapter 'huginn' 'continuous_comp"):
        LLM(str(FOLDER), adapter_options={"continuous_compute": True})


def test_13_greedy_text_repeats_with_the_default_random_start() -> None:
    expected = None
    for batched_tokens, k in ((2048, 0), (2, 0), (2048, 3), (2048, 0)):
        llm = LLM(
            str(FOLDER),
            num_speculative_tokens=k,
            draft_loops=1 if k else None,
            max_num_batched_tokens=batched_tokens,
        )
        params = greedy(seed=1234)
        together = texts(llm, PROMPTS, params)
        assert texts(llm, PROMPTS[:1], params) == together[:1]
        expected = expected or together
        assert together == expected


def test_14_no_code_of_a_checkpoint_folder_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    config = read_config(auto_map={"AutoModelForCausalLM": "raven_modeling_minimal.Raven"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "raven_modeling_minimal.py").write_text("raise SystemExit('remote code was run')\n")
    case = golden_prompts(FOLDER)[0]
    llm = LLM(str(folder), adapter_options=ZEROS)
    assert texts(llm, [case.prompt], greedy(4)) == [continuation(case)[:4]]


def test_14_the_length_limit_is_a_clear_error_and_can_be_reached(llm: LLM) -> None:
    block_size = read_config()["block_size"]
    with pytest.raises(CapacityError, match=f"max_model_len is {block_size} tokens"):
        llm.generate([[1] * block_size], greedy(), use_tqdm=False)
    with pytest.raises(ConfigError, match=f"max_model_len must be at most {block_size}"):
        LLM(str(FOLDER), max_model_len=block_size + 1)
    prompt = [token % 100 for token in range(block_size - 5)]
    llm.set_speculation(8, 2)
    output = llm.generate([prompt], greedy(100), use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 5
    llm.set_speculation(0)
    assert texts(llm, [prompt], greedy(100)) == [output.token_ids]


def test_15_a_token_that_left_early_is_seen_at_every_deeper_loop() -> None:
    """The official fallback drops such a token from the deeper loops of all that follow it."""
    adapter, tokens = load(), torch.tensor([[5, 6, 7, 8, 9, 10]])
    bench = StageBench(adapter, num_tokens=8)
    ctx = bench.context(0, 4)
    bench.readout(bench.states(tokens[:, :4], ctx)[-1], ctx)
    one = torch.ones(1)
    greedy = SamplingTensors(torch.tensor([0]), 0 * one, torch.tensor([0]), one, 0 * one)
    out = exit_round(
        adapter,
        bench.context(4, 1),
        bench.pool,
        tokens[:, 4],
        greedy,
        rule=ExitRule("latent-diff", -math.inf, min_loops=2, max_loops=bench.full_loops),
        mode=SamplingMode.GREEDY,
    )
    assert out.loops.tolist() == [2]
    planes = adapter.kv_planes(bench.full_loops)
    place = {(p.loop, p.layer): number for number, p in enumerate(planes) if p.loop is not None}
    deeper = {number: p for number, p in enumerate(planes) if p.loop is not None and p.loop >= 2}
    slot = int(bench.context(4, 1).slots)
    for number, plane in deeper.items():
        pairs = zip(
            bench.pool.planes[number], bench.pool.planes[place[1, plane.layer]], strict=True
        )
        for found, last in pairs:
            assert torch.equal(found.flatten(0, 1)[slot], last.flatten(0, 1)[slot])

    def next_logits() -> torch.Tensor:
        ctx = bench.context(5, 1)
        return bench.readout(bench.states(tokens[:, 5:], ctx)[-1], ctx)

    seen = next_logits()
    for number in deeper:  # each of them is attended to
        kept = [pages.clone() for pages in bench.pool.planes[number]]
        bench.fill([number], slice(4, 5), 3.0)
        assert not torch.equal(next_logits(), seen)
        for pages, values in zip(bench.pool.planes[number], kept, strict=True):
            pages.copy_(values)
