"""Scenarios of docs/control.md about what may be chosen, by whom, and what is told of it."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from processes import PATIENCE_SECONDS

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable
from looped_spec.control.goodput_settings import GoodputSettings
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.errors import ConfigError

SHORT, DEEP = Candidate(1, 1), Candidate(1, 2)


class Text:
    """An engine that accepts each draft with one probability; 0 once a request's state is stale."""

    def __init__(self, controller: AdaptiveController, draft_ms: float = 1.0) -> None:
        self.controller, self.draft_ms, self.random = controller, draft_ms, random.Random(0)
        self.is_stale = False
        self.plans: list[SpeculationPlan] = []

    def run(
        self, rounds: int, batch_size: int, chance: float, *, new: int = 0, goes_stale: bool = False
    ) -> None:
        self.is_stale = self.is_stale and not new
        for number in range(rounds):
            plan = self.controller.plan(
                batch_size, context_tokens=100, new_requests=0 if number else new
            )
            k = plan.candidate.num_speculative_tokens
            self.is_stale = self.is_stale or (goes_stale and k == 0)
            now = 0.0 if self.is_stale else chance
            accepted = []
            for _ in range(batch_size):
                kept = 0
                while kept < k and self.random.random() < now:
                    kept += 1
                accepted.append(kept)
            seconds = (4 + k * self.draft_ms) / 1000
            self.controller.observe(
                RoundFeedback(plan.plan_id, (k,) * batch_size, tuple(accepted), seconds)
            )
            self.plans.append(plan)

    def k(self, last: int) -> list[int]:
        return [plan.candidate.num_speculative_tokens for plan in self.plans[-last:]]


def chain(policy: str = "goodput", **options: Any) -> AdaptiveSpecConfig:
    """Return a configuration with T = 4 + K ms, where a first draft pays above p = 0.25."""
    arms = (PLAIN, *(Candidate(k, 1) for k in (1, 2, 4)))
    table = CostTable.sampled(lambda b, n, c: 4.0 + c.num_speculative_tokens, arms, (1, 8))
    return AdaptiveSpecConfig(4, (BatchBucket(1, 8, arms, 1),), policy, cost=table, **options)


def test_where_plain_decoding_spoils_drafts_the_floor_is_1_draft() -> None:
    """Scenario 12: by the engine's flag; plain decoding is never chosen, hopeless as drafts are."""
    text = Text(AdaptiveController(chain(state_fresh_when_off=False)))
    text.run(500, 8, 0.05)
    assert min(text.k(500)) == 1
    assert set(text.k(100)) == {1}
    control = Text(AdaptiveController(chain()))
    control.run(500, 8, 0.05)
    assert set(control.k(20)) == {0}


def test_drafts_that_plain_decoding_spoils_are_noticed() -> None:
    """Scenario 12: after any time off, old requests accept nothing until they end."""
    table = CostTable.sampled(lambda b, n, c: 4.0 + 2.0 * c.num_speculative_tokens, [SHORT], (8,))
    config = AdaptiveSpecConfig(4, (BatchBucket(1, 8, (PLAIN, SHORT), 1),), cost=table)
    notes = {}
    for goes_stale in (True, False):
        text = Text(AdaptiveController(config), 2.0)
        for _ in range(6):
            text.run(60, 8, 0.85, new=8, goes_stale=goes_stale)
            text.run(1500, 8, 0.40, goes_stale=goes_stale)
        notes[goes_stale] = text.controller.explain().notes
        assert (min(text.k(100)) == 0) is not goes_stale
    assert any("spoils" in note for note in notes[True])
    assert not any("spoils" in note for note in notes[False])


@pytest.mark.parametrize(("margin", "moves"), [(1.0, False), (0.99, True)])
def test_a_score_exactly_at_the_margin_stays(margin: float, moves: bool) -> None:
    """Scenario 13: score = current * (1 + margin), with margin 1 and costs 4 and 2, so exactly."""
    table = CostTable.of(
        {(1, 100, 1, 1): 4.0, (1, 100, 1, 2): 4.0, (1, 101, 1, 1): 4.0, (1, 101, 1, 2): 2.0}
    )
    controller = AdaptiveController(
        AdaptiveSpecConfig(
            4,
            (BatchBucket(1, 1, (SHORT, DEEP)),),
            cost=table,
            depth_offsets=((1, 0.0), (2, 0.0)),
            goodput=GoodputSettings(margin=margin, lead_rounds=1e6, dwell_trials=0.0),
        )
    )
    for context in (50, 400, 400, 400):
        controller.plan(1, context_tokens=context)
    (bucket,) = controller.explain().buckets
    assert bucket.scores[1].score == 2 * bucket.scores[0].score
    assert bucket.current == (DEEP if moves else SHORT)


def test_a_batch_is_priced_as_padded_and_judged_by_its_real_requests() -> None:
    """Scenario 16: 5 of {4, 8, 16} runs as 8, and what is above all keeps itself."""
    arms = (PLAIN, SHORT)
    table = CostTable.sampled(lambda b, n, c: b + c.num_speculative_tokens, arms, range(1, 33))
    config = AdaptiveSpecConfig(
        4, (BatchBucket(1, 32, arms),), cost=table, padded_batch_sizes=(4, 8, 16)
    )
    assert [config.padded(b) for b in (1, 5, 16, 17, 20)] == [4, 8, 16, 17, 20]
    states = []
    for batch_size, used in (
        (5, config),
        (20, config),
        (5, replace(config, padded_batch_sizes=())),
    ):
        controller = AdaptiveController(used, consensus=lambda vote: 1)
        plan = controller.plan(batch_size)
        accepted = (1,) * 4 + (0,) * (batch_size - 4)
        controller.observe(RoundFeedback(plan.plan_id, (1,) * batch_size, accepted, 0.009))
        states.append(controller)
    costs = [c.explain().buckets[0].scores[0].cost_ms for c in states]
    assert costs[0] == pytest.approx(8.0, rel=0.05)
    learnt = [json.dumps(c.state_dict()["learnt"]["acceptance"]) for c in states]
    assert learnt[0] == learnt[2]
    with_padding = AdaptiveController(config, consensus=lambda vote: 1)
    plan = with_padding.plan(5)
    with_padding.observe(RoundFeedback(plan.plan_id, (1,) * 8, (1,) * 4 + (0,) * 4, 0.009))
    assert json.dumps(with_padding.state_dict()["learnt"]["acceptance"]) != learnt[0]


def test_buffers_are_told_the_largest_k_whatever_the_round_runs() -> None:
    """Scenario 20."""
    text = Text(AdaptiveController(chain()))
    text.run(300, 8, 0.02)
    assert set(text.k(5)) == {0}
    assert text.controller.max_k == 4


def test_buffers_for_the_active_candidate_alone_are_refused() -> None:
    """Scenario 21: 128 rows allocated, 256 needed: the most of B (K + 1), whichever is initial."""
    buckets = (
        BatchBucket(1, 32, (PLAIN, Candidate(3, 1))),
        BatchBucket(33, 64, (SHORT, Candidate(3, 1))),
    )
    config = AdaptiveSpecConfig(4, buckets)
    assert config.max_rows == 256
    assert config.check_engine(64, 256) is config
    with pytest.raises(ConfigError, match=r"128 rows are too small.*256"):
        config.check_engine(64, 128)


def test_ranks_that_measure_other_times_run_the_same_plans() -> None:
    """Scenario 22: four replicas agree by the minimum of their votes."""
    ranks, rounds = 4, 150
    votes = [0] * ranks
    barrier = threading.Barrier(ranks, timeout=PATIENCE_SECONDS)
    plans: list[list[SpeculationPlan]] = [[] for _ in range(ranks)]
    own: list[list[int]] = [[] for _ in range(ranks)]

    def replica(rank: int) -> None:
        noise = random.Random(rank)

        def agree(vote: int) -> int:
            votes[rank] = vote
            own[rank].append(vote)
            barrier.wait()
            least = min(votes)
            barrier.wait()
            return least

        controller = AdaptiveController(chain(), consensus=agree)
        text = random.Random(7)
        for number in range(rounds):
            plan = controller.plan(4, context_tokens=100 + number)
            plans[rank].append(plan)
            k = plan.candidate.num_speculative_tokens
            chance = 0.9 if number < rounds // 2 else 0.1
            accepted = tuple(min(k, int(text.random() < chance) * 4) for _ in range(4))
            seconds = (4 + k) / 1e3 * noise.uniform(0.7, 1.4)
            controller.observe(RoundFeedback(plan.plan_id, (k,) * 4, accepted, seconds))

    threads = [threading.Thread(target=replica, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ran = [[(plan.plan_id, plan.bucket, plan.candidate) for plan in one] for one in plans]
    assert len(ran[0]) == rounds
    assert all(one == ran[0] for one in ran)
    assert any(len(set(row)) > 1 for row in zip(*own, strict=True)), "ranks never disagreed"
    arms = chain().buckets[0].candidates
    for row, (_, _, candidate) in zip(zip(*own, strict=True), ran[0], strict=True):
        assert candidate == arms[min(row)]


def test_a_user_can_read_what_runs_and_why() -> None:
    """Scenario 41: candidate, scores, reason, switches, time off and cost of probes."""
    text = Text(AdaptiveController(chain()))
    text.run(100, 8, 0.9)
    text.run(300, 8, 0.02)
    told, stats = text.controller.explain(), text.controller.stats()
    (bucket,) = told.buckets
    assert bucket.current == PLAIN
    assert [score.candidate for score in bucket.scores] == list(chain().buckets[0].candidates)
    best = max(bucket.scores, key=lambda score: score.score)
    assert best.candidate == PLAIN
    before = stats.switches[-1].previous
    left = f"K={before.num_speculative_tokens} d={before.draft_loops}"
    assert f"more tokens per second than {left} when chosen" in told.line
    assert told.line in str(told).replace("\n", ", ")
    off = [plan for plan in text.plans if plan.candidate == PLAIN]
    probes = [plan for plan in text.plans if plan.probe]
    assert (stats.off_rounds, stats.probe_rounds) == (len(off), len(probes))
    assert off and probes and stats.policy["probe_cost_rounds"] > 0
    assert stats.num_switches == len(stats.switches) > 0
    assert stats.switches[-1].candidate == PLAIN
    assert stats.switches[-1].reason == bucket.reason
    assert json.loads(json.dumps(told.as_dict())) and json.loads(json.dumps(stats.as_dict()))


@pytest.mark.parametrize("policy", ["ema", "goodput"])
@pytest.mark.parametrize(("chance", "wanted"), [(0.95, 4), (0.02, 0)])
def test_requests_shorter_than_the_warm_up_are_learnt_from_together(
    policy: str, chance: float, wanted: int
) -> None:
    """Scenario 44: requests of 5 rounds, one by one, with a warm-up of 8 rounds."""
    text = Text(AdaptiveController(chain(policy)))
    for _ in range(60):
        text.run(5, 1, chance, new=1)
    assert text.k(60).count(wanted) > 30
