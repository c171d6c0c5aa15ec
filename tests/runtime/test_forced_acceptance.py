"""The benchmark hook that decides how many drafts are right."""

from __future__ import annotations

import pytest
import torch

from looped_spec.errors import ConfigError
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.forced_acceptance import ForcedAcceptance
from looped_spec.testing.toy import make_toy

PROMPTS = [[index + 1] * (index % 5 + 1) for index in range(8)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True, seed=index)
    for index in range(8)
]


def texts(probability: float, k: int, d: int = 1) -> tuple[list[list[int]], float | None]:
    """Texts of all prompts, and the share of drafts that were accepted."""
    engine = make_engine(
        ForcedAcceptance(make_toy(), probability),
        num_speculative_tokens=k,
        draft_loops=d,
        max_num_seqs=8,
    )
    requests = run_all(engine, PROMPTS, PARAMS)
    return [request.output_token_ids for request in requests], engine.metrics.draft_acceptance_rate


def test_every_draft_is_right_at_one_and_none_at_zero() -> None:
    assert texts(1.0, 3)[1] == 1.0
    assert texts(0.0, 3)[1] == 0.0


def test_drafts_are_right_as_often_as_asked() -> None:
    _, rate = texts(0.7, 1)
    # About 500 drafts: four standard deviations.
    assert rate == pytest.approx(0.7, abs=0.08)


def test_the_text_is_the_same_with_and_without_speculation_at_any_probability() -> None:
    plain, _ = texts(1.0, 0)
    assert len({tuple(text) for text in plain}) == len(PROMPTS)
    for probability, k, d in ((1.0, 3, 1), (0.5, 2, 3), (0.0, 1, 2)):
        assert texts(probability, k, d)[0] == plain


def test_another_probability_takes_effect_without_another_tensor() -> None:
    forced = ForcedAcceptance(make_toy(), 0.0)
    engine = make_engine(forced, num_speculative_tokens=2, draft_loops=1)
    run_all(engine, PROMPTS[:1], PARAMS[:1])
    assert engine.metrics.draft_acceptance_rate == 0.0
    place = forced._probability.data_ptr()
    forced.set_probability(1.0)
    assert forced._probability.data_ptr() == place
    before = engine.metrics.num_accepted_tokens
    run_all(engine, PROMPTS[:1], PARAMS[:1])
    assert engine.metrics.num_accepted_tokens > before


def test_the_model_runs_as_ever_below_the_forced_tokens() -> None:
    toy = make_toy()
    forced = ForcedAcceptance(toy, 0.5)
    engines = [make_engine(adapter, max_num_seqs=1) for adapter in (toy, forced)]
    for engine in engines:
        engine.add_request(PROMPTS[4], PARAMS[0])
        engine.step()
    for own, other in zip(*(engine.runner.pool.planes for engine in engines), strict=True):
        assert own[0].any() and torch.equal(own[0], other[0])


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match="probability must be between 0 and 1"):
        ForcedAcceptance(make_toy(), probability)
