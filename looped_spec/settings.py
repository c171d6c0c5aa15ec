"""The environment variables: the only place that reads them, and the table of what they mean."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from looped_spec.errors import ConfigError

API_KEY = "LOOPED_SPEC_API_KEY"
PLUGINS = "LOOPED_SPEC_PLUGINS"
PRESET_DIR = "LOOPED_SPEC_PRESET_DIR"
STRICT_PLUGINS = "LOOPED_SPEC_STRICT_PLUGINS"

VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        API_KEY: "The key that clients of `looped-spec serve` must send; --api-key goes before it.",
        PLUGINS: "Adapters to enable, separated by commas. Unset enables all, empty enables none.",
        PRESET_DIR: "A folder of presets, looked into before those that adapters bring.",
        STRICT_PLUGINS: "1 stops at a broken plugin with its trace; 0 only reports it.",
    }
)
"""Every variable and its meaning, for `--help` and the documentation."""


@dataclass(frozen=True)
class Settings:
    """What the environment says, read once and then passed on.

    Attributes:
        plugins: names of the enabled adapters; None means all of them, an empty tuple none.
        strict_plugins: stop at a broken plugin, of those enabled, and show its trace.
        api_key: the key that clients of a server must send; None and an empty text ask for none.
        preset_dir: folder of presets, or None.
    """

    plugins: tuple[str, ...] | None = None
    strict_plugins: bool = False
    api_key: str | None = field(default=None, repr=False)
    preset_dir: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables from `environ`, by default from that of this process."""
        environ = os.environ if environ is None else environ
        plugins = environ.get(PLUGINS)
        return cls(
            plugins=None if plugins is None else _names(plugins),
            strict_plugins=_flag(STRICT_PLUGINS, environ.get(STRICT_PLUGINS, "")),
            api_key=environ.get(API_KEY) or None,
            preset_dir=environ.get(PRESET_DIR) or None,
        )


def c_compiler() -> str:
    """Return the command that `CC` names, as other programs read it; empty where it is not set."""
    return os.environ.get("CC", "")


def cache_folder() -> Path:
    """Return where programs of this user keep what they can make again: `XDG_CACHE_HOME`, else
    `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _names(text: str) -> tuple[str, ...]:
    """Split a comma list, without blanks and empty items."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _flag(variable: str, text: str) -> bool:
    """Read 1 as true, 0 or nothing as false, and refuse the rest."""
    if text not in ("", "0", "1"):
        raise ConfigError(f"{variable} must be 0 or 1, got '{text}'")
    return text == "1"
