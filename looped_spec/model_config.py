"""The JSON files of a model folder, read with errors that say what is wrong where."""

from __future__ import annotations

import json
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from looped_spec.errors import ModelLoadError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

MAX_COUNT = 1024
"""Most layers or loops of a model: each is built one by one, before any weight is looked at."""


def file_mode(path: Path) -> int | None:
    """Return the mode of what is at `path`, None if nothing is there; links are followed.

    Raises `ModelLoadError` if that cannot be told: no permission, a name too long, a loop of links.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no name of a file
        return None
    except OSError as error:
        raise ModelLoadError(f"{_shortened(path)} cannot be read: {error.strerror}") from error


def is_file(path: Path) -> bool:
    """Tell whether `path` is a file; raises what `file_mode` raises."""
    mode = file_mode(path)
    return mode is not None and stat.S_ISREG(mode)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file whose top level is an object; errors name the file and the place."""
    try:
        value = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ModelLoadError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not valid JSON: it is not UTF-8 text") from error
    except ValueError as error:  # Python converts no more than 4300 digits
        raise ModelLoadError(f"{path} cannot be read: a number in it is too long") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path} is not valid JSON: it is nested too deeply") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {_kind(value)}")
    return value


def read_json_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder; it must name its `model_type`."""
    mode = file_mode(folder)
    if mode is None:
        raise ModelLoadError(f"model folder {folder} does not exist")
    if not stat.S_ISDIR(mode):
        raise ModelLoadError(f"{folder} is not a folder: give the folder that holds {CONFIG_FILE}")
    path = folder / CONFIG_FILE
    if not is_file(path):
        raise ModelLoadError(f"{folder} holds no {CONFIG_FILE}: it is not a model folder")
    config = read_json_object(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        found = "it is missing" if "model_type" not in config else f"found {model_type!r}"
        raise ModelLoadError(f"{path} must name its model_type (a string); {found}")
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read generation_config.json of a model folder; a folder without one has an empty one."""
    path = folder / GENERATION_CONFIG_FILE
    return read_json_object(path) if is_file(path) else {}


def read_sizes(
    config: Mapping[str, Any],
    names: Mapping[str, str],
    *,
    real_numbers: Collection[str] = (),
    counts: Collection[str] = (),
) -> dict[str, Any]:
    """Take the fields `names` (theirs to ours) of a config.json; all must be positive integers,
    those in `real_numbers` positive numbers, and those in `counts` at most `MAX_COUNT`."""
    sizes: dict[str, Any] = {}
    for theirs, ours in names.items():
        value: Any = config.get(theirs)
        kind = "number" if theirs in real_numbers else "integer"
        is_number = isinstance(value, int | float if kind == "number" else int)
        if not is_number or isinstance(value, bool) or not value > 0:
            raise ModelLoadError(
                f"{CONFIG_FILE}: {theirs} must be a positive {kind}, got {value!r}"
            )
        if theirs in counts:
            check_count(theirs, value)
        sizes[ours] = value
    return sizes


def read_boolean(config: Mapping[str, Any], name: str) -> bool:
    """Take a field of a config.json that must be true or false."""
    value = config.get(name)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{CONFIG_FILE}: {name} must be true or false, got {value!r}")
    return value


def read_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json says of rotary embeddings: at least `rope_type` and `rope_theta`.

    The theta stands beside `rope_scaling` in what transformers 4 writes, and inside
    `rope_parameters` in what transformers 5 writes; a `rope_type` that is nowhere is "default", a
    theta that is nowhere is None.
    """
    found: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        settings = config.get(field) or {}
        if not isinstance(settings, Mapping):
            raise ModelLoadError(f"{CONFIG_FILE}: {field} must be an object, got {settings!r}")
        found |= settings
    found.setdefault("rope_type", found.pop("type", "default"))
    if found.get("rope_theta") is None:
        found["rope_theta"] = config.get("rope_theta")
    return found


def check_count(name: str, value: int) -> None:
    """Raise `ModelLoadError` if a number of layers or loops is above `MAX_COUNT`."""
    if value > MAX_COUNT:
        raise ModelLoadError(f"{CONFIG_FILE}: {name} must be at most {MAX_COUNT}, got {value}")


def _shortened(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
