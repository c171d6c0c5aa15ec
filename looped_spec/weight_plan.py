"""Which checkpoint tensor fills which rows of which parameter, checked before allocation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from looped_spec.adapter import ModelAdapter
from looped_spec.checkpoint import StoredTensor, some_names
from looped_spec.errors import ModelLoadError, PluginError


@dataclass(frozen=True)
class Part:
    """Rows `start` to `stop` of a parameter, and the checkpoint tensor that they come from."""

    tensor: str
    start: int | None
    stop: int | None


def plan_weights(
    adapter: ModelAdapter, stored: dict[str, StoredTensor], folder: Path
) -> dict[str, list[Part]]:
    """Check a checkpoint against the adapter, and say which tensors fill each parameter.

    Returns one list per name of `adapter.module`; a list is empty only for a name that is tied to a
    filled one. `stored` is what `scan_checkpoint` found in `folder`.
    """
    refuse_buffers(adapter)
    layout = adapter.checkpoint_layout()
    optional = adapter.optional_checkpoint_tensors()
    parameters = dict(adapter.module.named_parameters(remove_duplicate=False))
    parts: dict[str, list[Part]] = {name: [] for name in parameters}
    missing, misshapen, not_float = [], [], []
    for name, target in layout.items():
        parameter = parameters.get(target.parameter)
        if parameter is None:
            raise PluginError(
                f"checkpoint_layout of {type(adapter).__name__} sends tensor '{name}' to "
                f"'{target.parameter}', which its module does not have"
            )
        if name not in stored:
            if name not in optional:
                missing.append(name)
            continue
        part = Part(name, target.start, target.stop)
        shape, expected = stored[name].shape, _part_shape(parameter, part, adapter)
        if shape != expected:
            misshapen.append(f"{name} (expected {list(expected)}, found {list(shape)})")
        if not stored[name].is_float:
            not_float.append(f"{name} ({stored[name].dtype})")
        parts[target.parameter].append(part)
    unexpected = sorted(name for name in stored if name not in layout and name not in optional)
    problems = [
        f"{len(names)} {what}: {some_names(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", misshapen),
            ("not plain floating point", not_float),
        )
        if names
    ]
    if problems:
        raise ModelLoadError(
            f"the checkpoint in {folder} does not fit {type(adapter).__name__}; "
            f"tensors {'; '.join(problems)}"
        )
    _check_coverage(adapter, parts, folder)
    return parts


def _part_shape(parameter: Tensor, part: Part, adapter: ModelAdapter) -> tuple[int, ...]:
    """Return the shape that the tensor of `part` must have; blame the adapter for odd rows."""
    if part.start is None and part.stop is None:
        return tuple(parameter.shape)
    rows = parameter.shape[0] if parameter.ndim else 0
    start, stop = part.start or 0, rows if part.stop is None else part.stop
    if not 0 <= start < stop <= rows:
        raise PluginError(
            f"checkpoint_layout of {type(adapter).__name__} sends tensor '{part.tensor}' to rows "
            f"{start} to {stop} of a parameter of shape {list(parameter.shape)}"
        )
    return (stop - start, *parameter.shape[1:])


def _check_coverage(adapter: ModelAdapter, parts: dict[str, list[Part]], folder: Path) -> None:
    """Make sure that every row of every parameter is filled exactly once."""
    for names in tied_names(adapter.module):
        sources = [name for name in names if parts[name]]
        if not sources:
            raise ModelLoadError(
                f"parameter '{names[0]}' of {type(adapter).__name__} has no tensor in {folder}"
            )
        for name in sources:
            shape = adapter.module.get_parameter(name).shape
            rows, reached = shape[0] if shape else 1, 0
            for part in sorted(parts[name], key=lambda part: part.start or 0):
                if (part.start or 0) != reached:
                    break
                reached = rows if part.stop is None else part.stop
            else:
                if reached == rows:
                    continue
            raise PluginError(
                f"checkpoint_layout of {type(adapter).__name__} does not fill the {rows} rows of "
                f"parameter '{name}' exactly once with the tensors of this checkpoint"
            )


def refuse_buffers(adapter: ModelAdapter) -> None:
    """Refuse a module with buffers: built on the meta device, they would silently stay empty."""
    buffers = [name for name, _ in adapter.module.named_buffers()]
    if buffers:
        raise PluginError(
            f"the module of {type(adapter).__name__} has buffers ({some_names(buffers)}): compute "
            "what is not loaded from the config, in plain attributes made on first use"
        )


def tied_names(module: nn.Module) -> list[list[str]]:
    """Group the parameter names of `module`: names that share one parameter come together."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())
