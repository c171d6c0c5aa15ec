"""Memory: one copy of the weights, and nothing that grows from round to round."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from looped_spec.layers.packed import PACKINGS, use_packed
from looped_spec.runtime.engine import Engine
from looped_spec.runtime.request import Request
from looped_spec.sampling_params import SamplingParams
from looped_spec.testing.engine import make_engine
from looped_spec.testing.toy import make_toy

ROUNDS = 300


def run_rounds(engine: Engine, count: int, first_seed: int) -> None:
    """Rounds of short requests that come and go."""
    until, seed = engine.metrics.num_rounds + count, first_seed
    while engine.metrics.num_rounds < until:
        if not engine.has_work:
            seed += 1
            params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.5, seed=seed)
            engine.add_request([1 + seed % 50] * (1 + seed % 7), params)
        engine.step()
    while engine.has_work:
        engine.step()


def alive(kind: type) -> int:
    """How many objects of a type there are."""
    gc.collect()
    return sum(issubclass(type(one), kind) for one in gc.get_objects())


@pytest.mark.parametrize("k", [0, 2])
def test_rounds_leave_nothing_behind(k: int) -> None:
    engine = make_engine(
        make_toy(hidden_size=16, num_layers=1), num_speculative_tokens=k, draft_loops=1 if k else 0
    )
    run_rounds(engine, 100, 0)
    tensors, requests = alive(torch.Tensor), alive(Request)
    run_rounds(engine, ROUNDS, 1000)
    assert alive(torch.Tensor) <= tensors and alive(Request) <= requests


def test_the_original_weight_is_freed_when_a_layer_is_packed() -> None:
    layer = nn.Linear(64, 64).requires_grad_(False)
    layer.weight.copy_(layer.weight.bfloat16().float())
    try:
        packed = PACKINGS["exact_fp16"].of(layer.weight)
    except RuntimeError as error:
        pytest.skip(f"exact_fp16 does not work here: {error}")
    assert packed is not None
    original = weakref.ref(layer.weight)
    use_packed(layer, packed)
    gc.collect()
    assert original() is None
