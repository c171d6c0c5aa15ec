"""`LLM` and who chooses its (K, d): set, switched, explained, counted, saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from looped_spec import LLM, AdaptiveSpecConfig, SamplingParams
from looped_spec.control.config import BatchBucket
from looped_spec.control.controller import AdaptiveController
from looped_spec.control.plan import PLAIN, Candidate
from looped_spec.control.static import StaticPolicy
from looped_spec.errors import ConfigError, UnsupportedError

FOLDER = str(Path(__file__).parent.parent / "golden" / "ouro-b")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[3, 4, 5], [6], [7, 8]]


def texts(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """One model; tests may set its speculation and nothing else."""
    return LLM(FOLDER)


def test_every_policy_gives_the_text_of_plain_decoding(llm: LLM) -> None:
    llm.set_speculation(0)
    expected = texts(llm)
    for policy in ("goodput", "ema", "static"):
        llm.set_adaptive_speculation(policy=policy)
        assert texts(llm) == expected
        assert llm.explain().policy == policy
        counts = llm.stats()["controller"]
        assert counts["plans"] == counts["feedback"] > 0


def test_the_controller_knows_what_the_model_can_do(llm: LLM) -> None:
    llm.set_adaptive_speculation()
    controller = llm.policy
    assert isinstance(controller, AdaptiveController)
    config = controller.config
    assert config.shadow_depths_available
    assert config.cost is not None and config.cost.mismatch is not None
    assert config.max_num_seqs == llm.options.max_num_seqs
    assert llm.engine.candidates == frozenset(config.candidates)


def test_a_configuration_of_ones_own_is_kept_to(llm: LLM) -> None:
    only = Candidate(5, 3)
    config = AdaptiveSpecConfig(4, (BatchBucket(1, 32, (only,)),))
    llm.set_adaptive_speculation(config)
    before = llm.engine.metrics.rounds_by_candidate.get(only, 0)
    texts(llm)
    assert llm.engine.metrics.rounds_by_candidate[only] > before
    assert llm.speculation == only
    with pytest.raises(ConfigError, match="is for full_loops 3, this run has 4"):
        llm.set_adaptive_speculation(AdaptiveSpecConfig.default(3, 32))


def test_a_policy_that_is_set_back_goes_on_with_what_it_had_learnt(llm: LLM) -> None:
    llm.set_adaptive_speculation()
    learnt = llm.policy
    texts(llm)
    plans = llm.stats()["controller"]["plans"]
    llm.set_speculation(2, 1)
    assert isinstance(llm.policy, StaticPolicy)
    assert llm.engine.candidates == {Candidate(2, 1)}
    assert llm.stats()["controller"] is None
    texts(llm)
    llm.policy = learnt
    assert llm.stats()["controller"]["plans"] == plans
    assert PLAIN in llm.engine.candidates


def test_what_a_controller_learnt_can_be_saved_and_loaded(llm: LLM) -> None:
    llm.set_adaptive_speculation()
    texts(llm)
    controller = llm.policy
    assert isinstance(controller, AdaptiveController)
    saved = json.loads(json.dumps(controller.state_dict()))
    other = AdaptiveController(controller.config)
    other.load_state_dict(saved)
    assert [bucket.current for bucket in other.explain().buckets] == [
        bucket.current for bucket in controller.explain().buckets
    ]


def test_stats_are_plain_data_with_the_reasons(llm: LLM) -> None:
    llm.set_adaptive_speculation()
    texts(llm)
    stats = json.loads(json.dumps(llm.stats()))
    assert stats["speculation"]["policy"] == "goodput"
    assert stats["speculation"]["buckets"][0]["reason"]
    assert sum(count for _, _, count in stats["rounds_by_candidate"]) == stats["num_rounds"]
    assert str(llm.explain()).startswith("policy goodput\n")
    llm.set_speculation(3, 2)
    stats = llm.stats()
    assert stats["controller"] is None
    assert [bucket["reason"] for bucket in stats["speculation"]["buckets"]] == ["pinned"]


@pytest.mark.parametrize("options", [{}, {"num_speculative_tokens": 0}])
def test_early_exit_takes_no_speculation_later_either(options: dict[str, Any]) -> None:
    llm = LLM(FOLDER, exit_threshold=0.9, **options)
    assert llm.speculation == PLAIN
    with pytest.raises(UnsupportedError, match="early exit cannot be combined with speculation"):
        llm.set_adaptive_speculation()
    with pytest.raises(UnsupportedError, match="early exit cannot be combined with speculation"):
        llm.set_speculation(1)


def test_one_loop_speculates_neither_by_default_nor_later() -> None:
    llm = LLM(FOLDER, full_loops=1)
    assert llm.speculation == PLAIN
    for change in (llm.set_adaptive_speculation, lambda: llm.set_speculation(1, 1)):
        with pytest.raises(ConfigError, match="full_loops of at least 2"):
            change()


def test_a_configuration_can_be_made_without_torch() -> None:
    code = (
        "import sys, looped_spec\n"
        "config = looped_spec.AdaptiveSpecConfig.default(4, 8)\n"
        "assert looped_spec.AdaptiveSpecConfig.from_json(config.to_json()) == config\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
