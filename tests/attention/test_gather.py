"""Short contexts are gathered on the CPU, into memory that is kept from round to round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import TOLERANCES, Case, Shape
from torch.utils._python_dispatch import TorchDispatchMode

from looped_spec.control.plan import Candidate
from looped_spec.offline.recording import RecordingPolicy
from looped_spec.runtime.attention import SdpaBackend, pieces
from looped_spec.runtime.attention.sdpa import Gather
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine, run_all
from looped_spec.testing.toy import make_toy

SHAPES = [Shape(3, 1, 2, 2, 64, 16, 90), Shape(3, 4, 4, 2, 32, 7, 60), Shape(2, 5, 4, 1, 16, 3, 30)]


@pytest.fixture(autouse=True)
def _never_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather however long the contexts are."""
    monkeypatch.setattr(pieces.Pieces, "pay", lambda spans, bytes_per_token: False)


class _Made(TorchDispatchMode):
    """Counts the numbers of all tensors that operations make in memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Tensor)]
        memory = [one.untyped_storage().data_ptr() for one in given]
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in memory:
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype)[6:])
def test_one_backend_serves_calls_of_any_size_in_any_order(dtype: torch.dtype) -> None:
    backend = SdpaBackend()
    for shape in [*SHAPES, *reversed(SHAPES)]:
        case = Case(shape, dtype, knows_spans=True)
        prepared = backend.prepare(case.positions, case.rows, case.pool)
        assert isinstance(prepared, Gather) and prepared.reuses
        case.check(case.attend(backend))


def test_memory_of_one_dtype_is_not_taken_for_another() -> None:
    backend = SdpaBackend()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        case = Case(SHAPES[0], dtype, knows_spans=True)
        case.check(case.attend(backend))


def test_no_call_but_the_first_makes_a_copy_in_new_memory() -> None:
    """A copy that is made anew is given back to the system and fetched again, page by page."""
    backend, case = SdpaBackend(), Case(SHAPES[0], torch.float32, knows_spans=True)
    gathered = case.rows.block_tables.numel() * case.k_pages[0].numel()
    made = [_Made(), _Made()]
    for mode in made:
        with mode:
            case.attend(backend)
    first, second = (max(mode.sizes) for mode in made)
    assert first >= gathered > second


def test_outside_of_inference_mode_the_same_memory_can_be_used() -> None:
    backend, case = SdpaBackend(), Case(SHAPES[1], torch.float32, knows_spans=True)
    with torch.inference_mode():
        inside = case.attend(backend)
    assert torch.equal(case.attend(backend), inside)


def test_where_the_host_does_not_know_lengths_nothing_is_kept() -> None:
    """A round that is captured or traced must not write to memory of the backend."""
    backend, case = SdpaBackend(), Case(SHAPES[0], torch.float32)
    prepared = backend.prepare(case.positions, case.rows, case.pool)
    assert isinstance(prepared, Gather) and not prepared.reuses
    case.check(case.attend(backend))
    assert not backend._kept


@pytest.mark.parametrize("gathers", [True, False])
def test_the_policy_hears_of_the_context_that_rounds_are_as_dear_as(
    gathers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered requests are all padded to the longest; read where they lie, each costs its own."""
    monkeypatch.setattr(pieces.Pieces, "pay", lambda spans, bytes_per_token: not gathers)
    heard = []

    class Listening(RecordingPolicy):
        def plan(self, batch_size: int, **told: int) -> Any:
            heard.append((batch_size, told["context_tokens"]))
            return super().plan(batch_size)

    engine = make_engine(make_toy(), max_num_seqs=2)
    engine.policy = Listening(Candidate(0, 0))
    run_all(engine, [[1] * 4, [2] * 20], SamplingParams(temperature=0.0, max_tokens=5))
    # Both have a first token by then; what the very first round hears precedes any round.
    assert heard[1:3] == [(2, 22 if gathers else 14), (2, 23 if gathers else 15)]


def test_engines_of_one_choice_keep_no_memory_in_common() -> None:
    backend, case = SdpaBackend(), Case(SHAPES[0], torch.float32, knows_spans=True)
    case.attend(backend)
    other = backend.for_engine()
    assert other is not backend and not other._kept
    case.check(case.attend(other))
    assert other._kept[0].data_ptr() != backend._kept[0].data_ptr()
