"""Every mistake that a user can make ends as one of these."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from typing import TypeGuard


class LoopedSpecError(Exception):
    """Base of all errors that the user can mend; its text is one line that says how."""


class ConfigError(LoopedSpecError, ValueError):
    """An argument, option or configuration value is out of its range or unknown."""


class PluginError(LoopedSpecError):
    """A plugin is missing, broken, or in conflict with another."""


class ModelLoadError(LoopedSpecError):
    """A checkpoint cannot be read, or does not fit its adapter."""


class UnsupportedError(LoopedSpecError):
    """The model or the combination of features is known and deliberately not supported."""


class CapacityError(LoopedSpecError):
    """A request cannot ever fit the memory or the length that the engine was given."""


class NotFiniteError(LoopedSpecError):
    """The model computed NaN or infinity where a token was to be chosen."""


def closest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word nearest to `word`, or an empty string."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{match[0]}'?)" if match else ""


def reject_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise `ConfigError` for the first of `given` that is not in `known`."""
    names = list(known)
    for name in given:
        if name not in names:
            raise ConfigError(f"unknown {what} '{name}'{closest(name, names)}")


def check_int(name: str, value: object, low: int | None = None, high: int | None = None) -> None:
    """Raise `ConfigError` with name, value and range unless `value` is an integer in it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an integer, got {value!r:.60}")
    below = low is not None and value < low
    if below or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        shown = value if value.bit_length() < 200 else f"a number of {value.bit_length()} bits"
        raise ConfigError(f"{name} must be {bound}, got {shown}")


def is_number(value: object) -> TypeGuard[int | float]:
    """Tell whether a value is a finite number that fits a float; true and false are none."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -sys.float_info.max <= value <= sys.float_info.max
    )


def check_number(name: str, value: object, low: float) -> None:
    """Raise `ConfigError` with name and value unless `value` is a finite number from `low` up."""
    if not is_number(value) or value < low:
        shown = shown_number(value)
        raise ConfigError(f"{name} must be a finite number of at least {low:g}, got {shown}")


def shown_number(value: object) -> str:
    """Return what a wrong value is called in a message: never hundreds of digits."""
    if isinstance(value, int) and value.bit_length() >= 200:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.60}"
