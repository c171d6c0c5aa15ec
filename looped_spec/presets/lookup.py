"""Finding the preset of a run: a file, a name, or what fits best in the folders."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError, closest
from looped_spec.presets.match import TOLD_APART_BY, Match, RunIdentity, compare
from looped_spec.presets.preset import Preset, preset_file_name
from looped_spec.settings import PRESET_DIR

logger = logging.getLogger(__name__)

PATTERN = "model=*.json"


@dataclass(frozen=True)
class PresetFolder:
    """A place where presets lie: its path, and how to speak of it."""

    path: Path
    name: str

    def files(self) -> list[Path]:
        """Return its preset files by name; a folder that cannot be read is a `ConfigError`."""
        try:
            return sorted(p for p in self.path.iterdir() if p.match(PATTERN))
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
    """Return the preset that `--preset` asks for: "none", "auto", a path, or a file's name or a
    part of it.

    What was asked for by path or name must fit the model; "auto" passes over what does not, and
    takes the nearest where none fits.

    Raises:
        ConfigError: what was asked for is not there, is no preset, or is of another model or depth.
    """
    if choice == "none":
        return PresetChoice(reason="none was asked for")
    if choice == "auto":
        return _nearest(run, folders)
    path = Path(choice).expanduser() if is_path(choice) else _named(choice, run, folders)
    preset = Preset.read(path)
    match = compare(preset, run)
    if match.obstacle is not None:
        raise ConfigError(
            f"preset '{choice}' is not for this run: {match.obstacle}; 'auto' takes one that is, "
            "if there is any"
        )
    return PresetChoice(preset, path.name, match, advice=None if match.is_exact else _advice(run))


def is_path(choice: str) -> bool:
    """Whether `--preset` names a file rather than a preset to look for."""
    return os.sep in choice or choice.startswith("~") or Path(choice).exists()


def _named(name: str, run: RunIdentity, folders: Sequence[PresetFolder]) -> Path:
    """Return the file of a name, or the only one for this model that has it as a part."""
    files = [file for folder in folders for file in folder.files()]
    for file in files:
        if name in (file.name, file.stem):
            return file
    of_model = preset_file_name(run.model, "", "").split(",")[0] + ","
    parts = [
        file
        for file in files
        if file.name.startswith(of_model) and name.lower() in file.name.lower()
    ]
    if len(parts) == 1:
        return parts[0]
    where = ", ".join(f"'{folder.path}'" for folder in folders) or "no folder"
    if parts:
        raise ConfigError(
            f"preset '{name}' is not one but {len(parts)}: {', '.join(p.name for p in parts)}"
        )
    raise ConfigError(
        f"no preset '{name}' in {where}{closest(name, [file.stem for file in files])}; "
        "'looped-spec preset list' shows what there is"
    )


def _nearest(run: RunIdentity, folders: Sequence[PresetFolder]) -> PresetChoice:
    found: list[tuple[tuple[Any, ...], Preset, str, Match]] = []
    of_other = 0
    for place, folder in enumerate(folders):
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
