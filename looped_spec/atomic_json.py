"""JSON files that are either whole or not there."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from looped_spec.errors import ConfigError, LoopedSpecError


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as it is written: sorted keys, indented, null for NaN and infinities."""
    return json.dumps(_finite(document), indent=2, sort_keys=True, allow_nan=False) + "\n"


def without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of `json.loads(..., object_pairs_hook=without_repeats)`; `ValueError` for
    one that has a name twice, of which Python would keep the last."""
    document = dict(pairs)
    if len(document) < len(pairs):
        twice = next(name for name, times in Counter(n for n, _ in pairs).items() if times > 1)
        raise ValueError(f"a name occurs twice in an object: {twice!r:.60}")
    return document


def check_target(path: Path) -> None:
    """Raise `ConfigError` now if a file cannot be written later, after the work."""
    try:
        mode = _mode(path)
        is_replaced = mode is None or stat.S_ISREG(mode)
        # Of a link, what it leads to is written; of a pipe or device there may be no such path.
        written = Path(os.path.realpath(path)) if is_replaced else path
        folder_mode = _mode(written.parent)
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error.strerror}") from error
    folder = written.parent if path.is_symlink() else path.parent
    if mode is not None and stat.S_ISDIR(mode):
        raise ConfigError(f"cannot write '{path}': it is a folder, give the name of a file")
    if folder_mode is None or not stat.S_ISDIR(folder_mode):
        raise ConfigError(f"cannot write '{path}': folder '{folder}' does not exist")
    if not os.access(written.parent if is_replaced else path, os.W_OK):
        raise ConfigError(f"cannot write '{path}': permission denied")


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document so that `path` never holds a part of it, whatever happens meanwhile.

    The text goes to a file beside the target, is flushed to the disk and then takes the target's
    name; a link is followed. What is no regular file (a pipe, a device) is written directly.
    """
    data = json_text(document).encode()
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                device.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LoopedSpecError(
            f"cannot write '{path}': {error.strerror}; nothing was written to it"
        ) from error


def _mode(path: Path) -> int | None:
    """Return the mode of what is at `path`, following links; None if nothing is there."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _replace(target: Path, data: bytes) -> None:
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:  # Ctrl-C as well
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # Some file systems cannot flush a folder.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _finite(value: Any) -> Any:
    """Copy a document with floats rounded to 6 digits, and None for those that are no number."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
