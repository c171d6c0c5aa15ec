"""Rounds of every family that were traced once run at other numbers as eager rounds do.

The twin of a CUDA graph: the same static buffers, the same padding, the same replays.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden import GOLDEN

from looped_spec.adapter import ModelAdapter
from looped_spec.control.plan import Candidate
from looped_spec.loading import load_adapter
from looped_spec.runtime.graphs import GraphRunner, TracedGraphs
from looped_spec.runtime.round_program import RoundShape
from looped_spec.runtime.sampler import SamplingMode
from looped_spec.testing.rounds import everything, make_program, randomize

# Full loops, as few as leave a choice of depths where the family has one, and (B, K, d).
FAMILIES: dict[str, tuple[int, list[tuple[int, int, int]]]] = {
    "ouro-a": (3, [(1, 0, 0), (4, 1, 1), (2, 3, 2)]),
    "huginn-a": (2, [(4, 0, 0), (2, 2, 1)]),
    "nanbeige-a": (2, [(4, 0, 0), (2, 2, 1)]),
}
CASES = [(family, loops, *case) for family, (loops, cases) in FAMILIES.items() for case in cases]
_LOADED: dict[str, ModelAdapter] = {}


def adapter_of(family: str) -> ModelAdapter:
    if family not in _LOADED:
        _LOADED[family] = load_adapter(GOLDEN / family, device="cpu", dtype="float32").adapter
    return _LOADED[family]


@pytest.mark.parametrize(("family", "loops", "size", "k", "d"), CASES)
@torch.inference_mode()
def test_a_traced_round_is_the_eager_one_bit_for_bit(
    family: str, loops: int, size: int, k: int, d: int
) -> None:
    adapter: Any = adapter_of(family)
    eager, twin = make_program(adapter, loops), make_program(adapter, loops)
    runner = GraphRunner(twin, TracedGraphs(), sizes=[size])
    mode = SamplingMode.GREEDY if k == 1 else SamplingMode.FILTERED
    runner.capture([RoundShape.of(size, Candidate(k, d), mode)], show_progress=False)
    texts: set[tuple[int, ...]] = set()
    for seed in range(3):
        live = max(1, size - seed)  # requests come and go: the rest is padding
        for program in (eager, twin):
            randomize(program, live, seed)
        for _ in range(2):  # the second goes on where the first has left the rows
            shape = RoundShape.of(live, Candidate(k, d), mode)
            want = eager(shape._replace(batch_size=size), has_padding=True)
            got = runner.run(shape)
            assert torch.equal(want[:live], got)
            assert not want[live:].any(), "padding has nothing to say"
            for one, other in zip(everything(eager), everything(twin), strict=True):
                assert torch.equal(one, other)
            texts.add(tuple(got.flatten().tolist()))
    assert len(texts) >= 5, "the numbers must matter"
    assert runner.stats.replays == 6 and not runner.stats.eager_rounds
