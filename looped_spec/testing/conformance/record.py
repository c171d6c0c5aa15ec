"""Checks of what is declared: the plugin's record, the sizes, the defaults."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from looped_spec.adapter import API_VERSION, AdapterSpec, KVPlane, ModelAdapter
from looped_spec.control.plan import Candidate
from looped_spec.hooks import PROJECT
from looped_spec.plugins import PluginManager, PluginRecord, load_adapter_class
from looped_spec.presets import Preset
from looped_spec.testing.conformance.base import ConformanceBase, given

_HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors")

_IMPORT_ALONE = (
    "import importlib, json, sys\n"
    "module, sys.path[:] = sys.argv[1], json.loads(sys.argv[2])\n"
    "importlib.import_module(module).looped_spec_adapters()\n"
    f"print([name for name in {_HEAVY} if name in sys.modules])\n"
)

_MOST_DEPTHS = 64


def _installed(spec: AdapterSpec) -> PluginRecord:
    """Return the installed plugin of this adapter; skip where there is none."""
    for record in PluginManager().records():
        if record.name == spec.name:
            return record
    pytest.skip(f"no installed plugin declares adapter '{spec.name}': pip install -e it")


class RecordChecks(ConformanceBase):
    """The record is valid and cheap to ask for, and the model keeps what it says."""

    def test_the_record_is_for_this_version_of_the_contract(self, spec: AdapterSpec | None) -> None:
        assert given(spec).api_version == API_VERSION

    def test_the_record_names_the_class_of_the_model(
        self, spec: AdapterSpec | None, adapter: ModelAdapter
    ) -> None:
        assert isinstance(adapter, load_adapter_class(given(spec)))

    def test_the_installed_plugin_is_active_and_declares_the_record(
        self, spec: AdapterSpec | None
    ) -> None:
        record = _installed(given(spec))
        assert record.status == "active", record.cause
        assert record.spec == spec

    def test_the_plugin_imports_nothing_heavy(self, spec: AdapterSpec | None) -> None:
        record = _installed(given(spec))
        (module,) = {
            entry.module
            for entry in metadata.entry_points(group=PROJECT, name=record.entry_point)
            if entry.dist is None or entry.dist.name == record.distribution
        }
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT_ALONE, module, json.dumps(sys.path)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "[]", f"importing {module} imports more than it should"

    def test_the_model_can_do_no_more_than_the_record_says(
        self, spec: AdapterSpec | None, adapter: ModelAdapter
    ) -> None:
        said, can = given(spec).capabilities, adapter.capabilities
        assert set(can.early_exit) <= set(said.early_exit)
        assert said.resumable or not can.resumable
        assert said.shadow_depths or not can.shadow_depths
        assert said.seed_free or not can.seed_free

    def test_bundled_presets_are_valid(self, spec: AdapterSpec | None) -> None:
        package = given(spec).preset_package
        if package is None:
            pytest.skip("preset_package: none is declared")
        found = importlib.util.find_spec(package)
        assert found is not None, f"preset_package '{package}' cannot be imported"
        folders = found.submodule_search_locations or ()
        files = [
            file for folder in folders for file in Path(folder, "presets").glob("model=*.json")
        ]
        if not files:
            pytest.skip(f"no preset file in {package}/presets")
        for file in files:
            preset = Preset.read(file)
            assert preset.file_name == file.name, f"{file.name} holds a preset of another name"
            assert preset.adapter == given(spec).name, f"{file.name} is of {preset.adapter}"

    def test_no_state_is_kept_beside_the_planes(self, adapter: ModelAdapter) -> None:
        assert adapter.capabilities.non_kv_state is None, "the core refuses such a model"

    def test_the_sizes_are_sane(self, adapter: ModelAdapter) -> None:
        sizes = adapter.geometry
        assert 1 <= sizes.default_full_loops <= sizes.max_full_loops
        assert sizes.vocab_size > 1
        assert sizes.hidden_size > 0
        assert sizes.max_model_len > 1

    def test_every_depth_declares_planes(self, adapter: ModelAdapter) -> None:
        for depth in range(1, min(adapter.geometry.max_full_loops, _MOST_DEPTHS) + 1):
            planes = adapter.kv_planes(depth)
            assert isinstance(planes, tuple) and planes
            assert planes == adapter.kv_planes(depth)
            for plane in planes:
                assert isinstance(plane, KVPlane)
                assert plane.kind in ("prelude", "loop", "readout")
                assert plane.num_kv_heads > 0 and plane.head_dim > 0

    def test_default_speculation_is_in_range(self, adapter: ModelAdapter) -> None:
        if adapter.default_speculation is None:
            pytest.skip("default_speculation: none is declared")
        candidate = Candidate(*adapter.default_speculation)
        assert candidate.num_speculative_tokens >= 1
        if candidate.draft_loops >= adapter.geometry.default_full_loops:
            pytest.skip("default_speculation is meant for a deeper model than this tiny one")
        candidate.check(adapter.geometry.default_full_loops)

    def test_exit_criteria_have_names_of_their_own_and_thresholds(
        self, adapter: ModelAdapter
    ) -> None:
        declared = adapter.capabilities.early_exit
        assert len({criterion.name for criterion in declared}) == len(declared)
        for criterion in declared:
            assert criterion.name
            assert math.isfinite(criterion.default_threshold)
