"""Whatever a policy does, the text is the same; and it is told what really happened."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import (
    GREEDY,
    PROMPTS,
    VOCAB,
    BareToy,
    ScriptedToy,
    assert_all_free,
    like,
    oracle_text,
    shared_toy,
)

from looped_spec import AdaptiveSpecConfig
from looped_spec.control.config import BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback, SpeculationPlan
from looped_spec.runtime import engine as engine_module
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_generate

LOOPS = 4
CHOICES = (PLAIN, *(Candidate(k, d) for k in (1, 2, 3, 5, 8) for d in (1, 2, 3)))
TIGHT: dict[str, Any] = {"num_blocks": 25, "block_size": 1}
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 3, "block_size": 3}
PARAMS = (
    GREEDY,
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=5, max_tokens=16),
    SamplingParams(temperature=1.2, seed=-4, max_tokens=18),
)


class AdversarialPolicy:
    """Runs anything at any time; remembers what it was asked and told."""

    def __init__(self, seed: int, choices: Sequence[Candidate] = CHOICES) -> None:
        self.dice, self.choices = random.Random(seed), choices
        self.asked: list[tuple[int, float, int]] = []
        self.plans: list[SpeculationPlan] = []
        self.feedback: list[RoundFeedback] = []

    def plan(
        self, batch_size: int, *, context_tokens: float = 0, new_requests: int = 0
    ) -> SpeculationPlan:
        self.asked.append((batch_size, context_tokens, new_requests))
        depths = tuple(d for d in (1, 2, 3) if self.dice.random() < 0.3)
        plan = SpeculationPlan(
            7 * len(self.plans),
            self.dice.choice(self.choices),
            probe=self.dice.random() < 0.2,
            shadow_depths=depths,
        )
        self.plans.append(plan)
        return plan

    def observe(self, feedback: RoundFeedback) -> None:
        self.feedback.append(feedback)


def engine_of(adapter: Any, policy: AdversarialPolicy, **setup: Any) -> Engine:
    engine = make_engine(adapter, **setup)
    engine.policy, engine.candidates = policy, frozenset(policy.choices)
    return engine


@pytest.mark.parametrize("setup", [{}, TIGHT, CHUNKED], ids=["easy", "tight", "chunked"])
@pytest.mark.parametrize("seed", range(4))
def test_any_candidate_in_any_round_gives_the_text_of_the_oracle(
    seed: int, setup: dict[str, Any]
) -> None:
    policy = AdversarialPolicy(seed)
    engine = engine_of(shared_toy(), policy, **setup)
    requests = run_all(engine, PROMPTS, PARAMS)
    assert [r.output_token_ids for r in requests] == [
        oracle_text(p, one) for p, one in zip(PROMPTS, PARAMS, strict=True)
    ]
    assert len({plan.candidate for plan in policy.plans}) >= 3
    assert setup is not TIGHT or engine.scheduler.num_preemptions


@pytest.mark.parametrize("setup", [{}, TIGHT, CHUNKED], ids=["easy", "tight", "chunked"])
def test_shadow_depths_in_any_round_change_no_text(setup: dict[str, Any]) -> None:
    adapter = like(BareToy)
    engine = engine_of(adapter, AdversarialPolicy(9), **setup)
    requests = run_all(engine, PROMPTS, PARAMS)
    for request, prompt, one in zip(requests, PROMPTS, PARAMS, strict=True):
        seed = one.seed or 0
        want = dense_generate(
            adapter, prompt, one.max_tokens, full_loops=LOOPS, params=one, seed=seed
        )
        assert request.output_token_ids == want


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**16), st.lists(st.integers(0, 20), min_size=3, max_size=3), st.booleans())
def test_aborts_at_any_step_leave_the_others_their_text(
    seed: int, patience: list[int], is_tight: bool
) -> None:
    engine = engine_of(shared_toy(), AdversarialPolicy(seed), **(TIGHT if is_tight else {}))
    requests = [engine.add_request(p, one) for p, one in zip(PROMPTS, PARAMS, strict=True)]
    for step in range(400):
        for request, last in zip(requests, patience, strict=True):
            if step == last < 15:
                engine.abort(request)
        if not engine.has_work:
            break
        engine.step()
    assert_all_free(engine)
    for request, prompt, one in zip(requests, PROMPTS, PARAMS, strict=True):
        want = oracle_text(prompt, one)
        got = request.output_token_ids
        assert got == (want[: len(got)] if request.finish_reason == "abort" else want)


@pytest.mark.parametrize("seed", range(3))
def test_ends_inside_drafts_are_where_plain_decoding_ends(seed: int) -> None:
    text = oracle_text(PROMPTS[0], GREEDY)
    for eos in sorted(set(text)):
        engine = engine_of(shared_toy(), AdversarialPolicy(seed), eos_token_ids=(eos,))
        [request] = run_all(engine, PROMPTS[:1], GREEDY)
        assert request.output_token_ids == text[: text.index(eos) + 1]
        assert request.finish_reason == "stop"


@pytest.mark.parametrize("setup", [{}, TIGHT, CHUNKED], ids=["easy", "tight", "chunked"])
@pytest.mark.parametrize("seed", range(3))
def test_the_policy_is_asked_for_the_requests_that_run_and_told_of_the_same(
    seed: int, setup: dict[str, Any]
) -> None:
    policy = AdversarialPolicy(seed)
    engine = engine_of(like(BareToy), policy, **setup)
    ran: list[list[tuple[Request, int]]] = []
    run = engine.runner.round

    def watched(requests: Sequence[Request], *args: Any) -> Any:
        ran.append([(request, request.num_tokens) for request in requests])
        return run(requests, *args)

    engine.runner.round = watched  # type: ignore[method-assign]
    run_all(engine, PROMPTS, PARAMS)
    assert [f.plan_id for f in policy.feedback] == [plan.plan_id for plan in policy.plans]
    seen: set[int] = set()
    for round_, asked, feedback in zip(ran, policy.asked, policy.feedback, strict=True):
        batch_size, context_tokens, new_requests = asked
        assert batch_size == len(round_) == len(feedback.proposed) == len(feedback.accepted)
        lengths = [n for _, n in round_]
        # The longest where attention pads the others to it, else the mean.
        assert context_tokens in (max(lengths), sum(lengths) // batch_size)
        ids = {request.request_id for request, _ in round_}
        assert new_requests == len(ids - seen), "a preempted request is not new when it is back"
        seen |= ids
        k = feedback.num_speculative_tokens
        assert k is not None
        pairs = zip(feedback.proposed, feedback.accepted, strict=True)
        assert all(0 <= a <= p <= k for p, a in pairs)
        for counts in feedback.shadow:
            told = zip(counts.proposed, counts.accepted, feedback.accepted, strict=True)
            assert all(0 <= a <= p <= own + 1 for p, a, own in told)
    assert seen == {0, 1, 2}


def test_prefill_is_counted_neither_as_a_request_nor_in_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = AdversarialPolicy(1)
    engine = engine_of(shared_toy(), policy, max_num_batched_tokens=4)
    engine.add_request(PROMPTS[0], PARAMS[2])
    while not policy.feedback:
        engine.step()
    clock = itertools.count()
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: float(next(clock)))
    prefill = engine.runner.prefill

    def slow(chunks: Any) -> Any:
        for _ in range(1000):
            next(clock)
        return prefill(chunks)

    engine.runner.prefill = slow  # type: ignore[method-assign]
    late = engine.add_request([3] * 60, GREEDY)
    before = len(policy.asked)
    while not late.output_token_ids:
        engine.step()
    assert len(policy.asked) > before + 3
    assert {size for size, _, _ in policy.asked[before:]} == {1}
    assert all(0 < f.seconds < 10 for f in policy.feedback[before:])
    assert all(f.num_prefill_tokens == 0 for f in policy.feedback)


def scripted_engine(choices: Sequence[Candidate]) -> tuple[Engine, AdversarialPolicy]:
    """Every draft is right."""
    adapter = like(ScriptedToy)
    text = oracle_text(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=24))
    adapter.script = {len(PROMPTS[0]) + i: token for i, token in enumerate(text)}
    policy = AdversarialPolicy(0, [choices[0]])
    engine = make_engine(adapter)
    engine.policy, engine.candidates = policy, frozenset(choices)
    return engine, policy


@pytest.mark.parametrize(
    ("max_tokens", "lengths"),
    [
        (2, [0]),  # one token left behind the prompt's: no draft's due
        (3, [2]),  # one draft could be committed, two are the fewest that may be run
        (4, [2]),
        (5, [6]),  # three could, and nothing between two and six may be run
        (8, [6]),
        (9, [6, 0]),
        (11, [6, 2]),
    ],
)
def test_a_round_is_no_longer_than_any_request_has_room_for(
    max_tokens: int, lengths: list[int]
) -> None:
    engine, policy = scripted_engine([Candidate(6, 2), Candidate(2, 2), Candidate(3, 1)])
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    [request] = run_all(engine, PROMPTS[:1], params)
    assert [f.num_speculative_tokens for f in policy.feedback] == lengths
    assert sum(f.proposed[0] for f in policy.feedback) == request.metrics.num_draft_tokens
    assert len(request.output_token_ids) == max_tokens


def test_a_request_with_room_keeps_the_round_long() -> None:
    engine, policy = scripted_engine([Candidate(6, 2), Candidate(2, 2)])
    short, long = (SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 16))
    for params in (short, long):
        engine.add_request(PROMPTS[0], params)
    engine.step()
    engine.step()
    assert policy.feedback[0].num_speculative_tokens == 6
    assert policy.feedback[0].proposed == (1, 6)


def test_metrics_say_which_candidates_ran_how_often_they_changed_and_which_were_probes() -> None:
    policy = AdversarialPolicy(3)
    engine = engine_of(shared_toy(), policy)
    [request] = run_all(engine, PROMPTS[:1], PARAMS[2])
    ran = [
        Candidate(k, plan.candidate.draft_loops) if k else PLAIN
        for plan, k in zip(
            policy.plans, (f.num_speculative_tokens for f in policy.feedback), strict=True
        )
        if k is not None
    ]
    metrics = request.metrics
    assert metrics.rounds_by_candidate == {c: ran.count(c) for c in set(ran)}
    counts = list(metrics.rounds_by_candidate.values())
    assert counts == sorted(counts, reverse=True)
    assert metrics.num_switches == sum(a != b for a, b in itertools.pairwise(ran))
    assert metrics.num_probe_rounds == sum(plan.probe for plan in policy.plans)
    assert sum(metrics.acceptance_histogram) == metrics.num_rounds
    weighted = sum(i * count for i, count in enumerate(metrics.acceptance_histogram))
    assert weighted == metrics.num_accepted_tokens


@pytest.mark.parametrize("policy", ["goodput", "ema", "static"])
def test_a_controller_of_any_policy_changes_no_text_and_gets_all_its_feedback(policy: str) -> None:
    buckets = (
        BatchBucket(1, 1, CHOICES, 4),
        BatchBucket(2, 4, (PLAIN, Candidate(1, 1), Candidate(2, 1), Candidate(4, 2)), 1),
    )
    adapter = like(BareToy)
    controller = AdaptiveController(
        AdaptiveSpecConfig(LOOPS, buckets, policy, shadow_depths_available=True)
    )
    engine = make_engine(adapter)
    engine.policy, engine.candidates = controller, frozenset(controller.config.candidates)
    prompts = [[i + 1, (7 * i) % VOCAB] for i in range(12)]
    requests = run_all(engine, prompts, GREEDY)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == dense_generate(adapter, prompt, 16, full_loops=LOOPS)
    stats = controller.stats()
    assert stats.plans == stats.feedback > 0
    assert stats.stale_feedback == stats.invalid_feedback == 0
