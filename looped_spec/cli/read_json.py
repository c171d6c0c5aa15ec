"""JSON files of the user, with mistakes that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError


def read_json(name: str, what: str) -> Any:
    """Return what a JSON file holds; `what` says in an error what it should have been.

    Raises:
        ConfigError: the file cannot be read, or is no JSON.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read '{name}': {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{what} '{name}' is no UTF-8 text") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} '{name}' is no JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{what} '{name}' is nested too deeply") from error
