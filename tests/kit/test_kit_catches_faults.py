"""The kit notices every fault of the broken toys, by the check whose name says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken import FAULTS
from broken.case import SIZES, BrokenToy
from broken.checkpoints import split_layout
from broken.records import BAD_PRESETS
from fake_plugins import FakeSite, plugin_source
from kit_runs import Outcomes, run_kit

from looped_spec.adapter import Capabilities, WeightTarget
from looped_spec.testing import AdapterConformance
from looped_spec.testing.checkpoints import write_checkpoint
from looped_spec.testing.toy import TOY_CONFIG, ToyAdapter, make_toy

SUITES = """
from pathlib import Path

import pytest
from broken import FAULTS
from broken.case import make_broken

from looped_spec.plugins import PluginManager
from looped_spec.testing import AdapterConformance


def suite(kind):
    class Suite(AdapterConformance):
        @pytest.fixture
        def adapter(self):
            return make_broken(kind)

        @pytest.fixture
        def spec(self):
            return PluginManager().adapter_spec(kind.plugin) if kind.plugin else kind.record

        @pytest.fixture
        def checkpoint_folder(self):
            folder = Path(__file__).parent / str(kind.plugin)
            return folder if folder.is_dir() else None

    return Suite


globals().update({f"Test{name}": suite(kind) for name, kind in FAULTS.items()})
"""

IMPORTS = "from looped_spec.adapter import Capabilities, ExitCriterion\n"
UNPROVEN = {
    "test_a_cuda_device_gives_the_same_logits": "needs a GPU",
    "test_aborting_frees_everything": "the engine frees; what it relies on is proven elsewhere",
    "test_an_end_token_inside_a_draft_ends_the_text": "the engine ends it; as above",
    "test_no_standard_test_is_overridden_without_a_reason": "see test_kit_rules.py",
}
"""Check -> why no broken toy shows that it works."""


class SplitToy(ToyAdapter):
    """A healthy toy that stores query, key and value of its prelude apart."""

    def checkpoint_layout(self) -> dict[str, WeightTarget]:
        return split_layout(self)


def install(site: FakeSite, kind: type[BrokenToy]) -> None:
    """Install the plugin of a broken toy; what is wrong with it goes by its name."""
    name = str(kind.plugin)
    can = Capabilities(resumable=False) if name == "modest_toy" else make_toy().capabilities
    factory = f"{kind.__module__}:{kind.__name__}"
    heavy = "import torch\n" if name == "heavy_toy" else ""
    site.add(
        f"fake-{name}", heavy + IMPORTS + plugin_source(name, factory=factory, capabilities=can)
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run, on every broken toy, the checks that must notice its fault."""
    folder = tmp_path_factory.mktemp("author")
    site = FakeSite(tmp_path_factory.mktemp("site"))
    for kind in FAULTS.values():
        if kind.plugin is not None:
            install(site, kind)
    presets = site.folder / BAD_PRESETS / "presets"
    presets.mkdir(parents=True)
    (presets.parent / "__init__.py").touch()
    (presets / "model=bad.json").write_text("{")
    healthy = SplitToy({**TOY_CONFIG, **SIZES}, {})
    healthy.module.load_state_dict(make_toy(**SIZES).module.state_dict())
    config = {**TOY_CONFIG, **SIZES, "model_type": "swapped_toy_model"}
    write_checkpoint(healthy, folder / "swapped_toy", config)
    selected = [f"Test{name}::{test}" for name, kind in FAULTS.items() for test in kind.caught_by]
    return run_kit(folder, SUITES, selected, [Path(__file__).parent, site.folder])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed_by_the_checks_that_are_named_for_it(
    name: str, outcomes: Outcomes
) -> None:
    kind: type[BrokenToy] = FAULTS[name]
    assert kind.caught_by, f"{name} says no check"
    assert set(outcomes.of(f"Test{name}")) == set(kind.caught_by)
    assert outcomes.failed(f"Test{name}") == set(kind.caught_by), outcomes.of(f"Test{name}")


def test_nearly_every_check_notices_some_fault() -> None:
    checks = {name for name in dir(AdapterConformance) if name.startswith("test_")}
    noticed = {name for kind in FAULTS.values() for name in kind.caught_by}
    assert noticed <= checks
    assert checks - noticed == set(UNPROVEN)
