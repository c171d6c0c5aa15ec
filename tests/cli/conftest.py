"""Fixtures of the verbs that run a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from command_runs import FakeTerminal, Generate, Outcome
from tiny_model import write_tiny_model

from looped_spec.cli import main as cli


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 3 loops and 96 tokens; tests must not change it."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def generate(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Run `looped-spec generate` on the tiny model, or on another `model`, in this process."""

    def run(*arguments: object, model: object = tiny_model) -> Outcome:
        capsys.readouterr()
        code = cli.main(["generate", str(model), *map(str, arguments)])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], FakeTerminal]:
    """Make stdout a new terminal and return it."""

    def replace() -> FakeTerminal:
        stream = FakeTerminal()
        monkeypatch.setattr(sys, "stdout", stream)
        return stream

    return replace


@pytest.fixture
def command(tiny_model: Path) -> Sequence[str]:
    """The command line of a separate process that generates with the tiny model."""
    return [sys.executable, "-m", "looped_spec", "generate", str(tiny_model)]


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of such a process: one thread, no network."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
