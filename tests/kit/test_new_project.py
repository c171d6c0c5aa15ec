"""What `looped-spec adapters new` writes: its tests name what is missing; filled in, it passes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import guide
import pytest
from fake_plugins import FakeSite
from kit_runs import Outcomes
from processes import PATIENCE_SECONDS

from looped_spec.adapter import AdapterSpec, ModelAdapter
from looped_spec.cli.adapters_new import write_project
from looped_spec.testing import AdapterConformance
from looped_spec.testing.checkpoints import fill_random
from looped_spec.testing.conformance.base import NAMES_METHODS, REQUIRED_METHODS, unwritten
from looped_spec.testing.toy import ToyAdapter

SUITE = "TestMyloopAdapter"


def run_tests(project: Path, site: FakeSite) -> Outcomes:
    """Run the project's own tests as its author does, the plugin installed in a folder."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LOOPED_SPEC_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=report.xml"],
        cwd=project,
        env=inherited | {"PYTHONPATH": str(site.folder), "LOOPED_SPEC_STRICT_PLUGINS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return Outcomes(project / "report.xml", done.stdout)


@pytest.fixture(scope="module")
def skeleton(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The tests of a project right after it was written."""
    project = tmp_path_factory.mktemp("author") / "looped-spec-myloop"
    write_project("myloop", project)
    site = FakeSite(tmp_path_factory.mktemp("site"))
    site.install(project)
    return run_tests(project, site)


def test_a_new_project_is_told_which_methods_are_missing_and_nothing_else(
    skeleton: Outcomes,
) -> None:
    assert skeleton.failed(SUITE) == {NAMES_METHODS}
    for line in guide.blocks(guide.page(""), "text")[0].splitlines():
        assert line in skeleton.text
    named = {f"{NAMES_METHODS}[{method}]" for method in REQUIRED_METHODS}
    assert {node.rpartition("::")[2] for node in failures(skeleton)} == named


def failures(outcomes: Outcomes) -> list[str]:
    """Return the tests that the summary names as failed, without their reasons.

    How much of a reason is printed depends on the width of the terminal, and on whether CI is set.
    """
    lines = (line.split(" - ")[0] for line in outcomes.text.splitlines())
    return [line for line in lines if line.startswith(("FAILED", "ERROR"))]


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("kv_planes", "return a tuple of KVPlane"),
        ("prelude", "return the state of loop 0, a tuple of tensors [B, T, ...]"),
        ("loop", "return the state after this loop"),
        ("readout", "return logits [B, T', vocab_size]"),
    ],
)
def test_a_missing_method_is_told_what_to_return(
    method: str, told: str, skeleton: Outcomes
) -> None:
    assert f"MyloopAdapter.{method} is not written yet: {told}" in skeleton.text


def test_what_can_be_checked_without_the_methods_is_checked(skeleton: Outcomes) -> None:
    passed = {test for test, outcome in skeleton.of(SUITE).items() if outcome == "passed"}
    assert passed >= {
        "test_the_plugin_imports_nothing_heavy",
        "test_no_standard_test_is_overridden_without_a_reason",
    }
    assert "MyloopAdapter is not written yet: kv_planes, prelude, loop, readout" in skeleton.report


class TestFilledIn(AdapterConformance):
    """The project of the tutorial, filled in with what the tutorial shows."""

    @pytest.fixture(autouse=True)
    def tests(
        self, tmp_path: Path, fake_site: FakeSite, monkeypatch: pytest.MonkeyPatch
    ) -> ModuleType:
        """Install the project, and return its test module."""
        project = tmp_path / "looped-spec-myloop"
        write_project("myloop", project)
        guide.write_files(guide.page(""), project)
        fake_site.install(project)
        monkeypatch.syspath_prepend(project / "tests")
        return importlib.import_module("test_conformance")

    @pytest.fixture
    def adapter(self, tests: ModuleType) -> ModelAdapter:
        adapter: ModelAdapter = tests.MyloopAdapter(tests.TINY, tests.MyloopAdapter.options)
        fill_random(adapter.module)
        return adapter

    @pytest.fixture
    def spec(self, tests: ModuleType) -> AdapterSpec:
        (spec,) = tests.looped_spec_adapters()
        assert isinstance(spec, AdapterSpec)
        return spec


def test_a_method_that_does_more_than_raise_counts_as_written() -> None:
    class Half(ToyAdapter):
        def kv_planes(self, full_loops: int) -> tuple[()]:
            """A docstring is no message."""
            raise NotImplementedError

        def prelude(self, tokens: object, ctx: object) -> tuple[()]:  # type: ignore[override]
            if tokens is None:
                raise NotImplementedError("only with tokens")
            return ()

        def loop(self, *rest: object) -> tuple[()]:  # type: ignore[override]
            raise NotImplementedError("the text " + "in two parts")

        readout = print  # type: ignore[assignment]

    missing = unwritten(Half.__new__(Half))
    assert set(missing) == {"kv_planes", "loop"}
    assert missing["kv_planes"].startswith("Declare the KV planes of a run")
    assert missing["loop"] == "the text in two parts"
