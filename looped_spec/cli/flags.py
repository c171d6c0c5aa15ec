"""A command-line flag from the field of a dataclass of options."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

_CONVERTERS = {"int": int, "float": float, "str": str}
_MANY = {"tuple[str, ...]": (str, "NAME"), "tuple[int, ...]": (int, "N")}


def add_flag(group: argparse._ArgumentGroup, field: dataclasses.Field[Any], help_text: str) -> None:
    """Add the flag of an option: its name with dashes, its default and its type are the field's.

    A bool that is False becomes a switch, a tuple a flag that takes several.
    """
    flag = f"--{field.name.replace('_', '-')}"
    text = help_text.replace("%", "%%")
    kind = str(field.type).removesuffix(" | None")
    if kind == "bool" and field.default is False:
        group.add_argument(flag, action="store_true", default=field.default, help=text)
        return
    if kind in _MANY:
        convert, name = _MANY[kind]
        group.add_argument(
            flag,
            action=_Several,
            nargs="+",
            type=convert,
            default=field.default,
            metavar=name,
            help=text,
        )
        return
    if kind not in _CONVERTERS:
        raise TypeError(f"option {field.name} has type {field.type}, which no flag can be made of")
    if field.default is not None:
        text = f"{text} (default: {field.default})"
    group.add_argument(
        flag,
        type=_CONVERTERS[kind],
        default=field.default,
        metavar={"int": "N", "float": "X"}.get(kind, "NAME"),
        help=text,
    )


class _Several(argparse.Action):
    """Keeps the values of a flag as a tuple, like the field."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values))
