"""The recipe of `demo:ouro`: the body first, then the gate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from demo_recipes import OURO
from demo_texts import read_text
from looped_spec_ouro.demo.recipe import RECIPE, OuroTrainSettings

from looped_spec.demos.trainer import Trainer


def test_training_changes_the_body_first_and_only_the_gate_at_the_end(tmp_path: Path) -> None:
    trained = OURO.train(read_text(tmp_path), tmp_path / "out", tmp_path / "state.pt")
    whole = trained.adapter.module.state_dict()
    body_only = Trainer(RECIPE, OURO.settings, trained.sampler, trained.tokenizer)
    initial = {name: value.clone() for name, value in body_only.adapter.module.state_dict().items()}
    for _ in range(OURO.settings.steps):
        body_only.train_step()
    for name, value in body_only.adapter.module.state_dict().items():
        is_gate = "early_exit_gate" in name
        assert torch.equal(value, initial[name]) == is_gate, name
        assert torch.equal(value, whole[name]) == (not is_gate), name


def test_blended_weights_follow_the_settings() -> None:
    s = OuroTrainSettings(steps=100, blend_from=0.4, blend_to=0.8)
    assert s.loop_weights(0) == s.loop_weights(40) == s.first_weights
    assert s.loop_weights(80) == pytest.approx(s.last_weights)
    assert sum(s.loop_weights(60)) == pytest.approx(1.0)
