"""Healthy toys pass the kit: with as many key heads as heads, with fewer, and depth-conditioned."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_plugins import FakeSite, plugin_source

from looped_spec.adapter import AdapterSpec
from looped_spec.plugins import PluginManager
from looped_spec.testing import AdapterConformance
from looped_spec.testing.checkpoints import write_checkpoint
from looped_spec.testing.toy import TOY_CONFIG, ToyAdapter, make_toy

PLAIN = {"num_layers": 1, "full_loops": 3, "num_kv_heads": 4}
TOY_PLUGIN = "from looped_spec.adapter import Capabilities, ExitCriterion\n" + plugin_source(
    "fake_toy",
    "toy_looped",
    factory="looped_spec.testing.toy:ToyAdapter",
    capabilities=make_toy().capabilities,
)


class TestPlainToy(AdapterConformance):
    """As a third party's plugin: installed in a folder, with a checkpoint of its own."""

    @pytest.fixture
    def adapter(self) -> ToyAdapter:
        return make_toy(**PLAIN)

    @pytest.fixture
    def spec(self, fake_site: FakeSite) -> AdapterSpec:
        fake_site.add("fake-toy", TOY_PLUGIN)
        return PluginManager().adapter_spec("fake_toy")

    @pytest.fixture
    def checkpoint_folder(self, adapter: ToyAdapter, tmp_path: Path) -> Path:
        return write_checkpoint(adapter, tmp_path / "toy", {**TOY_CONFIG, **PLAIN})


class TestGroupedQueryToy(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> ToyAdapter:
        return make_toy(full_loops=2)


class TestDepthConditionedToy(AdapterConformance):
    @pytest.fixture
    def adapter(self) -> ToyAdapter:
        return make_toy(num_layers=1, full_loops=3, depth_conditioned=True)
