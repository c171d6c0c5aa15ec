"""The linear layers of our own: their sums, their bits, and the numbers that they hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from looped_spec.layers.native import BuildError, Kernels
from looped_spec.layers.packed import PACKINGS, TiledHalves, TiledPacked

# What fp32 rounds of a sum of n products, by the sum of their sizes: n units in the last place.
UNIT = 2.0**-23
SIZES = [(32, 1), (1, 7), (33, 64), (96, 130), (70, 513)]
ROWS = [1, 2, 3, 7, 11, 12, 13, 24, 31]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Kernels:
    try:
        return Kernels()
    except BuildError as error:
        pytest.skip(f"the kernels do not build here: {error}")


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Numbers of many sizes that bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-20, 20, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), exponents).bfloat16().float()


@pytest.mark.parametrize("kind", [TiledHalves, TiledPacked])
@pytest.mark.parametrize("size", SIZES)
def test_every_output_is_the_sum_of_its_products(
    kind: type[TiledPacked], size: tuple[int, int]
) -> None:
    weight = numbers(*size)
    packed = kind.of(weight)
    assert packed is not None
    for rows in ROWS:
        x = numbers(rows, size[1], seed=rows)
        error = (packed.linear(x, None).double() - x.double() @ weight.double().t()).abs()
        most = size[1] * UNIT * (x.double().abs() @ weight.double().abs().t())
        assert (error <= most).all()


@pytest.mark.parametrize("kind", [TiledHalves, TiledPacked])
def test_bits_of_a_row_do_not_depend_on_the_other_rows_or_the_threads(
    kind: type[TiledPacked],
) -> None:
    packed = kind.of(numbers(512, 300))  # so large that threads share it
    assert packed is not None
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = packed.linear(x, None)
        torch.set_num_threads(3)
        assert torch.equal(packed.linear(x, None), together)
    finally:
        torch.set_num_threads(before)
    for rows in ROWS:
        for start in (0, 5, 40 - rows):
            part = slice(start, start + rows)
            assert torch.equal(packed.linear(x[part], None), together[part]), (rows, start)


def test_both_kinds_give_the_same_bits() -> None:
    weight, x = numbers(70, 90), numbers(5, 90, seed=1)
    halves, whole = TiledHalves.of(weight), TiledPacked.of(weight)
    assert halves is not None and whole is not None
    assert torch.equal(halves.linear(x, None), whole.linear(x, None))
    assert 2 * halves.num_bytes == whole.num_bytes


@pytest.mark.parametrize("kind", [TiledHalves, TiledPacked])
def test_no_number_is_lost(kind: type[TiledPacked]) -> None:
    weight = numbers(45, 37)
    weight[0, :6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 2.0**-126, 2.0**-130])
    packed = kind.of(weight)
    assert packed is not None
    assert torch.equal(packed.unpack().view(torch.int32), weight.view(torch.int32))


@pytest.mark.parametrize("place", [(0, 0), (15, 3), (16, 0), (44, 36)])
def test_a_number_that_bf16_lacks_is_refused_in_halves_alone(place: tuple[int, int]) -> None:
    weight = numbers(45, 37)
    weight[place] = 1.0 + 2.0**-8
    assert TiledHalves.of(weight) is None
    packed = TiledPacked.of(weight)
    assert packed is not None and torch.equal(packed.unpack(), weight)


def test_what_is_not_finite_shows_in_its_own_row_alone() -> None:
    packed = TiledHalves.of(numbers(40, 30))
    x = torch.ones(13, 30)
    x[5, 7], x[8, 0] = math.nan, math.inf
    assert packed is not None
    finite = packed.linear(x, None).isfinite()
    assert finite.all(dim=1).tolist() == [row not in (5, 8) for row in range(13)]
    assert not finite[5].any()


def test_they_are_for_fp32_alone() -> None:
    for kind in (TiledHalves, TiledPacked):
        assert PACKINGS[kind.name] is kind
        assert kind.of(torch.ones(32, 32, dtype=torch.bfloat16)) is None
        assert kind.of(torch.ones(32, 32, dtype=torch.float64)) is None


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(1, 8, dtype=torch.bfloat16),
        torch.ones(4, 4),
        torch.ones(1, 29),
        torch.ones(2, 8, device="meta"),
    ],
    ids=["another dtype", "too narrow", "too wide", "no memory"],
)
def test_input_that_does_not_fit_is_refused_as_by_a_linear_layer(x: Tensor) -> None:
    packed = TiledPacked.of(torch.ones(5, 8))
    assert packed is not None
    with pytest.raises(RuntimeError, match=r"x must be float32 \[\.\.\., 8\] on the CPU, got"):
        packed.linear(x, None)
