"""Whatever the engine does, the controller chooses what it may, and stays finite and small."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import RoundFeedback, ShadowCounts, SpeculationPlan

POLICIES = ("static", "ema", "goodput")
MAX_NUM_SEQS = 12
FEW = settings(max_examples=25, deadline=None, derandomize=True)
SECONDS = st.one_of(
    st.floats(1e-6, 10.0), st.sampled_from([0.0, -1.0, math.inf, math.nan, 5e-324, 1e300])
)
Step = tuple[int, int, float, float, int]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 15),  # decoding requests, also none and too many
        st.integers(0, 4),  # feedback that is delivered after the plan
        st.one_of(st.floats(0, 1e6), st.just(math.nan)),  # mean context
        SECONDS,
        st.integers(0, 2**16),  # luck
    ),
    max_size=60,
)


def controller_of(policy: str, **options: Any) -> AdaptiveController:
    return AdaptiveController(
        AdaptiveSpecConfig.default(
            4, MAX_NUM_SEQS, policy=policy, shadow_depths_available=True, **options
        )
    )


def outcome(plan: SpeculationPlan, batch_size: int, seconds: float, luck: int) -> RoundFeedback:
    """Return some outcome of a plan: drafts cut short, any number accepted, any readouts."""
    dice = random.Random(luck)
    k = plan.candidate.num_speculative_tokens
    proposed = tuple(dice.choice((k, dice.randint(0, k))) for _ in range(max(batch_size, 0)))
    accepted = tuple(dice.randint(0, p) for p in proposed)
    shadow = tuple(
        ShadowCounts(d, tuple(a + 1 for a in accepted), tuple(dice.randint(0, 1) for _ in accepted))
        for d in plan.shadow_depths
    )
    prefill = dice.choice((0, 0, 300))
    return RoundFeedback(plan.plan_id, proposed, accepted, seconds, None, prefill, shadow)


def numbers(value: Any) -> Iterator[float]:
    """Yield every number of a JSON document."""
    if isinstance(value, dict):
        for one in value.values():
            yield from numbers(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, int | float):
        yield value


def assert_sound(controller: AdaptiveController) -> None:
    for document in (
        controller.state_dict(),
        controller.explain().as_dict(),
        controller.stats().as_dict(),
    ):
        assert all(math.isfinite(number) for number in numbers(document))
        json.dumps(document, allow_nan=False)
    assert "nan" not in str(controller.explain())


def run(controller: AdaptiveController, steps: list[Step], shuffle: random.Random) -> None:
    """Plan in turn, and hand over feedback in any order, some of it twice, some never."""
    waiting: list[RoundFeedback] = []
    for batch_size, delivered, context, seconds, luck in steps:
        plan = controller.plan(batch_size, context_tokens=context, new_requests=luck % 3)
        bucket = controller.config.buckets[plan.bucket]
        assert plan.candidate in bucket.candidates
        assert plan.candidate.num_speculative_tokens <= controller.max_k
        assert min(batch_size, MAX_NUM_SEQS) <= bucket.max_batch_size
        waiting.append(outcome(plan, batch_size, seconds, luck))
        shuffle.shuffle(waiting)
        for _ in range(min(delivered, len(waiting))):
            feedback = waiting.pop()
            controller.observe(feedback)
            if luck % 4 == 0:
                controller.observe(feedback)


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(steps=STEPS, seed=st.integers(0, 2**16))
def test_any_batches_any_feedback_in_any_order_give_a_listed_candidate_and_finite_numbers(
    policy: str, steps: list[Step], seed: int
) -> None:
    """Scenario 40 with it: never a candidate beyond the bucket's list, nor above the maximum."""
    controller = controller_of(policy)
    run(controller, steps, random.Random(seed))
    assert_sound(controller)
    assert controller.stats().plans == len(steps)


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(steps=STEPS, seed=st.integers(0, 2**16))
def test_the_same_inputs_give_the_same_plans(policy: str, steps: list[Step], seed: int) -> None:
    first, second = controller_of(policy), controller_of(policy)
    for controller in (first, second):
        run(controller, steps, random.Random(seed))
    assert first.stats() == second.stats()
    assert json.dumps(first.state_dict()) == json.dumps(second.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(steps=STEPS, seed=st.integers(0, 2**16))
def test_duplicates_change_nothing_but_their_count(
    policy: str, steps: list[Step], seed: int
) -> None:
    once, twice = controller_of(policy), controller_of(policy)
    run(once, [(*step[:4], step[4] | 1) for step in steps], random.Random(seed))
    repeated = 0
    observe = twice.observe

    def observe_twice(feedback: RoundFeedback) -> None:
        nonlocal repeated
        observe(feedback)
        observe(feedback)
        repeated += 1

    twice.observe = observe_twice  # type: ignore[method-assign]
    run(twice, [(*step[:4], step[4] | 1) for step in steps], random.Random(seed))
    assert json.dumps(once.state_dict()) == json.dumps(twice.state_dict())
    assert twice.stats().stale_feedback - once.stats().stale_feedback == repeated


@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(
    proposed=st.lists(st.integers(-3, 20), max_size=6).map(tuple),
    accepted=st.lists(st.integers(-3, 20), max_size=6).map(tuple),
    ran=st.one_of(st.none(), st.integers(-2, 20)),
)
def test_counts_that_contradict_themselves_are_refused_or_harmless(
    policy: str, proposed: tuple[int, ...], accepted: tuple[int, ...], ran: int | None
) -> None:
    controller = controller_of(policy)
    for _ in range(8):
        plan = controller.plan(4)
        controller.observe(RoundFeedback(plan.plan_id, proposed, accepted, 0.01, ran))
    assert_sound(controller)
    if len(proposed) != len(accepted) or any(
        a > p for p, a in zip(proposed, accepted, strict=True)
    ):
        assert controller.stats().invalid_feedback == 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seconds", [5e-324, 1e-300, 1e300])
def test_a_broken_clock_makes_no_number_overflow(policy: str, seconds: float) -> None:
    controller = controller_of(policy)
    for number in range(400):
        plan = controller.plan(1 + number // 50 % 3)
        took = 0.005 if number % 3 else seconds
        controller.observe(outcome(plan, 1 + number // 50 % 3, took, number))
    for number in range(100):
        plan = controller.plan(2)
        controller.observe(outcome(plan, 2, seconds, number))
    assert_sound(controller)


def sizes(value: Any, seen: set[int]) -> int:
    """Return how many items all containers behind an object hold."""
    if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
        return 0
    seen.add(id(value))
    if type(value).__name__ == "deque" and value.maxlen is not None:
        return int(value.maxlen)  # it is bounded, whenever it fills
    if isinstance(value, dict):
        return len(value) + sum(sizes(one, seen) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        return len(value) + sum(sizes(one, seen) for one in value)
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    return sum(sizes(getattr(value, name, None), seen) for name in names)


@functools.cache
def draws(k: int, batch_size: int) -> list[tuple[int, ...]]:
    """Return accepted counts of a batch, a prime number of times: drawing them anew for each of a
    million rounds takes longer than most policies do."""
    dice = random.Random(k)
    return [tuple(dice.randint(0, k) for _ in range(batch_size)) for _ in range(997)]


def held_after(policy: str, rounds: int) -> tuple[int, int]:
    """Return the items that a controller holds after half of the rounds and after all, over a few
    loads, with feedback that is lost, late or repeated."""
    controller = controller_of(policy)
    held: list[int] = []
    for number in range(rounds):
        batch_size = (1, 2, 8, 12)[number // 25 % 4]
        plan = controller.plan(batch_size, context_tokens=64 << number // 500 % 4)
        k = plan.candidate.num_speculative_tokens
        accepted = draws(k, batch_size)[number % 997]
        feedback = RoundFeedback(plan.plan_id, (k,) * batch_size, accepted, 0.005)
        if number % 7:
            controller.observe(feedback)
        if number % 11 == 0:
            controller.observe(feedback)
        if number + 1 in (rounds // 2, rounds):
            held.append(sizes(controller, set()))
    assert_sound(controller)
    return held[0], held[1]


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_stops_growing(policy: str) -> None:
    half, whole = held_after(policy, 20_000)
    assert half > 100
    assert whole <= 1.02 * half + 64


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_the_same_after_a_million_rounds(policy: str) -> None:
    _, early = held_after(policy, 20_000)
    half, whole = held_after(policy, 1_000_000)
    assert whole <= 1.02 * half + 64
    assert whole <= 1.05 * early + 64
