"""The random initial state: a function of seed, position, channel; with the published moments."""

from __future__ import annotations

import math

import pytest
import torch
from huginn_models import load, without_weights
from looped_spec_huginn.adapter import HuginnAdapter

from looped_spec import SamplingParams
from looped_spec.errors import ConfigError
from looped_spec.runtime.sampler import gumbel_noise
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.oracle import dense_generate, dense_logits

WIDTH = 5280  # of the published model
SEEDS = [3, 4, -(2**63), 2**62 + 1]
# Deviation of a normal distribution cut at 3: sqrt(1 - 6 phi(3) / (2 Phi(3) - 1)).
CUT_STD = math.sqrt(1 - 6 * math.exp(-4.5) / math.sqrt(2 * math.pi) / math.erf(3 / math.sqrt(2)))


def state(seeds: list[int], tokens: int, width: int = WIDTH, **options: float) -> torch.Tensor:
    """Return initial states [len(seeds), tokens, width]."""
    scales = {"embed_scale": math.sqrt(width), "std": math.sqrt(2 / (5 * width))}
    adapter = without_weights(
        options, n_embd=width, n_heads=width // 96, head_dim=96, num_key_value_heads=width // 96,
        init_values=scales,
    )  # fmt: skip
    ctx = DenseContext(len(seeds), tokens, 1, torch.tensor(seeds))
    return adapter.initial_state(torch.empty(len(seeds), tokens, width), ctx)


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    """States of four seeds and 64 positions at the published width: 1.35 million numbers."""
    return state(SEEDS, 64)


def test_mean_deviation_and_bounds_are_those_of_a_cut_normal(sample: torch.Tensor) -> None:
    scale = math.sqrt(2 / 5)  # sqrt(2 / (5 E)) * sqrt(E)
    error = 5 * scale / math.sqrt(sample.numel())  # five standard errors
    assert abs(float(sample.mean())) < error
    assert float(sample.std()) == pytest.approx(scale * CUT_STD, abs=error)
    assert 0.61 < float(sample.std()) < 0.63
    assert 2.9 * scale < float(sample.abs().max()) <= 3 * scale * (1 + 1e-6)


def test_the_distribution_is_normal_inside_the_bounds(sample: torch.Tensor) -> None:
    values = sample.flatten() / math.sqrt(2 / 5)
    for border in (0.1, 0.5, 1.0, 2.0, 2.9):
        share = float((values.abs() < border).float().mean())
        expected = math.erf(border / math.sqrt(2)) / math.erf(3 / math.sqrt(2))
        error = 5 * math.sqrt(expected * (1 - expected) / len(values))
        assert abs(share - expected) < error


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seeds", "positions", "channels"])
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_neighbours_are_independent(sample: torch.Tensor, axis: int, lag: int) -> None:
    size = sample.shape[axis] - lag
    first, second = sample.narrow(axis, 0, size), sample.narrow(axis, lag, size)
    for power in (1, 2):
        pair = torch.stack((first.flatten() ** power, second.flatten() ** power))
        correlation = float(torch.corrcoef(pair)[0, 1])
        assert abs(correlation) < 5 / math.sqrt(first.numel())


def test_no_two_positions_or_seeds_start_alike(sample: torch.Tensor) -> None:
    rows = sample.flatten(0, 1)
    assert len({tuple(row[:8].tolist()) for row in rows}) == len(rows)


def test_the_state_is_unrelated_to_the_noise_of_token_choice() -> None:
    seeds = torch.tensor(SEEDS)
    noise = gumbel_noise(seeds[:, None], torch.arange(64), WIDTH)
    pair = torch.stack((noise.flatten(), state(SEEDS, 64).flatten()))
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(noise.numel())


def test_batch_and_chunk_do_not_matter() -> None:
    whole = state([3, 4], 6, 192)
    adapter = without_weights(
        n_embd=192, n_heads=2, head_dim=96, num_key_value_heads=2, init_values=None
    )
    ctx = DenseContext(1, 2, 1, torch.tensor([4]))
    ctx.positions = torch.tensor([[3, 4]])
    assert torch.equal(adapter.initial_state(torch.empty(1, 2, 192), ctx), whole[1:, 3:5])


def test_another_seed_gives_another_initial_state_and_other_logits() -> None:
    assert not torch.equal(state([3], 4, 192), state([5], 4, 192))
    adapter = load(options={})
    first, again, other = (dense_logits(adapter, [1, 2, 3], 8, seed=seed) for seed in (3, 3, 5))
    assert torch.equal(first, again)
    assert float((first - other).abs().max()) > 1e-3


def test_init_scale_multiplies_the_state_and_zero_gives_zeros() -> None:
    assert torch.equal(state([3], 4, 192, init_scale=0.0), torch.zeros(1, 4, 192))
    half, full = state([3], 4, 192, init_scale=0.5), state([3], 4, 192)
    torch.testing.assert_close(half, full / 2)
    assert torch.equal(full, state([3], 4, 192, init_scale=1.0))


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, 10**400, "1", None, True])
def test_a_bad_init_scale_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"init_scale must be a finite number of at least 0, got"):
        without_weights({"init_scale": value})


PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22]]
SAMPLED = [SamplingParams(temperature=0.9, max_tokens=12, seed=seed) for seed in (11, 12, 13)]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=12, seed=seed) for seed in (11, 12, 13)]


@pytest.fixture(scope="module")
def random_start() -> HuginnAdapter:
    """A golden checkpoint that starts from noise."""
    return load(options={"init_scale": 1.0})


@pytest.fixture(scope="module", params=[SAMPLED, GREEDY], ids=["sampled", "greedy"])
def params_and_texts(
    random_start: HuginnAdapter, request: pytest.FixtureRequest
) -> tuple[list[SamplingParams], list[list[int]]]:
    """Parameters of three requests, and their texts computed without cache or speculation."""
    texts = [
        dense_generate(random_start, prompt, 12, full_loops=8, params=each, seed=each.seed or 0)
        for prompt, each in zip(PROMPTS, request.param, strict=True)
    ]
    return request.param, texts


@pytest.mark.parametrize(
    ("k", "d", "batched_tokens"),
    [(0, 0, 512), (0, 0, 3), (1, 1, 512), (2, 1, 3), (4, 4, 512), (8, 1, 512)],
)
def test_a_seed_gives_its_text_with_and_without_speculation_alone_and_batched(
    random_start: HuginnAdapter,
    params_and_texts: tuple[list[SamplingParams], list[list[int]]],
    k: int,
    d: int,
    batched_tokens: int,
) -> None:
    params, texts = params_and_texts
    engine = make_engine(
        random_start,
        num_speculative_tokens=k,
        draft_loops=d,
        max_num_batched_tokens=batched_tokens,
    )
    together = run_all(engine, PROMPTS, params)
    assert [request.output_token_ids for request in together] == texts
    alone = run_all(engine, PROMPTS[1:2], params[1:2])
    assert alone[0].output_token_ids == texts[1]
    if k:
        assert engine.metrics.num_accepted_tokens > 0
    if d == 1:
        assert engine.metrics.num_accepted_tokens < engine.metrics.num_draft_tokens
