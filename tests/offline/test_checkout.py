"""A result says which commit of the sources it was measured with, if anybody knows."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from looped_spec.offline.checkout import commit_of
from looped_spec.offline.machine import machine_facts

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a checkout, with a file beside it."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "version.py").write_text("1")
    (tmp_path / "other.txt").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return folder


@needs_git
def test_a_checkout_has_its_commit_and_says_if_the_package_was_changed(package: Path) -> None:
    head = git(package, "rev-parse", "HEAD")
    (package / "not-tracked.txt").write_text("")
    (package.parent / "other.txt").write_text("2")
    assert commit_of(package) == head
    (package / "version.py").write_text("2")
    assert commit_of(package) == f"{head}-dirty"


@needs_git
def test_a_package_that_was_installed_within_another_checkout_has_no_commit(package: Path) -> None:
    installed = package.parent / "environment" / "package"
    installed.mkdir(parents=True)
    (installed / "version.py").write_text("1")
    assert commit_of(installed) is None


@needs_git
def test_without_git_nobody_knows(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit_of(package) is None


def test_a_machine_is_told_with_versions_threads_and_commit() -> None:
    facts = machine_facts(torch.device("cpu"))
    assert facts["torch"] == torch.__version__ and facts["torch_threads"] >= 1
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", facts["looped_spec"])
    assert facts["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", facts["commit"])
