"""The simulator against closed forms, and what lies between rounds and policy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from traces import COST_MS, document, phase

from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.control.scores import (
    flaps_per_1000,
    probe_tax,
    regret,
    result_document,
    sampled_regret,
    slowdown,
    switches,
    worst_slowdown,
)
from looped_spec.control.simulate import (
    FixedPlans,
    believed_costs,
    simulate,
)
from looped_spec.control.trace import Trace
from looped_spec.control.trace_document import read_trace

HOPELESS = {"1": [0.05, 0.0, 0.0], "2": [0.1, 0.0]}
CHANGING = document(
    phase(rounds=30),
    phase(rounds=20, batch_size=8, survival=HOPELESS),
    phase(rounds=10, batch_size=3, cost_ms=COST_MS | {"2,2": 6.0}),
)


class Scripted:
    """Runs a list of plans again and again and keeps what it was asked and told."""

    def __init__(self, *plans: tuple[Candidate, bool] | SpeculationPlan) -> None:
        self.script = plans
        self.asked: list[tuple[int, int, int]] = []
        self.told: list[tuple[int, RoundFeedback]] = []

    def plan(
        self, batch_size: int, *, context_tokens: int = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        number = len(self.asked)
        self.asked.append((batch_size, context_tokens, new_requests))
        entry = self.script[number % len(self.script)]
        if isinstance(entry, SpeculationPlan):
            return SpeculationPlan(number, entry.candidate, shadow_depths=entry.shadow_depths)
        return SpeculationPlan(number, entry[0], probe=entry[1])

    def observe(self, feedback: RoundFeedback) -> None:
        self.told.append((len(self.asked), feedback))


def held(candidate: Candidate) -> tuple[Candidate, bool]:
    return candidate, False


def expected_rates(trace: Trace) -> Iterator[tuple[int, dict[Candidate, float]]]:
    """Yield the rounds of each phase and tokens per ms of every candidate, written out plainly."""
    for one in trace.phases:
        rates = {}
        for candidate, cost in one.cost_ms.items():
            survival = one.requests[0].get(candidate.draft_loops, ())
            drafts = sum(survival[i] for i in range(candidate.num_speculative_tokens))
            rates[candidate] = one.batch_size * (1 + drafts) / cost
        yield one.rounds, rates


def closed_form_regret(trace: Trace, candidate: Candidate) -> float:
    time = best = 0.0
    for (rounds, rates), one in zip(expected_rates(trace), trace.phases, strict=True):
        time += rounds * one.cost_ms[candidate]
        best += rounds * one.cost_ms[candidate] * rates[candidate] / max(rates.values())
    return time / best - 1


def test_the_oracle_has_no_regret() -> None:
    trace = read_trace(CHANGING)
    run = simulate(trace, FixedPlans.oracle(trace), 0)
    assert regret(run.phases) == 0
    assert [one.settled for one in run.phases] == [0, 0, 0]
    assert [one.off_rounds for one in run.phases] == [0, 20, 0]


@pytest.mark.parametrize("pair", [(0, 0), (1, 1), (3, 1), (2, 2)])
def test_a_fixed_candidate_has_the_regret_of_the_closed_form(pair: tuple[int, int]) -> None:
    trace, candidate = read_trace(CHANGING), Candidate(*pair)
    run = simulate(trace, FixedPlans.static(trace, candidate), 3)
    assert regret(run.phases) == pytest.approx(closed_form_regret(trace, candidate), abs=1e-11)
    assert switches(run.phases) == flaps_per_1000(run.phases) == probe_tax(run.phases) == 0
    rates = [rates for _, rates in expected_rates(trace)]
    good = [r[candidate] >= 0.95 * max(r.values()) for r in rates]
    assert [one.settled == 0 for one in run.phases] == good
    assert all(one.settled in (0, one.rounds) for one in run.phases)


def test_never_is_no_slower_than_never() -> None:
    trace = read_trace(CHANGING)
    run = simulate(trace, FixedPlans.static(trace, PLAIN), 0)
    assert slowdown(run.phases) == worst_slowdown(run.phases) == 0
    slow = simulate(trace, FixedPlans.static(trace, Candidate(3, 1)), 0)
    hopeless = 8.5 / 5.0 / 1.05 - 1
    assert worst_slowdown(slow.phases) == pytest.approx(hopeless)
    assert slowdown(slow.phases) < hopeless


def test_accepted_drafts_follow_the_survival() -> None:
    rounds, batch_size = 4000, 4
    mixture = [
        {"survival": {"1": [0.8, 0.6, 0.5], "2": [0.9, 0.75]}},
        {"survival": {"1": [0.3, 0.3, 0.0], "2": [1.0, 1.0]}},
    ]
    trace = read_trace(
        document(phase(rounds=rounds, batch_size=batch_size, survival=None, requests=mixture))
    )
    policy = Scripted(held(Candidate(3, 1)))
    run = simulate(trace, policy, 1)
    for kind, survival in enumerate(s["survival"]["1"] for s in mixture):
        kept = Counter(f.accepted[i] for _, f in policy.told for i in (kind, kind + 2))
        total = sum(kept.values())
        for position, rate in enumerate(survival, start=1):
            share = sum(n for accepted, n in kept.items() if accepted >= position) / total
            deviation = math.sqrt(rate * (1 - rate) / total)
            assert share == pytest.approx(rate, abs=5 * deviation + 1e-12)
    assert run.phases[0].sampled_tokens == batch_size * rounds + sum(
        sum(f.accepted) for _, f in policy.told
    )
    assert sampled_regret(run.phases) == pytest.approx(regret(run.phases), abs=0.02)


def test_shadow_depths_are_sampled_where_the_context_was_committed() -> None:
    rounds = 3000
    trace = read_trace(document(phase(rounds=rounds, shadow_ms=0.25)))
    plan = SpeculationPlan(0, Candidate(3, 1), shadow_depths=(2,))
    policy = Scripted(plan)
    run = simulate(trace, policy, 2)
    proposed: Counter[int] = Counter()
    kept: Counter[int] = Counter()
    for _, feedback in policy.told:
        (shadow,) = feedback.shadow
        assert shadow.draft_loops == 2
        for accepted, rows, right in zip(
            feedback.accepted, shadow.proposed, shadow.accepted, strict=True
        ):
            assert rows == min(accepted + 1, 2)  # the trace knows two positions of depth 2
            for position in range(min(right + 1, rows)):
                proposed[position] += 1
                kept[position] += position < right
    for position, rate in enumerate([0.9, 0.75 / 0.9]):
        deviation = math.sqrt(rate * (1 - rate) / proposed[position])
        assert kept[position] / proposed[position] == pytest.approx(rate, abs=5 * deviation)
    assert run.phases[0].time_ms == pytest.approx(rounds * (8.5 + 0.25))
    assert probe_tax(run.phases) == pytest.approx(0.25 / 8.75)


def test_the_depth_that_ran_is_right_in_the_accepted_rows() -> None:
    trace = read_trace(document(phase(rounds=3000, shadow_ms=0.1)))
    policy = Scripted(SpeculationPlan(0, Candidate(1, 1), shadow_depths=(1,)))
    simulate(trace, policy, 0)
    behind: Counter[int] = Counter()
    for _, feedback in policy.told:
        (shadow,) = feedback.shadow
        for accepted, rows, right in zip(
            feedback.accepted, shadow.proposed, shadow.accepted, strict=True
        ):
            assert rows == accepted + 1
            if accepted:
                behind[right - accepted] += 1
            else:
                assert right == 0
    rate, total = 0.6 / 0.8, sum(behind.values())
    assert set(behind) == {0, 1}
    assert behind[1] / total == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / total))


def test_plain_rounds_tell_of_first_drafts() -> None:
    trace = read_trace(document(phase(rounds=2000, shadow_ms=0.1)))
    policy = Scripted(SpeculationPlan(0, PLAIN, shadow_depths=(1, 2)))
    run = simulate(trace, policy, 0)
    for depth, rate in ((1, 0.8), (2, 0.9)):
        counts = [f.shadow[depth - 1] for _, f in policy.told]
        assert {(c.draft_loops, c.proposed) for c in counts} == {(depth, (1, 1))}
        share = sum(sum(c.accepted) for c in counts) / 4000
        assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 4000))
    assert run.phases[0].time_ms == pytest.approx(2000 * 5.2)


@pytest.mark.parametrize(
    ("candidate", "depths", "shadow_ms"),
    [((3, 1), (2,), None), ((0, 0), (2,), None), ((3, 1), (), 0.1), ((3, 1), (3,), 0.1)],
)
def test_there_are_no_shadows_where_they_are_impossible(
    candidate: tuple[int, int], depths: tuple[int, ...], shadow_ms: float | None
) -> None:
    trace = read_trace(document(phase(shadow_ms=shadow_ms)))
    policy = Scripted(SpeculationPlan(0, Candidate(*candidate), shadow_depths=depths))
    run = simulate(trace, policy, 0)
    assert {f.shadow for _, f in policy.told} == {()}
    assert probe_tax(run.phases) == 0


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    trace = read_trace(CHANGING | {"cost_noise": 0.2, "feedback_duplicates": 0.5})
    runs = {}
    for name, seed in (("first", 5), ("again", 5), ("other", 6)):
        policy = Scripted(held(Candidate(2, 2)), held(Candidate(3, 1)))
        result = simulate(trace, policy, seed, keep_plans=True)
        runs[name] = (result.phases, result.plans, [(n, f, f.seconds) for n, f in policy.told])
    assert runs["first"] == runs["again"] != runs["other"]


def test_two_policies_with_one_seed_meet_the_same_luck() -> None:
    trace = read_trace(document(phase(rounds=50)))
    short, mixed = Scripted(held(Candidate(1, 1))), Scripted(held(PLAIN), held(Candidate(3, 1)))
    simulate(trace, short, 4)
    simulate(trace, mixed, 4)
    pairs = list(zip(short.told, mixed.told, strict=True))[1::2]
    assert len(pairs) == 25
    for (_, one), (_, three) in pairs:
        assert one.accepted == tuple(min(1, a) for a in three.accepted)


def test_noise_keeps_the_mean_and_has_the_deviation_that_was_asked_for() -> None:
    trace = read_trace(document(phase(rounds=4000), cost_noise=0.1))
    policy = Scripted(held(Candidate(1, 1)))
    run = simulate(trace, policy, 0)
    ratios = [f.seconds * 1000 / 6.0 for _, f in policy.told]
    mean = sum(ratios) / len(ratios)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in ratios) / len(ratios))
    assert mean == pytest.approx(1, abs=5 * 0.1 / math.sqrt(4000))
    assert deviation == pytest.approx(0.1, rel=0.1)
    assert run.phases[0].time_ms == pytest.approx(4000 * 6.0)
    assert run.phases[0].sampled_ms == pytest.approx(mean * 4000 * 6.0)


def test_prefill_is_in_the_measured_time_but_in_no_score() -> None:
    trace = read_trace(document(phase(rounds=1000, mixed_prefill=0.5, prefill_ms=2.0)))
    policy = Scripted(held(Candidate(3, 1)))
    run = simulate(trace, policy, 0)
    times = Counter((round(f.seconds * 1000, 9), f.num_prefill_tokens > 0) for _, f in policy.told)
    assert set(times) == {(8.5, False), (10.5, True)}
    assert times[10.5, True] == pytest.approx(500, abs=5 * math.sqrt(250))
    assert run.phases[0].time_ms == pytest.approx(8500)


def test_feedback_comes_after_as_many_further_plans_as_it_is_delayed() -> None:
    trace = read_trace(document(phase(rounds=10), feedback_delay=3))
    policy = Scripted(held(Candidate(1, 1)))
    simulate(trace, policy, 0)
    assert [(asked, f.plan_id) for asked, f in policy.told] == [(n + 4, n) for n in range(7)]


def test_duplicates_come_one_plan_after_the_first_time() -> None:
    trace = read_trace(document(phase(rounds=400), feedback_delay=1, feedback_duplicates=0.5))
    policy = Scripted(held(Candidate(1, 1)))
    simulate(trace, policy, 0)
    first: dict[int, int] = {}
    repeated = 0
    for asked, feedback in policy.told:
        if feedback.plan_id in first:
            assert asked == first.pop(feedback.plan_id) + 1
            repeated += 1
        else:
            assert asked == feedback.plan_id + 2
            first[feedback.plan_id] = asked
    assert repeated == pytest.approx(200, abs=50)


def test_the_policy_is_told_of_new_requests_and_context() -> None:
    trace = read_trace(
        document(
            phase(rounds=2, batch_size=3),
            phase(rounds=2, batch_size=8, context_tokens=900),
            phase(rounds=2, batch_size=2),
            phase(rounds=1, batch_size=2, cohort_change=True),
        )
    )
    policy = Scripted(held(PLAIN))
    simulate(trace, policy, 0)
    assert policy.asked == [
        (3, 512, 3),
        (3, 512, 0),
        (8, 900, 5),
        (8, 900, 0),
        (2, 512, 0),
        (2, 512, 0),
        (2, 512, 2),
    ]


def test_resuming_costs_time_once() -> None:
    trace = read_trace(document(phase(rounds=4), resume_ms=10))
    policy = Scripted(held(PLAIN), held(PLAIN), held(Candidate(1, 1)), held(Candidate(1, 1)))
    run = simulate(trace, policy, 0)
    assert run.phases[0].time_ms == pytest.approx(5 + 5 + 16 + 6)
    never = simulate(trace, FixedPlans.static(trace, Candidate(1, 1)), 0)
    assert never.phases[0].time_ms == pytest.approx(4 * 6)


def test_probes_leave_what_they_interrupt_held_and_cost_what_they_lose() -> None:
    trace = read_trace(document(phase(rounds=40, survival=HOPELESS)))
    policy = Scripted(*[held(PLAIN)] * 9, (Candidate(3, 1), True))
    run = simulate(trace, policy, 0)
    assert switches(run.phases) == 0
    lost = 8.5 - 1.05 * 5.0  # what plain decoding would have needed for the tokens of a probe
    assert run.phases[0].probe_ms == pytest.approx(4 * lost)
    good = simulate(
        read_trace(document(phase(rounds=40))),
        Scripted(held(PLAIN), (Candidate(3, 1), True)),
        0,
    )
    assert good.phases[0].probe_ms == 0  # These probes gain.


def test_flaps_are_changes_after_a_phase_has_settled() -> None:
    best, other = held(Candidate(3, 1)), held(PLAIN)
    plans = [other] * 5 + [best] * 15 + [other] + [best] * 19
    run = simulate(read_trace(document(phase(rounds=40))), Scripted(*plans), 0)
    (only,) = run.phases
    assert (only.settled, only.switches, only.flaps) == (5, 3, 2)
    assert flaps_per_1000(run.phases) == pytest.approx(1000 * 2 / 35)
    never = simulate(read_trace(document(phase(rounds=40))), Scripted(other, (PLAIN, True)), 0)
    assert never.phases[0].settled == 40
    assert flaps_per_1000(never.phases) == 0


def test_the_policy_gets_the_table_with_the_error_and_rounds_take_the_true_time() -> None:
    error = {"depths": {"2": 1.2}, "cells": {"3,1": 0.5}}
    trace = read_trace(document(phase(table_ms=COST_MS | {"0,0": 4.0}), cost_error=error))
    (table,) = believed_costs(trace, 0)
    assert table == pytest.approx(
        {PLAIN: 4.0, Candidate(1, 1): 6.0, Candidate(3, 1): 4.25, Candidate(2, 2): 9.6}
    )
    run = simulate(trace, FixedPlans.static(trace, PLAIN), 0)
    assert run.phases[0].time_ms == pytest.approx(20 * 5.0)


def test_cells_of_one_batch_size_share_their_random_error() -> None:
    trace = read_trace(
        document(phase(), phase(batch_size=8), phase(), cost_error={"cell_deviation": 0.15})
    )
    first, other, again = believed_costs(trace, 0)
    assert first == again != other
    assert believed_costs(trace, 0) == [first, other, again]
    assert believed_costs(trace, 1) != [first, other, again]
    logs = [
        math.log(table[c] / COST_MS[f"{c.num_speculative_tokens},{c.draft_loops}"])
        for seed in range(300)
        for table in believed_costs(trace, seed)[:2]
        for c in trace.candidates
    ]
    assert sum(logs) / len(logs) == pytest.approx(0, abs=5 * 0.15 / math.sqrt(len(logs)))
    variance = sum(x * x for x in logs) / len(logs)
    assert math.sqrt(variance) == pytest.approx(0.15, rel=0.1)


def test_the_result_has_the_promised_keys_and_times_of_decisions() -> None:
    ticks = iter(range(0, 10**9, 1500))
    trace = read_trace(CHANGING)
    runs = [
        simulate(trace, FixedPlans.oracle(trace), seed, clock=lambda: next(ticks))
        for seed in range(3)
    ]
    result: dict[str, Any] = result_document(runs)
    assert list(result) == [
        "regret",
        "slowdown_vs_never",
        "rounds_to_95",
        "flaps_per_1000",
        "probe_tax",
        "switches",
        "decide_us",
    ]
    assert set(result["slowdown_vs_never"]) == {"mean", "worst_phase"}
    assert len(result["rounds_to_95"]) == 3
    assert result["decide_us"]["p50"] == {"mean": 1.5, "low": 1.5, "high": 1.5}
    assert set(result["regret"]) == {"mean", "low", "high"}
    assert [len(run.observe_ns) for run in runs] == [60, 60, 60]
