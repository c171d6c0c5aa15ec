"""The classes that the guide's page of topics shows keep the contract; what it quotes is said."""

from __future__ import annotations

from pathlib import Path

import guide
import pytest
from fake_plugins import FakeSite, plugin_source
from kit_runs import Outcomes, run_kit

from looped_spec.cli.adapters_new import write_project
from looped_spec.testing import AdapterConformance

TOPICS = guide.page("topics")

CHECKS = {
    "FramedAdapter": (
        "test_every_plane_is_written_by_the_stage_of_its_kind",
        "test_verification_overwrites_the_planes_that_it_may_not_keep",
        "test_prefill_reads_out_the_last_row_of_each_prompt",
    ),
    "GatedAdapter": (
        "test_exit_scores_are_one_fp32_number_a_row",
        "test_monotone_scores_never_fall",
        "test_an_unknown_criterion_is_refused",
        "test_texts_with_early_exit_do_not_depend_on_the_batch",
    ),
    "NoisyAdapter": (
        "test_two_runs_are_identical",
        "test_a_state_depends_on_seed_and_position_alone",
        "test_verification_continues_from_drafted_states",
    ),
    "ScheduledAdapter": (
        "test_verification_starts_anew_where_a_model_is_not_resumable",
        "test_speculation_changes_no_token",
    ),
    "TwoHeadedAdapter": (
        "test_a_draft_readout_writes_readout_planes_only",
        "test_speculation_changes_no_token",
    ),
    "PlanesOfTheirOwn": ("test_speculation_changes_no_token",),
    "PublishedAdapter": (
        "test_the_layout_fills_every_parameter_once",
        "test_what_a_checkpoint_may_lack_leaves_no_parameter_empty",
        "test_a_saved_checkpoint_loads_to_the_same_logits",
    ),
}
"""Class of the page -> the checks that are about what it adds."""

SUITES = """
import pytest
import samples
import torch
from looped_spec.testing import AdapterConformance
from test_of_the_tutorial import TINY


def suite(kind):
    class Suite(AdapterConformance):
        @pytest.fixture
        def adapter(self):
            torch.manual_seed(0)
            return kind(TINY, kind.options)

    return Suite


globals().update({f"Test{name}": suite(vars(samples)[name]) for name in NAMES})
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project of the tutorial, with all samples of the page as a module beside it."""
    project = tmp_path_factory.mktemp("author") / "looped-spec-myloop"
    write_project("myloop", project)
    guide.write_files(guide.page(""), project)
    (project / "samples.py").write_text("\n\n".join(guide.blocks(TOPICS, "python")))
    (project / "tests/test_conformance.py").rename(project / "test_of_the_tutorial.py")
    return project


@pytest.fixture(scope="module")
def outcomes(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run the checks of all samples."""
    source = f"NAMES = {list(CHECKS)}\n{SUITES}"
    selected = [f"Test{name}::{check}" for name, checks in CHECKS.items() for check in checks]
    return run_kit(tmp_path_factory.mktemp("kit"), source, selected, [project])


def test_every_class_of_the_page_is_checked() -> None:
    shown = [line for block in guide.blocks(TOPICS, "python") for line in block.splitlines()]
    classes = {line.split()[1].split("(")[0] for line in shown if line.startswith("class ")}
    assert classes == set(CHECKS)
    assert {check for checks in CHECKS.values() for check in checks} <= set(dir(AdapterConformance))


@pytest.mark.parametrize("name", CHECKS)
def test_a_sample_keeps_the_contract(name: str, outcomes: Outcomes) -> None:
    assert outcomes.of(f"Test{name}") == dict.fromkeys(CHECKS[name], "passed")


STATE = """
from dataclasses import replace
from looped_spec.adapter import Capabilities
from samples import MyloopAdapter

class Convolved(MyloopAdapter):
    def __init__(self, config, options):
        super().__init__(config, options)
        self.capabilities = Capabilities(non_kv_state="convolution state")
"""

LOAD = """
import json, pathlib, sys
from looped_spec import LLM
from looped_spec.errors import LoopedSpecError
from test_of_the_tutorial import TINY
folder = pathlib.Path(sys.argv[1], "counting")
folder.mkdir(exist_ok=True)
for model_type, changes in (("fake_conv", {}), ("fake_own", {"share_kv_between_loops": True})):
    (folder / "config.json").write_text(json.dumps({**TINY, **changes, "model_type": model_type}))
    for num_speculative_tokens in (0, 2):
        try:
            LLM(folder, device="cpu", num_speculative_tokens=num_speculative_tokens)
        except LoopedSpecError as error:
            print(error)
"""


def test_what_is_refused_is_refused_in_the_words_of_the_page(
    project: Path, fake_site: FakeSite, tmp_path: Path
) -> None:
    fake_site.write("fake_convolved", STATE)
    fake_site.add(
        "fake-conv", plugin_source("fake_c", "fake_conv", factory="fake_convolved:Convolved")
    )
    fake_site.add(
        "fake-own", plugin_source("fake_o", "fake_own", factory="samples:PlanesOfTheirOwn")
    )
    path = f"{fake_site.folder}:{project}"
    done = fake_site.run("-c", LOAD, str(tmp_path), environment={"PYTHONPATH": path})
    first, second = guide.blocks(TOPICS, "text")
    assert done.stdout == first * 2 + second * 2, done.stderr
