"""Token choice: exact distribution, noise that depends on nothing but its key, filters."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import chi_square

from looped_spec.runtime.sampler import (
    SamplingMode,
    SamplingTensors,
    choose_tokens,
    filter_logits,
    gumbel_noise,
)
from looped_spec.sampling_params import SamplingParams

EULER = 0.57721566490153286
DRAWS = 20_000


def tensors(*params: SamplingParams) -> SamplingTensors:
    return SamplingTensors(
        torch.tensor([p.seed or 0 for p in params]),
        torch.tensor([float(p.temperature) for p in params]),
        torch.tensor([max(p.top_k, 0) for p in params]),
        torch.tensor([float(p.top_p) for p in params]),
        torch.tensor([float(p.min_p) for p in params]),
    )


def reference_filter(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Which tokens stay, by the words of `SamplingParams`, one token at a time in plain floats."""
    peak = max(logits)
    weight = [math.exp(x - peak) for x in logits]
    kept = set(range(len(logits)))
    if top_k > 0:
        border = sorted(weight, reverse=True)[min(top_k, len(weight)) - 1]
        kept = {i for i in kept if weight[i] >= border}
    if top_p < 1.0:
        total = sum(weight[i] for i in kept)
        mass, border = 0.0, 0.0
        for w in sorted((weight[i] for i in kept), reverse=True):
            if mass / total < top_p:
                border = w
            mass += w
        kept = {i for i in kept if weight[i] >= border}
    return {i for i in kept if weight[i] >= min_p}


