"""On the CPU long contexts are read where they lie, as far as they are long, without a copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import TOLERANCES, Case, Shape
from torch.utils._python_dispatch import TorchDispatchMode

from looped_spec.runtime import runner as runner_module
from looped_spec.runtime.attention import SdpaBackend, pieces
from looped_spec.runtime.attention.pieces import Pieces
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Status
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.oracle import dense_generate
from looped_spec.testing.toy import make_toy

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
SHAPES = [Shape(3, 1, 2, 2, 64, 16, 90), Shape(3, 4, 4, 2, 32, 7, 60), Shape(1, 5, 4, 1, 16, 3, 30)]


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read piece by piece however short the contexts are."""
    monkeypatch.setattr(pieces, "_LEAST_BYTES", 0)


@pytest.mark.parametrize("one_piece", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_agree_with_the_plain_answer(
    shape: Shape, dtype: torch.dtype, one_piece: bool
) -> None:
    case = Case(shape, dtype, knows_spans=True, one_piece=one_piece)
    assert isinstance(SdpaBackend().prepare(case.positions, case.rows, case.pool), Pieces)
    case.check(case.attend(SdpaBackend()))
    case.check(case.attend(SdpaBackend(), 0.7), 0.7)


@pytest.mark.parametrize("one_piece", [True, False])
def test_rows_past_the_own_blocks_read_nobody_elses(one_piece: bool) -> None:
    shape = Shape(2, 4, 2, 1, 16, 5, 30)
    case = Case(shape, torch.float32, start=28, knows_spans=True, one_piece=one_piece)
    assert not case.inside.all()
    before = case.attend(SdpaBackend())
    own = case.rows.block_tables[0]
    for pages in (case.k_pages, case.v_pages):
        others = torch.ones(len(pages), dtype=torch.bool)
        others[own] = False
        pages[others] = torch.nan
    assert torch.equal(case.attend(SdpaBackend())[0], before[0])


@pytest.mark.parametrize("one_piece", [True, False])
def test_parts_of_a_context_are_what_they_would_be_alone(one_piece: bool) -> None:
    backend = SdpaBackend()
    case = Case(SHAPES[1], torch.float32, knows_spans=True, one_piece=one_piece)
    whole = case.attend(backend)
    prepared = backend.prepare(case.positions, case.rows, case.pool)
    for index in range(SHAPES[1].rows):
        q = case.q[:, index : index + 1]
        got = backend.attend(q, case.k_pages, case.v_pages, backend.column(prepared, index), None)
        assert torch.allclose(got, whole[:, index : index + 1], atol=2e-5)
    places = torch.tensor([2, 0])
    got = backend.attend(
        case.q[places], case.k_pages, case.v_pages, backend.select(prepared, places), None
    )
    assert torch.equal(got, whole[places])


class _Made(TorchDispatchMode):
    """Notes the most numbers that an operation gives in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [one for one in args if isinstance(one, torch.Tensor)]
        memory = [one.untyped_storage().data_ptr() for one in given]
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in memory:
            self.largest = max(self.largest, out.numel())
        return out


def engine_in(k: int, d: int, num_seqs: int) -> Engine:
    return make_engine(
        make_toy(hidden_size=16, num_layers=1, vocab_size=40, max_model_len=600),
        num_speculative_tokens=k,
        draft_loops=d,
        max_num_seqs=num_seqs,
        block_size=4,
    )


@pytest.mark.parametrize(("k", "d"), [(0, 0), (3, 2)])
def test_a_round_makes_no_tensor_as_long_as_its_context(k: int, d: int) -> None:
    engine = engine_in(k, d, 2)
    for number in range(2):
        engine.add_request([1 + number] * 500, GREEDY)
    engine.step()
    while any(r.status is not Status.DECODING for r in engine.scheduler.running):
        engine.step()
    with _Made() as made:
        engine.step()
    # Masks are the longest thing there is: K + 1 rows for both queries that share a key. A copy of
    # the keys would have 16 numbers a token.
    assert 0 < made.largest <= 2 * (k + 1) * (500 + 40) < 16 * 500


def test_requests_that_grow_beside_each_other_stay_in_one_piece() -> None:
    engine = engine_in(2, 1, 4)
    requests = [engine.add_request([1 + number] * 5, GREEDY) for number in range(4)]
    while engine.has_work:
        engine.step()
        running = [request for request in requests if request.row >= 0]
        assert all(request.is_one_piece for request in running)
        for request in running:
            first = request.blocks[0]
            assert request.blocks == list(range(first, first + len(request.blocks)))


def test_texts_are_those_of_the_dense_oracle_in_pieces_or_not() -> None:
    adapter = make_toy(hidden_size=16, num_layers=1, vocab_size=40, max_model_len=64)
    # With room for three requests in all, so that pieces break and some are preempted.
    engine = make_engine(
        adapter, num_speculative_tokens=3, draft_loops=2, block_size=3, num_blocks=36
    )
    prompts = [
        [1 + (number * 7 + place) % 39 for place in range(4 + 3 * number)] for number in range(6)
    ]
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    broken = 0
    while engine.has_work:
        engine.step()
        broken += sum(not r.is_one_piece for r in requests if r.row >= 0)
    assert broken, "or the test shows less than it says"
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == dense_generate(
            adapter, prompt, 30, full_loops=adapter.geometry.default_full_loops
        )


def test_nobody_looks_where_requests_lie_for_a_device_on_which_it_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SdpaBackend().wants_spans(torch.device("cpu"))
    assert not SdpaBackend().wants_spans(torch.device("cuda"))
    looked_at: list[int] = []
    monkeypatch.setattr(runner_module, "span_of", lambda request: looked_at.append(0))
    monkeypatch.setattr(SdpaBackend, "wants_spans", lambda *_: False)  # as on such a device
    engine = make_engine(make_toy())
    engine.add_request([1, 2, 3], GREEDY)
    while engine.has_work:
        engine.step()
    assert not looked_at
