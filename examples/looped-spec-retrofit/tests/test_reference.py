"""Logits, states and exit scores are those of the slow reference, at every depth."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from looped_spec.layers.initial_state import truncated_normal
from looped_spec.loading import load_adapter
from looped_spec.testing.dense import DenseContext
from looped_spec.testing.oracle import dense_logits
from reference import Reference
from torch import Tensor

from looped_spec_retrofit.adapter import RetrofitAdapter
from looped_spec_retrofit.tiny import tiny_config, write_tiny

TOKENS = [96, 41, 70, 77, 77, 80, 13, 1, 88, 80, 83, 77, 69, 2]
SEED = 5
ROUNDING = 3e-6
"""fp32 against float64, as a share of the largest logit; ten times what was seen."""

SHAPES: dict[str, dict[str, Any]] = {
    "as published": {},
    "no scaling": {"rope_scaling": None, "rope_theta": 10000.0},
    "a head of keys for each of queries": {"num_key_value_heads": 4},
    "tied head": {"tie_embeddings": True},
    "padded vocabulary": {"padded_vocab_size": 128},
    "larger initial state": {"init_values": {"std": 0.7, "embed_scale": 1.0}},
}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=list(SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each shape."""
    return write_tiny(tmp_path_factory.mktemp("shape"), tiny_config(**request.param))


def load(folder: Path, init_scale: float = 1.0) -> RetrofitAdapter:
    """Load a model as users do."""
    options = {"init_scale": init_scale}
    adapter = load_adapter(folder, device="cpu", adapter_options=options).adapter
    assert isinstance(adapter, RetrofitAdapter)
    return adapter


def start(reference: Reference, init_scale: float) -> Tensor:
    """Return the initial state [T, E] of a request of `SEED`, by the rule of looped-spec."""
    positions = torch.arange(len(TOKENS))[None]
    noise = truncated_normal(torch.tensor([SEED]), positions, reference.config["n_embd"])[0]
    return noise * reference.config["init_values"]["std"] * init_scale


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    error = float((got.double() - expected).abs().max())
    assert error <= ROUNDING * float(expected.abs().max()), error


@pytest.mark.parametrize("init_scale", [1.0, 0.0])
def test_logits_are_those_of_the_reference_at_every_depth(folder: Path, init_scale: float) -> None:
    adapter, reference = load(folder, init_scale), Reference(folder)
    for loops in (1, 2, 4, 9):
        expected = reference.logits(TOKENS, loops, start(reference, init_scale))
        assert_close(dense_logits(adapter, TOKENS, loops, seed=SEED), expected)


def test_the_initial_state_matters_and_fades(tiny: Path) -> None:
    reference = Reference(tiny)
    zeros, noise = start(reference, 0.0), start(reference, 1.0)
    apart = [
        float((reference.logits(TOKENS, n, noise) - reference.logits(TOKENS, n, zeros)).abs().max())
        for n in (1, 8)
    ]
    assert apart[0] > 1e-3
    assert apart[1] < apart[0] / 10


def scores(adapter: RetrofitAdapter, criterion: str, loops: int) -> Tensor:
    """Return exit scores [loops, T]."""
    ctx = DenseContext(1, len(TOKENS), loops, torch.tensor([SEED]))
    with torch.no_grad():
        state, score, found = adapter.prelude(torch.tensor([TOKENS]), ctx), None, []
        for index in range(loops):
            before, state = state, adapter.loop(state, index, ctx)
            score = adapter.exit_score(criterion, state, before, score, index, ctx)
            found.append(score[0])
    return torch.stack(found)


def test_exit_scores_are_those_of_the_reference(tiny: Path) -> None:
    adapter, reference = load(tiny), Reference(tiny)
    states = reference.states(TOKENS, 4, start(reference, 1.0))
    steps = torch.stack([-(b - a).norm(dim=1) / b.norm(dim=1) for a, b in pairwise(states)])
    got = scores(adapter, "latent-diff", 4).double()
    torch.testing.assert_close(got, steps, rtol=0, atol=1e-5)
    p = torch.stack([reference.head(state).softmax(dim=1) for state in states[1:]])
    divergence = (p[:-1] * (p[:-1] / p[1:]).log()).sum(dim=2)
    got = scores(adapter, "kl", 4)[1:].double()
    torch.testing.assert_close(got, -divergence, rtol=0, atol=1e-5)
