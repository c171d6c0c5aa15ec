"""Checks of the checkpoint layout: every weight has one place, and comes back from a file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.loading import load_adapter
from looped_spec.model_config import read_json_config
from looped_spec.plugins import PluginManager, load_adapter_class
from looped_spec.testing.checkpoints import write_checkpoint
from looped_spec.testing.conformance.base import ConformanceBase, given
from looped_spec.testing.stages import StageBench
from looped_spec.weight_plan import tied_names
from looped_spec.weights import load_weights


class CheckpointChecks(ConformanceBase):
    """What `checkpoint_layout` says is what a checkpoint holds."""

    def test_the_layout_fills_every_parameter_once(self, adapter: ModelAdapter) -> None:
        names = dict(adapter.module.named_parameters(remove_duplicate=False))
        filled = {
            name: torch.zeros(parameter.shape[:1] or (1,), dtype=torch.int64)
            for name, parameter in names.items()
        }
        for tensor, target in adapter.checkpoint_layout().items():
            assert target.parameter in names, f"'{tensor}' goes to a parameter that is not there"
            filled[target.parameter][target.start : target.stop] += 1
        for tied in tied_names(adapter.module):
            sources = [name for name in tied if bool(filled[name].any())]
            assert sources, f"no tensor fills '{tied[0]}'"
            for name in sources:
                assert bool((filled[name] == 1).all()), f"rows of '{name}' are not filled once each"

    def test_what_a_checkpoint_may_lack_leaves_no_parameter_empty(
        self, adapter: ModelAdapter
    ) -> None:
        optional = adapter.optional_checkpoint_tensors()
        needed = {
            target.parameter
            for tensor, target in adapter.checkpoint_layout().items()
            if tensor not in optional
        }
        for tied in tied_names(adapter.module):
            assert needed & set(tied), f"'{tied[0]}' has optional tensors only"

    def test_a_saved_checkpoint_loads_to_the_same_logits(
        self, adapter: ModelAdapter, tmp_path: Path
    ) -> None:
        write_checkpoint(adapter, tmp_path)
        loaded = copy.deepcopy(adapter)
        loaded.module.to("meta")
        load_weights(loaded, tmp_path, torch.device("cpu"), torch.float32)
        tokens = self.sample_tokens(adapter, 1, 7)
        expected = StageBench(adapter).logits(tokens)
        self.assert_close(StageBench(loaded).logits(tokens), expected, "logits after loading")

    def test_the_checkpoint_folder_loads_to_the_same_logits(
        self, adapter: ModelAdapter, spec: AdapterSpec | None, checkpoint_folder: Path | None
    ) -> None:
        if checkpoint_folder is None:
            pytest.skip("fixture checkpoint_folder: none is given")
        config = read_json_config(checkpoint_folder)
        assert config["model_type"] in given(spec).model_types
        assert load_adapter_class(given(spec)).unsupported_reason(config) is None
        plugins = PluginManager()
        if not any(record.spec == spec for record in plugins.records()):
            pytest.skip(f"no installed plugin declares '{given(spec).name}': pip install -e it")
        loaded = load_adapter(checkpoint_folder, device="cpu", plugins=plugins).adapter
        assert isinstance(loaded, load_adapter_class(given(spec))), "another adapter takes it"
        assert loaded.geometry == adapter.geometry
        tokens = self.sample_tokens(adapter, 1, 7)
        expected = StageBench(adapter).logits(tokens)
        self.assert_close(StageBench(loaded).logits(tokens), expected, "logits after loading")
