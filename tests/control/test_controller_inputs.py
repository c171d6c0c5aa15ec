"""The controller against inputs that no engine should give, and states that are none."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import RoundFeedback
from looped_spec.errors import ConfigError

POLICIES = ("static", "ema", "goodput")


def trained(policy: str) -> AdaptiveController:
    controller = AdaptiveController(AdaptiveSpecConfig.default(4, 8, policy=policy))
    for _ in range(30):
        plan = controller.plan(4, context_tokens=100)
        k = plan.candidate.num_speculative_tokens
        controller.observe(RoundFeedback(plan.plan_id, (k,) * 4, (k // 2,) * 4, 0.01))
    return controller


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_size", [0, -5, 10**6])
def test_any_batch_size_gets_a_candidate_of_a_bucket(policy: str, batch_size: int) -> None:
    controller = AdaptiveController(AdaptiveSpecConfig.default(4, 8, policy=policy))
    plan = controller.plan(batch_size)
    assert plan.candidate in controller.config.buckets[plan.bucket].candidates


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("context_tokens", [float("nan"), float("inf"), -3.0, 10**400])
def test_a_context_that_is_no_length_is_taken_as_none(policy: str, context_tokens: float) -> None:
    odd, plain = trained(policy), trained(policy)
    assert odd.plan(4, context_tokens=context_tokens) == plain.plan(4, context_tokens=0)


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_that_load_one_state_keep_its_choices_and_agree(policy: str) -> None:
    saved = trained(policy)
    document = json.dumps(saved.state_dict())
    ranks = [AdaptiveController(saved.config) for _ in range(2)]
    for rank in ranks:
        rank.load_state_dict(json.loads(document))
        assert [b.current for b in rank.explain().buckets] == [
            b.current for b in saved.explain().buckets
        ]
    for batch_size in (4, 4, 1, 8, 2, 2) * 5:
        left, right = (rank.plan(batch_size, context_tokens=100) for rank in ranks)
        assert left == right
        k = left.candidate.num_speculative_tokens
        outcome = RoundFeedback(left.plan_id, (k,) * batch_size, (k,) * batch_size, 0.02)
        for rank in ranks:
            rank.observe(outcome)
    assert ranks[0].state_dict() == ranks[1].state_dict()


BROKEN: list[tuple[str, Any]] = [
    ("version", 99),
    ("version", 1),
    ("version", "2"),
    ("policy", "other"),
    ("candidates", []),
    ("candidates", None),
    ("learnt", None),
    ("learnt", []),
    ("learnt", 5),
    ("next_id", "x"),
    ("next_id", -1),
    ("bucket", 99),
    ("bucket", -2),
    ("bucket", None),
    ("rounds_below", "x"),
]


@pytest.mark.parametrize("policy", ["ema", "goodput"])
@pytest.mark.parametrize(("key", "value"), BROKEN)
def test_a_broken_state_is_an_error_and_changes_nothing(policy: str, key: str, value: Any) -> None:
    controller = trained(policy)
    before = json.dumps(controller.state_dict())
    state = copy.deepcopy(controller.state_dict())
    state[key] = value
    with pytest.raises(ConfigError):
        controller.load_state_dict(state)
    assert json.dumps(controller.state_dict()) == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("key", ["learnt", "next_id", "bucket", "rounds_below"])
def test_a_state_without_a_part_is_an_error(policy: str, key: str) -> None:
    controller = trained(policy)
    state = controller.state_dict()
    del state[key]
    with pytest.raises(ConfigError, match=key):
        controller.load_state_dict(state)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", [None, [], 3, "{}"])
def test_what_is_no_object_is_no_state(policy: str, state: Any) -> None:
    with pytest.raises(ConfigError, match="a controller state must be a JSON object, got"):
        trained(policy).load_state_dict(state)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_state_of_other_candidates_is_refused(policy: str) -> None:
    """Of more, of fewer, or of the same number."""
    controller = trained(policy)
    state = controller.state_dict()
    bucket = state["candidates"][0]
    for others in (bucket[:-1], [*bucket, [60, 1]], [*bucket[:-1], [60, 1]]):
        changed = copy.deepcopy(state) | {"candidates": [others, *state["candidates"][1:]]}
        with pytest.raises(ConfigError, match="other buckets or candidates than this one's"):
            controller.load_state_dict(changed)


@pytest.mark.parametrize(
    ("policy", "path", "value"),
    [
        ("ema", ("buckets", 0, "ema", 0), "a"),
        ("ema", ("buckets", 0, "ema", 0), 1e308),
        ("ema", ("buckets", 0, "rounds", 0), -1),
        ("ema", ("buckets", 0, "position"), {}),
        ("ema", ("buckets", 0, "waited"), []),
        ("ema", ("buckets", 0, "is_off"), 3),
        ("goodput", ("acceptance", "trials", 0, 0), -1.0),
        ("goodput", ("acceptance", "hits"), []),
        ("goodput", ("explorer", "doubt"), []),
        ("goodput", ("incumbent", "left", 0), []),
        ("goodput", ("incumbent", "lead"), "a"),
        ("goodput", ("cost", "common"), 1e9),
        ("goodput", ("cost", "noise"), 0.0),
        ("goodput", ("acceptance", "trials", 0, 0), 10**400),
    ],
)
def test_a_state_with_a_value_of_another_kind_is_refused(
    policy: str, path: tuple[Any, ...], value: Any
) -> None:
    controller = trained(policy)
    state = copy.deepcopy(controller.state_dict())
    part = state["learnt"]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(ConfigError):
        controller.load_state_dict(state)


def test_the_state_of_a_long_life_whose_evidence_weighs_much_is_taken() -> None:
    controller = trained("goodput")
    state = copy.deepcopy(controller.state_dict())
    evidence = state["learnt"]["acceptance"]
    evidence["weight"] *= 1e99
    for name in ("hits", "trials"):
        evidence[name] = [[1e99 * value for value in row] for row in evidence[name]]
    controller.load_state_dict(state)
    assert controller.state_dict()["learnt"]["acceptance"]["weight"] == evidence["weight"]


@pytest.mark.parametrize(("place", "value"), [(0, 1e9), (1, -1), (1, 10**400), (2, None)])
def test_a_state_with_an_impossible_cell_is_refused(place: int, value: Any) -> None:
    controller = trained("goodput")
    state = copy.deepcopy(controller.state_dict())
    next(iter(state["learnt"]["cost"]["cells"].values()))[place] = value
    with pytest.raises(ConfigError):
        controller.load_state_dict(state)


@pytest.mark.parametrize("name", ["next_id", "bucket", "rounds_below"])
def test_a_state_whose_counts_are_infinite_is_refused(name: str) -> None:
    controller = trained("goodput")
    with pytest.raises(ConfigError, match="OverflowError"):
        controller.load_state_dict(controller.state_dict() | {name: math.inf})


def test_a_state_with_numbers_that_are_none_is_refused() -> None:
    controller = trained("goodput")
    state = copy.deepcopy(controller.state_dict())
    state["learnt"]["acceptance"]["levels"]["means"][0] = math.nan
    with pytest.raises(ConfigError, match="the state is not one of this configuration"):
        controller.load_state_dict(state)
