"""A batch that stays the same uploads nothing, and one that changed uploads what it is now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import GREEDY, PROMPTS, oracle_text, run_to_end, shared_toy

from looped_spec.runtime import batch as batch_module
from looped_spec.runtime import runner as runner_module
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine

LONG = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=60)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Sequence[int]]]:
    """All integers that are brought to the device, call by call."""
    seen: list[Sequence[Sequence[int]]] = []
    real = batch_module.upload

    def noted(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        seen.append(values)
        return real(values, device)

    for module in (batch_module, runner_module):
        monkeypatch.setattr(module, "upload", noted)
    return seen


@pytest.mark.parametrize(("k", "d"), [(0, 0), (3, 2)])
def test_rounds_of_the_same_requests_upload_nothing(k: int, d: int, uploads: list[Any]) -> None:
    engine = make_engine(
        shared_toy(), num_speculative_tokens=k, draft_loops=d, block_size=128, max_num_seqs=3
    )
    requests = [engine.add_request(prompt, LONG) for prompt in PROMPTS]
    for _ in range(2):
        engine.step()
    uploads.clear()
    for _ in range(4):
        engine.step()
    assert uploads == []
    run_to_end(engine)
    assert [r.output_token_ids for r in requests] == [oracle_text(p, LONG) for p in PROMPTS]


def test_a_batch_that_changed_is_uploaded_once(uploads: list[Any]) -> None:
    engine = make_engine(shared_toy(), num_speculative_tokens=2, draft_loops=1, block_size=128)
    first = engine.add_request(PROMPTS[0], LONG)
    for _ in range(3):
        engine.step()
    late = engine.add_request(PROMPTS[1], GREEDY)
    engine.step()  # its prefill
    uploads.clear()
    engine.step()
    assert len(uploads) == 2, "rows and parameters, then tokens and positions"
    assert list(uploads[0][0]) == [first.row, late.row]
    engine.step()
    assert len(uploads) == 2


def test_a_request_that_takes_the_row_of_another_is_not_taken_for_it() -> None:
    engine = make_engine(
        shared_toy(), num_speculative_tokens=2, draft_loops=1, max_num_seqs=1, block_size=128
    )
    params = [LONG, GREEDY, SamplingParams(temperature=1.1, seed=9, max_tokens=12)]
    requests = [engine.add_request(PROMPTS[1], one) for one in params]
    run_to_end(engine)
    assert [r.output_token_ids for r in requests] == [
        oracle_text(PROMPTS[1], one) for one in params
    ]
