"""What is counted of a round, and what the policy is told."""

from __future__ import annotations

import pytest
from toys import (
    PROMPTS,
    VOCAB,
    ScriptedToy,
    WatchedToy,
    like,
    oracle_text,
    run_to_end,
    shared_toy,
)

from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import ConfigError
from looped_spec.runtime.outputs import SpeculationMetrics
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all

PROMPT = PROMPTS[0]
TEXT = oracle_text(PROMPT, SamplingParams(temperature=0.0, max_tokens=24))
K = 4


class RecordingPolicy:
    """Runs candidates in turn and remembers what it was asked and told."""

    def __init__(self, *candidates: Candidate) -> None:
        self.candidates = candidates
        self.batch_sizes: list[int] = []
        self.feedback: list[RoundFeedback] = []

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        self.batch_sizes.append(batch_size)
        number = len(self.batch_sizes)
        return SpeculationPlan(100 + number, self.candidates[number % len(self.candidates)])

    def observe(self, feedback: RoundFeedback) -> None:
        self.feedback.append(feedback)


def run_scripted(
    wrong_at: set[int], max_tokens: int, eos: tuple[int, ...] = ()
) -> tuple[SpeculationMetrics, RecordingPolicy]:
    """Run PROMPT with right drafts but at these places of the text."""
    adapter = like(ScriptedToy)
    adapter.script = {
        len(PROMPT) + i: (token + (i in wrong_at)) % VOCAB for i, token in enumerate(TEXT)
    }
    engine = make_engine(adapter, num_speculative_tokens=K, draft_loops=2, eos_token_ids=eos)
    policy = RecordingPolicy(Candidate(K, 2))
    engine.policy = policy
    [request] = run_all(engine, [PROMPT], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    assert request.metrics.num_rounds == engine.metrics.num_rounds == len(policy.feedback)
    assert request.metrics.proposed_by_position == engine.metrics.proposed_by_position
    return request.metrics, policy


def test_all_drafts_count_while_there_is_room() -> None:
    # Places 1-4 accepted and 5 the bonus; 6, 7 accepted, 8 wrong; 9-12 accepted, 13 the bonus.
    metrics, policy = run_scripted({8}, 14)
    assert [f.proposed for f in policy.feedback] == [(4,), (4,), (4,)]
    assert [f.accepted for f in policy.feedback] == [(4,), (2,), (4,)]
    assert metrics.num_draft_tokens == 12
    assert metrics.num_accepted_tokens == 10
    assert metrics.proposed_by_position == [3, 3, 3, 3]
    assert metrics.accepted_by_position == [3, 3, 2, 2]
    assert metrics.acceptance_by_position == [1.0, 1.0, 2 / 3, 2 / 3]
    assert metrics.draft_acceptance_rate == 10 / 12
    assert metrics.mean_acceptance_length == 1 + 10 / 3


@pytest.mark.parametrize(
    ("max_tokens", "wrong", "proposed", "accepted"),
    [
        (2, set(), 0, 0),  # one token left: the target's own, no draft's due
        (2, {1}, 0, 0),
        (3, set(), 1, 1),
        (3, {1}, 1, 0),  # then one more round for the last token
        (4, {2}, 2, 1),
        (5, set(), 3, 3),
        (6, set(), 4, 4),
    ],
)
def test_drafts_behind_the_limit_do_not_count(
    max_tokens: int, wrong: set[int], proposed: int, accepted: int
) -> None:
    metrics, policy = run_scripted(wrong, max_tokens)
    assert policy.feedback[0].proposed == (proposed,)
    assert policy.feedback[0].accepted == (accepted,)
    assert max_tokens == 1 + metrics.num_rounds + metrics.num_accepted_tokens


def test_drafts_behind_an_end_token_do_not_count() -> None:
    place = next(i for i in range(2, 5) if TEXT.index(TEXT[i]) == i)
    metrics, policy = run_scripted(set(), 20, eos=(TEXT[place],))
    assert policy.feedback[-1].proposed == policy.feedback[-1].accepted == (place,)
    # The round that ends inside its drafts has no token of the target's own.
    assert place == metrics.num_rounds + metrics.num_accepted_tokens - 1


def test_an_end_token_that_the_target_corrects_to_is_a_failed_draft() -> None:
    place = next(i for i in range(2, 5) if TEXT.index(TEXT[i]) == i)
    metrics, policy = run_scripted({place}, 20, eos=(TEXT[place],))
    assert policy.feedback[-1].proposed == (K,)
    assert policy.feedback[-1].accepted == (place - 1,)
    assert place == metrics.num_rounds + metrics.num_accepted_tokens


@pytest.mark.parametrize(("k", "d"), [(0, 0), (1, 2), (4, 1), (4, 3), (8, 2)])
def test_counts_add_up_to_the_tokens_that_were_committed(k: int, d: int) -> None:
    engine = make_engine(shared_toy(), num_speculative_tokens=k, draft_loops=d)
    policy = RecordingPolicy(Candidate(k, d))
    engine.policy = policy
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=5 + 3 * i) for i in range(6)]
    requests = run_all(engine, [[i, 2 * i, 7] for i in range(6)], params)
    total = SpeculationMetrics()
    for request, param in zip(requests, params, strict=True):
        metrics = request.metrics
        assert param.max_tokens == 1 + metrics.num_rounds + metrics.num_accepted_tokens
        assert metrics.num_draft_tokens == sum(metrics.proposed_by_position)
        assert metrics.num_accepted_tokens == sum(metrics.accepted_by_position)
        assert sorted(metrics.accepted_by_position, reverse=True) == metrics.accepted_by_position
        total.add(metrics)
    for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(total, name) == getattr(engine.metrics, name)
    assert total.proposed_by_position == engine.metrics.proposed_by_position
    assert total.accepted_by_position == engine.metrics.accepted_by_position
    assert total.num_draft_tokens == sum(sum(f.proposed) for f in policy.feedback)
    assert total.num_accepted_tokens == sum(sum(f.accepted) for f in policy.feedback)
    assert total.num_rounds == sum(len(f.proposed) for f in policy.feedback)
    if k == 0:
        assert total.draft_acceptance_rate is None
        assert total.mean_acceptance_length == 1.0


