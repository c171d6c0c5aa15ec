"""The plugin guide: its tutorial runs, its lists are complete, its links lead somewhere."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import guide
import pytest
from fake_plugins import FakeSite
from processes import PATIENCE_SECONDS
from tree import ROOT

from looped_spec.adapter import API_VERSION
from looped_spec.cli.adapters_new import FILES, write_project
from looped_spec.cli.main import VERBS
from looped_spec.testing import AdapterConformance
from looped_spec.version import __version__

TUTORIAL, CONTRACT, TESTING = guide.page(""), guide.page("contract"), guide.page("testing")
COMMAND = f'looped-spec() {{ {shlex.quote(sys.executable)} -m looped_spec "$@"; }}\n'


@pytest.fixture
def tutorial(tmp_path: Path, fake_site: FakeSite) -> Path:
    """The project of the tutorial, written and filled in, its plugin installed."""
    project = tmp_path / "looped-spec-myloop"
    write_project("myloop", project)
    guide.write_files(TUTORIAL, project)
    fake_site.install(project)
    return project


def run(site: FakeSite, folder: Path, *command: str) -> str:
    """Run a command in a folder, with the plugins of the site, and return what it prints."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(site.folder), "LOOPED_SPEC_STRICT_PLUGINS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_model_of_the_tutorial_learns_and_generates_what_is_shown(
    tutorial: Path, fake_site: FakeSite
) -> None:
    (sample,) = guide.blocks(TUTORIAL, "python")
    script = f"import runpy; runpy.run_path('train.py')\n{sample}"
    printed = run(fake_site, tutorial, sys.executable, "-c", script).splitlines()
    shown = guide.blocks(TUTORIAL, "text")[-1].splitlines()
    assert printed[0] == shown[0]
    assert float(printed[1]) == pytest.approx(float(shown[1]), abs=0.3)
    shell = guide.blocks(TUTORIAL, "sh")[-1]
    assert "looped-spec generate counting" in shell
    compared = run(fake_site, tutorial, "bash", "-ec", COMMAND + shell)
    assert shown[0].strip("[]").split(", ")[0] in compared
    assert "speedup" in compared


def test_the_tutorial_shows_files_of_the_project_and_one_script() -> None:
    written = {path.replace("${package}", "looped_spec_myloop") for path in FILES}
    assert set(guide.files(TUTORIAL)) - written == {"train.py"}
    listed = {
        cell.strip("`") for cell, _ in guide.rows(guide.section(TUTORIAL, "## Before you start"))
    }
    assert listed <= written
    assert {path for path in written if path.endswith(".py") and "init" not in path} <= listed


def test_the_code_of_the_tutorial_is_laid_out_as_ruff_wants_it(tutorial: Path) -> None:
    for command in (["check", "--select", "E,F,I,UP,B,RET,SIM,RUF"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
            cwd=tutorial,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def shown_stubs() -> dict[str, str]:
    """Return the signatures that the page of the contract shows, by name."""
    found: dict[str, str] = {}
    for block in guide.blocks(CONTRACT, "python"):
        found |= guide.stub(block)
    return found


def code_stubs() -> dict[str, str]:
    """Return the signatures of the contract, and of the hooks."""
    contract = guide.stub((ROOT / "looped_spec/adapter.py").read_text())
    hooks = guide.stub((ROOT / "looped_spec/hooks.py").read_text())
    return contract | {name: text for name, text in hooks.items() if text.startswith("@hookspec")}


def test_the_page_shows_the_whole_contract() -> None:
    assert set(shown_stubs()) == set(code_stubs())


@pytest.mark.parametrize("name", sorted(code_stubs()))
def test_a_signature_is_that_of_the_code(name: str) -> None:
    assert shown_stubs()[name] == code_stubs()[name]


@pytest.mark.parametrize(
    "name", sorted(name for name, text in code_stubs().items() if guide.members(text))
)
def test_every_member_is_explained(name: str) -> None:
    _, _, below = CONTRACT.partition(f"class {name}")
    (table, *_) = re.split(r"^```python$|^#", below.partition("```\n")[2], maxsplit=1, flags=re.M)
    assert [cells[0].strip("`") for cells in guide.rows(table)] == guide.members(code_stubs()[name])


def test_what_a_plugin_may_import_is_there() -> None:
    names = [
        cells[0].strip("`")
        for cells in guide.rows(guide.section(CONTRACT, "## What else a plugin may import"))
    ]
    assert len(names) > 10
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_the_page_of_testing_lists_every_check_once() -> None:
    listed = [cells[0].strip("`") for cells in guide.rows(TESTING)]
    checks = [name for name in dir(AdapterConformance) if name.startswith("test_")]
    assert sorted(name for name in listed if name.startswith("test_")) == sorted(checks)


def test_every_fixture_of_the_kit_is_explained() -> None:
    first = TESTING.partition("## The checks")[0]
    assert [cells[0].strip("`") for cells in guide.rows(first)] == [
        "adapter",
        "spec",
        "checkpoint_folder",
    ]
    for name in ("adapter", "spec", "checkpoint_folder"):
        assert hasattr(AdapterConformance, name)


def test_the_samples_of_the_page_of_testing_run(tutorial: Path) -> None:
    names: dict[str, object] = {}
    for block in guide.blocks(TESTING, "python"):
        exec(compile(block, "plugin-guide-testing.md", "exec"), names)
    assert issubclass(names["TestMyloopAdapter"], AdapterConformance)  # type: ignore[arg-type]
    assert names["logits"].shape == (3, 61)  # type: ignore[attr-defined]


def test_the_versions_name_this_one() -> None:
    versions = {cells[0]: cells[1] for cells in guide.rows(guide.section(TUTORIAL, "## Versions"))}
    assert versions[".".join(__version__.split(".")[:2])] == str(API_VERSION)


def test_the_known_adapters_are_those_of_this_repository_and_others() -> None:
    listed = {
        cells[0].strip("`") for cells in guide.rows(guide.section(TUTORIAL, "## Known adapters"))
    }
    projects = [ROOT / "pyproject.toml", *ROOT.glob("examples/*/pyproject.toml")]
    tables = [tomllib.loads(project.read_text())["project"] for project in projects]
    assert {name for table in tables for name in table["entry-points"]["looped_spec"]} <= listed


@pytest.mark.parametrize("path", guide.PAGES, ids=lambda path: path.name)
def test_links_lead_to_pages_and_headings(path: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", path.read_text())
    for file, anchor in links:
        target = path.parent / file if file else path
        assert target.is_file(), file
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            anchors = [re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings]
            assert anchor in anchors, f"{file}#{anchor}"


@pytest.mark.parametrize("path", guide.PAGES, ids=lambda path: path.name)
def test_commands_have_only_options_that_exist(path: Path) -> None:
    lines = "\n".join(guide.blocks(path.read_text(), "sh")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    for arguments in (line[1:] for line in words if line and line[0] == "looped-spec"):
        parser = argparse.ArgumentParser(allow_abbrev=False)
        importlib.import_module(VERBS[arguments[0]][0]).configure(parser)
        parser.parse_args(arguments[1:])
