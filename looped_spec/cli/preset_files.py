"""Which preset files there are, for the verbs that look at them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from looped_spec.errors import ConfigError, closest
from looped_spec.plugins import PluginManager, package_folder
from looped_spec.presets import Preset
from looped_spec.presets.lookup import PresetFolder, is_path, preset_folders
from looped_spec.presets.preset import word_of_file_name
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
    """Return the preset of a path, of a file's name, or of the only file that `name` is a part of.

    Words apart by blanks may be parts of one name, as in "1.4B H200"; a model is found by what it
    is called elsewhere, as in "demo:NAME" or "ORGANISATION/NAME H200".

    Raises:
        ConfigError: there is none, or more than one.
    """
    files = [file for _, file in all_files()]
    words = [(word.lower(), word_of_file_name(word).lower()) for word in name.split()]
    is_model = any(f"model={word}," in file.name.lower() for file in files for _, word in words[:1])
    if is_path(name) and not (is_model and not Path(name).exists()):
        return Preset.read(name), Path(name)
    exact = [file for file in files if name in (file.name, file.stem)]
    parts = exact[:1] or [
        file
        for file in files
        if all(any(form in file.name.lower() for form in forms) for forms in words)
    ]
    if len(parts) == 1:
        return Preset.read(parts[0]), parts[0]
    if parts:
        shown = ", ".join(f"'{file.stem}'" for file in parts[:6])
        more = f" and {len(parts) - 6} more" if len(parts) > 6 else ""
        raise ConfigError(
            f"'{name}' is part of {len(parts)} presets: {shown}{more}; give more of the name"
        )
    raise ConfigError(
        f"no preset '{name}'{closest(name, [file.stem for file in files])}; "
        "'looped-spec preset list' shows what there is"
    )


def check_note(note: str) -> None:
    """Raise `ConfigError` for a --note that is no text of one line."""
    if note and not note.isprintable():
        raise ConfigError("--note must be a text of one line")
