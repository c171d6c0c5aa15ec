"""The import contracts in pyproject.toml hold, and each of them notices a breach."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS
from tree import ROOT


def lint_imports(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    """Check the packages in `folder` against the contracts of this repository."""
    paths = os.pathsep.join(map(str, [folder, *folder.glob("adapters/*")]))
    options = [text for contract in contracts for text in ("--contract", contract)]
    return subprocess.run(
        [
            *(sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"),
            *("--no-cache", "--no-logo", *options, str(ROOT / "pyproject.toml")),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_all_contracts_are_kept() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken." in done.stdout


BREACHES = [
    ("rooms", "looped_spec/runtime/engine.py", "looped_spec.cli.main"),
    ("rooms", "looped_spec/runtime/engine.py", "looped_spec.serve.front"),
    ("rooms", "looped_spec/serve/front.py", "looped_spec.cli.console"),
    ("rooms", "looped_spec/control/plan.py", "looped_spec.runtime.request"),
    ("rooms", "looped_spec/control/plan.py", "looped_spec.adapter"),
    ("rooms", "looped_spec/errors.py", "looped_spec.settings"),
    ("rooms", "looped_spec/loading.py", "looped_spec.testing.dense"),
    ("rooms", "looped_spec/room_without_a_place.py", "looped_spec.errors"),
    ("core", "looped_spec/runtime/runner.py", "looped_spec_ouro.model"),
    ("core", "looped_spec/loading.py", "looped_spec_ouro.plugin"),
    ("control", "looped_spec/control/static.py", "torch"),
    ("control", "looped_spec/control/static.py", "time"),
    ("adapter", "adapters/ouro/looped_spec_ouro/adapter.py", "looped_spec.runtime.scheduler"),
    ("adapter", "adapters/ouro/looped_spec_ouro/model.py", "looped_spec.control.plan"),
    ("adapter", "adapters/ouro/looped_spec_ouro/model.py", "looped_spec.testing.dense"),
]
"""Contract, module, and what the module imports against it."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each contract where all of its breaches are made."""
    found = {}
    for contract in dict.fromkeys(contract for contract, _, _ in BREACHES):
        folder = tmp_path_factory.mktemp(contract)
        for package in ("looped_spec", "adapters"):
            shutil.copytree(
                ROOT / package,
                folder / package,
                ignore=lambda _, names: [n for n in names if "." in n and not n.endswith(".py")],
            )
        for made, module, imported in BREACHES:
            if made == contract:
                with (folder / module).open("a") as file:
                    file.write(f"\n\ndef breach() -> None:\n    import {imported}\n")
        done = lint_imports(folder, contract)
        assert done.returncode == 1, done.stdout + done.stderr
        found[contract] = done.stdout
    return found


@pytest.mark.parametrize(("contract", "module", "imported"), BREACHES)
def test_a_breach_is_noticed(
    contract: str, module: str, imported: str, reports: dict[str, str]
) -> None:
    name = re.sub(r"^adapters/\w+/", "", module).removesuffix(".py").replace("/", ".")
    shown = rf"^- +{name} -> {imported} \(l" if "without_a_place" not in module else rf"^- {name}$"
    assert re.search(shown, reports[contract], re.M), reports[contract]
