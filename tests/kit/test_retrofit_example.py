"""The third party's plugin in examples/ keeps to the contract as it stands here.

Its own tests run in CI, in an environment that it is installed into. Here it is installed by hand,
from its folder, so that a change of the core that breaks it is noticed at once.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from fake_plugins import FakeSite
from tree import ROOT

from looped_spec import LLM, SamplingParams
from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.loading import load_adapter
from looped_spec.plugins import PluginManager
from looped_spec.settings import Settings
from looped_spec.testing.conformance.checkpoints import CheckpointChecks
from looped_spec.testing.conformance.depth import DepthChecks
from looped_spec.testing.conformance.planes import PlaneChecks
from looped_spec.testing.conformance.record import RecordChecks
from looped_spec.testing.conformance.rows import RowChecks

EXAMPLE = ROOT / "examples" / "looped-spec-retrofit"
PROJECT = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
SMALL = {"mean_recurrence": 2, "n_layers_in_recurrent_block": 1, "n_layers": 3}
PROMPTS = [[96, 53, 73, 70], [96]]


@pytest.fixture
def site(fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> FakeSite:
    """The example as pip would install it, from the metadata of its pyproject.toml."""
    monkeypatch.syspath_prepend(EXAMPLE)
    ((entry_point, module),) = PROJECT["entry-points"]["looped_spec"].items()
    fake_site.add(
        PROJECT["name"],
        f"from {module} import looped_spec_adapters\n",
        module="fake_retrofit",
        entry_point=entry_point,
        version=PROJECT["version"],
        requires=PROJECT["dependencies"],
    )
    return fake_site


@pytest.fixture
def folder(site: FakeSite, tmp_path: Path) -> Path:
    """A tiny model of the family, smaller than that of its own tests."""
    from looped_spec_retrofit.tiny import tiny_config, write_tiny

    return write_tiny(tmp_path / "tiny", tiny_config(**SMALL))


def test_the_example_is_found_under_its_own_name_and_version(site: FakeSite) -> None:
    (record,) = [r for r in PluginManager(Settings()).records() if r.name == "retrofit"]
    assert record.status == "active", record.cause
    assert (record.distribution, record.version) == (PROJECT["name"], PROJECT["version"])


def test_it_shares_its_model_type_with_a_family_of_ours(site: FakeSite) -> None:
    from looped_spec_retrofit.tiny import tiny_config

    manager = PluginManager(Settings())
    config = tiny_config()
    assert manager.resolve_model_type(config["model_type"], config).name == "retrofit"
    scaled = {**config, "init_values": {"embed_scale": 72.7}}
    assert manager.resolve_model_type(config["model_type"], scaled).name != "retrofit"


def test_a_folder_is_run_end_to_end(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    texts = []
    for num_speculative_tokens in (0, 3):
        llm = LLM(str(folder), full_loops=4, num_speculative_tokens=num_speculative_tokens)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


class TestExample(RecordChecks, PlaneChecks, RowChecks, DepthChecks, CheckpointChecks):
    """The kit without its checks of whole texts, which take longest and run in CI."""

    @pytest.fixture
    def checkpoint_folder(self, folder: Path) -> Path:
        return folder

    @pytest.fixture
    def adapter(self, folder: Path) -> ModelAdapter:
        return load_adapter(folder, device="cpu").adapter

    @pytest.fixture
    def spec(self, site: FakeSite) -> AdapterSpec:
        return PluginManager(Settings()).adapter_spec("retrofit")
