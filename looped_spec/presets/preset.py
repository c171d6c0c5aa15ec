"""`Preset`: what to run for a model on a device, what that was concluded from, and its file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from looped_spec.atomic_json import without_repeats, write_json
from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.control.cost import CostTable
from looped_spec.errors import ConfigError, check_int
from looped_spec.presets.fields import as_list, as_object, check_one_of, check_text, values_of
from looped_spec.presets.parts import AcceptanceEntry, Provenance

SCHEMA_VERSION = 1
DTYPES = ("bfloat16", "float16", "float32")
PARTS = ("config", "cost", "acceptance")
"""The parts of a preset that each have a provenance."""

MAX_FILE_BYTES = 64 * 2**20
"""Larger than any preset: what is given by mistake is not read into memory."""


@dataclass(frozen=True)
class Preset:
    """What to run for a model on a device, and what that was concluded from.

    Attributes:
        model: hub id, or `demo:<name>` for a bundled demo.
        adapter: name of its adapter.
        device_name: what the driver calls the GPU, or the processor's name.
        dtype: of the parameters, one of `DTYPES`.
        full_loops: D that all of it was made for.
        config: buckets, policy and settings; its own `cost` is None.
        cost: round times in ms; its fingerprint may say more of what they depend on:
            `num_threads`, `cpu_linear`, `cpu_kernels`, `graph_backend`, `fused` and
            `attention_backend` are compared with a run's.
        acceptance: per workload and draft depth; may be empty.
        provenance: one record for each of `PARTS`.
        revision: commit of the hub model, or whatever tells the weights apart; None: any.
        adapter_options: options of the adapter that it was made with; those that are missing had
            their defaults.
    """

    model: str
    adapter: str
    device_name: str
    dtype: str
    full_loops: int
    config: AdaptiveSpecConfig
    cost: CostTable
    acceptance: tuple[AcceptanceEntry, ...]
    provenance: Mapping[str, Provenance]
    revision: str | None = None
    adapter_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "device_name"):
            check_text(f"{name} of a preset", getattr(self, name))
        check_text("revision of a preset", self.revision, optional=True)
        if not isinstance(self.adapter, str) or not re.fullmatch(r"[a-z0-9_]+", self.adapter):
            raise ConfigError(f"adapter of a preset must match [a-z0-9_]+, got {self.adapter!r}")
        check_one_of("dtype of a preset", self.dtype, DTYPES)
        check_int("full_loops of a preset", self.full_loops, 1)
        if self.config.full_loops != self.full_loops:
            raise ConfigError(
                f"full_loops of a preset is {self.full_loops}, that of its config is "
                f"{self.config.full_loops}"
            )
        if self.config.cost is not None:
            raise ConfigError("cost of a preset's config must be null: the preset has its own")
        for candidate in self.cost.candidates:
            candidate.check(self.full_loops)
        told = dict(self.cost.fingerprint)
        for name in ("model", "full_loops", "dtype"):
            mine = str(getattr(self, name))
            if told.get(name, mine) != mine:
                raise ConfigError(
                    f"{name} of a preset is '{mine}', that of its cost's fingerprint "
                    f"'{told[name]:.80}'"
                )
        object.__setattr__(self, "acceptance", tuple(self.acceptance))
        self._check_acceptance()
        provenance = as_object(self.provenance, "provenance of a preset")
        if sorted(provenance) != sorted(PARTS):
            raise ConfigError(
                f"provenance of a preset must be of {', '.join(PARTS)}, got "
                f"{', '.join(map(str, provenance)) or 'nothing'}"
            )
        options = as_object(self.adapter_options, "adapter_options of a preset")
        object.__setattr__(self, "provenance", dict(provenance))
        object.__setattr__(self, "adapter_options", dict(options))

    def _check_acceptance(self) -> None:
        seen = set()
        for entry in self.acceptance:
            check_int("draft_loops of acceptance", entry.draft_loops, 1, self.full_loops - 1)
            key = (entry.workload, entry.group, entry.draft_loops)
            if key in seen:
                raise ConfigError(
                    f"acceptance has workload '{entry.workload}', group {entry.group}, "
                    f"draft_loops {entry.draft_loops} twice"
                )
            seen.add(key)

    @property
    def file_name(self) -> str:
        """What its file is called: `model=<name>,device_name=<name>,dtype=<dtype>.json`."""
        return preset_file_name(self.model, self.device_name, self.dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the preset as a JSON document; settings of the configuration that have their
        defaults are left out of it, so that they follow the defaults of later versions."""
        document: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return document | {
            "schema_version": SCHEMA_VERSION,
            "config": _config_document(self.config),
            "cost": self.cost.to_json(),
            "acceptance": [entry.to_json() for entry in self.acceptance],
            "provenance": {part: self.provenance[part].to_json() for part in PARTS},
            "adapter_options": dict(self.adapter_options),
        }

    @classmethod
    def from_json(cls, document: Any) -> Preset:
        """Read what `to_json` wrote; an unknown key is an error that names the closest."""
        document = dict(as_object(document, "a preset"))
        if "schema_version" not in document:
            raise ConfigError("a preset needs schema_version")
        version = document.pop("schema_version")
        if isinstance(version, bool) or version != SCHEMA_VERSION:
            raise ConfigError(
                f"schema_version of a preset must be {SCHEMA_VERSION}, got {version!r:.40}"
            )
        values = values_of(cls, document, "a preset")
        values["config"] = AdaptiveSpecConfig.from_json(values["config"])
        values["cost"] = CostTable.from_json(values["cost"])
        entries = as_list(values["acceptance"], "acceptance of a preset")
        values["acceptance"] = tuple(AcceptanceEntry.from_json(entry) for entry in entries)
        records = as_object(values["provenance"], "provenance of a preset")
        values["provenance"] = {part: Provenance.from_json(one) for part, one in records.items()}
        return cls(**values)

    def write(self, path: str | Path) -> None:
        """Write the preset so that the file is never there in part, whatever happens meanwhile."""
        write_json(Path(path), self.to_json())

    @classmethod
    def read(cls, path: str | Path) -> Preset:
        """Read a preset file; what is wrong with it is a `ConfigError` that names the file."""
        document = read_json(path, "preset")
        try:
            return cls.from_json(document)
        except ConfigError as error:
            raise ConfigError(f"preset '{path}': {error}") from error


