"""Samples on disk: JSON lines, each written once, so that a kill at any point loses one cell.

The first line is the header, every other the record of one cell. Each line carries a checksum. What
stands behind the last line end was being written when something ended the process; it is never read
as a record, and is cut off before anything is added.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from looped_spec.errors import ConfigError, LoopedSpecError

SCHEMA_VERSION = 1
_DIGITS = 7
_OF_THE_FIRST_RUN = ("started", "command", "note", "commit")
"""What may be otherwise in a run that goes on with a file; the file keeps what it has."""


@dataclass(frozen=True)
class Samples:
    """What a file holds: its header, and the data of every cell by its key."""

    header: dict[str, Any]
    cells: dict[str, Any]


def read_samples(path: Path) -> Samples:
    """Read a file of samples without changing it.

    Raises:
        ConfigError: it cannot be read, is damaged (with the line) or of another version.
    """
    samples, _ = _parse(_read(path), path)
    if samples is None:
        raise ConfigError(f"{path} holds no samples")
    return samples


def check_free(path: Path, *, resume: bool) -> None:
    """Raise `ConfigError` for a file that a run would have to go on with and must not."""
    if not resume and path.exists() and path.stat().st_size:
        raise ConfigError(
            f"{path} is there already: give --resume to go on with it, or another --samples"
        )


class SampleStore:
    """A file of samples, open for adding; use it as a context manager.

    Args:
        path: made anew, or continued if `resume` is set.
        header: what the samples belong to; a file that is continued must have the same, but for
            `started`, `command`, `note` and `commit`.
        resume: continue what is there; without it a file that is there is an error.

    Raises:
        ConfigError: the file is there and must not be, is another plan's, is damaged, or another
            process adds to it.
        LoopedSpecError: the file cannot be written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        document = {"schema_version": SCHEMA_VERSION, **_plain(header)}
        check_free(path, resume=resume)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise LoopedSpecError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._lock()
            found, length = _parse(_read(path), path)
            if found is not None:
                _check_same(found.header, document, path)
            os.ftruncate(self._fd, length)
            self._length = length
            self.header = document if found is None else found.header
            self.cells: dict[str, Any] = {} if found is None else found.cells
            if found is None:
                self._append(document)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def remove_if_empty(self) -> None:
        """Remove a file that holds no cell, so that the same command can begin anew."""
        if not self.cells and self.path.is_file():
            with contextlib.suppress(OSError):
                self.path.unlink()

    def add(self, key: str, data: Mapping[str, Any]) -> None:
        """Keep the data of a cell; it is on the disk when this returns. Numbers are rounded.

        Raises:
            LoopedSpecError: the disk is full or gone; the file holds what it held before.
        """
        if key in self.cells:
            raise ConfigError(f"cell '{key}' was measured already")
        plain = _plain(data)
        self._append({"cell": key, "data": plain})
        self.cells[key] = plain

    def _append(self, record: Mapping[str, Any]) -> None:
        data = _line(record)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
            os.fsync(self._fd)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._length)
            if not isinstance(error, OSError):
                raise
            raise LoopedSpecError(
                f"cannot write {self.path}: {error.strerror}; what was measured before is kept: "
                "make room and give --resume"
            ) from error
        self._length += len(data)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{self.path} is being written by another process") from error
        except OSError:  # a file system without locks
            return


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f'{{"sha256":"{digest}","record":{text}}}\n'.encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _parse(raw: bytes, path: Path) -> tuple[Samples | None, int]:
    """Return the whole lines of a file, None without any, and how many bytes they are."""
    lines = raw.split(b"\n")
    length = len(raw) - len(lines.pop())
    header: dict[str, Any] | None = None
    cells: dict[str, Any] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)["record"]
            is_whole = _line(record) == line + b"\n"
        except (ValueError, KeyError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise ConfigError(f"{where} is damaged: no record with its checksum")
        if header is None:
            if record.get("schema_version") != SCHEMA_VERSION:
                raise ConfigError(
                    f"{where}: schema_version of samples must be {SCHEMA_VERSION}, "
                    f"got {record.get('schema_version')!r}"
                )
            header = record
        elif not isinstance(record.get("cell"), str) or "data" not in record:
            raise ConfigError(f"{where} is damaged: no record of a cell")
        elif record["cell"] in cells:
            raise ConfigError(f"{where} has cell '{record['cell']}' a second time")
        else:
            cells[record["cell"]] = record["data"]
    return (None if header is None else Samples(header, cells)), length


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Raise `ConfigError` with the first field in which a header differs from what is wanted."""
    one, other = dict(_flat(found)), dict(_flat(wanted))
    for name in sorted({*one, *other}):
        if name not in _OF_THE_FIRST_RUN and one.get(name) != other.get(name):
            raise ConfigError(
                f"{path} belongs to another plan: its {name} is {one.get(name)!r}, this one's "
                f"{other.get(name)!r}; give another --samples to begin anew"
            )


def _flat(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in document.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _plain(value: Any) -> Any:
    """Copy a document as JSON gives it back: lists for tuples, floats with `_DIGITS` digits."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"a sample must be a finite number, got {value!r}")
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
