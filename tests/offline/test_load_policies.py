"""The ways of decoding that a load compares, by their names."""

from __future__ import annotations

import pytest

from looped_spec.control.config import AdaptiveSpecConfig, BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.cost import CostTable
from looped_spec.control.plan import PLAIN, Candidate, RoundFeedback
from looped_spec.errors import ConfigError
from looped_spec.offline.load import Profile
from looped_spec.offline.load_policy import split_names, static_way, ways, without_hope

ONE = (PLAIN, Candidate(1, 1))
CONFIG = AdaptiveSpecConfig(
    4,
    (BatchBucket(1, 1, (*ONE, Candidate(4, 2))), BatchBucket(2, 8, (*ONE, Candidate(2, 1)))),
    cost=CostTable.of({(1, 0, 0, 0): 4.0, (1, 0, 1, 1): 4.5, (1, 0, 2, 1): 5, (1, 0, 4, 2): 9.0}),
)


def names(text: str, profile: str = "fixed:1") -> list[str]:
    return [way.name for way in ways(split_names(text), Profile.parse(profile), CONFIG, 4)]


def test_a_list_of_policies_is_split_at_its_commas_but_not_within_k_and_d() -> None:
    text = "never,static:2,1, static:4,2,ema,goodput:warm"
    assert split_names(text) == ["never", "static:2,1", "static:4,2", "ema", "goodput:warm"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("never,goodputt", r"got 'goodputt' \(did you mean 'goodput'\?\)"),
        ("static:2", "got 'static:2'"),
        ("static:2,1,3", "got 'static:2,1,3'"),
        ("", "got ''"),
        ("ema,,never", "got ''"),
        ("ema,never,ema", "policies has 'ema' twice"),
        ("never:warm", "got 'never:warm'"),
    ],
)
def test_a_policy_that_is_unknown_or_twice_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        split_names(text)


def test_plain_decoding_is_always_there_and_first() -> None:
    assert names("goodput,static:2,1") == ["never", "goodput", "static:2,1"]
    assert names("static:0,0,never") == ["never"]


def test_all_static_ways_are_those_that_the_loads_batch_sizes_have() -> None:
    assert names("static:all") == ["never", "static:1,1", "static:4,2"]
    assert names("static:all", "fixed:8") == ["never", "static:1,1", "static:2,1"]
    assert names("static:all,static:2,1", "ramp:1-8-1") == [
        *("never", "static:1,1", "static:2,1", "static:4,2")
    ]


def test_what_the_model_cannot_do_is_refused_with_the_range() -> None:
    with pytest.raises(ConfigError, match="between 1 and full_loops - 1 = 3, got 4"):
        names("static:2,4")
    with pytest.raises(ConfigError, match="with 1 loop there is no cheaper draft"):
        ways(["goodput"], Profile.parse("fixed:1"), None, 1)


def test_a_policy_without_hope_stays_off_and_yet_decides() -> None:
    controller = AdaptiveController(without_hope(CONFIG))
    for _ in range(300):
        plan = controller.plan(1, context_tokens=10)
        assert plan.candidate == PLAIN
        controller.observe(RoundFeedback(plan.plan_id, (0,), (0,), 0.004))
    assert static_way(PLAIN).name == "never"
