"""Flags that are made of the fields of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from looped_spec.cli.flags import add_flag


def parse(kind: str, default: Any, *arguments: str) -> Any:
    """Parse arguments by a flag of one field, `some_thing`."""
    made = dataclasses.make_dataclass(
        "Options", [("some_thing", kind, dataclasses.field(default=default))]
    )
    parser = argparse.ArgumentParser()
    add_flag(parser.add_argument_group(), dataclasses.fields(made)[0], "100% sure")
    assert "100% sure" in parser.format_help()
    return parser.parse_args(list(arguments)).some_thing


@pytest.mark.parametrize(
    ("kind", "default", "arguments", "value"),
    [
        ("int", 3, (), 3),
        ("int", 3, ("--some-thing", "4"), 4),
        ("int | None", None, ("--some-thing", "4"), 4),
        ("float", 0.5, ("--some-thing", "2"), 2.0),
        ("str | None", None, ("--some-thing", "x"), "x"),
        ("bool", False, (), False),
        ("bool", False, ("--some-thing",), True),
        ("tuple[str, ...]", (), (), ()),
        ("tuple[str, ...]", (), ("--some-thing", "a", "b"), ("a", "b")),
    ],
)
def test_a_flag_gives_what_its_field_holds(
    kind: str, default: Any, arguments: tuple[str, ...], value: Any
) -> None:
    got = parse(kind, default, *arguments)
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(("kind", "default"), [("bool", True), ("bool | None", None), ("Path", "")])
def test_a_field_that_no_flag_can_be_made_of_is_noticed(kind: str, default: Any) -> None:
    with pytest.raises(TypeError, match="option some_thing has type"):
        parse(kind, default)
