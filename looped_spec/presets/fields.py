"""Reading and checking the values of a JSON object, with errors that name the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from looped_spec.errors import ConfigError, reject_unknown


def as_object(document: Any, what: str) -> Mapping[str, Any]:
    """Return a document that is a JSON object; `what` says of which thing it is one."""
    if not isinstance(document, Mapping):
        raise ConfigError(f"{what} must be a JSON object, got {document!r:.60}")
    return document


def as_list(document: Any, what: str) -> list[Any]:
    """Return a document that is a list."""
    if not isinstance(document, list | tuple):
        raise ConfigError(f"{what} must be a list, got {document!r:.60}")
    return list(document)


def values_of(cls: type, document: Any, what: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields from a JSON object.

    A key that is no field is an error, and so is a field without a default that is missing.
    """
    values = dict(as_object(document, what))
    known = dataclasses.fields(cls)
    reject_unknown(values, [field.name for field in known], f"key of {what}")
    for field in known:
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if field.name not in values and not has_default:
            raise ConfigError(f"{what} needs {field.name}")
    return values


def check_text(name: str, value: object, *, optional: bool = False) -> None:
    """Raise `ConfigError` unless a value is a text of one line that is not empty."""
    if value is None and optional:
        return
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        kind = "a text of one line or null" if optional else "a text of one line"
        raise ConfigError(f"{name} must be {kind}, got {value!r:.60}")


def check_one_of(name: str, value: object, known: tuple[str | None, ...]) -> None:
    """Raise `ConfigError` unless a value is one of those known."""
    if not any(value is word or (isinstance(value, str) and value == word) for word in known):
        names = ", ".join("null" if word is None else word for word in known)
        raise ConfigError(f"{name} must be one of {names}, got {value!r:.60}")
