"""What a round tells of drafts of another depth is what such drafts would have been."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from toys import PROMPTS, BareToy, like, run_to_end

from looped_spec.control.plan import Candidate, RoundFeedback, SpeculationPlan
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.round_result import RoundResult
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.oracle import dense_generate
from looped_spec.testing.toy import make_toy

LOOPS = 4
DEPTHS = (1, 2, 3)
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
SAMPLED = SamplingParams(temperature=0.6, top_p=0.95, seed=3, max_tokens=11)
HOT = SamplingParams(temperature=1.0, seed=-8, max_tokens=9)
CHOICES = [(0, 0), (1, 1), (3, 1), (3, 2), (4, 3)]


class ShadowPolicy:
    """Runs one candidate and asks for shadow depths; remembers what it was told."""

    def __init__(self, candidate: Candidate, depths: tuple[int, ...]) -> None:
        self.candidate, self.depths = candidate, depths
        self.feedback: list[RoundFeedback] = []
        self._ids = itertools.count()

    def plan(self, batch_size: int, **_: int) -> SpeculationPlan:
        return SpeculationPlan(next(self._ids), self.candidate, shadow_depths=self.depths)

    def observe(self, feedback: RoundFeedback) -> None:
        self.feedback.append(feedback)


def engine_with(adapter: Any, k: int, d: int, depths: tuple[int, ...], **setup: Any) -> Engine:
    engine = make_engine(adapter, **setup)
    engine.policy = ShadowPolicy(Candidate(k, d), depths)
    return engine


def watch_rounds(engine: Engine) -> list[list[tuple[int, int]]]:
    """Return a list that grows by (request, tokens known) of each round's requests."""
    rounds: list[list[tuple[int, int]]] = []
    run = engine.runner.round

    def watched(requests: Any, *args: Any) -> RoundResult:
        rounds.append([(request.request_id, request.num_tokens) for request in requests])
        return run(requests, *args)

    engine.runner.round = watched  # type: ignore[method-assign]
    return rounds


@pytest.mark.parametrize(("k", "d"), CHOICES)
@pytest.mark.parametrize("params", [[GREEDY] * 3, [SAMPLED, GREEDY, HOT]], ids=["greedy", "mixed"])
def test_counts_are_those_of_drafts_of_that_depth_made_the_slow_way(
    k: int, d: int, params: list[SamplingParams]
) -> None:
    adapter = like(BareToy)
    with torch.no_grad():  # so that loops matter: depths agree in 30, 55 and 75 % of the positions
        adapter.module.inject.weight.mul_(1.5)
    engine = engine_with(adapter, k, d, DEPTHS)
    rounds = watch_rounds(engine)
    requests = [engine.add_request(p, one) for p, one in zip(PROMPTS, params, strict=True)]
    run_to_end(engine)
    policy = engine.policy
    assert isinstance(policy, ShadowPolicy)
    told = right = 0
    for members, feedback in zip(rounds, policy.feedback, strict=True):
        depths = [counts.draft_loops for counts in feedback.shadow]
        assert depths == [e for e in DEPTHS if not (feedback.num_speculative_tokens and e == d)]
        for counts in feedback.shadow:
            for place, (request_id, known) in enumerate(members):
                request = requests[request_id]
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
                agreed = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                assert counts.accepted[place] == len(agreed)
                due = len(text) - known - 1 if request.finish_reason == "length" else 99
                assert proposed == min(feedback.accepted[place] + 1, due)
                told, right = told + proposed, right + len(agreed)
    assert 10 < right < told - 10, "the comparison must see good and bad drafts"


@pytest.mark.parametrize(("k", "d"), CHOICES)
def test_asking_changes_no_token_and_no_byte_of_the_cache(k: int, d: int) -> None:
    pools, texts = [], []
    for depths in ((), DEPTHS):
        engine = engine_with(like(BareToy), k, d, depths)
        params = [GREEDY, SAMPLED, HOT]
        requests = [engine.add_request(p, one) for p, one in zip(PROMPTS, params, strict=True)]
        run_to_end(engine)
        texts.append([request.output_token_ids for request in requests])
        pools.append([pages for pair in engine.runner.pool.planes for pages in pair])
    assert texts[0] == texts[1]
    assert all(torch.equal(one, other) for one, other in zip(*pools, strict=True))


class CountingToy(BareToy):
    """Counts its readouts."""

    readouts = 0

    def draft_readout(self, state: Any, ctx: Any) -> torch.Tensor:
        self.readouts += 1
        return self.readout(state, ctx)


@pytest.mark.parametrize("depths", [(), (3,), (1, 3), DEPTHS])
def test_a_depth_costs_one_readout_and_nothing_where_it_is_not_asked_for(
    depths: tuple[int, ...],
) -> None:
    adapter = like(CountingToy)
    engine = engine_with(adapter, 3, 2, depths)
    engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    adapter.readouts = 0
    engine.step()
    assert adapter.readouts == 3 + len([depth for depth in depths if depth != 2])


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(make_toy(), id="its readout has a plane"),
        pytest.param(like(BareToy, depth_conditioned=True), id="shallow is no prefix of deep"),
    ],
)
def test_a_model_that_cannot_tell_leaves_the_depths_out(adapter: Any) -> None:
    engine = engine_with(adapter, 2, 1, DEPTHS)
    assert not engine.runner.can_read_shadows
    engine.add_request(PROMPTS[0], GREEDY)
    run_to_end(engine)
    policy = engine.policy
    assert isinstance(policy, ShadowPolicy)
    assert policy.feedback and all(not feedback.shadow for feedback in policy.feedback)


def test_depths_that_no_draft_can_have_are_left_out() -> None:
    engine = engine_with(like(BareToy), 2, 2, (0, 1, 2, 3, 4, 9))
    engine.add_request(PROMPTS[0], GREEDY)
    run_to_end(engine)
    policy = engine.policy
    assert isinstance(policy, ShadowPolicy)
    assert [counts.draft_loops for counts in policy.feedback[0].shadow] == [1, 3]


def test_rows_behind_an_end_do_not_tell() -> None:
    adapter = like(BareToy)
    text = dense_generate(adapter, PROMPTS[0], 14, full_loops=LOOPS)
    place = next(i for i in range(2, 9) if text.index(text[i]) == i)
    engine = engine_with(adapter, 0, 0, (3,), eos_token_ids=(text[place],))
    policy = engine.policy
    assert isinstance(policy, ShadowPolicy)
    engine.add_request(PROMPTS[0], GREEDY)
    run_to_end(engine)
    # Plain rounds have one row each, and the end token itself is one that a draft could have had.
    assert [counts.proposed for f in policy.feedback for counts in f.shadow] == [(1,)] * place
