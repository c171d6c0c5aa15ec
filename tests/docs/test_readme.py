"""What README.md and CONTRIBUTING.md show can be run."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS
from tree import ROOT

from looped_spec.cli.main import VERBS, main

README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language, without the indent of a list that they stand in."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, re.M | re.S)
    return [re.sub(rf"^{indent}", "", body, flags=re.M) for indent, body in found]


def commands(program: str) -> list[list[str]]:
    """Return the arguments of every command of a program in the shell blocks of both files."""
    lines = "\n".join(blocks(README, "sh") + blocks(CONTRIBUTING, "sh")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and line[0] == program]


def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = blocks(README, "python")
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\d+% of \d+ drafts accepted$", done.stdout, re.M)) == 2


def test_the_plugin_example_of_the_guide_is_a_plugin() -> None:
    (example,) = blocks(CONTRIBUTING, "python")
    names: dict[str, object] = {}
    exec(compile(example, "CONTRIBUTING.md", "exec"), names)
    (spec,) = names["looped_spec_adapters"]()  # type: ignore[operator]
    assert spec.name == "mine"


@pytest.mark.parametrize("arguments", commands("looped-spec"), ids=" ".join)
def test_the_readme_shows_only_options_that_exist(arguments: list[str]) -> None:
    verb, *rest = arguments
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(VERBS[verb][0]).configure(parser)
    prompt_file = vars(parser.parse_args(rest)).get("prompt_file")
    assert prompt_file is None or (ROOT / prompt_file).is_file()


@pytest.mark.parametrize("verb", list(VERBS))
def test_the_readme_shows_every_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb in {arguments[0] for arguments in commands("looped-spec")}
    assert main([verb, "--help"]) == 0
    assert verb in capsys.readouterr().out


def test_the_files_show_only_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    shown = set(re.findall(r"(?:`|^)make ([a-z]+)", README + CONTRIBUTING, re.M))
    assert {"demo", "test", "lint", "help"} <= shown <= targets


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / name).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []
