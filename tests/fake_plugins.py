"""Plugins as installed distributions, written by hand into a folder: nothing here runs pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import PATIENCE_SECONDS

from looped_spec.plugins import PluginManager, PluginRecord
from looped_spec.settings import Settings


def plugin_source(name: str, *model_types: str, **fields: object) -> str:
    """Write the module of a plugin with one adapter, whose factory module does not exist."""
    given = {
        "name": name,
        "model_types": model_types or (f"{name}_model",),
        "factory": f"{name}_factory:Adapter",
        **fields,
    }
    arguments = ", ".join(f"{field}={value!r}" for field, value in given.items())
    return (
        "from looped_spec.adapter import AdapterSpec\n"
        "from looped_spec.hooks import hookimpl\n\n"
        f"@hookimpl\ndef looped_spec_adapters():\n    return [AdapterSpec({arguments})]\n"
    )


class FakeSite:
    """A folder of installed distributions, all of whose names start with `fake`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        distribution: str,
        source: str,
        *,
        module: str | None = None,
        entry_point: str = "plugin",
        target: str = "",
        version: str = "1.0",
        requires: Sequence[str] = (),
        metadata: str | None = None,
    ) -> str:
        """Install a distribution with one plugin module; return the module's name."""
        module = module or distribution.replace("-", "_")
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        if metadata is None:
            lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
            metadata = "\n".join([*lines, *(f"Requires-Dist: {text}" for text in requires), ""])
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[looped_spec]\n{entry_point} = {module}{target}\n")
        self.write(module, source)
        return module

    def install(self, project: Path) -> None:
        """Install a project as its pyproject.toml says, with all packages that lie beside it."""
        table = tomllib.loads((project / "pyproject.toml").read_text())
        about = table["project"]
        for init in project.glob("*/__init__.py"):
            shutil.copytree(init.parent, self.folder / init.parent.name)
        info = self.folder / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {text}\n" for text in about["dependencies"])
        heads = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
        (info / "METADATA").write_text(heads + needs)
        lines = ["[looped_spec]"]
        lines += [f"{name} = {to}" for name, to in about["entry-points"]["looped_spec"].items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    def write(self, module: str, source: str) -> None:
        """Add a module that belongs to no distribution."""
        (self.folder / f"{module}.py").write_text(source)

    def records(self, settings: Settings | None = None) -> list[PluginRecord]:
        """Walk, and leave out the plugins that are really installed."""
        records = PluginManager(settings or Settings()).records()
        return [record for record in records if "fake" in record.distribution]

    def record(self, distribution: str, settings: Settings | None = None) -> PluginRecord:
        """Walk, and return the only record of one distribution."""
        (found,) = [r for r in self.records(settings) if r.distribution == distribution]
        return found

    def run(
        self, *command: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with this folder on its path and no setting of ours but those given."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("LOOPED_SPEC_")}
        return subprocess.run(
            [sys.executable, *command],
            env=inherited | {"PYTHONPATH": str(self.folder)} | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
