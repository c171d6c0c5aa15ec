"""How the Triton kernel's work is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from looped_spec.runtime.attention.tiles import MAX_SPLITS, Tiles, choose_splits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@given(st.integers(1, 5000), st.integers(1, 256), st.sampled_from(DTYPES))
def test_tiles_hold_a_head_and_fit_a_small_gpu(
    num_pairs: int, head_dim: int, dtype: torch.dtype
) -> None:
    tiles = Tiles.of(num_pairs, head_dim, dtype)
    assert all(is_power_of_2(size) and size >= 16 for size in (tiles.pairs, tiles.keys, tiles.dim))
    assert head_dim <= tiles.dim < max(32, 2 * head_dim)
    # Two tiles of keys and two of values, and one of queries, in the 99 KB of a small device.
    elements = (4 * tiles.keys + tiles.pairs) * tiles.dim
    assert elements * dtype.itemsize <= 99 * 1024


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_verified_row_has_the_tiles_of_a_decoded_one(head_dim: int, dtype: torch.dtype) -> None:
    assert Tiles.of(16, head_dim, dtype) == Tiles.of(1, head_dim, dtype)


@given(
    num_pairs=st.integers(1, 2000),
    num_programs=st.integers(1, 4000),
    num_keys=st.integers(1, 40000),
    num_processors=st.integers(1, 200),
)
def test_splits_fill_the_device_and_no_more(
    num_pairs: int, num_programs: int, num_keys: int, num_processors: int
) -> None:
    splits = choose_splits(num_pairs, num_programs, num_keys, num_processors)
    assert is_power_of_2(splits) and splits <= MAX_SPLITS
    if splits > 1:
        assert num_programs * splits < 4 * num_processors
        assert num_keys >= 128 * splits


def test_one_long_request_is_split_on_a_large_device_and_many_are_not() -> None:
    heads, processors, keys = 16, 132, 4096
    assert [choose_splits(1, batch * heads, keys, processors) for batch in (1, 8, 32)] == [32, 4, 1]
    assert choose_splits(512, heads * 8, keys, processors) == 1, "a prefill has work enough"
    assert choose_splits(1, heads, 100, processors) == 1, "there is nothing to split"
