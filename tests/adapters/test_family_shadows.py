"""Shadow depths of the families: counts are those of drafts of that depth made the slow way."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from golden import GOLDEN
from tiny_random import load

from looped_spec.control.plan import Candidate, RoundFeedback, SpeculationPlan
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.oracle import dense_generate

PROMPTS = ([3, 4, 5, 6], [7])
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, seed=2, max_tokens=8, ignore_eos=True),
)


class AllDepths:
    """Runs one candidate and asks for every depth; remembers what it was told."""

    def __init__(self, candidate: Candidate, depths: range) -> None:
        self.candidate, self.depths = candidate, tuple(depths)
        self.feedback: list[RoundFeedback] = []

    def plan(self, batch_size: int, **_: Any) -> SpeculationPlan:
        number = len(self.feedback)
        return SpeculationPlan(number, self.candidate, shadow_depths=self.depths)

    def observe(self, feedback: RoundFeedback) -> None:
        self.feedback.append(feedback)


@pytest.mark.parametrize("folder", ["ouro-a", "ouro-b", "nanbeige-a", "nanbeige-b"])
@pytest.mark.parametrize("k", [0, 2])
def test_counts_are_those_of_drafts_of_that_depth(folder: str, k: int) -> None:
    adapter = load(GOLDEN / folder)
    loops = adapter.geometry.default_full_loops
    policy = AllDepths(Candidate(k, 1 if k else 0), range(1, loops))
    engine = make_engine(adapter, max_model_len=32)
    engine.policy = policy
    requests = [engine.add_request(p, one) for p, one in zip(PROMPTS, PARAMS, strict=True)]
    compared = 0
    while engine.has_work:
        members = [(r, r.num_tokens) for r in engine.scheduler.running if r.output_token_ids]
        rounds = len(policy.feedback)
        engine.step()
        for feedback in policy.feedback[rounds:]:
            compared += len(members) * len(feedback.shadow)
            for counts in feedback.shadow:
                for place, (request, known) in enumerate(members):
                    text = [*request.prompt_token_ids, *request.output_token_ids]
                    proposed = counts.proposed[place]
                    drafts = dense_generate(
                        adapter,
                        text[:known],
                        proposed,
                        full_loops=counts.draft_loops,
                        params=request.params,
                        seed=request.seed,
                        draft=True,
                    )
                    pairs = zip(drafts, text[known:], strict=False)
                    right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
                    assert counts.accepted[place] == right
    assert compared >= (loops - 2) * 4 or loops == 2
    assert all(request.finish_reason == "length" for request in requests)


def test_a_family_whose_readout_has_planes_is_asked_in_vain() -> None:
    adapter = load(GOLDEN / "huginn-a")
    policy = AllDepths(Candidate(2, 1), range(2, 4))
    engine = make_engine(adapter, max_model_len=32)
    engine.policy = policy
    engine.add_request(PROMPTS[0], PARAMS[0])
    while engine.has_work:
        engine.step()
    assert policy.feedback and not any(feedback.shadow for feedback in policy.feedback)
