"""The safetensors files of a model folder: which there are, and what each says that it holds.

Only headers are read here. Pickle files are refused, because unpickling one can run any code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import safe_open

from looped_spec.errors import ModelLoadError
from looped_spec.model_config import is_file, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
_LFS_POINTER = b"version https://git-lfs"
_MAX_NAMES = 5
_MAX_NAME_LENGTH = 160

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """What a safetensors header says of one tensor; `dtype` is spelled as there (`"BF16"`)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Tell whether the values are plain floating point, not integers or a quantised format."""
        return self.dtype in _FLOAT_DTYPES


def printable(name: str) -> str:
    """Return a tensor name fit for one line of an error message; files may hold any text."""
    text = name if name.isprintable() else ascii(name)
    return text if len(text) <= _MAX_NAME_LENGTH else f"{text[:_MAX_NAME_LENGTH]}..."


def some_names(names: list[str]) -> str:
    """Join at most five names for an error message, and say how many more there are."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(printable(name) for name in names[:_MAX_NAMES]) + more


def scan_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Map every tensor name of the checkpoint in `folder` to what its header says of it.

    Takes model.safetensors, else the shards of model.safetensors.index.json, else the only
    *.safetensors file. No weights are read.
    """
    if is_file(folder / SINGLE_FILE):
        return _scan_file(folder / SINGLE_FILE)
    if is_file(folder / INDEX_FILE):
        return _scan_shards(folder)
    found = sorted(path for path in folder.glob("*.safetensors") if is_file(path))
    if len(found) > 1:
        names = some_names([path.name for path in found])
        raise ModelLoadError(
            f"{folder} holds {len(found)} safetensors files ({names}) but no {INDEX_FILE}: "
            "get the index, or leave one file only"
        )
    if found:
        return _scan_file(found[0])
    raise no_safetensors(folder, [path.name for path in folder.glob("*")])


def no_safetensors(where: object, files: Iterable[str]) -> ModelLoadError:
    """Make the error for a place whose files, of the names `files`, have no safetensors."""
    pickles = sorted(
        name for name in files if any(fnmatchcase(name, pattern) for pattern in _PICKLES)
    )
    if pickles:
        return ModelLoadError(
            f"{where} holds pickle weights only ({some_names(pickles)}): loading pickle can run "
            "any code, so it is refused; convert the weights to safetensors"
        )
    return ModelLoadError(f"{where} holds no weights: expected {SINGLE_FILE} or {INDEX_FILE}")


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for reading on the CPU; damage becomes a `ModelLoadError`."""
    try:
        handle = safe_open(path, framework="pt", device="cpu")
    except Exception as error:  # the reader's own error class, and OSError, ValueError, MemoryError
        raise ModelLoadError(_damage(path, error)) from error
    with handle:
        yield handle


def _scan_file(path: Path) -> dict[str, StoredTensor]:
    with open_safetensors(path) as handle:
        stored: dict[str, StoredTensor] = {}
        try:
            for name in handle.keys():  # noqa: SIM118 - a reader, not a dict
                view = handle.get_slice(name)
                stored[name] = StoredTensor(path, tuple(view.get_shape()), str(view.get_dtype()))
        except Exception as error:
            raise ModelLoadError(_damage(path, error)) from error
    return stored


def _scan_shards(folder: Path) -> dict[str, StoredTensor]:
    """Read all shards that the index names, and hold the index to what they say."""
    weight_map = _read_weight_map(folder / INDEX_FILE)
    absent = sorted({file for file in weight_map.values() if not is_file(folder / file)})
    if absent:
        raise ModelLoadError(
            f"{folder} lacks {len(absent)} shard(s) of {INDEX_FILE}: {some_names(absent)}"
        )
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        for name, tensor in _scan_file(folder / file).items():
            shown = printable(name)
            if name in stored:
                first = stored[name].file.name
                raise ModelLoadError(f"tensor '{shown}' is in two shards: {first} and {file}")
            if name in weight_map and weight_map[name] != file:
                raise ModelLoadError(
                    f"tensor '{shown}' is in {file}, but {INDEX_FILE} puts it in {weight_map[name]}"
                )
            if name not in weight_map:
                raise ModelLoadError(
                    f"tensor '{shown}' is in {file}, but {INDEX_FILE} does not name it"
                )
            stored[name] = tensor
    lost = [name for name in weight_map if name not in stored]
    if lost:
        raise ModelLoadError(
            f"{len(lost)} tensor(s) of {INDEX_FILE} are not in their shards: {some_names(lost)}"
        )
    return stored


def _read_weight_map(path: Path) -> Mapping[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(
            f"{path} must have a weight_map: an object of tensor names and file names"
        )
    for name, file in weight_map.items():
        # Lexical on purpose: a hub cache is made of links that leave the folder, which is fine.
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        shown = printable(name)
        if not parts or ".." in parts or parts[0] == "/" or "\\" in file or ":" in parts[0]:
            raise ModelLoadError(
                f"{path}: tensor '{shown}' is in {file!r}, which is no file of the folder"
            )
        if not file.endswith(".safetensors"):
            raise ModelLoadError(
                f"{path}: tensor '{shown}' is in {file!r}, which is no safetensors file"
            )
    return weight_map


def _damage(path: Path, error: BaseException) -> str:
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return (
                    f"{path} is a Git LFS pointer, not the weights: fetch them with 'git lfs pull'"
                )
    except OSError as unreadable:
        return f"{path} cannot be read: {unreadable.strerror}"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{path} is damaged or not a safetensors file ({reason[:200]}): fetch it again"
