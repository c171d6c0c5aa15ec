"""The JSON files of a model folder, read with errors that say what is wrong where."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from looped_spec.errors import ModelLoadError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


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
    except RecursionError as error:
        raise ModelLoadError(f"{path} is not valid JSON: it is nested too deeply") from error
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {_kind(value)}")
    return value


def read_json_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model folder; it must name its `model_type`."""
    if not folder.exists():
        raise ModelLoadError(f"model folder {folder} does not exist")
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is not a folder: give the folder that holds {CONFIG_FILE}")
    path = folder / CONFIG_FILE
    if not path.is_file():
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
    return read_json_object(path) if path.is_file() else {}


def read_sizes(
    config: Mapping[str, Any], names: Mapping[str, str], *, real_numbers: Collection[str] = ()
) -> dict[str, Any]:
    """Take the fields `names` (theirs to ours) of a config.json; all must be positive integers,
    those in `real_numbers` positive numbers."""
    sizes: dict[str, Any] = {}
    for theirs, ours in names.items():
        value: Any = config.get(theirs)
        kind = "number" if theirs in real_numbers else "integer"
        is_number = isinstance(value, int | float if kind == "number" else int)
        if not is_number or isinstance(value, bool) or not value > 0:
            raise ModelLoadError(
                f"{CONFIG_FILE}: {theirs} must be a positive {kind}, got {value!r}"
            )
        sizes[ours] = value
    return sizes


def _kind(value: object) -> str:
    kinds = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)
