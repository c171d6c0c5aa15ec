"""Huginn passes the kit that third-party adapters are tested with, at a tiny random size."""

from __future__ import annotations

from pathlib import Path

import pytest
from looped_spec_huginn.adapter import HuginnAdapter
from looped_spec_huginn.plugin import looped_spec_adapters
from tiny_random import golden_config, load, write_random
from torch import Tensor

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.testing import AdapterConformance

CONFIG = golden_config(
    "huginn-a",
    mean_recurrence=3,
    n_layers_in_prelude=1,
    n_layers_in_recurrent_block=2,
    n_layers_in_coda=1,
    n_layers=4,
)


def damp(name: str, parameter: Tensor) -> None:
    """Let the recurrent state count half beside what is injected."""
    if name.endswith("adapter.weight"):
        parameter[:, : parameter.shape[1] // 2] *= 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights."""
    folder = tmp_path_factory.mktemp("huginn")
    return write_random(HuginnAdapter, CONFIG, folder, std=0.1, damp=damp)


class TestHuginn(AdapterConformance):
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
