"""Check preset files: their schema, and that each is named after what is in it.

A folder stands for all presets in it (model=*.json), and any other .json file in it but
geometry.json is wrong there, as no run looks at it. Without arguments all folders are checked that
--preset auto looks into. The exit code is 2 if any is wrong.

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
from looped_spec.cli.preset_files import all_folders
from looped_spec.errors import ConfigError
from looped_spec.presets import Preset
from looped_spec.presets.lookup import PATTERN, PresetFolder


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="preset files or folders of them")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(args: argparse.Namespace) -> int:
    """Check every file, and say of each whether it is well."""
    if args.files:
        found = [entry for name in args.files for entry in _checked(Path(name))]
    else:
        found = [entry for folder in all_folders() for entry in _of_folder(folder)]
    if args.json:
        document = [{"file": str(file), "problem": problem} for file, problem in found]
        console.write(json_text({"files": document}))
    else:
        lines = [f"{'wrong' if problem else 'ok':<6}{problem or file}" for file, problem in found]
        console.write("\n".join(lines or ["no presets"]) + "\n")
    return EXIT_USER_ERROR if any(problem for _, problem in found) else 0


def _checked(path: Path) -> list[tuple[Path, str | None]]:
    """Return the files that a path stands for, each with what is wrong with it."""
    if not path.is_dir():
        return [(path, _problem(path))]
    found = _of_folder(PresetFolder(path, "given"))
    if not found:
        raise ConfigError(f"folder '{path}' holds no preset: files are called {PATTERN}")
    return found


def _of_folder(folder: PresetFolder) -> list[tuple[Path, str | None]]:
    ignored = [
        (file, f"'{file}' is not looked at: presets are called {PATTERN}")
        for file in folder.ignored()
    ]
    return [*((file, _problem(file)) for file in folder.files()), *ignored]


def _problem(file: Path) -> str | None:
    try:
        preset = Preset.read(file)
    except ConfigError as error:
        return str(error)
    if file.name.startswith("model=") and file.name != preset.file_name:
        return f"preset '{file}' should be called '{preset.file_name}' by what is in it"
    return None
