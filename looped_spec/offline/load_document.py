"""The document of a load benchmark: what it was measured with, and going on with an earlier one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from looped_spec.control.config import AdaptiveSpecConfig
from looped_spec.errors import ConfigError, check_int, reject_unknown
from looped_spec.version import __version__

if TYPE_CHECKING:
    from looped_spec.presets.lookup import PresetChoice
    from looped_spec.runtime.llm import LLM

SCHEMA_VERSION = 1
KIND = "load"
_KEYS = ("schema_version", "kind", "settings", "sessions", "scenarios")
_SCENARIO_KEYS = ("group", "mixture", "profile", "drains", "policies", "runs", "results")


def settings_of(
    llm: LLM,
    *,
    config: AdaptiveSpecConfig | None,
    workloads: Mapping[str, Mapping[str, Any]],
    input_tokens: int,
    output_tokens: int,
    temperature: float,
    interleave_ms: float | None,
) -> dict[str, Any]:
    """Return everything that two runs must have in common to be compared.

    `config` is what adaptive ways choose from, `workloads` the provenance of each text by name,
    `interleave_ms` the length of the turns of ways that run beside each other. No folder is in it.
    """
    opts, loaded = llm.options, llm.loaded
    return {
        "model": loaded.name,
        "revision": loaded.origin.revision,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "full_loops": llm.full_loops,
        "load_format": opts.load_format,
        "adapter_options": dict(opts.adapter_options or {}),
        "max_num_seqs": opts.max_num_seqs,
        "attention_backend": opts.attention_backend,
        "num_threads": opts.num_threads,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "temperature": temperature,
        "interleave_ms": interleave_ms,
        "seed": opts.seed,
        "preset": _preset(llm.preset),
        "configuration": None if config is None else _hash(config.to_json()),
        "looped_spec": __version__,
        "workloads": {
            name: {key: work[key] for key in ("file", "sha256")} for name, work in workloads.items()
        },
    }


def load_document(
    settings: Mapping[str, Any],
    sessions: Sequence[Mapping[str, Any]],
    scenarios: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the document; `sessions` say with which command, when and on what it was measured."""
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "settings": dict(settings),
        "sessions": list(sessions),
        "scenarios": list(scenarios),
    }


def read_load_document(document: Any, source: str) -> dict[str, Any]:
    """Return a document of `bench load` if it is one.

    Raises:
        ConfigError: it is something else; `source` says in the message what it came from.
    """
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise ConfigError(f"'{source}' is no result of 'bench load': its kind is not '{KIND}'")
    reject_unknown(document, _KEYS, f"key of '{source}'")
    check_int(f"schema_version of '{source}'", document.get("schema_version"), 1, SCHEMA_VERSION)
    scenarios = document.get("scenarios")
    if (
        not isinstance(document.get("settings"), dict)
        or not isinstance(document.get("sessions"), list)
        or not isinstance(scenarios, list)
        or not all(isinstance(s, dict) and set(_SCENARIO_KEYS) <= s.keys() for s in scenarios)
    ):
        raise ConfigError(f"'{source}' is no whole result of 'bench load'")
    return document


def check_same_settings(before: Mapping[str, Any], now: Mapping[str, Any], source: str) -> None:
    """Raise `ConfigError` with the first setting in which a file differs from this call."""
    for name in sorted({*before, *now}):
        if _plain(before.get(name)) != _plain(now.get(name)):
            raise ConfigError(
                f"'{source}' cannot be resumed: its {name} is {_shown(before.get(name))}, this "
                f"call's is {_shown(now.get(name))}; give another file"
            )


def check_same_scenario(before: Mapping[str, Any], now: Mapping[str, Any], source: str) -> None:
    """Raise `ConfigError` if a scenario of the same name was measured with something else."""
    for name in now:
        if _plain(before.get(name)) != _plain(now[name]):
            raise ConfigError(
                f"'{source}' cannot be resumed: {name} of {now['mixture']}, {now['profile']} is "
                f"{_shown(before.get(name))} there, {_shown(now[name])} now; give another file"
            )


def _preset(choice: PresetChoice) -> dict[str, Any] | None:
    """Return which preset was taken and whether it is of this very model and device."""
    if choice.preset is None:
        return None
    taken = choice.as_dict()
    return {
        "file": choice.preset.file_name,
        "exact": taken["exact"],
        "differences": taken["differences"],
    }


def _plain(value: Any) -> Any:
    """Return what a value is in a file."""
    return json.loads(json.dumps(value))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _hash(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
