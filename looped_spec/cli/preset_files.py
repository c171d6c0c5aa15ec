"""Which preset files there are, for the verbs that look at them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from looped_spec.errors import ConfigError, closest
from looped_spec.plugins import PluginManager, package_folder
from looped_spec.presets import Preset
from looped_spec.presets.lookup import PresetFolder, preset_folders
from looped_spec.presets.names import is_path, named_files, shown_names
from looped_spec.settings import Settings


def all_folders() -> list[PresetFolder]:
    """Return every place where presets are looked for: the variable's, then each adapter's."""
    settings = Settings.from_environment()
    folders = preset_folders(settings.preset_dir, None)
    for record in PluginManager().records():
        package = record.spec.preset_package if record.spec else None
        bundled = package_folder(package, "presets") if package else None
        if bundled is not None:
            folders.append(PresetFolder(bundled, record.name))
    return folders


def all_files() -> Iterator[tuple[PresetFolder, Path]]:
    """Yield every preset file with its folder."""
    for folder in all_folders():
        for file in folder.files():
            yield folder, file


def read_preset(name: str) -> tuple[Preset, Path]:
    """Return the preset of a path, or the only one that `name` can mean (see `named_files`).

    Raises:
        ConfigError: there is none, or more than one.
    """
    files = [file for _, file in all_files()]
    if is_path(name, files):
        path = Path(name).expanduser()
        return Preset.read(path), path
    parts = named_files(name, files)
    if len(parts) == 1:
        return Preset.read(parts[0]), parts[0]
    if parts:
        raise ConfigError(
            f"'{name}' is part of {len(parts)} presets: {shown_names(parts)}; give more of the name"
        )
    raise ConfigError(
        f"no preset '{name}'{closest(name, [file.stem for file in files])}; "
        "'looped-spec preset list' shows what there is"
    )


def check_note(note: str) -> None:
    """Raise `ConfigError` for a --note that is no text of one line."""
    if note and not note.isprintable():
        raise ConfigError("--note must be a text of one line")
