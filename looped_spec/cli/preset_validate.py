"""Check preset files: their schema, and that each is named after what is in it.

A folder stands for all presets in it; without arguments all that --preset auto would find are
checked. The exit code is 2 if any is wrong.

examples:
  looped-spec preset validate my-preset.json
  looped-spec preset validate presets/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from looped_spec.atomic_json import json_text
from looped_spec.cli import console
from looped_spec.cli.main import EXIT_USER_ERROR
from looped_spec.cli.preset_files import all_files
from looped_spec.errors import ConfigError
from looped_spec.presets import Preset
from looped_spec.presets.lookup import PresetFolder


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="preset files or folders of them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Check every file, and say of each whether it is well."""
    files = _files(args.files) if args.files else [file for _, file in all_files()]
    found = [(file, _problem(file)) for file in files]
    if args.json:
        document = [{"file": str(file), "problem": problem} for file, problem in found]
        console.write(json_text({"files": document}))
    else:
        lines = [f"{'wrong' if problem else 'ok':<6}{problem or file}" for file, problem in found]
        console.write("\n".join(lines or ["no presets"]) + "\n")
    return EXIT_USER_ERROR if any(problem for _, problem in found) else 0


def _files(names: list[str]) -> list[Path]:
    files: list[Path] = []
    for name in names:
        path = Path(name)
        if not path.is_dir():
            files.append(path)
            continue
        inside = PresetFolder(path, "given").files()
        if not inside:
            raise ConfigError(f"folder '{name}' holds no preset: files are called model=*.json")
        files += inside
    return files


def _problem(file: Path) -> str | None:
    try:
        preset = Preset.read(file)
    except ConfigError as error:
        return str(error)
    if file.name.startswith("model=") and file.name != preset.file_name:
        return f"preset '{file}' should be called '{preset.file_name}' by what is in it"
    return None
