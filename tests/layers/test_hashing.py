"""Counter-based random numbers: pinned, since a change would change every seeded text."""

from __future__ import annotations

import pytest
import torch

from looped_spec.layers.hashing import open_uniform, random_bits, row_keys
from looped_spec.runtime.sampler import gumbel_noise


def test_the_noise_of_a_seed_never_changes() -> None:
    noise = gumbel_noise(torch.tensor([7]), torch.tensor([3]), 4)
    expected = [1.01441205, -0.364123464, 1.23078561, -0.473533899]
    assert noise[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_every_bit_of_a_seed_counts() -> None:
    position = torch.tensor(5)
    keys = {int(row_keys(torch.tensor(1 << bit), position)) for bit in range(63)}
    keys |= {int(row_keys(torch.tensor(seed), position)) for seed in (-1, -(2**63))}
    assert len(keys) == 65
    assert all(0 <= key < 2**32 for key in keys)


def test_streams_of_one_seed_and_position_are_unrelated() -> None:
    seeds, positions = torch.arange(64)[:, None], torch.arange(64)
    first, second = (
        open_uniform(random_bits(row_keys(seeds, positions, stream), 32)).flatten()
        for stream in (0, 0x1234567)
    )
    correlation = torch.corrcoef(torch.stack((first, second)))[0, 1]
    assert abs(float(correlation)) < 5 / len(first) ** 0.5  # five standard errors


def test_uniform_numbers_stay_strictly_between_zero_and_one() -> None:
    ends = open_uniform(torch.tensor([0, 2**32 - 1]))
    assert 0 < float(ends[0]) < 1e-9
    assert float(ends[1]) == 1 - 2**-24
