"""What argparse says, said as all the rest is: a mistake is one line, the help goes to stdout."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from looped_spec.cli import console
from looped_spec.errors import ConfigError, closest

_FLAG = re.compile(r"--[a-z][a-z-]*")
_UNKNOWN = "unrecognized arguments: "


def use_one_line_errors(parser: argparse.ArgumentParser) -> None:
    """Make `parser` raise `ConfigError` with one line where it would print its usage and exit.

    Help and version are written like any other output, so that a failure to do so is noticed.
    """

    def error(message: str) -> NoReturn:
        text = message
        if message.startswith(_UNKNOWN):
            text = _unknown(parser, message.removeprefix(_UNKNOWN).split())
        elif message.startswith("the following arguments are required"):
            text = f"{message}; positional arguments come first, before any flag"
        raise ConfigError(f"{text}; see '{parser.prog} --help'")

    def write(message: str, file: object = None) -> None:
        console.write(message, is_trusted=True)

    parser.error = error  # type: ignore[method-assign]
    parser._print_message = write  # type: ignore[method-assign]


def _unknown(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Say which argument is not known, with the flag that is spelled most like it."""
    flags = [word for word in words if word.startswith("-")]
    if not flags:
        return f"unexpected argument '{words[0]}': quote a text that has blanks"
    flag = flags[0].split("=")[0]
    return f"unknown flag '{flag}'{closest(flag, _FLAG.findall(parser.format_help()))}"