def test_metrics_of_nothing_are_none_and_not_a_division_by_zero() -> None:
    metrics = SpeculationMetrics()
    assert metrics.draft_acceptance_rate is None
    assert metrics.mean_acceptance_length is None
    assert metrics.acceptance_by_position == []


def test_feedback_names_its_plan_and_a_plan_is_asked_for_decoding_rows_only() -> None:
    engine = make_engine(shared_toy(), max_num_batched_tokens=4)
    policy = RecordingPolicy(Candidate(2, 1), PLAIN, Candidate(3, 3))
    engine.policy = policy
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (12, 6, 9)]
    requests = [engine.add_request(p, one) for p, one in zip(PROMPTS, params, strict=True)]
    run_to_end(engine)
    assert [r.output_token_ids for r in requests] == [
        oracle_text(p, one) for p, one in zip(PROMPTS, params, strict=True)
    ]
    assert all(size > 0 for size in policy.batch_sizes)
    assert [f.plan_id for f in policy.feedback] == [101 + i for i in range(len(policy.batch_sizes))]
    assert [len(f.proposed) for f in policy.feedback] == policy.batch_sizes
    assert all(f.seconds > 0 for f in policy.feedback)


def test_a_policy_may_change_k_and_d_in_every_round_without_changing_the_text() -> None:
    adapter = like(WatchedToy)
    engine = make_engine(adapter, block_size=3, num_blocks=22)
    choices = [Candidate(k, d) for k in (8, 1, 3) for d in (3, 1, 2)]
    engine.policy = RecordingPolicy(PLAIN, *choices)
    params = [SamplingParams(temperature=i / 2, seed=i, max_tokens=22) for i in range(3)]
    requests = run_all(engine, PROMPTS, params)
    assert [r.output_token_ids for r in requests] == [
        oracle_text(p, one) for p, one in zip(PROMPTS, params, strict=True)
    ]


def test_the_static_policy_keeps_its_candidate_and_numbers_its_plans() -> None:
    policy = StaticPolicy(Candidate(4, 2))
    plans = [policy.plan(size) for size in (1, 7, 32)]
    assert [plan.candidate for plan in plans] == [Candidate(4, 2)] * 3
    assert len({plan.plan_id for plan in plans}) == 3
    policy.observe(RoundFeedback(0, (4,), (0,), 0.1))
    assert policy.plan(1).candidate == Candidate(4, 2)


def test_a_candidate_out_of_range_is_refused_with_the_range() -> None:
    for d in (0, 4, 5, -1):
        with pytest.raises(ConfigError, match=f"between 1 and full_loops - 1 = 3, got {d}"):
            Candidate(2, d).check(4)
    with pytest.raises(ConfigError, match="between 0 and 64, got -1"):
        Candidate(-1, 1).check(4)
    with pytest.raises(ConfigError, match="full_loops of at least 2"):
        Candidate(1, 1).check(1)
    assert Candidate(0, 3).check(1) == PLAIN
