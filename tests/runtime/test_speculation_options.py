"""Who chooses (K, d), and from what: options, their conflicts, and the forms of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import shared_toy

from looped_spec import AdaptiveSpecConfig
from looped_spec.control.config import BatchBucket
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.errors import ConfigError, UnsupportedError
from looped_spec.options import EngineOptions
from looped_spec.runtime.speculation import Speculation, choose_speculation
from looped_spec.testing.toy import ToyAdapter

LOOPS = 4
SEQS = 32
CONFIG = AdaptiveSpecConfig(
    LOOPS,
    (
        BatchBucket(1, 4, (PLAIN, Candidate(2, 1), Candidate(4, 2))),
        BatchBucket(5, SEQS, (PLAIN, Candidate(1, 1))),
    ),
    policy="ema",
)


def choose(**options: Any) -> Speculation:
    return choose_speculation(EngineOptions(max_num_seqs=SEQS, **options), shared_toy(), LOOPS)


def config(**options: Any) -> AdaptiveSpecConfig:
    chosen = choose(**options)
    assert isinstance(chosen, AdaptiveSpecConfig)
    return chosen


def test_without_any_option_k_and_d_are_chosen_by_goodput_from_the_models_suggestion_on() -> None:
    chosen = config()
    assert (chosen.policy, chosen.full_loops, chosen.max_num_seqs) == ("goodput", LOOPS, SEQS)
    first = chosen.buckets[0]
    assert first.candidates[first.initial] == Candidate(*ToyAdapter.default_speculation)
    assert all(PLAIN in bucket.candidates for bucket in chosen.buckets)


def test_an_unusual_suggestion_becomes_a_candidate_where_it_is_not_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ToyAdapter, "default_speculation", (5, 3))
    buckets = config().buckets
    assert buckets[0].candidates[buckets[0].initial] == Candidate(5, 3)
    assert Candidate(5, 3) not in buckets[-1].candidates
    ladder = config(policy="ema").buckets[0].candidates
    assert len({c.draft_loops for c in ladder if c != PLAIN}) == 1


@pytest.mark.parametrize("policy", ["ema", "goodput"])
def test_a_policy_may_be_asked_for(policy: str) -> None:
    assert config(policy=policy).policy == policy
    assert config(policy=policy, speculative_adaptive=True).policy == policy


@pytest.mark.parametrize("options", [{"speculative_adaptive": False}, {"policy": "static"}])
def test_the_same_in_every_round_is_what_the_model_suggests(options: dict[str, Any]) -> None:
    assert choose(**options) == Candidate(*ToyAdapter.default_speculation)


@pytest.mark.parametrize("options", [{}, {"policy": "static"}, {"speculative_adaptive": False}])
def test_a_k_that_is_given_is_kept(options: dict[str, Any]) -> None:
    assert choose(num_speculative_tokens=3, **options) == Candidate(3, 1)
    assert choose(num_speculative_tokens=3, draft_loops=2, **options) == Candidate(3, 2)
    assert choose(num_speculative_tokens=0, **options) == PLAIN


def test_a_model_that_suggests_nothing_speculates_only_if_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ToyAdapter, "default_speculation", None)
    assert choose() == PLAIN
    assert choose(speculative_adaptive=False) == PLAIN
    assert config(speculative_adaptive=True).policy == "goodput"
    assert config(policy="ema").policy == "ema"
    assert choose(speculative_adaptive_config=CONFIG) == CONFIG


def test_one_loop_leaves_nothing_to_choose() -> None:
    assert choose_speculation(EngineOptions(), shared_toy(), 1) == PLAIN
    with pytest.raises(ConfigError, match="full_loops of at least 2"):
        choose_speculation(EngineOptions(speculative_adaptive=True), shared_toy(), 1)


def test_a_configuration_may_come_as_an_object_a_document_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps(CONFIG.to_json()))
    for given in (CONFIG, CONFIG.to_json(), json.dumps(CONFIG.to_json()), file, str(file)):
        assert choose(speculative_adaptive_config=given) == CONFIG
    assert choose(speculative_adaptive_config=CONFIG, policy="ema") == CONFIG


@pytest.mark.parametrize(
    ("options", "one", "other"),
    [
        (
            {"num_speculative_tokens": 2, "policy": "goodput"},
            "num_speculative_tokens",
            "policy='goodput'",
        ),
        (
            {"num_speculative_tokens": 0, "speculative_adaptive": True},
            "num_speculative_tokens",
            "speculative_adaptive",
        ),
        (
            {"num_speculative_tokens": 2, "speculative_adaptive_config": CONFIG},
            "num_speculative_tokens",
            "speculative_adaptive_config",
        ),
        (
            {"speculative_config": {}, "policy": "ema"},
            "speculative_config",
            "policy='ema'",
        ),
        (
            {"speculative_config": {}, "num_speculative_tokens": 2},
            "speculative_config",
            "num_speculative_tokens",
        ),
        (
            {"speculative_adaptive": False, "policy": "goodput"},
            "speculative_adaptive=False",
            "policy='goodput'",
        ),
        (
            {"speculative_adaptive": True, "policy": "static"},
            "policy='static'",
            "speculative_adaptive",
        ),
        (
            {"speculative_adaptive": False, "speculative_adaptive_config": CONFIG},
            "speculative_adaptive=False",
            "speculative_adaptive_config",
        ),
        (
            {"speculative_adaptive_config": CONFIG, "policy": "goodput"},
            "policy='goodput'",
            "speculative_adaptive_config",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused_with_both_names(
    options: dict[str, Any], one: str, other: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(**options)
    assert one in str(caught.value) and other in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 1},
        {"policy": "goodput"},
        {"speculative_adaptive": True},
        {"speculative_adaptive_config": CONFIG},
        {"speculative_config": {"num_speculative_tokens": 1}},
    ],
)
def test_early_exit_takes_no_speculation_of_any_kind(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="early exit cannot be combined with speculation"):
        EngineOptions(exit_threshold=0.5, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "greedy"}, "policy must be one of static, ema, goodput, got 'greedy'"),
        ({"policy": "emma"}, r"did you mean 'ema'\?"),
        ({"speculative_adaptive": "yes"}, "speculative_adaptive must be True or False"),
        ({"speculative_adaptive_config": "no/such.json"}, "'no/such.json' cannot be read"),
        ({"speculative_adaptive_config": "{"}, "speculative_adaptive_config is no JSON"),
        ({"speculative_adaptive_config": {"bucket": 1}}, r"'bucket' \(did you mean 'buckets'"),
        ({"speculative_config": "{"}, "speculative_config is no JSON"),
        *(
            ({name: given}, f"{name} must be a JSON object or the name of a file with one, got")
            for name in ("speculative_config", "speculative_adaptive_config")
            for given in ("", "  ", "[]", "[1", "null", "3", '"text"', 7, [])
        ),
        (
            {"speculative_config": {"num_speculative_tokens": 0, "draft_loops": 9}},
            "draft_loops must be between 0 and 3, got 9",
        ),
        (
            {"num_speculative_tokens": 0, "draft_loops": 9},
            "draft_loops must be between 0 and 3, got 9",
        ),
    ],
)
def test_a_wrong_value_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(**options)


def test_a_configuration_of_another_depth_or_size_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="is for full_loops 4, this run has 3: give full_loops=4"):
        choose_speculation(EngineOptions(speculative_adaptive_config=CONFIG), shared_toy(), 3)
    with pytest.raises(ConfigError, match="max_num_seqs = 8, they end at 32"):
        choose_speculation(
            EngineOptions(speculative_adaptive_config=CONFIG, max_num_seqs=8), shared_toy(), LOOPS
        )


def test_the_form_of_vllm_gives_one_choice_for_all() -> None:
    given = {"method": "self_speculative", "num_speculative_tokens": 3, "draft_loops": 2}
    assert choose(speculative_config=given) == Candidate(3, 2)
    assert choose(speculative_config=json.dumps(given)) == Candidate(3, 2)
    assert choose(speculative_config={"num_speculative_tokens": 3}) == Candidate(3, 1)
    assert choose(speculative_config={"num_speculative_tokens": 0}) == PLAIN


def test_the_form_of_vllm_gives_a_choice_for_each_range_of_batch_sizes() -> None:
    entries = [[1, 4, 4, 2], [5, 16, 1], (17, SEQS, 0)]
    chosen = config(
        speculative_config={
            "num_speculative_tokens": 4,
            "draft_loops": 3,
            "num_speculative_tokens_per_batch_size": entries,
        }
    )
    assert chosen.policy == "static"
    assert [(b.min_batch_size, b.max_batch_size, b.candidates) for b in chosen.buckets] == [
        (1, 4, (Candidate(4, 2),)),
        (5, 16, (Candidate(1, 3),)),
        (17, SEQS, (PLAIN,)),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs num_speculative_tokens or"),
        ({"num_speculative_token": 2}, r"did you mean 'num_speculative_tokens'"),
        ({"method": "eagle", "num_speculative_tokens": 2}, "method of speculative_config must be"),
        ({"num_speculative_tokens": 2.0}, "must be an integer, got 2.0"),
        ({"num_speculative_tokens": 2, "draft_loops": 4}, "between 1 and full_loops - 1 = 3"),
        ({"num_speculative_tokens_per_batch_size": []}, r"must be a list of \[start, end, K\]"),
        ({"num_speculative_tokens_per_batch_size": [[1, 2]]}, r"must be \[start, end, K\] or"),
        ({"num_speculative_tokens_per_batch_size": ["123"]}, r"must be \[start, end, K\] or"),
        ({"num_speculative_tokens_per_batch_size": [[1, "8", 2]]}, "end of .* an integer"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2]]}, "max_num_seqs = 32"),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 2], [10, 32, 1]]}, "a gap between"),
        (
            {
                "num_speculative_tokens": 1,
                "num_speculative_tokens_per_batch_size": [[1, 32, 2]],
            },
            "K = 2, above num_speculative_tokens = 1",
        ),
    ],
)
def test_a_wrong_form_of_vllm_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(speculative_config=given)
