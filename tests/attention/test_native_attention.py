"""Attention by compiled kernels: the plain answer, and bits that no other row changes."""

from __future__ import annotations

import pytest
import torch
from attention_cases import TOLERANCES, Case, Shape

from looped_spec.layers.native import BuildError
from looped_spec.runtime.attention import SdpaBackend
from looped_spec.runtime.attention.native import NativeBackend
from looped_spec.runtime.kv_cache import KVPool

SHAPES = [
    Shape(2, 1, 2, 2, 64, 16, 40),
    Shape(2, 3, 4, 2, 96, 7, 40),
    Shape(1, 5, 4, 1, 128, 256, 300),
    Shape(2, 2, 2, 1, 8, 1, 20),
    Shape(3, 2, 2, 1, 6, 5, 33),
    Shape(2, 16, 4, 2, 32, 16, 500),
    Shape(2, 17, 4, 2, 32, 16, 100),  # a prompt: torch's own attention
]


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    try:
        return NativeBackend()
    except BuildError as error:
        pytest.skip(f"the kernels do not build here: {error}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_gives_the_plain_answer(native: NativeBackend, shape: Shape) -> None:
    case = Case(shape, torch.float32)
    case.check(case.attend(native))
    case.check(case.attend(native, 0.7), 0.7)


def test_several_threads_give_the_same_bits(native: NativeBackend) -> None:
    case = Case(Shape(8, 4, 8, 8, 64, 16, 300), torch.float32)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = case.attend(native)
        torch.set_num_threads(2)
        assert torch.equal(case.attend(native), one)
    finally:
        torch.set_num_threads(before)


def test_the_bits_of_a_row_depend_on_no_other_row(native: NativeBackend) -> None:
    case = Case(Shape(3, 4, 4, 2, 24, 5, 60), torch.float32)
    pages, whole = (case.k_pages, case.v_pages), case.attend(native)
    prepared = native.prepare(case.positions, case.rows, case.pool)
    for row in range(4):
        alone = native.attend(case.q[:, row : row + 1], *pages, native.column(prepared, row), None)
        assert torch.equal(alone, whole[:, row : row + 1])
    some = torch.tensor([2, 0])
    chosen = native.attend(case.q[some], *pages, native.select(prepared, some), None)
    assert torch.equal(chosen, whole[some])


def test_rows_past_their_table_disturb_no_other_row(native: NativeBackend) -> None:
    case = Case(Shape(2, 4, 2, 1, 16, 4, 20), torch.float32, start=19)
    assert not bool(case.inside.all())
    case.check(case.attend(native))


@pytest.mark.parametrize("of_a_merged_projection", [False, True])
def test_it_writes_what_the_cache_writes(
    native: NativeBackend, of_a_merged_projection: bool
) -> None:
    case = Case(Shape(3, 4, 2, 2, 16, 4, 40), torch.float32)
    kv = torch.randn(3, 4, 6, 16, generator=torch.Generator().manual_seed(1))
    k, v = kv[:, :, 2:4], kv[:, :, 4:]
    if not of_a_merged_projection:
        k, v = k.transpose(2, 3).contiguous().transpose(2, 3), v.contiguous()
    slots = case.context(SdpaBackend()).slots
    pools = []
    for backend in (SdpaBackend(), native):
        pool = KVPool((), 1, 4, torch.float32, torch.device("cpu"))
        pool.planes.append((torch.zeros_like(case.k_pages), torch.zeros_like(case.v_pages)))
        for column in (slice(0, 1), slice(1, 4)):  # a column of the slots has gaps between rows
            backend.write(pool, 0, slots[:, column], k[:, column], v[:, column])
        pools.append(pool)
    for plain, ours in zip(*(pool.planes[0] for pool in pools), strict=True):
        assert torch.equal(plain, ours) and bool(ours.any())


def test_its_error_is_that_of_float32(native: NativeBackend) -> None:
    case = Case(Shape(2, 2, 2, 2, 64, 16, 2000), torch.float32)
    errors = [
        float((case.attend(backend).double() - case.answer()).abs().max())
        for backend in (native, SdpaBackend())
    ]
    assert errors[0] < max(4 * errors[1], 0.1 * TOLERANCES[torch.float32])