def reference_noise(seed: int, position: int, token: int) -> float:
    """The noise by plain integers: texts of a seed must stay the same from version to version."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
        x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
        return x ^ (x >> 15)

    seed %= 2**64
    key = mix(mix(mix(seed % 2**32) ^ (seed >> 32)) ^ position)
    bits = mix(mix((token * 0x9E3779B1 + key) % 2**32) ^ mix(key ^ 0x5BD1E995))
    return -math.log(-math.log1p(-min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)))


@pytest.mark.parametrize("seed", [0, 1, -1, 12345, 2**40 + 3, 2**63 - 1, -(2**63)])
def test_noise_is_the_documented_hash_of_seed_position_and_token(seed: int) -> None:
    positions = torch.tensor([0, 1, 77, 131071])
    got = gumbel_noise(torch.tensor(seed), positions, 40)
    want = [[reference_noise(seed, int(p), t) for t in range(40)] for p in positions]
    assert torch.allclose(got, torch.tensor(want), rtol=1e-4, atol=1e-4)


def test_noise_of_a_token_depends_on_neither_the_vocabulary_nor_the_batch() -> None:
    seeds, positions = torch.tensor([[3], [-9]]), torch.tensor([[4, 5, 6], [100, 101, 102]])
    whole = gumbel_noise(seeds, positions, 200)
    assert torch.equal(gumbel_noise(seeds, positions, 50), whole[..., :50])
    for row in range(2):
        for column in range(3):
            alone = gumbel_noise(seeds[row, 0], positions[row, column], 200)
            assert torch.equal(alone, whole[row, column])


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_noise_is_standard_gumbel_along_every_axis(axis: str) -> None:
    count = 400_000
    many, zero = torch.arange(count), torch.tensor(0)
    noise = {
        "tokens": lambda: gumbel_noise(torch.tensor(7), zero, count),
        "positions": lambda: gumbel_noise(torch.tensor(7), many, 1),
        "seeds": lambda: gumbel_noise(many - count // 2, zero, 1),
    }[axis]()
    noise = noise.flatten().double()
    assert noise.isfinite().all()
    deviation = math.pi / math.sqrt(6)
    assert abs(noise.mean() - EULER) < 4 * deviation / math.sqrt(count)
    # The kurtosis of a Gumbel variable is 5.4, hence the standard error of its variance.
    assert abs(noise.var() / deviation**2 - 1) < 4 * math.sqrt(4.4 / count)
    ordered = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(1, count + 1) / count
    distance = max((steps - ordered).abs().max(), (ordered - steps + 1 / count).abs().max())
    assert distance * math.sqrt(count) < 2.2  # Kolmogorov-Smirnov, far behind the 99.9 % quantile


@pytest.mark.parametrize("shift", [1, 2, 16, 256, 2**16])
def test_neighbours_are_not_correlated(shift: int) -> None:
    side = 512
    base = torch.arange(side)

    def uniform(seeds: Tensor, positions: Tensor, vocab: int = side) -> Tensor:
        return torch.exp(-torch.exp(-gumbel_noise(seeds, positions, vocab).double()))

    first = uniform(torch.tensor(5), base)
    others = {
        "positions": uniform(torch.tensor(5), base + shift),
        "seeds": uniform(torch.tensor(5 + shift), base),
        "seeds, upper half": uniform(torch.tensor(5 + shift * 2**32), base),
        "seed against position": uniform(torch.tensor(5 + shift), base + shift),
    }
    for name, other in others.items():
        correlation = torch.corrcoef(torch.stack((first.flatten(), other.flatten())))[0, 1]
        assert abs(correlation) * side < 4.5, name
    if shift < side:
        rows = torch.stack((first[:, shift:].flatten(), first[:, :-shift].flatten()))
        assert abs(torch.corrcoef(rows)[0, 1]) * math.sqrt(rows.shape[1]) < 4.5


@pytest.mark.parametrize("axis", ["positions", "seeds"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=3),
        SamplingParams(temperature=0.6, seed=11),
        SamplingParams(temperature=1.8, top_k=5, seed=-7),
        SamplingParams(temperature=1.2, top_p=0.8, seed=2**63 - 1),
        SamplingParams(min_p=0.15, seed=-(2**63)),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05, seed=1),
    ],
)
def test_draws_follow_the_filtered_softmax(params: SamplingParams, axis: str) -> None:
    logits = torch.randn(12, generator=torch.Generator().manual_seed(4)) * 1.5
    given = tensors(params)
    if axis == "positions":
        chosen = choose_tokens(
            logits.expand(1, DRAWS, 12),
            torch.arange(DRAWS)[None],
            given,
            SamplingMode.of([params]),
        )
    else:
        many = SamplingTensors(
            torch.arange(DRAWS) - DRAWS // 2,
            *(
                getattr(given, name).expand(DRAWS)
                for name in ("temperature", "top_k", "top_p", "min_p")
            ),
        )
        chosen = choose_tokens(
            logits.expand(DRAWS, 1, 12),
            torch.full((DRAWS, 1), 40),
            many,
            SamplingMode.of([params]),
        )
    scaled = logits.double() / params.temperature
    kept = reference_filter(scaled.tolist(), params.top_k, params.top_p, params.min_p)
    inside = torch.tensor([token in kept for token in range(12)])
    counts = torch.bincount(chosen.flatten(), minlength=12)
    assert not counts[~inside].any()
    statistic, quantile = chi_square(
        counts[inside], scaled.masked_fill(~inside, -torch.inf).softmax(-1)[inside]
    )
    assert statistic < quantile


# Few values, so that ties are common; steps that keep probabilities off the borders mostly.
LOGITS = st.lists(st.integers(-6, 6).map(lambda n: n * 0.75), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(LOGITS, st.integers(0, 15), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_filters_keep_what_the_plain_reference_keeps(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    top_p, min_p = (float(torch.tensor(x, dtype=torch.float32)) for x in (top_p, min_p))
    low = reference_filter(logits, top_k, top_p - 1e-5, min_p * (1 - 1e-5))
    want = reference_filter(logits, top_k, top_p, min_p)
    high = reference_filter(logits, top_k, min(top_p + 1e-5, 1.0), min(min_p * (1 + 1e-5), 1.0))
    assume(low == want == high)  # a border that rounding decides has no right side
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    got = filter_logits(torch.tensor([[logits]]), tensors(params))[0, 0]
    assert {i for i, value in enumerate(got.tolist()) if value > -math.inf} == want
    assert all(got[i] == torch.tensor(logits[i]) for i in want)


def kept_by(logits: list[float], **params: float) -> list[int]:
    given = tensors(SamplingParams(**params))  # type: ignore[arg-type]
    got = filter_logits(torch.tensor([[logits]]), given)[0, 0]
    return [i for i, value in enumerate(got.tolist()) if value > -math.inf]


def test_ties_at_a_border_stay_in() -> None:
    assert kept_by([1.0, 3.0, 1.0, 2.0, 1.0], top_k=3) == [0, 1, 2, 3, 4]
    assert kept_by([1.0, 3.0, 0.0, 2.0, 1.0], top_k=2) == [1, 3]
    assert kept_by([2.0, 2.0, -9.0], top_p=0.3) == [0, 1]
    assert kept_by([5.0, 5.0, 4.9], min_p=1.0) == [0, 1]


def test_the_ends_of_every_range_mean_all_or_one() -> None:
    logits = [0.0, -20.0, 3.0, -50.0, 2.9]
    assert kept_by(logits, top_p=1.0) == [0, 1, 2, 3, 4]
    assert kept_by(logits, top_k=0) == kept_by(logits, top_k=-1) == [0, 1, 2, 3, 4]
    assert kept_by(logits, top_k=5) == kept_by(logits, top_k=10**6) == [0, 1, 2, 3, 4]
    assert kept_by(logits, top_k=1) == kept_by(logits, min_p=1.0) == [2]
    assert kept_by(logits, top_p=1e-6) == [2]
    assert kept_by(logits, min_p=0.0) == [0, 1, 2, 3, 4]


def test_a_long_tail_counts_in_the_nucleus() -> None:
    # One token of 1/2 and 2**20 that share the other half: each is lost beside 1.0 in fp32.
    tail = 2**20
    logits = torch.full((1, 1, tail + 1), 0.0)
    logits[..., 0] = math.log(tail)
    ladder = torch.linspace(0, -1e-3, tail)  # no ties
    logits[..., 1:] = ladder
    got = filter_logits(logits, tensors(SamplingParams(top_p=0.75)))
    kept = int((got > -torch.inf).sum()) - 1
    weights = ladder.double().exp()
    total = weights.sum() + tail
    want = int(((weights.cumsum(0) - weights + tail) / total < torch.tensor(0.75)).sum())
    # The ladder has fewer distinct fp32 values than steps near 0, and ties stay in.
    assert abs(kept - want) < 0.001 * tail


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_row_chooses_the_same_in_every_mode_that_suffices(seed: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 4, 30, generator=torch.Generator().manual_seed(seed)).to(dtype)
    positions = torch.arange(4) + torch.tensor([[0], [9], [500]])
    greedy, random, filtered = (
        SamplingParams(temperature=0.0, top_k=2),
        SamplingParams(seed=seed),
        SamplingParams(seed=seed, temperature=0.7, top_k=6, top_p=0.9),
    )
    batch = choose_tokens(
        logits, positions, tensors(greedy, random, filtered), SamplingMode.FILTERED
    )
    assert torch.equal(batch[0], logits[0].argmax(-1))
    for row, (one, modes) in enumerate(
        [
            (greedy, list(SamplingMode)),
            (random, [SamplingMode.RANDOM, SamplingMode.FILTERED]),
            (filtered, [SamplingMode.FILTERED]),
        ]
    ):
        for mode in modes:
            alone = choose_tokens(
                logits[row : row + 1], positions[row : row + 1], tensors(one), mode
            )
            assert torch.equal(alone[0], batch[row])


def test_the_mode_is_the_cheapest_that_serves_all() -> None:
    greedy = SamplingParams(temperature=0.0, top_k=3, top_p=0.5)
    assert SamplingMode.of([greedy]) is SamplingMode.GREEDY
    assert SamplingMode.of([greedy, SamplingParams()]) is SamplingMode.RANDOM
    assert SamplingMode.of([SamplingParams(), greedy]) is SamplingMode.RANDOM
    for filters in ({"top_k": 1}, {"top_p": 0.9}, {"min_p": 0.1}):
        both = [greedy, SamplingParams(**filters)]  # type: ignore[arg-type]
        assert SamplingMode.of(both) is SamplingMode.FILTERED


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-30, 1e-38, 1e-44, 1e-60])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9, "min_p": 0.1}])
def test_a_tiny_temperature_takes_the_most_likely_token(
    temperature: float, filters: dict[str, float]
) -> None:
    logits = torch.tensor([[[5.0, 30.0, 29.0, -100.0], [-8.0, -9.0, -7.0, -7.5]]])
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    chosen = choose_tokens(
        logits, torch.tensor([[3, 4]]), tensors(params), SamplingMode.of([params])
    )
    assert chosen.tolist() == [[1, 2]]


def test_a_huge_temperature_draws_evenly() -> None:
    logits = torch.tensor([-40.0, 0.0, 3.0, 60.0]).expand(1, DRAWS, 4)
    params = SamplingParams(temperature=1e30, seed=2)
    chosen = choose_tokens(logits, torch.arange(DRAWS)[None], tensors(params), SamplingMode.RANDOM)
    counts = torch.bincount(chosen.flatten(), minlength=4)
    statistic, quantile = chi_square(counts, torch.full((4,), 0.25))
    assert statistic < quantile


def test_tokens_that_the_model_rules_out_are_never_drawn() -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0, -math.inf]).expand(1, 2000, 4)
    for params in (SamplingParams(seed=1), SamplingParams(seed=1, top_p=0.99, top_k=4)):
        chosen = choose_tokens(
            logits, torch.arange(2000)[None], tensors(params), SamplingMode.of([params])
        )
        assert set(chosen.flatten().tolist()) == {0, 2}
