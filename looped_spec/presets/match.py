"""Whether a preset was made for a run, and if not, what of it can still be believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from looped_spec.presets.preset import Preset

_OF_CUDA = ("fused", "attention_backend")
"""What the times on a GPU depend on; a preset of a CPU may leave them out."""

_OF_EXECUTION = ("num_threads", "cpu_linear", "cpu_kernels", "graph_backend", *_OF_CUDA)
TOLD_APART_BY = ("device_name", "dtype", *_OF_EXECUTION, "revision")
"""Fields that may differ, the gravest first; others must not, or the preset is of no use."""

_OF_COST = ("device_name", "dtype", *_OF_EXECUTION)
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
        adapter_options: options of the adapter that are in force, its defaults among them.
        adapter_defaults: what its options are where nobody gives them.
        num_threads: CPU threads of the run; None on a GPU.
        cpu_linear: how linear layers keep their weights; None on a GPU.
        cpu_kernels: what computes the small operations, "native" or "torch"; None on a GPU.
        graph_backend: how rounds are captured, "eager" for not at all; None is not compared.
        fused: whether fused kernels serve the run, "on" or "off"; None is not compared.
        attention_backend: which backend serves the run, never "auto"; None is not compared.
        is_cuda: whether it runs on a CUDA device.
    """

    model: str
    adapter: str
    device_name: str
    dtype: str
    full_loops: int
    revision: str | None = None
    adapter_options: Mapping[str, Any] = field(default_factory=dict)
    adapter_defaults: Mapping[str, Any] = field(default_factory=dict)
    num_threads: int | None = None
    cpu_linear: str | None = None
    cpu_kernels: str | None = None
    graph_backend: str | None = None
    fused: str | None = None
    attention_backend: str | None = None
    is_cuda: bool = False

    @property
    def execution(self) -> dict[str, str]:
        """How rounds are run, as far as it is known: what their times depend on beside the
        device."""
        found = {name: getattr(self, name) for name in _OF_EXECUTION}
        return {name: str(value) for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Match:
    """How a preset fits a run.

    Attributes:
        obstacle: why it cannot be used at all, or None.
        differences: what else is not as in the run, by name of the field, as sentences.
        unknown: what the preset's times depend on and it does not tell.
    """

    obstacle: str | None
    differences: Mapping[str, str]
    unknown: tuple[str, ...] = ()

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
    options = {**run.adapter_defaults, **preset.adapter_options}
    if obstacle is None and _canonical(options) != _canonical(run.adapter_options):
        obstacle = _differs("adapter_options", dict(run.adapter_options), options)
    told = execution(preset)
    mine: dict[str, object] = {
        "device_name": preset.device_name,
        "dtype": preset.dtype,
        "revision": preset.revision,
        **{name: told.get(name) for name in run.execution},
    }
    differences = {}
    for name in TOLD_APART_BY:
        theirs = run.execution.get(name, getattr(run, name))
        if mine.get(name) is not None and _plain(mine[name]) != _plain(theirs):
            differences[name] = _differs(name, theirs, mine[name])
    wanted = (name for name in run.execution if run.is_cuda or name not in _OF_CUDA)
    return Match(obstacle, differences, tuple(name for name in wanted if name not in told))


def same_model(one: str, other: str) -> bool:
    """Whether two names can be of one model: hub ids are compared whole, a folder's name with the
    last part of a hub id."""
    if one == other:
        return True
    if ("/" in one and "/" in other) or ":" in one or ":" in other:
        return False
    return one.rsplit("/", 1)[-1] == other.rsplit("/", 1)[-1]


def execution(preset: Preset) -> dict[str, str]:
    """Return how the rounds were run that its times are of, as far as it says so."""
    said = dict(preset.cost.fingerprint)
    if "num_threads" in preset.provenance["cost"].versions:
        said.setdefault("num_threads", preset.provenance["cost"].versions["num_threads"])
    return {name: said[name] for name in _OF_EXECUTION if name in said}


def _plain(value: object) -> object:
    """Return a text with single blanks: drivers and files differ in them."""
    return " ".join(value.split()) if isinstance(value, str) else value


def _canonical(value: Any) -> Any:
    """Return a JSON value so that `==` compares what it says: 1 is 1.0 but not true, and it does
    not matter whether a list was given as a tuple."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return (value,) if isinstance(value, bool) else value


def _differs(name: str, theirs: object, mine: object) -> str:
    if theirs is None:
        return f"{name} of the run is not known, the preset's is '{mine}'"
    return f"{name} is '{theirs}', the preset's '{mine}'"
