"""Loads by their names, and which prompt each of their requests gets."""

from __future__ import annotations

import pytest

from looped_spec.errors import ConfigError
from looped_spec.offline.load import Phase, Profile
from looped_spec.offline.load_mixture import prompts_for


def test_a_fixed_load_has_one_phase_and_a_ramp_several() -> None:
    fixed = Profile.parse("fixed:8", 2)
    assert (fixed.kind, fixed.phases) == ("fixed", (Phase(8, 16),))
    ramp = Profile.parse("ramp:1-8-32-8-1", 3)
    assert [phase.concurrency for phase in ramp.phases] == [1, 8, 32, 8, 1]
    assert (ramp.num_requests, ramp.max_concurrency) == (150, 32)


def test_a_phase_may_say_itself_how_many_requests_a_slot_gets() -> None:
    ramp = Profile.parse("ramp:1x4-8-1x2", 3)
    assert ramp.phases == (Phase(1, 4), Phase(8, 24), Phase(1, 2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("two", "profile must be fixed:B or ramp:B-B-..., such as fixed:8 or .*; got 'two'"),
        ("steady:8", "got 'steady:8'"),
        ("fixed:", "got 'fixed:'"),
        ("ramp:1--8", "got '' in 'ramp:1--8'"),
        ("ramp:1-8x", "got '8x' in 'ramp:1-8x'"),
        ("fixed:1-8", "has 2 phases: a fixed one has a single batch size"),
        ("fixed:0", "batch size of profile 'fixed:0' must be between 1 and 65536, got 0"),
        ("fixed:99999", "must be between 1 and 65536, got 99999"),
        ("fixed:8x0", "requests per slot of profile 'fixed:8x0' must be between 1 and 10000"),
        ("fixed:٨", "got '٨' in 'fixed:٨'"),
    ],
)
def test_a_profile_that_is_none_is_refused_with_the_form(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Profile.parse(text)


def test_a_mixture_takes_the_kinds_in_turn_and_repeats_what_is_short() -> None:
    kinds = {"a": [[1], [2]], "b": [[3]]}
    load = Profile.parse("fixed:1", 6)
    assert prompts_for(load, kinds, "mixed") == [[1], [3], [2], [3], [1], [3]]
    assert prompts_for(load, kinds, "a") == [[1], [2], [1], [2], [1], [2]]


def test_a_shift_gives_each_kind_its_share_in_order() -> None:
    kinds = {"a": [[1], [2], [3]], "b": [[4]], "c": [[5], [6]]}
    load = Profile.parse("fixed:1", 7)
    assert prompts_for(load, kinds, "shifting") == [[1], [2], [3], [4], [4], [5], [6]]


def test_a_mixture_that_is_none_or_lacks_kinds_is_refused() -> None:
    load = Profile.parse("fixed:1")
    with pytest.raises(ConfigError, match=r"got 'mixd' \(did you mean 'mixed'\?\)"):
        prompts_for(load, {"a": [[1]], "b": [[2]]}, "mixd")
    with pytest.raises(ConfigError, match="'shifting' needs at least two workloads, got a"):
        prompts_for(load, {"a": [[1]]}, "shifting")
