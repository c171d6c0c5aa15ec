"""Counts from earlier measurements as the start of what is known of acceptance."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from looped_spec.control.acceptance_prior import (
    DEMOTED_SHARE,
    AcceptanceCounts,
    AcceptancePrior,
)
from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable, analytic_ms
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback
from looped_spec.errors import ConfigError

ARMS = (PLAIN, *(Candidate(k, d) for d in (1, 2, 3) for k in (1, 2, 4)))
EASY = AcceptanceCounts(1, (900.0, 810.0, 729.0, 656.0), (1000.0, 900.0, 810.0, 729.0))
HARD = AcceptanceCounts(1, (50.0, 2.0), (1000.0, 50.0))


def config(prior: AcceptancePrior | None, **options: Any) -> AdaptiveSpecConfig:
    cost = CostTable.sampled(lambda b, length, c: analytic_ms(4, c), ARMS, (1, 16))
    buckets = (BatchBucket(1, 16, ARMS, 1),)
    return AdaptiveSpecConfig(4, buckets, cost=cost, acceptance_prior=prior, **options)


def expected(prior: AcceptancePrior | None) -> dict[Candidate, float]:
    """Return E(K) of every candidate before the first round."""
    (bucket,) = AdaptiveController(config(prior)).explain().buckets
    return {score.candidate: score.expected_tokens for score in bucket.scores}


def test_a_heavy_prior_is_what_is_expected() -> None:
    """E(4) = 1 + s_1 + ... + s_4 with p = 0.9 at every position."""
    found = expected(AcceptancePrior((EASY,), trials=1e5))
    assert found[Candidate(1, 1)] == pytest.approx(1.9, abs=0.01)
    assert found[Candidate(4, 1)] == pytest.approx(sum(0.9**i for i in range(5)), abs=0.03)


def test_a_prior_of_no_weight_changes_nothing() -> None:
    assert expected(AcceptancePrior((EASY,), trials=0)) == pytest.approx(expected(None))


def test_more_weight_means_closer_to_what_was_measured() -> None:
    found = [
        expected(AcceptancePrior((HARD,), trials))[Candidate(1, 1)] for trials in (0, 4, 16, 200)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.05, abs=0.03)


def test_few_trials_are_worth_no_more_than_they_are() -> None:
    few = AcceptanceCounts(1, (2.0,), (2.0,))
    many = AcceptanceCounts(1, (200.0,), (200.0,))
    found = [expected(AcceptancePrior((one,), 50.0))[Candidate(1, 1)] for one in (few, many)]
    assert found[0] < found[1]


def test_a_depth_without_counts_follows_those_that_have_some() -> None:
    none, easy, hard = (
        expected(prior)[Candidate(1, 2)]
        for prior in (None, AcceptancePrior((EASY,)), AcceptancePrior((HARD,)))
    )
    assert hard < none < easy


@pytest.mark.parametrize(("counts", "drafts"), [(EASY, True), (HARD, False)])
def test_the_first_choice_is_what_the_prior_says_pays(
    counts: AcceptanceCounts, drafts: bool
) -> None:
    controller = AdaptiveController(config(AcceptancePrior((counts,), 64.0)))
    controller.plan(8)  # which may be a probe
    (bucket,) = controller.explain().buckets
    assert (bucket.current != PLAIN) == drafts


def test_a_wrong_prior_is_overcome() -> None:
    """Drafts were always accepted before, and never are now."""
    controller = AdaptiveController(config(AcceptancePrior((EASY,), 32.0)))
    rounds = []
    for _ in range(60):
        plan = controller.plan(1)
        k = plan.candidate.num_speculative_tokens
        rounds.append(k > 0)
        ms = analytic_ms(4, plan.candidate)
        controller.observe(RoundFeedback(plan.plan_id, (k,), (0,), ms / 1000))
    assert rounds[0]
    assert sum(rounds[30:]) <= 4


def test_workloads_have_the_same_say_however_long_they_were_measured() -> None:
    prior = AcceptancePrior.pooled(
        [
            AcceptanceCounts(2, (800.0, 10.0), (1000.0, 20.0)),
            AcceptanceCounts(2, (4.0,), (10.0,)),
            AcceptanceCounts(1, (1.0,), (2.0,)),
        ]
    )
    assert [entry.draft_loops for entry in prior.counts] == [1, 2]
    pooled = prior.counts[1]
    assert pooled.trials == (1010.0, 20.0)
    assert pooled.accepted[0] / pooled.trials[0] == pytest.approx(0.6)
    assert pooled.accepted[1] / pooled.trials[1] == pytest.approx(0.5)


def test_a_prior_of_other_circumstances_keeps_a_share_of_its_weight() -> None:
    prior = AcceptancePrior((EASY,), 40.0)
    assert prior.demoted() == AcceptancePrior((EASY,), 40.0 * DEMOTED_SHARE)
    whole, part = (expected(p)[Candidate(1, 1)] for p in (prior, prior.demoted()))
    assert expected(None)[Candidate(1, 1)] < part < whole


def test_it_is_kept_in_the_configuration_and_told_of() -> None:
    before = config(AcceptancePrior((EASY, AcceptanceCounts(2, (9.5,), (10.0,))), 12.0))
    after = AdaptiveSpecConfig.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    text = str(AdaptiveController(after).explain())
    assert "acceptance starts from earlier measurements, worth 12 trials" in text
    assert config(None).to_json()["acceptance_prior"] is None


def test_a_depth_that_is_no_candidate_is_left_out() -> None:
    only_2 = dataclasses.replace(
        config(AcceptancePrior((EASY,))), buckets=(BatchBucket(1, 16, (PLAIN, Candidate(1, 2)), 1),)
    )
    (bucket,) = AdaptiveController(only_2).explain().buckets
    (plain,) = (
        AdaptiveController(dataclasses.replace(only_2, acceptance_prior=None)).explain().buckets
    )
    assert bucket.scores == plain.scores


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AcceptanceCounts(0, (1,), (2,)), "draft_loops of acceptance counts must be at"),
        (lambda: AcceptanceCounts(1, (3,), (2,)), "must be between 0 and 2, got 3"),
        (lambda: AcceptanceCounts(1, (1, 1), (2,)), "as many positions as trials, 1, got 2"),
        (lambda: AcceptanceCounts(1, (0,), (0,)), "must be more than 0 at the first position"),
        (lambda: AcceptanceCounts(1, (), ()), "must have 1 to 64 positions, got 0"),
        (lambda: AcceptanceCounts(1, (math.nan,), (1,)), "must be a finite number, got nan"),
        (
            lambda: AcceptanceCounts.from_json(
                {"draft_loops": 1, "accepted": ["1"], "trials": [1]}
            ),
            "must be a finite number, got '1'",
        ),
        (lambda: AcceptancePrior(()), "counts of an acceptance prior must not be empty"),
        (lambda: AcceptancePrior((EASY, HARD)), "has draft_loops 1 twice"),
        (lambda: AcceptancePrior((EASY,), -1), "trials of an acceptance prior must be between"),
        (
            lambda: config(AcceptancePrior((AcceptanceCounts(4, (1,), (2,)),))),
            "draft_loops of acceptance_prior must be between 1 and 3, got 4",
        ),
        (lambda: AcceptancePrior.from_json([]), "acceptance_prior must be a JSON object, got []"),
        (
            lambda: AcceptancePrior.from_json({"counts": [], "trial": 3}),
            "unknown key of acceptance_prior 'trial' (did you mean 'trials'?)",
        ),
        (lambda: AcceptancePrior.from_json({"trials": 3}), "counts of acceptance_prior must be a"),
        (
            lambda: AcceptancePrior.from_json({"counts": [{"draft_loops": 1, "accepted": [1]}]}),
            "acceptance counts need trials",
        ),
    ],
)
def test_nonsense_is_refused_with_name_value_and_range(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
