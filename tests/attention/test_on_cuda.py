"""What only a GPU can show of the backends; `pytest -m gpu` runs these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import Case, Shape, backend_or_skip, needs

from looped_spec import LLM, SamplingParams
from looped_spec.errors import UnsupportedError
from looped_spec.runtime.attention import PagedRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ("sdpa", "triton", "flash_attn", "varlen")
BF16 = torch.bfloat16
each_backend = pytest.mark.parametrize("name", NAMES)


def shape(requests: int, rows: int, block_size: int = 256) -> Shape:
    return Shape(requests, rows, 16, 16, 128, block_size, 1500)


def load_into(target: Case, source: Case) -> None:
    """Give a case the numbers of another, in the tensors that it has."""
    for name in ("q", "positions", "k_pages", "v_pages"):
        getattr(target, name).copy_(getattr(source, name))
    target.rows.block_tables.copy_(source.rows.block_tables)


@each_backend
@pytest.mark.parametrize("rows", [1, 5])
def test_a_captured_graph_replays_at_other_positions_and_tables(name: str, rows: int) -> None:
    backend = backend_or_skip(name, needs(shape(4, rows), BF16, "cuda"))
    case = Case(shape(4, rows), BF16, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled before they are captured
        case.attend(backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.attend(backend)
    for seed in (1, 2):
        other = Case(shape(4, rows), BF16, "cuda", seed)
        load_into(case, other)
        graph.replay()
        assert torch.equal(out, other.attend(backend))
        case.check(out)


def first_request(case: Case, rows: slice) -> Case:
    """The same case with its first request alone, and some of its rows."""
    alone = Case(case.shape, case.dtype, "cuda")
    alone.pool, alone.k_pages, alone.v_pages = case.pool, case.k_pages, case.v_pages
    alone.q, alone.positions = case.q[:1, rows], case.positions[:1, rows]
    alone.rows = PagedRows(case.rows.block_tables[:1], case.rows.limits[:1], case.rows.seeds[:1])
    return alone


@pytest.mark.parametrize("name", ["triton", "flash_attn", "varlen"])
def test_in_one_part_a_request_does_not_depend_on_its_batch(name: str) -> None:
    backend = backend_or_skip(name, needs(shape(24, 5), BF16, "cuda", num_splits=1))
    case = Case(shape(24, 5), BF16, "cuda")
    alone = first_request(case, slice(0, 5)).attend(backend)
    assert torch.equal(alone[0], case.attend(backend)[0])


def test_in_one_part_a_verified_row_is_a_decoded_row() -> None:
    backend = backend_or_skip("triton", needs(shape(3, 9), BF16, "cuda", num_splits=1))
    case = Case(shape(3, 9), BF16, "cuda")
    verified = first_request(case, slice(0, 9)).attend(backend)
    for row in range(9):
        decoded = first_request(case, slice(row, row + 1)).attend(backend)
        assert torch.equal(decoded[0, 0], verified[0, row])


@each_backend
@pytest.mark.parametrize("family", ["ouro-a", "huginn-a", "nanbeige-a"])
@pytest.mark.parametrize("candidate", [(0, None), (2, 1)], ids=["K0", "K2"])
def test_a_model_runs_over_every_backend(
    name: str, family: str, candidate: tuple[int, int | None]
) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "attention_backend": name}
    k, d = candidate
    try:
        llm = LLM(str(GOLDEN / family), num_speculative_tokens=k, draft_loops=d, **options)
    except UnsupportedError as refused:
        pytest.skip(str(refused))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([[3, 4, 5], [6], list(range(1, 18))], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 20, 20]
    for pages in (page for pair in llm.engine.runner.pool.planes for page in pair):
        assert bool(torch.isfinite(pages).all())
