"""The recipe of `demo:huginn`: depths drawn at random, gradients through the last loops."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from demo_recipes import HUGINN
from looped_spec_huginn.demo.recipe import RECIPE, SampledDepthStage
from torch import Tensor
from torch.nn import functional as F

from looped_spec.errors import ConfigError
from looped_spec.testing.dense import DenseContext


def stage(**changes: object) -> SampledDepthStage:
    """Return the stage of a tiny model."""
    settings = dataclasses.replace(HUGINN.settings, **changes)
    (made,) = RECIPE.stages(RECIPE.build(settings), settings)
    assert isinstance(made, SampledDepthStage)
    return made


def tokens() -> Tensor:
    return torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(0))


def test_depths_are_spread_around_the_mean_and_depend_on_seed_step_and_part_alone() -> None:
    settings = RECIPE.defaults
    depths = np.array([settings.draw(step, 0, 1)[0] for step in range(2000)])
    assert depths.min() >= 1 and depths.max() <= settings.max_loops
    # The mean of 2,000 draws with a deviation of 4 to 5 is known to 0.1; the cap takes a little.
    assert abs(depths.mean() - (settings.mean_rate + 1)) < 0.5
    assert len(set(depths.tolist())) > 12
    depth, seeds = settings.draw(5, 1, 3)
    again, same_seeds = settings.draw(5, 1, 3)
    assert depth == again and torch.equal(seeds, same_seeds) and len(set(seeds.tolist())) == 3
    assert not torch.equal(seeds, settings.draw(5, 0, 3)[1])


def test_the_loss_is_that_of_a_plain_run_of_the_drawn_depth() -> None:
    made = stage()
    for step in range(6):
        loss, shown = made.loss(tokens(), step, 0)
        depth, seeds = made.settings.draw(step, 0, 2)
        ctx = DenseContext(2, 16, total_loops=depth, seeds=seeds)
        state = made.adapter.prelude(tokens()[:, :-1], ctx)
        for index in range(depth):
            state = made.adapter.loop(state, index, ctx)
        logits = made.adapter.readout(state, ctx)
        expected = F.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())
        torch.testing.assert_close(loss, expected)
        assert shown.tolist() == pytest.approx([float(expected.detach()), depth])


def test_gradients_reach_back_through_the_last_loops_only() -> None:
    """With one kept loop the gradient is that of a run that starts from the state before it."""
    made = stage(grad_loops=1)
    step = next(s for s in range(50) if made.settings.draw(s, 0, 2)[0] == 3)
    made.loss(tokens(), step, 0)[0].backward()  # type: ignore[no-untyped-call]
    adapter = made.adapter
    weight = adapter.module.transformer.core_block[0].mlp.fc.weight
    assert weight.grad is not None
    found = weight.grad.clone()
    adapter.module.zero_grad()
    ctx = DenseContext(2, 16, total_loops=3, seeds=made.settings.draw(step, 0, 2)[1])
    hidden, embedded = adapter.prelude(tokens()[:, :-1], ctx)
    for index in range(3):
        hidden, _ = adapter.loop((hidden.detach(), embedded), index, ctx)
    logits = adapter.readout((hidden, embedded), ctx)
    F.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    torch.testing.assert_close(found, weight.grad)


@pytest.mark.parametrize(
    "change", [{"max_loops": 0}, {"grad_loops": 0}, {"mean_rate": 0.0}, {"rate_sigma": -1.0}]
)
def test_impossible_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(change))} must be"):
        dataclasses.replace(RECIPE.defaults, **change)
