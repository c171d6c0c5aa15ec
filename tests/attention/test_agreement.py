"""Every backend gives what plain softmax attention gives, within the rounding of its dtype.

Those for a GPU need one; the Triton kernel also runs in Triton's interpreter, where Triton is
installed and no CUDA device is there.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import TOLERANCES, Case, Shape, backend_or_skip, needs

from looped_spec.runtime.attention import SdpaBackend
from looped_spec.runtime.attention.tiles import Tiles

cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]
each_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype)[6:])

# Few and small: the interpreter takes a tenth of a second for one tile of one head.
SMALL = [
    Shape(2, 1, 2, 2, 64, 16, 40),
    Shape(2, 3, 4, 2, 96, 7, 40),
    Shape(1, 5, 4, 1, 128, 256, 300),
    Shape(1, 2, 1, 1, 256, 3, 30),
    Shape(2, 2, 2, 1, 8, 1, 20),
]
LARGE = [
    Shape(8, 1, 16, 16, 128, 16, 2000),
    Shape(3, 9, 16, 16, 128, 16, 700),
    Shape(2, 5, 32, 8, 128, 256, 3000),
    Shape(2, 9, 20, 4, 96, 16, 500),
    Shape(4, 1, 55, 55, 96, 256, 900),
    Shape(1, 200, 16, 4, 64, 16, 500),
    Shape(2, 130, 8, 8, 256, 256, 600),
    Shape(33, 3, 8, 2, 64, 48, 200),
]
each_small = pytest.mark.parametrize("shape", SMALL, ids=str)


@each_dtype
@each_small
def test_sdpa_agrees_with_the_plain_answer(shape: Shape, dtype: torch.dtype) -> None:
    case = Case(shape, dtype)
    case.check(case.attend(SdpaBackend()))


@each_dtype
@each_small
def test_the_interpreted_triton_kernel_agrees(shape: Shape, dtype: torch.dtype) -> None:
    backend = backend_or_skip("triton", needs(shape, dtype, num_splits=1))
    case = Case(shape, dtype)
    case.check(case.attend(backend))


@pytest.mark.parametrize("num_splits", [2, 8])
def test_a_context_read_in_parts_is_mixed_as_if_read_in_one(num_splits: int) -> None:
    shape = Shape(2, 3, 2, 1, 32, 16, 150)  # shorter requests leave parts empty
    backend = backend_or_skip("triton", needs(shape, torch.float32, num_splits=num_splits))
    case = Case(shape, torch.float32, seed=1)
    case.check(case.attend(backend))


def test_a_row_may_see_nothing_of_a_part_that_another_sees() -> None:
    shape = Shape(1, 3, 2, 1, 32, 16, 80)
    backend = backend_or_skip("triton", needs(shape, torch.float32, num_splits=2))
    keys = Tiles.of(6, shape.head_dim, torch.float32).keys
    case = Case(shape, torch.float32, start=keys - 1)  # the second part begins at the second row
    case.check(case.attend(backend))


@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_a_scale_is_used_instead_of_the_usual_one(name: str) -> None:
    shape = Shape(1, 2, 2, 1, 16, 16, 30)
    case = Case(shape, torch.float32)
    case.check(case.attend(backend_or_skip(name, needs(shape, torch.float32)), 0.7), 0.7)


@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_rows_past_their_table_disturb_no_other_row(name: str) -> None:
    shape = Shape(2, 4, 2, 1, 16, 4, 20)
    case = Case(shape, torch.float32, start=19)
    assert not bool(case.inside.all())
    case.check(case.attend(backend_or_skip(name, needs(shape, torch.float32))))


@pytest.mark.parametrize("name", ["sdpa", "triton"])
def test_a_column_and_a_selection_are_parts_of_the_whole(name: str) -> None:
    shape = Shape(3, 3, 2, 1, 16, 4, 30)
    case = Case(shape, torch.float32)
    backend = backend_or_skip(name, needs(shape, torch.float32))
    prepared, answer = backend.prepare(case.positions, case.rows, case.pool), case.answer()
    pages = (case.k_pages, case.v_pages)
    last = backend.attend(case.q[:, 2:], *pages, backend.column(prepared, 2), None)
    assert (last - answer[:, 2:]).abs().max() < TOLERANCES[torch.float32]
    some = torch.tensor([2, 0])
    out = backend.attend(case.q[some], *pages, backend.select(prepared, some), None)
    assert (out - answer[some]).abs().max() < TOLERANCES[torch.float32]


on_a_gpu = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=cuda) for n in ("sdpa", "triton", "flash_attn", "varlen")]
)


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SMALL + LARGE, ids=str)
def test_backends_agree_on_a_gpu(name: str, shape: Shape, dtype: torch.dtype) -> None:
    case = Case(shape, dtype, "cuda")
    case.check(case.attend(backend_or_skip(name, needs(shape, dtype, "cuda"))))


@on_a_gpu
@pytest.mark.parametrize("num_splits", [0, 1])
def test_backends_agree_in_float16_and_read_in_one_part(name: str, num_splits: int) -> None:
    for shape in (LARGE[0], LARGE[2]):
        backend = backend_or_skip(name, needs(shape, torch.float16, "cuda", num_splits))
        case = Case(shape, torch.float16, "cuda")
        case.check(case.attend(backend))
