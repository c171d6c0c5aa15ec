"""Whether a preset was made for a run, and if not, what of it can still be believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from looped_spec.presets.preset import Preset

TOLD_APART_BY = ("device_name", "dtype", "num_threads", "revision")
"""Fields that may differ, the gravest first; others must not, or the preset is of no use."""

_OF_COST = ("device_name", "dtype", "num_threads")
_OF_ACCEPTANCE = ("dtype", "revision")


@dataclass(frozen=True)
class RunIdentity:
    """What a run is, as far as presets are told apart by it.

    Attributes:
        model: hub id, `demo:<name>`, or the name of the local folder.
        adapter: name of the adapter.
        device_name: as `Preset.device_name`.
        dtype: as `Preset.dtype`.
        full_loops: D.
        revision: commit of the hub model; None where it cannot be known, as of a local folder.
        adapter_options: options given to the adapter that are not its defaults.
        num_threads: CPU threads of the run; None on a GPU.
    """

    model: str
    adapter: str
    device_name: str
    dtype: str
    full_loops: int
    revision: str | None = None
    adapter_options: Mapping[str, Any] = field(default_factory=dict)
    num_threads: int | None = None


@dataclass(frozen=True)
class Match:
    """How a preset fits a run.

    Attributes:
        obstacle: why it cannot be used at all, or None.
        differences: what else is not as in the run, by name of the field, as sentences.
    """

    obstacle: str | None
    differences: Mapping[str, str]

    @property
    def is_exact(self) -> bool:
        """Whether all that can be compared is the same."""
        return self.obstacle is None and not self.differences

    @property
    def cost_doubt(self) -> str | None:
        """Why its round times are no more than a prior, or None."""
        return self._doubt(_OF_COST)

    @property
    def acceptance_doubt(self) -> str | None:
        """Why what it says of acceptance is believed less, or None."""
        return self._doubt(_OF_ACCEPTANCE)

    @property
    def cost_is_useless(self) -> bool:
        """Whether its times belong to another device in another dtype: then the sizes of the model
        tell more of this one."""
        return {"device_name", "dtype"} <= set(self.differences)

    def _doubt(self, names: tuple[str, ...]) -> str | None:
        return "; ".join(self.differences[n] for n in names if n in self.differences) or None


def compare(preset: Preset, run: RunIdentity) -> Match:
    """Compare a preset with a run, field by field."""
    obstacle = None
    if not same_model(preset.model, run.model):
        obstacle = _differs("model", run.model, preset.model)
    for name in ("adapter", "full_loops"):
        if obstacle is None and getattr(preset, name) != getattr(run, name):
            obstacle = _differs(name, getattr(run, name), getattr(preset, name))
    if obstacle is None and dict(preset.adapter_options) != dict(run.adapter_options):
        obstacle = _differs(
            "adapter_options", dict(run.adapter_options), dict(preset.adapter_options)
        )
    mine: dict[str, object] = {
        "device_name": preset.device_name,
        "dtype": preset.dtype,
        "num_threads": num_threads(preset) if run.num_threads is not None else None,
        "revision": preset.revision,
    }
    differences = {}
    for name in TOLD_APART_BY:
        theirs = getattr(run, name)
        if mine[name] is not None and _plain(mine[name]) != _plain(theirs):
            differences[name] = _differs(name, theirs, mine[name])
    return Match(obstacle, differences)


def same_model(one: str, other: str) -> bool:
    """Whether two names can be of one model: hub ids are compared whole, a folder's name with the
    last part of a hub id."""
    if one == other:
        return True
    if ("/" in one and "/" in other) or ":" in one or ":" in other:
        return False
    return one.rsplit("/", 1)[-1] == other.rsplit("/", 1)[-1]


def num_threads(preset: Preset) -> int | None:
    """Return the CPU threads that its times were measured with, if it says so."""
    text = dict(preset.cost.fingerprint).get("num_threads")
    if text is None:
        text = preset.provenance["cost"].versions.get("num_threads")
    return int(text) if text is not None and text.isdecimal() else None


def _plain(value: object) -> object:
    """Return a text with single blanks: drivers and files differ in them."""
    return " ".join(value.split()) if isinstance(value, str) else value


def _differs(name: str, theirs: object, mine: object) -> str:
    if theirs is None:
        return f"{name} of the run is not known, the preset's is '{mine}'"
    return f"{name} is '{theirs}', the preset's '{mine}'"
