"""Texts from the engine: speculation changes no token, whatever K, d, depth, batch or seed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from looped_spec import LLM, SamplingParams
from reference import Reference

PROMPTS = [[96, 53, 73, 70, 1, 83, 74, 87, 70, 83], [96], [96, 19, 12, 19, 30]]
NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
SAMPLED = [
    SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=NEW_TOKENS)
    for seed in (11, 12, 13)
]
GRID = [(1, 1), (3, 1), (2, 2), (4, 3), (7, 2)]


def texts(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """Return the tokens of the three requests, run as one batch."""
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    """The tiny model from its folder, without speculation."""
    return LLM(str(tiny), num_speculative_tokens=0)


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def params(request: pytest.FixtureRequest) -> SamplingParams | list[SamplingParams]:
    """One way of choosing tokens for all, or a seed for each."""
    found: SamplingParams | list[SamplingParams] = request.param
    return found


@pytest.fixture(scope="module")
def plain(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    """What is generated without speculation."""
    llm.set_speculation(0)
    return texts(llm, params)


@pytest.mark.parametrize(("k", "d"), GRID)
def test_speculation_changes_no_token(
    llm: LLM,
    params: SamplingParams | list[SamplingParams],
    plain: list[list[int]],
    k: int,
    d: int,
) -> None:
    llm.set_speculation(k, d)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == plain
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    drafted = sum(output.metrics.num_draft_tokens for output in outputs)
    assert 0 < accepted <= drafted
    if d == 1:
        assert accepted < drafted, "drafts that are never rejected prove little"


@pytest.mark.parametrize("full_loops", [1, 2, 7])
def test_other_depths_are_as_lossless(tiny: Path, full_loops: int) -> None:
    llm = LLM(str(tiny), full_loops=full_loops, num_speculative_tokens=0)
    expected = texts(llm, GREEDY)
    for draft_loops in range(1, full_loops):
        llm.set_speculation(3, draft_loops)
        assert texts(llm, GREEDY) == expected


def test_greedy_text_is_that_of_the_reference(tiny: Path) -> None:
    llm = LLM(str(tiny), num_speculative_tokens=3, draft_loops=2, adapter_options={"init_scale": 0})
    reference = Reference(tiny)
    for prompt, got in zip(PROMPTS, texts(llm, GREEDY), strict=True):
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            start = torch.zeros(len(tokens), reference.config["n_embd"])
            tokens.append(int(reference.logits(tokens, 4, start)[-1].argmax()))
        assert got == tokens[len(prompt) :]


def test_a_request_alone_says_what_it_says_in_a_batch(
    llm: LLM, params: SamplingParams | list[SamplingParams], plain: list[list[int]]
) -> None:
    llm.set_speculation(3, 2)
    for number, prompt in enumerate(PROMPTS):
        own = params[number] if isinstance(params, list) else params
        alone = llm.generate([prompt], own, use_tqdm=False)[0].outputs[0].token_ids
        assert list(alone) == plain[number]


def test_seeds_decide_what_is_sampled(llm: LLM) -> None:
    llm.set_speculation(0)
    first, again = texts(llm, SAMPLED), texts(llm, SAMPLED)
    assert first == again
    assert first != texts(llm, SAMPLED[::-1])


@pytest.mark.parametrize("criterion", ["latent-diff", "kl", "entropy-diff", "argmax-stability"])
def test_early_exit_saves_loops_and_a_strict_one_saves_none(tiny: Path, criterion: str) -> None:
    loops, found = [], []
    for threshold in ({"argmax-stability": 1.0}.get(criterion, -0.3), 1e6):
        llm = LLM(str(tiny), full_loops=8, exit_criterion=criterion, exit_threshold=threshold)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        loops.append([output.metrics.loops_per_round or 0 for output in outputs])
    assert all(early < 8 for early in loops[0])
    assert loops[1] == [8, 8, 8]
    assert found[1] == texts(LLM(str(tiny), full_loops=8, num_speculative_tokens=0), GREEDY)