def _config_document(config: AdaptiveSpecConfig) -> dict[str, Any]:
    usual = AdaptiveSpecConfig(config.full_loops, config.buckets).to_json()
    document = config.to_json()
    goodput, defaults = document["goodput"], usual["goodput"]
    document["goodput"] = {k: v for k, v in goodput.items() if v != defaults[k]}
    usual["goodput"] = {}
    always = ("schema_version", "full_loops", "buckets", "policy")
    return {k: v for k, v in document.items() if k in always or v != usual[k]}


def preset_file_name(model: str, device_name: str, dtype: str) -> str:
    """Return what the preset of a model on a device is called.

    Of a hub id the last part counts, as in vLLM's tuned configurations.
    """
    name = word_of_file_name(model)
    return f"model={name},device_name={_cleaned(device_name)},dtype={dtype}.json"


def word_of_file_name(model: str) -> str:
    """Return what a model is called in a file's name: what is not a letter, a digit or one of
    `-.+` becomes `_`, so that the file can be on any system."""
    return _cleaned(model.rstrip("/").rsplit("/", 1)[-1])


def read_json(path: str | Path, what: str) -> Any:
    """Return the JSON document of a file; raise `ConfigError` with the path if there is none."""
    file = Path(path)
    try:
        if file.is_dir():
            raise ConfigError(f"{what} '{path}' is a folder: give a file of it")
        with file.open("rb") as opened:
            data = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {what} '{path}': {error.strerror}") from error
    except ValueError as error:  # a name that holds a zero byte
        raise ConfigError(f"cannot read {what} {str(path)!r}: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{what} '{path}' is larger than {MAX_FILE_BYTES // 2**20} MiB")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=without_repeats)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} '{path}' is no UTF-8 text") from error
    except ValueError as error:
        raise ConfigError(f"{what} '{path}' is no JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{what} '{path}' is nested too deeply") from error


def _cleaned(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]", "_", name)
