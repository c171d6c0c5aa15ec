"""Finding the preset of a run: a file, a name, or what fits best in the folders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError, closest
from looped_spec.presets.match import TOLD_APART_BY, Match, RunIdentity, compare
from looped_spec.presets.names import is_path, named_files, shown_names
from looped_spec.presets.preset import Preset, preset_file_name, word_of_file_name
from looped_spec.settings import PRESET_DIR

logger = logging.getLogger(__name__)

PATTERN = "model=*.json"
"""What presets are called; other files of a folder are not looked at."""

GEOMETRY_FILE = "geometry.json"
"""Sizes of models, which may lie among their presets."""


@dataclass(frozen=True)
class PresetFolder:
    """A place where presets lie: its path, and how to speak of it."""

    path: Path
    name: str

    def files(self) -> list[Path]:
        """Return its preset files by name; a folder that cannot be read is a `ConfigError`."""
        return [path for path in self._documents() if path.match(PATTERN)]

    def ignored(self) -> list[Path]:
        """Return what may have been meant as a preset but is not called as one: other JSON
        files."""
        return [
            path
            for path in self._documents()
            if not path.match(PATTERN) and path.name != GEOMETRY_FILE
        ]

    def _documents(self) -> list[Path]:
        try:
            return sorted(path for path in self.path.iterdir() if path.suffix == ".json")
        except OSError as error:
            raise ConfigError(
                f"cannot read the folder of presets '{self.path}' ({self.name}): {error.strerror}"
            ) from error


@dataclass(frozen=True)
class PresetChoice:
    """Which preset a run takes, and why.

    Attributes:
        preset: the preset, or None.
        file: its file's name and where that is.
        match: how it fits; of None where there is none.
        reason: why there is none.
        advice: the command that would do better; None where nothing would.
    """

    preset: Preset | None = None
    file: str | None = None
    match: Match | None = None
    reason: str | None = None
    advice: str | None = None

    @property
    def line(self) -> str:
        """What was taken and why, in one line."""
        if self.preset is None or self.match is None:
            text = f"no preset: {self.reason}"
        elif self.match.is_exact:
            kind = self.preset.provenance["cost"].kind
            how = "measured for this device" if kind == "measured" else f"its costs are {kind}"
            if kind == "measured" and self.match.unknown:
                how += f", it does not say with which {', '.join(self.match.unknown)}"
            text = f"preset {self.file}: {how}"
        else:
            why = "; ".join(self.match.differences.values())
            text = f"preset {self.file} as no more than a prior: {why}"
        return f"{text}; '{self.advice}' would do better" if self.advice else text

    def as_dict(self) -> dict[str, Any]:
        """Return the same for JSON."""
        return {
            "file": self.file,
            "exact": self.match is not None and self.match.is_exact,
            "differences": list(self.match.differences.values()) if self.match else [],
            "line": self.line,
        }


def preset_folders(directory: str | None, package: Path | None) -> list[PresetFolder]:
    """Return where presets are looked for, in order: LOOPED_SPEC_PRESET_DIR, then the adapter's
    package."""
    folders = []
    if directory is not None:
        folders.append(PresetFolder(Path(directory).expanduser(), PRESET_DIR))
    if package is not None and package.is_dir():
        folders.append(PresetFolder(package, "bundled"))
    return folders


def choose_preset(choice: str, run: RunIdentity, folders: Sequence[PresetFolder]) -> PresetChoice:
    """Return the preset that `--preset` asks for: "none", "auto", a path, or a name as
    `named_files` understands it.

    What was asked for by path or name must fit the model; "auto" passes over what does not, and
    takes the nearest where none fits.

    Raises:
        ConfigError: what was asked for is not there, is no preset, or is of another model or depth.
    """
    if choice == "none":
        return PresetChoice(reason="none was asked for")
    if choice == "auto":
        return _nearest(run, folders)
    is_there = Path(choice).expanduser().exists()
    files = [] if is_there else [file for folder in folders for file in folder.files()]
    is_file = is_path(choice, files)
    path = Path(choice).expanduser() if is_file else _named(choice, run, files)
    preset = Preset.read(path)
    match = compare(preset, run)
    if match.obstacle is not None:
        raise ConfigError(
            f"preset '{choice}' is not for this run: {match.obstacle}; 'auto' takes one that is, "
            "if there is any"
        )
    return PresetChoice(preset, path.name, match, advice=None if match.is_exact else _advice(run))


def _named(name: str, run: RunIdentity, files: Sequence[Path]) -> Path:
    """Return the file that is called so, or the only one for this model that `name` can mean."""
    found = named_files(name, files)
    if len(found) == 1 and name in (found[0].name, found[0].stem):
        return found[0]
    prefix = f"model={word_of_file_name(run.model)},".lower()
    of_model = [file for file in files if file.name.lower().startswith(prefix)]
    parts = named_files(name, of_model)
    if len(parts) == 1:
        return parts[0]
    if parts:
        raise ConfigError(
            f"preset '{name}' is not one but {len(parts)}: {shown_names(parts)}; give more of the "
            "name"
        )
    guess = "" if found else closest(name, [file.stem for file in files])
    others = f"of this model there is {shown_names(of_model) or 'none'}"
    raise ConfigError(
        f"no preset '{name}' for model '{run.model}'{guess}; {others}; 'looped-spec preset list' "
        "shows all"
    )


def _nearest(run: RunIdentity, folders: Sequence[PresetFolder]) -> PresetChoice:
    found: list[tuple[tuple[Any, ...], Preset, str, Match]] = []
    of_other = 0
    for place, folder in enumerate(folders):
        if ignored := folder.ignored():
            names = ", ".join(f"'{path.name}'" for path in ignored)
            logger.warning(
                "not looked at in '%s' (%s): %s: presets are called %s",
                *(folder.path, folder.name, names, PATTERN),
            )
        for file in folder.files():
            try:
                preset = Preset.read(file)
            except ConfigError as error:
                logger.warning("a preset is passed over: %s", error)
                continue
            match = compare(preset, run)
            if match.obstacle is None:
                order = (_distance(preset, run, match), place)
                found.append((order, preset, f"{file.name} ({folder.name})", match))
            elif match.obstacle.startswith("full_loops"):
                of_other += 1
    if not found:
        wanted = preset_file_name(run.model, run.device_name, run.dtype)
        reason = f"there is no {wanted}, nor one of another device"
        if of_other:
            reason += f", and {of_other} of another depth than full_loops = {run.full_loops}"
        return PresetChoice(reason=reason, advice=_advice(run))
    _, preset, source, match = min(found, key=lambda one: one[0])
    is_best = match.is_exact and preset.provenance["cost"].kind == "measured"
    return PresetChoice(preset, source, match, advice=None if is_best else _advice(run))


def _distance(preset: Preset, run: RunIdentity, match: Match) -> tuple[Any, ...]:
    """Order presets: those that differ in lesser things first, then those of a device with a
    similar name, then measured before modelled ones."""
    grave = tuple(name in match.differences for name in TOLD_APART_BY)
    alike = SequenceMatcher(None, preset.device_name, run.device_name).ratio()
    return (grave, -alike, preset.provenance["cost"].kind != "measured")


def _advice(run: RunIdentity) -> str:
    return f"looped-spec preset generate {run.model} --workload NAME=FILE"
