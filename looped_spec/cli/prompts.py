"""Prompts from the command line, from a file or from stdin, with errors that name the place."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from looped_spec.cli.generation import Prompt
from looped_spec.errors import ConfigError, reject_unknown

STDIN = "-"
_MAX_BYTES = 64 * 2**20
_IDS_FORM = '{"prompt_token_ids": [ID, ...]}'
_HOW = (
    "give --prompt TEXT, or --prompt-file FILE (one prompt per line), or '--prompt-file -' to read "
    "lines from stdin"
)


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--prompt` and `--prompt-file`."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompt",
        action="extend",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="one or more prompts; may be repeated; --prompt=TEXT if it starts with a dash",
    )
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="more prompts, one per line (blank lines do not count), or one object "
        '{"prompt": TEXT} or {"prompt_token_ids": [ID, ...]} per line if FILE ends in .jsonl; '
        "- reads lines from stdin",
    )


def read_prompts(args: argparse.Namespace) -> list[tuple[str, Prompt]]:
    """Return the prompts of `--prompt`, then those of `--prompt-file`; there is at least one.

    Before each prompt stands the place that it comes from, for messages.

    Raises `ConfigError` for anything that is no prompt, or if there is none.
    """
    prompts: list[tuple[str, Prompt]] = []
    for number, prompt in enumerate(args.prompt, start=1):
        where = f"--prompt number {number}"
        prompts.append((where, _checked(prompt, where)))
    if args.prompt_file is not None:
        prompts += _read_file(args.prompt_file)
    if not prompts:
        raise ConfigError(f"there is no prompt: {_HOW}")
    return prompts


def check_prompts(
    prompts: Sequence[tuple[str, Prompt]], vocab_size: int, has_tokenizer: bool
) -> None:
    """Raise `ConfigError` with the place of the first prompt that a model cannot take."""
    for where, prompt in prompts:
        if isinstance(prompt, str):
            if not has_tokenizer:
                raise ConfigError(
                    f"{where} is a text, and the model has no tokenizer files: give a .jsonl file "
                    f"with {_IDS_FORM} lines"
                )
        elif max(prompt) >= vocab_size:
            raise ConfigError(
                f"{where}: token id must be between 0 and {vocab_size - 1}, got {max(prompt)}"
            )


def _read_file(name: str) -> list[tuple[str, Prompt]]:
    shown = "stdin" if name == STDIN else f"prompt file '{name}'"
    data = _read_bytes(name, shown)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{shown} is not UTF-8 text (line {number}): convert it to UTF-8"
        ) from error
    is_jsonl = name.lower().endswith(".jsonl")
    prompts: list[tuple[str, Prompt]] = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if line.strip():
            where = f"{shown}, line {number}"
            prompts.append((where, _from_json(line, where) if is_jsonl else _checked(line, where)))
    if not prompts:
        raise ConfigError(f"{shown} holds no prompt: every line is blank")
    return prompts


def _read_bytes(name: str, shown: str) -> bytes:
    """Read all of a file or of stdin, which may have no end: no more than `_MAX_BYTES`."""
    if name != STDIN:
        try:
            with Path(name).open("rb") as file:
                return _no_more_than_allowed(file, shown)
        except OSError as error:
            raise ConfigError(f"{shown} cannot be read: {error.strerror}") from error
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError(f"stdin holds no prompts (nothing is piped into it): {_HOW}")
    try:
        return _no_more_than_allowed(sys.stdin.buffer, shown)
    except OSError as error:
        raise ConfigError(f"stdin cannot be read: {error.strerror}") from error


def _no_more_than_allowed(file: BinaryIO, shown: str) -> bytes:
    data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{shown} is longer than {_MAX_BYTES // 2**20} MiB: split the prompts")
    return data


def _from_json(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for a huge number
        reason = getattr(error, "msg", "nested too deeply, or a number too long")
        raise ConfigError(f"{where} is not valid JSON: {reason}") from error
    form = f'{where} must be an object {{"prompt": TEXT}} or {_IDS_FORM}'
    if not isinstance(record, dict):
        raise ConfigError(form)
    reject_unknown(record, ["prompt", "prompt_token_ids"], f"key in {where}:")
    if len(record) != 1:
        raise ConfigError(form)
    if "prompt" in record:
        if not isinstance(record["prompt"], str):
            raise ConfigError(form)
        return _checked(record["prompt"], where)
    ids = record["prompt_token_ids"]
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise ConfigError(form)
    if not ids:
        raise ConfigError(f"{where} is empty: a prompt needs at least one token")
    if min(ids) < 0:
        raise ConfigError(f"{where}: token id must be at least 0, got {min(ids)}")
    return ids


def _checked(text: str, where: str) -> str:
    """Return a prompt that can be encoded; half a character comes from a damaged argument."""
    if not text:
        raise ConfigError(f"{where} is empty: a prompt needs at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} is not valid Unicode text") from error
    return text
