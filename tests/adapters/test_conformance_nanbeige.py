"""Nanbeige passes the kit that third-party adapters are tested with, at a tiny random size."""

from __future__ import annotations

from pathlib import Path

import pytest
from looped_spec_nanbeige.adapter import NanbeigeAdapter
from looped_spec_nanbeige.plugin import looped_spec_adapters
from tiny_random import golden_config, load, write_random
from torch import Tensor

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.testing import AdapterConformance

CONFIG = golden_config("nanbeige-a", num_hidden_layers=2, num_loops=3)


def damp(name: str, parameter: Tensor) -> None:
    """Let every branch add a quarter of what it would."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        parameter *= 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights."""
    folder = tmp_path_factory.mktemp("nanbeige")
    return write_random(NanbeigeAdapter, CONFIG, folder, std=0.1, damp=damp)


class TestNanbeige(AdapterConformance):
    @pytest.fixture
    def checkpoint_folder(self, folder: Path) -> Path:
        return folder

    @pytest.fixture
    def adapter(self, folder: Path) -> ModelAdapter:
        return load(folder)

    @pytest.fixture
    def spec(self) -> AdapterSpec:
        (spec,) = looped_spec_adapters()
        return spec
